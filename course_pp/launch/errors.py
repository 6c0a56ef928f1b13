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
    """Return whether an exception only says that a peer has failed: the cause lies with that peer.

    Exceptions of torch and gloo name a lost connection in their ``summary``, ``Type: message``.
    Exceptions of this package have the attribute ``began_elsewhere``.
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
    """Return whether ``linecache`` has the source, but not from a file."""
    entry = linecache.cache.get(filename, ())
    # The entry of a file has a modification time, or one element while it is not read yet.
    return len(entry) == 4 and entry[1] is None


class _Sentence(BaseException):
    """An exception that a notebook shows as the cell's line and the message, without our frames."""

    def _render_traceback_(self) -> list[str]:
        # IPython calls this method, if there is one, in place of printing a traceback.
        before = self.__cause__
        if before is None and not self.__suppress_context__:
            before = self.__context__
        shown = []
        if isinstance(before, RankTraceback):
            shown.append(str(before))
        elif before is not None:
            shown.append("".join(traceback.format_exception(before)))

        frames = traceback.extract_tb(self.__traceback__)
        cells = [frame for frame in frames if is_cell(frame.filename)]
        if cells:
            shown.append(f"----> {cells[-1].lineno} {cells[-1].line}")
        return [*shown, f"{type(self).__name__}: {self}", *getattr(self, "__notes__", ())]


class LaunchError(_Sentence, RuntimeError):
    """A run failed. The message names the rank and what happened to it."""


class RankDied(LaunchError):
    """The process of ``rank`` ended before its function returned.

    An ``exit_code`` of ``-n`` means that signal ``n`` ended it.
    """

    def __init__(self, message: str, rank: int, exit_code: int) -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code

    def __reduce__(self) -> tuple[type[RankDied], tuple[str, int, int]]:
        return type(self), (str(self), self.rank, self.exit_code)


class RanksHung(_Sentence, TimeoutError):
    """Ranks were still running at the time limit.

    ``waits`` says what every rank did at that moment, in rank order.
    """

    def __init__(self, message: str, waits: tuple[Wait, ...] = ()) -> None:
        super().__init__(message)
        self.waits = waits


class RankTraceback(Exception):
    """A rank's own traceback as text. It is the cause of the exception that the caller gets."""


def keep_first_frame(error: Exception) -> None:
    """Cut our own frames off the traceback of an error that explains itself.

    That is a refusal of this package, or an error of a rank, which brings the rank's traceback. Any
    other error may be a fault of ours, and keeps its frames.
    """
    if error.__traceback__ is not None and (
        isinstance(error.__cause__, RankTraceback) or _is_refusal(error)
    ):
        error.__traceback__.tb_next = None


def _is_refusal(error: Exception) -> bool:
    """Return whether a ``raise`` in this package made the error.

    A fault in our code raises the same types, but Python raises them, not a ``raise`` statement.
    """
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
    """The state of one rank at the moment when it was asked.

    Attributes:
        rank: number of the rank.
        operation: name of the call of ``torch.distributed`` that it waits in, or `COMPUTES`,
            `RETURNED`, `SILENT` (native code that lets no other thread run), or `SENDING` (pickles
            and sends its result or exception).
        peers: ranks that it waits for.
        where: the user's source line, for example ``"cell line 4: dist.recv(x, src=1)"``; may be
            empty.
    """

    rank: int
    operation: str
    peers: tuple[int, ...]
    where: str


def waits_from(ranks: Iterable[tuple[int, RankReport | None, bool]]) -> tuple[Wait, ...]:
    """Turn (rank, report, has returned) of each rank into its `Wait`.

    A rank in a collective waits for those ranks of its group that have not joined it.
    """
    ranks = tuple(ranks)
    calls = {rank: report.call for rank, report, _ in ranks if report is not None}
    return tuple(_wait(rank, report, returned, calls=calls) for rank, report, returned in ranks)


