"""Loading: find a whole checkpoint, see that it is of this model, fill what this rank holds of it."""

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from course_pp.training.checkpoint._torch import Metadata, TensorStorageMetadata
from course_pp.training.checkpoint.description import open_metadata
from course_pp.training.checkpoint.directory import is_checkpoint, step_directories
from course_pp.training.checkpoint.files import read_tensors
from course_pp.training.checkpoint.manifest import STATE, problems, read_json, read_manifest, spelled
from course_pp.training.checkpoint.ranks import CheckpointError, Ranks
from course_pp.training.checkpoint.rng import coordinates_of, restore_rng, rng_keys
from course_pp.training.checkpoint.state import Group, Held, as_list, config_of, held_by, optimizer_groups

__all__ = ["Loaded", "Opened", "find_latest", "load", "open_checkpoint", "resume"]

# Rotary tables are as long as the run says; no weight depends on it.
_MAY_DIFFER = ("max_seq_len",)


@dataclass(frozen=True)
class Loaded:
    """What was loaded.

    Args:
        path: the checkpoint.
        step: number of steps that were finished.
        extra: what :func:`save` was given.
    """

    path: Path
    step: int
    extra: dict[str, Any]


@dataclass(frozen=True)
class Opened:
    """A checkpoint whose descriptions have been read, and no tensor yet."""

    path: Path
    metadata: Metadata
    state: dict[str, Any]

    def entry(self, key: str) -> TensorStorageMetadata | None:
        """Shape and dtype of a tensor; None if it is not there."""
        entry = self.metadata.state_dict_metadata.get(key)
        return entry if isinstance(entry, TensorStorageMetadata) else None

    @property
    def keys(self) -> list[str]:
        """The keys of all tensors."""
        return list(self.metadata.state_dict_metadata)

    @property
    def groups(self) -> list[Group] | None:
        """The optimizer's groups; None if no optimizer was saved."""
        saved = self.state["optimizer"]
        return None if saved is None else [Group(**group) for group in saved["groups"]]


def find_latest(root: str | os.PathLike[str]) -> Path | None:
    """The newest whole checkpoint in ``root``, found by reading every byte of it; None if there is none at all.

    Newer ones that are damaged are named in a warning.

    Raises:
        CheckpointError: if there are checkpoints, but none is whole: starting anew is then for a person to decide; if
            ``root`` cannot be read.
    """
    return _newest(Path(root), lambda: step_directories(Path(root)), _problems_now, warn=True)


def load(
    path: str | os.PathLike[str],
    modules: nn.Module | Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | None = None,
    *,
    device_mesh: DeviceMesh | None,
) -> Loaded:
    """Fill modules and optimizer from a checkpoint, in place, at this layout, whatever the one it was written at.

    Call it on every rank, with modules and optimizer as they will be trained, whether or not steps were taken.

    Args:
        path: a checkpoint, or the directory of a run's, of which the newest whole one is taken.
        modules: this rank's stages, or the whole model.
        optimizer: None loads the weights alone; otherwise the random number generators are restored too
            (:mod:`~course_pp.training.checkpoint.rng` says what ranks that were not there get).
        device_mesh: as for :func:`save`.

    Raises:
        CheckpointError: on every rank with the same sentence, if the checkpoint is damaged, of another model, or holds
            anything that is not a tensor or JSON. Nothing is changed, unless the disk fails after the checks.
    """
    loaded = resume(path, modules, optimizer, device_mesh=device_mesh)
    if loaded is None:
        raise CheckpointError(f"{path} holds no checkpoint: give a directory that save has written to")
    return loaded


