"""Exercises of notebook 05 about orders: ZB-H1, the warm-up that H2 needs, and where weight gradients may wait."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from course_pp.exercises.answer import Answer
from course_pp.exercises.exercise import Mistake
from course_pp.exercises.expect import expect_actions, expect_int
from course_pp.schedule import Action, Costs, Schedule, Timeline, build, check, simulate

__all__ = [
    "forwards_first",
    "grade_forwards_first",
    "grade_order",
    "grade_place_weights",
    "order_zb_h1",
    "place_weights",
]


def order_zb_h1(rank: int, p: int, m: int) -> list[Action]:
    """The actions of this rank, in order: F, I and W of each microbatch."""
    warm_up = p - 1 - rank
    order = [Action(rank, "F", i) for i in range(warm_up)]
    for i in range(m):
        if warm_up + i < m:
            order.append(Action(rank, "F", warm_up + i))
        order.append(Action(rank, "I", i))
        if i >= rank:
            order.append(Action(rank, "W", i - rank))
    return order + [Action(rank, "W", i) for i in range(m - rank, m)]


_SIZES = [(4, 8), (2, 4), (4, 4), (1, 3), (3, 7), (5, 12)]


def grade_order(answer: Answer) -> None:
    """Ask for orders that can run, with 1F1B's memory and as short as ZB-H1's."""
    rows = [(rank, p, m) for p, m in _SIZES for rank in range(p)]
    orders = dict(zip(rows, answer.calls(rows), strict=True))
    for p, m in _SIZES:
        read = [_read(orders[rank, p, m], f"order_zb_h1({rank}, {p}, {m})", rank, m) for rank in range(p)]
        _judge_h1(read, m)


def _read(value: Any, what: str, rank: int, m: int) -> tuple[Action, ...]:
    """The actions that were meant: F, I and W of each microbatch once, in an order in which they can be done."""
    row, example = expect_actions(value, what, most_shown=60)
    for action in row:
        if action.kind == "B":
            raise Mistake(
                f"`{what}` has `{action}`, a whole backward.", "Here it is split: `I`, and later `W`.", example
            )
        if action.kind == "U" or action.stage != rank:
            cause = f"Rank {rank} holds stage {rank}: its actions are `{rank}F0`, `{rank}I0`, `{rank}W0` and so on."
            raise Mistake(f"`{what}` has `{action}`, which is not rank {rank}'s to do.", cause, example)
        if action.microbatch >= m:
            cause = f"The microbatches are 0 to {m - 1}."
            raise Mistake(f"`{what}` has `{action}`, a microbatch that does not exist.", cause, example)
    _refuse_wrong_counts(row, [Action(rank, kind, i) for kind in "FIW" for i in range(m)], what, example)
    return row


_WHERE_LACKING = {
    "F": "The warm-up and the steady state together do every forward.",
    "I": "After the last forward come the input gradients that are left: the drain.",
    "W": "Every weight gradient has to be done before the step ends: those put off come last.",
}


def _refuse_wrong_counts(row: Sequence[Action], wanted: Sequence[Action], what: str, example: str) -> None:
    counts, place = Counter(row), {action: at for at, action in enumerate(row)}
    for action in wanted:
        if not counts[action]:
            raise Mistake(f"`{what}` lacks `{action}`.", _WHERE_LACKING[action.kind], example)
        if counts[action] > 1:
            cause = "Each phase goes on where the one before stopped."
            if action.kind == "W":
                cause = "Each I has one W: those put off go on where the ones before them stopped."
            raise Mistake(f"`{what}` has `{action}` {counts[action]} times.", cause, example)
    for action in wanted:
        if action.kind != "W":
            continue
        needed = Action(action.stage, "I", action.microbatch)
        if place[action] < place[needed]:
            cause = "W of a microbatch comes after its I, which leaves the gradients of each layer's output behind."
            raise Mistake(f"`{what}` has `{action}` before `{needed}`.", cause, example)


def _judge_h1(rows: list[tuple[Action, ...]], m: int) -> None:
    p = len(rows)
    shown = "\n".join(f"rank {rank}: {' '.join(map(str, row))}" for rank, row in enumerate(rows))
    schedule = Schedule("yours", tuple((rank,) for rank in range(p)), tuple(rows))
    if problems := check(schedule):
        cause = "F and I go as in 1F1B: a warm-up of `p - 1 - rank` forwards, then F and I in turn, oldest first."
        raise Mistake(f"With p={p} and m={m} it cannot run: {problems[0]}.", cause, shown)
    timeline, ours = simulate(schedule), simulate(build("zb_h1", p, m))
    for rank, peak in enumerate(timeline.peak_activations):
        if peak > p:
            symptom = f"With p={p} and m={m}, rank {rank} holds {peak} activations at its peak; 1F1B holds {p} at most."
            raise Mistake(symptom, _why_so_many(rows[rank], rank, p), shown)
    if timeline.makespan > ours.makespan:
        symptom = f"With p={p} and m={m} it takes {timeline.makespan:g} units, and ZB-H1 {ours.makespan:g}."
        raise Mistake(symptom, _why_slow(rows), shown)


def _why_so_many(row: Sequence[Action], rank: int, p: int) -> str:
    kinds = "".join(action.kind for action in row)
    if kinds.index("I") > p - rank:
        return "The warm-up is that of 1F1B: `p - 1 - rank` forwards, and one more in the steady state."
    if "F" not in kinds[kinds.index("W") :]:
        return "All W's come after the last F. A W gives back a place that a later forward needs."
    return (
        "It puts off too many W's. With `p - rank` microbatches between F and I, room is left for `rank` that wait for "
        "their W."
    )


def _why_slow(rows: Sequence[Sequence[Action]]) -> str:
    p = len(rows)
    if any(_first(row, "I") < p - rank for rank, row in enumerate(rows)):
        return "Some rank turns back too soon, and the ranks behind it starve: the warm-up is `p - 1 - rank` forwards."
    if all(_waiting(row) == 0 for row in rows):
        return (
            "Each W comes right after its I, so the rank before waits for it after all, as under 1F1B. The further "
            "back a rank is, the more W's it may put off."
        )
    if p > 1 and _waiting(rows[0]) >= p - 1 > _waiting(rows[-1]):
        return "It is the other way round: rank 0 has the most in flight, and so the least room for W's that wait."
    if any(_idle_w(row) for row in rows):
        return "In the drain each I is awaited: do one W after each, and not all of them at the end."
    return "Look at where a rank does W's while the rank before waits for its I."


def _first(row: Sequence[Action], kind: str) -> int:
    return [action.kind for action in row].index(kind)


def _waiting(row: Sequence[Action]) -> int:
    """How many I's come before the first W, less one."""
    return "".join(action.kind for action in row).split("W")[0].count("I") - 1


