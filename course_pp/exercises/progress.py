"""What a learner has solved so far: kept in one small file, shown as a table, exported for an instructor."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from html import escape
from pathlib import Path
from typing import Any

from course_pp.arguments import checked
from course_pp.exercises.display import Shown, columns
from course_pp.exercises.exercise import Exercise, exercises
from course_pp.files import locked, state_folder, write_atomically

_VERSION = 1
EXPORT_VERSION = 2


@dataclass(frozen=True)
class Record:
    """What is kept of one exercise.

    Attributes:
        correct: whether a check has ever said so.
        attempts: checks that did not say pending, up to the first that said correct.
        hints: how many hints were shown.
        solution_seen: whether the solution was shown before the answer was correct.
        begun, solved: when the first check did not say pending, or the first hint was shown, and when a check first
            said correct: seconds since 1970, 0 if it has not.
    """

    correct: bool = False
    attempts: int = 0
    hints: int = 0
    solution_seen: bool = False
    begun: float = field(default=0.0, compare=False)
    solved: float = field(default=0.0, compare=False)


_Change = Callable[[Record], Record]


class Store:
    """The file of a learner's progress. Several kernels may share it: each change is made under a lock.

    What is wrong with the file never stops a learner: each method returns or keeps a sentence about it. A change that
    cannot be kept waits, and is made again on whatever the file holds when it can next be written.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[str, _Change]] = []
        # What the file held when it was last read, for as long as it cannot be.
        self._seen: dict[str, Record] = {}

    @property
    def path(self) -> Path:
        """``COURSE_PP_PROGRESS``, or a file in the user's state directory; ``~`` stays where nobody has that name."""
        chosen = os.environ.get("COURSE_PP_PROGRESS")
        path = Path(chosen) if chosen else state_folder() / "progress.json"
        with contextlib.suppress(RuntimeError):
            path = path.expanduser()
        return path

    def read(self) -> tuple[dict[str, Record], str]:
        """All records by name of exercise, and what was wrong with the file, if anything."""
        records, note, error = self._settled()
        if error:
            note = f"{note} Progress could not be read from {self.path}: {error}.".lstrip()
        return records, note

    def record_attempt(self, name: str, correct: bool) -> str:
        """Count a check; return a sentence if that could not be kept as it should."""
        now = time.time()

        def one_more(old: Record) -> Record:
            if old.correct:
                return old
            begun, solved = old.begun or now, now if correct else 0.0
            return replace(old, correct=correct, attempts=old.attempts + 1, begun=begun, solved=solved)

        return self._change(name, one_more)[1]

    def record_hint(self, name: str, n_hints: int) -> int:
        """Count a hint; return its number from 1, or ``n_hints + 1`` when there is none left."""
        seen, now = 0, time.time()

        def one_more(old: Record) -> Record:
            nonlocal seen
            seen = old.hints + 1
            return replace(old, hints=min(seen, n_hints), begun=old.begun or now)

        self._change(name, one_more)
        return seen

    def record_solution(self, name: str) -> None:
        self._change(name, lambda old: replace(old, solution_seen=old.solution_seen or not old.correct))

    def _change(self, name: str, change: _Change) -> tuple[Record, str]:
        self._waiting.append((name, change))
        records, note, error = self._settled()
        if error:
            remedy = "Set COURSE_PP_PROGRESS to a file that can be written."
            note = f"{note} Progress could not be kept in {self.path}: {error}. {remedy}".lstrip()
        return records[name], note

    def _settled(self) -> tuple[dict[str, Record], str, str]:
        """All records with every change made, those that waited included; a note; and why nothing could be kept."""
        note = ""
        try:
            with locked(self.path) as path:
                self._seen, note = self._load(path)
                records = self._changed(self._seen)
                if records != self._seen:
                    self._save(path, records)
        except OSError as e:
            return self._changed(self._seen), note, str(e.strerror or e)
        self._seen = records
        self._waiting.clear()
        return records, note, ""

    def _changed(self, records: dict[str, Record]) -> dict[str, Record]:
        records = dict(records)
        for name, change in self._waiting:
            records[name] = change(records.get(name, Record()))
        return records

    def _load(self, path: Path) -> tuple[dict[str, Record], str]:
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return {}, ""
        try:
            return _parsed(content), ""
        except ValueError as e:
            aside = _free_name(path)
            os.replace(path, aside)
            return {}, f"The file of your progress was not readable ({e}); it was put aside as {aside} and begun anew."

    def _save(self, path: Path, records: dict[str, Record]) -> None:
        kept = {"version": _VERSION, "exercises": {name: asdict(record) for name, record in records.items()}}
        write_atomically(path, json.dumps(kept, indent=1, sort_keys=True) + "\n")


STORE = Store()


def _parsed(content: bytes) -> dict[str, Record]:
    """Read records; unknown fields are passed over. Raises ValueError for anything that `Store` did not write."""
    try:
        data = json.loads(content.decode())
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not isinstance(data, dict) or not isinstance(data.get("exercises"), dict):
        raise ValueError("it holds no exercises")
    records = {}
    for name, kept in data["exercises"].items():
        if not isinstance(kept, dict):
            raise ValueError(f"the entry of {name!r} is no record")
        known = {each.name: kept[each.name] for each in fields(Record) if each.name in kept}
        for each, value in known.items():
            if type(value) is not type(getattr(Record(), each)) or not value >= 0:
                raise ValueError(f"{each!r} of {name!r} is {value!r}")
        records[name] = Record(**known)
    return records