def resume(
    path: str | os.PathLike[str],
    modules: nn.Module | Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | None = None,
    *,
    device_mesh: DeviceMesh | None,
) -> Loaded | None:
    """As :func:`load`, but None if ``path`` does not exist or holds no checkpoint: the run is to begin."""
    ranks = Ranks()
    opened = _open_together(Path(path), ranks)
    if opened is None:
        return None
    modules = as_list(modules)
    held = Held({}, {})

    def compare() -> set[str]:
        nonlocal held
        held = held_by(modules)
        _check_model(opened, modules, held)
        if optimizer is not None:
            _check_optimizer(opened, optimizer, held)
        return set(dict(held.ends))

    here = set().union(*ranks.each(compare))
    left = sorted({key.removeprefix("model.") for key in opened.keys if key.startswith("model.")} - here)
    if left:
        raise CheckpointError(f"{opened.path} is of another model: it has {left[0]}, which no rank's modules have")
    request = _Request(opened)
    for name, tensor in held.ends:
        request.fill(f"model.{name}", tensor.detach())
    slots = [] if optimizer is None else _request_slots(request, optimizer, held)
    coordinates = coordinates_of(device_mesh, ranks.rank)
    rng = {} if optimizer is None else rng_keys(coordinates, opened.metadata.state_dict_metadata)
    states = {kind: request.new(key, torch.device("cpu")) for kind, key in rng.items()}
    request.read(ranks)
    if optimizer is not None:
        _apply(optimizer, slots, held, opened.groups or [])
        restore_rng(states, opened.state["seed"], opened.state["step"], coordinates)
    return Loaded(opened.path, opened.state["step"], opened.state["extra"])


def open_checkpoint(path: str | os.PathLike[str]) -> Opened:
    """Read the descriptions in a checkpoint, or in the newest whole one of a run, in this process alone.

    Raises:
        CheckpointError: if it is damaged, or holds anything that is not a tensor or JSON.
    """
    opened = _open_together(Path(path), Ranks(alone=True))
    if opened is None:
        raise CheckpointError(f"{path} holds no checkpoint: give a directory that save has written to")
    return opened


def _open_together(path: Path, ranks: Ranks) -> Opened | None:
    """Find, check and describe a checkpoint, if there is one; the ranks share the reading of its bytes."""

    def check(candidate: Path) -> list[str] | None:
        found = ranks.each(lambda: _problems_now(candidate, ranks.rank, ranks.size))
        return None if None in found else sorted({problem for mine in found for problem in mine or ()})

    # Listed on one rank: a save that is going on must not show itself to some ranks only.
    if not ranks.first(lambda: is_checkpoint(path)):
        newest = _newest(path, lambda: ranks.first(lambda: step_directories(path)), check, warn=ranks.rank == 0)
        if newest is None:
            return None
        path = newest
    elif (found := check(path)) is None or found:
        raise CheckpointError(spelled(path, found or ["there is no such directory"]))
    opened: list[Opened] = []
    ranks.each(lambda: opened.append(_describe(path)))
    return opened[0]


def _describe(path: Path) -> Opened:
    _, files = read_manifest(path)
    return Opened(path, open_metadata(path, files), _state_of(path))


def _problems_now(path: Path, part: int = 0, n_parts: int = 1) -> list[str] | None:
    """As :func:`problems`; None if a run has deleted the checkpoint since it was listed, or while it was read."""
    found = problems(path, part, n_parts)
    return found if not found or os.path.lexists(path) else None


def _newest(
    root: Path, listed: Callable[[], Sequence[Path]], check: Callable[[Path], list[str] | None], warn: bool
) -> Path | None:
    """The first of those ``listed`` that is whole; they are listed again if one has gone, for a newer one has come."""
    damaged: list[str] = []
    candidates = iter(listed())
    while (path := next(candidates, None)) is not None:
        found = check(path)
        if found is None:
            damaged, candidates = [], iter(listed())
        elif found:
            damaged.append(spelled(path, found))
        else:
            if damaged and warn:
                warnings.warn(f"using {path}, because newer ones are not whole: {'; '.join(damaged)}", stacklevel=3)
            return path
    if damaged:
        raise CheckpointError(
            f"none of the checkpoints in {root} is whole ({'; '.join(damaged)}): "
            "restore one from a copy, or start anew in another directory"
        )
    return None


