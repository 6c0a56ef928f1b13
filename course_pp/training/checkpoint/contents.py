"""What is in a checkpoint, and what differs between two."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from course_pp.arguments import checked
from course_pp.training.checkpoint._torch import record_of
from course_pp.training.checkpoint.files import read_tensors
from course_pp.training.checkpoint.opening import Opened, open_checkpoint
from course_pp.training.checkpoint.ranks import Ranks

__all__ = ["Difference", "Piece", "TensorEntry", "contents", "diff", "read_whole"]


@checked
@dataclass(frozen=True)
class Piece:
    """A rectangle of a tensor, in one file.

    Attributes:
        offsets, sizes: where it begins in the tensor and how far it reaches, an entry a dimension.
        file: name of the file.
        n_bytes: what it takes there, torch's framing included.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    n_bytes: int

    @property
    def rank(self) -> int:
        """The rank that wrote it."""
        match = re.match(r"__(\d+)_", self.file)
        return int(match[1]) if match else 0


@checked
@dataclass(frozen=True)
class TensorEntry:
    """One tensor and where its pieces are."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def n_bytes(self) -> int:
        """Bytes of its numbers."""
        return prod(self.shape) * self.dtype.itemsize


@checked
def contents(path: str | os.PathLike[str]) -> list[TensorEntry]:
    """Return every tensor in a checkpoint, or in the newest whole one of a run, by key.

    Raises:
        CheckpointError: if it is damaged, or holds anything that is not a tensor or JSON.
    """
    opened = open_checkpoint(path)
    return [_entry_of(opened, key) for key in sorted(opened.keys, key=_natural)]


def _entry_of(opened: Opened, key: str) -> TensorEntry:
    entry = opened.entry(key)
    assert entry is not None
    pieces = []
    for chunk in entry.chunks:
        record = record_of(opened.metadata, key, chunk.offsets)
        assert record is not None
        pieces.append(Piece(tuple(chunk.offsets), tuple(chunk.sizes), record.file, record.n_bytes))
    return TensorEntry(key, entry.properties.dtype, tuple(entry.size), tuple(pieces))


def _natural(key: str) -> list[tuple[int, str]]:
    """Sorts layer 2 before layer 10."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in key.split(".")]


def read_whole(opened: Opened, keys: list[str]) -> dict[str, Tensor]:
    """Return the tensors on the CPU, whole, in this process."""
    tensors = {}
    for key in keys:
        entry = opened.entry(key)
        assert entry is not None
        tensors[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
    read_tensors(opened.path, opened.metadata, tensors, Ranks(alone=True))
    return tensors


@checked
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
    """Return the differences between two checkpoints, however they are laid out; none if they hold the same.

    One tensor of each is in memory at a time. Another layout alone is no difference. But each rank has random number
    generators of its own, and those of ranks that only one checkpoint has are named. NaN equals NaN.
    """
    one, other = open_checkpoint(first), open_checkpoint(second)
    found = list(_state_differences(one.state, other.state))
    for key in sorted({*one.keys, *other.keys}, key=_natural):
        found += _tensor_differences(one, other, key)
    return found


def _tensor_differences(one: Opened, other: Opened, key: str) -> Iterator[Difference]:
    a, b = one.entry(key), other.entry(key)
    if a is None or b is None:
        yield Difference(key, "only in the second" if a is None else "only in the first")
    elif a.size != b.size:
        yield Difference(key, f"{tuple(a.size)} and {tuple(b.size)}")
    else:
        x, y = read_whole(one, [key])[key], read_whole(other, [key])[key]
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
                yield Difference(key, f"{dtypes}{gaps.numel():,} of {differ.numel():,} numbers", largest)


def _state_differences(one: dict[str, Any], other: dict[str, Any]) -> Iterator[Difference]:
    a, b = dict(_flat(one)), dict(_flat(other))
    for key in sorted({*a, *b}):
        if a.get(key) != b.get(key) and not key.startswith(("layout.", "tied", "writer")):
            yield Difference(key, f"{a.get(key, 'absent')!r} and {b.get(key, 'absent')!r}")


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if not children:
        yield path, value
        return
    for key, child in children:
        yield from _flat(child, f"{path}.{key}" if path else str(key))
