"""Clip by the norm of the whole model's gradient, wherever its parts are.

    each rank      norms of its own shards, kept apart by the groups a parameter is sharded over
    tp, dp_shard   shards are disjoint: powers of their norms add up, one group after the other
    dp_replicate   replicas hold the same gradient: nothing to add
    pp             stages hold different layers: powers add up; a tied weight, which is on two
                   stages, counts once

Clipping each stage by its own norm scales the stages' gradients differently, and so changes their
direction. Pascanu et al. 2013, "On the difficulty of training recurrent neural networks",
arXiv:1211.5063.

Stages of a foreign model do not tell how many there are and which weights they share, so ranks
first compare them.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor

from course_pp.base.arguments import check_arguments, refuse_below, shown
from course_pp.base.ranks import Ranks, difference, refusing_together
from course_pp.base.torch_private import multiply, norms_of
from course_pp.model import PipelineStageModule, Transformer
from course_pp.model.stages import Tie
from course_pp.parallel.mesh import get_pp_mesh, get_pp_rank, get_pp_size
from course_pp.parallel.split import SplitStage
from course_pp.parallel.stage import ModelStage
from course_pp.step.hooks import is_flattened
from course_pp.step.ties import Look, looks_of, problem_of_forgotten_ties

Stage = nn.Module | PipelineStage
Groups = tuple[dist.ProcessGroup, ...]

# How far, relatively, norms may lie apart that are of equal gradients: reduced in another order, in
# half precision.
_SAME = 1e-2


def clip_grad_norm_(
    model_or_stages: Stage | Iterable[Stage] | Mapping[int, Stage],
    max_norm: float,
    foreach: bool = True,
    *,
    device_mesh: DeviceMesh | None = None,
    tied: Sequence[Tie] | None = None,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    copies: int = 1,
) -> Tensor:
    """Scale all gradients by one factor, so that the model's gradient has at most ``max_norm``.

    A collective: call it on every rank, after the step and before the optimizer's. Clip gradients
    as a step of either engine leaves them: they are of the mean over the global batch, FSDP2's data
    ranks included.

    Args:
        model_or_stages: a model, a stage, or all of this rank's stages: modules, or stages of
            torch's pipelining such as :func:`build_pipeline_stage` returns. Pass other modules than
            this package's by stage, ``{1: module}``; one alone is stage r on pipeline rank r.
        max_norm: largest norm allowed; ``math.inf`` only measures.
        foreach: handle all gradients of a kind at once instead of one by one.
        device_mesh: the mesh of :func:`init_distributed`; required if this rank holds only part of
            the model, or if a foreign module does not show that it is the whole.
        tied: tied weights of a foreign model, as of :func:`build_pipeline_schedule`, by stage. Such
            a weight counts once; its gradients must be summed already, as both engines' pipelines
            do. Stages given to that function, or made by :func:`auto_split`, know their ties. None
            refuses what looks tied; if nothing is, say ``[]``.
        norm_type: p of the p-norm, above 0; ``math.inf`` for the largest absolute value.
        error_if_nonfinite: raise a RuntimeError, on every rank, instead of scaling by a norm that
            is not finite.
        copies: ranks that hold each stage, all with the same gradients: 2 under ``chimera`` and
            ``dualpipe``.

    Returns:
        The norm before clipping, a float64 scalar, the same on every rank; 0 where there is no
        gradient at all.

    Raises:
        ValueError: on every rank of the mesh, if the ranks together did not pass every stage once,
            or cannot tell; or, for a foreign model, if tied weights have different gradients or
            data-parallel ranks different norms.
    """
    # looked at by _held
    given = {n: value for n, value in locals().items() if n not in ("model_or_stages", "tied")}
    with refusing_together(device_mesh):
        check_arguments(clip_grad_norm_, given)
        refuse_below(1, "clip_grad_norm_", copies=copies)
        if not norm_type > 0:
            raise ValueError(
                f"norm_type={norm_type} must be above 0: use 2.0, or math.inf for the largest entry"
            )
        if not max_norm >= 0:
            raise ValueError(
                f"max_norm={max_norm} must be 0 or more: use math.inf to measure without clipping"
            )
        held = _held(model_or_stages, tied, device_mesh)
        _refuse_flattened(held)
        ours = [module for module in held.modules if isinstance(module, Transformer)]
        parts = [module for module in ours if module.embed is None or module.head is None]
        if parts and held.n_stages is None and device_mesh is None:
            raise ValueError(
                "this rank holds part of the model but device_mesh is None, so its norm would not"
                " be the whole model's: pass device_mesh=, the mesh of init_distributed"
            )
        if len(parts) < len(ours) and get_pp_size(device_mesh) > 1:
            raise ValueError(
                f"this rank holds the whole model, but the mesh has pp={get_pp_size(device_mesh)}"
                " ranks of stages, whose norms would be added up: pass this rank's stages, or"
                " build the mesh with pp=1"
            )

    norm_type, max_norm = float(norm_type), float(max_norm)
    everyone = None if held.are_ours else _agree(held, device_mesh, copies)
    uncounted = held.uncounted()
    parameters = {id(p): p for module in held.modules for p in module.parameters()}
    shards = [
        _shard(parameter, counted=known not in uncounted) for known, parameter in parameters.items()
    ]
    # of a stage without parameters
    where = torch.device("cpu" if device_mesh is None else device_mesh.device_type)
    device = next((p.device for p in parameters.values()), where)
    total = _over_stages(
        _total_norm(shards, norm_type, foreach, device), held, device_mesh, norm_type, copies
    )
    if everyone is not None:
        _check_equal_gradients(total, held, everyone)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"the {norm_type}-norm of the whole model's gradient is {total.item()}, so gradients"
            " cannot be clipped: look for the parameter with a gradient that is not finite, lower"
            " the learning rate, or pass error_if_nonfinite=False"
        )
    # The same factor as torch.nn.utils.clip_grad_norm_.
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    if max_norm < math.inf:
        multiply(
            [shard.gradient for shard in shards if shard.gradient is not None], factor, foreach
        )
    return total


# The norm.


@dataclass(frozen=True)
class _Shard:
    """This rank's part of a gradient, and the groups over which the parts are different."""

    gradient: Tensor | None
    groups: Groups
    counted: bool


