"""The thirty questions: what each asks, what is right and where that is shown, what is often guessed instead."""

from __future__ import annotations

import hashlib
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

__all__ = ["Question", "Wrong", "questions"]


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
