"""What one rank holds, under names that do not depend on the layout.

    model.layers.3.attn.q_proj.weight                 the full model's name, on whichever rank it is
    model.stages.3.weight                             of a stage whose own names are not the full model's
    optimizer.layers.3.attn.q_proj.weight.exp_avg     by that name too, not by a number in this rank's optimizer
    rng.pp1.dp_replicate0.dp_shard0.tp0.cpu           a random number generator, by the rank's coordinates in the mesh

A tied weight is saved once, under the first of its names, and the description of the run lists the
others. A stage that holds only another end, such as the output head of a model with tied
embeddings, fills it from there.

The generators are torch's, Python's and NumPy's. A rank whose coordinates were there when the
checkpoint was written continues its own sequence. A new rank along ``tp`` or ``pp`` takes the
sequence of its neighbour with tp=0, or else of the one with tp=0 and pp=0:
:func:`course_pp.parallel.init_distributed` seeds all ranks alike, so that all draw the same
batches, and each stage has random streams of its own (:mod:`course_pp.step.random_streams`). A new
data rank is seeded by (seed of the run, step, its coordinates without tp and pp).
"""

import hashlib
import json
import random
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from course_pp.base.ranks import difference
from course_pp.base.torch_private import name_uncompiled, uncompiled
from course_pp.model import ModelConfig, Transformer
from course_pp.model.hf import EMBEDDING, HEAD
from course_pp.parallel.split import SplitStage
from course_pp.training.checkpoint.manifest import CheckpointError

Modules = nn.Module | Sequence[nn.Module] | Mapping[int, nn.Module]
Ties = Iterable[Mapping[int, str] | Collection[str]]
Ends = list[tuple[str, Tensor]]

STAGES = "stages."
HF_CONFIG = "config.json"

DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "tp")
_GENERATORS = ("cpu", "cuda", "python", "numpy")

# How the optimizer computes, which may differ from machine to machine; what it computes is
# restored.
_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")


@dataclass(frozen=True)
class RankState:
    """The parameters and persistent buffers of one rank, by their names in a checkpoint.

    Attributes:
        modules: without wrappers around a whole one, which add to its names.
        indices: of its stages, each with the number of stages, as far as they are known.
        owned: what this rank saves, a tied weight under the first of its names.
        copies: ends of ties beside that, by the first name of the tie: filled on loading, but not
            saved.
        aliases: the other names of ties, each with the first one.
        buffers: the names of those that no optimizer trains.
        own_names: what the modules here call a tensor, by its ``id``.
        declared: the names of each tie that the caller or the stages named.
        met: every name here.
        states: each module with the state_dict that the tensors are from.
    """

    modules: list[nn.Module] = field(default_factory=list)
    indices: set[tuple[int, int | None]] = field(default_factory=set)
    owned: dict[str, Tensor] = field(default_factory=dict)
    copies: Ends = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    buffers: set[str] = field(default_factory=set)
    own_names: dict[int, str] = field(default_factory=dict)
    declared: list[tuple[str, ...]] = field(default_factory=list)
    met: set[str] = field(default_factory=set)
    states: list[tuple[nn.Module, dict[str, Any]]] = field(default_factory=list)

    @property
    def ends(self) -> Ends:
        """Every tensor here with its name."""
        return [*self.owned.items(), *self.copies]


def state_of(modules: Modules, tied: Ties | None = None) -> RankState:
    """Return what this rank's modules hold; ``tied`` as for :func:`save`."""
    found = RankState()
    prefixes = []
    listed: Iterable[tuple[int | None, Any]] = [(None, modules)]
    if not isinstance(modules, nn.Module):
        listed = (
            modules.items()
            if isinstance(modules, Mapping)
            else [(None, module) for module in modules]
        )
    for given, wrapped in listed:
        module = _unwrapped(wrapped)
        known = (getattr(module, name, None) for name in ("stage_id", "num_stages"))
        own, number = (value if type(value) is int else None for value in known)
        if given is not None and own not in (None, given):
            raise CheckpointError(f"stage {own} was passed as {given}: pass {{index: stage}}")
        index = own if given is None else given
        if index is not None:
            found.indices.add((index, number))
        found.modules.append(module)
        # The names of our own stages are the full model's, so that they need no index.
        prefixes.append(
            "" if given is None or isinstance(module, Transformer) else f"{STAGES}{given}."
        )
    if not found.modules:
        raise CheckpointError("there are no modules: pass this rank's stages, or the model")
    if tied is None:
        tied = next((module.ties for module in found.modules if isinstance(module, SplitStage)), ())
    found.declared.extend(_declared(tied, prefixed=any(prefixes)))
    found.aliases.update({name: tie[0] for tie in found.declared for name in tie[1:]})
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for module, prefix in zip(found.modules, prefixes, strict=True):
        if isinstance(module, Transformer) and module.config.tie_embeddings:
            found.aliases[HEAD] = EMBEDDING
        # Not named_parameters: state_dict first brings back the shards of parameters that FSDP2
        # keeps gathered.
        state: dict[str, Any] = module.state_dict(keep_vars=True)
        found.states.append((module, state))
        for own_name, tensor in state.items():
            name = prefix + name_uncompiled(own_name)
            if not isinstance(tensor, Tensor):
                kind = type(tensor).__name__
                raise CheckpointError(
                    f"{name} is a {kind}: checkpoints hold tensors; pass it as extra"
                )
            if name in found.met:
                how = "pass each stage once, and different stages as {index: stage}"
                raise CheckpointError(f"two modules of this rank hold {name}: {how}")
            found.met.add(name)
            names.setdefault(id(tensor), []).append(name)
            tensors[id(tensor)] = tensor
    tied_names = found.aliases.keys() | set(found.aliases.values())
    for key, tensor in tensors.items():
        found.own_names[key] = names[key][0]
        first = next(
            (found.aliases.get(name, name) for name in names[key] if name in tied_names),
            names[key][0],
        )
        for name in names[key]:
            if name != first:
                found.aliases.setdefault(name, first)
        if first in names[key]:
            found.owned[first] = tensor
        else:
            found.copies.append((first, tensor))
        if not isinstance(tensor, nn.Parameter):
            found.buffers.add(first)
    return found


