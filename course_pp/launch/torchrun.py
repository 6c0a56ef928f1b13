"""``run_torchrun``: a torchrun that raises when a rank fails, hangs or is interrupted, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

from course_pp.launch.command import Command, build, of_no_rank
from course_pp.launch.errors import LaunchError, RanksHung, is_echo, signal_name
from course_pp.launch.limits import refuse_bad_timeout
from course_pp.launch.output import Lines
from course_pp.launch.waits import explain, waits_from
from course_pp.launch.watch import Report

_ANSWER_LIMIT_S = 2.0
_POLL_S = 0.2
_GRACE_S = 5.0
_LAST_LINES = 12
_LABELLED = re.compile(r"\[rank (\d+)\] ?(.*)", re.S)
_MARK = "COURSE_PP_TORCHRUN"
_SOCKET = "watch"
# The address of a Unix socket, with the zero at its end, has 104 bytes on macOS and 108 on Linux.
_MOST_ADDRESS_BYTES = 103


def run_torchrun(args: Sequence[str], *, timeout_s: float = 300.0, local: bool = False) -> tuple[str, ...]:
    """Runs ``torchrun ARGS`` and prints the exact command, then what the ranks print, labelled line by line.

    torchrun labels whatever it finds when it looks, so a line that a rank writes in pieces may come out in pieces,
    with labels of several ranks in it.

    Args:
        args: what a learner types after ``torchrun``. The script is looked for here, then from the root of the
            repository.
        timeout_s: limit in seconds for the whole run.
        local: do not use Slurm, even where ``srun`` is at hand.

    Returns:
        The labelled lines, in the order in which they were printed.

    Raises:
        LaunchError: a rank failed; names the first, its exit code and its last lines.
        RanksHung: the limit is over; says which rank waits for whom.
        ValueError, FileNotFoundError: no script, no such script, or a limit that is no number of seconds.
    """
    refuse_bad_timeout(timeout_s)
    command = build(args, local)
    print(f"$ {command.shown}", flush=True)
    with _Run(command) as run:
        return run.follow(timeout_s)


class _Peer:
    """A process of the run that has introduced itself over the watchdog's socket."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.rank: int | None = None
        self.pid = 0
        self.report: Report | None = None
        self.raised: tuple[str, float] | None = None
        self.gone = False

    def tell(self, line: str) -> None:
        fields: dict[str, Any] = json.loads(line)
        if "pid" in fields:
            self.rank, self.pid = fields["rank"], fields["pid"]
        elif "report" in fields:
            self.report = Report.from_dict(fields["report"])
        else:
            self.raised = fields["raised"], fields["at"]


