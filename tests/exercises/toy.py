"""One small exercise, in place of the course's own, for tests of what surrounds the graders."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest

from course_pp.exercises import Exercise, Mistake
from course_pp.exercises import exercise as catalogue
from course_pp.exercises.answer import Answer

CALLS = (1, [2], 3)


def double(x: Any) -> Any:
    """Twice x."""
    return 2 * x  # lists, too


def grade(answer: Answer) -> None:
    for x, got in zip(CALLS, answer.calls([(x,) for x in CALLS]), strict=True):
        if got != 2 * x:
            raise Mistake(f"`double({x})` is {got!r}.", "Multiply.", f"expected {2 * x!r}")


def shape_of_result(rank: int, fn: Callable[..., Any]) -> Any:
    """A harness that expects a tensor of ``fn(rank, 2)``."""
    return fn(rank, 2).shape


EXERCISE = Exercise(
    double, grade, "98", "twice as much", 1, 3, ("Think.", "Use `*`."), limit_s=30.0
)


@contextmanager
def only_the_toy(
    monkeypatch: pytest.MonkeyPatch, exercise: Exercise = EXERCISE
) -> Iterator[Exercise]:
    """Within, the course has one notebook, 98, with one exercise."""
    module: Any = ModuleType("course_pp.exercises.toy.exercises")
    module.EXERCISES = (exercise,)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(catalogue, "MODULES", {"98": "toy"})
    catalogue.exercises_of.cache_clear()
    try:
        yield exercise
    finally:
        catalogue.exercises_of.cache_clear()