def _state_of(path: Path) -> dict[str, Any]:
    state = read_json(path / STATE)
    expected = {"step": int, "seed": int, "extra": dict, "layout": dict, "config": (dict, type(None))}
    sound = isinstance(state, dict) and all(isinstance(state.get(key), kind) for key, kind in expected.items())  # type: ignore[arg-type]
    if not sound or not isinstance(state.get("optimizer", 0), dict | None):
        raise CheckpointError(f"{path}: {STATE} is damaged: entries are missing or make no sense")
    return state


def _check_model(opened: Opened, modules: list[nn.Module], held: Held) -> None:
    """Refuse a checkpoint of another model, by the first thing that differs."""
    saved, mine = opened.state["config"], config_of(modules)
    if saved is not None and mine is not None:
        differ = [k for k in mine if k not in _MAY_DIFFER and saved.get(k) != mine[k]]
        if differ:
            spelled_out = ", ".join(f"{key}={saved.get(key)!r}, not {mine[key]!r}" for key in differ)
            raise CheckpointError(f"{opened.path} is of another model: it has {spelled_out}")
    for name, tensor in held.ends:
        entry = opened.entry(f"model.{name}")
        if entry is None:
            raise CheckpointError(f"{opened.path} is of another model: it has no {name}")
        if entry.size != tensor.shape:
            raise CheckpointError(
                f"{opened.path} is of another model: {name} is {tuple(entry.size)} there and {tuple(tensor.shape)} here"
            )
        if entry.properties.dtype != tensor.dtype:
            raise CheckpointError(
                f"{opened.path} holds {name} as {entry.properties.dtype}, but here it is {tensor.dtype}: "
                "convert the modules first, and again after loading"
            )


def _check_optimizer(opened: Opened, optimizer: torch.optim.Optimizer, held: Held) -> None:
    mine = optimizer_groups(optimizer, held)
    if opened.groups is None:
        raise CheckpointError(
            f"{opened.path} was saved without an optimizer: load it with optimizer=None to begin from its weights"
        )
    saved, here = opened.state["optimizer"].get("kind"), type(optimizer).__name__
    if saved != here:
        raise CheckpointError(
            f"{opened.path} holds the state of {saved}, and this optimizer is {here}: "
            f"make {saved}, or load the weights alone with optimizer=None"
        )
    _check_slots(opened, opened.groups, {name: tensor.shape for name, tensor in held.ends})
    options = {name: group.options for group in opened.groups for name in group.parameters}
    for group in mine:
        for name in group.parameters:
            if name not in options:
                raise CheckpointError(f"{opened.path}: its optimizer does not train {name}, this one does")
            if options[name] != options[group.parameters[0]]:
                raise CheckpointError(
                    f"{opened.path}: its optimizer has other options for {name} than for {group.parameters[0]}, "
                    "this one has them in one group: make the same groups"
                )


def _check_slots(opened: Opened, groups: Sequence[Group], shapes: Mapping[str, torch.Size]) -> None:
    """Each parameter has the state that others of its group have, in its shape, or none as before its first update."""
    saved = _saved_slots(opened)
    for group in groups:
        slots = {name: saved[name] for name in group.parameters if name in saved}
        expected = set().union(*slots.values())
        for name, found in slots.items():
            if missing := sorted(expected - set(found)):
                raise CheckpointError(
                    f"{opened.path} is damaged: it holds no {missing[0]} of {name}, as it does of others"
                )
    for name, shape in shapes.items():
        for slot in saved.get(name, []):
            entry = opened.entry(f"optimizer.{name}.{slot}")
            if entry is not None and entry.size not in (shape, torch.Size()):
                raise CheckpointError(
                    f"{opened.path} is damaged: {slot} of {name} is {tuple(entry.size)}, and {name} {tuple(shape)}"
                )


def _saved_slots(opened: Opened) -> dict[str, list[str]]:
    """What the optimizer keeps of each parameter, by the parameter's name."""
    saved: dict[str, list[str]] = {}
    for key in opened.keys:
        if key.startswith("optimizer."):
            name, _, slot = key.removeprefix("optimizer.").rpartition(".")
            saved.setdefault(name, []).append(slot)
    return saved


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
    saved = _saved_slots(request._opened)
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
