"""What stages say that they read and write beyond their neighbours', and the edges that follow from it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from course_pp.arguments import described
from course_pp.schedule.edges import Edge, goes_backwards, made_twice

__all__ = ["Declared", "declared_by", "edges_from", "taken_apart"]


@dataclass(frozen=True)
class Declared:
    """The names of the values that a stage reads and writes beyond its neighbours'."""

    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()


def declared_by(stage: int | str, module: object) -> Declared:
    """Return what the attributes ``reads`` and ``writes`` of a module say; nothing where it has none.

    Raises:
        ValueError: for attributes that are no names, or a name twice.
    """
    return Declared(_names(stage, module, "reads"), _names(stage, module, "writes"))


def _names(stage: int | str, module: object, what: str) -> tuple[str, ...]:
    given: Any = getattr(module, what, ())
    names = given if isinstance(given, tuple | list) else None
    if names is None or not all(isinstance(name, str) and name for name in names):
        raise ValueError(
            f"{what} of stage {stage} is {described(given)}: give a tuple of names, such as {what} = ('mask',)"
        )
    if again := [name for i, name in enumerate(names) if name in names[:i]]:
        raise ValueError(f"{what} of stage {stage} has {again[0]!r} twice: name each value once")
    return tuple(names)


def taken_apart(stage: int, writes: Sequence[str], returned: Any) -> tuple[Any, Mapping[str, Any]]:
    """Split what a stage's forward returned into its output and the values that it writes, by name.

    Raises:
        TypeError: for anything but a pair, or other names than those in ``writes``.
    """
    is_pair = isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping)
    if not is_pair or set(returned[1]) != set(writes):
        beside = f" beside {sorted(returned[1])}" if is_pair else ""
        raise TypeError(
            f"stage {stage} writes {', '.join(map(repr, writes))}, but its forward returns "
            f"{type(returned[0] if is_pair else returned).__name__}{beside}: return (output, {{name: value}}) with "
            "exactly these names"
        )
    return returned


def edges_from(declared: Mapping[int, Declared]) -> tuple[Edge, ...]:
    """Return the edges between the stages, by writer and in its order. A value without a reader has none.

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
