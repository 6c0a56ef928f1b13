"""Values that stages hand to one another beyond their neighbours: skip connections, an encoder's output, a mask."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from course_pp.base.arguments import described


@dataclass(frozen=True, slots=True)
class Edge:
    """The value ``name``, made by the forward of stage ``writer`` and read by the forwards of
    ``readers``.

    It travels once to each rank that reads it, and each of these sends one gradient back, the sum
    over its stages.

        skip = Edge("encoded", writer=1, readers=(3, 4))
        build("1f1b", 5, 8).with_edges(skip)

    Whether it fits a schedule, :func:`course_pp.schedule.check` says.
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
    return tuple(
        Lane(i, edge.writer, reader) for i, edge in enumerate(edges) for reader in edge.readers
    )


def problems_of_edges(edges: Sequence[Edge], n_stages: int) -> Iterable[str]:
    """Yield what keeps ``edges`` from being those of a pipeline of ``n_stages``, each problem in a sentence."""
    writers: dict[str, int] = {}
    for edge in edges:
        if strange := [stage for stage in (edge.writer, *edge.readers) if stage >= n_stages]:
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
    """Return ``'x' from stage 0 to stages 2 and 3``, one after another."""
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
    """Return what the attributes ``reads`` and ``writes`` of a module say; nothing where it has none."""
    return Declared(_names(stage, module, "reads"), _names(stage, module, "writes"))


def _names(stage: int | str, module: object, what: str) -> tuple[str, ...]:
    given: Any = getattr(module, what, ())
    names = given if isinstance(given, tuple | list) else None
    if names is None or not all(isinstance(name, str) and name for name in names):
        raise ValueError(
            f"{what} of stage {stage} is {described(given)}: give a tuple of names, such as {what}"
            " = ('mask',)"
        )
    if again := [name for i, name in enumerate(names) if name in names[:i]]:
        raise ValueError(f"{what} of stage {stage} has {again[0]!r} twice: name each value once")
    return tuple(names)


def taken_apart(stage: int, writes: Sequence[str], returned: Any) -> tuple[Any, Mapping[str, Any]]:
    """Split what a stage's forward returned into its output and the values that it writes, by name."""
    is_pair = (
        isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping)
    )
    if not is_pair or set(returned[1]) != set(writes):
        beside = f" beside {sorted(returned[1])}" if is_pair else ""
        raise TypeError(
            f"stage {stage} writes {', '.join(map(repr, writes))}, but its forward returns"
            f" {type(returned[0] if is_pair else returned).__name__}{beside}: return (output,"
            " {name: value}) with exactly these names"
        )
    return returned


def edges_from(declared: Mapping[int, Declared]) -> tuple[Edge, ...]:
    """Return the edges between the stages, by writer and in its order. A value without a reader has none."""
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
    return tuple(
        Edge(name, writer, tuple(readers[name]))
        for name, writer in writers.items()
        if readers[name]
    )
