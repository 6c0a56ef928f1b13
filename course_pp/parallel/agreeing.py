"""Before the first step the ranks of a pipeline check that their stages make up one pipeline."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from course_pp.collective import Ranks
from course_pp.model import PipelineStageModule
from course_pp.model.stages import Tie
from course_pp.parallel._torch import carries_integers
from course_pp.parallel.boundary import Boundary, rows_of
from course_pp.parallel.model_stage import ModelStage, find_outputs
from course_pp.parallel.schedules import check_microbatches, get_stage_indices, name_of, splits_backward
from course_pp.parallel.split import SplitStage
from course_pp.parallel.tied import SharedName, ties_of_stages
from course_pp.schedule import Schedule
from course_pp.tied import looks_of, problem_of_forgotten_ties, problem_of_left_out_copies

__all__ = ["agree", "everyone_of"]


def everyone_of(stage: ModelStage) -> dist.ProcessGroup | None:
    """Return all ranks of the mesh: a rank that refuses alone leaves its pipeline waiting, and its replicas too."""
    return stage.group if stage.device_mesh is None else dist.group.WORLD


def agree(
    stages: Sequence[ModelStage],
    n_microbatches: int,
    schedule: str | Schedule,
    tied: Iterable[SharedName] | None,
    limit_s: float | None,
) -> int:
    """Agree on what crosses every boundary and which weights are tied, and tell the stages; a collective.

    Returns:
        The rows of a microbatch.

    Raises:
        ValueError: on every rank, for stages that are not placed as ``schedule`` needs, do not fit one another, or were
            built for different pipelines.
        RankMissing: if a rank has ended or does not come.
    """
    everyone = Ranks(everyone_of(stages[0]), limit_s=limit_s)
    pipeline = Ranks(stages[0].group, limit_s=limit_s)
    everyone.refuse(_problem_of_placement(stages, n_microbatches, schedule) or _problem_of_sharding(stages, schedule))
    ours = [stage.submod for stage in stages if isinstance(stage.submod, PipelineStageModule)]
    everyone.require_equal(
        {
            "schedule": name_of(schedule),
            "n_microbatches": n_microbatches,
            **_facts_of_transformer(stages[0]),
            "config": ours[0].config if ours else None,
            "tied": None if tied is None else [dict(t) if isinstance(t, Mapping) else tuple(t) for t in tied],
        }
    )
    everyone.refuse(_problem_of_layers(stages, pipeline))
    problem = _settle_boundaries(stages, pipeline)
    everyone.refuse(problem)
    rows = _rows(stages, pipeline)
    everyone.refuse(rows if isinstance(rows, str) else None)
    ties = everyone.collectively(lambda: _ties(stages, tied, pipeline))
    for stage in stages:
        stage.ties = ties
    assert isinstance(rows, int)
    return rows


def _problem_of_placement(stages: Sequence[ModelStage], n_microbatches: int, schedule: str | Schedule) -> str | None:
    """Return why this rank's stages cannot run under ``schedule``, as far as the rank can tell alone."""
    pp_rank, pp_size, n_stages = stages[0].group_rank, stages[0].group_size, stages[0].num_stages
    indices = [s.stage_index for s in stages]
    try:
        expected = get_stage_indices(schedule, pp_rank, pp_size, n_stages // pp_size)
        check_microbatches(schedule, n_microbatches, n_stages, pp_size)
    except ValueError as error:
        return str(error)
    if indices != expected or n_stages != len(indices) * pp_size:
        return (
            f"rank {pp_rank} holds stages {indices} of {n_stages}, but schedule {schedule!r} on {pp_size} ranks places "
            f"stages {expected} there: build those (get_stage_indices lists them)"
        )
    if len({isinstance(s.submod, PipelineStageModule) for s in stages}) > 1:
        return f"rank {pp_rank} holds stages of different models: {', '.join(type(s.submod).__name__ for s in stages)}"
    facts = [_facts_of_transformer(stage) for stage in stages]
    if any(fact != facts[0] for fact in facts):
        return f"rank {pp_rank} built its stages {indices} for different batches or dtypes: build them alike"
    return None


def _problem_of_sharding(stages: Sequence[ModelStage], schedule: str | Schedule) -> str | None:
    """Return why FSDP2 would miss the second half of a split backward; None if it would not.

    torch tells the stage itself to reduce after the last microbatch. If only parts of a stage are sharded, they reduce
    at the end of every backward, and gradients that come later would be silently lost.
    """
    for stage in stages if splits_backward(schedule) != "none" else ():
        inside = [name for name, part in stage.submod.named_modules() if isinstance(part, FSDPModule)]
        if inside and "" not in inside:
            return (
                f"schedule {name_of(schedule)!r} splits backward in two, and FSDP2 shards {inside[0]!r} of stage "
                f"{stage.stage_index}, but not the stage: call fully_shard on the stage too, after its parts, or "
                "apply_fsdp2(stage, mesh)"
            )
    return None


def _facts_of_transformer(stage: ModelStage) -> dict[str, object]:
    """Return what all stages of this package's model are built for."""
    if not isinstance(stage.submod, PipelineStageModule) or stage.takes is None or stage.returns is None:
        return {}
    return {"(batch_size, seq_len)": stage.takes.metas[0].shape[:2], "param_dtype": stage.returns.metas[0].dtype}


def _problem_of_layers(stages: Sequence[ModelStage], pipeline: Ranks) -> str | None:
    """Return what keeps the stages of this package's model from holding each layer once."""
    ours = [(s.stage_index, s.submod) for s in stages if isinstance(s.submod, PipelineStageModule)]
    ranks = pipeline.gather([(index, module.layer_range) for index, module in ours])
    if not ours:
        return None
    end = 0
    for stage, (start, stop) in sorted(part for rank in ranks for part in rank):
        if start != end:
            return (
                f"stage {stage} begins with layer {start}, but the stages before it end with layer {end - 1}: "
                "give every rank the same layer_ranges"
            )
        end = stop
    n_layers = ours[0][1].config.n_layers
    if end != n_layers:
        return f"the stages hold {end} of {n_layers} layers: give every rank the same layer_ranges"
    return None


def _settle_boundaries(stages: Sequence[ModelStage], pipeline: Ranks) -> str | None:
    """Find what crosses every boundary, and tell torch; return the problem, the same on all ranks, or None.

    What a stage returns can be found once its inputs are known. So each round settles at least one more stage, and the
    first one settles all if every stage declares what it returns.
    """
    n_stages = stages[0].num_stages
    taken: dict[int, Boundary] = {}
    given: dict[int, Boundary] = {}
    while len(given) < n_stages:
        found: dict[int, tuple[Boundary | None, Boundary | None]] = {}
        problem = None
        for stage in (s for s in stages if s.stage_index not in given):
            before = given.get(stage.stage_index - 1) or _returned(found, stage.stage_index - 1)
            stage.takes = stage.takes or before
            if stage.is_first and stage.takes is None:
                problem = (
                    "nothing says what the first stage takes: pass build_pipeline_stage(..., inputs=...), the "
                    "arguments of one microbatch, or batch_size= and seq_len= for token ids"
                )
            if stage.takes is not None and stage.returns is None:
                try:
                    stage.returns = find_outputs(stage)
                except ValueError as error:
                    problem = problem or str(error)
            found[stage.stage_index] = (stage.takes, stage.returns)
        told = pipeline.gather((found, problem))
        problem = next((theirs for _, theirs in told if theirs is not None), None)
        if problem is not None:
            return problem
        for theirs, _ in told:
            taken |= {index: inputs for index, (inputs, _) in theirs.items() if inputs is not None}
            given |= {index: outputs for index, (_, outputs) in theirs.items() if outputs is not None}
    problem = _problem_between(taken, given)
    if problem is None:
        for stage in stages:
            stage.settle(taken[stage.stage_index], given[stage.stage_index])
    return problem


def _returned(found: dict[int, tuple[Boundary | None, Boundary | None]], stage: int) -> Boundary | None:
    return found.get(stage, (None, None))[1]


def _problem_between(taken: dict[int, Boundary], given: dict[int, Boundary]) -> str | None:
    """Return why a stage cannot take what the stage before returns; None if all can."""
    for before, after in pairwise(sorted(given)):
        if taken.setdefault(after, given[before]) != given[before]:  # this package's model built for two configurations
            return f"stage {before} returns {given[before]}, but stage {after} takes {taken[after]}: build them alike"
        if not given[before].metas:
            return f"stage {before} returns no tensor, so nothing reaches stage {after}: return what it needs"
        whole = [meta for meta in given[before].metas if not meta.dtype.is_floating_point]
        if whole and not carries_integers():
            return (
                f"stage {before} returns {whole[0]}, and this release of torch sends only tensors that carry gradients "
                "between stages: give it to every stage as a keyword argument of step, or take torch 2.13"
            )
    return None


def _rows(stages: Sequence[ModelStage], pipeline: Ranks) -> int | str:
    """Return the rows of a microbatch, or the problem if the first stage's inputs do not tell."""
    first = stages[0] if stages[0].is_first else None
    told = pipeline.gather(None if first is None or first.takes is None else (first.takes, str(first.takes)))
    inputs, spelled = next(one for one in told if one is not None)
    rows = rows_of(inputs)
    return f"inputs={spelled}: all tensors must have the microbatch as their first dimension" if rows is None else rows


def _ties(stages: Sequence[ModelStage], tied: Iterable[SharedName] | None, pipeline: Ranks) -> tuple[Tie, ...]:
    """Return the weights that several stages hold: this package's model knows its own, others are as declared."""
    modules = {stage.stage_index: stage.submod for stage in stages}
    own = next((m for m in modules.values() if isinstance(m, PipelineStageModule | SplitStage)), None)
    known = own.ties if tied is None and own is not None else tied
    looks = pipeline.collectively(lambda: looks_of(modules if known is None or tied else {}))
    mine = {index: (_names(module), looks.get(index, {})) for index, module in modules.items()}
    everyone = dict(sorted(stage for rank in pipeline.gather(mine) for stage in rank.items()))
    names = {index: held for index, (held, _) in everyone.items()}
    ties = ties_of_stages(known or (), names)
    found = {index: look for index, (_, look) in everyone.items()}
    if problem := problem_of_forgotten_ties(found) if known is None else problem_of_left_out_copies(found, ties):
        raise ValueError(problem)
    return ties


def _names(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters(remove_duplicate=False)]
