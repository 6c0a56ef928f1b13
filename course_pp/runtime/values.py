"""Values beyond the neighbour: which stages write and read them, and what becomes of each on its way.

A stage declares them itself:

    class Encoder(nn.Module):
        writes = ("encoded",)
        def forward(self, x):
            y = self.layers(x)
            return y, {"encoded": y}          # what the next stage gets, and what any later stage may read

    class Decoder(nn.Module):
        reads = ("encoded",)
        def forward(self, hidden, *, encoded):
            ...

The declarations of all stages give the edges (:class:`course_pp.schedule.Edge`). A value travels once to each rank that
reads it. If a rank has several readers, the first one receives it. That one goes backward last, and sends the sum of
their gradients. The writer adds up what it gets from each rank.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from course_pp.schedule import Edge, Product, Schedule

__all__ = ["Read", "Write", "reads_of", "writes_of"]


@dataclass(frozen=True)
class Read:
    """A value as a stage reads it, of one microbatch.

    Attributes:
        value: what it was made as, on this rank or received.
        is_last: whether no later stage of this rank reads it.
        gradient: where the gradients of this rank's readers add up.
    """

    name: str
    value: Product
    is_last: bool
    gradient: Product


@dataclass(frozen=True)
class Write:
    """A value as a stage makes it, of one microbatch.

    Attributes:
        value: what it is made as.
        is_read_here: whether a later stage of this rank reads it.
        gradients: one from each rank that reads it.
    """

    name: str
    value: Product
    is_read_here: bool
    gradients: tuple[Product, ...]


def reads_of(schedule: Schedule, stage: int, microbatch: int) -> tuple[Read, ...]:
    """Return what ``stage`` reads for a microbatch."""
    found = []
    for edge in schedule.edges:
        if stage in edge.readers:
            here = _readers(schedule, edge, microbatch)[schedule.rank_of(stage, microbatch)]
            value = Product("value", edge.writer, microbatch, edge.name)
            gradient = Product("value gradient", here[0], microbatch, edge.name)
            found.append(Read(edge.name, value, stage == here[-1], gradient))
    return tuple(found)


def writes_of(schedule: Schedule, stage: int, microbatch: int) -> tuple[Write, ...]:
    """Return what ``stage`` makes of a microbatch for others to read."""
    found = []
    for edge in schedule.edges:
        if stage == edge.writer:
            ranks = _readers(schedule, edge, microbatch)
            value = Product("value", stage, microbatch, edge.name)
            gradients = tuple(Product("value gradient", here[0], microbatch, edge.name) for here in ranks.values())
            found.append(Write(edge.name, value, schedule.rank_of(stage, microbatch) in ranks, gradients))
    return tuple(found)


def _readers(schedule: Schedule, edge: Edge, microbatch: int) -> Mapping[int, Sequence[int]]:
    """Return the readers of an edge by the rank on which they work on ``microbatch``, each in order."""
    ranks: dict[int, list[int]] = {}
    for reader in edge.readers:
        ranks.setdefault(schedule.rank_of(reader, microbatch), []).append(reader)
    return ranks
