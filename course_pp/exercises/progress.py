"""What a learner has solved so far: kept in one small file, shown as a table, exported for an instructor."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from html import escape
from pathlib import Path
from typing import Any, Literal, get_args

from course_pp.base.arguments import checked
from course_pp.base.files import locked, state_folder, write_atomically
from course_pp.exercises.display import MessageOnly, Shown, columns
from course_pp.exercises.exercise import Exercise, exercises

When = Literal["before", "after"]
TIMES: tuple[When, ...] = get_args(When)

_MARK, VERSION = "course_pp_progress", 3


@dataclass(frozen=True)
class Record:
    """What is kept of one exercise.

    Attributes:
        correct: whether a check has ever said so.
        attempts: checks that did not say pending, up to the first that said correct.
        hints: how many hints were shown.
        solution_seen: whether the solution was shown before the answer was correct.
        begun: when the first check did not say pending, or the first hint was shown: seconds since
            1970; 0 if neither.
        took_minutes: from then to the first check that said correct; 0 before.
    """

    correct: bool = False
    attempts: int = 0
    hints: int = 0
    solution_seen: bool = False
    begun: float = field(default=0.0, compare=False)
    took_minutes: float = field(default=0.0, compare=False)


@dataclass(frozen=True)
class Kept:
    """What the file holds, and an export of it.

    Attributes:
        exercises: a record for each that was begun, by name.
        quiz: for ``before`` and ``after`` what was answered, by name of question.
        learner: an id made by chance, so that two exports of a person count once.
        written: when the file was: seconds since 1970.
    """

    exercises: Mapping[str, Record] = field(default_factory=dict)
    quiz: Mapping[str, Mapping[str, str]] = field(
        default_factory=lambda: {when: {} for when in TIMES}
    )
    learner: str = ""
    written: float = field(default=0.0, compare=False)

    @property
    def text(self) -> str:
        """The text of a file that is written now."""
        kept = {_MARK: VERSION, **asdict(replace(self, written=time.time()))}
        return json.dumps(kept, indent=1, sort_keys=True) + "\n"


_Change = Callable[[Kept], Kept]


class Store:
    """The file of a learner's progress. Several kernels may share it: each change is made under a
    lock.

    What is wrong with the file never stops a learner: each method returns or keeps a sentence about
    it. A change that cannot be kept waits, and is made again on whatever the file holds when it can
    next be written.
    """

    def __init__(self) -> None:
        self._waiting: list[_Change] = []
        # What the file held when it was last read, for as long as it cannot be.
        self._seen = Kept()
        self._new_learner = secrets.token_hex(4)

    @property
    def path(self) -> Path:
        """``COURSE_PP_PROGRESS``, or a file in the user's state directory; ``~`` stays where nobody has that name."""
        chosen = os.environ.get("COURSE_PP_PROGRESS")
        path = Path(chosen) if chosen else state_folder() / "progress.json"
        with contextlib.suppress(RuntimeError):
            path = path.expanduser()
        return path

    def read(self) -> tuple[Kept, str]:
        """Everything, and what was wrong with the file, if anything."""
        kept, note, error = self._settled()
        if error:
            note = f"{note} Progress could not be read from {self.path}: {error}.".lstrip()
        return kept, note

    def record_attempt(self, name: str, correct: bool) -> str:
        """Count a check; return a sentence if that could not be kept as it should."""
        now = time.time()

        def one_more(old: Record) -> Record:
            if old.correct:
                return old
            begun = old.begun or now
            # a clock may be set back
            took = round(max(now - begun, 0.0) / 60, 1) if correct else 0.0
            return replace(
                old, correct=correct, attempts=old.attempts + 1, begun=begun, took_minutes=took
            )

        return self._change_record(name, one_more)

    def record_hint(self, name: str, n_hints: int) -> int:
        """Count a hint; return its number from 1, or ``n_hints + 1`` when there is none left."""
        seen, now = 0, time.time()

        def one_more(old: Record) -> Record:
            nonlocal seen
            seen = old.hints + 1
            return replace(old, hints=min(seen, n_hints), begun=old.begun or now)

        self._change_record(name, one_more)
        return seen

    def record_solution(self, name: str) -> None:
        self._change_record(
            name, lambda old: replace(old, solution_seen=old.solution_seen or not old.correct)
        )

    def record_answers(self, when: When, given: Mapping[str, str]) -> str:
        """Add answers to questions, by name; return a sentence if they could not be kept.

        A question that is answered after the course takes no other answer, for then it is
        explained.
        """

        def added(old: Kept) -> Kept:
            still_open = {
                name: answer for name, answer in given.items() if name not in old.quiz["after"]
            }
            return replace(old, quiz={**old.quiz, when: {**old.quiz[when], **still_open}})

        return self._change(added)

    def _change_record(self, name: str, change: Callable[[Record], Record]) -> str:
        def of_all(old: Kept) -> Kept:
            return replace(
                old, exercises={**old.exercises, name: change(old.exercises.get(name, Record()))}
            )

        return self._change(of_all)

    def _change(self, change: _Change) -> str:
        self._waiting.append(change)
        _, note, error = self._settled()
        if error:
            remedy = "Set COURSE_PP_PROGRESS to a file that can be written."
            note = f"{note} Progress could not be kept in {self.path}: {error}. {remedy}".lstrip()
        return note

    def _settled(self) -> tuple[Kept, str, str]:
        """Everything with every change made, those that waited included; a note; and why nothing could be kept."""
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
            aside = _free_name(path)
            os.replace(path, aside)
            said = (
                f"The file of your progress was not readable ({e}); it was put aside as {aside} and"
                " begun anew."
            )
            return Kept(), said


