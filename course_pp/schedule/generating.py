"""The order in which a pipeline generates text: each group of prompts goes round and round, others fill the ranks."""

from collections.abc import Sequence

from course_pp.arguments import checked, refuse_below
from course_pp.schedule.action import Action
from course_pp.schedule.schedule import MOST_FORWARDS, Schedule, looped, normalised

__all__ = ["generation"]


@checked
def generation(
    n_ranks: int,
    n_groups: int,
    n_tokens: int,
    n_chunks: int = 1,
    placement: Sequence[int | Sequence[int]] | None = None,
) -> Schedule:
    """Return the schedule that makes ``n_tokens`` tokens for each of ``n_groups`` groups of prompts.

    Microbatch ``token * n_groups + group`` is one token of one group: its forward at the first stage needs the token
    that the last stage has made before it. So one group alone keeps one rank busy at a time, and the bubble is not that
    of training: it goes away when there are as many groups as stages, however few tokens are made.

        simulate(generation(4, 1, 16)).utilisation      # 0.25
        simulate(generation(4, 8, 16)).utilisation      # 0.98

    Args:
        n_chunks: stages a rank, placed in a loop.
        placement: for each stage its rank, if not in a loop.

    Raises:
        ValueError: for fewer than one of anything, or so many that the actions cannot be named.
    """
    refuse_below(1, "generation", n_ranks=n_ranks, n_groups=n_groups, n_tokens=n_tokens, n_chunks=n_chunks)
    n_stages = n_ranks * n_chunks if placement is None else max(n_ranks, len(placement))
    n_forwards = n_stages * n_groups * n_tokens
    if n_forwards > MOST_FORWARDS:
        raise ValueError(
            f"n_ranks × n_chunks × n_groups × n_tokens is {n_forwards:,}: a schedule names each action, so keep it at "
            f"{MOST_FORWARDS:,} or below"
        )
    placed = looped(n_ranks, n_chunks) if placement is None else normalised(placement)
    rows: list[list[Action]] = [[] for _ in range(n_ranks)]
    for token in range(n_tokens):
        for stage, ranks in enumerate(placed):
            for microbatch in range(token * n_groups, (token + 1) * n_groups):
                rank = ranks[microbatch % len(ranks)]
                if 0 <= rank < n_ranks:  # or the schedule says what is wrong
                    rows[rank].append(Action(stage, "F", microbatch))
    return Schedule("generation", placed, tuple(map(tuple, rows)), feedback=n_groups)
