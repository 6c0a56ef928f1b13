"""An action of a rank, the products that it needs and makes, and the interval in which it ran.

The letters are those of ``torch.distributed.pipelining``: F is the forward of one microbatch
through one stage, B its whole backward. A backward may also run in two halves (Qi et al. 2024,
"Zero bubble pipeline parallelism", ICLR): I makes the gradients of the inputs, for which the
previous stage waits, and W those of the weights. U is the stage's own optimizer step, in
asynchronous schedules only.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, NamedTuple

from course_pp.base.arguments import shown

KINDS = {
    "F": "forward",
    "B": "full backward",
    "I": "input gradient",
    "W": "weight gradient",
    "U": "update",
}

_SPELLED_KINDS = ", ".join(f"{letter} ({meaning})" for letter, meaning in KINDS.items())

Made = Literal["activation", "gradient", "weight gradient"]
_MADE: dict[str, tuple[Made, ...]] = {
    "F": ("activation",),
    "B": ("gradient", "weight gradient"),
    "I": ("gradient",),
    "W": ("weight gradient",),
}

Time = float | Fraction
_LAST = 2**63 - 1  # the last stage or microbatch that can be told apart in 64 bits
_ACTION = re.compile(r"(\d+)([A-Z])(\d+)", re.ASCII)
_OVERLAP = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")


class Product(NamedTuple):
    """A value that one action makes and another needs.

    Attributes:
        what: the kind of value. A ``gradient`` is with respect to the input of ``stage``; the stage
            before needs it. A ``value`` is made by ``stage`` and crosses an
            :class:`~course_pp.schedule.Edge`; its ``value gradient`` is with respect to the value
            as read on the rank of ``stage``. A ``token`` is made by the last stage in generation;
            the first stage continues with it.
        name: the name of the edge; empty for other values.
    """

    what: Made | Literal["value", "value gradient", "token"]
    stage: int
    microbatch: int
    name: str = ""

    def __str__(self) -> str:
        what = f"the {self.what}"
        if self.what == "value":
            what = f"the value {self.name!r}"
        elif self.what == "value gradient":
            what = f"the gradient of {self.name!r}"
        return f"{what} of microbatch {self.microbatch} from stage {self.stage}"


@dataclass(frozen=True, slots=True, repr=False)
class Action:
    """One stage, one kind of work (a key of :data:`KINDS`), one microbatch. Prints as ``2F0``.

    Raises:
        ValueError: for an unknown kind, or a stage or microbatch that is not an integer from 0 up.
    """

    stage: int
    kind: str
    microbatch: int

    def __post_init__(self) -> None:
        kind, stage, microbatch = self.kind, self.stage, self.microbatch
        if type(kind) is not str or kind not in KINDS:
            raise ValueError(f"unknown kind of action {shown(kind)}: use one of {_SPELLED_KINDS}")
        # type(), because True is an instance of int
        if type(stage) is not int or not 0 <= stage <= _LAST:
            raise ValueError(f"stage {shown(stage)} of an action: give an integer, counted from 0")
        if type(microbatch) is not int or not 0 <= microbatch <= _LAST:
            raise ValueError(
                f"microbatch {shown(microbatch)} of an action: give an integer, counted from 0"
            )

    def __repr__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """Read ``"2F0"``: stage 2, forward, microbatch 0."""
        match = _ACTION.fullmatch(text.strip())
        if match is None:
            raise ValueError(
                f"cannot read {text!r} as an action: write stage, kind and microbatch, as in '2F0' "
                f"(kinds: {_SPELLED_KINDS})"
            )
        stage, kind, microbatch = match.groups()
        return cls(int(stage), kind, int(microbatch))

    @property
    def parts(self) -> tuple["Action", ...]:
        """The action alone: a loop over ``parts`` takes actions and overlapped pairs alike."""
        return (self,)

    @property
    def provides(self) -> tuple[Product, ...]:
        """The products that exist once this action is done."""
        made = _MADE.get(self.kind, ())
        return tuple(Product(what, self.stage, self.microbatch) for what in made)

    def needs(self, n_stages: int) -> tuple[Product, ...]:
        """Return the products that this action needs, in a pipeline of ``n_stages``."""
        stage, microbatch = self.stage, self.microbatch
        if self.kind == "F":
            if stage == 0:
                return ()
            return (Product("activation", stage - 1, microbatch),)
        if self.kind == "W":
            return (Product("gradient", stage, microbatch),)
        if self.kind == "U":
            return (Product("weight gradient", stage, microbatch),)
        own = Product("activation", stage, microbatch)
        if stage + 1 >= n_stages:
            return (own,)
        return (own, Product("gradient", stage + 1, microbatch))


@dataclass(frozen=True, slots=True, repr=False)
class Overlap:
    """A forward (``F``) and a backward (``B`` or ``I``) run as one.

    Prints as ``(0F1;7B0)OVERLAP_F_B``. DualPipe pairs them so that the communication of one hides
    behind the arithmetic of the other (DeepSeek-V3 technical report, section 3.2.1).
    """

    forward: Action
    backward: Action

    def __post_init__(self) -> None:
        if self.forward.kind != "F" or self.backward.kind not in ("B", "I"):
            raise ValueError(
                f"cannot overlap {self.forward} with {self.backward}: "
                "give a forward (F) first and a backward (B or I) second"
            )

    def __repr__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"

    @classmethod
    def parse(cls, text: str) -> "Overlap":
        """Read ``"(0F1;7B0)OVERLAP_F_B"``."""
        match = _OVERLAP.fullmatch(text.strip())
        if match is None:
            raise ValueError(
                f"cannot read {text!r} as an overlapped pair: write '(0F1;7B0)OVERLAP_F_B'"
            )
        return cls(Action.parse(match[1]), Action.parse(match[2]))

    @property
    def parts(self) -> tuple[Action, ...]:
        """The forward and the backward."""
        return (self.forward, self.backward)


class _Interval:
    __slots__ = ()
    start: Time
    end: Time

    @property
    def duration(self) -> Time:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Span(_Interval):
    """Rank ``rank`` was busy with ``action`` from ``start`` to ``end``."""

    rank: int
    action: Action | Overlap
    start: Time
    end: Time


@dataclass(frozen=True, slots=True)
class Receive(_Interval):
    """Rank ``rank`` was blocked from ``start`` to ``end``, until ``product`` was there."""

    rank: int
    product: Product
    start: Time
    end: Time


@dataclass(frozen=True, slots=True)
class Gap(_Interval):
    """Rank ``rank`` did nothing from ``start`` to ``end``. ``cause`` says why, in one sentence."""

    rank: int
    start: Time
    end: Time
    cause: str


def format_time(time: Time, unit: str = "") -> str:
    """Write a time for people: ``5.0`` without a unit; in seconds ``1.25 s`` or ``3.1 µs``."""
    value = float(time)
    if unit != "s":
        return str(round(value, 4))
    if value >= 1:
        return f"{value:.3g} s"
    if value >= 1e-3 or value == 0:
        return f"{value * 1e3:.3g} ms"
    return f"{value * 1e6:.3g} µs"
