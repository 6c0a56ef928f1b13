"""Find a whole checkpoint and read what it holds; compare two."""

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
    Ranks,
    problems,
    read_json,
    read_manifest,
    spelled,
)
from course_pp.training.checkpoint.tensors import TensorEntry, read_description, read_tensors


@dataclass(frozen=True)
class Opened:
    """A checkpoint whose descriptions have been read; ``metadata`` says to DCP what ``tensors`` say."""

    path: Path
    state: dict[str, Any]
    tensors: dict[str, TensorEntry]
    metadata: Metadata

    def first_name(self, name: str) -> str:
        """Return the name under which a weight was saved; its own, unless that is another name of a tied weight."""
        aliases = self.state.get("tied", {})
        for _ in aliases:
            name = aliases.get(name, name)
        return name

    @property
    def weights(self) -> set[str]:
        """The names of all parameters and buffers."""
        return {key.removeprefix("model.") for key in self.tensors if key.startswith("model.")}

    def read(self, keys: Iterable[str]) -> dict[str, Tensor]:
        """Return whole tensors on the CPU."""
        tensors = {
            key: torch.empty(self.tensors[key].shape, dtype=self.tensors[key].dtype) for key in keys
        }
        read_tensors(self.path, self.metadata, tensors)
        return tensors


@checked
def find_latest(root: str | os.PathLike[str]) -> Path | None:
    """Return the newest whole checkpoint in ``root``, found by reading every byte of it; None if
    there is none at all.

    Newer ones that are damaged are named in a warning. If none is whole, it raises a
    CheckpointError: starting anew is then for a person to decide.
    """
    return _newest(Path(root), Ranks(alone=True))


def open_checkpoint(path: str | os.PathLike[str]) -> Opened:
    """Read the descriptions in a checkpoint, or in the newest whole one of a run, in this process alone."""
    opened = open_together(Path(path), Ranks(alone=True))
    if opened is None:
        raise CheckpointError(
            f"{path} holds no checkpoint: give a directory that save has written to"
        )
    return opened


def open_together(path: Path, ranks: Ranks) -> Opened | None:
    """Find, check and describe a checkpoint, if there is one."""
    # Listed on one rank: a save that is going on must not show itself to some ranks only.
    if not ranks.first(lambda: is_checkpoint(path)):
        newest = _newest(path, ranks)
        if newest is None:
            return None
        path = newest
    elif (found := _problems_of(path, ranks)) is None or found:
        raise CheckpointError(spelled(path, found or ["there is no such directory"]))
    return ranks.collectively(lambda: _describe(path))


def _problems_of(path: Path, ranks: Ranks) -> list[str] | None:
    """Return what is wrong, the ranks sharing the reading; None if a run has deleted the checkpoint since."""

    def look() -> list[str] | None:
        found = problems(path, ranks.rank, ranks.size)
        return found if not found or os.path.lexists(path) else None

    everyone = ranks.each(look)
    return (
        None
        if None in everyone
        else sorted({problem for mine in everyone for problem in mine or ()})
    )


def _newest(root: Path, ranks: Ranks) -> Path | None:
    """Return the newest that is whole; list again if one has vanished: a newer one has come then."""
    damaged: list[str] = []
    candidates = iter(ranks.first(lambda: step_directories(root)))
    while (path := next(candidates, None)) is not None:
        found = _problems_of(path, ranks)
        if found is None:
            damaged, candidates = [], iter(ranks.first(lambda: step_directories(root)))
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
        how = "restore one from a copy, or start anew in another directory"
        raise CheckpointError(
            f"none of the checkpoints in {root} is whole ({'; '.join(damaged)}): {how}"
        )
    return None


def _describe(path: Path) -> Opened:
    _, files = read_manifest(path)
    tensors, metadata = read_description(path, files)
    try:
        state = read_json(path / STATE)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    kinds: dict[str, Any] = {"step": int, "seed": int, "extra": dict, "layout": dict}
    kinds |= {"config": dict | None, "optimizer": dict | None}
    if not isinstance(state, dict) or not all(
        isinstance(state.get(key), kind) for key, kind in kinds.items()
    ):
        raise CheckpointError(f"{path}: {STATE} is damaged: entries are missing or make no sense")
    return Opened(path, state, tensors, metadata)


@checked
def contents(path: str | os.PathLike[str]) -> list[TensorEntry]:
    """Return every tensor in a checkpoint, or in the newest whole one of a run, in the order of their keys."""
    tensors = open_checkpoint(path).tensors
    return [tensors[key] for key in sorted(tensors, key=_natural)]


def _natural(key: str) -> list[tuple[int, str]]:
    """Sort layer 2 before layer 10."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in key.split(".")]


@dataclass(frozen=True)
class Difference:
    """One difference between two checkpoints.

    Attributes:
        key: of a tensor, or a dotted path into ``state.json``.
        what: how it differs.
        max_abs: largest absolute difference of a number, for tensors of numbers of one shape.
    """

    key: str
    what: str
    max_abs: float | None = None


@checked
def diff(first: str | os.PathLike[str], second: str | os.PathLike[str]) -> list[Difference]:
    """Return the differences between two checkpoints, however they are laid out; none if they hold
    the same.

    One tensor of each is in memory at a time. Another layout alone is no difference. But each rank
    has random number generators of its own, and those of ranks that only one checkpoint has are
    named. NaN equals NaN.
    """
    one, other = open_checkpoint(first), open_checkpoint(second)
    a, b = dict(_flat(one.state)), dict(_flat(other.state))
    keys = [key for key in sorted({*a, *b}) if not key.startswith(("layout.", "tied", "writer"))]
    pairs = [(key, a.get(key, "absent"), b.get(key, "absent")) for key in keys]
    found = [
        Difference(key, f"{here!r} and {there!r}") for key, here, there in pairs if here != there
    ]
    for key in sorted({*one.tensors, *other.tensors}, key=_natural):
        found += _tensor_differences(one, other, key)
    return found


def _tensor_differences(one: Opened, other: Opened, key: str) -> Iterator[Difference]:
    a, b = one.tensors.get(key), other.tensors.get(key)
    if a is None or b is None:
        yield Difference(key, "only in the second" if a is None else "only in the first")
    elif a.shape != b.shape:
        yield Difference(key, f"{a.shape} and {b.shape}")
    else:
        x, y = one.read([key])[key], other.read([key])[key]
        dtypes = "" if x.dtype == y.dtype else f"{x.dtype} and {y.dtype}, "
        if key.startswith("rng."):
            if not torch.equal(x, y):
                yield Difference(key, "another state")
        else:
            x, y = x.double(), y.double()
            differ = (x != y) & ~(x.isnan() & y.isnan())
            if dtypes or differ.any():
                gaps = (x - y).abs()[differ]
                largest = gaps.max().item() if gaps.numel() else 0.0
                yield Difference(
                    key, f"{dtypes}{gaps.numel():,} of {differ.numel():,} numbers", largest
                )


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    children = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else None
    )
    if not children:
        yield path, value
        return
    for key, child in children:
        yield from _flat(child, f"{path}.{key}" if path else str(key))
