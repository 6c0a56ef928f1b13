"""The caller's end of ``on_ranks`` under Slurm: hands calls to `remote` on a node and brings back how they ended.

A job serves one call after another, as the process that ranks fork from does on this machine: only the first call
waits in the queue and for torch. It ends when no call has come for a while, when a call is interrupted, and with us.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from course_pp.launch.command import Command, of_no_rank, on_nodes
from course_pp.launch.errors import LaunchError, RanksHung
from course_pp.launch.handover import ENDED, Call, End, call_file, end_file, write
from course_pp.launch.process import Process, shared_folder
from course_pp.launch.ranks import START_AND_END_S
from course_pp.launch.where import Place


class _Task(Process):
    """The one task of a job, which answers calls of at most ``n`` ranks."""

    def __init__(self, place: Place, n: int) -> None:
        self.n, self.owner = n, os.getpid()
        self.keep_s = place.site.keep_s
        self._environ: Mapping[str, str] = of_no_rank(os.environ)
        self._calls = self._answers = 0
        with contextlib.ExitStack() as started:
            self._folder = Path(started.enter_context(shared_folder(place.site.folder)))
            program = ["-m", "course_pp.launch.remote", str(self._folder), str(self.keep_s)]
            command = Command(
                argv=tuple(on_nodes(place, [place.site.python or sys.executable], program)),
                shown=shlex.join(on_nodes(place, [place.site.python or "python"], program)),
                environ={"PYTHONUNBUFFERED": "1"},
                place=place,
            )
            super().__init__(command, {}, started)

    def fits(self, place: Place, call: Call) -> bool:
        """Whether a call may be handed to this job: it has the ranks and the time."""
        ours = self.command.place
        alike = self.owner == os.getpid() and (ours.site, ours.job) == (place.site, place.job) and call.n <= self.n
        return (
            alike and self.running and (self.job is None or self.job.seconds_left() > call.timeout_s + START_AND_END_S)
        )

    def results(self, call: Call) -> list[bytes]:
        """What every rank of the call returned, pickled."""
        __tracebackhide__ = True
        before, self._environ = self._environ, of_no_rank(os.environ)
        changed = {name: self._environ.get(name) for name, _ in before.items() ^ self._environ.items()}
        self._calls += 1
        write(call_file(self._folder, self._calls), replace(call, environ=changed))
        self.tell(str(self._calls))
        self.wait(call.timeout_s + START_AND_END_S)
        if not self.answered():
            raise self.error() or LaunchError("the Slurm job ended before the ranks had answered. Call again.")
        end: End = pickle.loads(end_file(self._folder, self._calls).read_bytes())
        if end.results is None:
            raise _rebuilt(end)
        return list(end.results)

    def answered(self) -> bool:
        return self._answers == self._calls

    def take_line(self, stream: str, line: str) -> None:
        if line.startswith(ENDED):
            self._answers = int(line.removeprefix(ENDED))
        else:
            super().take_line(stream, line)

    def hung(self, seconds: float) -> RanksHung:
        return RanksHung(f"still running after {seconds:g} s, and the node does not say what its ranks do.", ())


class Tasks:
    """At most one job a process, kept from call to call."""

    def __init__(self) -> None:
        self._task: _Task | None = None
        atexit.register(self.stop)

    def results(self, place: Place, call: Call) -> list[bytes]:
        """What every rank of the call returned, pickled, having run at a place that is not this machine.

        Raises:
            Whatever ``on_ranks`` raises on the node, and LaunchError for what Slurm refuses or ends.
            ValueError: there is no folder in which to hand over the call.
        """
        __tracebackhide__ = True
        answered = False
        try:
            task = self._get(place, call)
            try:
                return task.results(call)
            finally:
                answered = task.answered() and task.keep_s > 0
        finally:
            if not answered:
                self.stop()

    def _get(self, place: Place, call: Call) -> _Task:
        task = self._task
        if task is not None and task.owner == os.getpid() and task.job is not None and task.fits(place, call):
            print(f"Ranks run in Slurm job {task.job.number}, kept since the last call.", flush=True)
            return task
        self.stop()
        task = self._task = _Task(place, call.n)
        print(f"{place.said}\n$ {task.command.shown}", flush=True)
        return task

    def stop(self) -> None:
        """Ends the job, if it is ours and not a parent process's."""
        task, self._task = self._task, None
        if task is not None and task.owner == os.getpid():
            task.__exit__()


TASKS = Tasks()


def _rebuilt(end: End) -> BaseException:
    error, cause, notes = pickle.loads(end.raised or b"")
    error.__cause__, error.__notes__ = cause, list(notes)
    rebuilt: BaseException = error
    return rebuilt
