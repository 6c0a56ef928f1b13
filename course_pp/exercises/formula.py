"""One grader for every exercise whose answer is a number, a choice, or a list of either; and solutions with a flaw."""

from __future__ import annotations
import __future__

import inspect
import linecache
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

from course_pp.exercises.answer import Answer, written_call
from course_pp.exercises.expect import close, expect_number
from course_pp.exercises.mistakes import Cause, Mistake, why

__all__ = ["Formula", "alike", "flawed"]

Case = tuple[Any, ...]


class Formula:
    """A grader: in every case the answer has to give what ``solution`` gives.

    A wrong answer is told the cause of the first formula in ``wrongs`` that gives what it gives in
    every case; else of the first that does so wherever the answer is wrong, if that is twice or
    more and these are numbers or lists.

    Args:
        solution: the right formula.
        cases: its arguments, one row a call; or what makes them, where that takes time.
        wrongs: what people write instead, each with its cause last: a formula, or for one or more
            texts in the source of ``solution`` what stands in their place. One that raises is no
            match.
        otherwise: the cause of any other wrong answer.
        read: ``read(value, call)`` returns a value to be compared, and raises `Mistake` for one of
            another kind.
        call: how a message writes a call; as it would be typed unless given.
        example: a counter-example, made as a cause is.
        same: ``same(got, right)`` says whether a value is right; equal but for rounding unless
            given.
    """

    def __init__(
        self,
        solution: Callable[..., Any],
        cases: Iterable[Case] | Callable[[], Iterable[Case]],
        wrongs: Iterable[tuple[Any, ...]] = (),
        otherwise: Cause = "",
        *,
        read: Callable[[Any, str], Any] = expect_number,
        call: Callable[..., str] | None = None,
        example: Cause = "",
        same: Callable[[Any, Any], bool] | None = None,
    ) -> None:
        self.solution, self._cases, self.otherwise = solution, cases, otherwise
        self.wrongs: list[tuple[Callable[..., Any], Cause]] = [
            (what[0] if callable(what[0]) else flawed(solution, *what), cause)
            for *what, cause in wrongs
        ]
        self._read, self._call, self._example, self._same = read, call, example, same or alike

    @cached_property
    def cases(self) -> list[Case]:
        """The arguments of each call."""
        return list(self._cases() if callable(self._cases) else self._cases)

    def __call__(self, answer: Answer) -> None:
        written = f"{answer.name}(…)" if self._call else None
        self.judge(answer.name, answer.calls(self.cases, written))

    def judge(self, name: str, values: Sequence[Any]) -> None:
        """Refuse what the answer called ``name`` has given in each case, unless it is right."""
        calls = [
            self._call(*case) if self._call else written_call(name, *case) for case in self.cases
        ]
        got = [self._read(value, call) for value, call in zip(values, calls, strict=True)]
        right = [self.solution(*case) for case in self.cases]
        missed = [i for i, pair in enumerate(zip(got, right, strict=True)) if not self._same(*pair)]
        if not missed:
            return
        i = missed[0]
        # Of the few values that a choice has, two alike mean little.
        several = len(missed) > 1 and all(_says_much(got[each]) for each in missed)
        about = self.cases[i], got[i], right[i]
        cause = self._explained(got, range(len(got)))
        if not cause and _are_rounded(
            [got[each] for each in missed], [right[each] for each in missed]
        ):
            cause = "It is rounded: return the number as it is computed."
        if not cause and several:
            cause = self._explained(got, missed)
        raise Mistake(
            f"`{calls[i]}` is {_shown(got[i])}, not {_shown(right[i])}.",
            why(cause or self.otherwise, *about),
            why(self._example, *about),
        )

    def _explained(self, got: Sequence[Any], where: Iterable[int]) -> Cause:
        cases = [(self.cases[i], got[i]) for i in where]
        return next(
            (
                cause
                for formula, cause in self.wrongs
                if all(self._gives(formula, *each) for each in cases)
            ),
            "",
        )

    def _gives(self, formula: Callable[..., Any], case: Case, value: Any) -> bool:
        try:
            return self._same(value, formula(*case))
        except Exception:
            return False


def flawed(solution: Callable[..., Any], *changes: tuple[str, str]) -> Callable[..., Any]:
    """Return the solution with a flaw: in its source each text is replaced by the other.

    Raises:
        ValueError: a text does not occur exactly once.
    """
    source = textwrap.dedent(inspect.getsource(solution))
    for right, wrong in changes:
        if source.count(right) != 1:
            raise ValueError(
                f"{right!r} occurs {source.count(right)} times in the source of {solution.__name__}"
            )
        source = source.replace(right, wrong)
    # Named as a cell, so that a hang is told at its own line.
    file = f"<ipython-input-flawed-{solution.__name__}-{abs(hash(source))}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    names = dict(vars(sys.modules[solution.__module__]))
    exec(compile(source, file, "exec", flags=__future__.annotations.compiler_flag), names)
    found: Callable[..., Any] = names[solution.__name__]
    return found


def alike(a: Any, b: Any) -> bool:
    """Whether two values, or lists of values, are equal but for rounding."""
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(alike, a, b))
    if isinstance(a, float) or isinstance(b, float):
        return isinstance(a, int | float) and isinstance(b, int | float) and close(a, b)
    return bool(a == b)


def _says_much(value: Any) -> bool:
    """Whether two formulas hardly give this value by chance: a number, a list, or a tuple with one of its own."""
    if isinstance(value, tuple):
        return any(isinstance(entry, list | float) for entry in value)
    return type(value) in (int, float, list)


def _are_rounded(got: Sequence[Any], right: Sequence[Any]) -> bool:
    """Whether the values are the right ones, all rounded to the same number of digits after the point."""
    pairs = [*zip(_floats(list(got)), _floats(list(right)), strict=False)]
    if not pairs or _shape(list(got)) != _shape(list(right)):
        return False
    return any(all(close(a, round(b, digits)) for a, b in pairs) for digits in range(1, 7))


def _floats(value: Any) -> list[float]:
    if isinstance(value, list | tuple):
        return [number for entry in value for number in _floats(entry)]
    return [value] if isinstance(value, float) else []


def _shape(value: Any) -> Any:
    """The value without its floats: what has to be equal beside them."""
    if isinstance(value, list | tuple):
        return [_shape(entry) for entry in value]
    return None if isinstance(value, float) else value


def _shown(value: Any, inside: bool = False) -> str:
    """Write a value for a message. A thousand has a comma unless it stands inside a list, which has its own."""
    if isinstance(value, list | tuple):
        entries = ", ".join(_shown(entry, inside=True) for entry in value)
        return f"[{entries}]" if isinstance(value, list) else f"({entries})"
    comma = "" if inside else ","
    if isinstance(value, float):
        return f"{value:{comma}.7g}"
    return f"{value:{comma}}" if type(value) is int else f"{value!r:.80}"
