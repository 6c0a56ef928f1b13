"""The state of one rank, under names that do not depend on the layout.

    model.layers.3.attn.q_proj.weight              a weight, by the full model's name
    model.stages.3.weight                          a weight of a stage with names of its own
    optimizer.layers.3.attn.q_proj.weight.exp_avg  the optimizer's state, by the same name and not
                                                   by the parameter's number in this rank's
                                                   optimizer
    rng.pp1.dp_replicate0.dp_shard0.tp0.cpu        a random number generator, by the coordinates of
                                                   its rank in the mesh

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

# These options say how the optimizer computes, which may differ from machine to machine. All other
# options say which numbers it computes, and are restored.
_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")


@dataclass(frozen=True)
class RankState:
    """The parameters and persistent buffers of one rank, by their names in a checkpoint.

    Attributes:
        modules: the modules without wrappers such as DistributedDataParallel, which would add to
            the names.
        indices: (index, number of all stages) of each stage, as far as they are known.
        owned: tensors that this rank saves; a tied weight stands under the first of its names.
        copies: further ends of ties, each with the first name of its tie. They are filled on
            loading, but not saved.
        aliases: other names of tied weights, each with the first name.
        buffers: names of buffers, which no optimizer trains.
        own_names: names that the modules here give to tensors, by ``id`` of the tensor.
        declared: the names of each tie that the caller or the stages declared.
        met: all names here.
        states: each module with the state_dict that holds its tensors.
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
    """Return the state that this rank's modules hold; for ``tied`` see :func:`save`."""
    found = RankState()
    prefixes = []
    for given, wrapped in _listed(modules):
        module = _unwrapped(wrapped)
        own = _whole_or_none(module, "stage_id")
        if given is not None and own not in (None, given):
            raise CheckpointError(f"stage {own} was passed as {given}: pass {{index: stage}}")
        index = own if given is None else given
        if index is not None:
            found.indices.add((index, _whole_or_none(module, "num_stages")))
        found.modules.append(module)
        # The names of our own stages are the full model's, so they need no index.
        has_full_names = given is None or isinstance(module, Transformer)
        prefixes.append("" if has_full_names else f"{STAGES}{given}.")
    if not found.modules:
        raise CheckpointError("there are no modules: pass this rank's stages, or the model")

    if tied is None:
        tied = next((module.ties for module in found.modules if isinstance(module, SplitStage)), ())
    found.declared.extend(_declared(tied, prefixed=any(prefixes)))
    for first, *others in found.declared:
        found.aliases.update(dict.fromkeys(others, first))

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
                raise CheckpointError(
                    f"two modules of this rank hold {name}: pass each stage once, and different"
                    " stages as {index: stage}"
                )
            found.met.add(name)
            names.setdefault(id(tensor), []).append(name)
            tensors[id(tensor)] = tensor

    tied_names = found.aliases.keys() | set(found.aliases.values())
    for key, tensor in tensors.items():
        found.own_names[key] = names[key][0]
        first = names[key][0]
        for name in names[key]:
            if name in tied_names:
                first = found.aliases.get(name, name)
                break
        # One tensor under several names is a tie that nobody declared.
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


def _listed(modules: Modules) -> list[tuple[int | None, nn.Module]]:
    """Return the modules with their stage, or with None if they were given without."""
    if isinstance(modules, nn.Module):
        return [(None, modules)]
    if isinstance(modules, Mapping):
        return list(modules.items())
    return [(None, module) for module in modules]


def _whole_or_none(module: nn.Module, name: str) -> int | None:
    """Return an attribute of our stages. Another module may use the name for something else."""
    value = getattr(module, name, None)
    return value if type(value) is int else None


def _unwrapped(module: Any) -> Any:
    """Return the module inside DistributedDataParallel, DataParallel and ``torch.compile``."""
    while True:
        if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
            module = module.module
        elif (inner := uncompiled(module)) is not module:
            module = inner
        else:
            return module