def _shard(parameter: nn.Parameter, counted: bool) -> _Shard:
    gradient = parameter.grad
    if not isinstance(parameter, DTensor):
        return _Shard(gradient, (), counted)
    mesh, placements = parameter.device_mesh, parameter.placements
    groups = tuple(
        mesh.get_group(dim)
        for dim, placement in enumerate(placements)
        if not placement.is_replicate()
    )
    if gradient is None:
        return _Shard(None, groups, counted)
    if not isinstance(gradient, DTensor):
        raise TypeError(
            f"a parameter sharded over {mesh.mesh_dim_names} has a gradient that is not: clip after"
            " the step, when gradients are reduced"
        )
    if gradient.placements != placements:  # a norm on parts of the sequence leaves a sum to be done
        gradient = gradient.redistribute(placements=placements)
        parameter.grad = gradient
    return _Shard(gradient.to_local(), groups, counted)


def _total_norm(
    shards: Sequence[_Shard], norm_type: float, foreach: bool, device: torch.device
) -> Tensor:
    """Return the norm over this rank's stages, all shards of their parameters included.

    Ranks that share a group find the same groups in the same order, also where some have no
    gradient.
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
        # The longest first: what remains of it is then added up with the shorter ones in one
        # collective.
        group = max(norms, key=len)[-1]
        sharded = [groups for groups in norms if groups and groups[-1] == group]
        reduced = _over_group(
            torch.stack([norms.pop(groups) for groups in sharded]), group, norm_type
        )
        for groups, norm in zip(sharded, reduced.unbind(), strict=True):
            rest = groups[:-1]
            norms[rest] = _combine(
                torch.stack([norm, *([norms[rest]] if rest in norms else [])]), norm_type
            )
    return norms.get((), torch.zeros((), dtype=torch.float64, device=device))


def _over_group(norms: Tensor, group: dist.ProcessGroup, norm_type: float) -> Tensor:
    """Combine the norms (n,) of each rank's parts into norms (n,) of the wholes.

    Gathered, not reduced: every rank adds up in the same order, and a maximum does not lose a NaN.
    """
    everyone = [torch.empty_like(norms) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, norms, group=group)
    return torch.stack(
        [_combine(column, norm_type) for column in torch.stack(everyone, dim=1).unbind()]
    )


def _over_stages(
    norm: Tensor, held: "_Held", device_mesh: DeviceMesh | None, norm_type: float, copies: int
) -> Tensor:
    """Return the norm over all stages, and a refusal on every rank if some were left out."""
    pp_mesh = get_pp_mesh(device_mesh)
    n_modules = float(len({id(module) for module in held.modules}))
    everyone = torch.stack([norm, torch.tensor(n_modules, dtype=norm.dtype, device=norm.device)])[
        None
    ]
    if pp_mesh is not None:
        gathered = [torch.empty_like(everyone[0]) for _ in range(pp_mesh.size())]
        dist.all_gather(gathered, everyone[0], group=pp_mesh.get_group())
        everyone = torch.stack(gathered)
    found = int(everyone[:, 1].sum().item())
    if held.n_stages is not None and found != held.n_stages * copies:
        raise ValueError(
            f"clip_grad_norm_ was given {found} of {held.n_stages * copies} stages, so its norm"
            " would not be the whole model's: pass the list of all of this rank's stages on every"
            " rank, and device_mesh=, the mesh of init_distributed"
        )
    # Each copy adds the same power.
    return _combine(everyone[:, 0], norm_type) / copies ** (1 / norm_type)


def _combine(norms: Tensor, norm_type: float) -> Tensor:
    """Return the norm of a vector whose disjoint parts have these norms (n,)."""
    if norms.numel() == 0:
        return norms.new_zeros(())
    return torch.linalg.vector_norm(norms, norm_type)


def _check_equal_gradients(total: Tensor, held: "_Held", everyone: Ranks) -> None:
    """Refuse, on every rank, copies of one weight with different gradients.

    The copies would drift apart without a word.

    Nothing in a foreign model shows whether gradients were averaged over the data-parallel ranks,
    without which ranks find different totals, and summed over the stages that share a weight,
    without which its ends have different norms.
    """
    norms = {
        (number, stage): _total_norm([_shard(end, counted=True)], 2.0, True, end.device).item()
        for number, tie in enumerate(held.ties)
        for stage, end in held.ends(tie)
    }
    told = everyone.gather((total.item(), norms))
    totals = [one for one, _ in told]
    if not _all_close(totals):
        low, high = totals.index(min(totals)), totals.index(max(totals))
        raise ValueError(
            f"rank {low} finds a gradient of norm {totals[low]:.6g}, rank {high} one of"
            f" {totals[high]:.6g}: average gradients over the data-parallel ranks before clipping"
            " (FSDP2 or DDP), and pass every rank's own stages"
        )
    for number, tie in enumerate(held.ties):
        ends = {
            stage: norm
            for _, ends in told
            for (known, stage), norm in ends.items()
            if known == number
        }
        if not _all_close(list(ends.values())):
            spelled = ", ".join(
                f"{norm:.6g} on stage {stage}" for stage, norm in sorted(ends.items())
            )
            raise ValueError(
                f"the gradients of the tied weight {dict(tie)} have norms {spelled}: sum them over"
                " its stages before clipping, as course_pp.runtime.Pipeline(tied=...) does"
            )


def _all_close(norms: Sequence[float]) -> bool:
    """Return whether all norms are equal but for rounding.

    A norm that is not finite differs from every finite one.
    """
    finite = [norm for norm in norms if math.isfinite(norm)]
    return not finite or (
        len(finite) == len(norms) and max(norms) - min(norms) <= _SAME * max(norms)
    )


# Which stages each rank passed, and which of their parameters are one weight in several places.


@dataclass(frozen=True)
class _Held:
    """The modules this rank passed, and the index of each one's stage.

    An index is None, and so is the number of stages, if no module can tell it. ``ties_are_known``
    means that the caller or a stage has said which weights are tied.
    """

    modules: tuple[nn.Module, ...]
    stages: tuple[int | None, ...]
    n_stages: int | None
    ties: tuple[Tie, ...]
    ties_are_known: bool

    @property
    def are_ours(self) -> bool:
        """Return whether all modules are this package's.

        These know how many stages there are and which weights are tied, so ranks need not compare.
        """
        return not self.ties and all(isinstance(module, Transformer) for module in self.modules)

    def ends(self, tie: Tie) -> list[tuple[int, nn.Parameter]]:
        """Return this rank's places of a tied weight: stage and parameter."""
        return [
            (stage, module.get_parameter(tie[stage]))
            for stage, module in zip(self.stages, self.modules, strict=True)
            if stage is not None and stage in tie
        ]

    def uncounted(self) -> set[int]:
        """Return the ids of the parameters that repeat a weight another stage counts."""
        heads = [m for m in self.modules if isinstance(m, Transformer) and m.head is not None]
        ends = [
            (stage == min(tie), parameter)
            for tie in self.ties
            for stage, parameter in self.ends(tie)
        ]
        repeats = [m.tied_weight for m in heads] + [p for first, p in ends if not first]
        return {id(p) for p in repeats if p is not None} - {id(p) for first, p in ends if first}


