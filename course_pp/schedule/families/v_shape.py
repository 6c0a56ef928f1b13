"""Two stages a rank, placed as a V: the last stage is on the rank of the first, so the loss is where the data enter."""

from course_pp.schedule.action import Action
from course_pp.schedule.families.phases import Phase, spell_out
from course_pp.schedule.schedule import Schedule, v_shaped


def zb_v(n_ranks: int, n_microbatches: int) -> Schedule:
    """No bubble between a rank's first and last action, with the memory of 1F1B.

    Qi et al. 2024, "Zero bubble pipeline parallelism" (arXiv 2401.10241), section 6. The phases need
    ``2 n_ranks - 1`` microbatches to turn into one another; for fewer, those that do not exist are left out.
    """
    enough = max(n_microbatches, 2 * n_ranks - 1)
    rows = []
    for rank in range(n_ranks):
        actions = spell_out(_zb_v_phases(n_ranks, enough, rank), (rank, 2 * n_ranks - 1 - rank))
        # Never an overlapped pair, so each is one action of one microbatch.
        rows.append(tuple(a for a in actions if isinstance(a, Action) and a.microbatch < n_microbatches))
    return Schedule("zb_v", v_shaped(n_ranks), tuple(rows))


def _zb_v_phases(p: int, m: int, rank: int) -> list[Phase]:
    return [
        ("F0", 2 * (p - rank) - 1),
        ("F1 F0", rank),
        ("F1 I1 W1", p - rank),
        ("F0 I0 W0 F1 I1 W1", m - 2 * p + 1 + rank),
        ("I0 W0 F1 I1 W1", p - 1 - rank),
        ("I0 I1", rank),
        ("I0 W0", p - rank),
        ("W1", rank),
        ("W0", rank),
    ]