def _idle_w(row: Sequence[Action]) -> bool:
    """Whether after the last F an I follows an I at once."""
    kinds = "".join(action.kind for action in row)
    return "II" in kinds[kinds.rindex("F") + 1 :]


def forwards_first(rank: int, p: int, forward: float, input_grad: float) -> int:
    """The fewest forwards before the first I with which this rank never waits for it."""
    behind = p - 1 - rank
    return 1 + behind + math.ceil(behind * input_grad / forward)


def grade_forwards_first(answer: Answer) -> None:
    """Ask for the least that keeps a rank busy until its first gradient is there."""
    clusters = [(4, 1, 1), (3, 2, 2), (4, 10, 20), (4, 10, 15), (5, 20, 10), (6, 10, 11), (1, 5, 5), (4, 30, 10)]
    rows = [(rank, p, f, b) for p, f, b in clusters for rank in range(p)]
    found = {
        row: expect_int(value, f"forwards_first{row}", "A part of a forward is no help: round up, `math.ceil`.")
        for row, value in zip(rows, answer.calls(rows), strict=True)
    }
    for (rank, p, f, b), count in found.items():
        enough, call = forwards_first(rank, p, f, b), f"forwards_first{(rank, p, f, b)}"
        if count == enough:
            continue
        arrives, busy = (p - rank) * f + (p - 1 - rank) * b, count * f
        forwards = "1 forward takes" if count == 1 else f"{count} forwards take"
        gradient = f"Its first gradient is there {arrives} after it began; {forwards} {busy}."
        many, few = f"`{call}` is {count}; {enough} are enough.", f"`{call}` is {count}, and the rank waits."
        raise Mistake(many if count > enough else few, _why_forwards(found), gradient)


def _why_forwards(found: dict[tuple[int, int, int, int], int]) -> str:
    rules = (
        (lambda behind, share: behind, "A rank's own forward of microbatch 0 counts, too."),
        (lambda behind, share: 1 + behind, "That is 1F1B. The gradient also has to come back up."),
        (
            lambda behind, share: 1 + 2 * behind,
            "That holds where an input gradient takes as long as a forward. The way up takes `(p - 1 - rank) * b`.",
        ),
        (lambda behind, share: 2 * behind, "A rank's own forward of microbatch 0 counts, too."),
        (lambda behind, share: 2 + 2 * behind, "The rank begins with its I as soon as the gradient is there."),
        (lambda behind, share: 1 + behind + math.floor(behind * share), "You round down: then it waits for the rest."),
        (
            lambda behind, share: 1 + behind * (1 + math.ceil(share)),
            "You round up rank by rank. The way up is one stretch of time: add first, then round.",
        ),
        (
            lambda behind, share: 2 + behind + math.ceil((behind + 1) * share),
            "The rank's own I is not in the way: it is what the forwards are done before.",
        ),
    )
    for rule, cause in rules:
        if all(count == rule(p - 1 - rank, b / f) for (rank, p, f, b), count in found.items()):
            return cause
    return (
        "Microbatch 0 passes this rank and all behind it, `p - rank` forwards, and its gradient comes up through "
        "`p - 1 - rank` input gradients. How many forwards fit into that time?"
    )


