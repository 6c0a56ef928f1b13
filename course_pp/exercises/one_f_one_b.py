"""Exercises of notebook 03: 1F1B as an order and as code, its messages, latency, and a budget of memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from course_pp.exercises.answer import Answer
from course_pp.exercises.exercise import Exercise, Mistake
from course_pp.exercises.expect import expect_actions, expect_int
from course_pp.exercises.memory_budget import choose, grade_choose
from course_pp.exercises.one_f_one_b_steps import grade_healed_step, grade_step, healed_step, step_without_deadlock
from course_pp.schedule import Action, Costs, Schedule, build, check, simulate

__all__ = ["EXERCISES", "room_for_latency", "with_room"]


def order_1f1b(rank: int, p: int, m: int) -> list[Action]:
    """The actions of this rank, in order."""
    warm_up = min(m, p - 1 - rank)
    order = [Action(rank, "F", i) for i in range(warm_up)]
    for i in range(warm_up, m):
        order += [Action(rank, "F", i), Action(rank, "B", i - warm_up)]
    return order + [Action(rank, "B", i) for i in range(m - warm_up, m)]


def _grade_order(answer: Answer) -> None:
    _grade_orders_of(answer, [(4, 8), (2, 4), (4, 4), (1, 3), (5, 7), (8, 12)])
    try:
        _grade_orders_of(answer, [(4, 2), (3, 1)])
    except Mistake as e:
        cause = "With fewer microbatches than ranks the warm-up is m at most: `min(m, p - 1 - rank)`."
        raise Mistake(e.symptom, e.cause or cause, e.example) from None


def _grade_orders_of(answer: Answer, sizes: Sequence[tuple[int, int]]) -> None:
    rows = [(rank, p, m) for p, m in sizes for rank in range(p)]
    orders = dict(zip(rows, answer.calls(rows), strict=True))
    for p, m in sizes:
        _judge_orders([_read_order(orders[rank, p, m], rank, p, m) for rank in range(p)], m)


def _read_order(value: Any, rank: int, p: int, m: int) -> tuple[Action, ...]:
    """The actions that were meant, each once and of this rank."""
    what = f"order_1f1b({rank}, {p}, {m})"
    row, example = expect_actions(value, what)
    for action in row:
        if action.kind not in "FB" or action.stage != rank:
            cause = f"Rank {rank} holds stage {rank}: its actions are `{rank}F0`, `{rank}B0` and so on."
            raise Mistake(f"`{what}` has `{action}`, which is not rank {rank}'s to do.", cause, example)
        if action.microbatch >= m:
            cause = f"The microbatches are 0 to {m - 1}."
            if m < p - 1 - rank:
                cause += " When m is small, the warm-up is all there is of them: take a min."
            raise Mistake(f"`{what}` has `{action}`, a microbatch that does not exist.", cause, example)
    counts = Counter(row)
    for action in (Action(rank, kind, i) for kind in "FB" for i in range(m)):
        if not counts[action]:
            cause = ""
            if action.kind == "B" and action.microbatch < m - (p - 1 - rank):
                cause = "In the steady state each forward is followed by the oldest backward that is left, 0 first."
            elif action.kind == "B":
                cause = "After the last forward, as many backwards are left as the warm-up had forwards: the drain."
            raise Mistake(f"`{what}` lacks `{action}`.", cause, example)
        if counts[action] > 1:
            before, after = ("warm-up", "steady state") if action.kind == "F" else ("steady state", "drain")
            cause = f"The {after} goes on where the {before} stopped."
            raise Mistake(f"`{what}` has `{action}` {counts[action]} times.", cause, example)
    for kind, word in (("F", "forwards"), ("B", "backwards")):
        numbers = [action.microbatch for action in row if action.kind == kind]
        if numbers != sorted(numbers):
            cause = "The next rank works on the oldest microbatch first, and so its gradient comes back first."
            raise Mistake(f"`{what}` does the {word} in the order {numbers}.", cause if kind == "B" else "", example)
    return row


def _judge_orders(rows: list[tuple[Action, ...]], m: int) -> None:
    p = len(rows)
    shown = "\n".join(f"rank {rank}: {' '.join(map(str, row))}" for rank, row in enumerate(rows))
    schedule = Schedule("yours", tuple((rank,) for rank in range(p)), tuple(rows))
    if problems := check(schedule):
        cause = "Does the warm-up get shorter from rank to rank, down to none on the last?"
        raise Mistake(f"With p={p} and m={m} it cannot run: {problems[0]}.", cause, shown)
    timeline, gpipe = simulate(schedule), simulate(build("gpipe", p, m))
    for rank, peak in enumerate(timeline.peak_activations):
        enough = min(m, p - rank)
        if peak == m > enough:
            cause = "That is what GPipe holds: a backward has to come as soon as it can be done."
        elif rank and peak == timeline.peak_activations[rank - 1]:
            cause = "The warm-up gets shorter from rank to rank: `p - 1 - rank`."
        else:
            cause = "A forward is in flight from its start: the first one after the warm-up counts, too."
        if peak > enough:
            symptom = f"With p={p} and m={m}, rank {rank} holds {peak} activations at its peak; 1F1B holds {enough}."
            raise Mistake(symptom, cause, shown)
    if timeline.makespan > gpipe.makespan:
        symptom = f"With p={p} and m={m} it takes {timeline.makespan:g}, and GPipe {gpipe.makespan:g} units."
        cause = "Some rank turns back too soon, and the ranks behind it starve: its warm-up is too short."
        raise Mistake(symptom, cause, shown)


def held_with_latency(rank: int, p: int, forward: float, backward: float, latency: float) -> int:
    """The fewest places for activations with which this rank is as fast as GPipe."""
    per_link = math.ceil(2 * latency / (forward + backward))
    return 1 + (p - 1 - rank) * (1 + per_link)


def room_for_latency(p: int, forward: float, backward: float, latency: float) -> list[int]:
    """For each rank the fewest microbatches in flight with which a step is as short as GPipe's on the same links."""
    return [held_with_latency(rank, p, forward, backward, latency) for rank in range(p)]


