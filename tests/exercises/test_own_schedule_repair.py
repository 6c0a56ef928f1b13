"""The grader of an order that a change of costs spoilt, by what learners hand in."""

from collections.abc import Callable

import pytest

from course_pp.exercises.own_schedule_repair import CHANGES, grade_repair, repair
from course_pp.schedule import Costs, Schedule, build, check, optimum, search, simulate
from tests.exercises.test_own_schedule_rules import judged

pytestmark = pytest.mark.ranks


def searched(schedule: Schedule, costs: Costs, cap: int) -> Schedule:
    return search(schedule.n_ranks, schedule.n_microbatches, costs, cap, seconds=30).schedule


def unchanged(schedule: Schedule, costs: Costs, cap: int) -> Schedule:
    return schedule


def with_more_room(schedule: Schedule, costs: Costs, cap: int) -> Schedule:
    return build("zb_h2", schedule.n_ranks, schedule.n_microbatches)


def whole_backwards(schedule: Schedule, costs: Costs, cap: int) -> Schedule:
    return build("1f1b", schedule.n_ranks, schedule.n_microbatches)


def backwards(schedule: Schedule, costs: Costs, cap: int) -> Schedule:
    return Schedule("own", schedule.placement, tuple(row[::-1] for row in schedule.actions))


def once_through(schedule: Schedule, costs: Costs, cap: int) -> Schedule:
    """Swaps that shorten the makespan, and none that leaves it."""
    rows, least = [list(row) for row in schedule.actions], simulate(schedule, costs).makespan
    for row in rows:
        for i in range(len(row) - 1):
            row[i], row[i + 1] = row[i + 1], row[i]
            changed = Schedule("own", schedule.placement, tuple(map(tuple, rows)))
            tl = None if check(changed) else simulate(changed, costs)
            if tl and tl.makespan < least and max(tl.peak_activations) <= cap:
                schedule, least = changed, tl.makespan
            else:
                row[i], row[i + 1] = row[i + 1], row[i]
    return schedule


@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (repair, ""),
        (searched, ""),
        (unchanged, "it took 31; now 31; 25 is possible. Simulate after each swap"),
        (once_through, "is possible"),
        (with_more_room, "a rank holds 5 activations"),
        (whole_backwards, "other actions"),
        (backwards, "the order cannot run"),
        (lambda schedule, costs, cap: schedule.actions, "returned tuple"),
    ],
)
def test_a_repair_is_judged_by_whether_it_runs_fits_and_is_as_short_as_can_be(
    fn: Callable[[Schedule, Costs, int], Schedule], says: str
) -> None:
    found = judged(grade_repair, fn, 90.0)
    assert says in found if says else not found


def test_what_is_asked_for_is_the_proven_optimum() -> None:
    pytest.importorskip("ortools")
    for schedule, costs, cap, best in CHANGES:
        found = optimum(schedule.n_ranks, schedule.n_microbatches, costs, cap)
        assert found.proven
        assert found.timeline.makespan == best
        assert simulate(schedule, costs).makespan > best
