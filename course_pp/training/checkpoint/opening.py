"""Find a whole checkpoint, read its descriptions, and compare two checkpoints."""

import os
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from course_pp.base.arguments import checked
from course_pp.training.checkpoint.directory import is_checkpoint, step_directories
from course_pp.training.checkpoint.manifest import (
    STATE,
    CheckpointError,
    CheckpointRanks,
    problems,
    read_json,
    read_manifest,
    spelled,
)
from course_pp.training.checkpoint.tensors import TensorEntry, read_description, read_tensors


@dataclass(frozen=True)
class Opened:
    """A checkpoint whose descriptions have been read.

    Attributes:
        state: the content of ``state.json``.
        tensors: descriptions of the tensors, by key.
        metadata: the same descriptions, as DCP takes them.
    """

    path: Path
    state: dict[str, Any]
    tensors: dict[str, TensorEntry]
    metadata: Metadata

    def first_name(self, name: str) -> str:
        """Return the name under which a weight was saved. A tied weight has several names."""
        aliases = self.state.get("tied", {})
        # A name may lead to another alias. The number of steps is bounded, because the names in a
        # damaged checkpoint may form a circle.
        for _ in aliases:
            name = aliases.get(name, name)
        return name

    @property
    def weights(self) -> set[str]:
        """The names of all parameters and buffers."""
        return {key.removeprefix("model.") for key in self.tensors if key.startswith("model.")}

    def read(self, keys: Iterable[str]) -> dict[str, Tensor]:
        """Return whole tensors on the CPU."""
        tensors = {}
        for key in keys:
            entry = self.tensors[key]
            tensors[key] = torch.empty(entry.shape, dtype=entry.dtype)
        read_tensors(self.path, self.metadata, tensors)
        return tensors


@checked
def find_latest(root: str | os.PathLike[str]) -> Path | None:
    """Return the newest whole checkpoint in ``root``; None if there is no checkpoint at all.

    It reads every byte of a checkpoint to know that it is whole. A warning names newer ones that
    are damaged. If none is whole, it raises a CheckpointError, because only a person can decide to
    start anew.
    """
    return _newest(Path(root), CheckpointRanks(alone=True))


def open_checkpoint(path: str | os.PathLike[str]) -> Opened:
    """Read the descriptions in a checkpoint, or in the newest whole one of a run.

    This process works alone.
    """
    opened = open_together(Path(path), CheckpointRanks(alone=True))
    if opened is None:
        raise CheckpointError(
            f"{path} holds no checkpoint: give a directory that save has written to"
        )
    return opened


def open_together(path: Path, ranks: CheckpointRanks) -> Opened | None:
    """Find, check and describe a checkpoint, if there is one."""
    # Listed on one rank: a save that is going on might be visible on some ranks only.
    if ranks.first(lambda: is_checkpoint(path)):
        found = _problems_of(path, ranks)
        if found is None:
            found = ["there is no such directory"]
        if found:
            raise CheckpointError(spelled(path, found))
    else:
        newest = _newest(path, ranks)
        if newest is None:
            return None
        path = newest
    return ranks.collectively(lambda: _describe(path))


def _problems_of(path: Path, ranks: CheckpointRanks) -> list[str] | None:
    """Return a checkpoint's problems, with the reading shared among the ranks.

    Return None if a run has deleted the checkpoint in the meantime.
    """

    def look() -> list[str] | None:
        found = problems(path, part=ranks.rank, n_parts=ranks.size)
        return found if not found or os.path.lexists(path) else None

    together: set[str] = set()
    for mine in ranks.each(look):
        if mine is None:
            return None
        together.update(mine)
    return sorted(together)


def _newest(root: Path, ranks: CheckpointRanks) -> Path | None:
    """Return the newest whole checkpoint in a directory.

    If one vanishes, the run has deleted it because there is a newer one: list again.
    """
    damaged: list[str] = []
    candidates = ranks.first(lambda: step_directories(root))
    while candidates:
        path = candidates.pop(0)
        found = _problems_of(path, ranks)
        if found is None:
            damaged = []
            candidates = ranks.first(lambda: step_directories(root))
        elif found:
            damaged.append(spelled(path, found))
        else:
            if damaged and ranks.rank == 0:
                warnings.warn(
                    f"using {path}, because newer ones are not whole: {'; '.join(damaged)}",
                    stacklevel=4,
                )
            return path
    if damaged:
        raise CheckpointError(
            f"none of the checkpoints in {root} is whole ({'; '.join(damaged)}): restore one from a"
            " copy, or start anew in another directory"
        )
    return None


