"""Loading: fill what this rank holds of the model from a checkpoint that is whole and of this
    model.

A checkpoint of another model or optimizer is refused before anything is changed, by the first thing
that differs.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from course_pp.base.arguments import check_arguments
from course_pp.model import ModelConfig
from course_pp.training.checkpoint.directory import named
from course_pp.training.checkpoint.manifest import CheckpointError, Ranks
from course_pp.training.checkpoint.opening import Opened, open_together
from course_pp.training.checkpoint.state import (
    STAGES,
    Ends,
    Modules,
    RankState,
    Ties,
    check_ties_are_declared_alike,
    config_of,
    load_into,
    mesh_coordinates,
    optimizer_groups,
    restore_rng,
    rng_keys,
    state_of,
)
from course_pp.training.checkpoint.tensors import read_tensors

# Rotary tables are as long as the run says; no weight depends on it.
_MAY_DIFFER = ("max_seq_len",)


@dataclass(frozen=True)
class Loaded:
    """What was loaded: which checkpoint, how many steps were finished, and what :func:`save` was given as ``extra``."""

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
    """Fill modules and optimizer from a checkpoint, in place, at this layout, whatever the one it
    was written at.

    What was read goes through each module's ``load_state_dict``, so its hooks see it, as in torch's
    own recipe. Call it on every rank, with modules and optimizer as they will be trained, whether
    or not steps were taken.

    Args:
        path: a checkpoint, or the directory of a run's checkpoints, of which the newest whole one
            is loaded.
        modules: this rank's stages, or the whole model; ``{index: stage}`` if it was saved so.
        optimizer: None loads the weights alone; otherwise the random number generators are restored
            too (:mod:`~course_pp.training.checkpoint.state` says what ranks that were not there
            get).
        device_mesh: as for :func:`save`.
        tied: as for :func:`save`; to be given only for a checkpoint that was saved without saying
            so.

    Raises:
        CheckpointError: on every rank with the same sentence, if the checkpoint is damaged, of
            another model, or holds anything that is not a tensor or JSON. Nothing is changed then.
    """
    loaded = resume(path, modules, optimizer, device_mesh=device_mesh, tied=tied)
    if loaded is None:
        raise CheckpointError(
            f"{path} holds no checkpoint: give a directory that save has written to"
        )
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
    ranks = Ranks()
    with ranks.refusing_together():
        check_arguments(resume, locals())
    opened = open_together(named(path), ranks)
    if opened is None:
        return None
    # By itself, as the state_dict of some modules is a collective: all ranks are through it before
    # one refuses.
    state = ranks.collectively(lambda: state_of(modules, tied))
    ends, also = _ends_there(state, opened)

    def compare() -> tuple[list[tuple[str, ...]], set[str], set[str], list[dict[str, Any]]]:
        _check_model(opened, config_of(state), ends)
        if optimizer is not None:
            _check_optimizer(opened, optimizer, ends)
        _check_ties(opened, also, optimizer is not None)
        held = {name for name, _ in ends}.union(*also.values())
        options = [] if optimizer is None else _options_of_groups(opened, optimizer, ends)
        return state.declared, state.met, held, options

    everyone = ranks.each(compare)
    check_ties_are_declared_alike([(declared, met) for declared, met, *_ in everyone])
    if left := sorted(opened.weights.difference(*(found for _, _, found, _ in everyone))):
        stranger = f"{left[0]}, which no rank's modules have{_hint(left[0])}"
        raise CheckpointError(f"{opened.path} is of another model: it has {stranger}")
    slots = {} if optimizer is None else _new_slots(opened, optimizer, ends)
    coordinates = mesh_coordinates(device_mesh, ranks.rank)
    rng = {} if optimizer is None else rng_keys(coordinates, opened.tensors)
    generators = {
        kind: torch.empty(opened.tensors[key].shape, dtype=torch.uint8) for kind, key in rng.items()
    }
    wanted = [(rng[kind], generator) for kind, generator in generators.items()]
    for name, tensor in ends:
        wanted.append((f"model.{name}", tensor.detach()))
        wanted += [
            (f"optimizer.{name}.{slot}", new) for slot, new in slots.get(id(tensor), {}).items()
        ]
    ranks.collectively(lambda: _read(opened, wanted))
    ranks.collectively(lambda: _load(state, optimizer))
    if optimizer is not None:
        _apply(optimizer, slots, [options for *_, options in everyone], ranks.rank)
        restore_rng(generators, opened.state["seed"], opened.state["step"], coordinates)
    return Loaded(opened.path, opened.state["step"], opened.state["extra"])


def _ends_there(state: RankState, opened: Opened) -> tuple[Ends, dict[str, list[str]]]:
    """Return what is held here by the checkpoint's names, and of ties saved as several the others by the first."""
    ends: Ends = []
    also: dict[str, list[str]] = {}
    for name, tensor in state.ends:
        known = [name, *(alias for alias, first in state.aliases.items() if first == name)]
        candidates = dict.fromkeys(opened.first_name(each) for each in known)
        there = [each for each in candidates if f"model.{each}" in opened.tensors] or [name]
        ends.append((there[0], tensor))
        if there[1:]:
            also[there[0]] = there[1:]
    return ends, also


