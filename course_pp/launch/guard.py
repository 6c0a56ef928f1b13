"""Runs srun so that its job cannot outlive whoever started it: ``python guard.py JOB_NAME STARTER FOLDER srun ...``.

Standard input is a pipe that the starter holds open; what it writes is passed on to srun. When it closes, on purpose
or because the starter was killed, or when process STARTER is no longer our parent, srun is told to terminate, which
cancels the job whether it runs or still queues; a job of the name that is left after that is cancelled by name, and
FOLDER goes. Imports the standard library only, and is run by path.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time

_GRACE_S = 5.0
# scancel itself tries for some 20 s; a controller that restarts may be away for longer.
_ANSWER_LIMIT_S, _CANCEL_S = 30.0, 60.0
_CHECK_PARENT_S = 2.0
_PR_SET_PDEATHSIG = 1


def main(name: str, starter: int, folder: str, argv: list[str]) -> int:
    libc = ctypes.CDLL(None)

    def end_with_guard() -> None:
        if sys.platform.startswith("linux"):
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)

    child = subprocess.Popen(argv, stdin=subprocess.PIPE, preexec_fn=end_with_guard, bufsize=0)
    assert child.stdin is not None
    passed_on = child.stdin
    wanted = threading.Event()
    ended = threading.Event()

    def end() -> None:
        # What the starter forked keeps the pipe open beyond its death: hence the look at the parent.
        while os.getppid() == starter:
            if select.select([0], [], [], _CHECK_PARENT_S)[0]:
                if not (data := os.read(0, 1 << 16)):
                    break
                with contextlib.suppress(OSError):
                    passed_on.write(data)
        wanted.set()
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_GRACE_S)
        child.kill()
        limit = time.monotonic() + _CANCEL_S
        while not cancelled(name) and time.monotonic() < limit:
            time.sleep(_GRACE_S)
        shutil.rmtree(folder, ignore_errors=True)
        ended.set()

    threading.Thread(target=end, daemon=True).start()
    code = child.wait()
    if wanted.is_set():
        ended.wait(2 * _GRACE_S + _CANCEL_S + _ANSWER_LIMIT_S)
    return code if code >= 0 else 128 - code


def cancelled(name: str) -> bool:
    """Cancel the job; return False if the controller did not answer, and trying again may help."""
    argv = ["scancel", "--quiet", f"--name={name}", f"--user={os.getuid()}"]
    try:
        done = subprocess.run(argv, stderr=subprocess.PIPE, timeout=_ANSWER_LIMIT_S)
        return not done.returncode or b"fatal" in done.stderr
    except subprocess.TimeoutExpired:
        return False
    except OSError:
        return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4:]))
