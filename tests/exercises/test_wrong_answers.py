"""Known wrong answers are refused with a cause; every exercise has some for its teacher."""

import pytest

from course_pp.exercises.checking import judge
from course_pp.exercises.exercise import Exercise, exercises
from course_pp.exercises.wrong_answers import formulas_of, written, wrong_answers

# Formulas are judged with all of their mistakes elsewhere.
OTHERS = [each for each in exercises() if not any(formula.wrongs for formula in formulas_of(each))]


@pytest.mark.sample(4)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("exercise", OTHERS, ids=lambda exercise: exercise.name)
def test_a_wrong_answer_is_refused_and_told_why(exercise: Exercise) -> None:
    for wrong in wrong_answers(exercise):
        verdict = judge(exercise, wrong)
        assert verdict.status == "not yet", written(exercise, wrong)
        assert verdict.cause, written(exercise, wrong)


def test_each_exercise_has_wrong_answers_that_differ_from_its_solution() -> None:
    for exercise in exercises():
        shown = [written(exercise, wrong) for wrong in wrong_answers(exercise)]
        assert shown, exercise.name
        assert all(shown), exercise.name
        assert len(set(shown)) == len(shown), exercise.name