def _check_model(opened: Opened, config: dict[str, Any] | None, ends: Ends) -> None:
    """Refuse a checkpoint of another model, by the first thing that differs."""
    saved = opened.state["config"]
    if saved is not None and config is not None:
        # older ones lack newer sizes
        saved = {each.name: each.default for each in fields(ModelConfig)} | saved
        differ = [key for key in config if key not in _MAY_DIFFER and saved.get(key) != config[key]]
        if differ:
            spelled_out = ", ".join(
                f"{key}={saved.get(key)!r}, not {config[key]!r}" for key in differ
            )
            raise CheckpointError(f"{opened.path} is of another model: it has {spelled_out}")
    for name, tensor in ends:
        if tensor.is_meta:
            raise CheckpointError(
                f"{name} is on the meta device: give the module memory first, to_empty(device=…)"
            )
        entry = opened.tensors.get(f"model.{name}")
        if entry is None:
            hint = _hint(next(iter(opened.weights), ""))
            raise CheckpointError(f"{opened.path} is of another model: it has no {name}{hint}")
        if entry.shape != tensor.shape:
            shapes = f"{name} is {entry.shape} there and {tuple(tensor.shape)} here"
            raise CheckpointError(f"{opened.path} is of another model: {shapes}")
        # Loading widens buffers: a router's bias stays float32 here, and older checkpoints may have
        # it in bfloat16.
        is_float_buffer = entry.dtype.is_floating_point and not isinstance(tensor, nn.Parameter)
        is_widened = (
            is_float_buffer and torch.promote_types(entry.dtype, tensor.dtype) == tensor.dtype
        )
        if entry.dtype != tensor.dtype and not is_widened:
            how = "convert the modules first, and again after loading"
            raise CheckpointError(
                f"{opened.path} holds {name} as {entry.dtype}, here it is {tensor.dtype}: {how}"
            )


def _hint(name: str) -> str:
    return (
        " (its names begin with the stage: pass {index: stage})" if name.startswith(STAGES) else ""
    )


def _check_optimizer(opened: Opened, optimizer: torch.optim.Optimizer, ends: Ends) -> None:
    """Refuse another kind of optimizer, and one with other groups."""
    saved, here = opened.state["optimizer"], type(optimizer).__name__
    if saved is None:
        raise CheckpointError(
            f"{opened.path} was saved without an optimizer: load its weights with optimizer=None"
        )
    if saved["kind"] != here:
        other = f"the state of {saved['kind']}, and this optimizer is {here}"
        raise CheckpointError(
            f"{opened.path} holds {other}: make the same, or load with optimizer=None"
        )
    options = _options(opened)
    for group in optimizer_groups(optimizer, ends):
        for name in group.parameters:
            if name not in options:
                raise CheckpointError(
                    f"{opened.path}: its optimizer does not train {name}, this one does"
                )
            if options[name] != options[group.parameters[0]]:
                pair = f"{name} than for {group.parameters[0]}, which are in one group here"
                raise CheckpointError(
                    f"{opened.path} has other options for {pair}: make the same groups"
                )


def _options(opened: Opened) -> dict[str, dict[str, Any]]:
    """Return the options of the checkpoint's optimizer, by the parameter's name."""
    return {
        name: group["options"]
        for group in opened.state["optimizer"]["groups"]
        for name in group["parameters"]
    }


def _saved_slots(opened: Opened) -> dict[str, list[str]]:
    """Return what the checkpoint's optimizer keeps, by the parameter's name."""
    saved: dict[str, list[str]] = {}
    for key in opened.tensors:
        if key.startswith("optimizer."):
            name, _, slot = key.removeprefix("optimizer.").rpartition(".")
            saved.setdefault(name, []).append(slot)
    return saved


