"""The inventory: thirty questions before and after the course."""

from __future__ import annotations

import hashlib
import string
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from course_pp.arguments import checked
from course_pp.exercises.display import Shown, Told, shows_widgets
from course_pp.exercises.progress import STORE, When

if TYPE_CHECKING:
    from course_pp.exercises.panel import Panel

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
def _data() -> dict[str, Any]:
    return tomllib.loads(files(__package__).joinpath("questions.toml").read_text(encoding="utf-8"))


@cache
def questions() -> tuple[Question, ...]:
    """All questions, in the order of the notebooks."""
    return tuple(
        Question(**{**entry, "wrong": tuple(Wrong(**wrong) for wrong in entry["wrong"])})
        for entry in _data()["question"]
    )


def questions_about(about: Sequence[str]) -> tuple[Question, ...]:
    """Return the questions that some routes and notebooks answer, such as ``["a_day", "10"]``; of none, all.

    Raises:
        ValueError: a name is neither a route nor a notebook with questions.
    """
    routes, notebooks = _data()["routes"], {question.notebook for question in questions()}
    for name in about:
        if name not in routes and name not in notebooks:
            raise ValueError(f"about is {name!r}; there are {', '.join([*routes, *sorted(notebooks)])}")
    named = {name for route in about for name in routes.get(route, ())}
    return tuple(each for each in questions() if not about or each.name in named or each.notebook in about)


class WrongAnswers(Told, ValueError):
    """The letters do not fit the questions."""


@checked
@dataclass(frozen=True)
class Quiz(Shown):
    """The questions and what was answered.

    Attributes:
        when: ``"before"`` the course or ``"after"`` it.
        about: routes and numbers of notebooks that are asked about; empty for everything.
        given: the answers so far, by name of question.
        earlier: those given before the course; for the gain.
        note: if answers could not be read or kept.
    """

    when: When
    about: tuple[str, ...] = ()
    given: tuple[tuple[str, str], ...] = ()
    earlier: tuple[tuple[str, str], ...] = ()
    note: str = ""

    @property
    def asked(self) -> tuple[Question, ...]:
        """The questions, in order."""
        return questions_about(self.about)

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
        only = f", about={list(self.about)}" if self.about else ""
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
        note = STORE.record_answers(self.when, {question.name: given[question.name]})
        return replace(self, given=tuple(given.items()), note=note)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        bundle: dict[str, Any] = {"text/plain": self.text}
        if shows_widgets():
            bundle |= self.panel().bundle()
        return bundle


@checked
def quiz(when: When, answers: str | None = None, about: str | Sequence[str] = ()) -> Quiz:
    """Ask thirty questions on pipeline parallelism: the same before and after the course.

    With ipywidgets they come one at a time, by keyboard or mouse, and each answer is kept at once. Without, they are
    printed, and a second call takes the answers as letters.

    Args:
        when: ``"before"`` or ``"after"`` the course. Only after it is shown what is right, and why.
        answers: a letter for each question, ``-`` for *I do not know*: ``"ab-c"``.
        about: ask only what these routes or notebooks teach: ``"a_day"``, ``"03"``, ``["02", "03"]``.

    Raises:
        ValueError: ``when`` is neither, a name in ``about`` is unknown, or the letters do not fit the questions.
    """
    about = (about,) if isinstance(about, str) else tuple(about)
    asked = questions_about(about)
    unkept = "" if answers is None else STORE.record_answers(when, _read(asked, answers))
    kept, unread = STORE.read()
    given, earlier = (tuple(kept.quiz[each].items()) for each in (when, "before"))
    return Quiz(when, about, given, earlier, unkept or unread).show()


def count_right(asked: Sequence[Question], given: tuple[tuple[str, str], ...]) -> int:
    """How many of the questions are answered rightly."""
    answers = dict(given)
    return sum(answers.get(question.name) == question.correct for question in asked)


def _read(asked: Sequence[Question], letters: str) -> dict[str, str]:
    letters = "".join(letters.lower().split())
    if len(letters) != len(asked):
        raise WrongAnswers(
            f"answers has {len(letters)} letters for {len(asked)} questions: give one for each, or - "
            "(about= asks only about some notebooks)"
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