def _unwrapped(module: Any) -> Any:
    """Return the module inside DistributedDataParallel, DataParallel or what ``torch.compile`` returns."""
    while True:
        if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
            module = module.module
        elif (inner := uncompiled(module)) is not module:
            module = inner
        else:
            return module


def _declared(tied: Ties, prefixed: bool) -> list[tuple[str, ...]]:
    declared: list[tuple[str, ...]] = []
    for tie in tied:
        if isinstance(tie, Mapping):
            names = [
                f"{STAGES}{index}.{name}" if prefixed else name
                for index, name in sorted(tie.items())
            ]
            if len(names) > 1 and len(set(names)) == 1:
                continue  # a name that several stages have is one tensor anyway
        else:
            names = sorted(tie) if isinstance(tie, set | frozenset) else list(tie)
        if isinstance(tie, str) or len(set(names)) < 2:
            raise CheckpointError(f"tied={tie!r} must give at least two names of one weight")
        # Its other names would lead from one tie to the next, and what they hold would not be
        # compared.
        if again := set(names) & {name for known in declared for name in known}:
            raise CheckpointError(
                f"{min(again)} is in two ties: write one tie with all names of the weight"
            )
        declared.append(tuple(names))
    return sorted(declared)


def check_ties_are_declared_alike(
    everyone: Sequence[tuple[Sequence[tuple[str, ...]], set[str]]],
) -> None:
    """Refuse ties that the ranks do not declare alike, or that name what no rank has, by their ``declared, met``."""
    if problem := difference([{"tied": declared} for declared, _ in everyone]):
        raise CheckpointError(f"{problem}, or leave tied= away on all")
    held = set().union(*(met for _, met in everyone))
    if strangers := sorted({name for tie in everyone[0][0] for name in tie} - held):
        raise CheckpointError(
            f"tied= names {strangers[0]}, which no rank's modules have: write it as they do"
        )


def load_into(module: nn.Module, state: dict[str, Any]) -> None:
    """Give ``module`` its own ``state_dict``, with other values, by its own means."""
    kind = type(module).__name__
    try:
        # What the module itself leaves out of its state_dict is not missing there.
        taken = module.load_state_dict(state, strict=False)
    except Exception as error:
        what = " ".join(str(error).split())
        raise CheckpointError(
            f"load_state_dict of {kind} failed ({type(error).__name__}: {what})"
        ) from error
    if unknown := getattr(taken, "unexpected_keys", None):
        raise CheckpointError(
            f"{kind} has {unknown[0]} in its state_dict, and its load_state_dict does not take it"
        )


def config_of(state: RankState) -> dict[str, Any] | None:
    """Return the sizes of our own model, with the optional ones resolved; None for any other model.

    Those may hold what JSON does not, or what changes from release to release; names and shapes are
    compared anyway.
    """
    config = getattr(state.modules[0], "config", None)
    if not isinstance(config, ModelConfig):
        return None
    return {**asdict(config), "n_kv_heads": config.kv_heads, "ffn_dim": config.hidden_dim}


def hf_config_of(state: RankState) -> str | None:
    """Return the ``config.json`` of transformers' models and of their stages; None for others."""
    module = state.modules[0]
    config = getattr(module, "config", None)
    transformers = sys.modules.get("transformers")  # there, if the model is one of its
    if transformers is None or not isinstance(config, transformers.PreTrainedConfig):
        return None
    # A stage, or what FSDP2 made of it, has a class of its own in front of the model's.
    of_theirs = [
        kind for kind in type(module).__mro__ if kind.__module__.startswith("transformers.")
    ]
    known = [kind.__name__ for kind in of_theirs if hasattr(transformers, kind.__name__)]
    described = {**json.loads(config.to_json_string()), "architectures": known[:1]}
    return json.dumps(described, indent=1)


@dataclass(frozen=True)
class Group:
    """Parameters, by name, that an optimizer treats alike, and its options for them."""

    options: dict[str, Any]
    parameters: list[str]


