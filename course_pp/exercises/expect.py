"""Checks of a value before a grader judges it: its type, its length, whether it is a number.

Each function returns the value in its plain form and raises `Mistake` for a value of the wrong
kind. ``what`` names the value for the learner, as a rule by its call: ``"bubble(4, 8)"``.
"""

from __future__ import annotations

import math
import numbers
import reprlib
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

from course_pp.exercises.mistakes import Mistake

if TYPE_CHECKING:
    import torch


def close(got: float, want: float, rel_tol: float = 1e-6) -> bool:
    """Whether two numbers are the same but for rounding, float32's included."""
    return math.isclose(got, want, rel_tol=rel_tol, abs_tol=1e-12)


_A_FLOAT = "`/` makes a float even where nothing is left over; `//` keeps whole numbers whole."
_NOT_WHOLE = "Is it in the place of another number? Or is it divided, where `//` should round down?"


def expect_number(value: Any, what: str) -> float:
    """Return a finite real number, from whatever library it comes."""
    plain = _scalar(value)
    if isinstance(plain, bool) or not isinstance(plain, numbers.Real):
        raise _wrong_kind(value, what, "a number")
    try:
        number = float(plain)
    except OverflowError:
        raise Mistake(
            f"`{what}` is beyond every float.", "Look for a power, or for a loop that multiplies."
        ) from None
    if not math.isfinite(number):
        cause = "Look for a division by zero, or for a difference of two infinities."
        raise Mistake(f"`{what}` is {number}.", cause)
    return number


def expect_int(value: Any, what: str, remedy: str = "") -> int:
    """Return a whole number; refuse 3.0, which can be no index and no count.

    ``remedy`` is the likely cause of a float.
    """
    plain = _scalar(value)
    if isinstance(plain, float) and math.isfinite(plain):
        cause = remedy or (_A_FLOAT if plain.is_integer() else _NOT_WHOLE)
        symptom = f"`{what}` is {plain:.6g}, a float; a whole number (`int`) is asked for."
        raise Mistake(symptom, cause)
    if isinstance(plain, bool) or not isinstance(plain, numbers.Integral):
        raise _wrong_kind(value, what, "a whole number")
    return int(plain)


def expect_list(value: Any, what: str, length: int | None = None, remedy: str = "") -> list[Any]:
    """Return a sequence, an array or a tensor as a list.

    Args:
        value: value of the answer.
        what: name of the value.
        length: number of entries it must have; any if None.
        remedy: sentence on the entries that the list should hold.
    """
    if hasattr(value, "tolist") and getattr(value, "ndim", None):
        entries = value.tolist()
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        entries = list(value)
    else:
        raise _wrong_kind(value, what, "a list", remedy)
    if length is not None and len(entries) != length:
        has = "1 entry" if len(entries) == 1 else f"{len(entries)} entries"
        raise Mistake(f"`{what}` has {has}, not {length}.", remedy, f"It is {_shown(value)}.")
    return entries


def expect_dict(value: Any, what: str, keys: Sequence[Any] | None = None) -> dict[Any, Any]:
    """Return a dictionary; refuse other keys than ``keys``, unless that is None."""
    if not isinstance(value, dict):
        raise _wrong_kind(value, what, "a dictionary")
    if keys is not None:
        missing = [key for key in keys if key not in value]
        extra = [key for key in value if key not in keys]
        if missing or extra:
            lacks = f"lacks {_shown(missing)}" if missing else ""
            has = f"has {_shown(extra)} too many" if extra else ""
            raise Mistake(f"`{what}` {' and '.join(filter(None, (lacks, has)))}.")
    return value


def expect_tensor(
    value: Any, what: str, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return a tensor; refuse another shape or dtype than these, unless they are None."""
    import torch

    if not isinstance(value, torch.Tensor):
        raise _wrong_kind(value, what, "a tensor")
    if shape is not None and tuple(value.shape) != tuple(shape):
        raise Mistake(f"`{what}` has shape {tuple(value.shape)}, not {tuple(shape)}.")
    if dtype is not None and value.dtype != dtype:
        raise Mistake(f"`{what}` has dtype {value.dtype}, not {dtype}.")
    return value


def _scalar(value: Any) -> Any:
    """Return the only number of a tensor or an array, and any other value as it is."""
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        try:
            return value.item()
        except Exception:
            return value
    return value


def _wrong_kind(value: Any, what: str, asked_for: str, remedy: str = "") -> Mistake:
    if value is None:
        # A name that ends in a bracket is an entry of a value, so a value was returned.
        cause = "This place was never filled." if what.endswith("]") else "Is a `return` missing?"
        return Mistake(f"`{what}` is None; {asked_for} is asked for.", cause)
    name = "complex number" if isinstance(value, complex) else type(value).__name__
    article = "an" if name[0].lower() in "aeiou" else "a"
    symptom = f"`{what}` is {article} {name}; {asked_for} is asked for."
    return Mistake(symptom, remedy or _why_wrong_kind(value, asked_for), f"It is {_shown(value)}.")


def _why_wrong_kind(value: Any, asked_for: str) -> str:
    if asked_for == "a tensor":
        return "Return one tensor, and nothing beside it."
    if asked_for == "a list":
        if isinstance(value, Mapping):
            return "Take its `.values()` or its `.items()`, and make a list of them: `list(…)`."
        if isinstance(value, Set):
            return "A set has no order: `sorted(…)` makes a list of it."
        if isinstance(value, Iterable) and not isinstance(value, str | bytes):
            return "Make a list of it: `list(…)`."
    if isinstance(value, str):
        return "Return the number itself, without a text around it."
    if getattr(value, "ndim", 0) or isinstance(value, list | tuple):
        return "One number belongs there, and this has several, or one inside a list."
    return ""


def _shown(value: Any) -> str:
    try:
        return " ".join(reprlib.repr(value).split())
    except Exception:
        return f"something of type {type(value).__name__} that cannot be printed"
