"""An action or a receive with its time, an interval without one, and how times are written."""

from dataclasses import dataclass
from fractions import Fraction
from types import UnionType

from course_pp.arguments import checked, refuse_unless
from course_pp.schedule.action import Action, Overlap, Product

Time = float | Fraction
_NUMBERS = frozenset({int, float, Fraction})


@dataclass(frozen=True, slots=True)
class Span:
    """Rank ``rank`` was busy with ``action`` from ``start`` to ``end``.

    Raises:
        TypeError: for a field of another class. Values are :class:`~course_pp.schedule.Timeline`'s to check.
    """

    rank: int
    action: Action | Overlap
    start: Time
    end: Time

    def __post_init__(self) -> None:
        if (
            type(self.rank) is not int
            or not isinstance(self.action, Action | Overlap)
            or type(self.start) not in _NUMBERS
            or type(self.end) not in _NUMBERS
        ):
            _refuse_wrong_classes(self, "action", Action | Overlap, "an Action or an Overlap")

    @property
    def duration(self) -> Time:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Receive:
    """Rank ``rank`` was blocked from ``start`` to ``end``, until ``product`` was there.

    Raises:
        TypeError: for a field of another class.
    """

    rank: int
    product: Product
    start: Time
    end: Time

    def __post_init__(self) -> None:
        if (
            type(self.rank) is not int
            or not isinstance(self.product, Product)
            or type(self.start) not in _NUMBERS
            or type(self.end) not in _NUMBERS
        ):
            _refuse_wrong_classes(self, "product", Product, "a Product")

    @property
    def duration(self) -> Time:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Gap:
    """Rank ``rank`` did nothing from ``start`` to ``end``, and why, in one sentence.

    Raises:
        TypeError: for a field of another class.
    """

    rank: int
    start: Time
    end: Time
    cause: str

    def __post_init__(self) -> None:
        if (
            type(self.rank) is not int
            or not isinstance(self.cause, str)
            or type(self.start) not in _NUMBERS
            or type(self.end) not in _NUMBERS
        ):
            _refuse_wrong_classes(self, "cause", str, "text")

    @property
    def duration(self) -> Time:
        return self.end - self.start


def _refuse_wrong_classes(done: Span | Receive | Gap, what: str, kind: type | UnionType, spelled: str) -> None:
    """Say which field is wrong. Out of line, as a hundred thousand spans are made at once, and all are right."""
    name = type(done).__name__
    refuse_unless(type(done.rank) is int, name, "rank", done.rank, "pass an integer, counted from 0")
    refuse_unless(isinstance(getattr(done, what), kind), name, what, getattr(done, what), f"pass {spelled}")
    for field in ("start", "end"):
        time = getattr(done, field)
        is_number = isinstance(time, int | float | Fraction) and not isinstance(time, bool)
        refuse_unless(is_number, name, field, time, "pass a number (int, float or Fraction)")


@checked
def format_time(time: Time, unit: str = "") -> str:
    """Write a time for people: ``5.0`` without a unit; in seconds ``1.25 s``, ``12.5 ms`` or ``3.1 µs``."""
    value = float(time)
    if unit != "s":
        return str(round(value, 4))
    scale, name = (1, "s") if value >= 1 else (1e3, "ms") if value >= 1e-3 or not value else (1e6, "µs")
    return f"{value * scale:.3g} {name}"
