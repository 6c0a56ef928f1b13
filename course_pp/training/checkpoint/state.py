"""What a checkpoint holds, under names that do not depend on the layout.

    model.layers.3.attn.q_proj.weight                 the full model's name, on whichever rank it is
    model.stages.3.weight                             of a stage whose own names are not the full model's
    optimizer.layers.3.attn.q_proj.weight.exp_avg     by that name too, not by a number in this rank's optimizer

A tied weight is saved once, under the first of its names, and the description of the run lists the others. A stage that
holds only another end, such as the output head of a model with tied embeddings, fills it from there.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from course_pp.model import ModelConfig, Transformer
from course_pp.model.hf import EMBEDDING, HEAD
from course_pp.module_extras import uncompiled
from course_pp.parallel.split import SplitStage
from course_pp.training.checkpoint.ranks import CheckpointError

__all__ = [
    "STAGES",
    "Ends",
    "Group",
    "Held",
    "Modules",
    "Part",
    "Ties",
    "as_json",
    "config_of",
    "held_by",
    "load_into",
    "merged",
    "optimizer_groups",
    "optimizer_tensors",
    "parts_of",
    "whole_model",
]

Modules = nn.Module | Sequence[nn.Module] | Mapping[int, nn.Module]
Ties = Iterable[Mapping[int, str] | Collection[str]]
Ends = Iterable[tuple[str, Tensor]]

STAGES = "stages."
_COMPILED = "_orig_mod."  # what torch.compile(module) puts into the names of its parts

# How the optimizer computes, which may differ from machine to machine; what it computes is restored.
_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")


@dataclass(frozen=True)
class Part:
    """One of this rank's modules.

    Attributes:
        module: a stage, or the whole model.
        index: of the stage; None where nobody has said.
        prefix: what its names get in the checkpoint; empty if they are the full model's already.
    """

    module: nn.Module
    index: int | None = None
    prefix: str = ""


@dataclass(frozen=True)
class Held:
    """The parameters and persistent buffers of one rank, by their names in a checkpoint.

    Attributes:
        owned: what this rank saves, a tied weight under the first of its names.
        copies: ends of ties beside that, by the first name of the tie: filled on loading, but not saved.
        aliases: the other names of ties, each with the first one.
        buffers: the names of those that no optimizer trains.
        own_names: what the modules here call a tensor, by its ``id``.
        declared: the names of each tie that the caller or the stages named.
        met: every name here.
        states: each module with the state_dict that the tensors are from, which its ``load_state_dict`` takes.
    """

    owned: dict[str, Tensor] = field(default_factory=dict)
    copies: list[tuple[str, Tensor]] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    buffers: set[str] = field(default_factory=set)
    own_names: dict[int, str] = field(default_factory=dict)
    declared: list[tuple[str, ...]] = field(default_factory=list)
    met: set[str] = field(default_factory=set)
    states: list[tuple[nn.Module, dict[str, Any]]] = field(default_factory=list)

    @property
    def ends(self) -> list[tuple[str, Tensor]]:
        """Every tensor here with its name."""
        return [*self.owned.items(), *self.copies]


@dataclass(frozen=True)
class Group:
    """Parameters that an optimizer treats alike.

    Attributes:
        options: such as the learning rate, by name.
        parameters: their names.
    """

    options: dict[str, Any]
    parameters: list[str]


def parts_of(modules: Modules) -> list[Part]:
    """Return this rank's modules as a list, without wrappers around a whole one, which add to its names.

    Raises:
        CheckpointError: if there is none, or one is not a module; if a stage's index is not a whole number.
    """
    if isinstance(modules, Mapping):
        for index in modules:
            if type(index) is not int or index < 0:
                raise CheckpointError(f"stage {index!r} must be a whole number of at least 0: pass {{index: stage}}")
            if _index_of(modules[index]) not in (None, index):
                raise CheckpointError(f"stage {_index_of(modules[index])} was passed as {index}: pass {{index: stage}}")
        # The names of our own stages are the full model's, so that they need no index.
        parts = [
            Part(module, index, "" if isinstance(module, Transformer) else f"{STAGES}{index}.")
            for index, module in ((index, _unwrapped(module)) for index, module in modules.items())
        ]
    else:
        listed = [modules] if isinstance(modules, nn.Module) else list(modules)
        parts = [Part(module, _index_of(module)) for module in map(_unwrapped, listed)]
    if not parts:
        raise CheckpointError("there are no modules: pass this rank's stages, or the model")
    for part in parts:
        if not isinstance(part.module, nn.Module):
            raise CheckpointError(f"modules must be nn.Module, and one is {type(part.module).__name__}")
    return parts


def _unwrapped(module: Any) -> Any:
    """Return the module inside DistributedDataParallel, DataParallel or what ``torch.compile`` returns."""
    while True:
        if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
            module = module.module
        elif isinstance(module, nn.Module) and (inner := uncompiled(module)) is not module:
            module = inner
        else:
            return module


def _index_of(module: object) -> int | None:
    index = getattr(module, "stage_id", None)
    return index if type(index) is int else None


def held_by(parts: Sequence[Part], tied: Ties | None = None) -> Held:
    """Return what this rank's modules hold.

    Args:
        tied: for each weight that is one, its names on all ranks; None takes those that stages of ``auto_split`` know.
            Ends that are one parameter here are found.

    Raises:
        CheckpointError: if two modules hold the same name, or one keeps something other than tensors; for a tie of
            fewer than two names, or two with one name.
    """
    if tied is None:
        tied = next((part.module.ties for part in parts if isinstance(part.module, SplitStage)), ())
    declared = _declared(parts, tied)
    held = Held(aliases={name: tie[0] for tie in declared for name in tie[1:]}, declared=declared)
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for part in parts:
        if isinstance(part.module, Transformer) and part.module.config.tie_embeddings:
            held.aliases[HEAD] = EMBEDDING
        # Not named_parameters: state_dict first brings back the shards of parameters that FSDP2 keeps gathered.
        state: dict[str, Any] = part.module.state_dict(keep_vars=True)
        held.states.append((part.module, state))
        for wrapped, tensor in state.items():
            name = part.prefix + wrapped.replace(_COMPILED, "")
            if not isinstance(tensor, Tensor):
                raise CheckpointError(
                    f"{name} is a {type(tensor).__name__}: checkpoints hold tensors; pass it as extra"
                )
            if name in held.met:
                raise CheckpointError(
                    f"two modules of this rank hold {name}: pass each stage once; if they are different stages, pass "
                    "{index: stage}, so that their names begin with the stage"
                )
            held.met.add(name)
            names.setdefault(id(tensor), []).append(name)
            tensors[id(tensor)] = tensor
    known = held.aliases.keys() | set(held.aliases.values())
    for key, tensor in tensors.items():
        held.own_names[key] = names[key][0]
        first = next((held.aliases.get(name, name) for name in names[key] if name in known), names[key][0])
        for name in names[key]:
            if name != first:
                held.aliases.setdefault(name, first)
        if first in names[key]:
            held.owned[first] = tensor
        else:
            held.copies.append((first, tensor))
        if not isinstance(tensor, nn.Parameter):
            held.buffers.add(first)
    return held


def load_into(module: nn.Module, state: dict[str, Any]) -> None:
    """Give ``module`` its own ``state_dict``, with other values, by its own means.

    Raises:
        CheckpointError: if it fails, or does not take something of it.
    """
    kind = type(module).__name__
    try:
        # What the module itself leaves out of its state_dict is not missing there.
        taken = module.load_state_dict(state, strict=False)
    except Exception as error:
        what = " ".join(str(error).split())
        raise CheckpointError(f"load_state_dict of {kind} failed ({type(error).__name__}: {what})") from error
    if unknown := getattr(taken, "unexpected_keys", None):
        raise CheckpointError(f"{kind} has {unknown[0]} in its state_dict, and its load_state_dict does not take it")


def _declared(parts: Sequence[Part], tied: Ties) -> list[tuple[str, ...]]:
    """Return the names of each tie; a stage's index stands for its prefix."""
    prefixed = any(part.prefix for part in parts)
    declared: list[tuple[str, ...]] = []
    for tie in tied:
        if isinstance(tie, Mapping):
            names = [f"{STAGES}{index}.{name}" if prefixed else name for index, name in sorted(tie.items())]
            if len(names) > 1 and len(set(names)) == 1:
                continue  # a name that several stages have is one tensor anyway
        else:
            names = sorted(tie) if isinstance(tie, set | frozenset) else list(tie)
        if isinstance(tie, str) or len(set(names)) < 2 or not all(isinstance(name, str) for name in names):
            raise CheckpointError(f"tied={tie!r} must give at least two names of one weight")
        # Its other names would lead from one tie to the next, and what they hold would not be compared.
        if again := set(names) & {name for known in declared for name in known}:
            raise CheckpointError(f"{min(again)} is in two ties: write one tie with all names of the weight")
        declared.append(tuple(names))
    return sorted(declared)


