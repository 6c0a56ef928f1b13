"""What every test of a grader asks: the verdict on an answer, kept nowhere."""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import cloudpickle

from course_pp.exercises import Verdict
from course_pp.exercises.checking import judge
from course_pp.exercises.registry import find


def verdict_of(name: str, fn: Callable[..., Any], limit_s: float | None = None) -> Verdict:
    """What ``check`` says of ``fn`` as an answer to the exercise ``name``, whatever ``fn`` is called.

    ``limit_s`` is instead of the exercise's own time limit: less, for an answer that hangs.
    The answer travels as one from a notebook does: whole, and not as the name of a function in a test module.
    """
    module = sys.modules[fn.__module__]
    by_value = module.__name__.startswith("tests.")
    if by_value:
        cloudpickle.register_pickle_by_value(module)
    try:
        exercise = find(name)
        verdict = judge(replace(exercise, limit_s=limit_s or exercise.limit_s), fn)
    finally:
        if by_value:
            cloudpickle.unregister_pickle_by_value(module)
    assert "The check itself stopped" not in verdict.text, verdict.text
    return verdict


def refuses(name: str, answer: Callable[..., Any], *words: str, limit_s: float | None = None) -> None:
    """The answer is not yet correct, and the learner reads all of ``words``."""
    verdict = verdict_of(name, answer, limit_s)
    assert verdict.status == "not yet", verdict.text
    assert [word for word in words if word not in verdict.text] == [], verdict.text


def accepts(name: str, answer: Callable[..., Any]) -> None:
    """The answer is correct."""
    verdict = verdict_of(name, answer)
    assert verdict.status == "correct", verdict.text
