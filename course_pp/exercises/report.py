"""``python -m course_pp report FOLDER``: the gain of a class, from the exports of its learners."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from course_pp.exercises.display import columns
from course_pp.exercises.exercise import exercises
from course_pp.exercises.inventory import Question, count_right, questions_about
from course_pp.exercises.progress import TIMES, VERSION, Kept, parse

HELP = "say what a class has learned, from a folder of progress().to_json(...) files"

# Longer than anybody works on one exercise without going home.
_MOST_MINUTES = 180.0
_HARD = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", type=Path, metavar="FOLDER", help="with the .json files of the class"
    )
    about = "score only what these routes or notebooks teach: a_day, 03"
    parser.add_argument("--about", nargs="+", default=(), metavar="NAME", help=about)
    parser.add_argument("--json", action="store_true", help="print the report as one object")


def run(arguments: argparse.Namespace) -> None:
    """Print the report.

    Raises:
        ValueError: the folder has no export, or a name of ``--about`` is unknown.
    """
    report = class_report(arguments.folder, arguments.about)
    print(json.dumps(_data(report), indent=1) if arguments.json else report)


def _data(report: ClassReport) -> dict[str, object]:
    lines = (report.whole, *report.concepts)
    whole, *concepts = [{**asdict(line), "gain": line.gain} for line in lines]
    exercises = [{**asdict(line), "hard": line.hard} for line in report.exercises]
    return {**asdict(report), "whole": whole, "concepts": concepts, "exercises": exercises}


@dataclass(frozen=True)
class Gain:
    """The gain of the learners who answered questions before the course and after it.

    Attributes:
        concept: subject of the questions; ``"everything"`` for all of them.
        people: learners who answered at least one of its questions both times.
        before, after: share of right answers among the questions that they answered both times; 0
            if nobody did.
    """

    concept: str
    people: int
    before: float
    after: float

    @property
    def gain(self) -> float | None:
        """The share of the possible gain: (after − before) / (1 − before); None if before is 1."""
        return None if self.before == 1 else (self.after - self.before) / (1 - self.before)


@dataclass(frozen=True)
class QuestionLine:
    """One question after the course.

    Attributes:
        name, notebook, section: the question, and the place where it is taught.
        answered: learners who answered it.
        right: learners who answered it rightly.
        common_mistake: the most common wrong answer.
    """

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
        notebook, exercise: number of the notebook, name of the exercise.
        tried: people with a check that did not say pending.
        correct: people who solved it.
        attempts, hints: mean over the people who tried.
        solution_seen: people who looked at the solution before.
        expected_minutes: minutes that the notebook names.
        minutes: median time from the first check or hint to *correct*; None if no time is known.
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
        """Whether half of the people who tried, or more, did not solve it."""
        return self.tried > 0 and self.correct <= _HARD * self.tried


@dataclass(frozen=True)
class ClassReport:
    """The whole report.

    Attributes:
        people: learners whose export was read.
        whole: gain of the class over all questions.
        not_twice: {reason: files} of learners who answered no question both times.
        concepts: gain of each concept that somebody answered both times.
        questions: a line for each question.
        exercises: a line for each exercise.
        left_out: name of each file that does not count, with the reason.
    """

    people: int
    whole: Gain
    not_twice: dict[str, list[str]]
    concepts: tuple[Gain, ...]
    questions: tuple[QuestionLine, ...]
    exercises: tuple[ExerciseLine, ...]
    left_out: tuple[str, ...]

    def __str__(self) -> str:
        plural = "" if self.people == 1 else "s"
        said = f"{self.people} learner{plural}, {self.whole.people} answered before and after"
        if self.whole.people:
            said += ": {2} right before, {3} after, gain {4}".format(*_gain_cells(self.whole))
        parts = [said]
        for what, files in self.not_twice.items():
            parts.append(f"answered {what}: {', '.join(files)}")
        parts += self.left_out

        if self.concepts:
            head = ["concept", "people", "before", "after", "gain"]
            parts += ["", columns([head, *map(_gain_cells, self.concepts)])]

        missed = [line for line in self.questions if line.right < line.answered]
        missed.sort(key=lambda line: line.right / line.answered)
        if missed:
            head = ["missed most after the course", "right", "taught in", "often answered"]
            parts += ["", columns([head, *map(_question_cells, missed[:5])])]

        if tried := [line for line in self.exercises if line.tried]:
            parts += ["", columns([_EXERCISE_HEADINGS, *map(_exercise_cells, tried)])]
        return "\n".join(parts)


def class_report(folder: Path, about: Sequence[str] = ()) -> ClassReport:
    """Read every ``.json`` in ``folder``; of two files of one learner the later counts.

    Args:
        folder: folder with files of ``progress().to_json(...)``. ``progress.json``, as the course
            keeps it, is such a file, too.
        about: routes or notebooks; only questions on these are scored; see `quiz`.

    Raises:
        ValueError: ``folder`` is no folder, no file in it could be read, or a name in ``about`` is
            unknown.
    """
    asked = questions_about(about)
    if not folder.is_dir():
        raise ValueError(
            f"{str(folder)!r} is no folder: name one with files of progress().to_json(...)"
        )
    exports: dict[str, Kept] = {}
    left_out = []
    for path in sorted(folder.iterdir()):
        if path.suffix not in (".json", ".csv"):
            continue
        try:
            if path.suffix == ".csv":
                raise ValueError("it is for a spreadsheet, ask for progress().to_json(...)")
            exports[path.name] = parse(path.read_bytes(), VERSION)
        except (ValueError, OSError) as error:
            left_out.append(f"{path.name} is left out: {getattr(error, 'strerror', None) or error}")

    latest = {}
    for name, kept in sorted(exports.items(), key=lambda each: each[1].written):
        latest[kept.learner] = name
    for name in list(exports):
        later = latest[exports[name].learner]
        if later != name:
            del exports[name]
            left_out.append(f"{name} is left out: {later} is by the same learner, and no older")
    if not exports:
        why = f" ({'; '.join(left_out)})" if left_out else ""
        raise ValueError(
            f"{str(folder)!r} has no export{why}: let each person run progress().to_json(...)"
        )

    learners = tuple(exports.values())
    not_twice: dict[str, list[str]] = {}
    for name, kept in exports.items():
        if what := _not_twice(kept, asked):
            not_twice.setdefault(what, []).append(name)

    concepts = []
    for name in dict.fromkeys(question.concept for question in asked):
        gain = _gain(name, [each for each in asked if each.concept == name], learners)
        if gain.people:
            concepts.append(gain)
    return ClassReport(
        len(learners),
        _gain("everything", asked, learners),
        not_twice=not_twice,
        concepts=tuple(concepts),
        questions=tuple(_question(question, learners) for question in asked),
        exercises=tuple(_exercises(learners)),
        left_out=tuple(left_out),
    )


def _not_twice(kept: Kept, asked: Sequence[Question]) -> str:
    """Return when a learner answered, if not one question before and after; else empty."""
    names = {question.name for question in asked}
    before, after = (names & set(kept.quiz[when]) for when in TIMES)
    if before & after:
        return ""
    if before and after:
        return "other questions after than before"
    if before:
        return "only before"
    return "only after" if after else "no question"


def _gain(concept: str, about: Sequence[Question], learners: Sequence[Kept]) -> Gain:
    asked = people = before = after = 0
    for learner in learners:
        twice = learner.quiz["before"].keys() & learner.quiz["after"].keys()
        both = [question for question in about if question.name in twice]
        people += bool(both)
        asked += len(both)
        before += count_right(both, learner.quiz["before"])
        after += count_right(both, learner.quiz["after"])
    return Gain(concept, people, before / max(asked, 1), after / max(asked, 1))


def _question(question: Question, learners: Sequence[Kept]) -> QuestionLine:
    after = [each.quiz["after"] for each in learners]
    given = [answers[question.name] for answers in after if question.name in answers]
    common = [wrong.says for wrong in question.wrong if wrong.says in given]
    mistake = max(common, key=given.count, default="")
    return QuestionLine(
        question.name,
        question.notebook,
        section=question.section,
        answered=len(given),
        right=given.count(question.correct),
        common_mistake=mistake,
    )


def _exercises(learners: Sequence[Kept]) -> Iterable[ExerciseLine]:
    for exercise in exercises():
        records = [each.exercises.get(exercise.name) for each in learners]
        people = [record for record in records if record is not None]
        tried = [each for each in people if each.attempts]
        times = [each.took_minutes for each in tried if 0 < each.took_minutes <= _MOST_MINUTES]
        yield ExerciseLine(
            exercise.notebook,
            exercise.name,
            tried=len(tried),
            correct=sum(each.correct for each in tried),
            attempts=statistics.fmean([each.attempts for each in tried] or [0]),
            hints=statistics.fmean([each.hints for each in tried] or [0]),
            solution_seen=sum(each.solution_seen for each in people),
            expected_minutes=exercise.minutes,
            minutes=statistics.median(times) if times else None,
        )


def _gain_cells(line: Gain) -> list[str]:
    gain = "all known before" if line.gain is None else f"{line.gain:.0%}"
    return [line.concept, str(line.people), f"{line.before:.0%}", f"{line.after:.0%}", gain]


def _question_cells(line: QuestionLine) -> list[str]:
    right = f"{line.right} of {line.answered}"
    return [line.name, right, f"{line.notebook}, {line.section}", line.common_mistake]


_EXERCISE_HEADINGS = (
    "exercise",
    "notebook",
    "correct",
    "attempts",
    "hints",
    "solution seen",
    "minutes",
    "",
)


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
