"""The progress of a learner: a small file, a table, and an export for an instructor."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, get_args

from course_pp.base.arguments import checked
from course_pp.base.files import locked, state_folder, write_atomically
from course_pp.exercises.display import MessageOnly, Shown, columns
from course_pp.exercises.exercise import Exercise, exercises

When = Literal["before", "after"]
TIMES: tuple[When, ...] = get_args(When)

_MARK = "course_pp_progress"
VERSION = 3


@dataclass(frozen=True)
class Record:
    """The record of one exercise.

    Attributes:
        correct: whether a check has ever said correct.
        attempts: checks that did not say pending, up to the first that said correct.
        hints: number of hints shown.
        solution_seen: whether the solution was shown before the answer was correct.
        begun: time of the first hint or of the first check that did not say pending, in seconds
            since 1970; 0 before.
        took_minutes: minutes from then to the first check that said correct; 0 before.
    """

    correct: bool = False
    attempts: int = 0
    hints: int = 0
    solution_seen: bool = False
    begun: float = field(default=0.0, compare=False)
    took_minutes: float = field(default=0.0, compare=False)


@dataclass(frozen=True)
class Kept:
    """The content of the file, and of an export.

    Attributes:
        exercises: {name: record} of each exercise that was begun.
        quiz: {``"before"`` or ``"after"``: {name of question: answer}}.
        learner: random id, so that two exports of a person count once.
        written: time at which the file was written, in seconds since 1970.
    """

    exercises: Mapping[str, Record] = field(default_factory=dict)
    quiz: Mapping[str, Mapping[str, str]] = field(
        default_factory=lambda: {when: {} for when in TIMES}
    )
    learner: str = ""
    written: float = field(default=0.0, compare=False)

    @property
    def text(self) -> str:
        """The text of the file if it were written now."""
        kept = {_MARK: VERSION, **asdict(replace(self, written=time.time()))}
        return json.dumps(kept, indent=1, sort_keys=True) + "\n"


_Change = Callable[[Kept], Kept]


class Store:
    """The file of a learner's progress.

    Several kernels may share it: each change is made under a lock. A fault of the file never stops
    a learner: each method returns or keeps a sentence about it. A change that cannot be kept waits,
    and is made on the content that the file has when it can next be written.
    """

    def __init__(self) -> None:
        self._waiting: list[_Change] = []
        # The content at the last reading, for as long as the file cannot be read.
        self._seen = Kept()
        self._new_learner = secrets.token_hex(4)

    @property
    def path(self) -> Path:
        """``COURSE_PP_PROGRESS``, or a file in the user's state directory."""
        chosen = os.environ.get("COURSE_PP_PROGRESS")
        path = Path(chosen) if chosen else state_folder() / "progress.json"
        # Where no user has the name after a ~, the path stays as it is.
        with contextlib.suppress(RuntimeError):
            path = path.expanduser()
        return path

    def read(self) -> tuple[Kept, str]:
        """Return the content, and a sentence on the fault of the file, if it has one."""
        kept, note, error = self._settled()
        if error:
            note = f"{note} Progress could not be read from {self.path}: {error}.".lstrip()
        return kept, note

    def record_attempt(self, name: str, correct: bool) -> str:
        """Count a check; return a sentence if the count could not be kept as it should."""
        now = time.time()

        def one_more(old: Record) -> Record:
            if old.correct:
                return old
            begun = old.begun or now
            # The clock may have been set back since.
            took = round(max(now - begun, 0.0) / 60, 1) if correct else 0.0
            return replace(
                old, correct=correct, attempts=old.attempts + 1, begun=begun, took_minutes=took
            )

        return self._change_record(name, one_more)

    def record_hint(self, name: str, n_hints: int) -> int:
        """Count a hint; return its number from 1, or ``n_hints + 1`` when there is none left."""
        seen = 0
        now = time.time()

        def one_more(old: Record) -> Record:
            nonlocal seen
            seen = old.hints + 1
            return replace(old, hints=min(seen, n_hints), begun=old.begun or now)

        self._change_record(name, one_more)
        return seen

    def record_solution(self, name: str) -> None:
        def seen(old: Record) -> Record:
            return replace(old, solution_seen=old.solution_seen or not old.correct)

        self._change_record(name, seen)

    def record_answers(self, when: When, given: Mapping[str, str]) -> str:
        """Add answers to questions, by name; return a sentence if they could not be kept.

        A question that is answered after the course takes no other answer, for then it is
        explained.
        """

        def added(old: Kept) -> Kept:
            answers = dict(old.quiz[when])
            for name, answer in given.items():
                if name not in old.quiz["after"]:
                    answers[name] = answer
            return replace(old, quiz={**old.quiz, when: answers})

        return self._change(added)

    def _change_record(self, name: str, change: Callable[[Record], Record]) -> str:
        def of_all(old: Kept) -> Kept:
            record = change(old.exercises.get(name, Record()))
            return replace(old, exercises={**old.exercises, name: record})

        return self._change(of_all)

    def _change(self, change: _Change) -> str:
        self._waiting.append(change)
        _, note, error = self._settled()
        if error:
            remedy = "Set COURSE_PP_PROGRESS to a file that can be written."
            note = f"{note} Progress could not be kept in {self.path}: {error}. {remedy}".lstrip()
        return note

    def _settled(self) -> tuple[Kept, str, str]:
        """Make all changes, those that waited included.

        Returns:
            The content after them, a sentence on the file, and the reason if nothing could be kept.
        """
        note = ""
        try:
            with locked(self.path) as path:
                self._seen, note = self._load(path)
                kept = self._changed(self._seen)
                if kept != self._seen:
                    write_atomically(path, kept.text)
        except OSError as e:
            return self._changed(self._seen), note, str(e.strerror or e)
        self._seen = kept
        self._waiting.clear()
        return kept, note, ""

    def _changed(self, kept: Kept) -> Kept:
        for change in self._waiting:
            kept = change(kept)
        return replace(kept, learner=kept.learner or self._new_learner)

    def _load(self, path: Path) -> tuple[Kept, str]:
        try:
            return parse(path.read_bytes()), ""
        except FileNotFoundError:
            return Kept(), ""
        except ValueError as e:
            # A learner may want to mend it by hand: never overwrite it.
            aside = _free_name(path)
            os.replace(path, aside)
            said = (
                f"The file of your progress was not readable ({e}); it was put aside as {aside} and"
                " begun anew."
            )
            return Kept(), said