STORE = Store()


def parse(content: bytes, version: int | None = None) -> Kept:
    """Read `Kept.text`; unknown fields are passed over.

    Raises ValueError for anything else, for a newer version, and for another than ``version`` where
    that is given.
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
    found = data.get(_MARK, data.get("course_pp_export"))  # an export of version 2 had another mark
    if (version is not None and found != version) or (isinstance(found, int) and found > VERSION):
        raise ValueError(
            "it is something else"
            if found is None
            else f"version {found!r:.20}, this course reads {VERSION}"
        )
    exercises, quiz = data.get("exercises"), data.get("quiz", {})
    if not isinstance(exercises, dict) or not isinstance(quiz, dict):
        raise ValueError("it holds no exercises")
    learner, written = data.get("learner", ""), data.get("written", 0.0)
    if (
        not isinstance(learner, str)
        or Path(learner).name != learner
        or not isinstance(written, int | float)
    ):
        raise ValueError("it does not say whose it is, or since when")
    answers: dict[str, Any] = {when: quiz.get(when, {}) for when in TIMES}
    for when, given in answers.items():
        if not isinstance(given, dict) or not all(
            isinstance(answer, str) for answer in given.values()
        ):
            raise ValueError(f"the answers {when} are no texts by question")
    return Kept(
        {name: _record(name, kept) for name, kept in exercises.items()}, answers, learner, written
    )


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
    candidates = (
        path.with_name(f"{path.name}.broken{suffix}") for suffix in ["", *map(str, range(2, 1000))]
    )
    return next(
        (name for name in candidates if not name.exists()), path.with_name(f"{path.name}.broken")
    )


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
        kept: what the file holds.
    """

    rows: tuple[Row, ...]
    note: str = ""
    kept: Kept = field(default_factory=Kept)

    @property
    def summary(self) -> str:
        correct = sum(row.status == "correct" for row in self.rows)
        left = sum(row.minutes for row in self.rows if row.status != "correct")
        answered = [f"{len(given)} {when}" for when, given in self.kept.quiz.items() if given]
        quiz = f"; questions answered: {' and '.join(answered)} the course" if answered else ""
        return (
            f"{correct} of {len(self.rows)} correct"
            + (f", about {left} minutes left" if left else "")
            + quiz
        )

    @checked
    def to_csv(self, path: str | Path) -> Path:
        """Write one line an exercise, with a heading. Raises NotExported, with the remedy, if that cannot be."""
        text = io.StringIO()
        writer = csv.DictWriter(text, [each.name for each in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in self.rows)
        return _exported(Path(path), text.getvalue())

    @checked
    def to_json(self, path: str | Path) -> Path:
        """Write the exercises and the answers of the quiz, for ``python -m course_pp report``;
        return the file.

        It names no person. An id, made by chance, tells two exports of one learner from those of
        two.

        Args:
            path: a folder, in which the file is called after the id; or a file that ends in
                ``.json``.

        Raises:
            NotExported: that cannot be written; with the remedy.
        """
        path = Path(path)
        if os.path.isdir(path):  # which never raises, unlike the method of a path
            path /= f"{self.kept.learner}.json"
        if path.suffix != ".json":
            raise NotExported(
                f"{path} is no folder that you can reach: create it, or give a file that ends in"
                " .json."
            )
        # When somebody worked is nobody's business.
        exercises = {
            name: replace(record, begun=0.0) for name, record in self.kept.exercises.items()
        }
        return _exported(path, replace(self.kept, exercises=exercises).text)

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
    kept, note = STORE.read()
    rows = tuple(_row(exercise, kept.exercises.get(exercise.name)) for exercise in exercises())
    return Progress(rows, note, kept).show()


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
        record.took_minutes,
    )
