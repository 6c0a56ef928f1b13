"""Clip by the norm of the whole model's gradient, wherever its parts are.

    each rank      norms of its own shards, kept apart by the groups a parameter is sharded over
    tp, dp_shard   shards are disjoint: powers of their norms add up, one group after the other
    dp_replicate   replicas hold the same gradient: nothing to add
    pp             stages hold different layers: powers add up; a tied weight is on two stages and counts once

Clipping each stage by its own norm scales the stages' gradients differently, and so changes their direction.
Pascanu et al. 2013, "On the difficulty of training recurrent neural networks", arXiv:1211.5063.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from course_pp.arguments import check_arguments, fits, refuse_unless
from course_pp.collective import Ranks, on_every_rank
from course_pp.model.stages import Tie
from course_pp.parallel._torch import multiply, norms_of
from course_pp.parallel.mesh import get_pp_mesh
from course_pp.parallel.parts import Part, Parts, agree_on_parts, check_own_parts, parts_of
from course_pp.wrappers import is_flattened

__all__ = ["clip_grad_norm_"]

# How far, relatively, norms may lie apart that are of equal gradients: reduced in another order, in half precision.
_SAME = 1e-2
Groups = tuple[dist.ProcessGroup, ...]


def clip_grad_norm_(
    model_or_stages: Part | Iterable[Part] | Mapping[int, Part],
    max_norm: float,
    foreach: bool = True,
    *,
    device_mesh: DeviceMesh | None = None,
    tied: Sequence[Tie] | None = None,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    copies: int = 1,
) -> Tensor:
    """Scale all gradients by the same factor so that the norm of the whole model's gradient is at most ``max_norm``.

    A collective: call it on every rank, after the step and before the optimizer's.

    Args:
        model_or_stages: a model, a stage, or all of this rank's stages: modules, or stages of torch's pipelining such
            as :func:`build_pipeline_stage` returns. Pass other modules than this package's by stage, ``{1: module}``;
            one alone is stage r on pipeline rank r.
        max_norm: largest norm allowed; ``math.inf`` only measures.
        foreach: handle all gradients of a kind at once instead of one by one.
        device_mesh: the mesh of :func:`init_distributed`; required if this rank holds only part of the model, or if a
            foreign module does not show that it is the whole.
        tied: tied weights of a foreign model: for each the parameter's name by stage, the same on every rank, as in
            ``[{0: "embed.weight", 3: "head.weight"}]``. Such a weight counts once. Its gradients must be summed
            already, as pipelines of :func:`build_pipeline_schedule` and :class:`course_pp.runtime.Pipeline` do. Stages
            given to the former, or made by :func:`auto_split`, know their ties. A parameter with two names on this rank
            counts once anyway. None refuses what looks tied: an embedding whose values come again in another stage. If
            nothing is tied, say ``[]``.
        norm_type: p of the p-norm, above 0; ``math.inf`` for the largest absolute value.
        error_if_nonfinite: raise instead of scaling by a norm that is not finite.
        copies: ranks that hold each stage, all with the same gradients: 2 under ``chimera`` and ``dualpipe``.

    Returns:
        The norm before clipping, a float64 scalar, the same on every rank; 0 where there is no gradient at all.

    Raises:
        ValueError: on every rank of the mesh, for anything but modules and stages, an impossible norm, stages without a
            mesh, or a whole model on a mesh with a ``pp`` dimension; if the ranks together did not pass every stage
            once; or, for a foreign model, if tied weights have different gradients or data-parallel ranks find
            different norms; or for parameters in pieces of FSDP1.
        RuntimeError: on every rank, if ``error_if_nonfinite`` and the norm is infinite or not a number; gradients are
            left as they are.
    """
    given = locals()

    def look() -> tuple[float, float, Parts]:
        _check_classes(given)
        parts = parts_of(model_or_stages, tied, device_mesh)
        _refuse_flattened(parts)
        if parts.are_ours:
            check_own_parts(parts, device_mesh)
        return *_checked(float(norm_type), float(max_norm), copies), parts

    norm_type, max_norm, parts = on_every_rank(device_mesh, look)
    everyone = None if parts.are_ours else agree_on_parts(parts, device_mesh, copies)
    shards = _shards(parts)
    total = _total_norm(shards, norm_type, foreach, _device(parts.modules, device_mesh))
    total = _over_stages(total, parts, device_mesh, norm_type, copies)
    if everyone is not None:
        _check_equal_gradients(total, parts, everyone)
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


def _check_classes(given: Mapping[str, Any]) -> None:
    """Refuse arguments that no rank could use. The ranks check ``model_or_stages`` and ``tied`` together."""
    containers = {"model_or_stages": Part | Iterable, "tied": Sequence | None}
    remedies = {
        "model_or_stages": "pass a model, or this rank's stages, pipeline.stages",
        "tied": "pass for each weight its name by stage, [{0: 'embed.weight', 3: 'head.weight'}]",
    }
    check_arguments(clip_grad_norm_, {name: value for name, value in given.items() if name not in containers})
    for name, kind in containers.items():
        usable = fits(given[name], kind) and not isinstance(given[name], str | bytes)
        refuse_unless(usable, "clip_grad_norm_", name, given[name], remedies[name])


def _refuse_flattened(parts: Parts) -> None:
    """Nothing in a piece of FSDP1 says which ranks hold the others, and pieces may have norms that look like copies."""
    for module in parts.modules:
        name = next((name for name, parameter in module.named_parameters() if is_flattened(parameter)), None)
        if name is not None:
            raise ValueError(
                f"{name!r} of {type(module).__name__} is in pieces of FullyShardedDataParallel (FSDP1): call that "
                "module's own clip_grad_norm_, or shard with apply_fsdp2"
            )


def _checked(norm_type: float, max_norm: float, copies: int) -> tuple[float, float]:
    if not norm_type > 0:
        raise ValueError(f"norm_type={norm_type} must be above 0: use 2.0, or math.inf for the largest entry")
    if copies < 1:
        raise ValueError(f"copies={copies} must be at least 1: give the number of ranks that hold each stage")
    if not max_norm >= 0:
        raise ValueError(f"max_norm={max_norm} must be 0 or more: use math.inf to measure without clipping")
    return norm_type, max_norm


def _shards(parts: Parts) -> list[_Shard]:
    """Return this rank's gradients, each parameter once."""
    uncounted = parts.uncounted()
    parameters = {id(p): p for module in parts.modules for p in module.parameters()}
    return [_shard(parameter, counted=known not in uncounted) for known, parameter in parameters.items()]


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
    """Return the norm over this rank's stages, all shards of their parameters included.

    Ranks that share a group hold shards of the same parameters, so they find the same groups in the same order, also
    where some have no gradient.
    """
    local: dict[Groups, list[Tensor]] = {}
    for shard in shards:
        if shard.counted:
            local.setdefault(shard.groups, [])
            if shard.gradient is not None:
                local[shard.groups].append(shard.gradient)
    norms = {
        groups: _combine(norms_of(gradients, norm_type, foreach, device), norm_type)
        for groups, gradients in local.items()
    }
    while any(norms):
        # The longest first: what remains of it is then added up with the shorter ones in one collective.
        group = max(norms, key=len)[-1]
        sharded = [groups for groups in norms if groups and groups[-1] == group]
        reduced = _over_group(torch.stack([norms.pop(groups) for groups in sharded]), group, norm_type)
        for groups, norm in zip(sharded, reduced.unbind(), strict=True):
            rest = groups[:-1]
            norms[rest] = _combine(torch.stack([norm, *([norms[rest]] if rest in norms else [])]), norm_type)
    return norms.get((), torch.zeros((), dtype=torch.float64, device=device))


