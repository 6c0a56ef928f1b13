"""``on_ranks``: run one function on several real processes and get its results back."""

from __future__ import annotations

import contextlib
import os
import pickle
import selectors
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from io import FileIO
from multiprocessing.connection import Connection, Pipe
from types import TracebackType
from typing import Any

from course_pp.launch import cells
from course_pp.launch import rank as in_rank
from course_pp.launch.arguments import refuse_bad_arguments
from course_pp.launch.client import SERVERS, Server, search_path
from course_pp.launch.errors import LaunchError, RankDied, RanksHung, RankTraceback, is_echo, signal_name, why_ended
from course_pp.launch.handover import Call
from course_pp.launch.on_slurm import TASKS
from course_pp.launch.output import Lines
from course_pp.launch.pickling import pickled
from course_pp.launch.rank import Ask as AskRank
from course_pp.launch.rank import Job, Left, Raised, Ready, Returned
from course_pp.launch.server import STATUS
from course_pp.launch.waits import Wait, explain, waits_from
from course_pp.launch.watch import Report
from course_pp.launch.where import Ask, Place, decide, on_a_node

_START_LIMIT_S = 90.0
_ANSWER_LIMIT_S = 2.0
_END_LIMIT_S = 10.0
# How long the echo of a lost peer waits for the news of what happened to the peer.
_ECHO_S = 2.0
# A pipe holds 16 pages, and a page has 64 KiB at most: one read empties it.
_PIPE_BYTES = 1 << 20


def on_ranks(
    n: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60.0,
    backend: str | None = "gloo",
    threads: int = 1,
    where: str | None = None,
) -> list[Any]:
    """Runs ``fn(rank, *args)`` on ``n`` processes, with the process group ready, and returns their results.

    What the ranks print appears here, each line labelled with its rank. ``fn`` may be defined in a notebook cell
    or in a script. No process is left behind, however the call ends.

    Args:
        n: number of ranks.
        fn: called with the rank first. It, ``args`` and its results must pickle (with cloudpickle).
        timeout_s: limit in seconds, counted from the moment all ranks are ready.
        backend: of the process group: ``"gloo"``, ``"nccl"`` (device = rank), or None for no process group, in
            which case ``init_process_group`` with ``env://`` works in ``fn``.
        threads: intra-operation threads of each rank.
        where: ``"local"``; ``"slurm"``, one node of a cluster; or None: the node of the Slurm job in which this runs,
            else a job of its own where a cluster answers, which is kept for the next calls and has GPUs unless
            ``backend`` is gloo; else this machine.

    Returns:
        ``[fn(0, *args), …, fn(n - 1, *args)]``.

    Raises:
        Whatever the first failing rank raised, with that rank's traceback as its cause.
        RankDied: a rank was killed or left the process.
        RanksHung: at the time limit; says which rank waits for whom.
        LaunchError: the ranks could not be started, an exception cannot be sent back, or Slurm refused or ended the
            job.
        ValueError, TypeError: an argument is of no use.
        RuntimeError: called from inside a rank.
    """
    __tracebackhide__ = True  # a reader looks for the line of the rank, not for ours
    refuse_bad_arguments(n, fn, args, timeout_s, threads)
    payload = pickled(fn, args)
    ask = Ask.of_call(n, timeout_s, backend)
    place = _place(ask, where)
    if place.fallen_back:
        print(place.said, flush=True)
    if place.local:
        results = run_ranks(n, payload, timeout_s, backend, threads)
    else:
        own_interpreter = place.site.python or place.site.container
        call = Call(
            n=n,
            payload=payload,
            backend=backend,
            threads=threads,
            timeout_s=timeout_s,
            sys_path=None if own_interpreter else tuple(search_path()),
            environ={},
            cwd=os.getcwd(),
            argv=tuple(sys.argv),
            sources=cells.sources(),
        )
        results = TASKS.results(place, ask, call)
    return [pickle.loads(result) for result in results]


def run_ranks(n: int, payload: bytes, timeout_s: float, backend: str | None, threads: int) -> list[bytes]:
    """`on_ranks` on this machine, for a function and arguments that are pickled; its results are, too."""
    __tracebackhide__ = True
    with _Crew(n, timeout_s) as crew:
        crew.start(payload, backend, threads)
        return crew.results()


def _place(ask: Ask, where: str | None) -> Place:
    __tracebackhide__ = True
    if where is None and on_a_node():
        where = "local"
    return decide(ask, where, kept=TASKS.kept)


