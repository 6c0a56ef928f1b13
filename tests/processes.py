"""One question for every test that starts ranks: is a process left behind?

The test process adopts orphans (Linux), so every process that a test starts, however deep and in
whichever session or group, stays below it in the tree until it ends. A process that existed before
the test, such as the browser that tests share, may keep the processes that it starts meanwhile.
"""

import ctypes
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import psutil

from course_pp.launch.fork_server import SERVERS

_PR_SET_CHILD_SUBREAPER = 36


def descendants(others: Collection[int] = ()) -> dict[int, str]:
    """Return {id: command} of the processes below this one.

    They do not include ``others``, the processes below these, and the idle server that ranks fork
    from.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    server = SERVERS.pid()
    skipped = set(others) - {server}
    found = {}
    for process in psutil.Process().children(recursive=True):  # a parent comes before its children
        try:
            if process.pid in skipped or process.ppid() in skipped:
                skipped.add(process.pid)
            elif process.pid != server and process.status() != psutil.STATUS_ZOMBIE:
                found[process.pid] = " ".join(process.cmdline())
        except psutil.NoSuchProcess:
            continue
    return found


@contextmanager
def no_process_left(within_s: float = 30.0) -> Iterator[None]:
    """Fail unless all processes started in the block have ended.

    They have ``within_s`` seconds after its end.
    """
    before = descendants()
    yield
    limit = time.monotonic() + within_s
    while left := descendants(others=before):
        assert time.monotonic() < limit, f"processes were left behind: {left}"
        time.sleep(0.02)
