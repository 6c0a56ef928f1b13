"""Orders that notebook 04 compares: with the shortest warm-up, and in rounds of any size."""

from __future__ import annotations

from itertools import pairwise

from course_pp.exercises.interleaved_orders import order_in_rounds, warm_up_forwards, with_warm_up
from course_pp.schedule import Schedule
from course_pp.schedule.schedule import looped

__all__ = ["in_rounds", "lean", "turns"]


def lean(p: int, m: int, v: int) -> Schedule:
    """Interleaved 1F1B with the shortest warm-up that costs no time where messages take none."""
    return with_warm_up(lambda rank: warm_up_forwards(rank, p, v), p, m, v)


def in_rounds(p: int, m: int, v: int, n: int) -> Schedule:
    """Interleaved 1F1B with Megatron-LM's warm-up in rounds of n microbatches.

    Raises:
        ValueError: for rounds of less than p or more than m microbatches.
    """
    if not p <= n <= m:
        raise ValueError(f"n is {n}: with {p} ranks and {m} microbatches give {p} to {m}")
    rows = tuple(tuple(order_in_rounds(rank, p, m, v, n)) for rank in range(p))
    return Schedule(f"rounds of {n}", looped(p, v), rows)


def turns(schedule: Schedule) -> int:
    """How often the rank that does so most turns to a chunk that it did not use just before, its first included."""
    stages = [[part.stage for action in row for part in action.parts] for row in schedule.actions]
    return max(1 + sum(a != b for a, b in pairwise(row)) for row in stages)