def _check_ties(opened: Opened, also: Mapping[str, Sequence[str]], with_optimizer: bool) -> None:
    """Refuse weights that are tied here and differ in the checkpoint, which is read to compare them."""
    slots = _saved_slots(opened) if with_optimizer else {}
    for first, others in also.items():
        for other in others:
            pairs = [(f"model.{first}", f"model.{other}")]
            pairs += [
                (f"optimizer.{first}.{slot}", f"optimizer.{other}.{slot}")
                for slot in slots.get(first, ())
            ]
            for pair in pairs:
                found = opened.read(key for key in pair if key in opened.tensors)
                if len(found) < 2 or not torch.equal(*found.values()):
                    how = "load it into a model that does not tie them"
                    ends = f"{first} and {other} are one weight here, and differ"
                    raise CheckpointError(f"{ends} in {opened.path}: {how}")


def _new_slots(
    opened: Opened, optimizer: torch.optim.Optimizer, ends: Ends
) -> dict[int, dict[str, Tensor]]:
    """Return new state for each tensor of ``ends`` by its ``id``, to be filled; empty where the checkpoint has none."""
    saved = _saved_slots(opened)
    on_device = [
        group for group in optimizer.param_groups if group.get("fused") or group.get("capturable")
    ]
    counts_on_device = {id(p) for group in on_device for p in group["params"]}
    slots: dict[int, dict[str, Tensor]] = {}
    for name, tensor in ends:
        mine = slots.setdefault(id(tensor), {})
        for slot in saved.get(name, ()):
            entry = opened.tensors[f"optimizer.{name}.{slot}"]
            if entry.shape == tensor.shape and tensor.dim() > 0:  # sharded as the parameter is
                mine[slot] = torch.empty_like(tensor.detach(), dtype=entry.dtype)
            else:
                device = tensor.device if id(tensor) in counts_on_device else torch.device("cpu")
                mine[slot] = torch.empty(entry.shape, dtype=entry.dtype, device=device)
    return slots


@torch.no_grad()
def _read(opened: Opened, wanted: Sequence[tuple[str, Tensor]]) -> None:
    """Read each key once; where it is wanted again, as by another end of a tie, that gets a copy."""
    first: dict[str, Tensor] = {}
    for key, tensor in wanted:
        first.setdefault(key, tensor)
    read_tensors(opened.path, opened.metadata, first)
    for key, tensor in wanted:
        if tensor is not first[key]:
            tensor.copy_(first[key])


def _load(state: RankState, optimizer: torch.optim.Optimizer | None) -> None:
    """Let each module take the state that was read, much of it in its own memory already, by its own means."""
    for module, loaded in state.states:
        load_into(module, loaded)
    own = {id(parameter) for module in state.modules for parameter in module.parameters()}
    trained = (
        ()
        if optimizer is None
        else (each for group in optimizer.param_groups for each in group["params"])
    )
    if lost := [state.own_names[id(each)] for each in trained if id(each) not in own]:
        how = "let it copy into the one that is there"
        raise CheckpointError(
            f"load_state_dict replaces {lost[0]}, which the optimizer trains: {how}"
        )


def _options_of_groups(
    opened: Opened, optimizer: torch.optim.Optimizer, ends: Ends
) -> list[dict[str, Any]]:
    """Return the checkpoint's options for each group of this rank; none for a group that is empty here."""
    names, options = {id(tensor): name for name, tensor in ends}, _options(opened)
    found = []
    for group in optimizer.param_groups:
        trained = group["params"]
        found.append(options[names[id(trained[0])]] if trained else {})
    return found


def _apply(
    optimizer: torch.optim.Optimizer,
    slots: Mapping[int, dict[str, Tensor]],
    options: Sequence[list[dict[str, Any]]],
    rank: int,
) -> None:
    """Give the optimizer its state and options.

    A group that is empty here, as on a stage without norms, takes the options of the group with its
    number on another rank. If it is empty everywhere, it takes only options that it lacks, such as
    a scheduler's ``initial_lr``, without which a scheduler refuses to go on.
    """
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            optimizer.state.pop(parameter, None)
            if slots[id(parameter)]:
                optimizer.state[parameter] = slots[id(parameter)]
        found = options[rank][number]
        alike = [theirs[number] for theirs in options if number < len(theirs) and theirs[number]]
        if not found and alike:
            found = alike[0]
        elif not found:
            others = [given for theirs in options for given in theirs if given]
            lacking = others[0].items() if others else ()
            found = {key: value for key, value in lacking if key not in group}
        for key, value in found.items():
            current = group.get(key)
            if isinstance(current, Tensor):
                current.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(current, tuple) else value
