"""What one person's ``progress().to_json(...)`` or ``to_csv(...)`` holds, checked entry by entry."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from course_pp.exercises.inventory.answers import TIMES, Answers, parse_answers

__all__ = ["Damaged", "Export", "Solved", "read_export"]

_VERSIONS = (1, 2)
_MOST_BYTES = 10_000_000
_STATES = ("open", "not yet", "correct")


class Damaged(ValueError):
    """A file is no export, or not a whole one. The message is half a sentence."""


@dataclass(frozen=True)
class Solved:
    """How far one person came with one exercise.

    Attributes:
        status: ``"open"``, ``"not yet"`` or ``"correct"``.
        took_minutes: from the first check or hint to *correct*; 0 if it is not known.
    """

    status: str
    attempts: int
    hints: int
    solution_seen: bool
    took_minutes: float


@dataclass(frozen=True)
class Export:
    """One person's exercises by name, and answers to the questions. No name is in it."""

    exercises: dict[str, Solved]
    quiz: Answers


def read_export(path: Path) -> Export:
    """Read one file. Raises Damaged, or OSError if it cannot be read."""
    if path.stat().st_size > _MOST_BYTES:
        raise Damaged("is too large for an export")
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError:
        raise Damaged("is no text") from None
    if path.suffix == ".csv":
        return Export(_exercises(_rows_of_csv(text)), {when: {} for when in TIMES})
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        raise Damaged("is no JSON, or not all of it") from None
    if isinstance(data, list):  # version 1: the exercises alone
        return Export(_exercises(data), {when: {} for when in TIMES})
    if not isinstance(data, dict) or "course_pp_export" not in data:
        raise Damaged("is no export of progress()")
    version = data["course_pp_export"]
    if version not in _VERSIONS:
        raise Damaged(
            f"is an export of version {str(version)[:20]}; this course reads {_VERSIONS[0]} and {_VERSIONS[-1]}"
        )
    try:
        quiz = parse_answers(data.get("quiz", {}))
    except ValueError as error:
        raise Damaged(f"is damaged: {error}") from None
    return Export(_exercises(data.get("exercises")), quiz)


def _rows_of_csv(text: str) -> list[dict[str, Any]]:
    rows = list(csv.DictReader(text.splitlines()))
    if not rows:
        raise Damaged("has no line of an exercise")
    kept = []
    for row in rows:
        seen = {"True": True, "False": False}.get(str(row.get("solution_seen")))
        try:
            numbers = {name: int(row[name] or "") for name in ("attempts", "hints")}
            took = float(row.get("took_minutes") or 0)
        except (KeyError, TypeError, ValueError):
            raise Damaged("is no export of progress()") from None
        kept.append({**row, **numbers, "solution_seen": seen, "took_minutes": took})
    return kept


def _exercises(rows: Any) -> dict[str, Solved]:
    if not isinstance(rows, list):
        raise Damaged("is damaged: it has no exercises")
    found = {}
    for row in rows:
        if not isinstance(row, dict) or not isinstance(row.get("exercise"), str):
            raise Damaged("is no export of progress()")
        name, took = row["exercise"], row.get("took_minutes", 0.0)
        counts = [row.get(count) for count in ("attempts", "hints")]
        whole = all(type(count) is int and count >= 0 for count in counts)
        timed = isinstance(took, int | float) and 0 <= took < float("inf")
        if row.get("status") not in _STATES or not whole or not timed or type(row.get("solution_seen")) is not bool:
            raise Damaged(f"is damaged: the line of {name[:40]!r} makes no sense")
        found[name] = Solved(row["status"], row["attempts"], row["hints"], row["solution_seen"], float(took))
    return found
