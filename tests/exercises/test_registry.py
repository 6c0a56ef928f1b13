"""What holds for every exercise of the course, whichever notebook it belongs to."""

import re
from collections import Counter
from collections.abc import Callable

import pytest

from course_pp.exercises import exercise as catalogue
from course_pp.exercises.exercise import Exercise
from tests.exercises.grading import verdict_of

ALL = list(catalogue.exercises())


def stub_of(exercise: Exercise) -> Callable[..., None]:
    def stub(*args: object, **kwargs: object) -> None:
        raise NotImplementedError

    return stub


@pytest.mark.sample(4)  # `make test-notebooks` checks them all, each in its notebook
@pytest.mark.parametrize("exercise", ALL, ids=lambda exercise: exercise.name)
def test_the_solution_is_correct(exercise: Exercise) -> None:
    verdict = verdict_of(exercise.name, exercise.solution, here=False)
    assert verdict.status == "correct", verdict.text


@pytest.mark.parametrize("exercise", ALL, ids=lambda exercise: exercise.name)
def test_the_stub_is_pending(exercise: Exercise) -> None:
    assert verdict_of(exercise.name, stub_of(exercise)).status == "pending"


@pytest.mark.sample(4)
@pytest.mark.parametrize("exercise", ALL, ids=lambda exercise: exercise.name)
def test_an_answer_that_returns_nothing_is_not_yet_correct(exercise: Exercise) -> None:
    def nothing(*args: object, **kwargs: object) -> None:
        return None

    assert verdict_of(exercise.name, nothing).status == "not yet"


@pytest.mark.parametrize("exercise", ALL, ids=lambda exercise: exercise.name)
def test_the_source_of_the_solution_defines_the_function_without_annotations(
    exercise: Exercise,
) -> None:
    assert exercise.source.startswith(f"def {exercise.name}(")
    assert "->" not in exercise.source.splitlines()[0]
    compile(exercise.source, exercise.name, "exec")


@pytest.mark.parametrize("exercise", ALL, ids=lambda exercise: exercise.name)
def test_hints_write_the_names_of_code_as_code(exercise: Exercise) -> None:
    prose = re.sub(r"`[^`]*`", "", " ".join(exercise.hints))
    assert re.findall(r"\w+_\w+|\w+\(|\w+\.\w+\b", prose) == []


def test_no_two_exercises_have_the_same_name() -> None:
    assert [name for name, n in Counter(exercise.name for exercise in ALL).items() if n > 1] == []


def test_every_exercise_is_of_the_notebook_whose_module_holds_it() -> None:
    for notebook in catalogue.MODULES:
        for exercise in catalogue.exercises_of(notebook):
            assert exercise.notebook == notebook
            assert exercise.difficulty in (1, 2, 3)
            assert exercise.minutes >= 1
            assert exercise.hints
