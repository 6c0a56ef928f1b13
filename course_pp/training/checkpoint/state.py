"""What a checkpoint holds, under names that do not depend on the layout.

    model.layers.3.attn.q_proj.weight                 the full model's name, on whichever rank it is
    optimizer.layers.3.attn.q_proj.weight.exp_avg     by that name too, not by a number in this rank's optimizer

The output head of a model with tied embeddings is the embedding: it is not saved a second time, and a stage that holds
only the head fills it from the embedding.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from course_pp.model import ModelConfig, Transformer
from course_pp.model.hf import EMBEDDING, HEAD
from course_pp.training.checkpoint.ranks import CheckpointError

__all__ = ["Group", "Held", "as_json", "config_of", "held_by", "merged", "optimizer_groups", "optimizer_tensors"]

# How the optimizer computes, which may differ from machine to machine; what it computes is restored.
_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")


@dataclass(frozen=True)
class Held:
    """The parameters and persistent buffers of one rank, by full name.

    Args:
        owned: what this rank saves.
        mirrors: second ends of a tie, by the name of the first.
    """

    owned: dict[str, Tensor]
    mirrors: dict[str, Tensor]

    @property
    def ends(self) -> list[tuple[str, Tensor]]:
        """Every tensor here with its name."""
        return [*self.owned.items(), *self.mirrors.items()]


@dataclass(frozen=True)
class Group:
    """Parameters that an optimizer treats alike: their names and its options, such as the learning rate."""

    options: dict[str, Any]
    parameters: list[str]


def as_list(modules: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """One module, or all stages of this rank, as a list."""
    return [modules] if isinstance(modules, nn.Module) else list(modules)


def held_by(modules: Sequence[nn.Module]) -> Held:
    """What ``modules`` hold.

    Raises:
        CheckpointError: if two of them hold the same name, or one keeps something other than tensors.
    """
    held = Held({}, {})
    for module in modules:
        tied_end = getattr(module, "tied_weight", None)
        seen: set[int] = set()
        # Not named_parameters: state_dict first brings back the shards of parameters that FSDP2 keeps gathered.
        state: dict[str, Any] = module.state_dict(keep_vars=True)
        for name, tensor in state.items():
            if not isinstance(tensor, Tensor):
                raise CheckpointError(
                    f"{name} is a {type(tensor).__name__}: checkpoints hold tensors; pass it as extra"
                )
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            is_mirror = tensor is tied_end and name == HEAD
            if is_mirror:
                held.mirrors[EMBEDDING] = tensor
            elif name in held.owned:
                raise CheckpointError(f"two modules of this rank hold {name}: pass each stage once")
            else:
                held.owned[name] = tensor
    return held


def optimizer_groups(optimizer: torch.optim.Optimizer, held: Held) -> list[Group]:
    """The optimizer's parameter groups with names in place of tensors.

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
    """The options of a parameter group, such as learning rate and weight decay, as numbers."""
    kept = {key: value for key, value in group.items() if key != "params" and key not in _IMPLEMENTATION}
    return {key: value.item() if isinstance(value, Tensor) else value for key, value in kept.items()}


def merged(groups: Iterable[Group]) -> list[Group]:
    """Groups with equal options as one, from all ranks; each parameter once."""
    by_options: dict[str, Group] = {}
    for group in groups:
        kept = by_options.setdefault(json.dumps(group.options, sort_keys=True), Group(group.options, []))
        kept.parameters.extend(group.parameters)
    return [Group(group.options, sorted(set(group.parameters))) for group in by_options.values() if group.parameters]


def optimizer_tensors(optimizer: torch.optim.Optimizer, held: Held) -> dict[str, Tensor]:
    """The optimizer's state by key; nothing for parameters that have not been updated yet.

    Raises:
        CheckpointError: if the state is more than tensors like the parameter, and scalars.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in held.owned.items():
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


def config_of(modules: Sequence[nn.Module]) -> dict[str, Any] | None:
    """The sizes of the model, with the optional ones resolved; None for modules that have no configuration."""
    config = getattr(modules[0], "config", None) if modules else None
    if isinstance(config, ModelConfig):
        return {**asdict(config), "n_kv_heads": config.kv_heads, "ffn_dim": config.hidden_dim}
    return asdict(config) if is_dataclass(config) and not isinstance(config, type) else None


def whole_model(modules: Sequence[nn.Module]) -> set[str] | None:
    """The names that all ranks together must hold; None where only the caller can know."""
    config = getattr(modules[0], "config", None) if modules else None
    if not isinstance(config, ModelConfig):
        return None
    with torch.device("meta"):
        return {name for name, _ in Transformer(config).named_parameters()}


def as_json(value: Any, what: str) -> str:
    """``value`` as text.

    Raises:
        CheckpointError: if JSON has no way to say it; infinity and NaN are not in it, though ``json`` writes them.
    """
    try:
        return json.dumps(value, indent=1, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{what} must be JSON (finite numbers, text, lists, dictionaries): {error}") from error
