"""The judge of orders: can it run, does it hold too much, does it take too long, and what probably leads to that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from course_pp.exercises.expect import expect_list
from course_pp.exercises.mistakes import Cause, Mistake, why
from course_pp.schedule import Action, Costs, Schedule, Timeline, check, simulate

__all__ = ["Orders", "judge_orders", "read_order", "shown"]

Row = tuple[Action, ...]


class Orders(NamedTuple):
    """Orders that are refused: facts for a table of causes.

    Attributes:
        rows: actions of each rank.
        timeline: timeline of the answer; None if it cannot run.
        best: timeline of the reference.
        rank: the rank that holds too much; -1 where the fault is another.
    """

    rows: Sequence[Row]
    timeline: Timeline | None
    best: Timeline
    rank: int = -1

    @property
    def peaks(self) -> Sequence[int]:
        """The most activations that each rank holds, if it can run."""
        return self.timeline.peak_activations if self.timeline else ()

    @property
    def peak(self) -> int:
        """The most activations that ``rank`` holds."""
        return self.peaks[self.rank]

    def holds_everything(self) -> bool:
        """Whether ``rank`` does all of its forwards before its first backward."""
        return self.peak == len(self.rows[self.rank]) // 2


def read_order(
    value: Any,
    what: str,
    wanted: Iterable[Action],
    foreign: Callable[[Action], str],
    lacking: Callable[[Action], str],
    repeated: Callable[[Action], str] = lambda action: "",
    most_shown: int = 60,
) -> tuple[Row, str]:
    """Return the actions that were meant, each of ``wanted`` once, and a line that shows them.

    Args:
        value: what the answer returned: actions, or their texts.
        what: the call.
        wanted: the actions of this rank, in any order.
        foreign: why an action does not belong here.
        lacking: why one is missing.
        repeated: why one is there more than once.
        most_shown: a longer order is not shown.

    Raises:
        Mistake: it is no list of actions, or not of those.
    """
    texts = [str(each) for each in expect_list(value, what)]
    example = f"`{what}` is `{' '.join(texts) or '[]'}`." if len(texts) <= most_shown else ""
    try:
        row = tuple(Action.parse(text) for text in texts)
    except ValueError as error:
        raise Mistake(f"`{what}` has an entry that is no action: {error}.", "", example) from None
    counts, needed = Counter(row), dict.fromkeys(wanted)
    for action in row:
        if action not in needed:
            raise Mistake(
                f"`{what}` has `{action}`, which does not belong there.", foreign(action), example
            )
    for action in needed:
        if not counts[action]:
            raise Mistake(f"`{what}` lacks `{action}`.", lacking(action), example)
        if counts[action] > 1:
            raise Mistake(
                f"`{what}` has `{action}` {counts[action]} times.", repeated(action), example
            )
    return row, example


def judge_orders(
    given: str,
    yours: Schedule | Sequence[Row],
    reference: Schedule,
    impossible: Cause,
    crowded: Cause,
    slow: Cause,
    costs: Iterable[Costs] = (Costs(),),
) -> None:
    """Ask for an order that can run, holds no more on any rank than the reference, and takes no
    longer.

    Args:
        given: the sizes, as a message begins: ``"With p=4 and m=8"``.
        yours: the answer's, on the ranks of the reference.
        reference: as good as can be asked for.
        impossible: why it cannot run.
        crowded: why ``orders.rank`` holds more.
        slow: why it takes longer.
        costs: with each of which it is simulated.

    Raises:
        Mistake: with the order as it is.
    """
    if not isinstance(yours, Schedule):
        yours = Schedule("yours", reference.placement, tuple(yours))
    rows = tuple(tuple(part for action in row for part in action.parts) for row in yours.actions)
    if problems := check(yours):
        orders = Orders(rows, None, simulate(reference))
        raise Mistake(
            f"{given} it cannot run: {problems[0]}.", why(impossible, orders), shown(rows)
        )
    for each in costs:
        timeline, best = simulate(yours, each), simulate(reference, each)
        for rank, (peak, enough) in enumerate(
            zip(timeline.peak_activations, best.peak_activations, strict=True)
        ):
            if peak > enough:
                cause = why(crowded, Orders(rows, timeline, best, rank))
                symptom = (
                    f"{given}, rank {rank} holds {peak} activations at its peak; {enough} are"
                    " enough."
                )
                raise Mistake(symptom, cause, shown(rows))
        if timeline.makespan > best.makespan:
            symptom = f"{given} it takes {timeline.makespan:g} units; {best.makespan:g} are enough."
            raise Mistake(symptom, why(slow, Orders(rows, timeline, best)), shown(rows))


def shown(rows: Sequence[Sequence[object]]) -> str:
    """A line a rank."""
    return "\n".join(f"rank {rank}: {' '.join(map(str, row))}" for rank, row in enumerate(rows))
