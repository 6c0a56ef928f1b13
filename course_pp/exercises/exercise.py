"""What an exercise is, and what a grader raises when an answer is wrong."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from course_pp.arguments import checked, refuse_bad_timeout

if TYPE_CHECKING:
    from course_pp.exercises.answer import Answer
    from course_pp.launch import Wait


class Mistake(Exception):
    """An answer is wrong. Names are put in backticks; an example may have several lines.

    Attributes:
        symptom: what was seen, a sentence.
        cause: what probably leads to it, and what to look at.
        example: a counter-example: input, what came out, what should have.
    """

    def __init__(self, symptom: str, cause: str = "", example: str = "") -> None:
        super().__init__(symptom, cause, example)
        self.symptom = symptom
        self.cause = cause
        self.example = example

    def __str__(self) -> str:
        return " ".join(filter(None, (self.symptom, self.cause, self.example)))


class Stopped(Mistake):
    """An answer did not come back with a value.

    Attributes:
        how: ``"raised"``, ``"endless"`` (still running at the time limit), ``"exited"``, ``"died"``, ``"changed"`` (an
            argument), ``"unsendable"`` (its result), ``"parameters"`` (others than the stub's) or ``"broken"``.
        row: which of several calls it was, from 0; 0 on ranks.
        waits: what each rank was doing at the time limit; empty unless it was reached.
        error: the name of the class of the exception; empty where none was raised.
    """

    def __init__(
        self,
        how: str,
        symptom: str,
        cause: str = "",
        example: str = "",
        *,
        row: int = 0,
        waits: tuple[Wait, ...] = (),
        error: str = "",
    ) -> None:
        super().__init__(symptom, cause, example)
        self.how = how
        self.row = row
        self.waits = waits
        self.error = error


@checked
@dataclass(frozen=True)
class Exercise:
    """A function that the learner completes.

    Attributes:
        name: of the function.
        notebook: the number at the beginning of the notebook's name, ``"02"``.
        title: what is to be done, a few words.
        difficulty: 1 to 3.
        minutes: how long it takes someone who has read the notebook so far.
        hints: one step each; the last all but says it.
        solution: of the same name; runs in the notebook as its source stands here.
        grade: returns if the answer is right and raises `Mistake` if not.
        limit_s: seconds that one call of the answer may take.
    """

    name: str
    notebook: str
    title: str
    difficulty: int
    minutes: int
    hints: tuple[str, ...]
    solution: Callable[..., Any]
    grade: Callable[[Answer], None]
    limit_s: float = 5.0

    def __post_init__(self) -> None:
        if self.solution.__name__ != self.name:
            raise ValueError(
                f"the solution of exercise {self.name!r} is named {self.solution.__name__!r}: its source replaces the "
                "stub, so give it the exercise's name"
            )
        refuse_bad_timeout("Exercise", self.limit_s, "limit_s")
        if self.difficulty not in (1, 2, 3):
            raise ValueError(f"exercise {self.name!r} has difficulty {self.difficulty!r}; it is 1, 2 or 3")
        if self.minutes < 1:
            raise ValueError(f"exercise {self.name!r} takes {self.minutes!r} minutes; give at least 1")
        if not self.hints:
            raise ValueError(f"exercise {self.name!r} has no hints: give at least one")

    @property
    def stars(self) -> str:
        """The difficulty as the notebooks show it: ``★★☆``."""
        return "★" * self.difficulty + "☆" * (3 - self.difficulty)

    @property
    def source(self) -> str:
        """The solution's source as it can be pasted over the stub: annotations need names a notebook may not have."""
        return _without_annotations(textwrap.dedent(inspect.getsource(self.solution)).rstrip())


def _without_annotations(source: str) -> str:
    # By position, because ast.unparse would drop the comments.
    spans = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.arg) and node.annotation is not None:
            spans.append((node.lineno, node.col_offset + len(node.arg.encode()), node.annotation))
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            spans.append((node.target.end_lineno or 0, node.target.end_col_offset or 0, node.annotation))
        elif isinstance(node, ast.FunctionDef) and node.returns is not None:
            line = source.splitlines()[node.returns.lineno - 1].encode()
            spans.append((node.returns.lineno, line[: node.returns.col_offset].rindex(b")") + 1, node.returns))
    lines = [line.encode() for line in source.splitlines()]
    for number, begin, annotation in sorted(spans, key=lambda span: span[:2], reverse=True):
        text = lines[number - 1]
        lines[number - 1] = text[:begin] + text[annotation.end_col_offset :]
    return re.sub(r" +# type: ignore.*", "", b"\n".join(lines).decode())
