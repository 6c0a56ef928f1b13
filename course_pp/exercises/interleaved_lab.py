"""What notebook 04 compares: the shortest warm-up, and how often a rank turns to another chunk."""

from __future__ import annotations

from itertools import pairwise

from course_pp.exercises.interleaved_orders import warm_up_forwards, with_warm_up
from course_pp.schedule import Schedule

__all__ = ["lean", "turns"]


def lean(p: int, m: int, v: int) -> Schedule:
    """Interleaved 1F1B with the shortest warm-up that costs no time where messages take none."""
    return with_warm_up(lambda rank: warm_up_forwards(rank, p, v), p, m, v)


def turns(schedule: Schedule) -> int:
    """Return how often a rank turns to another chunk, its first included; of the rank that does so most."""
    stages = [[part.stage for action in row for part in action.parts] for row in schedule.actions]
    return max(1 + sum(a != b for a, b in pairwise(row)) for row in stages)
