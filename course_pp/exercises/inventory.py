"""The inventory: thirty questions before and after the course."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from course_pp.exercises.display import MessageOnly


@dataclass(frozen=True)
class Wrong:
    """A common wrong guess.

    Attributes:
        says: the answer.
        because: reason why it is wrong.
        quote: sentence or output of the notebook that refutes it.
    """

    says: str
    because: str
    quote: str


@dataclass(frozen=True)
class Question:
    """One question of the inventory.

    Attributes:
        name: a short name, the same in every version.
        concept: its subject: "bubble", "memory", ...
        notebook, section: place where it is taught: "03", "4. When messages take time".
        asks: the question.
        correct: the right answer.
        output: output of a notebook's cell that shows the right answer.
        wrong: common guesses.
        run: an expression over the package that computes the answer; empty where only a run on
            ranks shows it.
        value: value of ``run``.
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
        """All answers, in an order that is the same for all and does not tell the right one."""
        answers = [self.correct, *(wrong.says for wrong in self.wrong)]
        return tuple(sorted(answers, key=self._place))

    def _place(self, option: str) -> bytes:
        return hashlib.sha256(f"{self.name}: {option}".encode()).digest()

    def explain(self, answer: str | None) -> str:
        """Return the right answer, why ``answer`` is wrong, and a place; None is no answer."""
        where = f"Notebook {self.notebook}, section {self.section!r}, prints: {self.output}"
        if answer == self.correct:
            return f"Right: {self.correct}. {where}"
        because = ""
        for wrong in self.wrong:
            if wrong.says == answer:
                because = f" Not {wrong.says!r}: {wrong.because}."
        return f"{self.correct} is right.{because} {where}"


@cache
def _data() -> dict[str, Any]:
    return tomllib.loads(files(__package__).joinpath("questions.toml").read_text(encoding="utf-8"))


@cache
def questions() -> tuple[Question, ...]:
    """Return all questions, in the order of the notebooks."""
    found = []
    for entry in _data()["question"]:
        wrong = tuple(Wrong(**each) for each in entry["wrong"])
        found.append(Question(**{**entry, "wrong": wrong}))
    return tuple(found)


def questions_about(about: Sequence[str]) -> tuple[Question, ...]:
    """Return the questions that some routes and notebooks answer, such as ``["a_day", "10"]``.

    Without any, return all questions.

    Raises:
        NoQuiz: a name is neither a route nor a notebook with questions.
    """
    routes = _data()["routes"]
    notebooks = {question.notebook for question in questions()}
    for name in about:
        if name not in routes and name not in notebooks:
            raise NoQuiz(f"about is {name!r}; there are {', '.join([*routes, *sorted(notebooks)])}")
    if not about:
        return questions()
    named = set(about)
    for route in about:
        named.update(routes.get(route, ()))
    return tuple(each for each in questions() if {each.name, each.notebook} & named)


class NoQuiz(MessageOnly, ValueError):
    """There are no such questions, or the answers do not fit them."""


def count_right(asked: Sequence[Question], given: Mapping[str, str]) -> int:
    """Return how many of the questions are answered rightly."""
    return sum(given.get(question.name) == question.correct for question in asked)