class _Cluster(NamedTuple):
    """The arguments of ``held_with_latency`` but for the rank."""

    p: int
    forward: int
    backward: int
    latency: int

    def follows(self, limits: Sequence[int], rule: Callable[[int, float], float]) -> bool:
        """Whether ``rule(links behind a rank, latency over the time of a microbatch)`` gives the limit of each rank."""
        share = self.latency / (self.forward + self.backward)
        return all(limit == rule(self.p - 1 - rank, share) for rank, limit in enumerate(limits))


def _grade_held(answer: Answer) -> None:
    clusters = [
        _Cluster(4, 20, 40, 0),
        _Cluster(4, 20, 30, 80),
        _Cluster(4, 20, 40, 10),
        _Cluster(4, 20, 40, 30),
        _Cluster(3, 10, 10, 15),
        _Cluster(5, 20, 40, 31),
        _Cluster(4, 30, 10, 100),
    ]
    rows = [(rank, *cluster) for cluster in clusters for rank in range(cluster.p)]
    held = dict(zip(rows, answer.calls(rows), strict=True))
    found: _Limits = {}
    for cluster in clusters:
        calls = [(rank, *cluster) for rank in range(cluster.p)]
        found[cluster] = [expect_int(held[call], f"held_with_latency{call}", _ROUND_UP) for call in calls]
    for cluster in clusters:
        _judge_limits(found, cluster)


_Limits = dict[_Cluster, list[int]]
"""What the answer gives for each rank of each cluster."""
_ROUND_UP = "A part of a microbatch needs a whole place: round up, `math.ceil`."


def _judge_limits(found: _Limits, cluster: _Cluster) -> None:
    limits = found[cluster]
    p, forward, backward, latency = cluster
    given = f"With {p} ranks, forward {forward}, backward {backward} and latency {latency}"
    if min(limits) < 1:
        raise Mistake(f"{given}, your ranks may hold {limits}.", "To do anything a rank must hold 1.")
    for rank, limit in enumerate(limits):
        enough = held_with_latency(rank, *cluster)
        if limit > enough:
            symptom = f"{given}, rank {rank} may hold {limit} activations, though {enough} would do."
            raise Mistake(symptom, _why_too_many(found, cluster))
    # With few microbatches a rank may lack a place and end in time all the same.
    m, costs = 400, Costs(forward, backward, 0, latency)
    schedule = with_room(limits, m)
    if problems := check(schedule):
        cause = "A rank must be allowed at least one activation more than the rank after it."
        raise Mistake(f"{given}, your ranks may hold {limits}, and the order cannot run: {problems[0]}.", cause)
    makespan, gpipe = simulate(schedule, costs).makespan, simulate(build("gpipe", p, m), costs).makespan
    if makespan > gpipe:
        symptom = (
            f"{given}, your ranks may hold {limits}. Then {m} microbatches take {makespan:g}; GPipe takes {gpipe:g}."
        )
        raise Mistake(symptom, _why_too_few(found))


def with_room(limits: Sequence[int], m: int) -> Schedule:
    """Each rank goes forward while fewer than its limit of microbatches are in flight, else backward."""
    ranks = range(len(limits))
    rows = tuple(tuple(_held_order(limits[rank], m, rank)) for rank in ranks)
    return Schedule("yours", tuple((rank,) for rank in ranks), rows)