def _over_group(norms: Tensor, group: dist.ProcessGroup, norm_type: float) -> Tensor:
    """Combine the norms (n,) of each rank's parts into norms (n,) of the wholes.

    Gathered instead of reduced: every rank then adds up in the same order, and a maximum does not lose a NaN.
    """
    everyone = [torch.empty_like(norms) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, norms, group=group)
    return torch.stack([_combine(column, norm_type) for column in torch.stack(everyone, dim=1).unbind()])


def _over_stages(norm: Tensor, parts: Parts, device_mesh: DeviceMesh | None, norm_type: float, copies: int) -> Tensor:
    """Return the norm over all stages, and a refusal on every rank if some were left out."""
    pp_mesh, n_stages = get_pp_mesh(device_mesh), parts.n_stages
    n_modules = float(len({id(module) for module in parts.modules}))
    stages_here = torch.tensor(n_modules, dtype=norm.dtype, device=norm.device)
    everyone = torch.stack([norm, stages_here])[None]
    if pp_mesh is not None:
        gathered = [torch.empty_like(everyone[0]) for _ in range(pp_mesh.size())]
        dist.all_gather(gathered, everyone[0], group=pp_mesh.get_group())
        everyone = torch.stack(gathered)
    found = int(everyone[:, 1].sum().item())
    if n_stages is not None and found != n_stages * copies:
        raise ValueError(
            f"clip_grad_norm_ was given {found} of {n_stages * copies} stages, so its norm would not be the whole "
            "model's: pass the list of all of this rank's stages on every rank"
        )
    # Each copy adds the same power.
    return _combine(everyone[:, 0], norm_type) / copies ** (1 / norm_type)


