"""Starting ranks: from a notebook, a shell, or Slurm. Importing this imports no torch.

`on_ranks` runs a function on real processes; `run_torchrun`, and the ``%torchrun`` magic that
``%load_ext course_pp.launch`` adds, run a script as it would be typed. Beside a Slurm cluster both
run there, with the settings of site.toml, unless told otherwise (``where="local"``, ``%torchrun
--local``, or COURSE_PP_WHERE=local for all).
"""

import gc
from typing import Any

from course_pp.base.imports import imports_that_stay
from course_pp.launch import where
from course_pp.launch.errors import LaunchError, RankDied, RanksHung, RankTraceback, Wait
from course_pp.launch.fork_server import SERVERS
from course_pp.launch.ranks import on_ranks
from course_pp.launch.torchrun import run_torchrun, torchrun_magic

__all__ = [
    "LaunchError",
    "RankDied",
    "RankTraceback",
    "RanksHung",
    "Wait",
    "on_ranks",
    "run_torchrun",
]


def load_ipython_extension(ipython: Any) -> None:
    """Add ``%torchrun``, and begin to import torch if ranks run here; ``%load_ext course_pp.launch`` calls this."""
    ipython.register_magic_function(torchrun_magic, "line", "torchrun")
    _begin_imports(ipython)
    if where.certainly_here():
        SERVERS.get()


def _begin_imports(ipython: Any) -> None:
    """Enter `imports_that_stay` until the cell has run or, outside one, until the first begins.

    What its cell imports after it stays, so the garbage collector passes over it.
    """
    gc.collect()  # what is garbage by now does not stay
    imports, events = imports_that_stay(), ("pre_execute", "post_execute")

    def end() -> None:
        imports.__exit__(None, None, None)
        for event in events:
            ipython.events.unregister(event, end)

    for event in events:
        ipython.events.register(event, end)
    imports.__enter__()