def optimizer_groups(optimizer: torch.optim.Optimizer, ends: Ends) -> list[Group]:
    """Return the optimizer's parameter groups with names in place of tensors."""
    names = {id(tensor): name for name, tensor in ends}
    groups = []
    for group in optimizer.param_groups:
        strangers = [tuple(p.shape) for p in group["params"] if id(p) not in names]
        if strangers:
            how = (
                "make it from their parameters, after FSDP2 was applied, and pass all of this"
                " rank's stages"
            )
            raise CheckpointError(
                f"the optimizer trains a parameter of shape {strangers[0]} of no module: {how}"
            )
        kept = {
            key: value
            for key, value in group.items()
            if key != "params" and key not in _IMPLEMENTATION
        }
        options = {
            key: value.item() if isinstance(value, Tensor) else value for key, value in kept.items()
        }
        groups.append(Group(options, [names[id(p)] for p in group["params"]]))
    return groups


def merged(groups: Iterable[Group]) -> list[Group]:
    """Return groups with equal options as one, each parameter once."""
    by_options: dict[str, Group] = {}
    for group in groups:
        kept = by_options.setdefault(
            json.dumps(group.options, sort_keys=True), Group(group.options, [])
        )
        kept.parameters.extend(group.parameters)
    return [
        Group(group.options, sorted(set(group.parameters)))
        for group in by_options.values()
        if group.parameters
    ]


def keyed(ends: Ends, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """Return weights and their optimizer's state by key; no state of parameters that have not been updated yet."""
    tensors = {f"model.{name}": tensor for name, tensor in ends}
    for name, parameter in ends:
        for slot, value in (
            {} if optimizer is None else optimizer.state.get(parameter, {})
        ).items():
            if value is None:
                continue
            if not isinstance(value, Tensor) or value.shape not in (parameter.shape, ()):
                kept = (
                    f"{type(optimizer).__name__} keeps a {type(value).__name__} as {slot!r} of"
                    f" {name}"
                )
                raise CheckpointError(
                    f"{kept}: only tensors of the parameter's shape, or scalars, can be saved"
                )
            tensors[f"optimizer.{name}.{slot}"] = value
    return tensors


def mesh_coordinates(device_mesh: DeviceMesh | None, rank: int) -> dict[str, int]:
    """Return where this rank is in the mesh; ranks without a mesh form a pipeline, as in ``course_pp.runtime``."""
    if device_mesh is None:
        return {**dict.fromkeys(DIMENSIONS, 0), "pp": rank}
    found = dict(
        zip(device_mesh.mesh_dim_names or (), device_mesh.get_coordinate() or (), strict=True)
    )
    return {name: found.get(name, 0) for name in DIMENSIONS}


def rng_tensors(coordinates: Mapping[str, int]) -> dict[str, Tensor]:
    """Return the states of this rank's generators, uint8, by the keys of a checkpoint."""
    states = {
        "cpu": torch.get_rng_state(),
        "python": _as_tensor(random.getstate()),
        "numpy": _as_tensor(np.random.get_state(legacy=False)),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return {f"{_prefix(coordinates)}.{kind}": state for kind, state in states.items()}


def rng_keys(coordinates: Mapping[str, int], saved: Mapping[str, object]) -> dict[str, str]:
    """Return which of the saved keys are for this rank: kind -> key; empty if none are."""
    for candidate in (coordinates, {**coordinates, "tp": 0}, {**coordinates, "tp": 0, "pp": 0}):
        found = {
            kind: key for kind in _GENERATORS if (key := f"{_prefix(candidate)}.{kind}") in saved
        }
        if found:
            return found
    return {}


def restore_rng(
    states: Mapping[str, Tensor], seed: int, step: int, coordinates: Mapping[str, int]
) -> None:
    """Continue from ``states`` (kind -> uint8); a generator without one is seeded anew."""
    place = [coordinates[name] for name in ("dp_replicate", "dp_shard")]
    fresh = int.from_bytes(
        hashlib.blake2b(f"{seed}/{step}/{place}".encode(), digest_size=4).digest(), "little"
    )
    if "cpu" not in states:
        torch.manual_seed(fresh)  # CUDA too
        random.seed(fresh)
        np.random.seed(fresh)
        return
    torch.set_rng_state(states["cpu"])
    if "python" in states:
        version, internal, gauss = json.loads(bytes(states["python"].tolist()))
        random.setstate((version, tuple(internal), gauss))
    if "numpy" in states:
        np.random.set_state(json.loads(bytes(states["numpy"].tolist())))
    else:  # a checkpoint of version 1
        np.random.seed(fresh)
    if torch.cuda.is_available():
        if "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"])
        else:
            torch.cuda.manual_seed(fresh)


def _as_tensor(state: object) -> Tensor:
    """Return a generator's state as JSON in uint8."""
    text = json.dumps(state, default=lambda array: array.tolist())
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _prefix(coordinates: Mapping[str, int]) -> str:
    return "rng." + ".".join(f"{name}{coordinates[name]}" for name in DIMENSIONS)
