"""A command that starts ranks, followed line by line: on this machine, or through srun as a job of ours."""

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
# What torchrun, a cluster or `get_world_info` sets for a rank: a launcher that inherits it would
# pass for a rank.
_OF_A_RANK = {
    *(f"{prefix}RANK" for prefix in ("", "LOCAL_", "GROUP_", "ROLE_")),
    *(f"{prefix}WORLD_SIZE" for prefix in ("", "LOCAL_", "GROUP_", "ROLE_")),
    *("MASTER_ADDR", "MASTER_PORT"),
    *(
        f"TORCHELASTIC_{what}"
        for what in ("RESTART_COUNT", "MAX_RESTARTS", "RUN_ID", "USE_AGENT_STORE", "ERROR_FILE")
    ),
    *(
        f"SLURM_{what}"
        for what in ("PROCID", "LOCALID", "NODEID", "GTIDS", "TASK_PID", "NTASKS", "NPROCS")
    ),
    *(
        f"SLURM_{what}"
        for what in ("NTASKS_PER_NODE", "TASKS_PER_NODE", "CPUS_PER_TASK", "TRES_PER_TASK")
    ),
    # What the surrounding job asked for its own tasks; srun would ask the same for ours, of which
    # there is one a node.
    *(
        f"SLURM_{what}"
        for what in ("GPUS", "GPUS_PER_TASK", "GPUS_PER_SOCKET", "NTASKS_PER_GPU", "CPUS_PER_GPU")
    ),
    *(
        f"SLURM_{what}"
        for what in ("NTASKS_PER_CORE", "NTASKS_PER_SOCKET", "GPU_BIND", "DISTRIBUTION")
    ),
    *(f"SLURM_{what}" for what in ("THREADS_PER_CORE", "HINT", "EXACT")),
    # Would cut the ranks off from labels and watchdog, or label their lines a second time.
    *("SLURM_EXPORT_ENV", "SRUN_EXPORT_ENV", "SLURM_LABELIO"),
}
_OF_A_STEP = ("SLURM_STEP", "SLURM_CPU_BIND", "SLURM_MEM_BIND")


@dataclass(frozen=True)
class Command:
    """A launch, ready to run."""

    argv: tuple[str, ...]
    shown: str  # the same as a learner would type it in the current folder
    environ: Mapping[str, str]  # variables to add; they keep ``shown`` as short as it was typed
    place: Place


def of_no_rank(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` without the variables that describe one rank, or one step, of another run."""
    return {
        name: value
        for name, value in environ.items()
        if name not in _OF_A_RANK and not name.startswith(_OF_A_STEP)
    }


class Process:
    """A running command. Leaving the context ends it, and with it its job.

    Its job's guard removes ``folder``, which the run shares with its nodes, if this process is
    killed. What is ``opened`` is closed at the end; it is taken over once the command has started.
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
            argv = (
                sys.executable,
                "-I",
                "-S",
                guard.__file__,
                str(os.getpid()),
                str(folder),
                *argv,
            )
            environ = {**environ, "SLURM_JOB_NAME": guard.NAME}
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL if local else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environ,
            # An interrupt is for us; the launcher is then told to end its ranks first. Our job is
            # known by the session.
            start_new_session=True,
        )
        self.job = None if local else Job(self._process.pid, environ, command.place.job)
        if self._process.stdin is not None:
            # From here on whatever goes wrong, an interrupt too, ends the job: its guard looks at
            # the end of this pipe.
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
            print(f"{self.job.called} is {'being ' if self.running else ''}cancelled.", flush=True)

    def wait(self, timeout_s: float) -> None:
        """Print what comes until the command has ended or given its answer."""
        __tracebackhide__ = True
        limit = None
        while self._open_streams and not self.answered():
            if limit is None and self._has_started():
                limit = time.monotonic() + timeout_s
            wait = POLL_S if limit is None else min(POLL_S, limit - time.monotonic())
            # Something that outlives the launcher may hold its streams open: hence the look at the
            # process.
            if not self.poll(wait) and not self.running:
                break
            if limit is not None and time.monotonic() >= limit:
                raise self.hung(timeout_s)

    def error(self) -> BaseException | None:
        """Return the exception for a command that has ended; None if it ended well."""
        code = self._process.wait(GRACE_S)
        # When its node is lost, srun says so and ends with exit code 0.
        if not code and not any(line.startswith("srun: error:") for line in self.launcher_said):
            return None
        if self.job is not None:
            asked = shlex.join(self.command.place.srun)
            if verdict := self.job.verdict(
                self.launcher_said, asked, self.a_rank_failed(), bool(self.printed)
            ):
                return verdict
        return self.failure(code) if code else None

    def answered(self) -> bool:
        """Whether there is nothing left to wait for, though the command still runs."""
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
        """Return whether a rank failed: then Slurm's word that the step was cancelled is only its consequence."""
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
            # The launcher's own words: a page for a failed rank, which one sentence of ours
            # replaces.
            self.launcher_said.append(line)
            if self.job is not None and is_news(line):
                self.job.look_soon()

    def _end(self) -> None:
        self._hang_up()
        if self.job is None and self._process.poll() is None:
            self._process.terminate()
        limit = time.monotonic() + (GRACE_S if self.job is None else 4 * GRACE_S)
        while self._process.poll() is None and time.monotonic() < limit:
            # Reads on, or a launcher that writes to a full pipe would never end.
            self.poll(POLL_S)
        self.end_ranks()
        if self.running and self.job is not None:
            # The controller is slow to take the job back, and its guard goes on trying.
            threading.Thread(target=self._process.wait, daemon=True).start()
        elif self.running:
            self._process.kill()
            self._process.wait()
        self.end_ranks()

    def _hang_up(self) -> None:
        # Tells the guard to cancel the job.
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    def end_ranks(self) -> None:
        """End what a launcher on this machine may have left."""


def shared_folder(parent: str) -> contextlib.AbstractContextManager[str]:
    """Make a temporary folder that every node sees and no other user can replace: what lies in it is unpickled."""
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
    ours = found.st_uid == os.geteuid()
    if not found.st_mode & stat.S_ISVTX and not (
        ours and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    ):
        made.cleanup()
        remedy = f"`chmod go-w {folder}` mends that." if ours else remedy
        raise ValueError(
            f"folder is {parent!r}, where others may exchange what ranks are given. {remedy}"
        )
    return made