class _Run:
    """One launcher with its ranks. Leaving the context ends them all."""

    def __init__(self, command: Command) -> None:
        self._mark = uuid.uuid4().hex
        self._peers: list[_Peer] = []
        self._printed: list[str] = []
        self._ranks_said: dict[tuple[int, str], deque[str]] = defaultdict(partial(deque, maxlen=_LAST_LINES))
        self._launcher_said: list[str] = []
        self._open_streams = 2
        with contextlib.ExitStack() as started:
            self._folder = Path(started.enter_context(_short_folder()))
            self._selector = started.enter_context(selectors.DefaultSelector())
            self._listener = started.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            self._listener.bind(str(self._folder / _SOCKET))
            self._listener.listen()
            self._process = subprocess.Popen(
                command.argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=self._environ(command),
                # An interrupt is for us; the launcher is then told to end its ranks first.
                start_new_session=True,
            )
            self._open = started.pop_all()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        for stream, name in ((self._process.stdout, "stdout"), (self._process.stderr, "stderr")):
            assert stream is not None
            self._open.enter_context(stream)
            lines = Lines(partial(self._take_line, name))
            self._selector.register(stream, selectors.EVENT_READ, partial(self._read, stream, lines))

    def _environ(self, command: Command) -> dict[str, str]:
        site = self._folder / "site"
        site.mkdir()
        here = Path(__file__).parent
        shutil.copyfile(here / "startup.py", site / "sitecustomize.py")
        (self._folder / "logs").mkdir()
        return {
            **of_no_rank(os.environ),
            **command.environ,
            **({} if "PET_LOG_DIR" in os.environ else {"PET_LOG_DIR": str(self._folder / "logs")}),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")])),
            "COURSE_PP_WATCH": os.pathsep.join([str(self._folder / _SOCKET), str(here / "watch.py")]),
            _MARK: self._mark,
        }

    def __enter__(self) -> _Run:
        return self

    def follow(self, timeout_s: float) -> tuple[str, ...]:
        limit = time.monotonic() + timeout_s
        while self._open_streams:
            # Something that outlives the launcher may hold its streams open: hence the look at the process.
            if not self._poll(min(_POLL_S, limit - time.monotonic())) and self._process.poll() is not None:
                break
            if time.monotonic() >= limit:
                self._raise_hung(timeout_s)
        code = self._process.wait(max(_POLL_S, limit - time.monotonic()))
        if code:
            raise self._failure(code)
        for line in self._launcher_said:
            print(line, file=sys.stderr)
        return tuple(self._printed)

    def _poll(self, seconds: float) -> bool:
        ready = self._selector.select(max(0.0, seconds))
        for key, _ in ready:
            key.data()
        return bool(ready)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        self._open.enter_context(connection)
        peer = _Peer(connection)
        self._peers.append(peer)
        lines = Lines(peer.tell)
        self._selector.register(connection, selectors.EVENT_READ, partial(self._hear, peer, lines))

    def _hear(self, peer: _Peer, lines: Lines) -> None:
        data = b""
        with contextlib.suppress(OSError):
            data = peer.connection.recv(1 << 16)
        if data:
            lines.feed(data)
        else:
            peer.gone = True
            self._selector.unregister(peer.connection)
            peer.connection.close()

    def _read(self, stream: IO[bytes], lines: Lines) -> None:
        data = os.read(stream.fileno(), 1 << 16)
        if data:
            lines.feed(data)
        else:
            lines.close()
            self._selector.unregister(stream)
            self._open_streams -= 1

    def _take_line(self, stream: str, line: str) -> None:
        if match := _LABELLED.match(line):
            self._printed.append(line)
            said = self._ranks_said[int(match[1]), stream]
            # torch marks a traceback's lines with the rank, too.
            said.append(re.sub(r"^\[rank\d+\]: ?", "", match[2]))
            print(line, file=getattr(sys, stream))
        else:
            # The launcher's own words: a page for a failed rank, which one sentence of ours replaces.
            self._launcher_said.append(line)

    def _failure(self, code: int) -> LaunchError:
        failed = dict(_failed_ranks("\n".join(self._launcher_said)))
        raised = {peer.rank: peer.raised for peer in self._peers if peer.rank is not None and peer.raised}
        if not failed:
            # Exit code 2: the arguments are wrong, and the last line says which; before it comes the usage.
            said = "\n".join(self._launcher_said[-1 if code == 2 else -_LAST_LINES :])
            return LaunchError(f"torchrun ended with exit code {code} and named no rank. It said:\n{said}")

        def precedence(rank: int) -> tuple[bool, float, bool]:
            summary, at = raised.get(rank, ("", float("inf")))
            # What ended with SIGTERM was most likely ended by the launcher, because of another rank.
            return is_echo(summary), at, failed[rank] == -signal.SIGTERM

        first = min(failed, key=precedence)
        because = f": {raised[first][0]}" if first in raised else ""
        last = self._ranks_said[first, "stderr"] or self._ranks_said[first, "stdout"]
        lines = "\n".join(["Its last lines:", *last]) if last else "It printed nothing."
        return LaunchError(f"rank {first} failed with {_exit(failed[first])}{because}. {lines}")

    def _raise_hung(self, seconds: float) -> None:
        asked = [peer for peer in self._peers if peer.rank is not None and not peer.gone]
        for peer in asked:
            with contextlib.suppress(OSError):
                peer.connection.sendall(b"?")
        limit = time.monotonic() + _ANSWER_LIMIT_S
        while time.monotonic() < limit and any(peer.report is None and not peer.gone for peer in asked):
            self._poll(limit - time.monotonic())
        known = {peer.rank: peer for peer in self._peers if peer.rank is not None}
        waits = waits_from((rank, known[rank].report, known[rank].gone) for rank in sorted(known))
        if not waits:
            raise RanksHung(f"still running after {seconds:g} s, and no rank has started that could be asked.", ())
        raise RanksHung(explain(waits, seconds), waits)

    def __exit__(self, *_: object) -> None:
        with self._open:
            self._end()

    def _end(self) -> None:
        """The launcher first: only it knows all its ranks, and each of them leads a session of its own."""
        if self._process.poll() is None:
            self._process.terminate()
            limit = time.monotonic() + _GRACE_S
            while self._process.poll() is None and time.monotonic() < limit:
                # Reads on, or a launcher that writes to a full pipe would never end.
                self._poll(_POLL_S)
        self._kill_ranks()
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._kill_ranks()

    def _kill_ranks(self) -> None:
        for peer in self._peers:
            if not peer.gone and peer.rank is not None:
                _kill(peer.pid)
        for pid in _marked(self._mark):
            if pid != self._process.pid:
                _kill(pid)


def _short_folder() -> tempfile.TemporaryDirectory[str]:
    """A temporary folder in which a socket can be bound; in /tmp if the usual place has too long a name."""
    make = partial(tempfile.TemporaryDirectory, prefix="course_pp_", ignore_cleanup_errors=True)
    folder = make()
    if len(os.fsencode(os.path.join(folder.name, _SOCKET))) <= _MOST_ADDRESS_BYTES:
        return folder
    folder.cleanup()
    return make(dir="/tmp")


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def _marked(mark: str) -> Iterator[int]:
    """Processes whose environment carries ``mark``, where the system shows environments (Linux)."""
    wanted = f"{_MARK}={mark}".encode()
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if wanted in entry.read_bytes().split(b"\0"):
                yield int(entry.parent.name)


def _failed_ranks(report: str) -> Iterator[tuple[int, int]]:
    """(rank, exit code) of each failure in torchrun's closing report."""
    for match in re.finditer(r"rank\s+: (\d+) \(local_rank: \d+\)\s+exitcode\s+: (-?\d+)", report):
        yield int(match[1]), int(match[2])


def _exit(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal_name(-code)
