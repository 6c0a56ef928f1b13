"""Who waits for whom: from the ranks' reports to a message that says what to change."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from course_pp.cycles import find_cycle
from course_pp.launch.watch import Call, Report, has_name_of_cell

COMPUTES = "computes"
RETURNED = "returned"
SILENT = "does not answer"
SENDING = "sends what its function returned or raised"


@dataclass(frozen=True)
class Wait:
    """What one rank was doing when it was asked.

    Attributes:
        rank: the rank that was asked.
        operation: name of the call of ``torch.distributed`` it waits in, or `COMPUTES`, `RETURNED`, `SILENT` (native
            code that lets no other thread run), or `SENDING` (pickles and sends its result or exception).
        peers: ranks it waits for; empty when it waits for none.
        where: the user's source line, for example ``"cell line 4: dist.recv(x, src=1)"``; may be empty.
    """

    rank: int
    operation: str
    peers: tuple[int, ...]
    where: str


def waits_from(ranks: Iterable[tuple[int, Report | None, bool]]) -> tuple[Wait, ...]:
    """Turn each rank's (rank, report, has returned) into what the rank waits for.

    A rank in a collective waits for the ranks of its group that are not in the same collective.
    """
    ranks = tuple(ranks)
    calls = {rank: report.call for rank, report, _ in ranks if report is not None}
    return tuple(_wait(rank, report, returned, calls) for rank, report, returned in ranks)


def _wait(rank: int, report: Report | None, returned: bool, calls: dict[int, Call | None]) -> Wait:
    if returned:
        return Wait(rank, RETURNED, (), "")
    if report is None:
        return Wait(rank, SILENT, (), "")
    call, where = report.call, _where(report)
    if call is None:
        return Wait(rank, COMPUTES, (), where)
    if call.peer is not None:
        return Wait(rank, call.operation, (call.peer,), where)
    absent = [peer for peer in call.group if peer != rank and not (call.collective and calls.get(peer) == call)]
    return Wait(rank, call.operation, tuple(absent), where)


def _where(report: Report) -> str:
    if not report.file:
        return ""
    place = "cell" if has_name_of_cell(report.file) else os.path.basename(report.file)
    return f"{place} line {report.line}" + (f": {report.text}" if report.text else "")


def explain(waits: Sequence[Wait], seconds: float, interrupted: bool = False) -> str:
    """Return one message, a line a rank: who waits for whom and where, a cycle if there is one, what to change.

    Whoever interrupted is not told to raise the time limit, which they did not wait for.
    """
    running = [wait for wait in waits if wait.operation != RETURNED]
    count = "1 rank" if len(running) == 1 else f"{len(running)} ranks"
    states = "\n".join(f"  {state(wait)}" for wait in running)
    return f"{count} still running after {seconds:g} s:\n{states}\n{diagnosis(waits, interrupted)}".rstrip()


def state(wait: Wait) -> str:
    """Say in a line what one rank was doing."""
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
    return tuple(by_rank[rank] for rank in find_cycle({rank: wait.peers for rank, wait in by_rank.items()}))


def diagnosis(waits: Sequence[Wait], interrupted: bool = False) -> str:
    """Say who holds up whom, and what to change."""
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
            f"{_named(gone).capitalize()} {have} returned: {it} will neither send, receive nor join any more."
        )
    if busy := [wait.rank for wait in idle if wait.rank not in gone]:
        sentences.append(f"Look at {_named(busy)} first: the others wait for {'it' if len(busy) == 1 else 'them'}.")
    if not sentences and any(wait.operation == SENDING for wait in waits):
        advice = "Let" if interrupted else "Raise timeout_s, or let"
        sentences.append(f"{advice} the ranks return less.")
    if not sentences and all(wait.operation == COMPUTES for wait in waits if wait.operation != RETURNED):
        advice = "look" if interrupted else "raise timeout_s, or look"
        sentences.append(f"Nobody waits for a message: {advice} for a loop that does not end.")
    return sentences
