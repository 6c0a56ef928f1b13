"""The class of an exercise, and the list of all exercises."""

from __future__ import annotations

import ast
import difflib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from course_pp.exercises.display import MessageOnly

if TYPE_CHECKING:
    from course_pp.exercises.answer import Answer


@dataclass(frozen=True)
class Exercise:
    """A function that the learner completes.

    Attributes:
        solution: a function that passes; its name is the exercise's. Runs in the notebook as its
            source stands here.
        grade: returns if the answer is right and raises `Mistake` if not.
        notebook: the number at the beginning of the notebook's name, ``"02"``.
        title: the task in a few words.
        difficulty: 1 to 3.
        minutes: time that it takes a learner who has read the notebook so far.
        hints: hints of one step each; the last one nearly gives the answer.
        limit_s: seconds that one call of the answer may take.
    """

    solution: Callable[..., Any]
    grade: Callable[[Answer], None]
    notebook: str
    title: str
    difficulty: int
    minutes: int
    hints: tuple[str, ...]
    limit_s: float = 5.0

    @property
    def name(self) -> str:
        """The name of the function that the learner writes."""
        return self.solution.__name__

    @property
    def stars(self) -> str:
        """The difficulty as the notebooks show it: ``★★☆``."""
        return "★" * self.difficulty + "☆" * (3 - self.difficulty)

    @property
    def source(self) -> str:
        """The solution's source without annotations, to be pasted over the stub.

        Annotations may need names that the notebook does not have.
        """
        return _without_annotations(textwrap.dedent(inspect.getsource(self.solution)).rstrip())


def _without_annotations(source: str) -> str:
    # By position, because ast.unparse would drop the comments.
    spans = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.arg) and node.annotation is not None:
            spans.append((node.lineno, node.col_offset + len(node.arg.encode()), node.annotation))
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            target = node.target
            spans.append((target.end_lineno or 0, target.end_col_offset or 0, node.annotation))
        elif isinstance(node, ast.FunctionDef) and node.returns is not None:
            line = source.splitlines()[node.returns.lineno - 1].encode()
            begin = line[: node.returns.col_offset].rindex(b")") + 1
            spans.append((node.returns.lineno, begin, node.returns))
    lines = [line.encode() for line in source.splitlines()]
    for number, begin, annotation in sorted(spans, key=lambda span: span[:2], reverse=True):
        text = lines[number - 1]
        lines[number - 1] = text[:begin] + text[annotation.end_col_offset :]
    return re.sub(r" +# type: ignore.*", "", b"\n".join(lines).decode())


# The folder of each notebook: its `exercises.py`, and a `lab.py` where its cells need one.
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
    "12": "experts",
    "13": "capstone",
}


@cache
def exercises_of(notebook: str) -> tuple[Exercise, ...]:
    """Return the exercises of a notebook in their order, ``()`` if it has none."""
    if notebook not in MODULES:
        return ()
    module = import_module(f"{__package__}.{MODULES[notebook]}.exercises")
    found: tuple[Exercise, ...] = module.EXERCISES
    return found


def exercises() -> Iterator[Exercise]:
    """Yield all exercises, notebook by notebook; load a notebook's module when its turn comes."""
    for notebook in MODULES:
        yield from exercises_of(notebook)


class UnknownExercise(MessageOnly, ValueError):
    """No exercise has this name."""


def named(name: str) -> Exercise | None:
    """Return the exercise called ``name``, None if there is none."""

    def defines_it(notebook: str) -> bool:
        source = files(__package__).joinpath(MODULES[notebook], "exercises.py")
        return source.is_file() and f"def {name}(" in source.read_text(encoding="utf-8")

    # A module takes a second to load, its text none.
    likely_first = sorted(MODULES, key=lambda notebook: not defines_it(notebook))
    found = (exercise for notebook in likely_first for exercise in exercises_of(notebook))
    return next((exercise for exercise in found if exercise.name == name), None)


def find(name: str) -> Exercise:
    """Return the exercise called ``name``.

    Raises:
        UnknownExercise: there is none; with the name that was probably meant.
    """
    if (found := named(name)) is not None:
        return found
    known = [exercise.name for exercise in exercises()]
    if near := difflib.get_close_matches(name, known, n=1):
        meant = f"The nearest is {near[0]!r}."
    else:
        meant = f"They are {', '.join(known)}."
    raise UnknownExercise(
        f"there is no exercise called {name!r}. {meant} An exercise is found by the name of its"
        " function: keep the name of the stub."
    )


def number_of(exercise: Exercise) -> int:
    """Return the number of an exercise in its notebook, from 1."""
    return [other.name for other in exercises_of(exercise.notebook)].index(exercise.name) + 1
