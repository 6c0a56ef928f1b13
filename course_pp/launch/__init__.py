"""Starting ranks: from a notebook, a shell, or Slurm.

`on_ranks` runs a function on real processes and returns what it returned on each; `run_torchrun`, and the
``%torchrun`` magic that ``%load_ext course_pp.launch`` adds, run a script as it would be typed. Both print the
ranks' output labelled, raise when a rank fails, say who waits for whom when the time is over, and leave no
process behind. Beside a Slurm cluster both run there, with the settings of site.toml, unless told
otherwise (``where="local"``, ``%torchrun --local``, or COURSE_PP_WHERE=local for all). Importing this imports no torch.
"""

import gc
from typing import Any

from course_pp.imports import imports_that_stay
from course_pp.launch import where
from course_pp.launch.errors import LaunchError, RankDied, RanksHung, RankTraceback
from course_pp.launch.fork_server import SERVERS
from course_pp.launch.ranks import on_ranks
from course_pp.launch.torchrun import run_torchrun, torchrun_magic
from course_pp.launch.waits import Wait

__all__ = ["LaunchError", "RankDied", "RankTraceback", "RanksHung", "Wait", "on_ranks", "run_torchrun"]


def load_ipython_extension(ipython: Any) -> None:
    """Add ``%torchrun``, and begin to import torch if ranks run here; ``%load_ext course_pp.launch`` calls this.

    What its cell imports after it stays, so the garbage collector passes over it.
    """
    ipython.register_magic_function(torchrun_magic, "line", "torchrun")
    _begin_imports(ipython)
    if where.certainly_here():
        SERVERS.get()


def _begin_imports(ipython: Any) -> None:
    """Enter `imports_that_stay` until the cell has run or, outside one, until the first begins."""
    gc.collect()  # what is garbage by now does not stay
    imports, events = imports_that_stay(), ("pre_execute", "post_execute")

    def end() -> None:
        imports.__exit__(None, None, None)
        for event in events:
            ipython.events.unregister(event, end)

    for event in events:
        ipython.events.register(event, end)
    imports.__enter__()
