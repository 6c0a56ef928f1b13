"""The inventory: thirty questions before and after the course, and the small file that keeps a learner's answers."""

from __future__ import annotations

import hashlib
import json
import string
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from course_pp.arguments import checked
from course_pp.exercises.display import Shown, Told, shows_widgets
from course_pp.exercises.progress import STORE
from course_pp.files import locked, write_atomically

if TYPE_CHECKING:
    from course_pp.exercises.panel import Panel

When = Literal["before", "after"]
TIMES: tuple[When, ...] = get_args(When)
Answers = dict[str, dict[str, str]]
"""For ``before`` and ``after`` what was answered, by name of question."""

_VERSION = 1
_LETTERS = string.ascii_lowercase
NO_ANSWER = "-"


@dataclass(frozen=True)
class Wrong:
    """A common wrong guess.

    Attributes:
        says: the answer.
        because: why it is wrong.
        quote: of the notebook; a sentence or an output that refutes it.
    """

    says: str
    because: str
    quote: str


@dataclass(frozen=True)
class Question:
    """One question of the inventory.

    Attributes:
        name: a short name, the same in every version.
        concept: what it is about: "bubble", "memory", ...
        notebook, section: where it is taught: "03", "4. When messages take time".
        asks: the question.
        correct: the right answer.
        output: what a cell of the notebook prints that shows it.
        wrong: common guesses.
        run: an expression over the package that computes the answer; empty where only a run on ranks shows it.
        value: of ``run``.
    """

    name: str
    concept: str
    notebook: str
    section: str
    asks: str
    correct: str
    output: str
    wrong: tuple[Wrong, ...]
    run: str = ""
    value: Any = None

    @property
    def options(self) -> tuple[str, ...]:
        """All answers, in an order that is the same for everybody and says nothing."""
        return tuple(sorted((self.correct, *(wrong.says for wrong in self.wrong)), key=self._place))

    def _place(self, option: str) -> bytes:
        return hashlib.sha256(f"{self.name}: {option}".encode()).digest()

    def explain(self, answer: str | None) -> str:
        """Say what is right, why ``answer`` is not, and where to read; None is no answer."""
        where = f"Notebook {self.notebook}, section {self.section!r}, prints: {self.output}"
        if answer == self.correct:
            return f"Right: {self.correct}. {where}"
        because = next((f" Not {wrong.says!r}: {wrong.because}." for wrong in self.wrong if wrong.says == answer), "")
        return f"{self.correct} is right.{because} {where}"


@cache
def questions() -> tuple[Question, ...]:
    """All questions, in the order of the notebooks."""
    text = files(__package__).joinpath("questions.toml").read_text(encoding="utf-8")
    return tuple(
        Question(**{**entry, "wrong": tuple(Wrong(**wrong) for wrong in entry["wrong"])})
        for entry in tomllib.loads(text)["question"]
    )


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


class WrongAnswers(Told, ValueError):
    """The letters do not fit the questions."""