def place_weights(order: list[Action], room: int) -> list[Action]:
    """The order of one rank with its W's put in, as late as ``room`` activations allow."""
    waiting: list[Action] = []
    placed: list[Action] = []
    left, held = sum(action.kind == "F" for action in order), 0
    for action in order:
        if action.kind == "F" and held == room:
            placed.append(waiting.pop(0))
            held -= 1
        placed.append(action)
        if action.kind == "F":
            held, left = held + 1, left - 1
        else:
            waiting.append(Action(action.stage, "W", action.microbatch))
            if left == 0:
                placed.append(waiting.pop(0))
    return placed + waiting


def grade_place_weights(answer: Answer) -> None:
    """Ask for W's after their I's within the room, and for steps no longer than the reference's."""
    cases = [(name, p, m, room) for p, m in ((4, 8), (3, 7), (2, 3)) for name, room in _rooms(p, m)]
    rows, sizes = [], []
    for name, p, m, room in cases:
        for rank, actions in enumerate(build(name, p, m).actions):
            rows.append(([part for action in actions for part in action.parts if part.kind != "W"], room))
            sizes.append((name, p, m, room, rank))
    values = dict(zip(sizes, zip(rows, answer.calls(rows), strict=True), strict=True))
    for name, p, m, room in cases:
        read = [_read_placed(*values[name, p, m, room, rank], rank, m) for rank in range(p)]
        _judge_placed(read, [values[name, p, m, room, rank][0][0] for rank in range(p)], m, room)


def _rooms(p: int, m: int) -> list[tuple[str, int]]:
    return [("zb_h1", p), ("zb_h1", p + 1), ("zb_h2", 2 * p - 1), ("zb_h1", 2 * m)]


def _read_placed(given: tuple[list[Action], int], value: Any, rank: int, m: int) -> tuple[Action, ...]:
    order, room = given
    what = f"place_weights(…, {room})"
    shown = f"The order of rank {rank} was `{' '.join(map(str, order))}`."
    row, example = expect_actions(value, what, most_shown=60)
    example = f"{shown}\n{example}".rstrip()
    for action in row:
        if action.kind not in "FIW" or action.stage != rank or action.microbatch >= m:
            cause = "Only W's are put in: one for each I, with its stage and its microbatch."
            raise Mistake(f"`{what}` has `{action}`, which does not belong there.", cause, example)
    if [action for action in row if action.kind != "W"] != order:
        cause = "Others wait for each F and each I: leave them all, and in their order."
        raise Mistake(f"`{what}` changes the order of F and I.", cause, example)
    _refuse_wrong_counts(row, [Action(rank, "W", i) for i in range(m)], what, example)
    held = 0
    for action in row:
        held += {"F": 1, "W": -1}.get(action.kind, 0)
        if held > room:
            cause = (
                "Where the room is used up, the forward that comes next needs the place of a W: do the oldest first."
            )
            raise Mistake(f"`{what}` holds {held} activations at `{action}`.", cause, example)
    return row


def _judge_placed(rows: list[tuple[Action, ...]], orders: list[list[Action]], m: int, room: int) -> None:
    p = len(rows)
    placement = tuple((rank,) for rank in range(p))
    best = Schedule("best", placement, tuple(tuple(place_weights(order, room)) for order in orders))
    yours = Schedule("yours", placement, tuple(rows))
    for costs in (Costs(), Costs(3, 3, 2)):
        timeline, ours = simulate(yours, costs), simulate(best, costs)
        if timeline.makespan > ours.makespan:
            symptom = (
                f"With p={p}, m={m} and room for {room}, a step takes {timeline.makespan:g} units; {ours.makespan:g} "
                "are possible."
            )
            shown = "\n".join(f"rank {rank}: {' '.join(map(str, row))}" for rank, row in enumerate(rows))
            raise Mistake(symptom, _why_longer(rows, timeline), shown)


def _why_longer(rows: Sequence[Sequence[Action]], timeline: Timeline) -> str:
    if any(_idle_w(row) for row in rows):
        return (
            "After the last F nothing needs room, and a rank waits for each I that is left: a W that waits until all "
            "are done leaves that time idle."
        )
    if all(_waiting(row) == 0 for row in rows):
        return "Each W comes at once, though nobody waits for it and somebody waits for the I after it. Is there room?"
    return "A W is done although there is room for the next forward: it delays an I that another rank waits for."
