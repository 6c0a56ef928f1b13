"""Load: fill this rank's part of the model from a checkpoint that is whole and of this model.

A checkpoint of another model or optimizer is refused before anything is changed. The refusal names
the first difference.
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
from course_pp.training.checkpoint.manifest import CheckpointError, CheckpointRanks
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

# Rotary tables are as long as the run's sequences; no weight depends on their length.
_MAY_DIFFER = ("max_seq_len",)


@dataclass(frozen=True)
class Loaded:
    """The checkpoint that was loaded.

    Attributes:
        step: number of finished steps.
        extra: the ``extra`` that was given to :func:`save`.
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
    """Fill modules and optimizer from a checkpoint, in place, whatever layout it was written at.

    The tensors go through each module's ``load_state_dict``, so its hooks see them, as in torch's
    own recipe. Call it on every rank, with modules and optimizer as they will be trained. It does
    not matter if steps were taken before.

    Args:
        path: a checkpoint, or the directory of a run's checkpoints. Of a run, the newest whole
            checkpoint is loaded.
        modules: this rank's stages, or the whole model; ``{index: stage}`` if it was saved so.
        optimizer: None loads only weights. With an optimizer, random number generators are
            restored, too. :mod:`~course_pp.training.checkpoint.state` says how they start on new
            ranks.
        device_mesh: as for :func:`save`.
        tied: as for :func:`save`; needed only if the checkpoint was saved without it.

    Raises:
        CheckpointError: on every rank with the same sentence: if the checkpoint is damaged, of
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
    ranks = CheckpointRanks()
    with ranks.refusing_together():
        check_arguments(resume, locals())
    opened = open_together(named(path), ranks)
    if opened is None:
        return None
    # The state_dict of some modules is a collective. So all ranks are through it before one of them
    # compares and refuses.
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
    left = opened.weights.difference(*(held for _, _, held, _ in everyone))
    if left:
        stranger = min(left)
        raise CheckpointError(
            f"{opened.path} is of another model: it has {stranger}, which no rank's modules"
            f" have{_hint(stranger)}"
        )

    wanted = [(f"model.{name}", tensor.detach()) for name, tensor in ends]
    slots: dict[int, dict[str, Tensor]] = {}
    generators: dict[str, Tensor] = {}
    coordinates = mesh_coordinates(device_mesh, ranks.rank)
    if optimizer is not None:
        slots = _new_slots(opened, optimizer, ends)
        for name, tensor in ends:
            for slot, new in slots[id(tensor)].items():
                wanted.append((f"optimizer.{name}.{slot}", new))
        for kind, key in rng_keys(coordinates, opened.tensors).items():
            generators[kind] = torch.empty(opened.tensors[key].shape, dtype=torch.uint8)
            wanted.append((key, generators[kind]))
    ranks.collectively(lambda: _read(opened, wanted))
    ranks.collectively(lambda: _load(state, optimizer))
    if optimizer is not None:
        _apply(optimizer, slots, options=[options for *_, options in everyone], rank=ranks.rank)
        restore_rng(
            generators,
            seed=opened.state["seed"],
            step=opened.state["step"],
            coordinates=coordinates,
        )
    return Loaded(opened.path, opened.state["step"], opened.state["extra"])


def _ends_there(state: RankState, opened: Opened) -> tuple[Ends, dict[str, list[str]]]:
    """Return the tensors here by the checkpoint's names, and further names of the same weights.

    The checkpoint may hold several tensors that are tied here. Its first name is the tensor's; the
    others stand by the first one.
    """
    ends: Ends = []
    also: dict[str, list[str]] = {}
    for name, tensor in state.ends:
        known = [name]
        known += [alias for alias, first in state.aliases.items() if first == name]
        there = []
        for each in known:
            saved_as = opened.first_name(each)
            if f"model.{saved_as}" in opened.tensors and saved_as not in there:
                there.append(saved_as)
        first, *others = there or [name]
        ends.append((first, tensor))
        if others:
            also[first] = others
    return ends, also


def _check_model(opened: Opened, config: dict[str, Any] | None, ends: Ends) -> None:
    """Refuse a checkpoint of another model, and name the first difference."""
    other = f"{opened.path} is of another model"
    saved = opened.state["config"]
    if saved is not None and config is not None:
        # An older checkpoint lacks sizes that did not exist; its model had their defaults.
        saved = {each.name: each.default for each in fields(ModelConfig)} | saved
        differ = []
        for key, value in config.items():
            if key not in _MAY_DIFFER and saved.get(key) != value:
                differ.append(f"{key}={saved.get(key)!r}, not {value!r}")
        if differ:
            raise CheckpointError(f"{other}: it has {', '.join(differ)}")

    for name, tensor in ends:
        if tensor.is_meta:
            raise CheckpointError(
                f"{name} is on the meta device: give the module memory first, to_empty(device=…)"
            )
        entry = opened.tensors.get(f"model.{name}")
        if entry is None:
            hint = _hint(next(iter(opened.weights), ""))
            raise CheckpointError(f"{other}: it has no {name}{hint}")
        here = tuple(tensor.shape)
        if entry.shape != here:
            raise CheckpointError(f"{other}: {name} is {entry.shape} there and {here} here")
        # Loading widens buffers: a router's bias stays float32 here, and older checkpoints may have
        # it in bfloat16.
        is_widened = (
            not isinstance(tensor, nn.Parameter)
            and entry.dtype.is_floating_point
            and torch.promote_types(entry.dtype, tensor.dtype) == tensor.dtype
        )
        if entry.dtype != tensor.dtype and not is_widened:
            raise CheckpointError(
                f"{opened.path} holds {name} as {entry.dtype}, here it is {tensor.dtype}: convert"
                f" the modules to {entry.dtype} before loading, and back afterwards"
            )


def _hint(name: str) -> str:
    if name.startswith(STAGES):
        return " (its names begin with the stage: pass {index: stage})"
    return ""


def _check_optimizer(opened: Opened, optimizer: torch.optim.Optimizer, ends: Ends) -> None:
    """Refuse another kind of optimizer, and one with other groups."""
    saved = opened.state["optimizer"]
    here = type(optimizer).__name__
    if saved is None:
        raise CheckpointError(
            f"{opened.path} was saved without an optimizer: load its weights with optimizer=None"
        )
    if saved["kind"] != here:
        raise CheckpointError(
            f"{opened.path} holds the state of {saved['kind']}, and this optimizer is {here}: make"
            " the same, or load with optimizer=None"
        )
    options = _options(opened)
    for group in optimizer_groups(optimizer, ends):
        for name in group.parameters:
            first = group.parameters[0]
            if name not in options:
                raise CheckpointError(
                    f"{opened.path}: its optimizer does not train {name}, this one does"
                )
            if options[name] != options[first]:
                raise CheckpointError(
                    f"{opened.path} has other options for {name} than for {first}, which are in one"
                    " group here: make the same groups"
                )


def _options(opened: Opened) -> dict[str, dict[str, Any]]:
    """Return the options of the checkpoint's optimizer, by the parameter's name."""
    options = {}
    for group in opened.state["optimizer"]["groups"]:
        options.update(dict.fromkeys(group["parameters"], group["options"]))
    return options


def _saved_slots(opened: Opened) -> dict[str, list[str]]:
    """Return the slots of the checkpoint's optimizer, such as ``exp_avg``, by parameter."""
    saved: dict[str, list[str]] = {}
    for key in opened.tensors:
        if key.startswith("optimizer."):
            name, _, slot = key.removeprefix("optimizer.").rpartition(".")
            saved.setdefault(name, []).append(slot)
    return saved


