"""``python -m course_pp report FOLDER``: what a class has learned, from the exports of its people."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from course_pp.exercises.display import columns
from course_pp.exercises.exercise import exercises
from course_pp.exercises.inventory import Question, questions_about
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
    """Print the report. Raises ValueError if there is no export in the folder, or nothing of that name to score."""
    report = class_report(arguments.folder, arguments.about)
    print(json.dumps(_data(report), indent=1) if arguments.json else report)


def _data(report: ClassReport) -> dict[str, object]:
    whole, *concepts = (
        {**asdict(line), "gain": line.gain} for line in (report.whole, *report.concepts)
    )
    exercises = [{**asdict(line), "hard": line.hard} for line in report.exercises]
    return {**asdict(report), "whole": whole, "concepts": concepts, "exercises": exercises}


@dataclass(frozen=True)
class Gain:
    """Some questions over those who answered them before and after.

    Attributes:
        concept: what they are about; all of them are ``"everything"``.
        people: who answered at least one of its questions both times.
        before, after: share of right answers among the questions that they answered both times; 0
            if nobody did.
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
        tried, correct: people with a check that did not say pending, and those of them who solved
            it.
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
        people: learners whose export was read.
        whole: the gain of the class.
        not_twice: files of who has answered no question both times, by what they answered instead.
        left_out: for each file that does not count, its name and why.
    """

    people: int
    whole: Gain
    not_twice: dict[str, list[str]]
    concepts: tuple[Gain, ...]
    questions: tuple[QuestionLine, ...]
    exercises: tuple[ExerciseLine, ...]
    left_out: tuple[str, ...]

    def __str__(self) -> str:
        said = (
            f"{self.people} learner{'' if self.people == 1 else 's'}, {self.whole.people} answered"
            " before and after"
        )
        if self.whole.people:
            said += ": {2} right before, {3} after, gain {4}".format(*_gain_cells(self.whole))
        parts = [
            said,
            *(f"answered {what}: {', '.join(files)}" for what, files in self.not_twice.items()),
        ]
        parts += self.left_out
        if self.concepts:
            parts += [
                "",
                columns(
                    [
                        ["concept", "people", "before", "after", "gain"],
                        *map(_gain_cells, self.concepts),
                    ]
                ),
            ]
        missed = sorted(
            (q for q in self.questions if q.right < q.answered), key=lambda q: q.right / q.answered
        )[:5]
        if missed:
            head = ["missed most after the course", "right", "taught in", "often answered"]
            rows = (
                [
                    q.name,
                    f"{q.right} of {q.answered}",
                    f"{q.notebook}, {q.section}",
                    q.common_mistake,
                ]
                for q in missed
            )
            parts += ["", columns([head, *rows])]
        if tried := [line for line in self.exercises if line.tried]:
            head = [
                "exercise",
                "notebook",
                "correct",
                "attempts",
                "hints",
                "solution seen",
                "minutes",
                "",
            ]
            parts += ["", columns([head, *map(_exercise_cells, tried)])]
        return "\n".join(parts)


def class_report(folder: Path, about: Sequence[str] = ()) -> ClassReport:
    """Read every ``.json`` in ``folder``; of two of one learner the later counts. What does not
    count is said.

    Args:
        folder: with files of ``progress().to_json(...)``. ``progress.json``, as the course keeps
            it, is one as well.
        about: score only what these routes or notebooks teach; see `quiz`.

    Raises:
        ValueError: ``folder`` is none, nothing in it could be read, or nothing is known by a name
            in ``about``.
    """
    asked = questions_about(about)
    if not folder.is_dir():
        raise ValueError(
            f"{str(folder)!r} is no folder: name one with files of progress().to_json(...)"
        )
    exports: dict[str, Kept] = {}
    left_out = []
    for path in sorted(path for path in folder.iterdir() if path.suffix in (".json", ".csv")):
        try:
            if path.suffix == ".csv":
                raise ValueError("it is for a spreadsheet, ask for progress().to_json(...)")
            exports[path.name] = parse(path.read_bytes(), VERSION)
        except (ValueError, OSError) as error:
            left_out.append(f"{path.name} is left out: {getattr(error, 'strerror', None) or error}")
    latest = {
        kept.learner: name
        for name, kept in sorted(exports.items(), key=lambda each: each[1].written)
    }
    for name in [name for name, kept in exports.items() if latest[kept.learner] != name]:
        left_out.append(
            f"{name} is left out: {latest[exports.pop(name).learner]} is by the same learner, and"
            " no older"
        )
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
    names = dict.fromkeys(question.concept for question in asked)
    concepts = (
        _gain(name, [each for each in asked if each.concept == name], learners) for name in names
    )
    return ClassReport(
        len(learners),
        _gain("everything", asked, learners),
        not_twice,
        tuple(concept for concept in concepts if concept.people),
        tuple(_question(question, learners) for question in asked),
        tuple(_exercises(learners)),
        tuple(left_out),
    )


def _not_twice(kept: Kept, asked: Sequence[Question]) -> str:
    """What was answered, if no question was both times."""
    before, after = ({question.name for question in asked} & set(kept.quiz[when]) for when in TIMES)
    if before and after:
        return "" if before & after else "other questions after than before"
    return "only before" if before else "only after" if after else "no question"


def _gain(concept: str, about: Sequence[Question], learners: Sequence[Kept]) -> Gain:
    right, asked, people = {"before": 0, "after": 0}, 0, 0
    for learner in learners:
        both = [q for q in about if all(q.name in given for given in learner.quiz.values())]
        people += bool(both)
        asked += len(both)
        for when in right:
            right[when] += sum(
                learner.quiz[when][question.name] == question.correct for question in both
            )
    return Gain(concept, people, right["before"] / max(asked, 1), right["after"] / max(asked, 1))


def _question(question: Question, learners: Sequence[Kept]) -> QuestionLine:
    given = [
        each.quiz["after"][question.name]
        for each in learners
        if question.name in each.quiz["after"]
    ]
    common = [wrong.says for wrong in question.wrong if wrong.says in given]
    mistake = max(common, key=given.count, default="")
    return QuestionLine(
        question.name,
        question.notebook,
        question.section,
        len(given),
        given.count(question.correct),
        mistake,
    )


def _exercises(learners: Sequence[Kept]) -> Iterable[ExerciseLine]:
    for exercise in exercises():
        people = [
            each.exercises[exercise.name] for each in learners if exercise.name in each.exercises
        ]
        tried = [each for each in people if each.attempts]
        times = [each.took_minutes for each in tried if 0 < each.took_minutes <= _MOST_MINUTES]
        yield ExerciseLine(
            exercise.notebook,
            exercise.name,
            len(tried),
            sum(each.correct for each in tried),
            statistics.fmean(each.attempts for each in tried) if tried else 0.0,
            statistics.fmean(each.hints for each in tried) if tried else 0.0,
            sum(each.solution_seen for each in people),
            exercise.minutes,
            statistics.median(times) if times else None,
        )


def _gain_cells(line: Gain) -> list[str]:
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
