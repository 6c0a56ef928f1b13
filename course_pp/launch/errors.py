"""How a run of ranks ends badly: the exceptions, what ended a rank, and who waits for whom."""

from __future__ import annotations

import dis
import linecache
import os
import re
import signal
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from course_pp.base.cycles import find_cycle
from course_pp.launch.watch import RankReport, WatchedCall, has_name_of_cell

_ECHO = re.compile(
    r"connection (closed|reset|refused|was)|broken pipe|closed by peer|pair closure|remote process"
    r" exited",
    re.I,
)


def is_echo(summary: str, began_elsewhere: bool) -> bool:
    """Return whether an exception only says that a peer is gone or has failed: the cause lies with
    that peer.

    torch and gloo name a lost connection in the ``summary``, ``Type: message``; ours say it by an
    attribute.
    """
    return began_elsewhere or bool(_ECHO.search(summary))


def signal_name(number: int) -> str:
    """Return ``"SIGKILL"``, or ``"signal 40"``: most real-time signals have no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def why_ended(exit_code: int) -> str:
    """Say what probably ended a process, from its exit code as ``subprocess`` gives it."""
    if exit_code >= 0:
        return "Something in it called os._exit, or a library ended the process."
    return {
        "SIGKILL": "Something killed it; if nobody did, the system ran out of memory.",
        "SIGABRT": (
            "A library gave up; with gloo, often a message larger than the buffer that receives it."
            " Under FSDP2 that happens where data ranks use different parameters in a step:"
            " apply_fsdp2 says what to do."
        ),
        "SIGSEGV": "Native code touched memory it does not own.",
    }.get(signal_name(-exit_code), "Something sent it that signal.")


def is_cell(filename: str) -> bool:
    entry = linecache.cache.get(filename, ())
    # The others have a modification time, or are not read yet.
    return len(entry) == 4 and entry[1] is None


class _Sentence(BaseException):
    """An exception that a notebook shows as the cell's line and the message, without our own frames."""

    def _render_traceback_(self) -> list[str]:
        # What IPython calls in place of printing a traceback.
        cells = [
            frame for frame in traceback.extract_tb(self.__traceback__) if is_cell(frame.filename)
        ]
        shown = [f"----> {cells[-1].lineno} {cells[-1].line}"] if cells else []
        before = self.__cause__ or (None if self.__suppress_context__ else self.__context__)
        if isinstance(before, RankTraceback):
            shown.insert(0, str(before))
        elif before is not None:
            shown.insert(0, "".join(traceback.format_exception(before)))
        return [*shown, f"{type(self).__name__}: {self}", *getattr(self, "__notes__", ())]


class LaunchError(_Sentence, RuntimeError):
    """A run failed. The message names the rank and what happened to it."""


class RankDied(LaunchError):
    """The process of ``rank`` ended before its function returned; exit code ``-n`` means that signal ``n`` ended it."""

    def __init__(self, message: str, rank: int, exit_code: int) -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code

    def __reduce__(self) -> tuple[type[RankDied], tuple[str, int, int]]:
        return type(self), (str(self), self.rank, self.exit_code)


class RanksHung(_Sentence, TimeoutError):
    """Ranks were still running at the time limit; ``waits`` is what every rank was doing then, in rank order."""

    def __init__(self, message: str, waits: tuple[Wait, ...] = ()) -> None:
        super().__init__(message)
        self.waits = waits


class RankTraceback(Exception):
    """A rank's own traceback, as text; the cause of the exception that the caller gets."""


def keep_first_frame(error: Exception) -> None:
    """Cut the traceback of an error that explains itself after the frame that caught it; the rest
    are our own.

    It is a refusal of this package, or comes from a rank and brings the rank's traceback. Others
    may be our faults.
    """
    if error.__traceback__ is not None and (
        isinstance(error.__cause__, RankTraceback) or _is_refusal(error)
    ):
        error.__traceback__.tb_next = None


def _is_refusal(error: Exception) -> bool:
    """Return whether a ``raise`` of this package made the error: Python makes the same kinds for a fault in it."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None or isinstance(error, AssertionError):
        return False
    code = last.tb_frame.f_code.co_code
    ours = last.tb_frame.f_globals.get("__name__", "").startswith("course_pp.")
    return ours and code[last.tb_lasti] == dis.opmap["RAISE_VARARGS"]


COMPUTES = "computes"
RETURNED = "returned"
SILENT = "does not answer"
SENDING = "sends what its function returned or raised"


@dataclass(frozen=True)
class Wait:
    """What one rank was doing when it was asked.

    Attributes:
        operation: name of the call of ``torch.distributed`` it waits in, or `COMPUTES`, `RETURNED`,
            `SILENT` (native code that lets no other thread run), or `SENDING` (pickles and sends
            its result or exception).
        where: the user's source line, for example ``"cell line 4: dist.recv(x, src=1)"``; may be
            empty.
    """

    rank: int
    operation: str
    peers: tuple[int, ...]  # that it waits for
    where: str


def waits_from(ranks: Iterable[tuple[int, RankReport | None, bool]]) -> tuple[Wait, ...]:
    """Turn each rank's (rank, report, has returned) into what it waits for: in a collective, for who is not in it."""
    ranks = tuple(ranks)
    calls = {rank: report.call for rank, report, _ in ranks if report is not None}
    return tuple(_wait(rank, report, returned, calls) for rank, report, returned in ranks)


