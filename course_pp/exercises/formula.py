"""One grader for every exercise whose answer is a number, a choice, or a list of these.

Also solutions with a flaw: see `flawed`.
"""

from __future__ import annotations
import __future__

import inspect
import linecache
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from typing import Any

from course_pp.exercises.answer import Answer, written_call
from course_pp.exercises.expect import close, expect_number
from course_pp.exercises.mistakes import Cause, Mistake, why

__all__ = ["Formula", "alike", "flawed"]

Case = tuple[Any, ...]


class Formula:
    """A grader: in every case the answer has to give what ``solution`` gives.

    A wrong answer is compared with the known wrong formulas. The message gives the cause of the
    first formula that gives the answer's value in every case. If there is none, a formula counts
    that gives the answer's value in every case in which the answer is wrong, provided that there
    are two such cases or more, and that the values are numbers or lists.

    Args:
        solution: the right formula.
        cases: arguments of each call; or a function that returns them, where that takes time.
        wrongs: known wrong formulas, each with its cause last. A formula is a function, or one or
            more pairs (text in the source of ``solution``, text in its place). A formula that
            raises is no match.
        otherwise: likely cause of any other wrong answer. A function gets the case, the answer's
            value and the right one.
        read: ``read(value, call)`` returns a value to be compared, and raises `Mistake` for a value
            of another kind.
        call: ``call(*case)`` returns a call as a message writes it; as it would be typed if None.
        example: a counter-example. A function gets the same arguments as ``otherwise``.
        same: ``same(got, right)`` returns whether a value is right. If None, a value is right that
            is equal but for rounding.
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
        self.solution = solution
        self.otherwise = otherwise
        self.wrongs: list[tuple[Callable[..., Any], Cause]] = []
        for *what, cause in wrongs:
            formula = what[0] if callable(what[0]) else flawed(solution, *what)
            self.wrongs.append((formula, cause))
        self._cases = cases
        self._read = read
        self._call = call
        self._example = example
        self._same = same or alike

    @cached_property
    def cases(self) -> list[Case]:
        """The arguments of each call."""
        return list(self._cases() if callable(self._cases) else self._cases)

    def __call__(self, answer: Answer) -> None:
        written = f"{answer.name}(…)" if self._call else None
        self.judge(answer.name, answer.calls(self.cases, written))

    def judge(self, name: str, values: Sequence[Any]) -> None:
        """Refuse the values of the answer called ``name``, one a case, unless all are right."""
        write = self._call or partial(written_call, name)
        calls = [write(*case) for case in self.cases]
        got = [self._read(value, call) for value, call in zip(values, calls, strict=True)]
        right = [self.solution(*case) for case in self.cases]
        missed = [i for i, pair in enumerate(zip(got, right, strict=True)) if not self._same(*pair)]
        if not missed:
            return

        cause = self._explained(got, range(len(got)))
        wrong = [got[each] for each in missed]
        if not cause and _are_rounded(wrong, [right[each] for each in missed]):
            cause = "It is rounded: return the number as it is computed."
        # A choice has few values: two formulas often agree on them by chance.
        if not cause and len(missed) > 1 and all(map(_says_much, wrong)):
            cause = self._explained(got, missed)

        i = missed[0]
        about = self.cases[i], got[i], right[i]
        raise Mistake(
            f"`{calls[i]}` is {_shown(got[i])}, not {_shown(right[i])}.",
            why(cause or self.otherwise, *about),
            why(self._example, *about),
        )

    def _explained(self, got: Sequence[Any], where: Iterable[int]) -> Cause:
        """Return the cause of the first formula that gives these values; empty if none does."""
        cases = [(self.cases[i], got[i]) for i in where]
        for formula, cause in self.wrongs:
            if all(self._gives(formula, *each) for each in cases):
                return cause
        return ""

    def _gives(self, formula: Callable[..., Any], case: Case, value: Any) -> bool:
        try:
            return self._same(value, formula(*case))
        except Exception:
            # A wrong formula may divide by zero: then it is not what the answer computes.
            return False


def flawed(solution: Callable[..., Any], *changes: tuple[str, str]) -> Callable[..., Any]:
    """Return the solution with a flaw.

    Args:
        solution: a right function.
        changes: pairs (text in its source, text in its place).

    Raises:
        ValueError: a text does not occur exactly once.
    """
    source = textwrap.dedent(inspect.getsource(solution))
    for right, wrong in changes:
        if (count := source.count(right)) != 1:
            raise ValueError(f"{right!r} occurs {count} times in the source of {solution.__name__}")
        source = source.replace(right, wrong)
    # The file has the name of a cell, so that a message about a hang can name the line.
    file = f"<ipython-input-flawed-{solution.__name__}-{abs(hash(source))}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    # A copy: the flawed function must not replace the right one in its module.
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
    """Whether two formulas hardly give this value by chance.

    That holds for a number, a list, and a tuple with a list or a float in it.
    """
    if isinstance(value, tuple):
        return any(isinstance(entry, list | float) for entry in value)
    return type(value) in (int, float, list)


def _are_rounded(got: Sequence[Any], right: Sequence[Any]) -> bool:
    """Whether the values are the right ones, all rounded to the same number of decimals."""
    pairs = [*zip(_floats(list(got)), _floats(list(right)), strict=False)]
    if not pairs or _without_floats(list(got)) != _without_floats(list(right)):
        return False

    def agree(digits: int) -> bool:
        return all(close(a, round(b, digits)) for a, b in pairs)

    return any(map(agree, range(1, 7)))


def _floats(value: Any) -> list[float]:
    if isinstance(value, list | tuple):
        return [number for entry in value for number in _floats(entry)]
    return [value] if isinstance(value, float) else []


def _without_floats(value: Any) -> Any:
    """Return the value with None in place of each float."""
    if isinstance(value, list | tuple):
        return [_without_floats(entry) for entry in value]
    return None if isinstance(value, float) else value


def _shown(value: Any, inside: bool = False) -> str:
    """Return a value as a message writes it."""
    if isinstance(value, list | tuple):
        entries = ", ".join(_shown(entry, inside=True) for entry in value)
        return f"[{entries}]" if isinstance(value, list) else f"({entries})"
    # A thousand has a comma, but not beside the commas of a list.
    comma = "" if inside else ","
    if isinstance(value, float):
        return f"{value:{comma}.7g}"
    return f"{value:{comma}}" if type(value) is int else f"{value!r:.80}"