def _declared(tied: Ties, prefixed: bool) -> list[tuple[str, ...]]:
    """Return the names of each declared tie, sorted, so that all ranks list them alike."""
    declared: list[tuple[str, ...]] = []
    taken: set[str] = set()
    for tie in tied:
        if isinstance(tie, Mapping):
            names = []
            for index, name in sorted(tie.items()):
                names.append(f"{STAGES}{index}.{name}" if prefixed else name)
            if len(names) > 1 and len(set(names)) == 1:
                continue  # a name that several stages have is one tensor anyway
        else:
            names = sorted(tie) if isinstance(tie, set | frozenset) else list(tie)
        if isinstance(tie, str) or len(set(names)) < 2:
            raise CheckpointError(f"tied={tie!r} must give at least two names of one weight")
        # Through a name in two ties, the names of one tie would lead to the other, and their
        # weights would not be compared.
        again = taken & set(names)
        if again:
            raise CheckpointError(
                f"{min(again)} is in two ties: write one tie with all names of the weight"
            )
        taken.update(names)
        declared.append(tuple(names))
    return sorted(declared)


def check_ties_are_declared_alike(
    everyone: Sequence[tuple[Sequence[tuple[str, ...]], set[str]]],
) -> None:
    """Refuse ties that ranks declare differently, and names in ties that no rank has.

    Args:
        everyone: ``declared`` and ``met`` of each rank's :class:`RankState`.
    """
    if problem := difference([{"tied": declared} for declared, _ in everyone]):
        raise CheckpointError(f"{problem}, or leave tied= away on all")
    held = set().union(*(met for _, met in everyone))
    declared, _ = everyone[0]
    strangers = set().union(*declared) - held
    if strangers:
        raise CheckpointError(
            f"tied= names {min(strangers)}, which no rank's modules have: write it as they do"
        )


def load_into(module: nn.Module, state: dict[str, Any]) -> None:
    """Call ``module.load_state_dict`` with new values of its own ``state_dict``."""
    kind = type(module).__name__
    try:
        # strict=False: a module may leave an entry out of its state_dict and yet expect it.
        taken = module.load_state_dict(state, strict=False)
    except Exception as error:
        problem = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise CheckpointError(f"load_state_dict of {kind} failed ({problem})") from error
    if unknown := getattr(taken, "unexpected_keys", None):
        raise CheckpointError(
            f"{kind} has {unknown[0]} in its state_dict, and its load_state_dict does not take it"
        )


def config_of(state: RankState) -> dict[str, Any] | None:
    """Return the sizes of our own model, with the optional ones resolved; None for any other model.

    Another model's configuration may hold objects that JSON does not have, or that change from
    release to release. Names and shapes are compared anyway.
    """
    config = getattr(state.modules[0], "config", None)
    if not isinstance(config, ModelConfig):
        return None
    return {**asdict(config), "n_kv_heads": config.kv_heads, "ffn_dim": config.hidden_dim}


def hf_config_of(state: RankState) -> str | None:
    """Return the ``config.json`` of transformers' models and of their stages; None for others."""
    module = state.modules[0]
    config = getattr(module, "config", None)
    # If the model is one of transformers', that library is imported already.
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(config, transformers.PreTrainedConfig):
        return None
    # A stage has a class of its own in front of the model's, and so has a module after FSDP2.
    known = []
    for kind in type(module).__mro__:
        if kind.__module__.startswith("transformers.") and hasattr(transformers, kind.__name__):
            known.append(kind.__name__)
    described = {**json.loads(config.to_json_string()), "architectures": known[:1]}
    return json.dumps(described, indent=1)


@dataclass(frozen=True)
class OptimizerGroup:
    """Names of parameters that an optimizer treats alike, and its options for them."""

    options: dict[str, Any]
    parameters: list[str]


