"""What one rank saves: its tensors by key, and on rank 0 the description of the run."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from course_pp.training.checkpoint.copies import Copy, check_copies
from course_pp.training.checkpoint.manifest import MANIFEST, METADATA, STATE, is_plain_name
from course_pp.training.checkpoint.matching import check_declared
from course_pp.training.checkpoint.ranks import CheckpointError, Ranks
from course_pp.training.checkpoint.rng import DIMENSIONS, mesh_coordinates, rng_tensors
from course_pp.training.checkpoint.state import (
    Group,
    Held,
    Modules,
    Part,
    Ties,
    as_json,
    config_of,
    held_by,
    merged,
    optimizer_groups,
    optimizer_tensors,
    parts_of,
    whole_model,
)
from course_pp.training.checkpoint.writer import this_process

__all__ = ["Attachments", "Snapshot", "take"]

Attachments = Mapping[str, str | bytes]


@dataclass(frozen=True)
class Snapshot:
    """What one rank saves.

    Attributes:
        step: number of finished steps.
        tensors: by key; referred to, not copied.
        files: the small ones, by name; on rank 0 alone.
    """

    step: int
    tensors: dict[str, Tensor]
    files: dict[str, bytes]


@dataclass(frozen=True)
class _Told:
    """What a rank tells the others of its part.

    Attributes:
        names: those it saves.
        held: all that it holds.
        declared: the names of each tie that the caller or the stages named.
        aliases: their other names, and those that were found, each with the first.
        stages: (index, number of stages) of its modules, as far as they are known.
        config: sizes of the model, None if its modules have none.
        expected: the names of the whole model, as far as they are known.
        groups: those of its optimizer, None without one.
    """

    names: set[str]
    held: set[str]
    declared: list[tuple[str, ...]]
    aliases: dict[str, str]
    stages: set[tuple[int, int | None]]
    config: dict[str, Any] | None
    expected: set[str]
    groups: list[Group] | None


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
    """Refer to this rank's tensors by key, and describe the run; no tensor is copied.

    Raises:
        CheckpointError: on every rank, if the ranks together do not hold one whole model, each tensor once.
    """
    coordinates = mesh_coordinates(device_mesh, ranks.rank)
    tensors: dict[str, Tensor] = {}
    copies: dict[str, list[Copy]] = {}

    def look() -> _Told:
        if type(step) is not int or step < 0:
            raise CheckpointError(f"step={step!r} must be a whole number of at least 0")
        parts = parts_of(modules)
        held = held_by(parts, tied)
        tensors.update(_keyed(held.owned.items(), held, optimizer))
        for key, copy in _copies(held, optimizer, coordinates["pp"]):
            copies.setdefault(key, []).append(copy)
        return _Told(
            set(held.owned),
            held.met,
            held.declared,
            held.aliases,
            {(part.index, _n_stages(part)) for part in parts if part.index is not None},
            config_of(parts),
            whole_model(parts),
            None if optimizer is None else optimizer_groups(optimizer, held),
        )

    everyone = ranks.each(look)
    config = _check_whole(everyone)
    for key in check_copies(copies, ranks):
        tensors.pop(key, None)
    tensors.update(rng_tensors(coordinates))
    groups = merged(group for told in everyone for group in told.groups or [])
    state = {
        "step": step,
        "config": config,
        "layout": _layout(device_mesh, ranks),
        "seed": torch.initial_seed(),
        "optimizer": None
        if optimizer is None
        else {"kind": type(optimizer).__name__, "groups": list(map(asdict, groups))},
        "extra": dict(extra or {}),
        "tied": {alias: first for told in everyone for alias, first in told.aliases.items()},
        "writer": this_process(),
    }
    files = ranks.first(lambda: {STATE: as_json(state, "extra").encode(), **_attached(attachments or {})})
    return Snapshot(step, tensors, files if ranks.rank == 0 else {})


def _keyed(
    ends: Iterable[tuple[str, Tensor]], held: Held, optimizer: torch.optim.Optimizer | None
) -> dict[str, Tensor]:
    """Weights and their optimizer's state by key."""
    ends = list(ends)
    slots = {} if optimizer is None else optimizer_tensors(optimizer, ends)
    return {f"model.{name}": tensor for name, tensor in ends} | slots


def _copies(held: Held, optimizer: torch.optim.Optimizer | None, place: int) -> Iterable[tuple[str, Copy]]:
    """Yield what this rank holds by key, every end of a tied weight for itself."""
    for name, tensor in held.ends:
        own = held.own_names.get(id(tensor), name)
        for key, value in _keyed([(name, tensor)], held, optimizer).items():
            yield key, Copy(own, place, value, name in held.buffers)


def _n_stages(part: Part) -> int | None:
    number = getattr(part.module, "num_stages", None)
    return number if type(number) is int else None


def _check_whole(everyone: list[_Told]) -> dict[str, Any] | None:
    """Check that the ranks together passed all of one model; return its sizes.

    Raises:
        CheckpointError: naming what is missing.
    """
    found = set().union(*(told.names for told in everyone))
    for told in everyone:
        if missing := sorted(told.expected - found):
            raise CheckpointError(
                f"no rank passed a module with {missing[0]} ({len(missing)} parameters of the model are missing): "
                "pass all stages of every rank"
            )
    stages = set().union(*(told.stages for told in everyone))
    n_stages = max((n or index + 1 for index, n in stages), default=0)
    if stages and (missing_stages := sorted(set(range(n_stages)) - {index for index, _ in stages})):
        raise CheckpointError(f"no rank passed stage {missing_stages[0]} of {n_stages}: pass all stages of every rank")
    check_declared([told.declared for told in everyone], set().union(*(told.held for told in everyone)))
    configs = [(rank, told.config) for rank, told in enumerate(everyone) if told.config]
    for rank, config in configs:
        if config != configs[0][1]:
            raise CheckpointError(
                f"rank {configs[0][0]} holds a part of {configs[0][1]}, rank {rank} of {config}: pass one model"
            )
    return configs[0][1] if configs else None


def _layout(device_mesh: DeviceMesh | None, ranks: Ranks) -> dict[str, int]:
    if device_mesh is None:
        return {**dict.fromkeys(DIMENSIONS, 1), "pp": ranks.size}
    sizes = dict(zip(device_mesh.mesh_dim_names or (), device_mesh.shape, strict=True))
    return {name: sizes.get(name, 1) for name in DIMENSIONS}


def _attached(attachments: Attachments) -> dict[str, bytes]:
    reserved = (MANIFEST, STATE, METADATA)
    for name in attachments:
        if not is_plain_name(name) or name in reserved or name.endswith(".distcp"):
            raise CheckpointError(
                f"{name!r} cannot be attached: choose a plain file name other than {', '.join(reserved)}"
            )
    return {name: content.encode() if isinstance(content, str) else content for name, content in attachments.items()}