def _check_ties(opened: Opened, also: Mapping[str, Sequence[str]], with_optimizer: bool) -> None:
    """Refuse weights that are tied here and differ in the checkpoint."""
    slots = _saved_slots(opened) if with_optimizer else {}
    for first, others in also.items():
        for other in others:
            pairs = [(f"model.{first}", f"model.{other}")]
            for slot in slots.get(first, ()):
                pairs.append((f"optimizer.{first}.{slot}", f"optimizer.{other}.{slot}"))
            for pair in pairs:
                found = opened.read(key for key in pair if key in opened.tensors)
                if len(found) < 2 or not torch.equal(*found.values()):
                    raise CheckpointError(
                        f"{first} and {other} are one weight here, and differ in {opened.path}:"
                        " load it into a model that does not tie them"
                    )


def _new_slots(
    opened: Opened, optimizer: torch.optim.Optimizer, ends: Ends
) -> dict[int, dict[str, Tensor]]:
    """Return new optimizer state for each tensor of ``ends`` by its ``id``, to be filled.

    A tensor gets the slots that the checkpoint has for it, perhaps none.
    """
    saved = _saved_slots(opened)
    counts_on_device: set[int] = set()
    for group in optimizer.param_groups:
        if group.get("fused") or group.get("capturable"):
            counts_on_device.update(id(parameter) for parameter in group["params"])
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
    """Read each key once. If another end of a tie wants the same key, copy the tensor."""
    first: dict[str, Tensor] = {}
    for key, tensor in wanted:
        first.setdefault(key, tensor)
    read_tensors(opened.path, opened.metadata, first)
    for key, tensor in wanted:
        if tensor is not first[key]:
            tensor.copy_(first[key])


def _load(state: RankState, optimizer: torch.optim.Optimizer | None) -> None:
    """Let each module take the state that was read through its own ``load_state_dict``."""
    for module, loaded in state.states:
        load_into(module, loaded)
    if optimizer is None:
        return

    own = {id(parameter) for module in state.modules for parameter in module.parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in own:
                raise CheckpointError(
                    f"load_state_dict replaces {state.own_names[id(parameter)]}, which the"
                    " optimizer trains: let it copy into the one that is there"
                )


def _options_of_groups(
    opened: Opened, optimizer: torch.optim.Optimizer, ends: Ends
) -> list[dict[str, Any]]:
    """Return the checkpoint's options for each group of this rank, or {} for an empty group."""
    names = {id(tensor): name for name, tensor in ends}
    options = _options(opened)
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
    a scheduler's ``initial_lr``, without which a scheduler cannot go on.
    """
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            optimizer.state.pop(parameter, None)
            if slots[id(parameter)]:
                optimizer.state[parameter] = slots[id(parameter)]
        found = options[rank][number]
        if not found:
            alike = [theirs[number] for theirs in options if number < len(theirs)]
            found = next((given for given in alike if given), {})
        if not found:
            others = [given for theirs in options for given in theirs if given]
            lacking = others[0].items() if others else ()
            found = {key: value for key, value in lacking if key not in group}
        for key, value in found.items():
            current = group.get(key)
            if isinstance(current, Tensor):
                current.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(current, tuple) else value