def _held(
    model_or_stages: Stage | Iterable[Stage] | Mapping[int, Stage],
    tied: Sequence[Tie] | None,
    device_mesh: DeviceMesh | None,
) -> _Held:
    """Read the arguments of :func:`clip_grad_norm_`."""
    numbers: list[int | None]
    if isinstance(model_or_stages, Mapping):
        numbers, given = list(model_or_stages), list(model_or_stages.values())
    else:
        alone = isinstance(model_or_stages, Stage) or not isinstance(model_or_stages, Iterable)
        given = [model_or_stages] if alone else list(model_or_stages)  # type: ignore[arg-type]
        numbers = [None] * len(given)
    modules = [part.submod if isinstance(part, PipelineStage) else part for part in given]
    strangers = [type(module).__name__ for module in modules if not isinstance(module, nn.Module)]
    if strangers or not modules:
        raise TypeError(
            f"model_or_stages holds {strangers or 'nothing'}: pass a model, a stage, or the list of"
            " this rank's stages"
        )
    if tied is None and not all(isinstance(module, Transformer) for module in modules):
        tied = next(
            (part.ties for part in (*given, *modules) if isinstance(part, ModelStage | SplitStage)),
            None,
        )
    if not isinstance(tied, list | tuple | None) or any(
        not isinstance(t, Mapping) or len(t) < 2 for t in tied or ()
    ):
        raise TypeError(
            f"tied={shown(tied)} must list for each tied weight its name by stage, at least two of"
            ' them, such as [{0: "embed.weight", 3: "head.weight"}]'
        )
    known = [_index_and_number(part) for part in given]
    stages = [
        index if number is None else number
        for number, (index, _) in zip(numbers, known, strict=True)
    ]
    if stages == [None]:  # one stage a rank is stage r on rank r
        stages = [get_pp_rank(device_mesh)]
    n_stages = next((n for _, n in known if n is not None), None)
    is_whole = len(modules) == 1 and get_pp_size(device_mesh) == 1
    return _Held(
        tuple(modules), tuple(stages), n_stages, tuple(tied or ()), tied is not None or is_whole
    )


