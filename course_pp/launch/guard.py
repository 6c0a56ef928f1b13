"""Runs srun so that no job outlives its starter: ``python guard.py STARTER FOLDER srun ...``.

The starter holds the other end of our standard input open, and its lines are passed on to srun.
When that pipe closes, on purpose or because the starter was killed, or when process STARTER is no
longer our parent, srun is told to terminate. That cancels the job, whether it runs or still queues.
If Slurm has the job even then, the guard cancels it by number. At last it removes FOLDER.

This file imports the standard library only, and is run by path as the leader of a session of its
own.
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

# Every job of the course has this name. One scancel ends all jobs of a user, and a job that idles
# can see whether others wait.
NAME = "course_pp"
# Lists our jobs, each with the session that sent it, by which a guard knows its own job.
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
# scancel itself tries for some 20 s. A controller that restarts may be away for longer.
_ANSWER_LIMIT_S = 30.0
_CANCEL_S = 60.0
_CHECK_PARENT_S = 2.0
_PR_SET_PDEATHSIG = 1


def main(starter: int, folder: str, argv: list[str]) -> int:
    libc = ctypes.CDLL(None)

    def end_with_guard() -> None:
        # Even a guard that is killed takes srun with it.
        if sys.platform.startswith("linux"):
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)

    child = subprocess.Popen(argv, stdin=subprocess.PIPE, preexec_fn=end_with_guard, bufsize=0)
    assert child.stdin is not None
    passed_on = child.stdin
    wanted = threading.Event()
    ended = threading.Event()

    def end() -> None:
        # A child of the starter may hold the pipe open when the starter is dead, so we also look
        # whether the starter is still our parent.
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
    """Return the numbers of the jobs that ``session`` has sent, given the lines of `SESSIONS`.

    Two containers may use one number for a session. If both submit as one user of Slurm, each takes
    jobs of the other for its own.
    """
    numbers = []
    for row in rows:
        number, *sender = row.split() or [""]
        if sender == [str(session)]:
            numbers.append(number)
    return numbers


def cancelled() -> bool:
    """Cancel the job; return False if the controller did not answer, and trying again may help."""
    try:
        found = subprocess.run(
            (*SESSIONS, _ALIVE), capture_output=True, text=True, timeout=_ANSWER_LIMIT_S
        )
        if found.returncode:
            # squeue calls a configuration that cannot be used "fatal": no later try will differ.
            return "fatal" in found.stderr
        numbers = sent_from(os.getsid(0), found.stdout.splitlines())
        if not numbers:
            return True
        cancel = subprocess.run(["scancel", "--quiet", *numbers], timeout=_ANSWER_LIMIT_S)
        return cancel.returncode == 0
    except subprocess.TimeoutExpired:
        return False
    except OSError:
        return True  # Slurm's commands are not installed here


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
