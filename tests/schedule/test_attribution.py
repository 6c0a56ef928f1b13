import pytest

from course_pp.schedule import Action, Schedule
from course_pp.schedule.fitting import Lengths, Place, attribute
from course_pp.schedule.precedence import Precedence

# Two replicas of one stage: nothing waits for anything, so the longer action is the makespan.
SIDE_BY_SIDE = Precedence.of(Schedule("", ((0, 1),), ((Action(0, "F", 0),), (Action(0, "F", 1),))))
MUCH, LITTLE = (next(i for i, (rank, _) in enumerate(SIDE_BY_SIDE.places) if rank == each) for each in (0, 1))


def lengths_with(causes: frozenset[str]) -> Lengths:
    actions = [1.0, 1.0]
    actions[MUCH] = 3.0 if "much" in causes else 1.0
    actions[LITTLE] = 2.0 if "little" in causes else 1.0
    return Lengths(actions, {})


def test_causes_that_hide_one_another_share_what_both_would_cost() -> None:
    # Alone, much costs 2 and little 1; after the other, 1 and 0.
    lost = attribute(SIDE_BY_SIDE, ["much", "little"], lengths_with)
    assert {cause: sum(shares.values()) for cause, shares in lost.items()} == {"much": 1.5, "little": 0.5}


def test_each_is_charged_where_it_is() -> None:
    lost = attribute(SIDE_BY_SIDE, ["much", "little"], lengths_with)
    assert lost["much"][Place(0, None)] == pytest.approx(1.5)
    assert lost["little"][Place(1, None)] == pytest.approx(0.5)


def test_a_cause_that_never_matters_is_charged_nothing() -> None:
    lost = attribute(SIDE_BY_SIDE, ["much", "nothing"], lengths_with)
    assert sum(lost["nothing"].values()) == 0