def _held_order(limit: int, m: int, stage: int) -> list[Action]:
    """Forwards while fewer than ``limit`` are in flight, else a backward."""
    order: list[Action] = []
    begun = 0
    for done in range(m):
        while begun < min(m, done + limit):
            order.append(Action(stage, "F", begun))
            begun += 1
        order.append(Action(stage, "B", done))
    return order


def _why_too_many(found: _Limits, cluster: _Cluster) -> str:
    if cluster.latency == 0:
        return "Without latency it is 1F1B: a microbatch is on one of the p - rank ranks from here to the last."
    if _follow(found, lambda links, share: 1 + links * (1 + 2 * math.ceil(share))):
        return "There and back is one trip of 2 × latency: add first, and round up once a link."
    return (
        "A rank takes in a microbatch every forward + backward. How many of those fit into 2 × latency, and how many "
        "links lie behind this rank?"
    )


def _follow(found: _Limits, rule: Callable[[int, float], float]) -> bool:
    return all(cluster.follows(limits, rule) for cluster, limits in found.items())


def _why_too_few(found: _Limits) -> str:
    rules: tuple[tuple[Callable[[int, float], float], str], ...] = (
        (lambda links, _: 1 + links, "That is 1F1B without latency. Microbatches are also on the links."),
        (
            lambda links, share: 1 + links * (1 + math.ceil(share)),
            "A microbatch crosses each link twice, as an activation and as a gradient: 2 × latency.",
        ),
        (
            lambda links, share: 1 + links * (1 + math.floor(2 * share)),
            "You round down. A link with a microbatch on it for a third of the time needs room for one.",
        ),
        (
            lambda links, share: 1 + links + math.ceil(2 * links * share),
            "You round the sum over all links. Each link holds whole microbatches: round up for each.",
        ),
    )
    causes = [cause for rule, cause in rules if _follow(found, rule)]
    return causes[0] if causes else "A microbatch is on a rank from here to the last, or on a link, there or back."


EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        "order_1f1b",
        "03",
        "1F1B as an order",
        2,
        6,
        (
            "How many forwards does a rank do before its first backward? The last rank does 1, the one before it 2.",
            "The warm-up has `min(m, p - 1 - rank)` forwards. In the steady state each further forward is followed by "
            "the oldest backward that is left: forward i, backward `i - warm_up`.",
            "The drain has as many backwards as the warm-up had forwards: those of microbatches "
            "`m - warm_up` to m - 1.",
        ),
        order_1f1b,
        _grade_order,
    ),
    Exercise(
        "step_without_deadlock",
        "03",
        "messages that do not block",
        2,
        8,
        (
            "Begin with a copy of `first_try`. Its order of forwards and backwards is right, only the sends block.",
            "`send_activation` and `send_gradient` of 02 begin to send and return handles at once. Keep these, or the "
            "messages may be lost.",
            "`sends.extend(send_activation(y, link))`, likewise for the gradient, and after the last backward: "
            "`for send in sends: send.wait()`.",
        ),
        step_without_deadlock,
        grade_step,
    ),
    Exercise(
        "held_with_latency",
        "03",
        "room for what is on its way",
        3,
        8,
        (
            "Without latency the answer is `p - rank`: one microbatch for each rank from here to the last. What else "
            "is there for a microbatch to be on?",
            "Each link is crossed twice. While one microbatch spends `2 * latency` on it, a new one comes every "
            "`forward + backward`.",
            "Each of the `p - 1 - rank` links needs room for `math.ceil(2 * latency / (forward + backward))` of them.",
        ),
        held_with_latency,
        _grade_held,
    ),
    Exercise(
        "choose",
        "03",
        "a budget of memory",
        2,
        7,
        (
            "Rank 0 holds most. It needs `state / p`, and `min(m, p)` activations of one microbatch in one stage.",
            "One microbatch in one stage keeps `activations / (p * m)`.",
            "Try all p up to `max_ranks` and all m that divide `rows` and leave `min_rows`. Of those that fit, take "
            "the one with the smallest `(p - 1) / (m + p - 1)`.",
        ),
        choose,
        grade_choose,
    ),
    Exercise(
        "healed_step",
        "03",
        "bug clinic",
        3,
        8,
        (
            "Which gradients are wrong? All are of the weights that multiply what a rank has received. What does their "
            "gradient need that the others do not?",
            "`x` is needed from its forward until its backward. How many forwards does rank r do in between, and how "
            "many slots are there?",
            "In the steady state the forward comes first: `warm_up + 1` microbatches are in flight.",
        ),
        healed_step,
        grade_healed_step,
    ),
)
