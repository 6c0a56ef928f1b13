"""Values that stages hand to one another beyond their neighbours: skip connections, an encoder's output, a mask."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from course_pp.arguments import refuse_unless

__all__ = ["Edge", "Lane", "lanes_of", "problems_of_edges", "spelled"]


@dataclass(frozen=True, slots=True)
class Edge:
    """The value ``name``, made by the forward of stage ``writer`` and read by the forwards of ``readers``.

    It travels once to each rank that reads it, and each of these sends one gradient back, the sum over its stages.

        skip = Edge("encoded", writer=1, readers=(3, 4))
        build("1f1b", 5, 8).with_edges(skip)

    Attributes:
        name: what to call the value; one stage makes it.
        writer: the stage that makes it.
        readers: the stages that use it, in order.

    Raises:
        ValueError: for a name that is no text or empty, a stage that is not an integer from 0 up, and no reader or one
            named twice. Whether it fits a schedule, :func:`course_pp.schedule.check` says.
    """

    name: str
    writer: int
    readers: tuple[int, ...]

    def __post_init__(self) -> None:
        refuse_unless(isinstance(self.name, str) and bool(self.name), "Edge", "name", self.name, "pass text")
        refuse_unless(_is_stage(self.writer), "Edge", "writer", self.writer, "pass a stage, an integer from 0 up")
        is_stages = isinstance(self.readers, tuple | list) and all(map(_is_stage, self.readers))
        refuse_unless(is_stages, "Edge", "readers", self.readers, "pass a tuple of stages, such as (3,)")
        readers = tuple(self.readers)
        if not readers or len(set(readers)) < len(readers):
            raise ValueError(
                f"edge {self.name!r} has readers {readers}: give at least one stage, and each of them once"
            )
        object.__setattr__(self, "readers", tuple(sorted(readers)))


def _is_stage(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


class Lane(NamedTuple):
    """One reader of an edge: the edge's number, its writer and the reader."""

    edge: int
    writer: int
    reader: int


def lanes_of(edges: Sequence[Edge]) -> tuple[Lane, ...]:
    """Return every reader of every edge, in order."""
    return tuple(Lane(i, edge.writer, reader) for i, edge in enumerate(edges) for reader in edge.readers)


def problems_of_edges(edges: Sequence[Edge], n_stages: int) -> Iterable[str]:
    """Yield what keeps ``edges`` from being those of a pipeline of ``n_stages``, each problem in a sentence."""
    writers: dict[str, int] = {}
    for edge in edges:
        if strange := [stage for stage in (edge.writer, *edge.readers) if stage >= n_stages]:
            yield f"edge {edge.name!r} names stage {strange[0]}, but the stages are 0 to {n_stages - 1}"
            continue
        if edge.name in writers:
            yield made_twice(edge.name, writers[edge.name], edge.writer)
        writers.setdefault(edge.name, edge.writer)
        for reader in edge.readers:
            if reader <= edge.writer:
                yield goes_backwards(edge.name, edge.writer, reader)


def spelled(edges: Sequence[Edge]) -> str:
    """Return ``'x' from stage 0 to stages 2 and 3``, one after another."""
    told = []
    for edge in edges:
        *others, last = map(str, edge.readers)
        stages = f"stages {', '.join(others)} and {last}" if others else f"stage {last}"
        told.append(f"{edge.name!r} from stage {edge.writer} to {stages}")
    return "; ".join(told)


def made_twice(name: str, one: int, other: int) -> str:
    if one == other:
        return f"value {name!r} of stage {one} has two edges: give one edge all its readers"
    return f"value {name!r} is made by stage {one} and by stage {other}: give each value a name of its own"


def goes_backwards(name: str, writer: int, reader: int) -> str:
    """Say why a value cannot be read by the stage that makes it or one before: the way there and back is a cycle."""
    if reader == writer:
        return f"stage {reader} reads {name!r}, which it makes itself: use it there, or read it in a later stage"
    way = " → ".join(map(str, (*range(reader, writer + 1), reader)))
    return (
        f"value {name!r} goes backwards, from stage {writer} to stage {reader}, which makes the cycle {way}: "
        f"make it in a stage before {reader}, or read it after {writer}"
    )
