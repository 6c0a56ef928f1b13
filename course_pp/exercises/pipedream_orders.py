"""Exercises of notebook 06 on paper: versions that backwards use, the order of a replica, and what a plan takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, get_args

from course_pp.exercises.answer import Answer
from course_pp.exercises.exercise import Mistake
from course_pp.exercises.expect import close, expect_actions, expect_int, expect_number
from course_pp.schedule import Action, Costs, Schedule, Versions, build, check, ledger, simulate

__all__ = [
    "grade_order",
    "grade_slowest",
    "grade_version",
    "order_pipedream",
    "slowest_part",
    "version_used",
]


def version_used(rule: str, stage: int, i: int, p: int, group: int) -> int:
    """The version of its stage's weights that the backward of microbatch i uses."""
    if rule == "none":
        return i
    if rule == "2bw":
        return max(0, i // group - 1)
    behind = p - 1 if rule == "vertical" else p - 1 - stage
    return max(0, i - behind)


_RULES: tuple[Versions, ...] = get_args(Versions)
_SIZES = ((4, 12, 4), (3, 12, 6), (2, 6, 3), (1, 4, 2))


def grade_version(answer: Answer) -> None:
    rows = [
        (rule, stage, i, p, group) for p, m, group in _SIZES for rule in _RULES for stage in range(p) for i in range(m)
    ]
    found = {
        row: expect_int(value, f"version_used{row}", "A version is a count of updates.")
        for row, value in zip(rows, answer.calls(rows), strict=True)
    }
    for p, m, group in _SIZES:
        for rule in _RULES:
            planned = ledger(build("pipedream", p, m, group=group if rule == "2bw" else None), rule)
            for stage in range(p):
                for i in range(m):
                    use, row = planned.of(stage, i), (rule, stage, i, p, group)
                    if found[row] != use.backward:
                        raise Mistake(
                            f"`version_used{row}` is {found[row]}; its backward uses version {use.backward}.",
                            _why_version(rule, {row[1:]: got for row, got in found.items() if row[0] == rule}),
                            f"Its forward used version {use.forward}; its gradient enters update {use.update}.",
                        )


def _why_version(rule: str, found: dict[tuple[int, int, int, int], int]) -> str:
    """``found`` has all versions under this rule, by stage, microbatch, p and group."""

    def is_behind(by: Callable[[int, int], int]) -> bool:
        return all(got == max(0, i - by(stage, p)) for (stage, i, p, _), got in found.items())

    if min(found.values()) < 0:
        return "There is no version before 0: the first microbatches all use version 0."
    if rule == "none":
        return "Nothing is kept, so the backward uses the newest: count the updates that its stage has had by then."
    if rule == "stash":
        if is_behind(lambda stage, p: 0):
            return "That is the newest. With stashing a backward uses what its forward used."
        if is_behind(lambda stage, p: p - 1):
            return "That is stage 0's. A later stage has fewer microbatches in flight, so its newest is newer."
        if is_behind(lambda stage, p: p - stage):
            return "One too old: p - stage microbatches are in flight *with* this one, p - 1 - stage before it."
        return "Count the updates that its stage has had when the *forward* runs: one for each microbatch that is back."
    if rule == "vertical":
        if is_behind(lambda stage, p: p - 1 - stage):
            return (
                "That is this stage's newest at its forward. Vertical sync takes what *stage 0* took, on every stage."
            )
        return "Which version did stage 0 use for this microbatch? All other stages use the same."
    return (
        "Groups of `group` microbatches make one update each. A group uses the version before last: all that the group "
        "before the last one has finished, 0 for the first two groups."
    )


def order_pipedream(stage: int, replica: int, replicas: list[int], m: int) -> list[Action]:
    """The actions of one replica of a stage, in order: F, B and U of each of its microbatches."""
    share = replicas[stage]
    mine = list(range(replica, m, share))
    in_flight = -(-sum(replicas[stage:]) // share)
    order = []
    for k in range(len(mine) + in_flight - 1):
        if k < len(mine):
            order.append(Action(stage, "F", mine[k]))
        if k >= in_flight - 1:
            done = mine[k - in_flight + 1]
            order += [Action(stage, "B", done), Action(stage, "U", done)]
    return order


_LAYOUTS: tuple[tuple[list[int], int], ...] = (
    ([1, 1, 1, 1], 8),
    ([2, 1], 8),
    ([3, 1], 9),
    ([2, 1, 1], 8),
    ([1, 2], 8),
    ([3, 2], 12),
    ([1, 1], 1),
    ([1, 1, 1, 1], 2),
)


def grade_order(answer: Answer) -> None:
    rows = [
        (stage, replica, list(replicas), m)
        for replicas, m in _LAYOUTS
        for stage in range(len(replicas))
        for replica in range(replicas[stage])
    ]
    values = iter(answer.calls(rows))
    for replicas, m in _LAYOUTS:
        read = [
            _read(next(values), stage, replica, replicas, m)
            for stage in range(len(replicas))
            for replica in range(replicas[stage])
        ]
        _judge_orders(read, replicas, m)


def _read(value: Any, stage: int, replica: int, replicas: list[int], m: int) -> tuple[Action, ...]:
    what = f"order_pipedream({stage}, {replica}, {replicas}, {m})"
    row, example = expect_actions(value, what)
    wanted = order_pipedream(stage, replica, replicas, m)
    if wrong := Counter(row) - Counter(wanted):
        extra = next(iter(wrong))
        cause = f"Microbatch i goes to replica `i % {replicas[stage]}` of stage {stage}, forward, backward and update."
        raise Mistake(f"`{what}` has `{extra}`, or has it once too often.", cause, example)
    if missing := Counter(wanted) - Counter(row):
        cause = f"Every microbatch of replica {replica} has its F, its B and its U."
        if tuple(missing) == tuple(wanted[-len(missing) :]):
            cause = "As many backwards are left after the last forward as the warm-up had forwards."
        if all(action.kind == "U" for action in missing):
            cause = "Each backward is followed by an update."
        raise Mistake(f"`{what}` lacks `{next(iter(missing))}`.", cause, example)
    for at, action in enumerate(row):
        if action.kind == "B" and row[at + 1 : at + 2] != (Action(stage, "U", action.microbatch),):
            cause = "The update comes right after the backward whose gradient it takes."
            raise Mistake(f"`{what}` does not update right after `{action}`.", cause, example)
    for kind in "FB":
        mine, theirs = ([a for a in each if a.kind == kind] for each in (row, wanted))
        if mine != theirs:
            raise Mistake(f"`{what}` has its {kind}'s in another order.", "Microbatches keep their order.", example)
    return row


def _judge_orders(rows: list[tuple[Action, ...]], replicas: list[int], m: int) -> None:
    reference = build("pipedream", sum(replicas), m, replicas=replicas)
    yours = Schedule("yours", reference.placement, tuple(rows))
    given, shown = f"With replicas {replicas} and {m} microbatches", _shown(rows)
    if problems := check(yours):
        cause = "A replica admits ⌈ranks from its stage on / replicas of its stage⌉ microbatches, the first stage NOAM."
        raise Mistake(f"{given} it cannot run: {problems[0]}.", cause, shown)
    # Each replica takes as long for its microbatches as any other.
    times = tuple(map(float, replicas))
    costs = Costs(times, times, times)
    mine, best = simulate(yours, costs), simulate(reference, costs)
    peaks = list(zip(mine.peak_activations, best.peak_activations, strict=True))
    for rank, (peak, enough) in enumerate(peaks):
        if peak > enough:
            cause = "A replica admits ⌈ranks from its stage on / replicas of its stage⌉ microbatches, and no more."
            if all(each <= most + 1 for each, most in peaks):
                cause = "One too many: the forward of the first pair counts among those in flight."
            raise Mistake(f"{given} rank {rank} has {peak} microbatches in flight; {enough} are enough.", cause, shown)
    if tuple(rows) != reference.actions:
        cause = "Divide the ranks *from this stage on* by the replicas of this stage, and round up."
        raise Mistake(f"{given} a rank turns back too soon, and another one starves.", cause, shown)


def _shown(rows: Sequence[Sequence[Action]]) -> str:
    return "\n".join(f"rank {rank}: {' '.join(map(str, row))}" for rank, row in enumerate(rows))


def slowest_part(
    times: list[float],
    outputs: list[float],
    weights: list[float],
    stages: list[tuple[int, int, int]],
    bandwidth: float,
) -> float:
    """The time between two microbatches in the steady state: that of the slowest stage or boundary."""
    parts = []
    for start, end, replicas in stages:
        work = sum(times[start:end])
        exchange = 2 * (replicas - 1) * sum(weights[start:end]) / bandwidth
        parts.append(max(work, exchange) / replicas)
        if end < len(times):
            parts.append(2 * outputs[end - 1] / bandwidth)
    return max(parts)


_Plan = tuple[list[float], list[float], list[float], list[tuple[int, int, int]], float]

_PLANS: list[_Plan] = [
    ([2.0, 2.0, 2.0, 2.0], [0.0] * 4, [0.0] * 4, [(0, 2, 1), (2, 4, 1)], 1.0),
    ([2.0, 1.0, 4.0], [0.0] * 3, [0.0] * 3, [(0, 2, 1), (2, 3, 1)], 1.0),
    ([6.0, 3.0], [0.0] * 2, [0.0] * 2, [(0, 1, 2), (1, 2, 1)], 1.0),
    ([6.0, 1.0], [0.0] * 2, [0.0] * 2, [(0, 1, 3), (1, 2, 1)], 1.0),
    ([1.0, 1.0, 1.0], [8.0, 2.0, 50.0], [0.0] * 3, [(0, 1, 1), (1, 3, 1)], 4.0),
    ([1.0, 1.0, 1.0], [8.0, 20.0, 50.0], [0.0] * 3, [(0, 1, 1), (1, 2, 1), (2, 3, 1)], 4.0),
    ([1.0, 1.0, 1.0], [8.0, 2.0, 50.0], [0.0] * 3, [(0, 2, 1), (2, 3, 1)], 4.0),
    ([1.0, 1.0, 1.0], [2.0, 9.0, 50.0], [0.0] * 3, [(0, 2, 1), (2, 3, 1)], 4.0),
    ([4.0, 4.0], [1.0, 1.0], [20.0, 1.0], [(0, 1, 3), (1, 2, 1)], 4.0),
    ([4.0, 4.0, 1.0], [1.0, 1.0, 1.0], [9.0, 12.0, 30.0], [(0, 2, 2), (2, 3, 1)], 3.0),
    ([8.0, 1.0], [1.0, 1.0], [6.0, 30.0], [(0, 2, 3)], 2.0),
    ([5.0], [40.0], [3.0], [(0, 1, 1)], 0.5),
    ([1.0, 7.0, 2.0], [1.0, 3.0, 2.0], [2.0, 2.0, 40.0], [(0, 1, 1), (1, 3, 4)], 8.0),
]


def grade_slowest(answer: Answer) -> None:
    found = answer.calls(_PLANS, "slowest_part(times, outputs, weights, stages, bandwidth)")
    values = [expect_number(value, "slowest_part(…)") for value in found]
    for plan, got in zip(_PLANS, values, strict=True):
        best = slowest_part(*plan)
        if not close(got, best):
            times, outputs, weights, stages, bandwidth = plan
            told = f"times={times}, outputs={outputs}, weights={weights}, stages={stages}, bandwidth={bandwidth}"
            symptom = f"`slowest_part` gives {got:.4g} for a plan whose slowest part takes {best:.4g}."
            raise Mistake(symptom, _why_slowest(values), f"The plan was {told}.")


def _variant(
    plan: _Plan,
    once: bool = False,
    last: bool = False,
    inside: bool = False,
    boundaries: bool = True,
    exchanges: bool = True,
    shared: bool = True,
    ring: bool = False,
    adds: bool = False,
) -> float:
    """What a plan takes if one thing is forgotten or taken otherwise."""
    times, outputs, weights, stages, bandwidth = plan
    parts = []
    for start, end, replicas in stages:
        work = sum(times[start:end])
        exchange = 2 * (replicas - 1) * sum(weights[start:end]) / bandwidth if exchanges else 0.0
        exchange /= replicas if ring else 1
        together = work + exchange if adds else max(work, exchange)
        parts.append(together / replicas if shared else together)
        ends = range(start + 1, end + 1) if inside else [end]
        parts += [
            (1 if once else 2) * outputs[e - 1] / bandwidth for e in ends if boundaries and (last or e < len(times))
        ]
    return max(parts)


_WHY: tuple[tuple[Callable[[_Plan], float], str], ...] = (
    (partial(_variant, shared=False), "Replicas share the microbatches, so a stage takes its time *divided by* them."),
    (partial(_variant, boundaries=False), "A boundary takes time, too, and may be the slowest part."),
    (partial(_variant, once=True), "A boundary is crossed twice: an activation goes down, its gradient comes back."),
    (partial(_variant, last=True), "Behind the last layer nothing is sent."),
    (partial(_variant, inside=True), "Only the output of a stage's *last* layer is sent; inside a stage nothing is."),
    (partial(_variant, exchanges=False), "Replicas exchange the gradients of their weights in every round."),
    (partial(_variant, ring=True), "The exchange is divided by the replicas once, together with the work, not twice."),
    (partial(_variant, adds=True), "Work and exchange run at the same time: take the larger one, not the sum."),
)


def _why_slowest(values: Sequence[float]) -> str:
    for rule, cause in _WHY:
        if all(close(got, rule(plan)) for plan, got in zip(_PLANS, values, strict=True)):
            return cause
    return "For each stage the larger of work and exchange, over its replicas; between stages twice the output."
