"""Clip by the norm of the whole model's gradient, wherever its parts are.

    each rank      norms of its own shards, kept apart by the groups a parameter is sharded over
    tp, dp_shard   shards are disjoint: powers of their norms add up, one group after the other
    dp_replicate   replicas hold the same gradient: nothing to add
    pp             stages hold different layers: powers add up; a tied weight is on two stages and counts once

Clipping each stage by its own norm scales the stages' gradients differently, and so changes their direction.
Pascanu et al. 2013, "On the difficulty of training recurrent neural networks", arXiv:1211.5063.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from course_pp.model import PipelineStageModule, Transformer
from course_pp.parallel._torch import multiply, norms_of
from course_pp.parallel.mesh import get_pp_mesh, get_pp_size
from course_pp.parallel.stage import ModelStage

__all__ = ["clip_grad_norm_"]

Part = nn.Module | ModelStage
Groups = tuple[dist.ProcessGroup, ...]


def clip_grad_norm_(
    model_or_stages: Part | Iterable[Part],
    max_norm: float,
    foreach: bool = True,
    *,
    device_mesh: DeviceMesh | None = None,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale all gradients by the same factor so that the norm of the whole model's gradient is at most ``max_norm``.

    A collective: call it on every rank, after the step and before the optimizer's.

    Args:
        model_or_stages: a model, a stage, or all of this rank's stages (modules, or what
            :func:`build_pipeline_stage` returned).
        max_norm: largest norm allowed; ``math.inf`` only measures.
        foreach: handle all gradients of a kind at once instead of one by one.
        device_mesh: the mesh of :func:`init_distributed`; required where this rank holds only part of the model.
        norm_type: p of the p-norm, above 0; ``math.inf`` for the largest absolute value.
        error_if_nonfinite: raise instead of scaling by a norm that is not finite.

    Returns:
        The norm before clipping, a float64 scalar, the same on every rank; 0 where there is no gradient at all.

    Raises:
        ValueError: for a norm that is none, stages without a mesh, or a whole model on a mesh that has a ``pp``
            dimension; on every rank, if the ranks together did not pass every stage once.
        RuntimeError: on every rank, if ``error_if_nonfinite`` and the norm is infinite or not a number; gradients are
            left as they are.
    """
    norm_type, max_norm = _checked(norm_type, max_norm)
    modules = _modules(model_or_stages)
    problem = _problem_of_parts(modules, device_mesh)
    if problem is not None:
        raise ValueError(problem)
    shards = _shards(modules)
    total = _total_norm(shards, norm_type, foreach, _device(modules))
    total = _over_stages(total, modules, device_mesh, norm_type)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"the {norm_type}-norm of the whole model's gradient is {total.item()}, so gradients cannot be clipped: "
            "look for the parameter with a gradient that is not finite, lower the learning rate, or pass "
            "error_if_nonfinite=False"
        )
    # The same factor as torch.nn.utils.clip_grad_norm_.
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    if max_norm < math.inf:
        multiply([shard.gradient for shard in shards if shard.gradient is not None], factor, foreach)
    return total


@dataclass(frozen=True)
class _Shard:
    """This rank's part of one parameter's gradient, and the groups over which the parts are different."""

    gradient: Tensor | None
    groups: Groups
    counted: bool


def _checked(norm_type: float, max_norm: float) -> tuple[float, float]:
    try:
        norm_type, max_norm = float(norm_type), float(max_norm)
    except (TypeError, ValueError):
        raise ValueError(f"norm_type={norm_type!r} and max_norm={max_norm!r} must be numbers") from None
    if not norm_type > 0:
        raise ValueError(f"norm_type={norm_type} must be above 0: use 2.0, or math.inf for the largest entry")
    if not max_norm >= 0:
        raise ValueError(f"max_norm={max_norm} must be 0 or more: use math.inf to measure without clipping")
    return norm_type, max_norm


def _modules(model_or_stages: Part | Iterable[Part]) -> list[nn.Module]:
    single = isinstance(model_or_stages, nn.Module | ModelStage)
    parts: list[Part] = [model_or_stages] if single else list(model_or_stages)  # type: ignore[list-item,arg-type]
    modules = [part.submod if isinstance(part, ModelStage) else part for part in parts]
    strangers = [type(module).__name__ for module in modules if not isinstance(module, nn.Module)]
    if strangers or not modules:
        raise TypeError(
            f"model_or_stages holds {strangers or 'nothing'}: pass a model, a stage, or the list of this rank's stages"
        )
    return modules


def _n_stages(modules: Sequence[nn.Module]) -> int | None:
    """Stages of the whole pipeline, where the modules can tell."""
    return next((module.num_stages for module in modules if isinstance(module, PipelineStageModule)), None)


def _is_part(module: nn.Module) -> bool:
    return isinstance(module, Transformer) and (module.embed is None or module.head is None)


