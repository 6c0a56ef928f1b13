"""Where a learner's answers to the questions are kept: in one small file beside that of the exercises."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from course_pp.exercises.progress import STORE
from course_pp.files import locked, write_atomically

__all__ = ["TIMES", "Answers", "When", "answers_path", "keep_answers", "parse_answers", "read_answers"]

When = Literal["before", "after"]
TIMES: tuple[When, ...] = get_args(When)
Answers = dict[str, dict[str, str]]
"""For ``before`` and ``after`` what was answered, by name of question."""

_VERSION = 1


def answers_path() -> Path:
    """``progress_quiz.json`` beside ``progress.json``."""
    path = STORE.path
    return path.parent / f"{path.stem}_quiz.json"


def read_answers() -> tuple[Answers, str]:
    """All answers, and a sentence if the file cannot be read: then it counts as empty."""
    path = answers_path()
    try:
        return parse_answers(json.loads(path.read_bytes())["answers"]), ""
    except (FileNotFoundError, NotADirectoryError):
        return {when: {} for when in TIMES}, ""
    except OSError as error:
        why = str(error.strerror)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        why = f"it is no file of answers: {error}"
    return {when: {} for when in TIMES}, f"Answers could not be read from {path} ({why})."


def keep_answers(when: When, given: Mapping[str, str]) -> str:
    """Add answers to the file; return a sentence if that cannot be."""
    path = answers_path()
    try:
        if STORE.path.exists() and not STORE.path.is_file():
            raise OSError(0, f"{STORE.path} is no file")
        with locked(path) as path:
            answers, note = read_answers()
            answers[when].update(given)
            kept = {"version": _VERSION, "answers": answers}
            if not note:  # else somebody should look at it first
                write_atomically(path, json.dumps(kept, indent=1, sort_keys=True) + "\n")
            return note
    except OSError as error:
        remedy = "Set COURSE_PP_PROGRESS to a file that can be written."
        return f"Answers could not be kept in {path}: {error.strerror}. {remedy}"


def parse_answers(data: Any) -> Answers:
    """Check that ``data`` is what `keep_answers` writes. Raises ValueError if not; other times are passed over."""
    if not isinstance(data, dict):
        raise ValueError("the answers are no table")
    found: Answers = {}
    for when in TIMES:
        given = data.get(when, {})
        if not isinstance(given, dict) or not all(isinstance(answer, str) for answer in given.values()):
            raise ValueError(f"the answers {when} are no texts by question")
        found[when] = dict(given)
    return found