def _wait(
    rank: int, report: RankReport | None, returned: bool, calls: dict[int, WatchedCall | None]
) -> Wait:
    if returned:
        return Wait(rank, RETURNED, (), "")
    if report is None:
        return Wait(rank, SILENT, (), "")
    where = ""
    if report.file:
        place = "cell" if has_name_of_cell(report.file) else os.path.basename(report.file)
        where = f"{place} line {report.line}"
        if report.text:
            where += f": {report.text}"
    call = report.call
    if call is None:
        return Wait(rank, COMPUTES, (), where)
    if call.peer is not None:
        return Wait(rank, call.operation, (call.peer,), where)
    absent = []
    for peer in call.group:
        joined = call.collective and calls.get(peer) == call
        if peer != rank and not joined:
            absent.append(peer)
    return Wait(rank, call.operation, tuple(absent), where)


def explain(waits: Sequence[Wait], seconds: float, interrupted: bool = False) -> str:
    """Return one message: a line for each running rank with its state, then the `diagnosis`."""
    running = [wait for wait in waits if wait.operation != RETURNED]
    count = "1 rank" if len(running) == 1 else f"{len(running)} ranks"
    lines = [f"{count} still running after {seconds:g} s:"]
    lines += [f"  {state(wait)}" for wait in running]
    lines.append(diagnosis(waits, interrupted))
    return "\n".join(lines).rstrip()


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
    waits_for = {wait.rank: wait.peers for wait in waits}
    return tuple(by_rank[rank] for rank in find_cycle(waits_for))


def diagnosis(waits: Sequence[Wait], interrupted: bool = False) -> str:
    """Say which rank holds up which, and what to change.

    If the learner ``interrupted`` the run, advice to raise the time limit would be out of place.
    """
    cycle = waiting_ring(waits)
    if cycle:
        links: list[str] = []
        for one, other in zip(cycle, (*cycle[1:], cycle[0]), strict=True):
            waits_for = "for" if links else "waits for"
            links.append(f"rank {one.rank} {waits_for} rank {other.rank}")
        ring = f"{', '.join(links[:-1])} and {links[-1]}"
        return f"{ring.capitalize()}: none can move. {_way_out(cycle)}"
    return " ".join(_about_missing(waits, interrupted))


def _way_out(cycle: Sequence[Wait]) -> str:
    operations = {wait.operation for wait in cycle}
    if operations == {"recv"}:
        return "Let one of them send first."
    if operations == {"send"}:
        return "Let one of them receive first, or use isend."
    return "Let all of them make their calls in the same order."


def _about_missing(waits: Sequence[Wait], interrupted: bool) -> list[str]:
    """Say, where no ring is to blame, which ranks the others wait for."""
    awaited = {peer for wait in waits for peer in wait.peers}
    idle = [wait for wait in waits if wait.rank in awaited and not wait.peers]
    gone = [wait.rank for wait in idle if wait.operation in (RETURNED, SENDING)]
    busy = [wait.rank for wait in idle if wait.operation not in (RETURNED, SENDING)]
    sentences = []
    if gone:
        have, it = ("has", "it") if len(gone) == 1 else ("have", "they")
        sentences.append(
            f"{_named(gone).capitalize()} {have} returned: {it} will neither send, receive nor join"
            " any more."
        )
    if busy:
        them = "it" if len(busy) == 1 else "them"
        sentences.append(f"Look at {_named(busy)} first: the others wait for {them}.")
    if sentences:
        return sentences

    # Nobody waits for another rank, so time is the matter.
    operations = {wait.operation for wait in waits}
    if SENDING in operations:
        advice = "Let" if interrupted else "Raise timeout_s, or let"
        return [f"{advice} the ranks return less."]
    if operations <= {COMPUTES, RETURNED}:
        advice = "look" if interrupted else "raise timeout_s, or look"
        return [f"Nobody waits for a message: {advice} for a loop that does not end."]
    return []