def _describe(path: Path) -> Opened:
    """Read the descriptions in a checkpoint that is whole."""
    _, files = read_manifest(path)
    tensors, metadata = read_description(path, files)
    try:
        state = read_json(path / STATE)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    kinds: dict[str, Any] = {
        "step": int,
        "seed": int,
        "extra": dict,
        "layout": dict,
        "config": dict | None,
        "optimizer": dict | None,
    }
    is_sound = isinstance(state, dict) and all(
        isinstance(state.get(key), kind) for key, kind in kinds.items()
    )
    if not is_sound:
        raise CheckpointError(f"{path}: {STATE} is damaged: entries are missing or make no sense")
    return Opened(path, state, tensors, metadata)


@checked
def contents(path: str | os.PathLike[str]) -> list[TensorEntry]:
    """Return the tensors in a checkpoint, or in the newest whole one of a run, sorted by key."""
    tensors = open_checkpoint(path).tensors
    return [tensors[key] for key in sorted(tensors, key=_natural)]


def _natural(key: str) -> list[tuple[int, str]]:
    """Return a key for sorting that puts layer 2 before layer 10."""
    parts = []
    for part in key.split("."):
        parts.append((int(part), "") if part.isdigit() else (0, part))
    return parts


@dataclass(frozen=True)
class Difference:
    """One difference between two checkpoints.

    Attributes:
        key: key of a tensor, or a dotted path into ``state.json``.
        what: the difference in words.
        max_abs: largest absolute difference of two numbers, if the tensors have one shape.
    """

    key: str
    what: str
    max_abs: float | None = None


@checked
def diff(first: str | os.PathLike[str], second: str | os.PathLike[str]) -> list[Difference]:
    """Return the differences between two checkpoints; none if they hold the same.

    Another layout alone is no difference. But each rank has random number generators of its own,
    and generators of ranks that only one checkpoint has are named. NaN equals NaN. One tensor of
    each checkpoint is in memory at a time.
    """
    one = open_checkpoint(first)
    other = open_checkpoint(second)
    a = dict(_flat(one.state))
    b = dict(_flat(other.state))
    found = []
    for key in sorted({*a, *b}):
        here, there = a.get(key, "absent"), b.get(key, "absent")
        # The layout may differ, and with it the ties that several ranks hold.
        if here != there and not key.startswith(("layout.", "tied", "writer")):
            found.append(Difference(key, f"{here!r} and {there!r}"))
    for key in sorted({*one.tensors, *other.tensors}, key=_natural):
        found += _tensor_differences(one, other, key)
    return found


def _tensor_differences(one: Opened, other: Opened, key: str) -> Iterator[Difference]:
    a, b = one.tensors.get(key), other.tensors.get(key)
    if a is None or b is None:
        yield Difference(key, "only in the second" if a is None else "only in the first")
        return
    if a.shape != b.shape:
        yield Difference(key, f"{a.shape} and {b.shape}")
        return

    x, y = one.read([key])[key], other.read([key])[key]
    if key.startswith("rng."):
        if not torch.equal(x, y):
            yield Difference(key, "another state")
        return
    dtypes = "" if x.dtype == y.dtype else f"{x.dtype} and {y.dtype}, "
    x, y = x.double(), y.double()
    differ = (x != y) & ~(x.isnan() & y.isnan())
    if dtypes or differ.any():
        gaps = (x - y).abs()[differ]
        largest = gaps.max().item() if gaps.numel() else 0.0
        what = f"{dtypes}{gaps.numel():,} of {differ.numel():,} numbers"
        yield Difference(key, what, largest)


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a JSON value, each with its dotted path."""
    children: Iterable[tuple[Any, Any]]
    if isinstance(value, dict) and value:
        children = value.items()
    elif isinstance(value, list):
        children = enumerate(value)
    else:
        yield path, value
        return
    for key, child in children:
        yield from _flat(child, f"{path}.{key}" if path else str(key))