STORE = Store()


def parse(content: bytes, version: int | None = None) -> Kept:
    """Read `Kept.text`; pass over unknown fields.

    Raises:
        ValueError: the content is something else, or its version is newer than `VERSION` or is not
            ``version``.
    """
    if not content.strip():
        raise ValueError("it is empty")
    try:
        data = json.loads(content.decode())
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except ValueError:
        raise ValueError("it is no JSON, or only a part of it") from None
    if not isinstance(data, dict):
        raise ValueError("it holds no exercises")
    # An export of version 2 had another mark.
    found = data.get(_MARK, data.get("course_pp_export"))
    is_other = version is not None and found != version
    if is_other or (isinstance(found, int) and found > VERSION):
        if found is None:
            raise ValueError("it is something else")
        raise ValueError(f"version {found!r:.20}, this course reads {VERSION}")

    exercises = data.get("exercises")
    quiz = data.get("quiz", {})
    if not isinstance(exercises, dict) or not isinstance(quiz, dict):
        raise ValueError("it holds no exercises")
    learner = data.get("learner", "")
    written = data.get("written", 0.0)
    # The id becomes the name of a file: it may hold no path.
    is_id = isinstance(learner, str) and Path(learner).name == learner
    if not is_id or not isinstance(written, int | float):
        raise ValueError("it does not say whose it is, or since when")

    answers: dict[str, Any] = {when: quiz.get(when, {}) for when in TIMES}
    for when, given in answers.items():
        values = given.values() if isinstance(given, dict) else [None]
        if not all(isinstance(answer, str) for answer in values):
            raise ValueError(f"the answers {when} are no texts by question")
    records = {name: _record(name, kept) for name, kept in exercises.items()}
    return Kept(records, answers, learner, written)


def _record(name: str, kept: Any) -> Record:
    if not isinstance(kept, dict):
        raise ValueError(f"the entry of {name!r} is no record")
    known = {each.name: kept[each.name] for each in fields(Record) if each.name in kept}
    for each, value in known.items():
        fits = type(getattr(Record(), each)), type(value)
        # jq and JavaScript write 8.0 as 8.
        if fits not in ((bool, bool), (int, int), (float, float), (float, int)) or not value >= 0:
            raise ValueError(f"{each!r} of {name!r} is {value!r}")
    return Record(**known)


