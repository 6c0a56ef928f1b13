"""``quiz("before")`` and ``quiz("after")``: the thirty questions in a notebook, with buttons or as plain text."""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from course_pp.arguments import checked
from course_pp.exercises.display import Shown, Told, shows_widgets
from course_pp.exercises.inventory.answers import TIMES, When, keep_answers, read_answers
from course_pp.exercises.inventory.questions import Question, questions

if TYPE_CHECKING:
    from course_pp.exercises.inventory.panel import Panel

__all__ = ["Quiz", "WrongAnswers", "quiz"]

_LETTERS = string.ascii_lowercase
NO_ANSWER = "-"


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
        from course_pp.exercises.inventory.panel import Panel

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
