"""Two of notebook 01's exercises: layers to stages, as evenly as can be, by number and by cost."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

from course_pp.exercises.answer import Answer, written_call
from course_pp.exercises.exercise import Mistake, Stopped
from course_pp.exercises.expect import expect_int, expect_list
from course_pp.model import compute_layer_assignment, partition_by_cost


def assign_layers(n_layers: int, n_stages: int) -> list[tuple[int, int]]:
    """One (start, end) a stage, as even as can be; earlier stages take the extras."""
    share, extras = divmod(n_layers, n_stages)
    ranges, start = [], 0
    for stage in range(n_stages):
        end = start + share + (1 if stage < extras else 0)
        ranges.append((start, end))
        start = end
    return ranges


def _as_ranges(value: Any, call: str, n_layers: int, n_stages: int) -> list[tuple[int, int]]:
    """Return the value as ranges that cover all layers in order, one layer a stage at least. Raises Mistake if not."""
    rows = expect_list(value, call, n_stages)
    ranges = []
    for stage, row in enumerate(rows):
        if not isinstance(row, list | tuple) or len(row) != 2:
            raise Mistake(f"In `{call}`, stage {stage} is {row!r}, not (start, end).", "Two numbers a stage.")
        start, end = (expect_int(bound, f"{call}[{stage}][{i}]") for i, bound in enumerate(row))
        ranges.append((start, end))
    it_is = f"It is {ranges}."
    for stage, (start, end) in enumerate(ranges):
        if end <= start:
            raise Mistake(f"In `{call}`, stage {stage} has no layer.", _why_empty(ranges, n_layers), it_is)
    for stage, ((_, end), (start, _)) in enumerate(pairwise(ranges)):
        if start != end:
            lost = f"layers {end} to {start - 1} are on no stage" if start > end else f"layer {start} is on two stages"
            cause = "The next stage starts where this one ends."
            if start == end + 1:
                cause = "Is `end` included? It is the first layer that does not belong to the stage."
            raise Mistake(f"In `{call}`, after stage {stage}, {lost}.", cause, it_is)
    if ranges[0][0] != 0 or ranges[-1][1] != n_layers:
        covered = f"layers {ranges[0][0]} to {ranges[-1][1] - 1}, not 0 to {n_layers - 1}"
        raise Mistake(f"`{call}` covers {covered}.", _why_not_all(ranges, n_layers), it_is)
    return ranges


def _why_empty(ranges: list[tuple[int, int]], n_layers: int) -> str:
    if any(end < start for start, end in ranges):
        return "A stage is (start, end): the first layer it holds, then the first one after it."
    if sum(size for _, size in ranges) == n_layers:
        return "The second number is where a stage ends, not how many layers it has."
    return "Each stage holds at least one."


def _why_not_all(ranges: list[tuple[int, int]], n_layers: int) -> str:
    left = n_layers - ranges[-1][1]
    if ranges[0][0] != 0:
        return "The first stage starts with layer 0."
    if left < 0:
        return "Together the stages have more layers than there are."
    if left == n_layers % len(ranges):
        return f"The layers do not divide evenly, and `//` leaves some over: here {left}."
    return "The last stage ends with the last layer."


def grade_assign_layers(answer: Answer) -> None:
    cases = [(8, 2), (12, 4), (12, 5), (5, 3), (10, 4), (11, 4), (7, 7), (9, 1), (61, 16)]
    for (n_layers, n_stages), value in zip(cases, answer.calls(cases), strict=True):
        call = f"assign_layers({n_layers}, {n_stages})"
        ranges = _as_ranges(value, call, n_layers, n_stages)
        want = compute_layer_assignment(n_layers, n_stages)
        if ranges == want:
            continue
        sizes, right = ([end - start for start, end in found] for found in (ranges, want))
        example = f"layers a stage  {sizes}\nexpected        {right}"
        if sorted(sizes) == sorted(right):
            cause = "The split is even, but the extras are not on the earlier stages."
        elif sizes[-1] == n_layers - (n_stages - 1) * sizes[0] and sizes[-1] > sizes[0]:
            cause = "All extras went to the last stage: give one each to the first `n_layers % n_stages` stages."
        else:
            cause = "No stage may have two layers more than another; rounding up for each gives away too many."
        raise Mistake(f"`{call}` is not the split asked for.", cause, example)


def balanced_cut(costs: list[float], n_stages: int) -> list[tuple[int, int]]:
    """One (start, end) a stage; its costliest stage is as cheap as can be."""
    # best[end] = (cost of the costliest stage, ranges) for the first `end` layers on the stages so far
    best: dict[int, tuple[float, list]] = {0: (0.0, [])}
    for stage in range(n_stages):
        longer = {}
        for end in range(stage + 1, len(costs) - (n_stages - stage - 1) + 1):
            options = [
                (max(worst, sum(costs[start:end])), [*ranges, (start, end)])
                for start, (worst, ranges) in best.items()
                if start < end
            ]
            longer[end] = min(options)
        best = longer
    return best[len(costs)][1]


_CUTS: tuple[tuple[list[float], int], ...] = (
    ([1, 1, 1, 1], 2),
    ([1, 1, 1, 1, 4], 2),
    ([6, 1, 1, 1, 1, 1, 1], 3),
    ([4, 1, 1, 4, 1, 1], 3),
    ([3, 3, 3, 3, 3, 3, 3], 4),
    ([2, 3, 4, 5, 6], 3),
    ([5, 1, 1, 1, 1, 9], 4),
    ([0.5, 0.25, 2, 0.25, 1.5, 1], 6),
    ([1, 9, 1, 1, 9, 1, 1, 1], 3),
    ([7, 2, 5, 10, 8], 2),
    ([2.5], 1),
    # Last: who gets all cuts of whole numbers right stumbles here over the fractions.
    ([0.3, 0.4, 0.5, 0.6], 2),
    ([0.0007, 0.0002, 0.0005, 0.001, 0.0008], 2),
)
_LONG_CUT: tuple[list[float], int] = ([float(1 + (7 * i) % 11) for i in range(60)], 12)


def grade_balanced_cut(answer: Answer) -> None:
    for (costs, n_stages), value in zip(_CUTS, answer.calls(_CUTS), strict=True):
        _judge_cut(costs, n_stages, value)
    try:
        value = answer(*_LONG_CUT)
    except Stopped as e:
        if e.how != "endless":
            raise
        raise Mistake(
            f"The small cases are right, but 60 layers on 12 stages took more than {answer.limit_s:g} s.",
            "There are 10^11 cuts: too many to try. Build the best cut of the first layers on k stages from the best "
            "cuts of fewer on k - 1.",
        ) from None
    _judge_cut(*_LONG_CUT, value)


def _judge_cut(costs: list[float], n_stages: int, value: Any) -> None:
    call = written_call("balanced_cut", costs, n_stages)
    ranges = _as_ranges(value, call, len(costs), n_stages)
    want = partition_by_cost(costs, n_stages)
    got, best = (_stage_costs(costs, found) for found in (ranges, want))
    if max(got) <= max(best) * (1 + 1e-12):
        return
    if ranges == compute_layer_assignment(len(costs), n_stages):
        cause = "The same number of layers is not the same cost."
    elif any(cost % 1 for cost in costs):
        cause = "Costs need not be whole numbers, nor near 1: a limit that goes up in steps jumps over the best one."
    elif _is_filled_to(sum(costs) / n_stages, costs, ranges):
        cause = "One stage after another is filled up to the average: where to cut first depends on what comes later."
    else:
        cause = "A cut is as good as its costliest stage: of all cuts, take the one whose largest sum is smallest."
    example = f"costs of the stages  {got}, at {ranges}\npossible             {best}, at {want}"
    raise Mistake(f"`{call}` has a stage that costs {max(got):g}; {max(best):g} is possible.", cause, example)


def _is_filled_to(average: float, costs: list[float], ranges: list[tuple[int, int]]) -> bool:
    """Whether each stage but the last takes layers as long as it stays below the average, and one more at most."""
    return all(sum(costs[start : end - 1]) < average < sum(costs[start : end + 1]) for start, end in ranges[:-1])


def _stage_costs(costs: list[float], ranges: list[tuple[int, int]]) -> list[float]:
    up_to = list(accumulate(costs, initial=0))
    return [up_to[end] - up_to[start] for start, end in ranges]
