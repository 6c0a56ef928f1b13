"""PipeDream: 1F1B that never stops to flush; every stage updates its weights after every backward."""

from collections.abc import Sequence

from course_pp.schedule.action import Action
from course_pp.schedule.families.merge import merge
from course_pp.schedule.schedule import Schedule


def pipedream(
    n_ranks: int, n_microbatches: int, replicas: Sequence[int] | None = None, group: int | None = None
) -> Schedule:
    """Asynchronous 1F1B with round-robin replicas.

    Narayanan et al. 2019, "PipeDream: generalized pipeline parallelism for DNN training", section 3.2. A microbatch is
    there called a minibatch, as each has an update of its own.

    Args:
        replicas: how many ranks share each stage, first stage first; one each unless given.
        group: microbatches whose gradients make one update, as in PipeDream-2BW (Narayanan et al. 2021, arXiv
            2006.09503, section 3.1); unless given, each rank updates after every backward.

    Raises:
        ValueError: unless the replicas are positive and add up to ``n_ranks``; for groups that the microbatches do not
            fill, or replicas not share.
    """
    shares = [1] * n_ranks if replicas is None else list(replicas)
    if any(share < 1 for share in shares) or sum(shares) != n_ranks:
        raise ValueError(
            f"replicas {tuple(shares)} on {n_ranks} ranks: give each stage at least one rank, {n_ranks} in all"
        )
    if group is not None and (group < 1 or n_microbatches % group or any(group % share for share in shares)):
        raise ValueError(
            f"group is {group}: it must divide {n_microbatches} microbatches, and replicas {tuple(shares)} divide it"
        )
    rows: list[tuple[Action, ...]] = []
    placement = []
    for stage, share in enumerate(shares):
        placement.append(tuple(range(len(rows), len(rows) + share)))
        # A stage keeps as many microbatches in flight as there are ranks from it to the end, shared by its replicas
        # (section 3.2 gives it for the first stage and calls it NOAM).
        in_flight = -(-sum(shares[stage:]) // share)
        for replica in range(share):
            work = [(stage, microbatch) for microbatch in range(replica, n_microbatches, share)]
            row = merge(work, work, in_flight - 1, "BU")
            rows.append(row if group is None else _updated_by_group(row, group, share))
    return Schedule("pipedream", tuple(placement), tuple(rows))


def _updated_by_group(row: Sequence[Action], group: int, share: int) -> tuple[Action, ...]:
    """Only the updates behind a replica's last microbatch of each group."""
    return tuple(a for a in row if a.kind != "U" or (a.microbatch // share + 1) % (group // share) == 0)
