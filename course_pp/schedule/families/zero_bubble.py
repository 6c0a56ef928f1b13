"""The backward in two halves: the input gradient goes out at once, the weight gradient fills a bubble later.

Both schedules are handcrafted in Qi et al. 2024, "Zero bubble pipeline parallelism" (ICLR), section 2. A rank that
runs further ahead with its forwards lags less with its weight gradients, so that all ranks hold equally much.
"""

from course_pp.schedule.families.looped import microbatches_a_round, rounds
from course_pp.schedule.families.merge import merge
from course_pp.schedule.schedule import Schedule, looped


def zb_h1(n_ranks: int, n_microbatches: int, n_chunks: int = 1) -> Schedule:
    """No more memory than 1F1B, a third of its bubble (section 2.1). With chunks: torch's InterleavedZeroBubble."""
    return _split("zb_h1", n_ranks, n_microbatches, n_chunks, slope=1)


def zb_h2(n_ranks: int, n_microbatches: int) -> Schedule:
    """About twice the memory of 1F1B and no bubble between a rank's first and last action (section 2.2)."""
    return _split("zb_h2", n_ranks, n_microbatches, 1, slope=2)


def _split(name: str, n_ranks: int, n_microbatches: int, n_chunks: int, slope: int) -> Schedule:
    """``slope``: how many more forwards a rank runs ahead than the rank after it."""
    in_round = microbatches_a_round(n_ranks, n_microbatches, n_chunks)
    rows = []
    for rank in range(n_ranks):
        forwards, backwards = rounds(rank, n_ranks, n_microbatches, n_chunks, in_round)
        warm_up = (n_chunks - 1) * in_round + slope * (n_ranks - 1 - rank)
        rows.append(merge(forwards, backwards, warm_up, "IW", lag=slope * rank))
    return Schedule(name, looped(n_ranks, n_chunks), tuple(rows))
