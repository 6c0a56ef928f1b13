"""Every wrong formula that a grader knows is told its own cause, and no other formula's.

Tests of a topic hold only the answers that show an example, or another branch of the grader.
"""

from collections.abc import Callable
from typing import Any

import pytest

from course_pp.exercises.exercise import exercises
from course_pp.exercises.wrong_answers import formulas_of
from tests.exercises.grading import verdict_of


@pytest.mark.parametrize(
    ("name", "wrong", "cause"),
    [
        pytest.param(exercise.name, wrong, cause, id=f"{exercise.name}-{i}")
        for exercise in exercises()
        for formula in formulas_of(exercise)
        for i, (wrong, cause) in enumerate(formula.wrongs)
    ],
)
def test_a_wrong_formula_is_told_its_cause(
    name: str, wrong: Callable[..., Any], cause: Any
) -> None:
    verdict = verdict_of(name, wrong)
    assert verdict.status == "not yet"
    assert callable(cause) or verdict.cause == cause
