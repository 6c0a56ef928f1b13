"""Values beyond the neighbour: which stages write and read them, and what becomes of each on its way.

A stage says so itself:

    class Encoder(nn.Module):
        writes = ("encoded",)
        def forward(self, x):
            y = self.layers(x)
            return y, {"encoded": y}          # what the next stage gets, and what any later stage may read

    class Decoder(nn.Module):
        reads = ("encoded",)
        def forward(self, hidden, *, encoded):
            ...

From all stages together follow the edges (:class:`course_pp.schedule.Edge`). A value travels once to each rank that
reads it. Of the readers on one rank the first receives it; that one goes backward last, and sends the sum of their
gradients. The writer adds up what it gets from each rank.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from course_pp.arguments import described
from course_pp.schedule import Edge, Product, Schedule
from course_pp.schedule.edges import goes_backwards, made_twice

__all__ = ["Declared", "Read", "Write", "declared_by", "edges_from", "reads_of", "writes_of"]


@dataclass(frozen=True)
class Declared:
    """The names of the values that a stage reads and writes beyond its neighbours'."""

    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()


def declared_by(stage: int, module: nn.Module | None) -> Declared:
    """Return what the attributes ``reads`` and ``writes`` of a module say; nothing where it has none.

    Raises:
        ValueError: for attributes that are no names, or a name twice.
    """
    return Declared(_names(stage, module, "reads"), _names(stage, module, "writes"))


def _names(stage: int, module: nn.Module | None, what: str) -> tuple[str, ...]:
    given: Any = getattr(module, what, ())
    names = given if isinstance(given, tuple | list) else None
    if names is None or not all(isinstance(name, str) and name for name in names):
        raise ValueError(
            f"{what} of stage {stage} is {described(given)}: give a tuple of names, such as {what} = ('mask',)"
        )
    if again := [name for i, name in enumerate(names) if name in names[:i]]:
        raise ValueError(f"{what} of stage {stage} has {again[0]!r} twice: name each value once")
    return tuple(names)


def edges_from(declared: Mapping[int, Declared]) -> tuple[Edge, ...]:
    """The edges between the stages, in the order of writers and of what each writes. What nobody reads has none.

    Raises:
        ValueError: for a value that two stages write, that none writes, or that goes backwards.
    """
    writers: dict[str, int] = {}
    for stage in sorted(declared):
        for name in declared[stage].writes:
            if name in writers:
                raise ValueError(made_twice(name, writers[name], stage))
            writers[name] = stage
    readers: dict[str, list[int]] = {name: [] for name in writers}
    for stage in sorted(declared):
        for name in declared[stage].reads:
            if name not in writers:
                raise ValueError(
                    f"stage {stage} reads {name!r}, which no stage writes (written: {_spelled(writers)}): "
                    f"give the stage that makes it writes = ({name!r},), and let its forward return "
                    f"(output, {{{name!r}: value}})"
                )
            if stage <= writers[name]:
                raise ValueError(goes_backwards(name, writers[name], stage))
            readers[name].append(stage)
    return tuple(Edge(name, writer, tuple(readers[name])) for name, writer in writers.items() if readers[name])


def _spelled(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "none"


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
    """What ``stage`` reads for a microbatch."""
    found = []
    for edge in schedule.edges:
        if stage in edge.readers:
            here = _readers(schedule, edge, microbatch)[schedule.rank_of(stage, microbatch)]
            value = Product("value", edge.writer, microbatch, edge.name)
            gradient = Product("value gradient", here[0], microbatch, edge.name)
            found.append(Read(edge.name, value, stage == here[-1], gradient))
    return tuple(found)


def writes_of(schedule: Schedule, stage: int, microbatch: int) -> tuple[Write, ...]:
    """What ``stage`` makes of a microbatch for others to read."""
    found = []
    for edge in schedule.edges:
        if stage == edge.writer:
            ranks = _readers(schedule, edge, microbatch)
            value = Product("value", stage, microbatch, edge.name)
            gradients = tuple(Product("value gradient", here[0], microbatch, edge.name) for here in ranks.values())
            found.append(Write(edge.name, value, schedule.rank_of(stage, microbatch) in ranks, gradients))
    return tuple(found)


def _readers(schedule: Schedule, edge: Edge, microbatch: int) -> Mapping[int, Sequence[int]]:
    """The readers of an edge by the rank on which they work on ``microbatch``, each in order."""
    ranks: dict[int, list[int]] = {}
    for reader in edge.readers:
        ranks.setdefault(schedule.rank_of(reader, microbatch), []).append(reader)
    return ranks
