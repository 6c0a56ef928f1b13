"""DualPipeV: the V placement, with a forward and a backward run as one overlapped pair in the steady state."""

from course_pp.schedule.families.phases import Phase, spell_out
from course_pp.schedule.schedule import Schedule, v_shaped


def dualpipe_v(n_ranks: int, n_microbatches: int) -> Schedule:
    """DeepSeek's DualPipe folded in half, so that no stage is held twice.

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
