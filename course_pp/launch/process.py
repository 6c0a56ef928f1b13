"""A command that starts ranks, followed line by line: on this machine, or through srun as a job."""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import shlex
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Self

from course_pp.launch import guard
from course_pp.launch.errors import LaunchError
from course_pp.launch.slurm import Job, is_news
from course_pp.launch.surroundings import Lines, show
from course_pp.launch.where import Place

POLL_S = 0.2
GRACE_S = 5.0
LAST_LINES = 12
_LABELLED = re.compile(r"\[rank (\d+)\] ?(.*)", re.S)
# Variables that torchrun, a cluster or `get_world_info` set for a rank. A launcher that inherits
# them would pass for a rank.
_NUMBERS = """
    RANK LOCAL_RANK GROUP_RANK ROLE_RANK
    WORLD_SIZE LOCAL_WORLD_SIZE GROUP_WORLD_SIZE ROLE_WORLD_SIZE
    MASTER_ADDR MASTER_PORT
    TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_RUN_ID
    TORCHELASTIC_USE_AGENT_STORE TORCHELASTIC_ERROR_FILE
    SLURM_PROCID SLURM_LOCALID SLURM_NODEID SLURM_GTIDS SLURM_TASK_PID SLURM_NTASKS SLURM_NPROCS
    SLURM_NTASKS_PER_NODE SLURM_TASKS_PER_NODE SLURM_CPUS_PER_TASK SLURM_TRES_PER_TASK
"""
# Requests of the surrounding job for its own tasks. srun would ask the same for our task, of which
# there is one a node.
_REQUESTS = """
    SLURM_GPUS SLURM_GPUS_PER_TASK SLURM_GPUS_PER_SOCKET SLURM_NTASKS_PER_GPU SLURM_CPUS_PER_GPU
    SLURM_NTASKS_PER_CORE SLURM_NTASKS_PER_SOCKET SLURM_GPU_BIND SLURM_DISTRIBUTION
    SLURM_THREADS_PER_CORE SLURM_HINT SLURM_EXACT
"""
# The first two would keep the variables of labels and watchdog from the ranks. The third would
# label their lines a second time.
_OUTPUT = "SLURM_EXPORT_ENV SRUN_EXPORT_ENV SLURM_LABELIO"
_OF_A_RANK = {*_NUMBERS.split(), *_REQUESTS.split(), *_OUTPUT.split()}
_OF_A_STEP = ("SLURM_STEP", "SLURM_CPU_BIND", "SLURM_MEM_BIND")


@dataclass(frozen=True)
class Command:
    """A launch, ready to run.

    Attributes:
        argv: the words of the command.
        shown: the same command as a learner would type it in the current folder.
        environ: variables to add. They stand here so that ``shown`` stays short.
        place: the place where it runs.
    """

    argv: tuple[str, ...]
    shown: str
    environ: Mapping[str, str]
    place: Place