def _index_and_number(part: Stage) -> tuple[int | None, int | None]:
    """Return the index of a stage and the number of stages, as far as ``part`` knows them."""
    if isinstance(part, PipelineStage):
        return int(part.stage_index), int(part.num_stages)
    return (
        (part.stage_id, part.num_stages)
        if isinstance(part, PipelineStageModule | SplitStage)
        else (None, None)
    )


def _refuse_flattened(held: _Held) -> None:
    # Nothing in a piece of FSDP1 says which ranks hold the others, and pieces may have norms that
    # look like copies.
    for module in held.modules:
        name = next(
            (name for name, parameter in module.named_parameters() if is_flattened(parameter)), None
        )
        if name is not None:
            raise ValueError(
                f"{name!r} of {type(module).__name__} is in pieces of FullyShardedDataParallel"
                " (FSDP1): call that module's own clip_grad_norm_, or shard with apply_fsdp2"
            )


@dataclass(frozen=True)
class _Passed:
    """The stages that one rank passed, as the other ranks get to know them.

    Attributes:
        column: the rank's place in the mesh without its place in the pipeline; the ranks of one
            column make up one pipeline.
        embeddings: the shapes of its embeddings, if nobody has said which weights are tied.
    """

    column: tuple[int, ...]
    stages: tuple[int | None, ...]
    n_stages: int | None
    ties: tuple[dict[int, str], ...]
    embeddings: tuple[tuple[int, ...], ...]


def _agree(held: _Held, device_mesh: DeviceMesh | None, copies: int) -> Ranks:
    """Refuse, on every rank, stages that are not parts of one foreign model.

    Return the ranks that compared their stages.
    """
    everyone = _ranks_of(held, device_mesh)

    def look() -> _Passed:
        if problem := _problem_here(held):
            raise ValueError(f"rank {everyone.rank}: {problem}")
        column: tuple[int, ...] = (Ranks().rank,)  # without a mesh each rank has the whole model
        if device_mesh is not None:
            names = device_mesh.mesh_dim_names or ()
            place = zip(names, device_mesh.get_coordinate() or (), strict=False)
            column = tuple(coordinate for name, coordinate in place if name != "pp")
        embeddings = []
        for module in held.modules if not held.ties_are_known else ():
            for part in module.modules():
                if isinstance(part, nn.Embedding):
                    embeddings.append(tuple(part.weight.shape))
        ties = tuple(dict(tie) for tie in held.ties)
        return _Passed(column, held.stages, held.n_stages, ties, tuple(embeddings))

    passed = everyone.each(look)
    problem = difference([{"tied": list(theirs.ties)} for theirs in passed])
    for column in {theirs.column for theirs in passed}:
        problem = problem or _problem_of_column(passed, column, copies)
    problem = problem or _problem_of_forgotten_ties(held, passed, device_mesh, everyone)
    if problem is not None:
        raise ValueError(problem)
    return everyone