class _Rank:
    """The caller's view of one rank: three connections and how it ended."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.control, far_control = Pipe()
        self.life, far_life = socket.socketpair()
        (out, far_out), (err, far_err) = _pipe(), _pipe()
        self._far: tuple[Connection | socket.socket | FileIO, ...] = (far_control, far_life, far_out, far_err)
        self.outputs = {out: Lines(partial(_print, number, "stdout")), err: Lines(partial(_print, number, "stderr"))}
        self.ready = False
        self.end: Returned | Raised | Left | None = None
        self.exit_code: int | None = None
        self.report: Report | None = None

    def fork(self, server: Server, listener: list[int]) -> None:
        try:
            server.fork([end.fileno() for end in self._far] + listener)
        finally:
            for end in self._far:
                end.close()

    def close(self) -> None:
        for end in (*self._far, self.control, self.life, *self.outputs):
            end.close()

    @property
    def running(self) -> bool:
        return self.end is None and self.exit_code is None


def _pipe() -> tuple[FileIO, FileIO]:
    """A pipe whose ends close with the objects that own them, even when an interrupt comes between two lines."""
    read, write = os.pipe()
    return FileIO(read, "r"), FileIO(write, "w")


def _print(rank: int, stream: str, line: str) -> None:
    getattr(sys, stream).write(f"[rank {rank}] {line}\n")


class _Crew:
    """The ranks of one call. Leaving the context ends them all."""

    def __init__(self, n: int, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._open = contextlib.ExitStack()
        self._selector = self._open.enter_context(selectors.DefaultSelector())
        self._ranks: list[_Rank] = []
        self._n = n
        self._server = SERVERS.get()

    def __enter__(self) -> _Crew:
        return self

    def start(self, payload: bytes, backend: str | None, threads: int) -> None:
        listener = in_rank.listening_socket()
        job = Job(
            rank=0,
            world_size=self._n,
            port=listener.getsockname()[1],
            environ=dict(os.environ),
            sys_path=tuple(search_path()),
            cwd=os.getcwd(),
            argv=tuple(sys.argv),
            sources=cells.sources(),
            threads=threads,
            backend=backend,
            timeout_s=self._timeout_s,
        )
        with listener:
            for number in range(self._n):
                rank = _Rank(number)
                self._open.callback(rank.close)
                self._ranks.append(rank)
                rank.fork(self._server, [listener.fileno()] if number == 0 else [])
        for rank in self._ranks:
            with contextlib.suppress(OSError):
                rank.control.send_bytes(pickle.dumps(replace(job, rank=rank.number)))
                rank.control.send_bytes(payload)
            self._watch(rank)

    def _watch(self, rank: _Rank) -> None:
        register = partial(self._selector.register, events=selectors.EVENT_READ)
        register(rank.control, data=partial(self._read_message, rank))
        register(rank.life, data=partial(self._read_status, rank))
        for pipe, lines in rank.outputs.items():
            register(pipe, data=partial(self._read_output, pipe, lines))

    def results(self) -> list[bytes]:
        """Waits for every rank; returns what they returned, pickled, or raises what the first failing one did."""
        __tracebackhide__ = True
        begun = time.monotonic()
        try:
            self._wait_for_results()
        except KeyboardInterrupt:
            # Whoever interrupts wants to know what was going on.
            if any(rank.running for rank in self._ranks):
                print(explain(self._ask(), round(time.monotonic() - begun, 1)), file=sys.stderr)
            raise
        return [rank.end.value for rank in self._ranks if isinstance(rank.end, Returned)]

    def _wait_for_results(self) -> None:
        __tracebackhide__ = True
        limit, begun = time.monotonic() + _START_LIMIT_S, False
        while any(rank.end is None for rank in self._ranks):
            self._poll(limit - time.monotonic())
            self._raise_first_failure()
            if not begun and all(rank.ready for rank in self._ranks):
                limit, begun = time.monotonic() + self._timeout_s, True
            if time.monotonic() >= limit:
                waits = self._ask()
                raise RanksHung(explain(waits, self._timeout_s if begun else _START_LIMIT_S), waits)

    def _poll(self, seconds: float) -> None:
        for key, _ in self._selector.select(max(0.0, seconds)):
            key.data()

    def _read_message(self, rank: _Rank) -> None:
        try:
            message = rank.control.recv()
        except (EOFError, OSError):
            # The life socket will say how the rank ended.
            self._selector.unregister(rank.control)
            return
        self._server.warm = True
        if isinstance(message, Ready):
            rank.ready = True
        elif isinstance(message, Report):
            rank.report = message
        else:
            rank.end = message

    def _read_status(self, rank: _Rank) -> None:
        data = rank.life.recv(STATUS.size)
        self._selector.unregister(rank.life)
        if not data:
            raise self._server.lost()
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
        # A peer of this rank is dead or about to say what went wrong; its news decides.
        while _is_echo(first) and any(rank.running for rank in self._ranks) and time.monotonic() < settled:
            self._poll(settled - time.monotonic())
            first = self._first_failure() or first
        raise self._error(first)

    def _first_failure(self) -> _Rank | None:
        failed = [r for r in self._ranks if isinstance(r.end, Raised | Left) or r.exit_code is not None]
        return min(failed, key=_precedence, default=None)

    def _error(self, rank: _Rank) -> BaseException:
        if rank.exit_code is not None:
            return RankDied(_death(rank.number, rank.exit_code), rank.number, rank.exit_code)
        if isinstance(rank.end, Left):
            message = (
                f"rank {rank.number} left through sys.exit({rank.end.exit_code}) before its function returned. "
                "Return a value instead."
            )
            return RankDied(message, rank.number, rank.end.exit_code)
        assert isinstance(rank.end, Raised)
        return _rebuilt(rank.number, self._n, rank.end)

    def _ask(self) -> tuple[Wait, ...]:
        """What each rank is doing now."""
        asked = [rank for rank in self._ranks if rank.running]
        for rank in asked:
            with contextlib.suppress(OSError):
                rank.control.send(AskRank())
        limit = time.monotonic() + _ANSWER_LIMIT_S
        while time.monotonic() < limit and any(rank.report is None for rank in asked):
            self._poll(limit - time.monotonic())
        self._drain()
        return waits_from((rank.number, rank.report, rank.end is not None) for rank in self._ranks)

    def _drain(self) -> None:
        """Prints what is in the pipes, and no more: ranks may write faster than what we print to can take."""
        outputs = {pipe for rank in self._ranks for pipe in rank.outputs}
        for key, _ in self._selector.select(0):
            if key.fileobj in outputs:
                key.data()

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        # An interrupt in here cuts the waiting and printing short; whatever is open closes, which ends ranks as well.
        with self._open:
            for rank in self._ranks:
                with contextlib.suppress(OSError):
                    rank.life.shutdown(socket.SHUT_WR)
            self._wait_for_ends()
            self._drain()
            self._preload()
            for rank in self._ranks:
                for lines in rank.outputs.values():
                    lines.close()

    def _preload(self) -> None:
        """Only now, because the server ends no rank while it imports."""
        imported = {name for rank in self._ranks if isinstance(rank.end, Returned) for name in rank.end.imported}
        if imported:
            self._server.preload(tuple(sorted(imported)))

    def _wait_for_ends(self) -> None:
        limit = time.monotonic() + _END_LIMIT_S
        for rank in self._ranks:
            rank.life.settimeout(max(0.1, limit - time.monotonic()))
            with contextlib.suppress(OSError):
                # While the server still imports torch there is no rank yet; when forked it finds itself unwanted.
                if self._server.warm:
                    rank.life.recv(STATUS.size)


def _precedence(rank: _Rank) -> tuple[bool, float]:
    """Order of failures: what is only the echo of another's comes last, then by time; a death is never an echo."""
    return _is_echo(rank), rank.end.at if isinstance(rank.end, Raised) else time.monotonic()


def _is_echo(rank: _Rank) -> bool:
    return isinstance(rank.end, Raised) and is_echo(rank.end.summary)


def _death(rank: int, exit_code: int) -> str:
    how = f"ended with exit code {exit_code}" if exit_code >= 0 else f"was ended by {signal_name(-exit_code)}"
    return f"rank {rank} {how} before its function returned. {why_ended(exit_code)}"


def _rebuilt(rank: int, n: int, raised: Raised) -> BaseException:
    """What the rank raised; a `LaunchError` with its summary where that cannot be built again, or not be marked."""
    substitute = LaunchError(f"rank {rank} raised {raised.summary}")
    with contextlib.suppress(Exception):
        error = pickle.loads(raised.exception) if raised.exception is not None else substitute
        if isinstance(error, BaseException):
            return _marked(error, rank, n, raised.text)
    return _marked(substitute, rank, n, raised.text)


def _marked(error: BaseException, rank: int, n: int, text: str) -> BaseException:
    error.__cause__ = RankTraceback(rank, text)
    error.add_note(f"Raised first on rank {rank} of {n}.")
    return error
