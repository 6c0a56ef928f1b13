"""One stage a rank, whole backwards: naive, GPipe and the two 1F1B differ in how far the forwards run ahead."""

from collections.abc import Sequence

from course_pp.schedule.action import Action
from course_pp.schedule.families.merge import merge
from course_pp.schedule.schedule import Schedule, looped


def naive(n_ranks: int, n_microbatches: int) -> Schedule:
    """One microbatch at a time, forward and backward, so one rank works at a time."""
    return _running_ahead("naive", n_microbatches, [0] * n_ranks)


def gpipe(n_ranks: int, n_microbatches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019, "GPipe", section 2.3)."""
    return _running_ahead("gpipe", n_microbatches, [n_microbatches] * n_ranks)


def one_f_one_b(n_ranks: int, n_microbatches: int) -> Schedule:
    """Warm-up: forwards to fill the ranks behind. Steady state: one forward, one backward. Drain: the backwards left.

    PipeDream-Flush in Narayanan et al. 2021, "Memory-efficient pipeline-parallel DNN training", section 3.2; also Fan
    et al. 2021, "DAPPLE".
    """
    rows = []
    for rank in range(n_ranks):
        ahead = min(n_ranks - 1 - rank, n_microbatches)
        warm_up = [Action(rank, "F", i) for i in range(ahead)]
        steady_state = [
            action
            for i in range(n_microbatches - ahead)
            for action in (Action(rank, "F", ahead + i), Action(rank, "B", i))
        ]
        drain = [Action(rank, "B", i) for i in range(n_microbatches - ahead, n_microbatches)]
        rows.append((*warm_up, *steady_state, *drain))
    return Schedule("1f1b", looped(n_ranks), tuple(rows))


def eager_1f1b(n_ranks: int, n_microbatches: int) -> Schedule:
    """1F1B with twice the warm-up, so that messages travel while a rank works on other microbatches.

    Eager-1F1B in Zhuang et al. 2023, "On optimizing the communication of model parallelism", section 4. Rank r holds
    up to 2 (p - 1 - r) + 1 microbatches.
    """
    return _running_ahead("1f1b_eager", n_microbatches, [2 * (n_ranks - 1 - rank) for rank in range(n_ranks)])


def _running_ahead(name: str, n_microbatches: int, warm_up: Sequence[int]) -> Schedule:
    rows = []
    for rank, forwards_first in enumerate(warm_up):
        work = [(rank, microbatch) for microbatch in range(n_microbatches)]
        rows.append(merge(work, work, forwards_first))
    return Schedule(name, looped(len(rows)), tuple(rows))