def optimizer_groups(optimizer: torch.optim.Optimizer, held: Held) -> list[Group]:
    """Return the optimizer's parameter groups with names in place of tensors.

    Raises:
        CheckpointError: if it trains something that is not in the modules.
    """
    names = {id(tensor): name for name, tensor in held.ends}
    groups = []
    for group in optimizer.param_groups:
        strangers = [tuple(p.shape) for p in group["params"] if id(p) not in names]
        if strangers:
            raise CheckpointError(
                f"the optimizer trains a parameter of shape {strangers[0]} that is in none of the modules: "
                "make it from their parameters, after FSDP2 was applied, and pass all of this rank's stages"
            )
        groups.append(Group(options_of(group), [names[id(p)] for p in group["params"]]))
    return groups


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group, such as learning rate and weight decay, as numbers."""
    kept = {key: value for key, value in group.items() if key != "params" and key not in _IMPLEMENTATION}
    return {key: value.item() if isinstance(value, Tensor) else value for key, value in kept.items()}


def merged(groups: Iterable[Group]) -> list[Group]:
    """Groups with equal options as one, from all ranks; each parameter once."""
    by_options: dict[str, Group] = {}
    for group in groups:
        kept = by_options.setdefault(json.dumps(group.options, sort_keys=True), Group(group.options, []))
        kept.parameters.extend(group.parameters)
    return [Group(group.options, sorted(set(group.parameters))) for group in by_options.values() if group.parameters]


def optimizer_tensors(optimizer: torch.optim.Optimizer, ends: Ends) -> dict[str, Tensor]:
    """Return the optimizer's state of ``ends`` by key; nothing for parameters that have not been updated yet.

    Raises:
        CheckpointError: if the state is more than tensors like the parameter, and scalars.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in ends:
        for slot, value in optimizer.state.get(parameter, {}).items():
            if value is None:
                continue
            if not isinstance(value, Tensor) or value.shape not in (parameter.shape, ()):
                raise CheckpointError(
                    f"{type(optimizer).__name__} keeps a {type(value).__name__} as {slot!r} of {name}: only optimizers "
                    "whose state is tensors of their parameter's shape, or without dimensions, can be saved"
                )
            tensors[f"optimizer.{name}.{slot}"] = value
    return tensors


def config_of(parts: Sequence[Part]) -> dict[str, Any] | None:
    """Return the sizes of our own model, with the optional ones resolved.

    None for any other: its configuration may hold what JSON does not, or what changes from release to release; names
    and shapes of its tensors are compared anyway.
    """
    config = getattr(parts[0].module, "config", None)
    if not isinstance(config, ModelConfig):
        return None
    return {**asdict(config), "n_kv_heads": config.kv_heads, "ffn_dim": config.hidden_dim}


def whole_model(parts: Sequence[Part]) -> set[str]:
    """Return the names that all ranks together must hold, as far as the modules know them: those of our own model."""
    configs = [part.module.config for part in parts if isinstance(part.module, Transformer)]
    if not configs:
        return set()
    with torch.device("meta"):
        return {name for name, _ in Transformer(configs[0]).named_parameters()}


def as_json(value: Any, what: str) -> str:
    """Return ``value`` as text.

    Raises:
        CheckpointError: if JSON has no way to say it; infinity and NaN are not in it, though ``json`` writes them.
    """
    try:
        return json.dumps(value, indent=1, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{what} must be JSON (finite numbers, text, lists, dictionaries): {error}") from error
