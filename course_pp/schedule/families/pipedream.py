"""PipeDream: 1F1B that never stops to flush; every stage updates its weights after every backward."""

from collections.abc import Sequence

from course_pp.schedule.action import Action
from course_pp.schedule.families.merge import merge
from course_pp.schedule.schedule import Schedule


def pipedream(n_ranks: int, n_microbatches: int, replicas: Sequence[int] | None = None) -> Schedule:
    """Asynchronous 1F1B with round-robin replicas.

    Narayanan et al. 2019, "PipeDream: generalized pipeline parallelism for DNN training", section 3.2. A microbatch is
    there called a minibatch, as each has an update of its own.

    Args:
        replicas: how many ranks share each stage, first stage first; one each unless given.

    Raises:
        ValueError: unless the replicas are positive and add up to ``n_ranks``.
    """
    shares = [1] * n_ranks if replicas is None else list(replicas)
    if any(share < 1 for share in shares) or sum(shares) != n_ranks:
        raise ValueError(
            f"replicas {tuple(shares)} on {n_ranks} ranks: give each stage at least one rank, {n_ranks} in all"
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
            rows.append(merge(work, work, in_flight - 1, "BU"))
    return Schedule("pipedream", tuple(placement), tuple(rows))
