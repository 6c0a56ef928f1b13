"""The ranks of one call of ``on_ranks``, as their caller sees them."""

from __future__ import annotations

import contextlib
import os
import pickle
import selectors
import socket
import time
from dataclasses import replace
from functools import partial
from io import FileIO
from types import TracebackType

from course_pp.launch.channel import Channel, Left, Raised, RankJob, Returned, Said
from course_pp.launch.errors import (
    SENDING,
    LaunchError,
    RankDied,
    RanksHung,
    RankTraceback,
    Wait,
    explain,
    is_echo,
    signal_name,
    waits_from,
    why_ended,
)
from course_pp.launch.fork_server import SERVERS, STATUS, ForkServer
from course_pp.launch.surroundings import Lines, show
from course_pp.launch.watch import RankReport

_START_LIMIT_S = 90.0
_ANSWER_LIMIT_S = 2.0
_END_LIMIT_S = 10.0
# A rank that lost its peer often reports it before the peer's own news arrives.
_ECHO_S = 2.0
# A pipe holds 16 pages, and a page has 64 KiB at most: one read empties it.
_PIPE_BYTES = 1 << 20


class _RankLink:
    """The caller's view of one rank: its connections, what it has said, and how it ended."""

    def __init__(self, number: int) -> None:
        self.number = number
        # The stack closes what is open so far if a later line finds no descriptor left.
        with contextlib.ExitStack() as opened:
            control, far_control = map(opened.enter_context, socket.socketpair())
            self.life, far_life = map(opened.enter_context, socket.socketpair())
            out, far_out = map(opened.enter_context, _pipe())
            err, far_err = map(opened.enter_context, _pipe())
            self._open = opened.pop_all()
        self._far: tuple[socket.socket | FileIO, ...] = (far_control, far_life, far_out, far_err)
        self.channel = Channel(control)
        self.outputs = {
            out: Lines(partial(self._show, "stdout")),
            err: Lines(partial(self._show, "stderr")),
        }
        self.ready = False
        self.over = False
        self.end: Returned | Raised | Left | None = None
        self.exit_code: int | None = None
        self.report: RankReport | None = None

    def _show(self, stream: str, line: str) -> None:
        __tracebackhide__ = True
        show(stream, f"[rank {self.number}] {line}")

    def fork(self, server: ForkServer, listener: list[int]) -> None:
        """Have the server fork the rank, which takes over the far ends of its connections."""
        try:
            server.fork([end.fileno() for end in self._far] + listener)
        finally:
            for end in self._far:
                end.close()

    def close(self) -> None:
        self._open.close()

    @property
    def running(self) -> bool:
        """Whether the process lives and has not said how its function ended."""
        return self.end is None and self.exit_code is None

    @property
    def can_answer(self) -> bool:
        """Whether the rank can say what it does: no half of a message is on its way, to or fro."""
        return self.running and not self.channel.is_sending and not self.channel.is_receiving

    @property
    def failed(self) -> bool:
        """Whether the rank will send no result."""
        return isinstance(self.end, Raised | Left) or self.exit_code is not None

    @property
    def is_echo(self) -> bool:
        """Whether the rank only failed because another one did."""
        return isinstance(self.end, Raised) and is_echo(self.end.summary, self.end.began_elsewhere)

    @property
    def precedence(self) -> tuple[bool, float]:
        """The key by which failures are sorted: echoes come last, then the time decides."""
        at = self.end.at if isinstance(self.end, Raised) else time.monotonic()
        return self.is_echo, at

    def error(self, n: int) -> BaseException:
        if (code := self.exit_code) is not None:
            how = f"rank {self.number} was ended by {signal_name(-code)}"
            if code >= 0:
                how = f"rank {self.number} ended with exit code {code}"
            when = "before its function returned"
            if self.over:
                when = "while it sent what its function returned or raised"
            return RankDied(f"{how} {when}. {why_ended(code)}", self.number, code)
        if isinstance(self.end, Left):
            code = self.end.exit_code
            left = f"rank {self.number} left through sys.exit({code}) before its function returned"
            return RankDied(f"{left}. Return a value instead.", self.number, code)
        assert isinstance(self.end, Raised)
        if self.end.exception is not None:
            # Some exceptions cannot be built again, and some refuse a cause or a note.
            with contextlib.suppress(Exception, SystemExit):
                error = pickle.loads(self.end.exception)
                # A rank's KeyboardInterrupt would pass for one of the caller's own.
                if isinstance(error, Exception):
                    return self._marked(error, self.end, n)
        substitute = LaunchError(f"rank {self.number} raised {self.end.summary}")
        return self._marked(substitute, self.end, n)

    def _marked(self, error: Exception, raised: Raised, n: int) -> Exception:
        error.__cause__ = RankTraceback(f"on rank {self.number}:\n{raised.text.rstrip()}")
        error.add_note(f"Raised first on rank {self.number} of {n}.")
        return error


