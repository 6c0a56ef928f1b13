"""Every wrong formula that a grader knows is told its own cause, and not that of another."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from course_pp.exercises.exercise import exercises
from course_pp.exercises.formula import Formula
from tests.exercises.grading import verdict_of


def formulas() -> Iterator[tuple[str, Formula]]:
    """By the exercise's name: those that are its grader, and those that its grader calls."""
    for exercise in exercises():
        names = vars(sys.modules[exercise.solution.__module__])
        for formula in {id(each): each for each in (exercise.grade, *names.values())}.values():
            if isinstance(formula, Formula) and formula.solution is exercise.solution:
                yield exercise.name, formula


@pytest.mark.parametrize(
    ("name", "wrong", "cause"),
    [
        pytest.param(name, wrong, cause, id=f"{name}-{i}")
        for name, formula in formulas()
        for i, (wrong, cause) in enumerate(formula.wrongs)
    ],
)
def test_a_wrong_formula_is_told_its_cause(name: str, wrong: Callable[..., Any], cause: Any) -> None:
    verdict = verdict_of(name, wrong)
    assert verdict.status == "not yet"
    assert callable(cause) or verdict.cause == cause
