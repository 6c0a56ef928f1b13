"""Exercises of notebook 04 about orders: how long the warm-up is, and in which rounds a rank takes its microbatches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from course_pp.exercises.answer import Answer
from course_pp.exercises.exercise import Mistake
from course_pp.exercises.expect import expect_actions, expect_int
from course_pp.schedule import Action, Costs, Schedule, check, simulate
from course_pp.schedule.schedule import looped

__all__ = ["grade_order", "grade_warm_up", "order_in_rounds", "warm_up_forwards", "with_warm_up"]


def warm_up_forwards(rank: int, p: int, v: int) -> int:
    """How many forwards this rank does before forward and backward take turns: p ranks, v chunks each."""
    earlier_chunks = (v - 1) * p
    to_the_last_rank = p - 1 - rank
    return earlier_chunks + to_the_last_rank


def order_in_rounds(rank: int, p: int, m: int, v: int, n: int) -> list[Action]:
    """The actions of this rank, in order: v chunks, rounds of n microbatches."""
    forwards, backwards = list[Action](), list[Action]()
    for first in range(0, m, n):
        in_round = range(first, min(first + n, m))
        for chunk in range(v):
            forwards += [Action(chunk * p + rank, "F", i) for i in in_round]
        for chunk in reversed(range(v)):
            backwards += [Action(chunk * p + rank, "B", i) for i in in_round]
    warm_up = min(m * v, (v - 1) * n + 2 * (p - 1 - rank))
    order = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[m * v - warm_up :]


def with_warm_up(warm_up: Callable[[int], int], p: int, m: int, v: int) -> Schedule:
    """Interleaved 1F1B in rounds of p microbatches, where rank r does ``warm_up(r)`` forwards before it takes turns."""
    rows = []
    for rank in range(p):
        in_rounds = order_in_rounds(rank, p, m, v, p)
        forwards = [action for action in in_rounds if action.kind == "F"]
        backwards = [action for action in in_rounds if action.kind == "B"]
        ahead = min(m * v, warm_up(rank))
        row = forwards[:ahead]
        for pair in zip(forwards[ahead:], backwards, strict=False):
            row += pair
        rows.append(tuple(row + backwards[m * v - ahead :]))
    return Schedule("interleaved_1f1b", looped(p, v), tuple(rows))


_SIZES = ((4, 2), (2, 2), (4, 3), (3, 4), (4, 1), (1, 3), (6, 2))


def grade_warm_up(answer: Answer) -> None:
    rows = [(rank, p, v) for p, v in _SIZES for rank in range(p)]
    values = answer.calls(rows)
    found = {
        row: expect_int(value, f"warm_up_forwards{row}", "A count of forwards is whole.")
        for row, value in zip(rows, values, strict=True)
    }
    for p, v in _SIZES:
        counts = [found[rank, p, v] for rank in range(p)]
        given = f"With {p} rank{'s' * (p > 1)} and {v} chunk{'s' * (v > 1)} each your warm-ups are {counts}"
        if min(counts) < 0:
            raise Mistake(f"{given}.", "No rank can do fewer than no forwards: count the ranks behind this one.")
        least = [warm_up_forwards(rank, p, v) for rank in range(p)]
        if any(count < enough for count, enough in zip(counts, least, strict=True)):
            _judge_time(given, counts, p, v)
        for rank, (count, enough) in enumerate(zip(counts, least, strict=True)):
            if count > enough:
                raise Mistake(
                    f"{given}. Rank {rank} may stop after {enough} and be as fast.",
                    _why_too_many(found),
                    f"It then holds {enough + 1} activations of a chunk at its peak, and not {count + 1}.",
                )


def _judge_time(given: str, counts: Sequence[int], p: int, v: int) -> None:
    m = 3 * p
    schedule = with_warm_up(counts.__getitem__, p, m, v)
    if problems := check(schedule):
        ascending = len(counts) > 1 and counts[0] < counts[-1]
        cause = (
            "The last rank turns back first, so warm-ups get *shorter* from rank to rank."
            if ascending
            else "The first backward is in the *last* chunk. Before it a rank does a round of p forwards in each other "
            "chunk, and some in the last."
        )
        raise Mistake(f"{given}. That order cannot run: {problems[0]}.", cause)
    makespan, least = simulate(schedule).makespan, 3 * (m * v + p - 1)
    if makespan > least:
        cause = "While the first microbatch is on its way to the last rank, each rank behind needs one to work on."
        raise Mistake(f"{given}. Then {m} microbatches take {makespan:g} units; {least} are enough.", cause)


def _why_too_many(found: dict[tuple[int, int, int], int]) -> str:
    rules: tuple[tuple[Callable[[int, int, int], int], str], ...] = (
        (
            lambda rank, p, v: (v - 1) * p + 2 * (p - 1 - rank),
            "That is Megatron-LM's count: 2 for each rank behind. One is enough as long as messages take no time; what "
            "the other is for comes next.",
        ),
        (
            lambda rank, p, v: (v - 1) * p + p - rank,
            "The forward of the first pair is no warm-up: the last rank of 1F1B has none at all.",
        ),
        (lambda rank, p, v: v * p - 1, "Not every rank is as far from the last one."),
        (
            lambda rank, p, v: v * p,
            "That fills all chunks, as breadth first does. Not every rank is as far from the last.",
        ),
        (
            lambda rank, p, v: v * (p - 1) + (v - 1) * p,
            "In the last chunk a rank needs one forward for each rank behind it, not one for each in every chunk.",
        ),
    )
    for rule, cause in rules:
        if all(count == rule(*row) for row, count in found.items()):
            return cause
    return "A round of p in each chunk but the last, and in the last chunk one for each rank behind this one."


def grade_order(answer: Answer) -> None:
    sizes = [(4, 8, 2, 4), (4, 16, 2, 8), (4, 8, 2, 8), (2, 6, 3, 3), (1, 4, 2, 2), (3, 9, 3, 3), (4, 4, 2, 4)]
    _grade_orders_of(answer, sizes)
    try:
        _grade_orders_of(answer, [(4, 10, 2, 6), (2, 5, 2, 4)])
    except Mistake as e:
        cause = "n need not divide m: the last round takes what is left, `range(first, min(first + n, m))`."
        raise Mistake(e.symptom, e.cause or cause, e.example) from None


def _grade_orders_of(answer: Answer, sizes: Sequence[tuple[int, int, int, int]]) -> None:
    rows = [(rank, *size) for size in sizes for rank in range(size[0])]
    values = dict(zip(rows, answer.calls(rows), strict=True))
    for size in sizes:
        _judge_orders([_read_order(values[rank, *size], rank, *size) for rank in range(size[0])], *size)


def _read_order(value: Any, rank: int, p: int, m: int, v: int, n: int) -> tuple[Action, ...]:
    """The actions that were meant, each once, forwards and backwards each in rounds."""
    what = f"order_in_rounds({rank}, {p}, {m}, {v}, {n})"
    row, example = expect_actions(value, what)
    held = [chunk * p + rank for chunk in range(v)]
    for action in row:
        if action.kind not in "FB" or action.stage not in held:
            cause = f"Rank {rank} holds the stages {held}: chunk c of it is stage `c * p + rank`."
            raise Mistake(f"`{what}` has `{action}`, which is not rank {rank}'s to do.", cause, example)
        if action.microbatch >= m:
            raise Mistake(f"`{what}` has `{action}`: the microbatches are 0 to {m - 1}.", "", example)
    wanted = order_in_rounds(rank, p, m, v, n)
    if wrong := Counter(row) - Counter(wanted):
        raise Mistake(f"`{what}` has `{next(iter(wrong))}` more than once.", "", example)
    if missing := Counter(wanted) - Counter(row):
        cause = "A round adds the forwards and the backwards of its microbatches, in each of the v chunks."
        if tuple(missing) == tuple(wanted[-len(missing) :]):
            cause = "After the last forward, as many backwards are left as the warm-up had forwards."
        raise Mistake(f"`{what}` lacks `{next(iter(missing))}`.", cause, example)
    for kind, word in (("F", "forwards"), ("B", "backwards")):
        mine, theirs = ([a for a in each if a.kind == kind] for each in (row, wanted))
        if mine != theirs:
            raise Mistake(
                f"`{what}` has its {word} in another order.", _why_not_in_rounds(mine, theirs), _both(mine, theirs)
            )
    return row


def _why_not_in_rounds(mine: Sequence[Action], theirs: Sequence[Action]) -> str:
    if theirs[0].kind == "B" and mine[0].microbatch > theirs[0].microbatch:
        return "What went first through the last chunk comes back first: microbatches keep their order in backward."
    if theirs[0].kind == "B" and mine[0].stage != theirs[0].stage:
        return "A gradient begins at the end of the model: in backward the last chunk comes first."
    if [a.stage for a in mine] != [a.stage for a in theirs]:
        return (
            "A round is n microbatches through one chunk, then the same n through the next; then comes the next round."
        )
    at = 0
    for _, block in groupby(theirs, key=lambda action: action.stage):
        expected = set(block)
        if set(mine[at : at + len(expected)]) != expected:
            return "The first round takes microbatches 0 to n - 1, each later one those that come next."
        at += len(expected)
    return "Within a round and chunk the microbatches come in their order."


def _both(mine: Sequence[Action], theirs: Sequence[Action]) -> str:
    return f"yours   {' '.join(map(str, mine))}\nrounds  {' '.join(map(str, theirs))}"


def _why_impossible(rows: Sequence[tuple[Action, ...]], p: int, m: int, v: int, n: int) -> str:
    before_backward = [next((i for i, a in enumerate(row) if a.kind == "B"), len(row)) for row in rows]
    with_p = [min(m * v, (v - 1) * p + 2 * (p - 1 - rank) + 1) for rank in range(p)]
    if n != p and before_backward == with_p:
        return "The first backward is in the last chunk: before it come rounds of n, not of p, in every other chunk."
    return (
        "Count the warm-up: n in each chunk but the last, then 2 for each rank behind. After it come pairs, each a "
        "forward and then a backward."
    )


def _judge_orders(rows: list[tuple[Action, ...]], p: int, m: int, v: int, n: int) -> None:
    shown = "\n".join(f"rank {rank}: {' '.join(map(str, row))}" for rank, row in enumerate(rows))
    given = f"With p={p}, m={m}, v={v} and rounds of {n}"
    schedule = Schedule("yours", looped(p, v), tuple(rows))
    if problems := check(schedule):
        raise Mistake(f"{given} it cannot run: {problems[0]}.", _why_impossible(rows, p, m, v, n), shown)
    reference = Schedule("rounds", looped(p, v), tuple(tuple(order_in_rounds(r, p, m, v, n)) for r in range(p)))
    costs = Costs(latency=1)
    late, least = simulate(schedule, costs), simulate(reference, costs)
    for rank, (peak, enough) in enumerate(zip(late.peak_activations, least.peak_activations, strict=True)):
        if peak > enough:
            cause = "Count the warm-up: n in each chunk but the last, then 2 for each rank behind."
            if peak == m * v:
                cause = "That is everything: a backward has to come as soon as it can be done."
            raise Mistake(f"{given} rank {rank} holds {peak} activations; {enough} are enough.", cause, shown)
    if late.makespan > least.makespan:
        symptom = f"{given} it takes {late.makespan:g} units where a message takes 1; {least.makespan:g} are enough."
        cause = "Some warm-up is too short: with Megatron-LM's room it has 2 forwards for each rank behind."
        raise Mistake(symptom, cause, shown)
