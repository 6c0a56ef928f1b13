"""Loading: fill what this rank holds of the model from a checkpoint that is whole and of this model."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from course_pp.arguments import check_arguments, checked
from course_pp.training.checkpoint.directory import named
from course_pp.training.checkpoint.files import read_tensors
from course_pp.training.checkpoint.matching import (
    check_declared,
    check_model,
    check_optimizer,
    check_ties,
    hint,
    renamed,
    saved_slots,
)
from course_pp.training.checkpoint.opening import Opened, open_together
from course_pp.training.checkpoint.ranks import CheckpointError, Ranks
from course_pp.training.checkpoint.rng import mesh_coordinates, restore_rng, rng_keys
from course_pp.training.checkpoint.state import Group, Held, Modules, Part, Ties, held_by, load_into, parts_of

__all__ = ["Loaded", "load", "resume"]


@checked
@dataclass(frozen=True)
class Loaded:
    """What was loaded.

    Attributes:
        path: the checkpoint.
        step: number of steps that were finished.
        extra: what :func:`save` was given.
    """

    path: Path
    step: int
    extra: dict[str, Any]


def load(
    path: str | os.PathLike[str],
    modules: Modules,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    device_mesh: DeviceMesh | None,
    tied: Ties | None = None,
) -> Loaded:
    """Fill modules and optimizer from a checkpoint, in place, at this layout, whatever the one it was written at.

    What was read goes through each module's ``load_state_dict``, so its hooks see it, as in torch's own recipe. Call
    it on every rank, with modules and optimizer as they will be trained, whether or not steps were taken.

    Args:
        path: a checkpoint, or the directory of a run's checkpoints, of which the newest whole one is loaded.
        modules: this rank's stages, or the whole model; ``{index: stage}`` if it was saved so.
        optimizer: None loads the weights alone; otherwise the random number generators are restored too
            (:mod:`~course_pp.training.checkpoint.rng` says what ranks that were not there get).
        device_mesh: as for :func:`save`.
        tied: as for :func:`save`; to be given only for a checkpoint that was saved without saying so.

    Raises:
        CheckpointError: on every rank with the same sentence, if the checkpoint is damaged, of another model, or holds
            anything that is not a tensor or JSON. Nothing is changed, unless the disk, or a module's own
            ``load_state_dict``, fails after the checks.
    """
    loaded = resume(path, modules, optimizer, device_mesh=device_mesh, tied=tied)
    if loaded is None:
        raise CheckpointError(f"{path} holds no checkpoint: give a directory that save has written to")
    return loaded


def resume(
    path: str | os.PathLike[str],
    modules: Modules,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    device_mesh: DeviceMesh | None,
    tied: Ties | None = None,
) -> Loaded | None:
    """Load as :func:`load` does; return None if ``path`` does not exist or holds no checkpoint."""
    given = locals()
    ranks = Ranks()
    ranks.each(lambda: check_arguments(resume, given))
    opened = open_together(named(path), ranks)
    if opened is None:
        return None
    # By itself, as the state_dict of some modules is a collective: all ranks are through it before one refuses.
    parts, mine = ranks.collectively(lambda: _held_here(modules, tied))
    held = Held()

    def compare() -> tuple[set[str], set[str], list[tuple[str, ...]]]:
        nonlocal held
        held, also = renamed(mine, opened)
        check_model(opened, parts, held)
        if optimizer is not None:
            check_optimizer(opened, optimizer, held)
        check_ties(opened, also, optimizer is not None)
        found = {name for name, _ in held.ends} | {name for names in also.values() for name in names}
        return found, mine.met, mine.declared

    everyone = ranks.each(compare)
    check_declared([declared for *_, declared in everyone], set().union(*(met for _, met, _ in everyone)))
    here = set().union(*(found for found, *_ in everyone))
    left = sorted({key.removeprefix("model.") for key in opened.keys if key.startswith("model.")} - here)
    if left:
        raise CheckpointError(
            f"{opened.path} is of another model: it has {left[0]}, which no rank's modules have{hint(left[0])}"
        )
    request = _Request(opened)
    for name, tensor in held.ends:
        request.fill(f"model.{name}", tensor.detach())
    slots = [] if optimizer is None else _request_slots(request, optimizer, held)
    coordinates = mesh_coordinates(device_mesh, ranks.rank)
    rng = {} if optimizer is None else rng_keys(coordinates, opened.metadata.state_dict_metadata)
    states = {kind: request.new(key, torch.device("cpu")) for kind, key in rng.items()}
    request.read(ranks)
    ranks.collectively(lambda: _load(mine, optimizer))
    if optimizer is not None:
        _apply(optimizer, slots, held, opened.groups or [])
        restore_rng(states, opened.state["seed"], opened.state["step"], coordinates)
    return Loaded(opened.path, opened.state["step"], opened.state["extra"])


def _held_here(modules: Modules, tied: Ties | None) -> tuple[list[Part], Held]:
    parts = parts_of(modules)
    return parts, held_by(parts, tied)


def _load(held: Held, optimizer: torch.optim.Optimizer | None) -> None:
    """Let each module take the state that was read, much of it in its own memory already, by its own means."""
    for module, state in held.states:
        load_into(module, state)
    own = {id(parameter) for module, _ in held.states for parameter in module.parameters()}
    trained = () if optimizer is None else (each for group in optimizer.param_groups for each in group["params"])
    if lost := [held.own_names[id(each)] for each in trained if id(each) not in own]:
        raise CheckpointError(
            f"load_state_dict puts another parameter in the place of {lost[0]}, which the optimizer trains: let it "
            "copy into the one that is there"
        )


class _Request:
    """The tensors to read, each once, and those that get a copy of what was read."""

    def __init__(self, opened: Opened) -> None:
        self._opened = opened
        self._tensors: dict[str, Tensor] = {}
        self._copies: list[tuple[Tensor, str]] = []

    def fill(self, key: str, tensor: Tensor) -> Tensor:
        """Read into ``tensor``; the second end of a tie on this rank gets a copy of the first."""
        if key in self._tensors:
            self._copies.append((tensor, key))
        else:
            self._tensors[key] = tensor
        return tensor

    def new(self, key: str, device: torch.device, like: Tensor | None = None) -> Tensor:
        """Read into a new tensor, sharded as ``like`` is if it has its shape."""
        entry = self._opened.entry(key)
        assert entry is not None
        dtype = entry.properties.dtype
        if like is not None and entry.size == like.shape and like.dim() > 0:
            return self.fill(key, torch.empty_like(like.detach(), dtype=dtype))
        return self.fill(key, torch.empty(entry.size, dtype=dtype, device=device))

    @torch.no_grad()
    def read(self, ranks: Ranks) -> None:
        """Read everything."""
        read_tensors(self._opened.path, self._opened.metadata, self._tensors, ranks)
        for tensor, key in self._copies:
            tensor.copy_(self._tensors[key])


Slots = dict[str, Tensor]


def _request_slots(request: _Request, optimizer: torch.optim.Optimizer, held: Held) -> list[Slots]:
    """New state for each end in ``held``, to be filled; empty where the checkpoint has none."""
    saved = saved_slots(request._opened)
    counts_on_device = {
        id(p)
        for group in optimizer.param_groups
        for p in group["params"]
        if group.get("fused") or group.get("capturable")
    }
    return [
        {
            slot: request.new(
                f"optimizer.{name}.{slot}",
                tensor.device if id(tensor) in counts_on_device else torch.device("cpu"),
                like=tensor,
            )
            for slot in saved.get(name, [])
        }
        for name, tensor in held.ends
    ]


def _apply(optimizer: torch.optim.Optimizer, slots: list[Slots], held: Held, groups: list[Group]) -> None:
    """Give the optimizer its state and options."""
    state = {id(tensor): mine for (_, tensor), mine in zip(held.ends, slots, strict=True)}
    names = {id(tensor): name for name, tensor in held.ends}
    options = {name: group.options for group in groups for name in group.parameters}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state.pop(parameter, None)
            if state[id(parameter)]:
                optimizer.state[parameter] = state[id(parameter)]
        if group["params"]:
            _set_options(group, options[names[id(group["params"][0])]])


def _set_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    for key, value in options.items():
        current = group.get(key)
        if isinstance(current, Tensor):
            current.fill_(value)
        else:
            group[key] = tuple(value) if isinstance(current, tuple) else value
