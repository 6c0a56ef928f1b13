"""Values that stages hand to stages beyond their neighbours.

Examples are skip connections, an encoder's output and a mask.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from course_pp.base.arguments import described


@dataclass(frozen=True, slots=True)
class Edge:
    """The value ``name``, made by the forward of stage ``writer``, read by those of ``readers``.

    It travels once to each rank that reads it, and each of these ranks sends one gradient back, the
    sum over its stages.

        skip = Edge("encoded", writer=1, readers=(3, 4))
        build("1f1b", 5, 8).with_edges(skip)

    :func:`course_pp.schedule.check` says whether an edge fits a schedule.
    """

    name: str
    writer: int
    readers: tuple[int, ...]

    def __post_init__(self) -> None:
        readers = tuple(self.readers)
        if not readers or len(set(readers)) < len(readers):
            raise ValueError(
                f"edge {self.name!r} has readers {readers}: give at least one stage, and each of"
                " them once"
            )
        object.__setattr__(self, "readers", tuple(sorted(readers)))


class Lane(NamedTuple):
    """One reader of an edge: the edge's number, its writer and the reader."""

    edge: int
    writer: int
    reader: int


def lanes_of(edges: Sequence[Edge]) -> tuple[Lane, ...]:
    """Return the lanes of all edges, in order."""
    lanes = []
    for number, edge in enumerate(edges):
        for reader in edge.readers:
            lanes.append(Lane(number, edge.writer, reader))
    return tuple(lanes)


def problems_of_edges(edges: Sequence[Edge], n_stages: int) -> Iterable[str]:
    """Yield the problems of ``edges`` in a pipeline of ``n_stages``, each in a sentence."""
    writers: dict[str, int] = {}
    for edge in edges:
        strange = [stage for stage in (edge.writer, *edge.readers) if stage >= n_stages]
        if strange:
            yield (
                f"edge {edge.name!r} names stage {strange[0]}, but the stages are 0 to"
                f" {n_stages - 1}"
            )
            continue
        if edge.name in writers:
            yield _made_twice(edge.name, writers[edge.name], edge.writer)
        writers.setdefault(edge.name, edge.writer)
        for reader in edge.readers:
            if reader <= edge.writer:
                yield _goes_backwards(edge.name, edge.writer, reader)


def spelled(edges: Sequence[Edge]) -> str:
    """Return ``'x' from stage 0 to stages 2 and 3``, one edge after another."""
    told = []
    for edge in edges:
        *others, last = map(str, edge.readers)
        stages = f"stages {', '.join(others)} and {last}" if others else f"stage {last}"
        told.append(f"{edge.name!r} from stage {edge.writer} to {stages}")
    return "; ".join(told)


def _made_twice(name: str, one: int, other: int) -> str:
    if one == other:
        return f"value {name!r} of stage {one} has two edges: give one edge all its readers"
    return (
        f"value {name!r} is made by stage {one} and by stage {other}: give each value a name of"
        " its own"
    )


def _goes_backwards(name: str, writer: int, reader: int) -> str:
    if reader == writer:
        return (
            f"stage {reader} reads {name!r}, which it makes itself: use it there, or read it in a"
            " later stage"
        )
    way = " → ".join(map(str, (*range(reader, writer + 1), reader)))
    return (
        f"value {name!r} goes backwards, from stage {writer} to stage {reader}, which makes the"
        f" cycle {way}: make it in a stage before {reader}, or read it after {writer}"
    )


@dataclass(frozen=True)
class Declared:
    """The names of the values that a stage reads and writes beyond its neighbours'."""

    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()


def declared_by(stage: int | str, module: object) -> Declared:
    """Return the names in a module's attributes ``reads`` and ``writes``, which it may lack."""
    return Declared(_names(stage, module, "reads"), _names(stage, module, "writes"))


def _names(stage: int | str, module: object, what: str) -> tuple[str, ...]:
    given: Any = getattr(module, what, ())
    is_list = isinstance(given, tuple | list)
    if not is_list or not all(isinstance(name, str) and name for name in given):
        raise ValueError(
            f"{what} of stage {stage} is {described(given)}: give a tuple of names, such as {what}"
            " = ('mask',)"
        )
    names = tuple(given)
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{what} of stage {stage} has {name!r} twice: name each value once")
    return names


def taken_apart(stage: int, writes: Sequence[str], returned: Any) -> tuple[Any, Mapping[str, Any]]:
    """Split a stage's return value into its output and the values that it writes, by name."""
    is_pair = isinstance(returned, tuple) and len(returned) == 2
    if is_pair and isinstance(returned[1], Mapping):
        output, written = returned
        if set(written) == set(writes):
            return output, written
        found = f"{type(output).__name__} beside {sorted(written)}"
    else:
        found = type(returned).__name__
    raise TypeError(
        f"stage {stage} writes {', '.join(map(repr, writes))}, but its forward returns {found}:"
        " return (output, {name: value}) with exactly these names"
    )


def edges_from(declared: Mapping[int, Declared]) -> tuple[Edge, ...]:
    """Return the edges between the stages, in the order of their writers.

    A value without a reader has no edge.
    """
    writers: dict[str, int] = {}
    for stage in sorted(declared):
        for name in declared[stage].writes:
            if name in writers:
                raise ValueError(_made_twice(name, writers[name], stage))
            writers[name] = stage
    readers: dict[str, list[int]] = {name: [] for name in writers}
    for stage in sorted(declared):
        for name in declared[stage].reads:
            if name not in writers:
                written = ", ".join(map(repr, writers)) or "none"
                raise ValueError(
                    f"stage {stage} reads {name!r}, which no stage writes (written: {written}):"
                    f" give the stage that makes it writes = ({name!r},), and let its forward"
                    f" return (output, {{{name!r}: value}})"
                )
            if stage <= writers[name]:
                raise ValueError(_goes_backwards(name, writers[name], stage))
            readers[name].append(stage)
    edges = []
    for name, writer in writers.items():
        if readers[name]:
            edges.append(Edge(name, writer, tuple(readers[name])))
    return tuple(edges)
