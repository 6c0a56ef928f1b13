"""Graders refuse mutants of the solutions: those once accepted, and all in ``make test-full``."""

import pytest

from course_pp.exercises.exercise import Exercise, exercises, find
from tests.exercises.mutants import LIMIT_S, found, judged, judged_all, mutants_of, survivors
from tests.exercises.mutator import FEWEST

ALL = list(exercises())


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("name", "change"), [(name, change) for name, changes in found().items() for change in changes]
)
def test_a_mutant_that_was_once_accepted_is_refused(name: str, change: str) -> None:
    [mutant] = [each for each in mutants_of(find(name)) if each.change == change]
    verdict = judged(name, mutant, LIMIT_S).verdict
    assert verdict.status == "not yet", verdict.text


@pytest.mark.long
def test_survivors_are_few_are_mutants_and_each_has_a_reason() -> None:
    changes = {
        exercise.name: {mutant.change for mutant in mutants_of(exercise)} for exercise in ALL
    }
    n_mutants = [len(each) for each in changes.values()]
    assert min(n_mutants) >= FEWEST
    assert sum(map(len, survivors().values())) < 0.1 * sum(n_mutants)
    for name, reasons in survivors().items():
        assert [change for change in reasons if change not in changes[name]] == [], name
        assert all(reasons.values())


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("exercise", ALL, ids=lambda exercise: exercise.name)
def test_every_mutant_is_refused_or_as_right_as_the_solution(exercise: Exercise) -> None:
    accepted = [each.change for each in judged_all([exercise]) if each.verdict.status != "not yet"]
    assert [change for change in accepted if change not in survivors().get(exercise.name, {})] == []
