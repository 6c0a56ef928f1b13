"""``python -m course_pp report FOLDER``: what a class has learned, from the exports of its people."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from course_pp.exercises.display import columns
from course_pp.exercises.exercise import exercises
from course_pp.exercises.inventory import Answers, Question, parse_answers, questions
from course_pp.exercises.progress import EXPORT_VERSION

HELP = "say what a class has learned, from a folder of progress().to_json(...) files"

_MOST_BYTES = 10_000_000
_STATES = ("open", "not yet", "correct")
# Longer than anybody works on one exercise without going home.
_MOST_MINUTES = 180.0
_HARD = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="with one .json file a person")
    parser.add_argument("--json", action="store_true", help="print the report as one object")


def run(arguments: argparse.Namespace) -> None:
    """Print the report. Raises ValueError if there is no export in the folder."""
    report = class_report(arguments.folder)
    print(json.dumps(_data(report), indent=1) if arguments.json else report)


def _data(report: ClassReport) -> dict[str, object]:
    gains = [{**asdict(line), "gain": line.gain} for line in report.concepts]
    exercises = [{**asdict(line), "hard": line.hard} for line in report.exercises]
    return {**asdict(report), "concepts": gains, "exercises": exercises}


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
    if path.suffix == ".csv":
        raise Damaged("is for a spreadsheet; ask for progress().to_json(...)")
    if path.stat().st_size > _MOST_BYTES:
        raise Damaged("is too large for an export")
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError:
        raise Damaged("is no text") from None
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        raise Damaged("is no JSON, or not all of it") from None
    if not isinstance(data, dict) or "course_pp_export" not in data:
        raise Damaged("is no export of progress()")
    version = data["course_pp_export"]
    if version != EXPORT_VERSION:
        raise Damaged(f"is an export of version {str(version)[:20]}; this course reads {EXPORT_VERSION}")
    try:
        quiz = parse_answers(data.get("quiz", {}))
    except ValueError as error:
        raise Damaged(f"is damaged: {error}") from None
    return Export(_solved(data.get("exercises")), quiz)


def _solved(rows: Any) -> dict[str, Solved]:
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


@dataclass(frozen=True)
class ConceptGain:
    """The questions of one concept over those who answered them before and after.

    Attributes:
        people: who answered at least one of its questions both times.
        before, after: share of right answers among the questions that they answered both times.
    """

    concept: str
    people: int
    before: float
    after: float

    @property
    def gain(self) -> float | None:
        """The share learned of what could be: (after − before) / (1 − before); None if all was right before."""
        return None if self.before == 1 else (self.after - self.before) / (1 - self.before)


@dataclass(frozen=True)
class QuestionLine:
    """One question after the course: how many answered it, how many rightly, and the most common wrong answer."""

    name: str
    notebook: str
    section: str
    answered: int
    right: int
    common_mistake: str


@dataclass(frozen=True)
class ExerciseLine:
    """One exercise over the class.

    Attributes:
        tried, correct: people with a check that did not say pending, and those of them who solved it.
        attempts, hints: mean of those who tried.
        solution_seen: people who looked at the solution before.
        expected_minutes: what the notebook says.
        minutes: median from the first check or hint to *correct*; None where nobody's is known.
    """

    notebook: str
    exercise: str
    tried: int
    correct: int
    attempts: float
    hints: float
    solution_seen: int
    expected_minutes: int
    minutes: float | None

    @property
    def hard(self) -> bool:
        """Whether half of those who tried, or more, did not solve it by themselves."""
        return self.tried > 0 and self.correct <= _HARD * self.tried


@dataclass(frozen=True)
class ClassReport:
    """The whole report.

    Attributes:
        people: files that were read.
        left_out: for each file that was not, its name and why.
    """

    people: int
    concepts: tuple[ConceptGain, ...]
    questions: tuple[QuestionLine, ...]
    exercises: tuple[ExerciseLine, ...]
    left_out: tuple[str, ...]

    def __str__(self) -> str:
        parts = ["1 export read" if self.people == 1 else f"{self.people} exports read", *self.left_out]
        if self.concepts:
            parts += [
                "",
                columns([["concept", "people", "before", "after", "gain"], *map(_concept_cells, self.concepts)]),
            ]
        missed = sorted((q for q in self.questions if q.right < q.answered), key=lambda q: q.right / q.answered)[:5]
        if missed:
            head = ["missed most after the course", "right", "taught in", "often answered"]
            rows = (
                [q.name, f"{q.right} of {q.answered}", f"{q.notebook}, {q.section}", q.common_mistake] for q in missed
            )
            parts += ["", columns([head, *rows])]
        if tried := [line for line in self.exercises if line.tried]:
            head = ["exercise", "notebook", "correct", "attempts", "hints", "solution seen", "minutes", ""]
            parts += ["", columns([head, *map(_exercise_cells, tried)])]
        return "\n".join(parts)


def class_report(folder: Path) -> ClassReport:
    """Read every ``.json`` in ``folder``. What is no such export is left out, and said.

    Raises:
        ValueError: ``folder`` is none, or nothing in it could be read.
    """
    if not folder.is_dir():
        raise ValueError(f"{str(folder)!r} is no folder: name one with files of progress().to_json(...)")
    exports, left_out = [], []
    for path in sorted(path for path in folder.iterdir() if path.suffix in (".json", ".csv")):
        try:
            exports.append(read_export(path))
        except Damaged as error:
            left_out.append(f"{path.name} {error}; left out")
        except OSError as error:
            left_out.append(f"{path.name} cannot be read ({error.strerror}); left out")
    if not exports:
        why = f" ({'; '.join(left_out)})" if left_out else ""
        raise ValueError(f"{str(folder)!r} has no export{why}: let each person run progress().to_json(...)")
    names = dict.fromkeys(question.concept for question in questions())
    concepts = tuple(filter(None, (_gain(concept, exports) for concept in names)))
    lines = tuple(_question(question, exports) for question in questions())
    return ClassReport(len(exports), concepts, lines, tuple(_exercises(exports)), tuple(left_out))


def _gain(concept: str, exports: Sequence[Export]) -> ConceptGain | None:
    """None where nobody answered both times."""
    about = [question for question in questions() if question.concept == concept]
    right, asked, people = {"before": 0, "after": 0}, 0, 0
    for export in exports:
        both = [q for q in about if all(q.name in given for given in export.quiz.values())]
        people += bool(both)
        asked += len(both)
        for when in right:
            right[when] += sum(export.quiz[when][question.name] == question.correct for question in both)
    return ConceptGain(concept, people, right["before"] / asked, right["after"] / asked) if asked else None


def _question(question: Question, exports: Sequence[Export]) -> QuestionLine:
    given = [export.quiz["after"][question.name] for export in exports if question.name in export.quiz["after"]]
    common = [wrong.says for wrong in question.wrong if wrong.says in given]
    mistake = max(common, key=given.count, default="")
    return QuestionLine(
        question.name, question.notebook, question.section, len(given), given.count(question.correct), mistake
    )


def _exercises(exports: Sequence[Export]) -> Iterable[ExerciseLine]:
    for exercise in exercises():
        people = [export.exercises[exercise.name] for export in exports if exercise.name in export.exercises]
        tried = [each for each in people if each.attempts]
        times = [each.took_minutes for each in tried if 0 < each.took_minutes <= _MOST_MINUTES]
        yield ExerciseLine(
            exercise.notebook,
            exercise.name,
            len(tried),
            sum(each.status == "correct" for each in tried),
            statistics.fmean(each.attempts for each in tried) if tried else 0.0,
            statistics.fmean(each.hints for each in tried) if tried else 0.0,
            sum(each.solution_seen for each in people),
            exercise.minutes,
            statistics.median(times) if times else None,
        )


def _concept_cells(line: ConceptGain) -> list[str]:
    gain = "all known before" if line.gain is None else f"{line.gain:.0%}"
    return [line.concept, str(line.people), f"{line.before:.0%}", f"{line.after:.0%}", gain]


def _exercise_cells(line: ExerciseLine) -> list[str]:
    minutes = "-" if line.minutes is None else f"{line.minutes:.0f}"
    return [
        line.exercise,
        line.notebook,
        f"{line.correct} of {line.tried}",
        f"{line.attempts:.1f}",
        f"{line.hints:.1f}",
        str(line.solution_seen),
        f"{minutes} of {line.expected_minutes}",
        "many fail" if line.hard else "",
    ]