def _ranks_of(held: _Held, device_mesh: DeviceMesh | None) -> Ranks:
    """Return the ranks that hold the model between them."""
    n_ranks = dist.get_world_size() if dist.is_initialized() else 1
    if device_mesh is not None and device_mesh.size() == n_ranks:
        return Ranks()
    if device_mesh is not None:
        pp_mesh = get_pp_mesh(device_mesh)
        return Ranks(alone=True) if pp_mesh is None else Ranks(pp_mesh.get_group())
    meshes = {
        p.device_mesh.size()
        for module in held.modules
        for p in module.parameters()
        if isinstance(p, DTensor)
    }
    if n_ranks == 1 or n_ranks in meshes:
        return Ranks()
    names = ", ".join(type(module).__name__ for module in held.modules)
    raise ValueError(
        f"device_mesh is None in a process group of {n_ranks} ranks, and {names} does not say"
        " whether it is the whole model or a part of it: pass device_mesh=, the mesh of"
        " init_distributed, whose pp dimension tells"
    )


def _problem_here(held: _Held) -> str | None:
    for stage in held.stages:
        if stage is not None and (type(stage) is not int or stage < 0):
            return f"stage {stage!r} must be a whole number of at least 0: pass {{stage: module}}"
    if held.ties and None in held.stages:
        return (
            f"tied={list(held.ties)}, but it is unknown which stages the modules are: pass {{stage:"
            " module, …}"
        )
    for tie in held.ties:
        for stage, module in zip(held.stages, held.modules, strict=True):
            names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
            if stage is not None and stage in tie and tie[stage] not in names:
                return (
                    f"tied={dict(tie)}, but stage {stage} has no parameter {tie[stage]!r}: it has"
                    f" {', '.join(names)}"
                )
    return None


def _problem_of_column(
    passed: Sequence[_Passed], column: tuple[int, ...], copies: int
) -> str | None:
    ranks = [theirs for theirs in passed if theirs.column == column]
    stages = [stage for theirs in ranks for stage in theirs.stages]
    known = [stage for stage in stages if stage is not None]
    n_stages = next(
        (theirs.n_stages for theirs in ranks if theirs.n_stages is not None), len(stages) // copies
    )
    twice = [stage for stage, times in Counter(known).items() if times > copies]
    if twice:
        return (
            f"stage {twice[0]} was passed twice: pass each rank's own stages, as {{stage:"
            " module, …}"
        )
    if len(stages) != n_stages * copies or any(not 0 <= stage < n_stages for stage in known):
        return (
            f"clip_grad_norm_ was given stages {sorted(known)} of {n_stages}, so its norm would not"
            " be the whole model's: pass the list of all of this rank's stages on every rank"
        )
    lost = [stage for tie in passed[0].ties for stage in tie if stage not in known]
    return f"tied names stage {lost[0]!r}, but the stages are 0 to {n_stages - 1}" if lost else None


def _problem_of_forgotten_ties(
    held: _Held, passed: Sequence[_Passed], device_mesh: DeviceMesh | None, everyone: Ranks
) -> str | None:
    """Return a weight that would count twice because nobody has said it is tied, or None.

    This happens in every step, so only weights of an embedding's shape are compared. Two embeddings
    of one shape are judged by the layers around them, so all are looked at.
    """
    found = Counter(
        shape
        for theirs in passed
        if theirs.column == passed[0].column
        for shape in theirs.embeddings
    )
    if not found:
        return None
    shapes = None if max(found.values()) > 1 else found.keys()
    pp_rank, pp_size = get_pp_rank(device_mesh), get_pp_size(device_mesh)
    # Modules whose stage nobody has said are numbered as if stages went round the ranks.
    numbers = [
        pp_rank + i * pp_size if stage is None else stage for i, stage in enumerate(held.stages)
    ]
    modules = dict(zip(numbers, held.modules, strict=True))
    everyones = everyone.each(lambda: looks_of(modules, shapes))
    looks: dict[int, dict[str, Look]] = {}
    for theirs, found_there in zip(passed, everyones, strict=True):
        if theirs.column == passed[0].column:
            looks |= found_there
    return problem_of_forgotten_ties(looks)
