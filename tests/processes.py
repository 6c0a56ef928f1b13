"""One question for every test that starts ranks: is a process left behind?

The test process adopts orphans (Linux), so every process that was started from here, however deep and in
whichever session or group, stays below it in the tree until it ends.
"""

import ctypes
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from course_pp.launch.client import SERVERS

_PR_SET_CHILD_SUBREAPER = 36


def descendants() -> dict[int, str]:
    """Processes below this one, by id, with what they run; the idle server that ranks fork from is not one."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    found = {}
    for process in psutil.Process().children(recursive=True):
        try:
            if process.pid != SERVERS.pid() and process.status() != psutil.STATUS_ZOMBIE:
                found[process.pid] = " ".join(process.cmdline())
        except psutil.NoSuchProcess:
            continue
    return found


@contextmanager
def no_process_left(within_s: float = 5.0) -> Iterator[None]:
    """Fails unless every process that was started inside has ended ``within_s`` seconds after the end."""
    before = descendants()
    yield
    limit = time.monotonic() + within_s
    while left := {pid: name for pid, name in descendants().items() if pid not in before}:
        assert time.monotonic() < limit, f"processes were left behind: {left}"
        time.sleep(0.02)
