"""The node's end of ``on_ranks`` under Slurm, one task.

It runs as ``python -m course_pp.launch.remote FOLDER PATIENCE [NAME]``. Standard input brings the
numbers of calls, whose files lie in FOLDER. This task starts the ranks as a notebook does, and
writes the end of each call beside it.

The job ends after PATIENCE seconds without a call. It gives way to a job of any user that is called
NAME and waits in the queue for the cores of this one. Then it ends after some seconds without a
call; if calls follow each other without such a pause, it ends between two calls once the other job
has waited for its turn. It never ends during a call.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import pickle
import random
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import cloudpickle

from course_pp.launch.errors import LaunchError
from course_pp.launch.fork_server import SERVERS
from course_pp.launch.on_slurm import BEGUN, ENDED, End, RemoteCall, call_file, end_file, write
from course_pp.launch.ranks import run_ranks
from course_pp.launch.surroundings import job_here

_FIRST_CALL_S = 60.0
# The time between an idle job's looks at the queue is random. If all jobs of a class looked at
# once, all would give way to the one that waits.
_LOOK_S = 10.0, 20.0
# A job has earned a turn when it has waited this long for one whose calls never pause.
_TURN_S = 60.0
_ANSWER_LIMIT_S = 5.0
# Matches number, user and reason of a job that waits for cores that we hold. The reasons of the
# first kind concern jobs of all users, those of the second only jobs of our own user.
_ANY_USER = (
    r"Resources|Priority|(?:QOS|Assoc)Grp(?:Cpu|Mem|Node|Jobs)Limit|(?:QOS|Assoc)GrpGRES"
    r"|Max\w+PerAccount"
)
_OUR_USER = r"QOSMax\w+PerUser(?:Limit)?|AssocMaxJobsLimit"
_WAITS_FOR_US = re.compile(rf"^(\d+) (?:\d+ (?:{_ANY_USER})|{os.getuid()} (?:{_OUR_USER}))$", re.M)


def main(folder: Path, patience_s: float, gives_way_to: str = "") -> None:
    """Answer calls until the caller is gone, others wait, or ``patience_s`` pass without a call."""
    SERVERS.get()  # it begins to import torch
    others = _Others(gives_way_to) if gives_way_to else None
    numbers = _next_calls(_FIRST_CALL_S)
    while numbers:
        for number in numbers:
            print(f"{BEGUN} {number}", flush=True)
            _answer(folder, number)
            print(f"{ENDED} {number}", flush=True)
        numbers = [] if others and others.have_a_turn() else _next_calls(patience_s, others)


def _next_calls(patience_s: float, others: _Others | None = None) -> list[int]:
    """Wait for the numbers of calls; return none if it is time to leave."""
    limit = time.monotonic() + patience_s
    while (left := limit - time.monotonic()) > 0:
        look = random.uniform(*_LOOK_S) if others else left
        if select.select([0], [], [], min(look, left))[0]:
            return [int(number) for number in os.read(0, 4096).split()]
        if others and others.wait():
            break
    return []


class _Others:
    """Jobs of one name that wait in our partition for our cores, as far as the cluster tells."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._looked_at = time.monotonic()
        self._seen_at: dict[str, float] = {}  # {job: time at which it was first seen to wait}

    def wait(self) -> bool:
        """Ask the cluster, and return whether such jobs wait."""
        argv = ["squeue", "--noheader", "--states=PD", f"--name={self._name}", "-o", "%i %U %r"]
        if partition := os.environ.get("SLURM_JOB_PARTITION"):
            argv.append(f"--partition={partition}")
        numbers: list[str] = []
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            answer = subprocess.run(
                argv, capture_output=True, text=True, errors="replace", timeout=_ANSWER_LIMIT_S
            )
            numbers = _WAITS_FOR_US.findall(answer.stdout)
        self._looked_at = time.monotonic()
        self._seen_at = {number: self._seen_at.get(number, self._looked_at) for number in numbers}
        return bool(numbers)

    def have_a_turn(self) -> bool:
        """Return whether a job has waited long enough for its turn."""
        # A job that is called often must not ask the controller more often than an idle one.
        if time.monotonic() < self._looked_at + _LOOK_S[0] or not self.wait():
            return False
        return self._looked_at - min(self._seen_at.values()) >= _TURN_S


def _answer(folder: Path, number: int) -> None:
    end = _end(call_file(folder, number))
    try:
        write(end_file(folder, number), end)
    except OSError as error:
        unwritten = LaunchError(
            f"the ranks have ended, but what they returned cannot be written to {folder}"
            f" ({error.strerror}). Make room there, let them return less, or set folder in"
            " site.toml to another one that all nodes see."
        )
        with contextlib.suppress(OSError):  # the caller finds nothing then, and says that
            write(end_file(folder, number), End(None, _dumped(unwritten)))


def _end(file: Path) -> End:
    try:
        call = _read(file)
        _become(call)
        asked = call.job
        job = job_here(
            asked.world_size, asked.backend, threads=asked.threads, timeout_s=asked.timeout_s
        )
        return End(tuple(run_ranks(job, call.payload)))
    except BaseException as error:
        # Whatever happens, the caller waits for an answer.
        return End(None, _dumped(error))


def _read(file: Path) -> RemoteCall:
    try:
        call: RemoteCall = pickle.loads(file.read_bytes())
        file.unlink()
    except (OSError, EOFError, pickle.UnpicklingError) as error:
        raise LaunchError(
            f"the node cannot read the call in {file.parent} ({error}). "
            "Set folder in site.toml to one that all nodes see."
        ) from None
    return call


def _become(call: RemoteCall) -> None:
    """Make this process look like the caller's to its ranks."""
    if call.python != sys.version_info[:2]:
        theirs = "{}.{}".format(*call.python)
        ours = "{}.{}".format(*sys.version_info)
        raise LaunchError(
            f"you call from Python {theirs}, and the node runs Python {ours}, between which"
            f" functions cannot travel. Set python in site.toml to a Python {theirs} on the nodes."
        )
    try:
        os.chdir(call.job.cwd)
    except OSError as error:
        raise LaunchError(
            f"the node cannot enter the folder you are in, {call.job.cwd} ({error.strerror}). "
            "Work in one that all nodes see, as folder in site.toml has to be."
        ) from None
    if call.job.sys_path:
        sys.path[:] = call.job.sys_path
    sys.argv[:] = call.job.argv
    for name, value in call.environ.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    linecache.cache.update(call.job.sources)


def _dumped(error: BaseException) -> bytes:
    """Pickle the exception with its cause and notes, which do not travel by themselves."""
    parts = error.__cause__, tuple(getattr(error, "__notes__", ()))
    try:
        dumped: bytes = cloudpickle.dumps((error, *parts))
        pickle.loads(dumped)
    except Exception:
        dumped = cloudpickle.dumps((LaunchError(f"{type(error).__name__}: {error}"), *parts))
    return dumped


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), *sys.argv[3:])