def _wait(
    rank: int, report: RankReport | None, returned: bool, calls: dict[int, WatchedCall | None]
) -> Wait:
    if returned:
        return Wait(rank, RETURNED, (), "")
    if report is None:
        return Wait(rank, SILENT, (), "")
    call, where = report.call, ""
    if report.file:
        place = "cell" if has_name_of_cell(report.file) else os.path.basename(report.file)
        where = f"{place} line {report.line}" + (f": {report.text}" if report.text else "")
    if call is None:
        return Wait(rank, COMPUTES, (), where)
    if call.peer is not None:
        return Wait(rank, call.operation, (call.peer,), where)
    absent = [
        peer
        for peer in call.group
        if peer != rank and not (call.collective and calls.get(peer) == call)
    ]
    return Wait(rank, call.operation, tuple(absent), where)


def explain(waits: Sequence[Wait], seconds: float, interrupted: bool = False) -> str:
    """Return one message, a line a rank: who waits for whom and where, a cycle if there is one, what to change."""
    running = [wait for wait in waits if wait.operation != RETURNED]
    count = "1 rank" if len(running) == 1 else f"{len(running)} ranks"
    states = "\n".join(f"  {state(wait)}" for wait in running)
    return f"{count} still running after {seconds:g} s:\n{states}\n{diagnosis(waits, interrupted)}".rstrip()


def state(wait: Wait) -> str:
    where = f" ({wait.where})" if wait.where else ""
    if wait.operation in (COMPUTES, SILENT, SENDING):
        return f"rank {wait.rank} {wait.operation}{where}"
    if not wait.peers:
        return f"rank {wait.rank} is in {wait.operation}, as every rank of its group is{where}"
    return f"rank {wait.rank} waits in {wait.operation} for {_named(wait.peers)}{where}"


def _named(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def waiting_ring(waits: Sequence[Wait]) -> tuple[Wait, ...]:
    """Return the first ring of ranks in which each waits for the next, or ``()``."""
    by_rank = {wait.rank: wait for wait in waits}
    return tuple(
        by_rank[rank] for rank in find_cycle({rank: wait.peers for rank, wait in by_rank.items()})
    )


def diagnosis(waits: Sequence[Wait], interrupted: bool = False) -> str:
    """Say who holds up whom, and what to change: who interrupted did not wait for the time limit."""
    cycle = waiting_ring(waits)
    if cycle:
        following = (*cycle[1:], cycle[0])
        (one, other), *others = zip(cycle, following, strict=True)
        links = [
            f"Rank {one.rank} waits for rank {other.rank}",
            *(f"rank {a.rank} for rank {b.rank}" for a, b in others),
        ]
        return f"{', '.join(links[:-1])} and {links[-1]}: none can move. {_way_out(cycle)}"
    return " ".join(_about_missing(waits, interrupted))


def _way_out(cycle: Sequence[Wait]) -> str:
    operations = {wait.operation for wait in cycle}
    if operations == {"recv"}:
        return "Let one of them send first."
    if operations == {"send"}:
        return "Let one of them receive first, or use isend."
    return "Let all of them make their calls in the same order."


def _about_missing(waits: Sequence[Wait], interrupted: bool) -> list[str]:
    awaited = {peer for wait in waits for peer in wait.peers}
    idle = [wait for wait in waits if wait.rank in awaited and not wait.peers]
    gone = [wait.rank for wait in idle if wait.operation in (RETURNED, SENDING)]
    sentences = []
    if gone:
        have, it = ("has", "it") if len(gone) == 1 else ("have", "they")
        sentences.append(
            f"{_named(gone).capitalize()} {have} returned: {it} will neither send, receive nor join"
            " any more."
        )
    if busy := [wait.rank for wait in idle if wait.rank not in gone]:
        sentences.append(
            f"Look at {_named(busy)} first: the others wait for"
            f" {'it' if len(busy) == 1 else 'them'}."
        )
    if not sentences and any(wait.operation == SENDING for wait in waits):
        advice = "Let" if interrupted else "Raise timeout_s, or let"
        sentences.append(f"{advice} the ranks return less.")
    if not sentences and all(
        wait.operation == COMPUTES for wait in waits if wait.operation != RETURNED
    ):
        advice = "look" if interrupted else "raise timeout_s, or look"
        sentences.append(f"Nobody waits for a message: {advice} for a loop that does not end.")
    return sentences
