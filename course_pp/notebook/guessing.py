"""A guess beside its measurement. A notebook comes with ``...`` where the learner is to guess."""

import math
from collections.abc import Mapping, Sequence, Set
from fractions import Fraction
from functools import partial
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
    """Print a measured value beside the learner's guess, and how the two compare.

    A missing guess raises nothing, nor does one that cannot be compared: the notebook must run to
    its end.

    Args:
        what: name of the value: "bubble on 4 ranks".
        guess: the learner's guess, of the kind of ``measured``; ``...`` if there is none yet.
        measured: a number, text, a truth value, or several numbers in a sequence, a set or a
            mapping.
        unit: unit of the numbers: "ms".
        how: source of the value: "measured", "simulated" or "computed", or the timelines from which
            it was made.
    """
    if not isinstance(how, str):
        how = "measured" if how and all(run.measured for run in how) else "simulated"
    after = f" {unit}" if unit else ""
    print(f"{what}: {how} {_verdict(guess, measured, after)}")


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
    """Return a guess and its kind; only the kind if the guess shows as nothing else."""
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
        # A measured zero may be a rounding error, so a guess of zero has some room. A guess of
        # 1e-12 where zero is measured is another claim.
        room = 0 if guess else _ZERO
        return math.isclose(_float(guess), _float(measured), rel_tol=_NEAR, abs_tol=room)
    if isinstance(guess, Mapping) and isinstance(measured, Mapping):
        if guess.keys() != measured.keys():
            return False
        return all(_same(guess[key], measured[key]) for key in measured)
    if isinstance(guess, str) or isinstance(measured, str):
        return guess == measured
    if isinstance(guess, Sequence) and isinstance(measured, Sequence):
        return len(guess) == len(measured) and all(map(_same, guess, measured))
    return guess == measured


def _float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _text(value: object, alone: bool = True) -> str:
    """Return the value as text; numbers have three digits, wherever they stand.

    Thousands have commas only if the number stands ``alone``: in a list a comma separates values.
    """
    comma = "," if alone else ""
    if isinstance(value, float | Fraction):
        number = _float(value)
        return f"{number:{comma}.0f}" if abs(number) >= 1000 else f"{number:.3g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:{comma}}" if value.bit_length() <= 64 else shown(value)
    part = partial(_text, alone=False)
    if isinstance(value, Mapping):
        pairs = [f"{part(key)}: {part(each)}" for key, each in value.items()]
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, Set):
        return "{" + ", ".join(sorted(map(part, value))) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ", ".join(map(part, value)) + "]"
    return str(value)
