"""The caller's end of ``on_ranks`` under Slurm: hands calls to `remote` on a node.

A job serves one call after another, so only the first call waits in the queue and for torch. The
job ends when no call has come for a while, when a call is interrupted, and when this process ends.
If other jobs wait for its cores, it ends sooner, or between two calls.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import shlex
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from course_pp.launch.channel import RankJob
from course_pp.launch.errors import LaunchError, RanksHung
from course_pp.launch.guard import NAME
from course_pp.launch.process import Command, Process, of_no_rank, shared_folder
from course_pp.launch.slurm import Job
from course_pp.launch.surroundings import shell
from course_pp.launch.where import Needs, Place, Site

# The job waits this much longer than we give it calls, so that no call arrives too late.
_ON_ITS_WAY_S = 5
_ROOM = "Make room there, or set folder in site.toml to another one that all nodes see."

# The node prints these, each with the call's number, when it has taken a call and when the file
# with the call's end lies in the folder.
BEGUN = "course_pp begins call"
ENDED = "course_pp ended call"


@dataclass(frozen=True)
class RemoteCall:
    """A call of ``on_ranks`` on its way to a node.

    Attributes:
        job: options and surroundings of the call, but no environment. The search path is empty if
            the nodes have an interpreter of their own.
        payload: function and arguments, pickled.
        environ: variables that changed since the last call; None for a variable that is gone.
        python: version of our Python. Pickled functions only travel between equal versions.
    """

    job: RankJob
    payload: bytes
    environ: Mapping[str, str | None] = field(default_factory=dict)
    python: tuple[int, int] = sys.version_info[:2]


@dataclass(frozen=True)
class End:
    """The end of a call on the node.

    Attributes:
        results: one pickled result a rank; None if the call failed.
        raised: the exception of a call that failed, with its cause and its notes, pickled.
    """

    results: tuple[bytes, ...] | None
    raised: bytes | None = None


def call_file(folder: Path, number: int) -> Path:
    return folder / f"call-{number}"


def end_file(folder: Path, number: int) -> Path:
    return folder / f"end-{number}"


def write(file: Path, value: object) -> None:
    """Write a pickle so that another node sees all of it or, if OSError is raised, nothing."""
    half = file.with_suffix(".part")
    try:
        half.write_bytes(pickle.dumps(value))
        os.replace(half, file)
    except OSError:
        with contextlib.suppress(OSError):
            half.unlink()
        raise


class _Task(Process):
    """The one task of a Slurm job. It answers every call that needs no more than the first one."""

    def __init__(self, place: Place, needs: Needs) -> None:
        self.needs = needs
        self.owner = os.getpid()
        self.keep_s = place.site.keep_s
        self._environ: Mapping[str, str] = of_no_rank(os.environ)
        # Number of the last call that was sent, that the node has taken, that has ended.
        self._calls = self._begun = self._answers = 0
        self._answered_at = 0.0
        # Number of the notebook cell that has shown where its ranks run.
        self.said_in: int | None = None
        with contextlib.ExitStack() as started:
            self._folder = Path(started.enter_context(shared_folder(place.site.folder)))
            patience_s = self.keep_s + _ON_ITS_WAY_S
            program = ["-m", "course_pp.launch.remote", str(self._folder), str(patience_s)]
            # A Slurm step in a job that is there already does not end for a waiting job: its cores
            # would stay with the job in which it runs.
            if place.job is None:
                program.append(NAME)
            command = Command(
                argv=tuple(place.command([place.site.python or sys.executable], program)),
                shown=shlex.join(place.command([place.site.python or "python"], program)),
                environ={"PYTHONUNBUFFERED": "1"},
                place=place,
            )
            super().__init__(command, {}, self._folder, started)

    def fits(self, needs: Needs, site: Site, job: str | None) -> bool:
        """Return whether the task can serve a call that needs this."""
        ours = self.command.place
        if self.owner != os.getpid() or (ours.site, ours.job) != (site, job):
            return False
        # In a job that is there already, the call gets the GPUs of that job and asks for no others.
        wants_gpus = needs.gpus and job is None and bool(site.gres)
        if wants_gpus and not self.needs.gpus:
            return False
        if (needs.ranks or 1) > (self.needs.ranks or 1):
            return False
        waits = not self.answered() or time.monotonic() < self._answered_at + self.keep_s
        # Last, because this asks the controller.
        return waits and self.running and self._job.seconds_left() > needs.seconds

    def end(self, call: RemoteCall, limit_s: float) -> End | None:
        """Return how the call ended.

        None if the job served earlier calls and ended before it took this one.
        """
        __tracebackhide__ = True
        before = self._environ
        self._environ = of_no_rank(os.environ)
        differing = before.items() ^ self._environ.items()
        changed = {name: self._environ.get(name) for name, _ in differing}
        self._calls += 1
        number = self._calls
        try:
            write(call_file(self._folder, number), replace(call, environ=changed))
        except OSError as error:
            raise LaunchError(
                f"the call cannot be written to {self._folder} ({error.strerror}). {_ROOM}"
            ) from None
        self.tell(str(number))
        self.wait(limit_s)
        if self._answers < number:
            # The job gave way to another one while this call was on its way.
            if number > 1 and self._begun < number:
                return None
            raise self.error() or LaunchError(
                "the Slurm job ended before the ranks had answered. Call again."
            )
        return self._taken(end_file(self._folder, number))

    def _taken(self, file: Path) -> End:
        try:
            end: End = pickle.loads(file.read_bytes())
            file.unlink()
        except OSError as error:
            raise LaunchError(
                f"the ranks have ended, but {file} cannot be read ({error.strerror}). {_ROOM}"
            ) from None
        return end

    @property
    def number(self) -> str | None:
        return self._job.number

    @property
    def _job(self) -> Job:
        assert self.job is not None, "a task is of a job"
        return self.job

    def answered(self) -> bool:
        return self._answers >= self._calls

    def take_line(self, stream: str, line: str) -> None:
        if line.startswith(BEGUN):
            self._begun = int(line.removeprefix(BEGUN))
        elif line.startswith(ENDED):
            self._answers = int(line.removeprefix(ENDED))
            self._answered_at = time.monotonic()
        else:
            super().take_line(stream, line)

    def hung(self, seconds: float) -> RanksHung:
        return RanksHung(
            f"still running after {seconds:g} s, and the node does not say what its ranks do."
        )


class Tasks:
    """Holds at most one Slurm job a process, and keeps the job from call to call."""

    def __init__(self) -> None:
        self._task: _Task | None = None
        self._forget_threads()
        atexit.register(self.stop)
        os.register_at_fork(after_in_child=self._forget_threads)

    def _forget_threads(self) -> None:
        # The threads of one process share the job, and call it one after another. A thread that
        # held the lock at a fork does not exist in the child.
        self._lock = threading.Lock()

    def kept(self, needs: Needs, site: Site, job: str | None) -> Place | None:
        task = self._task
        return task.command.place if task is not None and task.fits(needs, site, job) else None

    def results(self, place: Place, needs: Needs, call: RemoteCall) -> list[bytes]:
        """Run the call in a Slurm job; return its pickled results, or raise its exception."""
        __tracebackhide__ = True
        with self._lock:
            # The end is None at most once, because the next try takes a new job.
            while (end := self._end(place, needs, call)) is None:
                pass
        if end.results is None:
            error, cause, notes = pickle.loads(end.raised or b"")
            error.__cause__ = cause
            error.__notes__ = list(notes)
            raise error
        return list(end.results)

    def _end(self, place: Place, needs: Needs, call: RemoteCall) -> End | None:
        __tracebackhide__ = True
        try:
            task = self._get(place, needs)
            end = task.end(call, needs.seconds)
        except BaseException as error:
            self.stop(type(error))
            raise
        if end is None or not task.keep_s:
            self.stop()
        return end

    def _get(self, place: Place, needs: Needs) -> _Task:
        task = self._task
        if task is not None and task.fits(needs, place.site, place.job):
            # A cell may call `on_ranks` in a loop: one line is enough.
            cell = _cell()
            if cell is None or cell != task.said_in:
                print(
                    f"Ranks run in Slurm job {task.number}, kept since the last call.", flush=True
                )
            task.said_in = cell
            return task
        self.stop()
        task = self._task = _Task(place, needs)
        task.said_in = _cell()
        print(f"{place.said}\n$ {task.command.shown}", flush=True)
        return task

    def release(self) -> None:
        """End a job that only waits for its next call; our next job would queue behind it."""
        # If another thread holds the lock, its call is running.
        if self._lock.acquire(blocking=False):
            try:
                self.stop()
            finally:
                self._lock.release()

    def stop(self, because: type[BaseException] | None = None) -> None:
        """End the job, unless it belongs to a parent process."""
        task = self._task
        self._task = None
        if task is not None and task.owner == os.getpid():
            task.__exit__(because)


TASKS = Tasks()


def _cell() -> int | None:
    """Return the number of the notebook cell that runs; None in a script."""
    found = shell()
    return found.execution_count if found else None
