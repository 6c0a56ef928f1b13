"""Check that a name which several ranks hold means one tensor.

A checkpoint has one tensor for each name. Ranks that share a name must hold parts of one sharded tensor, or equal
copies: of data-parallel ranks, of a stage on two ranks, of the ends of a tied weight. Parts of one ``DTensor`` are
known by its mesh. Everything else is compared by digest, which reads it once; if every stage has names of its own,
there is nothing to compare.

Buffers that differ between data-parallel ranks, such as the statistics of BatchNorm, are not copies: the lowest rank's
are saved.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from course_pp.training.checkpoint._torch import chunk_of
from course_pp.training.checkpoint.ranks import CheckpointError, Ranks
from course_pp.training.checkpoint.state import STAGES

__all__ = ["Copy", "check_copies", "local_part"]

Box = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Copy:
    """What one rank holds under a name of the checkpoint.

    Attributes:
        name: what the rank itself calls it; another end of a tied weight has another name.
        place: where the rank is along the pipeline; ranks at one place hold the same stages.
        tensor: the values.
        is_buffer: True if no optimizer trains it.
    """

    name: str
    place: int
    tensor: Tensor
    is_buffer: bool = False


@dataclass(frozen=True)
class _Held:
    """A :class:`Copy` as other ranks are told of it: all but the values."""

    rank: int
    number: int
    name: str
    place: int
    is_buffer: bool
    kind: tuple[object, ...]
    mesh: tuple[object, ...] | None


def check_copies(copies: Mapping[str, Sequence[Copy]], ranks: Ranks) -> set[str]:
    """Check that every name means one tensor. Call it on every rank.

    Args:
        copies: what this rank holds by key; more than one where it holds several ends of a tied weight.

    Returns:
        Keys of buffers that this rank must not write: a lower rank at the same place does.

    Raises:
        CheckpointError: on every rank, naming two ranks that hold different tensors under one name.
    """
    mine = {key: [_told(copy, i, ranks.rank) for i, copy in enumerate(held)] for key, held in copies.items()}
    holders: dict[str, list[_Held]] = {}
    for theirs in ranks.gather(mine):
        for key, told in theirs.items():
            holders.setdefault(key, []).extend(told)
    left_out = set()
    shared: dict[str, list[_Held]] = {}
    for key in sorted(holders):
        counted = list(_counted(holders[key]))
        if key in mine and not any(held.rank == ranks.rank for held in counted):
            left_out.add(key)
        _check_kinds(key, counted)
        if len(counted) > 1 and not _is_one_tensor(counted):
            shared[key] = counted
    if shared:
        _check_values(copies, shared, ranks)
    return left_out


def _told(copy: Copy, number: int, rank: int) -> _Held:
    tensor = copy.tensor
    mesh = None
    if isinstance(tensor, DTensor):
        mesh = (tuple(tensor.device_mesh.mesh.flatten().tolist()), tuple(tensor.device_mesh.shape), tensor.placements)
    return _Held(rank, number, copy.name, copy.place, copy.is_buffer, (tuple(tensor.shape), tensor.dtype), mesh)


def _counted(holders: Sequence[_Held]) -> Iterator[_Held]:
    """Yield all holders, but of plain buffers only the first at each place."""
    places: set[tuple[str, int]] = set()
    for held in holders:
        if held.is_buffer and held.mesh is None:
            if (held.name, held.place) in places:
                continue
            places.add((held.name, held.place))
        yield held


def _is_one_tensor(holders: Sequence[_Held]) -> bool:
    """Return whether they hold the parts of one ``DTensor``."""
    return holders[0].mesh is not None and len({(held.name, held.mesh) for held in holders}) == 1


def _check_kinds(key: str, holders: Sequence[_Held]) -> None:
    for held in holders[1:]:
        if held.kind != holders[0].kind:
            raise _difference(key, holders[0], held)


def _check_values(copies: Mapping[str, Sequence[Copy]], shared: Mapping[str, Sequence[_Held]], ranks: Ranks) -> None:
    """Compare the digests of what ranks hold of ``shared``."""
    everyone = ranks.each(
        lambda: {key: [_digest(copy.tensor) for copy in copies[key]] for key in shared if key in copies}
    )
    for key, holders in shared.items():
        found: dict[Box, tuple[_Held, bytes]] = {}
        boxes: dict[tuple[object, ...], set[Box]] = {}
        for held in holders:
            box, digest = everyone[held.rank][key][held.number]
            first, expected = found.setdefault(box, (held, digest))
            if digest != expected:
                raise _difference(key, first, held)
            source = (held.name, held.mesh) if held.mesh else (held.name, held.rank)
            boxes.setdefault(source, set()).add(box)
        if any(cut != boxes[next(iter(boxes))] for cut in boxes.values()):
            raise CheckpointError(
                f"ranks {holders[0].rank} and {holders[-1].rank} cut {_spelled(key)} into different pieces: shard it "
                "in the same way on every rank that holds it"
            )


def _digest(tensor: Tensor) -> tuple[Box, bytes]:
    """Return which part of a tensor this rank holds, and a digest of its bytes."""
    offsets, sizes = chunk_of(tensor) if isinstance(tensor, DTensor) else ((0,) * tensor.dim(), tuple(tensor.shape))
    content = local_part(tensor).detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return (offsets, sizes), hashlib.blake2b(content.data, digest_size=16).digest()


def _difference(key: str, one: _Held, other: _Held) -> CheckpointError:
    what = _spelled(key)
    if one.name != other.name:
        return CheckpointError(
            f"{one.name} of rank {one.rank} and {other.name} of rank {other.rank} are tied and differ in {what}: give "
            "both the sum of their gradients in every step, or leave the tie away"
        )
    where = f"rank {one.rank} and rank {other.rank}"
    if one.place == other.place or one.name.startswith(STAGES):
        return CheckpointError(
            f"{where} hold copies of {what} that differ: give it the same gradients on all ranks that hold "
            "it, in every step"
        )
    return CheckpointError(
        f"{where} hold different tensors under one name, {what}: pass the stages as {{index: stage}}, so that their "
        "names begin with the stage"
    )


def _spelled(key: str) -> str:
    kind, _, name = key.partition(".")
    return name if kind == "model" else f"{name.rpartition('.')[2]} of {name.rpartition('.')[0]}"


def local_part(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