@checked
@dataclass(frozen=True)
class Quiz(Shown):
    """The questions and what was answered.

    Attributes:
        when: ``"before"`` the course or ``"after"`` it.
        notebook: the number of the only notebook asked about; empty for all.
        given: the answers so far, by name of question.
        earlier: those given before the course; for the gain.
        note: if answers could not be read or kept.
    """

    when: str
    notebook: str = ""
    given: tuple[tuple[str, str], ...] = ()
    earlier: tuple[tuple[str, str], ...] = ()
    note: str = ""

    @property
    def asked(self) -> tuple[Question, ...]:
        """The questions, in order."""
        return tuple(question for question in questions() if self.notebook in ("", question.notebook))

    @property
    def summary(self) -> str:
        """How many are answered; after the course how many are right, and what was gained."""
        answered = sum(question.name in dict(self.given) for question in self.asked)
        text = f"{answered} of {len(self.asked)} answered"
        if self.when == "before":
            return f'{text}. What is right is shown after the course: quiz("after").'
        right = count_right(self.asked, self.given)
        if not self.earlier:
            return f"{text}, {right} right."
        return f"{text}, {right} right; before the course it was {count_right(self.asked, self.earlier)}."

    @property
    def text(self) -> str:
        """All of it as plain text: the questions, or what is right once all are answered after the course."""
        given = dict(self.given)
        if self.when == "after" and all(question.name in given for question in self.asked):
            explained = [f"{i}. {q.asks}\n   {q.explain(given[q.name])}" for i, q in enumerate(self.asked, 1)]
            return "\n".join(filter(None, [*explained, self.summary, self.note]))
        only = f', notebook="{self.notebook}"' if self.notebook else ""
        how = (
            f'Answer with quiz("{self.when}", "…"{only}): a letter for each of the {len(self.asked)} questions, '
            f"{NO_ANSWER} where you do not know."
        )
        lines = [how, *(_as_text(number, question, given) for number, question in enumerate(self.asked, 1))]
        return "\n".join(filter(None, [*lines, self.summary, self.note]))

    def __repr__(self) -> str:
        return self.text

    def panel(self) -> Panel:
        """The questions one at a time, with buttons. Raises ModuleNotFoundError without ipywidgets."""
        from course_pp.exercises.panel import Panel

        return Panel(self)

    @checked
    def answer(self, question: Question, option: str | None) -> Quiz:
        """Keep an answer, None for *I do not know*; return the quiz with it."""
        given = {**dict(self.given), question.name: option or NO_ANSWER}
        note = keep_answers(_time(self.when), {question.name: given[question.name]})
        return replace(self, given=tuple(given.items()), note=note)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        bundle: dict[str, Any] = {"text/plain": self.text}
        if shows_widgets():
            bundle |= self.panel().bundle()
        return bundle


@checked
def quiz(when: str, answers: str | None = None, notebook: str | None = None) -> Quiz:
    """Ask thirty questions on pipeline parallelism: the same before and after the course.

    With ipywidgets they come one at a time, by keyboard or mouse, and each answer is kept at once. Without, they are
    printed, and a second call takes the answers as letters.

    Args:
        when: ``"before"`` or ``"after"`` the course. Only after it is shown what is right, and why.
        answers: a letter for each question, ``-`` for *I do not know*: ``"ab-c"``.
        notebook: ask only what this one teaches: ``"03"``.

    Raises:
        ValueError: ``when`` is neither, no question is about ``notebook``, or the letters do not fit the questions.
    """
    time = _time(when)
    taught = sorted({question.notebook for question in questions()})
    if notebook is not None and notebook not in taught:
        raise ValueError(f"notebook is {notebook!r}; there are questions about {', '.join(taught)}")
    kept, note = read_answers()
    made = Quiz(when, notebook or "", tuple(kept[time].items()), tuple(kept["before"].items()), note)
    if answers is not None:
        chosen = _read(made.asked, answers)
        note = keep_answers(time, chosen)
        made = replace(made, given=tuple({**dict(made.given), **chosen}.items()), note=note)
    return made.show()


def count_right(asked: Sequence[Question], given: tuple[tuple[str, str], ...]) -> int:
    """How many of the questions are answered rightly."""
    answers = dict(given)
    return sum(answers.get(question.name) == question.correct for question in asked)


def _time(when: str) -> When:
    for time in TIMES:
        if time == when:
            return time
    raise ValueError(f"when is {when!r}; it must be 'before' or 'after'")


def _read(asked: Sequence[Question], letters: str) -> dict[str, str]:
    letters = "".join(letters.lower().split())
    if len(letters) != len(asked):
        raise WrongAnswers(
            f"answers has {len(letters)} letters for {len(asked)} questions: give one for each, or - "
            "(notebook= asks only about one notebook)"
        )
    chosen = {}
    for number, (question, letter) in enumerate(zip(asked, letters, strict=True), 1):
        known = _LETTERS[: len(question.options)]
        if letter == NO_ANSWER:
            chosen[question.name] = NO_ANSWER
        elif letter in known:
            chosen[question.name] = question.options[known.index(letter)]
        else:
            raise WrongAnswers(f"answers has {letter!r} for question {number}: give one of {', '.join(known)}, or -")
    return chosen


def _as_text(number: int, question: Question, given: dict[str, str]) -> str:
    options = [
        f"   {letter}) {option}" + (" (your answer)" if given.get(question.name) == option else "")
        for letter, option in zip(_LETTERS, question.options, strict=False)
    ]
    return "\n".join([f"{number}. {question.asks}", *options])