def _free_name(path: Path) -> Path:
    first = path.with_name(f"{path.name}.broken")
    for suffix in ["", *range(2, 1000)]:
        candidate = path.with_name(f"{first.name}{suffix}")
        if not candidate.exists():
            return candidate
    return first


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
    """The state of every exercise of the course; shows itself as a table.

    Attributes:
        rows: a row for each exercise of the course.
        note: sentence on the fault of the file, if it has one.
        kept: content of the file.
        here: number of the notebook whose exercises the table shows first, one by one; every other
            notebook then has one line. Empty where it is not known: then all are shown one by one.
    """

    rows: tuple[Row, ...]
    note: str = ""
    kept: Kept = field(default_factory=Kept)
    here: str = ""

    @property
    def summary(self) -> str:
        """The number of correct exercises, the minutes left, and the answers to the quiz."""
        correct = sum(row.status == "correct" for row in self.rows)
        text = f"{correct} of {len(self.rows)} correct"
        if left := sum(row.minutes for row in self.rows if row.status != "correct"):
            text += f", about {left} minutes left"
        answered = [f"{len(given)} {when}" for when, given in self.kept.quiz.items() if given]
        if answered:
            text += f"; questions answered: {' and '.join(answered)} the course"
        return text

    @checked
    def to_csv(self, path: str | Path) -> Path:
        """Write a heading and one line an exercise; return the file.

        Raises:
            NotExported: the file cannot be written; with the remedy.
        """
        text = io.StringIO()
        writer = csv.DictWriter(text, [each.name for each in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in self.rows)
        return _exported(Path(path), text.getvalue())

    @checked
    def to_json(self, path: str | Path) -> Path:
        """Write the exercises and the answers of the quiz; return the file.

        ``python -m course_pp report`` reads it. It names no person: a random id tells two exports
        of one learner from those of two.

        Args:
            path: a folder, in which the file is named by the id; or a file that ends in ``.json``.

        Raises:
            NotExported: the file cannot be written; with the remedy.
        """
        path = Path(path)
        # os.path.isdir never raises, unlike the method of a path.
        if os.path.isdir(path):
            path /= f"{self.kept.learner}.json"
        if path.suffix != ".json":
            raise NotExported(
                f"{path} is no folder that you can reach: create it, or give a file that ends in"
                " .json."
            )
        # The instructor need not know at what time somebody worked.
        exercises = {
            name: replace(record, begun=0.0) for name, record in self.kept.exercises.items()
        }
        return _exported(path, replace(self.kept, exercises=exercises).text)

    def __repr__(self) -> str:
        table = columns([_HEADINGS, *self._lines()])
        return "\n".join(filter(None, [table, self.summary, self.note]))

    def _lines(self) -> list[tuple[str, ...]]:
        """Return the cells of each line of the table."""
        if not self.here:
            return [_cells(row) for row in self.rows]
        lines = [_cells(row) for row in self.rows if row.notebook == self.here]
        for notebook, rows in groupby(self.rows, key=lambda row: row.notebook):
            if notebook != self.here:
                lines.append(_folded(notebook, list(rows)))
        return lines

    def _repr_html_(self) -> str:
        def line(tag: str, cells: tuple[str, ...]) -> str:
            text = ""
            for i, cell in enumerate(cells):
                style = f"text-align:left;white-space:{_wrap(i)}"
                text += f'<{tag} style="{style}">{escape(cell)}</{tag}>'
            return f"<tr>{text}</tr>"

        body = "".join(line("td", cells) for cells in self._lines())
        below = "".join(f"<p>{escape(text)}</p>" for text in (self.summary, self.note) if text)
        return f"<table><thead>{line('th', _HEADINGS)}</thead><tbody>{body}</tbody></table>{below}"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/plain": repr(self), "text/html": self._repr_html_()}


_HEADINGS = (
    "notebook",
    "exercise",
    "difficulty",
    "minutes",
    "status",
    "attempts",
    "hints",
    "solution seen",
)


def _wrap(column: int) -> str:
    """Break the wide columns into lines: a table wider than the page would hide its last column."""
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


def _folded(notebook: str, rows: Sequence[Row]) -> tuple[str, ...]:
    """Return the cells of one line for a whole notebook."""
    correct = sum(row.status == "correct" for row in rows)
    attempts = sum(row.attempts for row in rows)
    status = "correct"
    if correct < len(rows):
        status = "not yet" if attempts else "open"
    return (
        notebook,
        f"{correct} of {len(rows)} exercises correct",
        "",
        str(sum(row.minutes for row in rows)),
        f"{_SYMBOLS[status]} {status}",
        str(attempts),
        str(sum(row.hints for row in rows)),
        str(sum(row.solution_seen for row in rows)),
    )


def progress() -> Progress:
    """Show and return a table of all notebooks: solved exercises, attempts, and the help used.

    In a notebook, its own exercises come first, and every other notebook has one line.
    """
    kept, note = STORE.read()
    every = list(exercises())
    rows = tuple(_row(exercise, kept.exercises.get(exercise.name)) for exercise in every)
    here = _notebook_with(sys._getframe(1).f_globals, every)
    return Progress(rows, note, kept, here).show()


def _notebook_with(names: Container[str], every: Iterable[Exercise]) -> str:
    """Return the number of the notebook most of whose exercises have these names; empty if none.

    A notebook defines the functions that its exercises ask for, and may borrow a solution of an
    earlier notebook.
    """
    counts = Counter(exercise.notebook for exercise in every if exercise.name in names)
    return max(counts, key=lambda notebook: counts[notebook], default="")


class NotExported(MessageOnly, OSError):
    """An export cannot be written."""


def _exported(path: Path, text: str) -> Path:
    try:
        write_atomically(path, text)
    except OSError as e:
        # The error itself names a temporary file beside the target.
        raise NotExported(
            f"{path} cannot be written: {e.strerror}. Create the folder {path.parent} first, or"
            " give a path in one that you may write to."
        ) from None
    return path


def _row(exercise: Exercise, record: Record | None) -> Row:
    record = record or Record()
    status = "not yet" if record.attempts else "open"
    if record.correct:
        status = "correct"
    return Row(
        exercise.notebook,
        exercise.name,
        title=exercise.title,
        difficulty=exercise.difficulty,
        minutes=exercise.minutes,
        status=status,
        attempts=record.attempts,
        hints=record.hints,
        solution_seen=record.solution_seen,
        took_minutes=record.took_minutes,
    )
