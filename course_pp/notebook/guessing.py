"""A guess beside its measurement. As shipped, a guess is ``...``: it is the learner's to make."""

import math
from collections.abc import Mapping, Sequence, Set
from fractions import Fraction
from numbers import Real
from typing import Any

from course_pp.base.arguments import checked, described, shown
from course_pp.schedule import Timeline

# A guess this near counts as right: nobody guesses the third digit.
_NEAR = 0.05
_ZERO = 1e-12


@checked
def reveal(
    what: str,
    guess: object,
    measured: object,
    unit: str = "",
    how: str | Sequence[Timeline] = "measured",
) -> None:
    """Print what was measured beside the learner's guess, and how the two compare.

    Goes on without a guess, and with one that cannot be compared: the notebook must run to its end.

    Args:
        what: was measured: "bubble on 4 ranks".
        guess: ``...`` if there is none yet; else of the kind of ``measured``.
        measured: a number, text, a truth value, or several numbers in a sequence, a set or a
            mapping.
        unit: of the numbers: "ms".
        how: the value was found: "measured", "simulated" or "computed"; or the timelines from which
            it was made.
    """
    if not isinstance(how, str):
        how = "measured" if how and all(run.measured for run in how) else "simulated"
    print(f"{what}: {how} {_verdict(guess, measured, f' {unit}' if unit else '')}")


def _verdict(guess: object, measured: object, unit: str) -> str:
    seen = f"{_text(measured)}{unit}"
    if guess is ...:
        return f"{seen}; you have not guessed"
    if _kind(guess) != _kind(measured):
        return (
            f"{seen}; your guess {_told(guess)}, so it cannot be compared: give {_kind(measured)}"
        )
    return f"{seen}, guessed {_text(guess)}{unit}: {_comparison(guess, measured)}"


def _kind(value: object) -> str:
    kinds: tuple[tuple[type | tuple[type, ...], str], ...] = (
        (bool, "True or False"),
        (Real, "a number"),
        (complex, "a complex number"),
        (str, "text in quotes"),
        (Mapping, "a dict"),
        (Sequence, "a list, [a, …]"),
        (Set, "a set, {a, …}"),
    )
    return next((name for kind, name in kinds if isinstance(value, kind)), described(value))


def _told(guess: object) -> str:
    """Return a guess and its kind; once, where the kind is all that can be shown."""
    text, kind = shown(guess), _kind(guess)
    if guess is None or guess is True or guess is False:
        return f"is {text}"
    return f"is {kind}" if text == described(guess) else f"{text} is {kind}"


def _comparison(guess: object, measured: object) -> str:
    if _same(guess, measured):
        return "right"
    if isinstance(guess, Real) and isinstance(measured, Real) and not isinstance(guess, bool):
        ratio = _float(measured) / _float(guess) if guess else math.nan
        if math.isfinite(ratio) and ratio > 0:
            return f"off by a factor of {_text(max(ratio, 1 / ratio))}"
    return "not so"


def _same(guess: object, measured: object) -> bool:
    if isinstance(guess, Real) and isinstance(measured, Real) and not isinstance(guess, bool):
        # Zero may be measured as a rounding error; but a guess of 1e-12 where zero is measured is
        # another claim.
        return math.isclose(
            _float(guess), _float(measured), rel_tol=_NEAR, abs_tol=0 if guess else _ZERO
        )
    if isinstance(guess, Mapping) and isinstance(measured, Mapping):
        return guess.keys() == measured.keys() and all(
            _same(guess[key], measured[key]) for key in measured
        )
    if (
        isinstance(guess, Sequence)
        and isinstance(measured, Sequence)
        and not isinstance(guess, str)
    ):
        return len(guess) == len(measured) and all(map(_same, guess, measured))
    return guess == measured


def _float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _text(value: object, alone: bool = True) -> str:
    """Numbers to three digits, wherever they stand; commas between thousands only where none separates values."""
    comma = "," if alone else ""
    if isinstance(value, float | Fraction):
        number = _float(value)
        return f"{number:{comma}.0f}" if abs(number) >= 1000 else f"{number:.3g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:{comma}}" if value.bit_length() <= 64 else shown(value)
    if isinstance(value, Mapping):
        return (
            "{"
            + ", ".join(f"{_text(key, False)}: {_text(each, False)}" for key, each in value.items())
            + "}"
        )
    if isinstance(value, Set):
        return "{" + ", ".join(sorted(_text(each, False) for each in value)) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ", ".join(_text(each, False) for each in value) + "]"
    return str(value)
