"""Several stages a rank, dealt round: each rank works for every chunk of the model in turn."""

from course_pp.schedule.families.merge import merge
from course_pp.schedule.schedule import Schedule, Work, looped


def interleaved_1f1b(n_ranks: int, n_microbatches: int, n_chunks: int, round_size: int | None = None) -> Schedule:
    """Depth first: a round of microbatches through every chunk, then the next round.

    Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters using Megatron-LM",
    section 2.2. A round is as near to ``n_ranks`` microbatches as divides their number (as in torch), unless
    ``round_size`` says how many: Megatron's microbatch group size per virtual pipeline stage, and N in Llama Team 2024,
    "The Llama 3 herd of models", section 3.3.2. The last round takes what is left.

    Raises:
        ValueError: for microbatches that cannot be dealt so; names the nearest sizes that can.
    """
    if round_size is None:
        in_round = microbatches_a_round(n_ranks, n_microbatches, n_chunks)
    else:
        _refuse_impossible_round(n_ranks, n_microbatches, n_chunks, round_size)
        in_round = round_size
    rows = []
    for rank in range(n_ranks):
        forwards, backwards = rounds(rank, n_ranks, n_microbatches, n_chunks, in_round)
        rows.append(merge(forwards, backwards, (n_chunks - 1) * in_round + 2 * (n_ranks - 1 - rank)))
    return Schedule("interleaved_1f1b", looped(n_ranks, n_chunks), tuple(rows))


def looped_bfs(n_ranks: int, n_microbatches: int, n_chunks: int) -> Schedule:
    """Breadth first: all microbatches through one chunk, then through the next; all backwards in reverse.

    Lamy-Poirier 2023, "Breadth-first pipeline parallelism", arXiv:2211.05953.
    """
    rows = []
    for rank in range(n_ranks):
        stages = range(rank, n_ranks * n_chunks, n_ranks)
        forwards = [(stage, microbatch) for stage in stages for microbatch in range(n_microbatches)]
        rows.append(merge(forwards, forwards[::-1], len(forwards)))
    return Schedule("looped_bfs", looped(n_ranks, n_chunks), tuple(rows))


def microbatches_a_round(n_ranks: int, n_microbatches: int, n_chunks: int) -> int:
    """How many microbatches pass through one chunk before the rank turns to its next; all, if there is no other.

    Raises:
        ValueError: when the microbatches cannot be dealt into equal rounds; names the nearest numbers that can.
    """
    if n_chunks == 1:
        return n_microbatches
    n_rounds = _rounds(n_ranks, n_microbatches)
    if n_microbatches % n_rounds:
        fits = [m for m in range(1, n_microbatches + n_ranks + 1) if m % _rounds(n_ranks, m) == 0]
        below, above = max(m for m in fits if m < n_microbatches), min(m for m in fits if m > n_microbatches)
        raise ValueError(
            f"{n_microbatches} microbatches on {n_ranks} ranks make {n_rounds} rounds of unequal size: "
            f"give a multiple of the number of rounds, such as {below} or {above}, or choose round_size: "
            f'build("interleaved_1f1b", {n_ranks}, {n_microbatches}, {n_chunks}, round_size={n_microbatches})'
        )
    return n_microbatches // n_rounds


def _refuse_impossible_round(n_ranks: int, n_microbatches: int, n_chunks: int, round_size: int) -> None:
    """Raise ValueError, naming the nearest that can be, for a round size under which ranks would wait in a circle.

    A rank runs 2 (p - 1) forwards further ahead than the last, and needs of the round before what the last has not done
    yet unless two rounds in a row hold as many. One round alone has none before it.
    """
    if round_size <= n_microbatches and _can_run(n_ranks, n_microbatches, n_chunks, round_size):
        return
    fits = [size for size in range(1, n_microbatches + 1) if _can_run(n_ranks, n_microbatches, n_chunks, size)]
    below, above = [size for size in fits if size < round_size], [size for size in fits if size > round_size]
    nearest = " or ".join(str(size) for size in (*below[-1:], *above[:1]))
    if round_size > n_microbatches:
        raise ValueError(f"round_size is {round_size}, but there are {n_microbatches} microbatches: give {nearest}")
    last = n_microbatches % round_size
    rounds = f"rounds of {round_size}" + (f", the last of {last}," if last else "")
    raise ValueError(
        f"round_size is {round_size}: on {n_ranks} ranks two rounds in a row need {2 * (n_ranks - 1)} microbatches, or "
        f"ranks wait in a circle, and {n_microbatches} microbatches make {rounds} too few: give {nearest}"
    )


def _can_run(n_ranks: int, n_microbatches: int, n_chunks: int, round_size: int) -> bool:
    last = n_microbatches % round_size or round_size
    least = 2 * (n_ranks - 1)
    return n_chunks == 1 or round_size == n_microbatches or (2 * round_size >= least and round_size + last >= least)


def rounds(rank: int, n_ranks: int, n_microbatches: int, n_chunks: int, in_round: int) -> tuple[list[Work], list[Work]]:
    """What ``rank`` runs forward and backward, in order: round by round, the chunks up and then down."""
    stages = range(rank, n_ranks * n_chunks, n_ranks)

    def one_way(order: range) -> list[Work]:
        return [
            (stage, microbatch)
            for first in range(0, n_microbatches, in_round)
            for stage in order
            for microbatch in range(first, min(first + in_round, n_microbatches))
        ]

    return one_way(stages), one_way(stages[::-1])


def _rounds(n_ranks: int, n_microbatches: int) -> int:
    return max(1, n_microbatches // n_ranks)
