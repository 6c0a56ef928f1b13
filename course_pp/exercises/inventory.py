"""The inventory: thirty questions before and after the course."""

from __future__ import annotations

import hashlib
import json
import string
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from course_pp.arguments import WrongArgument, check_arguments, checked
from course_pp.exercises.display import Shown, Told, shows_widgets
from course_pp.exercises.progress import STORE, Kept, When

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
        NoQuiz: a name is neither a route nor a notebook with questions.
    """
    routes, notebooks = _data()["routes"], {question.notebook for question in questions()}
    for name in about:
        if name not in routes and name not in notebooks:
            raise NoQuiz(f"about is {name!r}; there are {', '.join([*routes, *sorted(notebooks)])}")
    named = {*about, *(name for route in about for name in routes.get(route, ()))}
    return tuple(each for each in questions() if not about or {each.name, each.notebook} & named)


class NoQuiz(Told, ValueError):
    """There are no such questions, or the answers do not fit them."""


@checked
@dataclass(frozen=True)
class Quiz(Shown):
    """The questions and what was answered.

    Attributes:
        when: ``"before"`` the course or ``"after"`` it.
        about: routes and numbers of notebooks that are asked about; empty for everything.
        kept: the answers so far, before the course and after it.
        note: if answers could not be read or kept, or do not count.
    """

    when: When
    about: tuple[str, ...] = ()
    kept: Kept = field(default_factory=Kept)
    note: str = ""

    @property
    def asked(self) -> tuple[Question, ...]:
        """The questions, in order."""
        return questions_about(self.about)

    @property
    def given(self) -> Mapping[str, str]:
        """The answers so far, by name of question."""
        return self.kept.quiz[self.when]

    def is_closed(self, question: Question) -> bool:
        """Whether no answer to it counts any more: what is right has been told."""
        return question.name in self.kept.quiz["after"]

    @property
    def summary(self) -> str:
        """How many are answered; after the course how many are right, and what was gained."""
        answered = sum(question.name in self.given for question in self.asked)
        text = f"{answered} of {len(self.asked)} answered"
        if self.when == "before":
            return f"{text}. What is right is shown after the course: {self._call('after')}."
        right, earlier = (count_right(self.asked, self.kept.quiz[when]) for when in ("after", "before"))
        if not self.kept.quiz["before"]:
            return f"{text}, {right} right."
        return f"{text}, {right} right; before the course it was {earlier}."

    @property
    def text(self) -> str:
        """All of it as plain text: the questions, or what is right once all are answered after the course."""
        if self.when == "after" and all(question.name in self.given for question in self.asked):
            explained = [f"{i}. {q.asks}\n   {q.explain(self.given[q.name])}" for i, q in enumerate(self.asked, 1)]
            return "\n".join(filter(None, [*explained, self.summary, self.note]))
        how = (
            f"Answer with {self._call(self.when, '…')}: a letter for each of the {len(self.asked)} questions, "
            f"{NO_ANSWER} where you do not know."
        )
        lines = [how, *(_as_text(number, question, self.given) for number, question in enumerate(self.asked, 1))]
        return "\n".join(filter(None, [*lines, self.summary, self.note]))

    def _call(self, *arguments: str) -> str:
        """What a learner types for the same questions: ``quiz("after", about="a_day")``."""
        words = [f'"{argument}"' for argument in arguments]
        if self.about:
            words.append(f"about={json.dumps(self.about[0] if len(self.about) == 1 else self.about)}")
        return f"quiz({', '.join(words)})"

    def __repr__(self) -> str:
        return self.text

    def panel(self) -> Panel:
        """The questions one at a time, with buttons. Raises ModuleNotFoundError without ipywidgets."""
        from course_pp.exercises.panel import Panel

        return Panel(self)

    @checked
    def answer(self, question: Question, option: str | None) -> Quiz:
        """Keep an answer, None for *I do not know*; return the quiz as it is then kept."""
        return _answered(self.when, self.about, {question.name: option or NO_ANSWER})

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        bundle: dict[str, Any] = {"text/plain": self.text}
        if shows_widgets():
            bundle |= self.panel().bundle()
        return bundle


def quiz(
    when: When = None,  # type: ignore[assignment]  # refused below: a missing argument would be a traceback
    answers: str | None = None,
    about: str | Sequence[str] = (),
) -> Quiz:
    """Ask thirty questions on pipeline parallelism: the same before and after the course.

    With ipywidgets they come one at a time, by keyboard or mouse, and each answer is kept at once. Without, they are
    printed, and a second call takes the answers as letters. After the course the first answer to a question counts.
    Before it, an answer may be changed until the question is answered after it.

    Args:
        when: ``"before"`` or ``"after"`` the course. Only after it is shown what is right, and why.
        answers: a letter for each question, ``-`` for *I do not know*: ``"ab-c"``.
        about: ask only what these routes or notebooks teach: ``"a_day"``, ``"03"``, ``["02", "03"]``.

    Raises:
        NoQuiz: ``when`` is neither, a name in ``about`` is unknown, or the letters do not fit the questions.
    """
    try:
        check_arguments(quiz, locals())
    except WrongArgument as error:
        raise NoQuiz(str(error)) from None
    about = (about,) if isinstance(about, str) else tuple(about)
    asked = questions_about(about)
    return _answered(when, about, {} if answers is None else _read(asked, answers)).show()


def _answered(when: When, about: tuple[str, ...], given: Mapping[str, str]) -> Quiz:
    """Keep answers, by name of question; return the quiz as it is then kept, with a note on what does not count."""
    unkept = STORE.record_answers(when, given) if given else ""
    kept, unread = STORE.read()
    late = [
        str(number)
        for number, question in enumerate(questions_about(about), 1)
        if question.name in given and kept.quiz[when].get(question.name) != given[question.name]
    ]
    note = f"Not counted, as you had been told what is right: the answer to {', '.join(late)}." if late else ""
    return Quiz(when, about, kept, " ".join(filter(None, [note, unkept or unread])))


def count_right(asked: Sequence[Question], given: Mapping[str, str]) -> int:
    """How many of the questions are answered rightly."""
    return sum(given.get(question.name) == question.correct for question in asked)


def _read(asked: Sequence[Question], letters: str) -> dict[str, str]:
    letters = "".join(letters.lower().split())
    if len(letters) != len(asked):
        raise NoQuiz(
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
            raise NoQuiz(f"answers has {letter!r} for question {number}: give one of {', '.join(known)}, or -")
    return chosen


def _as_text(number: int, question: Question, given: Mapping[str, str]) -> str:
    options = [
        f"   {letter}) {option}" + (" (your answer)" if given.get(question.name) == option else "")
        for letter, option in zip(_LETTERS, question.options, strict=False)
    ]
    return "\n".join([f"{number}. {question.asks}", *options])
