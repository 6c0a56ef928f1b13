"""The judge of orders that cannot run, hold too much or take too long, with the causes."""

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
    """Return the actions of an answer, each of ``wanted`` once, and a line that shows them.

    Args:
        value: result of the answer: actions, or their texts.
        what: the call, as a message writes it.
        wanted: the actions of this rank, in any order.
        foreign: returns the likely cause of an action that is not in ``wanted``.
        lacking: returns the likely cause of an action that is missing.
        repeated: returns the likely cause of an action that is there more than once.
        most_shown: number of actions up to which an order is shown.

    Raises:
        Mistake: the value is no list of actions, or not of these.
    """
    texts = [str(each) for each in expect_list(value, what)]
    example = ""
    if len(texts) <= most_shown:
        example = f"`{what}` is `{' '.join(texts) or '[]'}`."
    try:
        row = tuple(Action.parse(text) for text in texts)
    except ValueError as error:
        raise Mistake(f"`{what}` has an entry that is no action: {error}.", "", example) from None
    counts = Counter(row)
    needed = dict.fromkeys(wanted)
    for action in row:
        if action not in needed:
            symptom = f"`{what}` has `{action}`, which does not belong there."
            raise Mistake(symptom, foreign(action), example)
    for action in needed:
        if not counts[action]:
            raise Mistake(f"`{what}` lacks `{action}`.", lacking(action), example)
        if counts[action] > 1:
            symptom = f"`{what}` has `{action}` {counts[action]} times."
            raise Mistake(symptom, repeated(action), example)
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
    """Refuse an order that cannot run, holds more than the reference, or takes longer.

    Args:
        given: the sizes, as a message begins: ``"With p=4 and m=8"``.
        yours: order of the answer, on the ranks of the reference.
        reference: the best order there is.
        impossible: the likely cause if the order cannot run, chosen by the facts in `Orders`.
        crowded: the likely cause if rank ``orders.rank`` holds more than in the reference.
        slow: the likely cause if the order takes longer than the reference.
        costs: all costs with which the orders are simulated.

    Raises:
        Mistake: with the order of the answer.
    """
    if not isinstance(yours, Schedule):
        yours = Schedule("yours", reference.placement, tuple(yours))
    # Causes look at single actions: two that overlap count as both, one after the other.
    rows: list[Row] = []
    for row in yours.actions:
        rows.append(tuple(part for action in row for part in action.parts))

    if problems := check(yours):
        orders = Orders(rows, None, simulate(reference))
        symptom = f"{given} it cannot run: {problems[0]}."
        raise Mistake(symptom, why(impossible, orders), shown(rows))

    for each in costs:
        timeline = simulate(yours, each)
        best = simulate(reference, each)
        peaks = zip(timeline.peak_activations, best.peak_activations, strict=True)
        for rank, (peak, enough) in enumerate(peaks):
            if peak > enough:
                holds = f"rank {rank} holds {peak} activations at its peak; {enough} are enough."
                cause = why(crowded, Orders(rows, timeline, best, rank))
                raise Mistake(f"{given}, {holds}", cause, shown(rows))
        if timeline.makespan > best.makespan:
            symptom = f"{given} it takes {timeline.makespan:g} units; {best.makespan:g} are enough."
            raise Mistake(symptom, why(slow, Orders(rows, timeline, best)), shown(rows))


def shown(rows: Sequence[Sequence[object]]) -> str:
    """Return the actions of each rank, a line a rank."""
    lines = []
    for rank, row in enumerate(rows):
        lines.append(f"rank {rank}: {' '.join(map(str, row))}")
    return "\n".join(lines)
