"""The table of optima: every stored order does what its row says, and a sample of the proofs is done again."""

from itertools import product

import pytest

from course_pp.schedule import bound, check, optima, optimum, search, simulate
from course_pp.schedule.searching.table import Row, named_makespans
from tests.grids import thinned

ROWS = {(row.times, row.split, row.n_ranks, row.n_microbatches, row.cap): row for row in optima()}
EQUAL = (1, 1, 1)


def row(p: int, m: int, cap: int, times: tuple[int, int, int] = EQUAL, split: bool = True) -> Row:
    return ROWS[times, split, p, m, cap]


def test_it_has_every_size_up_to_four_ranks_and_eight_microbatches() -> None:
    sizes = {(p, m, cap) for p in range(1, 5) for m in range(1, 9) for cap in range(1, 2 * p + 1)}
    assert len(ROWS) == len(optima())
    assert ROWS.keys() == {(t, split, *size) for t, split, size in product([EQUAL, (10, 12, 7)], [True, False], sizes)}


def test_every_optimum_is_proven() -> None:
    assert all(each.proven for each in ROWS.values())


@thinned
def test_each_stored_order_can_run_keeps_its_cap_and_takes_as_long_as_its_row_says(every: int) -> None:
    for each in optima()[::every]:
        tl = simulate(each.schedule, each.costs)
        assert check(each.schedule) == []
        assert (each.schedule.n_ranks, each.schedule.n_microbatches) == (each.n_ranks, each.n_microbatches)
        assert tl.makespan == each.makespan
        assert max(tl.peak_activations) <= each.cap
        assert {action.kind for action in each.schedule.parts} == set("FIW" if each.split else "FB")


@thinned
def test_each_named_schedule_takes_as_long_as_its_row_says(every: int) -> None:
    for each in optima()[:: 3 * every]:
        assert each.named == named_makespans(each.n_ranks, each.n_microbatches, each.costs, each.cap)


@pytest.mark.parametrize("every", [pytest.param(53, id="a sample"), pytest.param(1, id="all", marks=pytest.mark.full)])
def test_the_proofs_hold_when_they_are_done_again(every: int) -> None:
    for each in optima()[20::every]:
        size = (each.n_ranks, each.n_microbatches, each.costs, each.cap)
        found = optimum(*size, seconds=60, split=each.split)
        assert found.proven
        assert found.timeline.makespan == each.makespan
        assert search(*size, seconds=1, split=each.split).timeline.makespan >= each.makespan


def test_no_row_contradicts_another() -> None:
    """More room, halves instead of wholes, and one microbatch fewer never take longer; nothing beats the bound."""
    for (times, split, p, m, cap), each in ROWS.items():
        if cap > 1:
            assert each.makespan <= row(p, m, cap - 1, times, split).makespan
        if m > 1:
            assert each.makespan > row(p, m - 1, cap, times, split).makespan
        if split:
            assert each.makespan <= row(p, m, cap, times, False).makespan
            assert each.makespan >= bound(p, m, each.costs, cap)
            one_stage = {"naive", "gpipe", "1f1b", "1f1b_eager", "zb_h1", "zb_h2"} & each.named.keys()
            assert all(each.named[name] >= each.makespan for name in one_stage)