def _problem_of_parts(modules: Sequence[nn.Module], device_mesh: DeviceMesh | None) -> str | None:
    """What keeps a rank from knowing the whole model's norm, as far as it can tell alone."""
    n_stages = _n_stages(modules)
    complete = n_stages is not None and len({id(module) for module in modules}) == n_stages
    if device_mesh is None and any(map(_is_part, modules)) and not complete:
        held = f"{len(modules)} of {n_stages} stages" if n_stages else "part of the model"
        return (
            f"this rank holds {held} but device_mesh is None, so its norm would not be the whole model's: "
            "pass device_mesh=, the mesh of init_distributed"
        )
    if get_pp_mesh(device_mesh) is not None and not any(map(_is_part, modules)) and isinstance(modules[0], Transformer):
        return (
            f"this rank holds the whole model, but the mesh has pp={get_pp_size(device_mesh)} ranks of stages, whose "
            "norms would be added up: pass this rank's stages, or build the mesh with pp=1"
        )
    return None


def _shards(modules: Iterable[nn.Module]) -> list[_Shard]:
    """This rank's gradients, each parameter once."""
    shards, seen = [], set()
    for module in modules:
        mirror = module.tied_weight if isinstance(module, Transformer) and module.head is not None else None
        for parameter in module.parameters():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                shards.append(_shard(parameter, counted=parameter is not mirror))
    return shards


def _shard(parameter: nn.Parameter, counted: bool) -> _Shard:
    gradient = parameter.grad
    if not isinstance(parameter, DTensor):
        return _Shard(gradient, (), counted)
    mesh, placements = parameter.device_mesh, parameter.placements
    groups = tuple(mesh.get_group(dim) for dim, placement in enumerate(placements) if not placement.is_replicate())
    if gradient is None:
        return _Shard(None, groups, counted)
    if not isinstance(gradient, DTensor):
        raise TypeError(
            f"a parameter sharded over {mesh.mesh_dim_names} has a gradient that is not: clip after the step, when "
            "gradients are reduced"
        )
    if gradient.placements != placements:  # a norm on parts of the sequence leaves a sum to be done
        gradient = gradient.redistribute(placements=placements)
        parameter.grad = gradient
    return _Shard(gradient.to_local(), groups, counted)


def _total_norm(shards: Sequence[_Shard], norm_type: float, foreach: bool, device: torch.device) -> Tensor:
    """Norm over this rank's stages, all shards of their parameters included.

    Ranks that share a group hold shards of the same parameters, so they find the same groups in the same order, also
    where some have no gradient.
    """
    local: dict[Groups, list[Tensor]] = {}
    for shard in shards:
        if shard.counted:
            local.setdefault(shard.groups, [])
            if shard.gradient is not None:
                local[shard.groups].append(shard.gradient)
    parts = {
        groups: _combine(norms_of(gradients, norm_type, foreach, device), norm_type)
        for groups, gradients in local.items()
    }
    while any(parts):
        # The longest first: what remains of it is then added up with the shorter ones in one collective.
        group = max(parts, key=len)[-1]
        sharded = [groups for groups in parts if groups and groups[-1] == group]
        reduced = _over_group(torch.stack([parts.pop(groups) for groups in sharded]), group, norm_type)
        for groups, norm in zip(sharded, reduced.unbind(), strict=True):
            rest = groups[:-1]
            parts[rest] = _combine(torch.stack([norm, *([parts[rest]] if rest in parts else [])]), norm_type)
    return parts.get((), torch.zeros((), dtype=torch.float64, device=device))


def _over_group(norms: Tensor, group: dist.ProcessGroup, norm_type: float) -> Tensor:
    """Norms (n,) of each rank's parts -> norms (n,) of the wholes.

    Gathered instead of reduced: every rank then adds up in the same order, and a maximum does not lose a NaN.
    """
    everyone = [torch.empty_like(norms) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, norms, group=group)
    return torch.stack([_combine(column, norm_type) for column in torch.stack(everyone, dim=1).unbind()])


def _over_stages(
    norm: Tensor, modules: Sequence[nn.Module], device_mesh: DeviceMesh | None, norm_type: float
) -> Tensor:
    """Norm over all stages, and a refusal on every rank if some were left out."""
    pp_mesh, n_stages = get_pp_mesh(device_mesh), _n_stages(modules)
    stages_here = torch.tensor(float(len({id(module) for module in modules})), dtype=norm.dtype, device=norm.device)
    everyone = torch.stack([norm, stages_here])[None]
    if pp_mesh is not None:
        parts = [torch.empty_like(everyone[0]) for _ in range(pp_mesh.size())]
        dist.all_gather(parts, everyone[0], group=pp_mesh.get_group())
        everyone = torch.stack(parts)
    found = int(everyone[:, 1].sum().item())
    if n_stages is not None and found != n_stages:
        raise ValueError(
            f"clip_grad_norm_ was given {found} of {n_stages} stages, so its norm would not be the whole model's: pass "
            "the list of all of this rank's stages on every rank"
        )
    return _combine(everyone[:, 0], norm_type)


def _combine(norms: Tensor, norm_type: float) -> Tensor:
    """The norm of a vector whose disjoint parts have these norms (n,)."""
    if norms.numel() == 0:
        return norms.new_zeros(())
    return torch.linalg.vector_norm(norms, norm_type)


def _device(modules: Iterable[nn.Module]) -> torch.device:
    return next((p.device for module in modules for p in module.parameters()), torch.device("cpu"))