def optimizer_groups(optimizer: torch.optim.Optimizer, ends: Ends) -> list[OptimizerGroup]:
    """Return the optimizer's parameter groups with names in place of tensors."""
    names = {id(tensor): name for name, tensor in ends}
    groups = []
    for group in optimizer.param_groups:
        parameters = []
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise CheckpointError(
                    f"the optimizer trains a parameter of shape {tuple(parameter.shape)} of no"
                    " module: make it from their parameters, after FSDP2 was applied, and pass all"
                    " of this rank's stages"
                )
            parameters.append(names[id(parameter)])
        options = {}
        for key, value in group.items():
            if key != "params" and key not in _IMPLEMENTATION:
                options[key] = value.item() if isinstance(value, Tensor) else value
        groups.append(OptimizerGroup(options, parameters))
    return groups


def merged(groups: Iterable[OptimizerGroup]) -> list[OptimizerGroup]:
    """Return groups with equal options as one, each parameter once."""
    by_options: dict[str, OptimizerGroup] = {}
    for group in groups:
        options = json.dumps(group.options, sort_keys=True)
        kept = by_options.setdefault(options, OptimizerGroup(group.options, []))
        kept.parameters.extend(group.parameters)
    found = []
    for group in by_options.values():
        if group.parameters:
            found.append(OptimizerGroup(group.options, sorted(set(group.parameters))))
    return found


def keyed(ends: Ends, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """Return weights and their optimizer's state by key.

    A parameter that was not updated yet has no state.
    """
    tensors = {f"model.{name}": tensor for name, tensor in ends}
    if optimizer is None:
        return tensors
    for name, parameter in ends:
        for slot, value in optimizer.state.get(parameter, {}).items():
            if value is None:
                continue
            if not isinstance(value, Tensor) or value.shape not in (parameter.shape, ()):
                raise CheckpointError(
                    f"{type(optimizer).__name__} keeps a {type(value).__name__} as {slot!r} of"
                    f" {name}: only tensors of the parameter's shape, or scalars, can be saved"
                )
            tensors[f"optimizer.{name}.{slot}"] = value
    return tensors


def mesh_coordinates(device_mesh: DeviceMesh | None, rank: int) -> dict[str, int]:
    """Return this rank's coordinates in the mesh.

    Ranks without a mesh form a pipeline, as in ``course_pp.runtime``.
    """
    if device_mesh is None:
        return {**dict.fromkeys(DIMENSIONS, 0), "pp": rank}
    names = device_mesh.mesh_dim_names or ()
    found = dict(zip(names, device_mesh.get_coordinate() or (), strict=True))
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
    """Return the saved key for each kind of this rank's generators; empty if there are none.

    Without keys of its own coordinates, the rank takes the keys of a neighbour.
    """
    for candidate in (coordinates, {**coordinates, "tp": 0}, {**coordinates, "tp": 0, "pp": 0}):
        keys = {kind: f"{_prefix(candidate)}.{kind}" for kind in _GENERATORS}
        found = {kind: key for kind, key in keys.items() if key in saved}
        if found:
            return found
    return {}


def restore_rng(
    states: Mapping[str, Tensor], seed: int, step: int, coordinates: Mapping[str, int]
) -> None:
    """Continue from ``states`` (kind -> uint8). Seed a generator without a state anew."""
    place = [coordinates[name] for name in ("dp_replicate", "dp_shard")]
    digest = hashlib.blake2b(f"{seed}/{step}/{place}".encode(), digest_size=4).digest()
    fresh = int.from_bytes(digest, "little")
    if "cpu" not in states:
        torch.manual_seed(fresh)  # CUDA's generator too
        random.seed(fresh)
        np.random.seed(fresh)
        return
    torch.set_rng_state(states["cpu"])
    if "python" in states:
        version, internal, gauss = json.loads(bytes(states["python"].tolist()))
        random.setstate((version, tuple(internal), gauss))
    if "numpy" in states:
        np.random.set_state(json.loads(bytes(states["numpy"].tolist())))
    else:  # a checkpoint of version 1 has no state of NumPy
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
