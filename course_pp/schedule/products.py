"""What actions hand to one another, as numbers, so that a hundred thousand products take a fraction of a second.

There are five kinds of products, one of each for every stage s and microbatch:

* the activation that ``F`` leaves on its own rank, and the one it sends to stage s + 1;
* the gradient that ``I`` or ``B`` leaves on its own rank, and the one it sends to stage s - 1;
* the weight gradient that ``W`` or ``B`` leaves for ``U``, where a stage is replicated also for those of the others.

For each reader of an edge there are two more, one of each for every microbatch: the value that it gets from ``F`` of
the writer, and the gradient that its ``I`` or ``B`` leaves for that of the writer. In generation there is a token for
every microbatch, which ``F`` of the last stage leaves for a later one of the first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from course_pp.schedule.action import Action, Overlap, Product
from course_pp.schedule.edges import Edge, Lane, lanes_of
from course_pp.schedule.schedule import Schedule

_WHAT: tuple[Literal["activation", "gradient", "weight gradient"], ...] = (
    "activation",
    "activation",
    "gradient",
    "gradient",
    "weight gradient",
)


def round_of(microbatch: int, share: int, n_microbatches: int) -> range:
    """Return the microbatches on which the ``share`` replicas of a stage work at a time: their updates are one."""
    first = microbatch - microbatch % share
    return range(first, min(first + share, n_microbatches))


@dataclass(frozen=True)
class Products:
    """Numbers the products of a schedule of ``n_stages`` and ``n_microbatches``."""

    n_stages: int
    n_microbatches: int
    shares: tuple[int, ...] = ()
    """How many ranks hold each stage; one each unless given."""
    edges: tuple[Edge, ...] = ()
    feedback: int = 0

    @classmethod
    def of(cls, schedule: Schedule) -> "Products":
        """Return the products of ``schedule``."""
        return cls(
            schedule.n_stages,
            schedule.n_microbatches,
            tuple(map(len, schedule.placement)),
            schedule.edges,
            schedule.feedback,
        )

    @property
    def per_kind(self) -> int:
        return self.n_stages * self.n_microbatches

    @cached_property
    def lanes(self) -> tuple[Lane, ...]:
        """The readers of the edges, in order."""
        return lanes_of(self.edges)

    @property
    def count(self) -> int:
        """How many there are."""
        return self._first_token + (self.n_microbatches if self.feedback else 0)

    @cached_property
    def _first_token(self) -> int:
        return 5 * self.per_kind + 2 * len(self.lanes) * self.n_microbatches

    def token(self, microbatch: int) -> int:
        """Return what the last stage has made of a microbatch for the first stage to continue with."""
        return self._first_token + microbatch

    def value(self, lane: int, microbatch: int) -> int:
        """Return the value of an edge, as one of its readers gets it."""
        return 5 * self.per_kind + lane * self.n_microbatches + microbatch

    def value_gradient(self, lane: int, microbatch: int) -> int:
        """Return the gradient that one of the readers leaves."""
        return self.value(len(self.lanes) + lane, microbatch)

    def needed_by(self, action: Action | Overlap) -> tuple[int, ...]:
        """Return what must be there before ``action`` can start."""
        needed = self._needed_in_chain(action)
        if self.feedback:
            needed += tuple(
                self.token(part.microbatch - self.feedback)
                for part in action.parts
                if part.kind == "F" and part.stage == 0 and part.microbatch >= self.feedback
            )
        return (*needed, *self._over_edges(action, makes=False)) if self.edges else needed

    def made_by(self, action: Action | Overlap) -> tuple[int, ...]:
        """Return what is there once ``action`` is done."""
        made = self._made_in_chain(action)
        if self.feedback:
            made += tuple(
                self.token(part.microbatch)
                for part in action.parts
                if part.kind == "F" and part.stage == self.n_stages - 1
            )
        return (*made, *self._over_edges(action, makes=True)) if self.edges else made

    def _over_edges(self, action: Action | Overlap, makes: bool) -> Sequence[int]:
        """Writers make values and need their gradients; readers need values and make gradients."""
        found = []
        for part in action.parts:
            if part.kind in "FIB":
                number = self.value if part.kind == "F" else self.value_gradient
                by_writer = makes == (part.kind == "F")
                for i, lane in enumerate(self.lanes):
                    if part.stage == (lane.writer if by_writer else lane.reader):
                        found.append(number(i, part.microbatch))
        return found

    def _needed_in_chain(self, action: Action | Overlap) -> tuple[int, ...]:
        if isinstance(action, Overlap):
            return self._needed_in_chain(action.forward) + self._needed_in_chain(action.backward)
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

    def _made_in_chain(self, action: Action | Overlap) -> tuple[int, ...]:
        if isinstance(action, Overlap):
            return self._made_in_chain(action.forward) + self._made_in_chain(action.backward)
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
        if product >= self._first_token:
            return Product("token", self.n_stages - 1, product - self._first_token)
        if (lane := self.lane_of(product)) is not None:
            number, microbatch = divmod(product - 5 * self.per_kind, self.n_microbatches)
            name = self.edges[lane.edge].name
            if number < len(self.lanes):
                return Product("value", lane.writer, microbatch, name)
            return Product("value gradient", lane.reader, microbatch, name)
        kind, here = divmod(product, self.per_kind)
        return Product(_WHAT[kind], *divmod(here, self.n_microbatches))

    def boundary(self, product: int) -> int | None:
        """Return the boundary that a product crosses, s for that between stages s and s + 1; None without one."""
        if product >= 5 * self.per_kind:
            return None
        kind, here = divmod(product, self.per_kind)
        stage = here // self.n_microbatches
        return {1: stage, 3: stage - 1}.get(kind)

    def lane_of(self, product: int) -> Lane | None:
        """Return the reader of an edge whose value or gradient a product is; None for one between neighbours."""
        if not 5 * self.per_kind <= product < self._first_token:
            return None
        return self.lanes[(product - 5 * self.per_kind) // self.n_microbatches % len(self.lanes)]

    def is_token(self, product: int) -> bool:
        """Return whether it goes from the last stage to the first."""
        return product >= self._first_token
