"""What every test of a grader asks: the verdict on an answer, kept nowhere."""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar
from unittest import mock

import cloudpickle

from course_pp.exercises import Verdict, answer, in_process
from course_pp.exercises.checking import judge
from course_pp.exercises.exercise import find
from course_pp.launch import on_ranks

# Instead of an exercise's own time limit: for a busy machine, and for an answer that is known to
# hang.
_ENDS_S, _HANGS_S = 30.0, 2.0
Answer = TypeVar("Answer", bound=Callable[..., Any])


def hangs(fn: Answer) -> Answer:
    """Mark an answer that never comes to its end: no test waits long for it."""
    fn.hangs = True  # type: ignore[attr-defined]
    return fn


def verdict_of(name: str, fn: Callable[..., Any], here: bool = True) -> Verdict:
    """What ``check`` says of ``fn`` as an answer to the exercise ``name``, whatever ``fn`` is
    called.

    Plain calls are made in this process, which no limit ends, if ``here``; ranks always start. The
    answer travels as one from a notebook does: whole, and not as the name of a function in a test
    module.
    """
    by_value = fn.__module__.startswith("tests.")
    if by_value:
        cloudpickle.register_pickle_by_value(sys.modules[fn.__module__])
    try:
        exercise = find(name)
        with mock.patch.object(answer, "on_ranks", _calls_made_here if here else on_ranks):
            limit_s = _HANGS_S if hasattr(fn, "hangs") else max(exercise.limit_s, _ENDS_S)
            verdict = judge(replace(exercise, limit_s=limit_s), fn)
    finally:
        if by_value:
            cloudpickle.unregister_pickle_by_value(sys.modules[fn.__module__])
    assert "The check itself stopped" not in verdict.text, verdict.text
    return verdict


def _calls_made_here(n: int, run: Callable[..., Any], *args: Any, **settings: Any) -> list[Any]:
    """Like ``on_ranks``, but start no process for calls that need no rank.

    Tests judge a thousand of them.
    """
    if run is not in_process.call_each:
        return on_ranks(n, run, *args, **settings)
    with mock.patch.object(in_process, "_bound_memory"):
        return [in_process.call_each(0, *args)]


def refuses(name: str, fn: Callable[..., Any], *words: str, here: bool = True) -> None:
    """The answer is not yet correct, and the learner reads all of ``words``."""
    verdict = verdict_of(name, fn, here)
    assert verdict.status == "not yet", verdict.text
    assert [word for word in words if word not in verdict.text] == [], verdict.text


def accepts(name: str, fn: Callable[..., Any]) -> None:
    """The answer is correct."""
    verdict = verdict_of(name, fn)
    assert verdict.status == "correct", verdict.text
