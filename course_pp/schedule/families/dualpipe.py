"""DualPipe and its half, DualPipeV: a forward and a backward run as one overlapped pair in the steady state."""

from course_pp.schedule.action import Action, Overlap
from course_pp.schedule.families.phases import Phase, spell_out
from course_pp.schedule.schedule import Schedule, both_ways, v_shaped


def dualpipe(n_ranks: int, n_microbatches: int) -> Schedule:
    """DeepSeek's DualPipe: even microbatches enter at the first rank, odd ones at the last, each half as in DualPipeV.

    DeepSeek-AI 2024, "DeepSeek-V3 technical report", section 3.2.1. The phases are those of DeepSeek's published code,
    which numbers the microbatches of each direction from 0.

    Raises:
        ValueError: for an odd number of ranks or of microbatches, or fewer microbatches than two a rank.
    """
    placement = both_ways("dualpipe", n_ranks)
    if n_microbatches < 2 * n_ranks or n_microbatches % 2:
        least = max(2 * n_ranks, n_microbatches - n_microbatches % 2)
        raise ValueError(
            f"dualpipe sends half of the microbatches each way, and at least {n_ranks} to fill its {n_ranks} stages, "
            f"but there are {n_microbatches}: give an even number of at least {2 * n_ranks}, such as {least} or "
            f"{least + 2}"
        )
    rows = []
    for rank in range(n_ranks):
        # Seen from its own end, a rank of the lower half does what its mirror image does.
        near, far = sorted((rank, n_ranks - 1 - rank))
        row = spell_out(_phases(n_ranks // 2, n_microbatches // 2, near), (near, far))
        rows.append(tuple(_numbered_both_ways(action, rank) for action in row))
    return Schedule("dualpipe", placement, tuple(rows))


def _numbered_both_ways(action: Action | Overlap, rank: int) -> Action | Overlap:
    """The same of the microbatch's number among all: stage ``rank`` is on the way down, the other on the way up."""
    parts = [Action(a.stage, a.kind, 2 * a.microbatch + (a.stage != rank)) for a in action.parts]
    return Overlap(*parts) if len(parts) > 1 else parts[0]


def dualpipe_v(n_ranks: int, n_microbatches: int) -> Schedule:
    """DualPipe folded in half, so that no stage is held twice.

    DeepSeek-AI 2024, "DeepSeek-V3 technical report", section 3.2.1, for the pairs; Qi et al. 2025, "DualPipe could be
    better without the Dual", for the fold. The phases are those of DeepSeek's published DualPipeV.

    Raises:
        ValueError: for fewer microbatches than stages, which are two a rank.
    """
    if n_microbatches < 2 * n_ranks:
        fewer = n_microbatches // 2
        or_fewer = f", or at most {fewer} rank{'s' if fewer > 1 else ''}" if fewer else ""
        raise ValueError(
            f"dualpipe_v fills all {2 * n_ranks} stages before it pairs, but there are {n_microbatches} microbatches: "
            f"give at least {2 * n_ranks} microbatches{or_fewer}"
        )
    rows = (
        spell_out(_phases(n_ranks, n_microbatches, rank), (rank, 2 * n_ranks - 1 - rank)) for rank in range(n_ranks)
    )
    return Schedule("dualpipe_v", v_shaped(n_ranks), tuple(rows))


def _phases(p: int, m: int, rank: int) -> list[Phase]:
    behind = p - 1 - rank
    pairs = m - 2 * p + rank + 1
    # The turn of the V has its own activation at hand, so a pair there would only delay the backward.
    alone = 1 if behind == 0 else 0
    last = ["B1", "B0"] * (rank + 1)
    return [
        ("F0", 2 * behind),
        ("F0 F1", rank + 1),
        ("I1 W1 F1", behind),
        ("F0 B1 F1&B0", alone),
        ("F0&B1 F1&B0", pairs - alone),
        ("B1 F1&B0", behind),
        # The second half of these backwards is split, so that weight gradients are left for the end.
        (" ".join(last[: rank + 1]), 1),
        (" ".join(last[rank + 1 :]).replace("B", "I"), 1),
        ("W I0", behind),
        ("W", rank + 1),
    ]
