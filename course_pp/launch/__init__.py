"""Starting ranks: from a notebook, a shell, or Slurm. Importing this imports no torch.

`on_ranks` runs a function on real processes. `run_torchrun` runs a script as it would be typed;
``%load_ext course_pp.launch`` adds it as the magic ``%torchrun``. Where a Slurm cluster answers,
both run there with the settings of site.toml. To stay on this machine, pass ``where="local"``,
type ``%torchrun --local``, or set COURSE_PP_WHERE=local for all calls.
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
    """Add ``%torchrun``; IPython calls this for ``%load_ext course_pp.launch``."""
    ipython.register_magic_function(torchrun_magic, "line", "torchrun")
    _begin_imports(ipython)
    # The server imports torch while the learner still reads, so the first call need not wait.
    if where.certainly_here():
        SERVERS.get()


def _begin_imports(ipython: Any) -> None:
    """Enter `imports_that_stay` until this cell has run or, outside a cell, until the first begins.

    Modules that the cell imports later stay for good, so the garbage collector passes over them.
    """
    gc.collect()  # objects that are garbage by now must not stay
    imports = imports_that_stay()
    events = ("pre_execute", "post_execute")

    def end() -> None:
        imports.__exit__(None, None, None)
        for event in events:
            ipython.events.unregister(event, end)

    for event in events:
        ipython.events.register(event, end)
    imports.__enter__()