def of_no_rank(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` without the variables that describe a rank or a step of another run."""
    kept = {}
    for name, value in environ.items():
        if name not in _OF_A_RANK and not name.startswith(_OF_A_STEP):
            kept[name] = value
    return kept


class Process:
    """A running command. Leaving the context ends the command, and with it its job.

    The run shares ``folder`` with its nodes; the guard of its job removes it if this process is
    killed. The object takes over ``opened`` once the command has started, and closes it at the end.
    """

    def __init__(
        self,
        command: Command,
        environ: Mapping[str, str],
        folder: Path,
        opened: contextlib.ExitStack,
    ) -> None:
        self.command = command
        self._selector = opened.enter_context(selectors.DefaultSelector())
        self.printed: list[str] = []
        self.ranks_said: dict[tuple[int, str], deque[str]] = defaultdict(
            partial(deque, maxlen=LAST_LINES)
        )
        self.launcher_said: list[str] = []
        environ = {**of_no_rank(os.environ), **command.environ, **environ}
        argv: tuple[str, ...] = command.argv
        local = command.place.local
        if not local:
            # -I -S: the guard needs no package, and starts sooner without a look at them.
            guarded = (sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), str(folder))
            argv = (*guarded, *argv)
            environ = {**environ, "SLURM_JOB_NAME": guard.NAME}
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL if local else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environ,
            # An interrupt must reach us alone: we tell the launcher to end its ranks first. The
            # session also tells our job from other jobs of the same name.
            start_new_session=True,
        )
        self.job = None if local else Job(self._process.pid, environ, command.place.job)
        if self._process.stdin is not None:
            # From here on any failure, even an interrupt, ends the job: its guard sees the pipe
            # close.
            opened.callback(self._hang_up)
        self._open_streams = 2
        for stream, name in ((self._process.stdout, "stdout"), (self._process.stderr, "stderr")):
            assert stream is not None
            opened.enter_context(stream)
            self.watch(stream, partial(self._read, stream, Lines(partial(self.take_line, name))))
        self._open = opened.pop_all()

    def watch(self, file: object, ready: Callable[[], None]) -> None:
        self._selector.register(file, selectors.EVENT_READ, ready)  # type: ignore[arg-type]

    def forget(self, file: object) -> None:
        self._selector.unregister(file)  # type: ignore[arg-type]

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        with self._open:
            self._end()
        if self.job is not None and kind is KeyboardInterrupt:
            state = "being cancelled" if self.running else "cancelled"
            print(f"{self.job.called} is {state}.", flush=True)

    def wait(self, timeout_s: float) -> None:
        """Print the command's lines until it has ended or given its answer."""
        __tracebackhide__ = True
        limit = None
        while self._open_streams and not self.answered():
            # The time in the queue does not count.
            if limit is None and self._has_started():
                limit = time.monotonic() + timeout_s
            wait = POLL_S if limit is None else min(POLL_S, limit - time.monotonic())
            # A process that outlives the launcher may hold its streams open, so we also look
            # whether the launcher runs.
            if not self.poll(wait) and not self.running:
                break
            if limit is not None and time.monotonic() >= limit:
                raise self.hung(timeout_s)

    def error(self) -> BaseException | None:
        """Return the exception for a command that has ended; None if it ended well."""
        code = self._process.wait(GRACE_S)
        # When its node is lost, srun reports an error and ends with exit code 0.
        if not code and not any(line.startswith("srun: error:") for line in self.launcher_said):
            return None
        if self.job is not None:
            verdict = self.job.verdict(
                self.launcher_said,
                asked=shlex.join(self.command.place.srun),
                a_rank_failed=self.a_rank_failed(),
                a_rank_spoke=bool(self.printed),
            )
            if verdict is not None:
                return verdict
        return self.failure(code) if code else None

    def answered(self) -> bool:
        """Return whether the command has given its answer, though it still runs."""
        return False

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()

    def failure(self, exit_code: int) -> BaseException:
        """Return the exception for an exit code that Slurm does not explain."""
        said = "\n".join(self.launcher_said[-LAST_LINES:])
        return LaunchError(
            f"`{self.command.shown}` ended with exit code {exit_code}. It said:\n{said}"
        )

    def hung(self, seconds: float) -> BaseException:
        return TimeoutError(f"still running after {seconds:g} s.")

    def a_rank_failed(self) -> bool:
        """Return whether a rank failed.

        Slurm then cancels the step, so its report of that is a consequence and not the cause.
        """
        return False

    def poll(self, seconds: float) -> bool:
        __tracebackhide__ = True
        ready = self._selector.select(max(0.0, seconds))
        for key, _ in ready:
            key.data()
        return bool(ready)

    def _has_started(self) -> bool:
        if self.job is None or self.job.started:
            return True
        if line := self.job.queue_line():
            print(line, flush=True)
        return self.job.started

    def _read(self, stream: IO[bytes], lines: Lines) -> None:
        data = os.read(stream.fileno(), 1 << 16)
        if data:
            lines.feed(data)
        else:
            lines.close()
            self.forget(stream)
            self._open_streams -= 1

    def take_line(self, stream: str, line: str) -> None:
        if match := _LABELLED.match(line):
            if self.job is not None:
                self.job.started = True
            self.printed.append(line)
            said = self.ranks_said[int(match[1]), stream]
            # torch marks a traceback's lines with the rank, too.
            said.append(re.sub(r"^\[rank\d+\]: ?", "", match[2]))
            show(stream, line)
        else:
            # The launcher's own words are not shown: it prints a page for a failed rank, which one
            # sentence of ours replaces.
            self.launcher_said.append(line)
            if self.job is not None and is_news(line):
                self.job.look_soon()

    def _end(self) -> None:
        self._hang_up()
        if self.job is None and self._process.poll() is None:
            self._process.terminate()
        limit = time.monotonic() + (GRACE_S if self.job is None else 4 * GRACE_S)
        while self._process.poll() is None and time.monotonic() < limit:
            # We must read on: a launcher that writes to a full pipe would never end.
            self.poll(POLL_S)
        self.end_ranks()
        if self.running and self.job is not None:
            # A slow controller still has the job. Its guard goes on trying, without the learner.
            threading.Thread(target=self._process.wait, daemon=True).start()
        elif self.running:
            self._process.kill()
            self._process.wait()
        self.end_ranks()

    def _hang_up(self) -> None:
        # The guard cancels the job when its standard input ends.
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    def end_ranks(self) -> None:
        """End the ranks that a launcher on this machine may have left behind."""


def shared_folder(parent: str) -> contextlib.AbstractContextManager[str]:
    """Make a temporary folder in ``parent``, which every node sees.

    ValueError if another user could replace it: we unpickle the files that lie in it.
    """
    remedy = "Set folder in site.toml to one that is yours and that all nodes see."
    if not parent:
        raise ValueError(f"folder is {parent!r}, which names none. {remedy}")
    try:
        # Absolute: ranks may work in another folder.
        folder = Path(parent).expanduser().absolute()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        made = tempfile.TemporaryDirectory(prefix="run_", dir=folder, ignore_cleanup_errors=True)
    except (OSError, RuntimeError) as error:
        raise ValueError(
            f"folder is {parent!r}, in which none can be made ({error}). {remedy}"
        ) from None
    # Who may write to a folder may rename what others have there, unless it is sticky as /tmp is.
    ours = found.st_uid == os.geteuid()
    sticky = bool(found.st_mode & stat.S_ISVTX)
    others_write = bool(found.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
    if not sticky and (others_write or not ours):
        made.cleanup()
        if ours:
            remedy = f"`chmod go-w {folder}` mends that."
        raise ValueError(
            f"folder is {parent!r}, where others may exchange what ranks are given. {remedy}"
        )
    return made
