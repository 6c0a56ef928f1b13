"""What actions hand to one another, as numbers, so that a hundred thousand products take a fraction of a second.

There are five kinds of products, one of each for every stage s and microbatch:

* the activation that ``F`` leaves on its own rank, and the one it sends to stage s + 1;
* the gradient that ``I`` or ``B`` leaves on its own rank, and the one it sends to stage s - 1;
* the weight gradient that ``W`` or ``B`` leaves for ``U``, where a stage is replicated also for those of the others.
"""

from dataclasses import dataclass
from typing import Literal

from course_pp.schedule.action import Action, Overlap, Product
from course_pp.schedule.schedule import Schedule

_WHAT: tuple[Literal["activation", "gradient", "weight gradient"], ...] = (
    "activation",
    "activation",
    "gradient",
    "gradient",
    "weight gradient",
)


def round_of(microbatch: int, share: int, n_microbatches: int) -> range:
    """The microbatches on which the ``share`` replicas of a stage work at a time: their updates are one."""
    first = microbatch - microbatch % share
    return range(first, min(first + share, n_microbatches))


@dataclass(frozen=True)
class Products:
    """Numbers the products of a schedule of ``n_stages`` and ``n_microbatches``."""

    n_stages: int
    n_microbatches: int
    shares: tuple[int, ...] = ()
    """How many ranks hold each stage; one each unless given."""

    @classmethod
    def of(cls, schedule: Schedule) -> "Products":
        """Those of ``schedule``."""
        return cls(schedule.n_stages, schedule.n_microbatches, tuple(map(len, schedule.placement)))

    @property
    def per_kind(self) -> int:
        return self.n_stages * self.n_microbatches

    def needed_by(self, action: Action | Overlap) -> tuple[int, ...]:
        """What must be there before ``action`` can start."""
        if isinstance(action, Overlap):
            return self.needed_by(action.forward) + self.needed_by(action.backward)
        n, kind, stage = self.n_stages * self.n_microbatches, action.kind, action.stage
        here = stage * self.n_microbatches + action.microbatch
        if kind == "F":
            return (n + here - self.n_microbatches,) if stage else ()
        if kind == "W":
            return (2 * n + here,)
        if kind == "U":
            share = self.shares[stage] if self.shares else 1
            mates = round_of(action.microbatch, share, self.n_microbatches)
            return tuple(4 * n + stage * self.n_microbatches + mate for mate in mates)
        return (here, 3 * n + here + self.n_microbatches) if stage + 1 < self.n_stages else (here,)

    def made_by(self, action: Action | Overlap) -> tuple[int, ...]:
        """What is there once ``action`` is done."""
        if isinstance(action, Overlap):
            return self.made_by(action.forward) + self.made_by(action.backward)
        n, kind = self.n_stages * self.n_microbatches, action.kind
        here = action.stage * self.n_microbatches + action.microbatch
        if kind == "F":
            return (here, n + here)
        if kind == "I":
            return (2 * n + here, 3 * n + here)
        if kind == "B":
            return (2 * n + here, 3 * n + here, 4 * n + here)
        return (4 * n + here,) if kind == "W" else ()

    def describe(self, product: int) -> Product:
        """Return what the number stands for."""
        kind, here = divmod(product, self.per_kind)
        return Product(_WHAT[kind], *divmod(here, self.n_microbatches))

    def boundary(self, product: int) -> int | None:
        """The boundary between stages that it crosses, s for the one between s and s + 1; None if it stays."""
        kind, here = divmod(product, self.per_kind)
        stage = here // self.n_microbatches
        return {1: stage, 3: stage - 1}.get(kind)
