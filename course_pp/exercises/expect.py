"""What graders ask of a value before they judge it: its type, its length, that it is a number at all.

Each returns the value in its plain form and raises `Mistake` for what is of the wrong kind. ``what`` names the value
for the learner, as a rule the call that gave it: ``"bubble(4, 8)"``.
"""

from __future__ import annotations

import math
import numbers
import reprlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from course_pp.exercises.mistakes import Mistake

if TYPE_CHECKING:
    import torch


def close(got: float, want: float, rel_tol: float = 1e-6) -> bool:
    """Whether two numbers are the same but for rounding, float32's included."""
    return math.isclose(got, want, rel_tol=rel_tol, abs_tol=1e-12)


def expect_number(value: Any, what: str) -> float:
    """A finite real number, whatever library made it."""
    plain = _scalar(value)
    if isinstance(plain, bool) or not isinstance(plain, numbers.Real):
        raise _wrong_kind(value, what, "a number")
    try:
        number = float(plain)
    except OverflowError:
        raise Mistake(f"`{what}` is beyond every float.", "Look for a power, or for a loop that multiplies.") from None
    if not math.isfinite(number):
        raise Mistake(f"`{what}` is {number}.", "Look for a division by zero, or for a difference of two infinities.")
    return number


def expect_int(value: Any, what: str, remedy: str = "Divide with `//`.") -> int:
    """A whole number; 3.0 is refused, because it can be no index and no count. ``remedy`` is for floats."""
    plain = _scalar(value)
    if isinstance(plain, float) and math.isfinite(plain):
        raise Mistake(f"`{what}` is {plain:.6g}, a float; a whole number (`int`) is asked for.", remedy)
    if isinstance(plain, bool) or not isinstance(plain, numbers.Integral):
        raise _wrong_kind(value, what, "a whole number")
    return int(plain)


def expect_list(value: Any, what: str, length: int | None = None) -> list[Any]:
    """A list, tuple or range, of ``length`` entries unless that is None."""
    if not isinstance(value, list | tuple | range):
        raise _wrong_kind(value, what, "a list")
    if length is not None and len(value) != length:
        has = "1 entry" if len(value) == 1 else f"{len(value)} entries"
        raise Mistake(f"`{what}` has {has}, not {length}.", example=f"It is {_shown(value)}.")
    return list(value)


def expect_dict(value: Any, what: str, keys: Sequence[Any] | None = None) -> dict[Any, Any]:
    """A dictionary that has exactly ``keys``, unless that is None."""
    if not isinstance(value, dict):
        raise _wrong_kind(value, what, "a dictionary")
    if keys is not None:
        missing = [key for key in keys if key not in value]
        extra = [key for key in value if key not in keys]
        if missing or extra:
            told = [f"lacks {_shown(missing)}"] * bool(missing) + [f"has {_shown(extra)} too many"] * bool(extra)
            raise Mistake(f"`{what}` {' and '.join(told)}.")
    return value


def expect_tensor(
    value: Any, what: str, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """A tensor, of this shape and dtype unless they are None."""
    import torch

    if not isinstance(value, torch.Tensor):
        raise _wrong_kind(value, what, "a tensor")
    if shape is not None and tuple(value.shape) != tuple(shape):
        raise Mistake(f"`{what}` has shape {tuple(value.shape)}, not {tuple(shape)}.")
    if dtype is not None and value.dtype != dtype:
        raise Mistake(f"`{what}` has dtype {value.dtype}, not {dtype}.")
    return value


def _scalar(value: Any) -> Any:
    """A tensor's or an array's only number; anything else as it is."""
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        try:
            return value.item()
        except Exception:
            return value
    return value


def _wrong_kind(value: Any, what: str, asked_for: str) -> Mistake:
    if value is None:
        return Mistake(f"`{what}` is None; {asked_for} is asked for.", "Is a `return` missing?")
    name = "complex number" if isinstance(value, complex) else type(value).__name__
    article = "an" if name[0].lower() in "aeiou" else "a"
    return Mistake(f"`{what}` is {article} {name}; {asked_for} is asked for.", example=f"It is {_shown(value)}.")


def _shown(value: Any) -> str:
    try:
        return " ".join(reprlib.repr(value).split())
    except Exception:
        return f"something of type {type(value).__name__} that cannot be printed"
