"""Exercises of notebook 04 about stages: where they live, and how many a rank should have."""

from __future__ import annotations

from collections.abc import Sequence

from course_pp.exercises.answer import Answer
from course_pp.exercises.exercise import Mistake
from course_pp.exercises.expect import expect_int, expect_list
from course_pp.schedule import Costs, build, simulate

__all__ = ["best_chunks", "grade_best_chunks", "grade_stages", "stages_of_rank"]


def stages_of_rank(rank: int, p: int, v: int, shape: str) -> list[int]:
    """The v stages that this rank holds, in the order of the model; shape is "loop" or "V"."""
    stages = []
    for chunk in range(v):
        place = p - 1 - rank if shape == "V" and chunk % 2 == 1 else rank
        stages.append(chunk * p + place)
    return stages


def best_chunks(p: int, m: int, layers: int, forward: float, backward: float, latency: float) -> int:
    """The number of chunks a rank with the shortest step; it divides the number of a rank's layers."""
    steps = {}
    for v in range(1, layers + 1):
        if layers % v == 0:
            costs = Costs(forward / v, backward / v, 0, latency)
            steps[v] = simulate(build("interleaved_1f1b", p, m, v), costs).makespan
    return min(steps, key=lambda v: steps[v])


def grade_stages(answer: Answer) -> None:
    for shape in ("loop", "V"):
        rows = [(rank, p, v, shape) for p, v in ((4, 2), (2, 2), (3, 1), (1, 2), (4, 3), (3, 4)) for rank in range(p)]
        held = {
            row: [
                expect_int(stage, f"a stage of stages_of_rank{row}")
                for stage in expect_list(value, f"stages_of_rank{row}")
            ]
            for row, value in zip(rows, answer.calls(rows), strict=True)
        }
        for row in rows:
            _judge_stages(held, row)


def _judge_stages(held: dict[tuple[int, int, int, str], list[int]], row: tuple[int, int, int, str]) -> None:
    rank, p, v, shape = row
    what = f"stages_of_rank({rank}, {p}, {v}, {shape!r})"
    stages, wanted = held[row], stages_of_rank(*row)
    if stages == wanted:
        return
    everyone = "\n".join(f"rank {other}: {held[other, p, v, shape]}" for other in range(p))
    symptom = f"`{what}` is {stages}."
    if len(stages) != v:
        raise Mistake(symptom, f"A rank holds v = {v} stages, one of each chunk.", everyone)
    if sorted(stages) == wanted:
        raise Mistake(symptom, "Put them in the order of the model.", everyone)
    if v > 1 and stages == list(range(rank * v, rank * v + v)):
        cause = (
            "Neighbours in the model are then on one rank: a microbatch visits each rank once, and the way in is as "
            "long as without chunks."
        )
        raise Mistake(symptom, cause, everyone)
    if not all(0 <= stage < p * v for other in range(p) for stage in held[other, p, v, shape]):
        raise Mistake(symptom, f"The stages are 0 to p * v - 1, here 0 to {p * v - 1}.", everyone)
    raise Mistake(symptom, _why_elsewhere(stages, row), everyone)


def _why_elsewhere(stages: Sequence[int], row: tuple[int, int, int, str]) -> str:
    rank, p, v, shape = row
    if shape == "loop":
        return "Stages are dealt round, like cards: stage s is on rank s % p, so chunk c of rank r is stage c * p + r."
    if list(stages) == stages_of_rank(rank, p, v, "loop"):
        return "That is the loop. In a V the second chunk goes back: its first stage is on the *last* rank."
    if list(stages[:2]) == stages_of_rank(rank, p, min(2, v), "V"):
        return "The first two chunks are right. The third goes down the ranks again, and the fourth back: a zigzag."
    return "Every second chunk goes back: chunk 1 begins where chunk 0 ended, on the last rank, and ends on rank 0."


_CLUSTERS = (
    (8, 16, 8, 48, 96, 0),
    (8, 16, 8, 48, 96, 12),
    (8, 16, 8, 48, 96, 2),
    (4, 8, 4, 12, 24, 12),
    (4, 32, 6, 48, 48, 4),
    (4, 4, 12, 60, 120, 8),
    (1, 4, 4, 12, 24, 3),
    (2, 2, 12, 6, 9, 0),
    (8, 16, 4, 7, 14, 1.5),
    (8, 16, 8, 48, 96, 192),
)


def grade_best_chunks(answer: Answer) -> None:
    for row, value in zip(_CLUSTERS, answer.calls(_CLUSTERS), strict=True):
        what = f"best_chunks{row}"
        v = expect_int(value, what, "A number of chunks is whole: round, and try both neighbours.")
        layers = row[2]
        if v < 1 or layers % v:
            raise Mistake(f"`{what}` is {v}.", f"A rank's {layers} layers cannot be cut into {v} equal chunks.")
        steps = {u: _step(u, *row) for u in range(1, layers + 1) if layers % u == 0}
        least = min(steps.values()) * (1 + 1e-9)
        step, best = steps[v], min(u for u in steps if steps[u] <= least)
        example = "\n".join(f"v = {u}: {each:g}" for u, each in steps.items())
        if step > least:
            chunks = "1 chunk" if best == 1 else f"{best} chunks"
            symptom = f"`{what}` is {v}: the step takes {step:g}, and with {chunks} {least:g}."
            raise Mistake(symptom, _why_another(v, best, row), example)
        if v != best:
            raise Mistake(
                f"`{what}` is {v}; {best} chunk{'s make' if best > 1 else ' makes'} the step as short.",
                "If several are equal, take the fewest: each chunk more costs messages.",
                example,
            )


def _step(v: int, p: int, m: int, layers: int, forward: float, backward: float, latency: float) -> float:
    return float(simulate(build("interleaved_1f1b", p, m, v), Costs(forward / v, backward / v, 0, latency)).makespan)


def _why_another(v: int, best: int, row: tuple[float, ...]) -> str:
    _, _, layers, *_, latency = row
    if v == layers and latency:
        return "More chunks shorten the bubble, and each adds 2 p messages to the way in and out. Weigh the two."
    if not latency:
        return "Without latency every chunk more shortens the bubble."
    if v == 1:
        return (
            "`forward` and `backward` are the times of all layers of a rank: a chunk takes a v-th of them. With the "
            "times of a whole rank, more chunks would mean more work."
        )
    return "Add up the work, (m v + p - 1) turns of a chunk, and what latency adds, 2 (v p - 1) messages."