def _free_name(path: Path) -> Path:
    candidates = (path.with_name(f"{path.name}.broken{suffix}") for suffix in ["", *map(str, range(2, 1000))])
    return next((name for name in candidates if not name.exists()), path.with_name(f"{path.name}.broken"))


@dataclass(frozen=True)
class Row:
    """One exercise in the table."""

    notebook: str
    exercise: str
    title: str
    difficulty: int
    minutes: int
    status: str
    attempts: int
    hints: int
    solution_seen: bool
    took_minutes: float


@checked
@dataclass(frozen=True)
class Progress(Shown):
    """Every exercise of the course and how far the learner is; shows itself as a table.

    Attributes:
        rows: one an exercise.
        note: what was wrong with the file, if anything.
        quiz: the answers given to ``quiz("before")`` and ``quiz("after")``, by name of question.
    """

    rows: tuple[Row, ...]
    note: str = ""
    quiz: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @property
    def summary(self) -> str:
        correct = sum(row.status == "correct" for row in self.rows)
        left = sum(row.minutes for row in self.rows if row.status != "correct")
        answered = [f"{len(given)} {when}" for when, given in self.quiz.items() if given]
        quiz = f"; questions answered: {' and '.join(answered)} the course" if answered else ""
        return f"{correct} of {len(self.rows)} correct" + (f", about {left} minutes left" if left else "") + quiz

    @checked
    def to_csv(self, path: str | Path) -> Path:
        """Write one line an exercise, with a heading. Raises OSError, with the remedy, if that cannot be."""
        text = io.StringIO()
        writer = csv.DictWriter(text, [each.name for each in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in self.rows)
        return _exported(Path(path), text.getvalue())

    @checked
    def to_json(self, path: str | Path) -> Path:
        """Write the exercises and the answers of the quiz. Raises OSError, with the remedy, if that cannot be.

        No name of a person is in it; ``python -m course_pp report`` reads a folder of such files.
        """
        exercises = [asdict(row) for row in self.rows]
        written = {"course_pp_export": EXPORT_VERSION, "exercises": exercises, "quiz": self.quiz}
        return _exported(Path(path), json.dumps(written, indent=1) + "\n")

    def __repr__(self) -> str:
        table = columns([_HEADINGS, *map(_cells, self.rows)])
        return "\n".join(filter(None, [table, self.summary, self.note]))

    def _repr_html_(self) -> str:
        def line(tag: str, cells: tuple[str, ...]) -> str:
            tags = (
                f'<{tag} style="text-align:left;white-space:{_wrap(i)}">{escape(c)}</{tag}>'
                for i, c in enumerate(cells)
            )
            return f"<tr>{''.join(tags)}</tr>"

        body = "".join(line("td", _cells(row)) for row in self.rows)
        below = "".join(f"<p>{escape(text)}</p>" for text in (self.summary, self.note) if text)
        return f"<table><thead>{line('th', _HEADINGS)}</thead><tbody>{body}</tbody></table>{below}"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/plain": repr(self), "text/html": self._repr_html_()}


_HEADINGS = ("notebook", "exercise", "difficulty", "minutes", "status", "attempts", "hints", "solution seen")


def _wrap(column: int) -> str:
    """The wide columns are broken into lines: a table wider than the page would hide its last."""
    return "normal" if _HEADINGS[column] in ("exercise", "solution seen") else "nowrap"


_SYMBOLS = {"open": "○", "not yet": "✗", "correct": "✓"}


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.notebook,
        f"{row.exercise}: {row.title}",
        "★" * row.difficulty + "☆" * (3 - row.difficulty),
        str(row.minutes),
        f"{_SYMBOLS[row.status]} {row.status}",
        str(row.attempts),
        str(row.hints),
        "yes" if row.solution_seen else "no",
    )


def progress() -> Progress:
    """Return a table over all notebooks: what is solved, with how many attempts and how much help."""
    from course_pp.exercises.inventory import read_answers  # which keeps its file as this module does

    records, note = STORE.read()
    answers, note_on_answers = read_answers()
    rows = tuple(_row(exercise, records.get(exercise.name)) for exercise in exercises())
    return Progress(rows, " ".join(filter(None, (note, note_on_answers))), answers).show()


def _exported(path: Path, text: str) -> Path:
    try:
        write_atomically(path, text)
    except OSError as e:
        # The error itself names a temporary file beside the target.
        raise type(e)(
            f"{path} cannot be written: {e.strerror}. Create the folder {path.parent} first, or give a path in one "
            "that you may write to."
        ) from None
    return path


def _row(exercise: Exercise, record: Record | None) -> Row:
    record = record or Record()
    status = "correct" if record.correct else "not yet" if record.attempts else "open"
    return Row(
        exercise.notebook,
        exercise.name,
        exercise.title,
        exercise.difficulty,
        exercise.minutes,
        status,
        record.attempts,
        record.hints,
        record.solution_seen,
        round((record.solved - record.begun) / 60, 1) if record.correct else 0.0,
    )
