"""The list of all exercises."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from functools import cache
from importlib import import_module

from course_pp.exercises.display import Told
from course_pp.exercises.exercise import Exercise

MODULES = {
    "00": "ranks_and_messages",
    "01": "naive_split",
    "02": "gpipe",
    "03": "one_f_one_b",
    "04": "interleaved",
    "05": "zero_bubble",
    "06": "pipedream",
    "07": "tp_pp",
    "08": "fsdp_reshard_policy",
    "09": "dcp_checkpointing",
    "10": "models_of_others",
    "11": "own_schedule",
    "12": "capstone",
}


@cache
def exercises_of(notebook: str) -> tuple[Exercise, ...]:
    """The exercises of a notebook in their order, ``()`` if it has none.

    Raises:
        ValueError: the module holds an exercise of another notebook.
    """
    if notebook not in MODULES:
        return ()
    name = f"{__package__}.{MODULES[notebook]}"
    try:
        exercises: tuple[Exercise, ...] = import_module(name).EXERCISES
    except ModuleNotFoundError as e:
        if e.name != name:
            raise
        return ()
    for exercise in exercises:
        if exercise.notebook != notebook:
            raise ValueError(
                f"{name} is the module of notebook {notebook}, but its exercise {exercise.name!r} says notebook "
                f"{exercise.notebook!r}: move it, or mend its notebook"
            )
    return exercises


def exercises() -> Iterator[Exercise]:
    """All exercises, notebook by notebook; a notebook's module is loaded when its turn comes."""
    for notebook in MODULES:
        yield from exercises_of(notebook)


class UnknownExercise(Told, ValueError):
    """No exercise has this name."""


def named(name: str) -> Exercise | None:
    """The exercise called ``name``, None if there is none."""
    return next((exercise for exercise in exercises() if exercise.name == name), None)


def find(name: str) -> Exercise:
    """The exercise called ``name``. Raises UnknownExercise, with the name that was probably meant, if there is none."""
    if (found := named(name)) is not None:
        return found
    known = [exercise.name for exercise in exercises()]
    if near := difflib.get_close_matches(name, known, n=1):
        meant = f"The nearest is {near[0]!r}."
    else:
        meant = f"They are {', '.join(known)}."
    raise UnknownExercise(
        f"there is no exercise called {name!r}. {meant} An exercise is found by the name of its function: keep the "
        "name of the stub."
    )


def number_of(exercise: Exercise) -> int:
    """Its number in its notebook, from 1."""
    return [other.name for other in exercises_of(exercise.notebook)].index(exercise.name) + 1
