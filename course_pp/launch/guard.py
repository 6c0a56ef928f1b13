"""Runs srun so that its job cannot outlive whoever started it: ``python guard.py STARTER FOLDER
srun ...``.

Standard input is a pipe that the starter holds open; what it writes is passed on to srun. When it
closes, on purpose or because the starter was killed, or when process STARTER is no longer our
parent, srun is told to terminate, which cancels the job whether it runs or still queues; if Slurm
still has it after that, it is cancelled by number, and FOLDER goes. Imports the standard library
only, and is run by path, as the leader of a session of its own.
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
from collections.abc import Sequence

# Of every job of the course: one scancel ends a user's, and a job that idles sees whether others
# wait.
NAME = "course_pp"
# Our jobs, each with the session from which srun sent it: there lies the difference between jobs of
# one name.
SESSIONS = (
    "squeue",
    "--noheader",
    f"--name={NAME}",
    f"--user={os.getuid()}",
    "-O",
    "jobid,allocsid",
)
_ALIVE = "--states=PENDING,CONFIGURING,RUNNING,SUSPENDED"
_GRACE_S = 5.0
# scancel itself tries for some 20 s; a controller that restarts may be away for longer.
_ANSWER_LIMIT_S, _CANCEL_S = 30.0, 60.0
_CHECK_PARENT_S = 2.0
_PR_SET_PDEATHSIG = 1


def main(starter: int, folder: str, argv: list[str]) -> int:
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
        # What the starter forked keeps the pipe open beyond its death: hence the look at the
        # parent.
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
        while not cancelled() and time.monotonic() < limit:
            time.sleep(_GRACE_S)
        shutil.rmtree(folder, ignore_errors=True)
        ended.set()

    threading.Thread(target=end, daemon=True).start()
    code = child.wait()
    if wanted.is_set():
        ended.wait(2 * _GRACE_S + _CANCEL_S + _ANSWER_LIMIT_S)
    return code if code >= 0 else 128 - code


def sent_from(session: int, rows: Sequence[str]) -> list[str]:
    """Return the numbers of the jobs that the session has sent, given the lines that ``SESSIONS``
    answers.

    Two containers may use one number for a session. If both submit as one user of Slurm, each takes
    jobs of the other for its own.
    """
    jobs = map(str.split, rows)
    return [number for number, *sender in filter(None, jobs) if sender == [str(session)]]


def cancelled() -> bool:
    """Cancel the job; return False if the controller did not answer, and trying again may help."""
    try:
        found = subprocess.run(
            (*SESSIONS, _ALIVE), capture_output=True, text=True, timeout=_ANSWER_LIMIT_S
        )
        if found.returncode:
            return "fatal" in found.stderr
        numbers = sent_from(os.getsid(0), found.stdout.splitlines())
        return (
            not numbers
            or not subprocess.run(
                ["scancel", "--quiet", *numbers], timeout=_ANSWER_LIMIT_S
            ).returncode
        )
    except subprocess.TimeoutExpired:
        return False
    except OSError:
        return True


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
