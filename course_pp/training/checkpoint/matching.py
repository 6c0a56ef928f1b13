"""Check that a checkpoint is of this model and this optimizer; a refusal names the first difference."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields

import torch
from torch import Tensor

from course_pp.collective import difference
from course_pp.model import ModelConfig
from course_pp.training.checkpoint.files import read_tensors
from course_pp.training.checkpoint.opening import Opened
from course_pp.training.checkpoint.ranks import CheckpointError, Ranks
from course_pp.training.checkpoint.state import STAGES, Group, Held, Part, config_of, optimizer_groups

__all__ = ["check_declared", "check_model", "check_optimizer", "check_ties", "hint", "renamed", "saved_slots"]

# Rotary tables are as long as the run says; no weight depends on it.
_MAY_DIFFER = ("max_seq_len",)


def renamed(held: Held, opened: Opened) -> tuple[Held, dict[str, list[str]]]:
    """Return what is held here, under the checkpoint's names; there, a tied weight may have another of its names.

    Returns:
        For each tie that was saved as several weights, the other names by the first.
    """
    ends: list[tuple[str, Tensor]] = []
    also: dict[str, list[str]] = {}
    for name, tensor in held.ends:
        known = [name, *(alias for alias, first in held.aliases.items() if first == name)]
        candidates = dict.fromkeys(opened.first_name(each) for each in known)
        there = [each for each in candidates if opened.entry(f"model.{each}") is not None] or [name]
        ends.append((there[0], tensor))
        if there[1:]:
            also[there[0]] = there[1:]
    return Held(copies=ends), also


def check_declared(everyone: Sequence[Sequence[Sequence[str]]], held: Collection[str]) -> None:
    """Refuse ties that the ranks do not declare alike, or that name what no rank has.

    Args:
        everyone: each rank's ``declared``.
        held: the names of all ranks' modules.
    """
    if problem := difference([{"tied": declared} for declared in everyone]):
        raise CheckpointError(problem)
    if strangers := sorted({name for tie in everyone[0] for name in tie} - set(held)):
        raise CheckpointError(f"tied= names {strangers[0]}, which no rank's modules have: write it as they do")


def check_ties(opened: Opened, also: Mapping[str, Sequence[str]], with_optimizer: bool) -> None:
    """Refuse weights that are tied here and differ in the checkpoint, which is read to compare them."""
    slots = saved_slots(opened) if with_optimizer else {}
    for first, others in also.items():
        for other in others:
            pairs = [(f"model.{first}", f"model.{other}")]
            pairs += [(f"optimizer.{first}.{slot}", f"optimizer.{other}.{slot}") for slot in slots.get(first, ())]
            for pair in pairs:
                entries = [opened.entry(key) for key in pair]
                tensors = {
                    key: torch.empty(entry.size, dtype=entry.properties.dtype)
                    for key, entry in zip(pair, entries, strict=True)
                    if entry is not None
                }
                read_tensors(opened.path, opened.metadata, tensors, Ranks(alone=True))
                if len(tensors) < 2 or not torch.equal(*tensors.values()):
                    raise CheckpointError(
                        f"{first} and {other} are one weight here, and {opened.path} holds different ones: load it "
                        "into a model that does not tie them"
                    )


def hint(name: str) -> str:
    return " (its names begin with the stage: pass {index: stage})" if name.startswith(STAGES) else ""


def check_model(opened: Opened, parts: Sequence[Part], held: Held) -> None:
    """Refuse a checkpoint of another model, by the first thing that differs."""
    saved, mine = opened.state["config"], config_of(parts)
    if saved is not None and mine is not None:
        saved = {each.name: each.default for each in fields(ModelConfig)} | saved  # older ones lack newer sizes
        differ = [k for k in mine if k not in _MAY_DIFFER and saved.get(k) != mine[k]]
        if differ:
            spelled_out = ", ".join(f"{key}={saved.get(key)!r}, not {mine[key]!r}" for key in differ)
            raise CheckpointError(f"{opened.path} is of another model: it has {spelled_out}")
    for name, tensor in held.ends:
        if tensor.is_meta:
            raise CheckpointError(
                f"{name} is on the meta device, where nothing can be loaded into it: give the module memory first, "
                "with to_empty(device=…)"
            )
        entry = opened.entry(f"model.{name}")
        if entry is None:
            some = next((key.removeprefix("model.") for key in opened.keys if key.startswith("model.")), "")
            raise CheckpointError(f"{opened.path} is of another model: it has no {name}{hint(some)}")
        if entry.size != tensor.shape:
            raise CheckpointError(
                f"{opened.path} is of another model: {name} is {tuple(entry.size)} there and {tuple(tensor.shape)} here"
            )
        if entry.properties.dtype != tensor.dtype:
            raise CheckpointError(
                f"{opened.path} holds {name} as {entry.properties.dtype}, but here it is {tensor.dtype}: "
                "convert the modules first, and again after loading"
            )


def check_optimizer(opened: Opened, optimizer: torch.optim.Optimizer, held: Held) -> None:
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
    """Check that each parameter has its group's state, in its own shape; or none, before its first update."""
    saved = saved_slots(opened)
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


def saved_slots(opened: Opened) -> dict[str, list[str]]:
    """Return what the optimizer keeps of each parameter, by the parameter's name."""
    saved: dict[str, list[str]] = {}
    for key in opened.keys:
        if key.startswith("optimizer."):
            name, _, slot = key.removeprefix("optimizer.").rpartition(".")
            saved.setdefault(name, []).append(slot)
    return saved