def _pipe() -> tuple[FileIO, FileIO]:
    """Return the two ends of a pipe as objects, which close when nobody holds them any more.

    So no descriptor is lost when an interrupt comes between two lines.
    """
    read, write = os.pipe()
    return FileIO(read, "r"), FileIO(write, "w")


class Crew:
    """The ranks of one call. Leaving the context ends them all."""

    def __init__(self, job: RankJob) -> None:
        self._job = job
        self._open = contextlib.ExitStack()
        self._selector = self._open.enter_context(selectors.DefaultSelector())
        self._ranks: list[_RankLink] = []
        self._n = job.world_size
        self._server = SERVERS.get()

    def __enter__(self) -> Crew:
        return self

    def start(self, payload: bytes) -> None:
        """Fork the ranks and begin to send them their work."""
        # Rank 0 inherits the socket on which its store listens: a port number alone could be taken
        # by another process before the rank gets to bind it.
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(socket.SOMAXCONN)
            port = listener.getsockname()[1]
            for number in range(self._n):
                rank = _RankLink(number)
                self._open.callback(rank.close)
                self._ranks.append(rank)
                rank.fork(self._server, [listener.fileno()] if number == 0 else [])
        for rank in self._ranks:
            rank.channel.send(pickle.dumps(replace(self._job, rank=rank.number, port=port)))
            rank.channel.send(payload)
            self._watch(rank)

    def _watch(self, rank: _RankLink) -> None:
        read = selectors.EVENT_READ
        either = selectors.EVENT_READ | selectors.EVENT_WRITE
        self._selector.register(rank.channel, either, partial(self._exchange, rank))
        self._selector.register(rank.life, read, partial(self._read_status, rank))
        for pipe, lines in rank.outputs.items():
            self._selector.register(pipe, read, partial(self._read_output, pipe, lines))

    def results(self) -> list[bytes]:
        """Return the pickled results, or raise the exception of the first rank that failed."""
        __tracebackhide__ = True
        begun = time.monotonic()
        try:
            self._wait_for_results()
        except KeyboardInterrupt:
            # Whoever interrupts wants to know what was going on.
            if any(rank.running for rank in self._ranks):
                show(
                    "stderr",
                    explain(self._ask(), round(time.monotonic() - begun, 1), interrupted=True),
                )
            raise
        return [rank.end.value for rank in self._ranks if isinstance(rank.end, Returned)]

    def _wait_for_results(self) -> None:
        __tracebackhide__ = True
        limit_s = _START_LIMIT_S
        limit = time.monotonic() + limit_s
        begun = False
        while any(rank.end is None for rank in self._ranks):
            self._poll(limit - time.monotonic())
            self._raise_first_failure()
            # The caller's limit is for fn: importing torch and meeting do not count.
            if not begun and all(rank.ready for rank in self._ranks):
                begun = True
                limit_s = self._job.timeout_s
                limit = time.monotonic() + limit_s
            if time.monotonic() >= limit:
                waits = self._ask()
                message = explain(waits, limit_s)
                if not begun:
                    message += (
                        "\nfn was not called yet: ranks import torch, rebuild fn and args, and meet"
                        " first."
                    )
                raise RanksHung(message, waits)

    def _poll(self, seconds: float) -> None:
        for key, _ in self._selector.select(max(0.0, seconds)):
            key.data()

    def _exchange(self, rank: _RankLink) -> None:
        try:
            if rank.channel.is_sending:
                rank.channel.write()
                if not rank.channel.is_sending:
                    self._selector.modify(
                        rank.channel, selectors.EVENT_READ, partial(self._exchange, rank)
                    )
            data = rank.channel.read()
        except (EOFError, OSError):
            # The life socket will say how the rank ended.
            self._selector.unregister(rank.channel)
            return
        if data is not None:
            self._take(rank, pickle.loads(data))

    def _take(self, rank: _RankLink, message: Said | RankReport | Returned | Raised | Left) -> None:
        self._server.warm = True
        if isinstance(message, Said):
            rank.ready = True
            rank.over = message is Said.OVER
        elif isinstance(message, RankReport):
            rank.report = message
        else:
            rank.end = message

    def _read_status(self, rank: _RankLink) -> None:
        data = rank.life.recv(STATUS.size)
        self._selector.unregister(rank.life)
        if not data:
            raise self._server.lost()
        # The rank's last messages come on another connection, and were sent before it ended.
        for message in rank.channel.read_all():
            self._take(rank, pickle.loads(message))
        (rank.exit_code,) = STATUS.unpack(data)

    def _read_output(self, pipe: FileIO, lines: Lines) -> None:
        data = pipe.read(_PIPE_BYTES)
        if data:
            lines.feed(data)
        else:
            self._selector.unregister(pipe)

    def _raise_first_failure(self) -> None:
        __tracebackhide__ = True
        first = self._first_failure()
        if first is None:
            return
        settled = time.monotonic() + _ECHO_S
        # A peer of this rank is dead or about to say why it failed; its news decides.
        while first.is_echo and time.monotonic() < settled:
            if not any(rank.running for rank in self._ranks):
                break
            self._poll(settled - time.monotonic())
            first = self._first_failure() or first
        raise first.error(self._n)

    def _first_failure(self) -> _RankLink | None:
        failed = [rank for rank in self._ranks if rank.failed]
        return min(failed, key=lambda rank: rank.precedence, default=None)

    def _ask(self) -> tuple[Wait, ...]:
        """Ask the ranks that can answer what they do, and return what every rank does."""
        asked = [rank for rank in self._ranks if rank.can_answer]
        for rank in asked:
            with contextlib.suppress(OSError):
                rank.channel.send(pickle.dumps(Said.ASK))
                rank.channel.write()
        limit = time.monotonic() + _ANSWER_LIMIT_S
        while any(rank.running and rank.report is None for rank in asked):
            if time.monotonic() >= limit:
                break
            self._poll(limit - time.monotonic())
        self._drain()

        waits = waits_from((rank.number, rank.report, rank.end is not None) for rank in self._ranks)
        # Only the caller knows that a rank's function is over: the rank reports its innermost line.
        over = {rank.number for rank in self._ranks if rank.running and rank.over}
        return tuple(
            replace(wait, operation=SENDING, peers=()) if wait.rank in over else wait
            for wait in waits
        )

    def _drain(self) -> None:
        """Print the bytes that are in the pipes now, and no more.

        Ranks may write faster than our own output takes it.
        """
        outputs = {pipe for rank in self._ranks for pipe in rank.outputs}
        for key, _ in self._selector.select(0):
            if key.fileobj in outputs:
                key.data()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        # An interrupt in here cuts the waiting and the printing short. The connections close all
        # the same, and that ends the ranks as well.
        with self._open:
            for rank in self._ranks:
                with contextlib.suppress(OSError):
                    rank.life.shutdown(socket.SHUT_WR)
            self._wait_for_ends()
            self._preload()
            # An exception on its way is worth more than the news that printing failed.
            unimportant = () if kind is None else (OSError, ValueError)
            with contextlib.suppress(*unimportant):
                self._drain()
                for rank in self._ranks:
                    for lines in rank.outputs.values():
                        lines.close()

    def _preload(self) -> None:
        """Have the server import the modules that these ranks imported; the next ranks have them.

        Called last, because the server cannot end a rank while it imports.
        """
        imported: set[str] = set()
        for rank in self._ranks:
            if isinstance(rank.end, Returned):
                imported.update(rank.end.imported)
        if imported:
            self._server.preload(tuple(sorted(imported)))

    def _wait_for_ends(self) -> None:
        limit = time.monotonic() + _END_LIMIT_S
        for rank in self._ranks:
            rank.life.settimeout(max(0.1, limit - time.monotonic()))
            with contextlib.suppress(OSError):
                # While the server still imports torch there is no rank yet. It will find its
                # connections closed, so there is nothing to wait for.
                if self._server.warm:
                    rank.life.recv(STATUS.size)
