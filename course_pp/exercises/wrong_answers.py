"""What people write instead of the solution, exercise by exercise: for a teacher's sheet, and for tests of graders."""

from __future__ import annotations

import ast
import difflib
import inspect
import sys
import tomllib
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from course_pp.exercises.exercise import Exercise
from course_pp.exercises.formula import Formula, flawed

__all__ = ["formulas_of", "written", "wrong_answers"]


def formulas_of(exercise: Exercise) -> list[Formula]:
    """The formula that is its grader, and those that its grader calls."""
    there = (exercise.grade, *vars(sys.modules[exercise.solution.__module__]).values())
    return [
        *dict.fromkeys(
            e for e in there if isinstance(e, Formula) and e.solution is exercise.solution
        )
    ]


def wrong_answers(exercise: Exercise) -> list[Callable[..., Any]]:
    """Functions that people hand in: those that a `Formula` of the grader knows, and ``wrong_answers.toml``'s."""
    known = [wrong for formula in formulas_of(exercise) for wrong, _ in formula.wrongs]
    return known + [
        flawed(exercise.solution, *changes.items()) for changes in _table().get(exercise.name, ())
    ]


def written(exercise: Exercise, wrong: Callable[..., Any]) -> str:
    """A wrong answer: an expression, lines that differ from the solution's (``-`` there, ``+`` here), or a function."""
    if wrong.__name__ == "<lambda>":
        return f"return {_body(wrong, [*inspect.signature(exercise.solution).parameters])}"
    source = replace(exercise, solution=wrong).source
    if wrong.__name__ != exercise.name:
        return source
    both = difflib.ndiff(exercise.source.splitlines(), source.splitlines())
    return "\n".join(f"{line[0]} {line[2:].strip()}" for line in both if line[0] in "-+")


def _body(fn: Callable[..., Any], names: list[str]) -> str:
    """What a lambda returns, its parameters renamed, those with a default given as its value."""
    tree = ast.parse(Path(fn.__code__.co_filename).read_text(encoding="utf-8"))
    line = fn.__code__.co_firstlineno
    [found] = [
        each for each in ast.walk(tree) if isinstance(each, ast.Lambda) and each.lineno == line
    ]
    parameters, values = [each.arg for each in found.args.args], fn.__defaults__ or ()
    named = dict(zip(parameters, names, strict=False))
    named |= dict(zip(parameters[len(parameters) - len(values) :], map(repr, values), strict=True))
    for each in ast.walk(found.body):
        if isinstance(each, ast.Name):
            each.id = named.get(each.id, each.id)
    return ast.unparse(found.body)


@cache
def _table() -> dict[str, list[dict[str, str]]]:
    text = files(__package__).joinpath("wrong_answers.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)