def _check_equal_gradients(total: Tensor, parts: Parts, everyone: Ranks) -> None:
    """Refuse, on every rank, gradients that should be equal and are not: of a tie's ends, of data-parallel ranks.

    Nothing in a foreign model shows either case, and clipping by different factors would drive equal weights apart.
    """
    norms = {
        (number, stage): _total_norm([_shard(end, counted=True)], 2.0, True, end.device).item()
        for number, tie in enumerate(parts.ties)
        for stage, end in parts.ends(tie)
    }
    found = everyone.gather((total.item(), norms))
    totals = [one for one, _ in found]
    if not _all_close(totals):
        low, high = totals.index(min(totals)), totals.index(max(totals))
        raise ValueError(
            f"rank {low} finds a gradient of norm {totals[low]:.6g}, rank {high} one of {totals[high]:.6g}: average "
            "gradients over the data-parallel ranks before clipping (FSDP2 or DDP), and pass every rank's own stages"
        )
    for number, tie in enumerate(parts.ties):
        ends = {stage: norm for _, ends in found for (known, stage), norm in ends.items() if known == number}
        if not _all_close(list(ends.values())):
            spelled = ", ".join(f"{norm:.6g} on stage {stage}" for stage, norm in sorted(ends.items()))
            raise ValueError(
                f"the gradients of the tied weight {dict(tie)} have norms {spelled}: sum them over its stages before "
                "clipping, as course_pp.runtime.Pipeline(tied=...) does"
            )


def _all_close(norms: Sequence[float]) -> bool:
    """Return whether all norms are equal but for rounding; a norm that is not finite differs from every finite one."""
    finite = [norm for norm in norms if math.isfinite(norm)]
    return not finite or (len(finite) == len(norms) and max(norms) - min(norms) <= _SAME * max(norms))


def _combine(norms: Tensor, norm_type: float) -> Tensor:
    """Return the norm of a vector whose disjoint parts have these norms (n,)."""
    if norms.numel() == 0:
        return norms.new_zeros(())
    return torch.linalg.vector_norm(norms, norm_type)


def _device(modules: Iterable[nn.Module], device_mesh: DeviceMesh | None) -> torch.device:
    where = torch.device("cpu" if device_mesh is None else device_mesh.device_type)  # of a stage without parameters
    return next((p.device for module in modules for p in module.parameters()), where)
