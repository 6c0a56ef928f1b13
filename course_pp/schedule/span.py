"""An action or a receive with its time, an interval without one, and how times are written."""

from dataclasses import dataclass
from fractions import Fraction

from course_pp.schedule.action import Action, Overlap, Product

Time = float | Fraction


@dataclass(frozen=True, slots=True)
class Span:
    """Rank ``rank`` was busy with ``action`` from ``start`` to ``end``."""

    rank: int
    action: Action | Overlap
    start: Time
    end: Time

    @property
    def duration(self) -> Time:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Receive:
    """Rank ``rank`` was blocked from ``start`` to ``end``, until ``product`` was there."""

    rank: int
    product: Product
    start: Time
    end: Time

    @property
    def duration(self) -> Time:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Gap:
    """Rank ``rank`` did nothing from ``start`` to ``end``, and why, in one sentence."""

    rank: int
    start: Time
    end: Time
    cause: str

    @property
    def duration(self) -> Time:
        return self.end - self.start


def format_time(time: Time, unit: str = "") -> str:
    """Write a time for people: ``5.0`` without a unit; in seconds ``1.25 s``, ``12.5 ms`` or ``3.1 µs``."""
    value = float(time)
    if unit != "s":
        return str(round(value, 4))
    scale, name = (1, "s") if value >= 1 else (1e3, "ms") if value >= 1e-3 or not value else (1e6, "µs")
    return f"{value * scale:.3g} {name}"
