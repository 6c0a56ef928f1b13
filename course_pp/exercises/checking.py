"""``check``, ``hint`` and ``solution``: what a learner calls."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

from course_pp.base.arguments import described
from course_pp.exercises.answer import Answer
from course_pp.exercises.display import Interrupted, MessageOnly, Note, Verdict
from course_pp.exercises.exercise import Exercise, find, named, number_of
from course_pp.exercises.in_process import innermost
from course_pp.exercises.mistakes import Mistake, Pending
from course_pp.exercises.progress import STORE


def check(fn: Callable[..., Any]) -> Verdict:
    """Judge a function by its results.

    The exercise is found by the function's name, or by the name of the caller's variable that holds
    it: ``fn`` may be decorated, cached, a partial, a lambda with a name, or an object that can be
    called. It runs in processes of its own and under a time limit, so its faults raise nothing
    here.

    Raises:
        TypeError: ``fn`` is no function with a name.
        ValueError: no exercise has that name.
        KeyboardInterrupt: the check was interrupted. Its processes have ended by then.
    """
    if isinstance(fn, str) or not callable(fn):
        raise NoExercise(
            "check takes the function itself, check(name) without quotes or brackets, not"
            f" {described(fn)}."
        )
    exercise = _exercise_of(fn, sys._getframe(1))
    try:
        verdict = judge(exercise, fn)
    except KeyboardInterrupt:
        raise Interrupted from None
    if verdict.status != "pending":
        verdict = replace(
            verdict, note=STORE.record_attempt(exercise.name, verdict.status == "correct")
        )
    return verdict.show()


class NoExercise(MessageOnly, TypeError):
    """The argument is neither the name nor the function of an exercise."""


def judge(exercise: Exercise, fn: Callable[..., Any]) -> Verdict:
    """Return the verdict that `check` shows, and keep no record of it."""
    answer = Answer(fn, exercise.limit_s, exercise.name)
    heading = f"Exercise {number_of(exercise)}, {exercise.title}"
    help_line = f'`hint("{exercise.name}")` shows a hint.'
    try:
        exercise.grade(answer)
    except Pending as e:
        todo = f"{e} Complete `{exercise.name}` and run the cell again.".lstrip()
        return Verdict("pending", heading, todo, printed=answer.printed, next_step=help_line)
    except Mistake as e:
        return Verdict("not yet", heading, e.symptom, e.cause, e.example, answer.printed, help_line)
    except Exception as e:
        symptom = f"The check itself stopped: {type(e).__name__}: {e}"
        cause = (
            f"`{exercise.name}` returned something the check did not expect. Compare it with what"
            " the stub asks for; if it is as asked, this is a mistake of the course, and a report"
            " is welcome."
        )
        return Verdict(
            "not yet", heading, symptom, cause, printed=answer.printed, next_step=help_line
        )
    return Verdict("correct", heading, printed=answer.printed)


def hint(exercise: str | Callable[..., Any]) -> Note:
    """Show the next hint of an exercise, given by name or function.

    After the last hint, each call shows all of them.
    """
    found = _exercise_of(exercise, sys._getframe(1))
    total = len(found.hints)
    seen = STORE.record_hint(found.name, total)
    if seen <= total:
        shown = [f"Hint {seen} of {total}: {found.hints[seen - 1]}"]
    else:
        shown = [f"Hint {i} of {total}: {text}" for i, text in enumerate(found.hints, 1)]
    if seen >= total:
        shown.append(f'There are no more; `solution("{found.name}")` shows an answer.')
    return Note("\n".join(shown), "\n\n".join(shown)).show()


def solution(exercise: str | Callable[..., Any]) -> Note:
    """Show the source of a correct answer to an exercise, given by name or function."""
    found = _exercise_of(exercise, sys._getframe(1))
    STORE.record_solution(found.name)
    return Note(found.source, f"```python\n{found.source}\n```").show()


def _exercise_of(asked: str | Callable[..., Any], caller: FrameType) -> Exercise:
    if isinstance(asked, str):
        return find(asked)
    own = getattr(innermost(asked), "__name__", None)
    # A partial or an object has no name of its own: then the caller's variable has one.
    variables = []
    for names in (caller.f_locals, caller.f_globals):
        variables += [name for name, value in names.items() if value is asked]
    for name in (getattr(asked, "__name__", None), *variables, own):
        if isinstance(name, str) and (exercise := named(name)) is not None:
            return exercise
    name = getattr(asked, "__name__", own)
    if name == "<lambda>":
        raise NoExercise(
            "a lambda has no name, and an exercise is found by a name: write it with `def`."
        )
    if not isinstance(name, str) or not callable(asked):
        raise NoExercise(f"{described(asked)} is neither the name of an exercise nor its function.")
    return find(name)
