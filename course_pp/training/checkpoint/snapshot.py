"""What one rank saves; and that all ranks together hold one whole model, each tensor once.

Several ranks may hold a name in two ways:

    parts of one sharded tensor    a ``DTensor`` of one mesh: nothing to compare
    equal copies                   of data-parallel ranks, of a stage on two ranks, of the ends of a tied weight:
                                   compared by digest, which reads each of them once

Buffers that differ between data-parallel ranks, such as the statistics of BatchNorm, are not copies: the lowest rank's
are saved.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from course_pp.collective import difference
from course_pp.model import Transformer
from course_pp.training.checkpoint.manifest import (
    MANIFEST,
    METADATA,
    STATE,
    CheckpointError,
    Ranks,
    is_plain_name,
)
from course_pp.training.checkpoint.state import (
    DIMENSIONS,
    STAGES,
    Group,
    Modules,
    RankState,
    Ties,
    config_of,
    keyed,
    merged,
    mesh_coordinates,
    optimizer_groups,
    rng_tensors,
    state_of,
)

Attachments = Mapping[str, str | bytes]
Box = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Snapshot:
    """What one rank saves: its tensors by key, referred to and not copied; and on rank 0 the small files by name."""

    step: int
    tensors: dict[str, Tensor]
    files: dict[str, bytes]


@dataclass(frozen=True)
class _Told:
    """What a rank tells the others of what it holds; as in :class:`RankState`, without the tensors.

    Attributes:
        names: of what it saves.
        expected: the names of the whole model, as far as they are known.
        groups: those of its optimizer.
    """

    names: set[str]
    met: set[str]
    declared: list[tuple[str, ...]]
    aliases: dict[str, str]
    indices: set[tuple[int, int | None]]
    config: dict[str, Any] | None
    expected: set[str]
    groups: list[Group]


def take(
    step: int,
    modules: Modules,
    optimizer: torch.optim.Optimizer | None,
    device_mesh: DeviceMesh | None,
    extra: Mapping[str, Any] | None,
    attachments: Attachments | None,
    tied: Ties | None,
    ranks: Ranks,
) -> Snapshot:
    """Check that the ranks together hold one whole model, each tensor once, and describe the run."""
    state = RankState()

    def look() -> _Told:
        nonlocal state
        if step < 0:
            raise CheckpointError(f"step={step} must be at least 0")
        state = state_of(modules, tied)
        groups = [] if optimizer is None else optimizer_groups(optimizer, state.ends)
        told = state.met, state.declared, state.aliases, state.indices, config_of(state), _whole_model(state)
        return _Told(set(state.owned), *told, groups)

    everyone = ranks.each(look)
    config = _check_whole(everyone)
    coordinates = mesh_coordinates(device_mesh, ranks.rank)
    left_to_others = check_copies(state, optimizer, coordinates["pp"], ranks)
    tensors = keyed(list(state.owned.items()), optimizer)
    tensors = {key: tensor for key, tensor in tensors.items() if key not in left_to_others}

    def describe() -> dict[str, bytes]:
        layout = {**dict.fromkeys(DIMENSIONS, 1), "pp": ranks.size}
        if device_mesh is not None:
            sizes = dict(zip(device_mesh.mesh_dim_names or (), device_mesh.shape, strict=True))
            layout = {name: sizes.get(name, 1) for name in DIMENSIONS}
        groups = [asdict(group) for group in merged(group for told in everyone for group in told.groups)]
        described = {
            "step": step,
            "config": config,
            "layout": layout,
            "seed": torch.initial_seed(),
            "optimizer": None if optimizer is None else {"kind": type(optimizer).__name__, "groups": groups},
            "extra": dict(extra or {}),
            "tied": {alias: first for told in everyone for alias, first in told.aliases.items()},
        }
        try:
            # Infinity and NaN are not in JSON, though it would write them.
            files = {STATE: json.dumps(described, indent=1, allow_nan=False).encode()}
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"extra must be JSON (finite numbers, text, lists, dictionaries): {error}") from error
        for name, content in (attachments or {}).items():
            if not is_plain_name(name) or name in (MANIFEST, STATE, METADATA) or name.endswith(".distcp"):
                raise CheckpointError(
                    f"{name!r} cannot be attached: choose a plain file name other than {MANIFEST}, {STATE}, {METADATA}"
                )
            files[name] = content.encode() if isinstance(content, str) else content
        return files

    files = ranks.first(describe)
    return Snapshot(step, tensors | rng_tensors(coordinates), files if ranks.rank == 0 else {})


def _whole_model(state: RankState) -> set[str]:
    """Return the names that all ranks together must hold, as far as the modules know them: those of our own model."""
    configs = [module.config for module in state.modules if isinstance(module, Transformer)]
    if not configs:
        return set()
    with torch.device("meta"):
        return {name for name, _ in Transformer(configs[0]).named_parameters()}


def _check_whole(everyone: list[_Told]) -> dict[str, Any] | None:
    """Check that the ranks together passed all of one model; return its sizes, None if its modules have none."""
    found = set().union(*(told.names for told in everyone))
    for told in everyone:
        if missing := sorted(told.expected - found):
            more = f"{len(missing)} parameters of the model are missing"
            raise CheckpointError(f"no rank passed a module with {missing[0]} ({more}): pass all stages of every rank")
    stages = set().union(*(told.indices for told in everyone))
    n_stages = max((n or index + 1 for index, n in stages), default=0)
    if stages and (missing_stages := sorted(set(range(n_stages)) - {index for index, _ in stages})):
        raise CheckpointError(f"no rank passed stage {missing_stages[0]} of {n_stages}: pass all stages of every rank")
    check_ties_are_declared_alike([(told.declared, told.met) for told in everyone])
    return next((told.config for told in everyone if told.config), None)


def check_ties_are_declared_alike(everyone: Sequence[tuple[Sequence[tuple[str, ...]], set[str]]]) -> None:
    """Refuse ties that the ranks do not declare alike, or that name what no rank has.

    Args:
        everyone: each rank's ``declared`` and ``met``.
    """
    if problem := difference([{"tied": declared} for declared, _ in everyone]):
        raise CheckpointError(problem)
    held = set().union(*(met for _, met in everyone))
    if strangers := sorted({name for tie in everyone[0][0] for name in tie} - held):
        raise CheckpointError(f"tied= names {strangers[0]}, which no rank's modules have: write it as they do")


@dataclass(frozen=True)
class Copy:
    """What other ranks are told of a tensor that one rank holds under a key of the checkpoint.

    Attributes:
        rank: which holds it.
        number: among those of this rank under this key; more than one where it holds several ends of a tied weight.
        name: what the rank itself calls it; another end of a tied weight has another name.
        place: where the rank is along the pipeline; ranks at one place hold the same stages.
        is_buffer: True if no optimizer trains it.
        shape, dtype: of all of it.
        mesh: ranks and placements of a sharded tensor; None for any other.
    """

    rank: int
    number: int
    name: str
    place: int
    is_buffer: bool
    shape: tuple[int, ...]
    dtype: torch.dtype
    mesh: tuple[object, ...] | None


def check_copies(state: RankState, optimizer: torch.optim.Optimizer | None, place: int, ranks: Ranks) -> set[str]:
    """Check that every name means one tensor; a collective.

    Args:
        place: where this rank is along the pipeline.

    Returns:
        Keys of buffers that this rank must not write: a lower rank at the same place does.
    """
    tensors: dict[str, list[Tensor]] = {}
    mine: dict[str, list[Copy]] = {}

    def tell() -> dict[str, list[Copy]]:
        for name, end in state.ends:
            own, is_buffer = state.own_names.get(id(end), name), name in state.buffers
            for key, tensor in keyed([(name, end)], optimizer).items():
                held = tensors.setdefault(key, [])
                what = own, place, is_buffer, tuple(tensor.shape), tensor.dtype, _mesh_of(tensor)
                mine.setdefault(key, []).append(Copy(ranks.rank, len(held), *what))
                held.append(tensor)
        return mine

    holders: dict[str, list[Copy]] = {}
    for theirs in ranks.each(tell):
        for key, copies in theirs.items():
            holders.setdefault(key, []).extend(copies)
    counted = {key: list(_counted(holders[key])) for key in sorted(holders)}
    to_compare = {}
    for key, copies in counted.items():
        for copy in copies:
            if (copy.shape, copy.dtype) != (copies[0].shape, copies[0].dtype):
                raise _difference(key, copies[0], copy)
        parts_of_one = copies[0].mesh is not None and len({(copy.name, copy.mesh) for copy in copies}) == 1
        if len(copies) > 1 and not parts_of_one:
            to_compare[key] = copies
    if to_compare:
        digests = ranks.each(
            lambda: {key: [_digest(each) for each in tensors[key]] for key in to_compare if key in tensors}
        )
        for key, copies in to_compare.items():
            first: dict[Box, tuple[Copy, bytes]] = {}
            for copy in copies:
                box, digest = digests[copy.rank][key][copy.number]
                before, expected = first.setdefault(box, (copy, digest))
                if digest != expected:
                    raise _difference(key, before, copy)  # where pieces overlap otherwise, DCP refuses to write
    return {key for key in mine if all(copy.rank != ranks.rank for copy in counted[key])}


def _mesh_of(tensor: Tensor) -> tuple[object, ...] | None:
    if not isinstance(tensor, DTensor):
        return None
    mesh = tensor.device_mesh
    return tuple(mesh.mesh.flatten().tolist()), tuple(mesh.shape), tensor.placements


def _counted(copies: Sequence[Copy]) -> Iterator[Copy]:
    """Yield all copies, but of plain buffers only the first at each place."""
    places: set[tuple[str, int]] = set()
    for copy in copies:
        if copy.is_buffer and copy.mesh is None:
            if (copy.name, copy.place) in places:
                continue
            places.add((copy.name, copy.place))
        yield copy


def _digest(tensor: Tensor) -> tuple[Box, bytes]:
    """Return which part of a tensor this rank holds, and a digest of its bytes."""
    box: Box = (0,) * tensor.dim(), tuple(tensor.shape)
    if isinstance(tensor, DTensor):
        [chunk] = tensor.__create_chunk_list__()
        box = tuple(chunk.offsets), tuple(chunk.sizes)
    content = local_part(tensor).detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return box, hashlib.blake2b(content.data, digest_size=16).digest()


def _difference(key: str, one: Copy, other: Copy) -> CheckpointError:
    what, where = _spelled(key), f"rank {one.rank} and rank {other.rank}"
    if one.name != other.name:
        return CheckpointError(
            f"{one.name} of rank {one.rank} and {other.name} of rank {other.rank} are tied and differ in {what}: give "
            "both the sum of their gradients in every step, or leave the tie away"
        )
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
