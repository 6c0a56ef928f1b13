"""Wrong answers that people hand in, by exercise: for teachers, and for tests of graders."""

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
    """Return the formula that is its grader, and the formulas that its grader calls."""
    there = (exercise.grade, *vars(sys.modules[exercise.solution.__module__]).values())
    formulas = [each for each in there if isinstance(each, Formula)]
    own = [each for each in formulas if each.solution is exercise.solution]
    return [*dict.fromkeys(own)]


def wrong_answers(exercise: Exercise) -> list[Callable[..., Any]]:
    """Return wrong functions: those that a `Formula` knows, and those of ``wrong_answers.toml``."""
    wrong = [each for formula in formulas_of(exercise) for each, _ in formula.wrongs]
    for changes in _table().get(exercise.name, ()):
        wrong.append(flawed(exercise.solution, *changes.items()))
    return wrong


def written(exercise: Exercise, wrong: Callable[..., Any]) -> str:
    """Return a wrong answer as text.

    That is an expression, the lines that differ from the solution's (``-`` there, ``+`` here), or a
    whole function.
    """
    if wrong.__name__ == "<lambda>":
        return f"return {_body(wrong, [*inspect.signature(exercise.solution).parameters])}"
    source = replace(exercise, solution=wrong).source
    if wrong.__name__ != exercise.name:
        return source
    both = difflib.ndiff(exercise.source.splitlines(), source.splitlines())
    return "\n".join(f"{line[0]} {line[2:].strip()}" for line in both if line[0] in "-+")


def _body(fn: Callable[..., Any], names: list[str]) -> str:
    """Return the expression of a lambda, with other names for its parameters.

    A parameter with a default becomes the value of that default.
    """
    tree = ast.parse(Path(fn.__code__.co_filename).read_text(encoding="utf-8"))
    line = fn.__code__.co_firstlineno
    lambdas = [each for each in ast.walk(tree) if isinstance(each, ast.Lambda)]
    [found] = [each for each in lambdas if each.lineno == line]
    parameters = [each.arg for each in found.args.args]
    values = fn.__defaults__ or ()
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
