"""Sizes that suit every schedule of the catalogue."""

from course_pp.schedule import Schedule, build

TWO_COPIES = ("chimera", "dualpipe")


def built(name: str, n_ranks: int, n_microbatches: int) -> Schedule:
    """Return the schedule of that name.

    Where the number of ranks must be even and is odd, it gets one rank more, and as many
    microbatches for each rank.
    """
    if name in TWO_COPIES and n_ranks % 2:
        return build(name, n_ranks + 1, -(-n_microbatches // n_ranks) * (n_ranks + 1))
    return build(name, n_ranks, n_microbatches)
