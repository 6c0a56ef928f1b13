"""Before the first message: ranks check their options, and agree or refuse together."""

import hashlib
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import nn

from course_pp.base.arguments import check_arguments, refuse_bad_timeout
from course_pp.base.ranks import Ranks, difference
from course_pp.runtime.clocks import host_identity
from course_pp.runtime.emulation import EmulatedCluster
from course_pp.runtime.gradients import ShardedStages
from course_pp.runtime.memory import Meter
from course_pp.runtime.recorder import Recorder
from course_pp.runtime.stage import device_of
from course_pp.runtime.versions import Optimizers, problem_of_hooks, settings_of, trained_parameters
from course_pp.schedule import Ledger, Schedule, Versions, check, ledger
from course_pp.schedule.edges import Declared, declared_by, edges_from
from course_pp.step.hooks import is_dtensor, problem_of_wrappers
from course_pp.step.loss import LossFn, TokenLoss, counted
from course_pp.step.scaler import MeshGradScaler
from course_pp.step.ties import (
    Look,
    Weight,
    WeightPlace,
    looks_of,
    problem_of_broken_ties,
    problem_of_forgotten_ties,
    problem_of_left_out_copies,
    problem_of_two_ties,
    ties_of_cut,
)

Stages = Mapping[int, nn.Module | None] | nn.Module | None
Modules = Mapping[int, nn.Module | None]
"""This rank's, by stage; None is an empty stage."""


@dataclass(frozen=True)
class PipelineOptions:
    """The arguments of a :class:`~course_pp.runtime.Pipeline`, which describes each of them."""

    schedule: Schedule
    stages: Stages
    loss_fn: LossFn | TokenLoss | None = None
    group: dist.ProcessGroup | None = None
    device: torch.device | str | None = None
    recompute: bool = False
    tied: Sequence[Mapping[int, str]] | None = None
    recorder: Recorder | None = None
    cluster: EmulatedCluster | None = None
    transport: str | None = None
    timeout_s: float = 60.0
    optimizers: Optimizers | None = None
    versions: Versions | None = None
    scaler: MeshGradScaler | None = None

    @property
    def trains(self) -> bool:
        """Whether the schedule has backwards."""
        return any(part.kind != "F" for part in self.schedule.parts)

    @property
    def meter(self) -> Meter | None:
        """The meter of the bytes kept for backward, if a recorder has one."""
        return None if self.recorder is None else self.recorder.meter

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=float(self.timeout_s))


@dataclass(frozen=True)
class Agreement:
    """PipelineOptions that this rank has checked and all ranks have agreed on.

    Attributes:
        rank: this rank's number in the pipeline's group.
        modules: this rank's modules by stage.
        device: device on which this rank computes.
        schedule: the options' schedule, with the edges between the stages.
        declared: the values that this rank's stages read and write beyond their neighbours'.
        weights: all weights that lie in several places, on any rank.
        planned: the versions that the actions use, if stages update their own weights.
        data_groups: the groups over whose ranks FSDP2 averages the pipeline's gradients, also on a
            rank of which FSDP2 shards nothing.
        series: a number below 2**15 that keeps this pipeline's messages apart from others'.
    """

    options: PipelineOptions
    rank: int
    modules: Modules
    device: torch.device
    schedule: Schedule
    declared: Mapping[int, Declared]
    weights: tuple[Weight, ...]
    planned: Ledger | None
    data_groups: Sequence[dist.ProcessGroup]
    series: int


class Fact(NamedTuple):
    """The properties that all places of a parameter must share.

    Attributes:
        kind: shape, dtype, and whether it is trained.
        value: a fingerprint of the values, if the stage has replicas, which must start equal.
    """

    kind: str
    value: str = ""

    def __str__(self) -> str:
        if not self.value:
            return self.kind
        return f"{self.kind} of value {self.value}"


@dataclass(frozen=True)
class _RankStages:
    """The stages of one rank, as the other ranks get to know them.

    Attributes:
        facts: options that must be the same on every rank, by name.
        declared: the values that each stage reads and writes beyond its neighbours'.
        parameters: for each stage, the properties that its copies and tied weights must share.
        looks: for each stage, the properties that reveal tied weights nobody named.
        of_cut: the ties that ``auto_split`` found, if it made the stages.
        n_data: the number of ranks that FSDP2 averages gradients over.
        series: the proposed number of this pipeline's messages; rank 0's is taken.
    """

    facts: Mapping[str, Any]
    declared: Mapping[int, Declared]
    parameters: Mapping[int, Mapping[str, Fact]]
    looks: Mapping[int, Mapping[str, Look]]
    of_cut: Sequence[Mapping[int, str]] | None
    n_data: int
    series: int


def agree(options: PipelineOptions, feeds_tokens_back: bool = False) -> Agreement:
    """Check this rank's options and agree on them with all ranks, or refuse on all ranks.

    Args:
        feeds_tokens_back: whether the caller carries out a schedule's feedback, as ``generate``
            does and a pipeline does not.
    """
    ranks = ranks_of(options.group)

    def look() -> tuple[Modules, torch.device, _RankStages]:
        try:
            modules = _checked_modules(options, ranks, feeds_tokens_back)
            device = device_of(modules.values())
            if options.device is not None:
                device = torch.device(options.device)
            return modules, device, _look_into(modules, options, device)
        except Exception as error:
            # The other ranks read the sentence too, so it says whose stages it is about.
            raise ValueError(f"rank {ranks.rank}: {ranks.sentence(error)}") from error

    modules, device, mine = ranks.collectively(look)
    everyone = ranks.gather(mine)

    declared, parameters = _compared(everyone, options.tied)
    schedule = options.schedule
    found = edges_from(declared)
    if schedule.edges and {*schedule.edges} != {*found}:
        raise ValueError(
            f"{schedule!r} has edges {schedule.edges}, but the stages' reads and writes make"
            f" {found}: leave out the schedule's, or give the stages these"
        )
    schedule = schedule if schedule.edges else schedule.with_edges(*found)
    if options.cluster is not None and (problem := options.cluster.problem_with(schedule)):
        raise ValueError(problem)

    ties = options.tied or ()
    # Stages that update by themselves exchange gradients at each update.
    planned = None if options.versions is None else ledger(schedule, options.versions)
    weights = _shared_weights(schedule, parameters, ties) if planned is None else ()
    if problem := problem_of_left_out_copies(_looks(everyone), ties, _of_cut(everyone)):
        raise ValueError(problem)
    return Agreement(
        options=options,
        rank=ranks.rank,
        modules=modules,
        device=device,
        schedule=schedule,
        declared=mine.declared,
        weights=weights,
        planned=planned,
        data_groups=_data_groups(ranks, modules, [theirs.n_data for theirs in everyone]),
        series=everyone[0].series,
    )


def _checked_modules(options: PipelineOptions, ranks: Ranks, feeds_tokens_back: bool) -> Modules:
    """Return this rank's modules by stage; raise an exception for options that it cannot run."""
    # The message names Pipeline, the class that the user called.
    check_arguments(PipelineOptions, vars(options), "Pipeline")
    refuse_bad_timeout("Pipeline", options.timeout_s)
    if options.loss_fn is not None:
        counted(options.loss_fn)
    here = [stage for stage, on in enumerate(options.schedule.placement) if ranks.rank in on]
    modules = _by_stage(options.stages, here)
    problem = (
        _problem_of_schedule(options, ranks.size, feeds_tokens_back)
        or _problem_of_stages(modules, here, options)
        or _problem_of_versions(modules, options)
    )
    if problem is not None:
        raise ValueError(problem)
    return modules


def _data_groups(
    ranks: Ranks, modules: Modules, sizes: Sequence[int]
) -> Sequence[dist.ProcessGroup]:
    """Return the groups over whose ranks FSDP2 averages the gradients of this pipeline.

    A rank that knows fewer data ranks than others, for example because FSDP2 shards none of its
    weights, lacks a group that it needs if it computes the loss. One rank that knows all data ranks
    asks over its own groups which ranks stand in the same place in the other pipelines. These
    ranks form a new group.

    Args:
        sizes: for each rank of the pipeline, the number of data ranks that it knows.
    """
    groups = ShardedStages(modules.values()).data_groups
    knows = sizes.index(max(sizes))
    lacking = [rank for rank, size in enumerate(sizes) if size < sizes[knows]]
    if not lacking:
        return groups

    group = ranks.group or dist.group.WORLD
    assert group is not None  # FSDP2 has one
    mates = {rank: [dist.get_global_rank(group, rank)] for rank in lacking}
    for data_group in groups if ranks.rank == knows else ():
        found = Ranks(data_group, limit_s=ranks.limit_s).gather(mates)
        for rank in lacking:
            mates[rank] = [mate for theirs in found for mate in theirs[rank]]
    mates = ranks.gather(mates)[knows]
    made = _group_of(mates, ranks)
    return [made] if ranks.rank in mates else groups


# Groups stay until the process group is destroyed, so pipelines share them.
_MADE: WeakValueDictionary[Any, dist.ProcessGroup] = WeakValueDictionary()


def _group_of(mates: Mapping[int, list[int]], ranks: Ranks) -> dist.ProcessGroup:
    """Return the group of this rank's mates, made once for all pipelines with the same mates.

    torch names a group after the number of groups so far. To keep this number equal on all ranks, a
    rank without mates makes a group too, of itself.
    """
    mine = mates.get(ranks.rank, [dist.get_rank()])
    key = dist.group.WORLD, ranks.group, ranks.rank, str(mates)
    if key not in _MADE:
        limit = None if ranks.limit_s is None else timedelta(seconds=ranks.limit_s)
        made: Any = dist.new_group(mine, timeout=limit, use_local_synchronization=True)
        _MADE[key] = made
    return _MADE[key]


def ranks_of(group: dist.ProcessGroup | None) -> Ranks:
    """Return the ranks of the pipeline; raise ValueError on any other rank."""
    check_arguments(PipelineOptions, {"group": group}, "Pipeline")
    # One rank may take minutes longer than another to build its stages.
    ranks = Ranks(group, limit_s=300.0)
    if ranks.rank < 0:
        raise ValueError(
            f"rank {dist.get_rank()} is not in the pipeline's group: call it on the group's ranks"
            " only"
        )
    return ranks


def _by_stage(stages: Stages, here: Sequence[int]) -> Modules:
    """Return the modules by stage, in order; a module alone belongs to the only stage in ``here``.

    The key -1 stands for a module alone if it is unclear to which stage it belongs.
    """
    if isinstance(stages, Mapping):
        return dict(sorted(stages.items()))
    if len(here) == 1:
        return {here[0]: stages}
    return {} if stages is None else {-1: stages}


def _problem_of_schedule(
    options: PipelineOptions, n_ranks: int, feeds_tokens_back: bool
) -> str | None:
    schedule = options.schedule
    if schedule.feedback and not feeds_tokens_back:
        return (
            f"{schedule!r} feeds tokens back to its first stage, which a Pipeline does not: call"
            " generate"
        )
    if schedule.n_ranks != n_ranks:
        return (
            f"{schedule!r} on a group of {n_ranks} ranks: build it with n_ranks={n_ranks}, or start"
            f" {schedule.n_ranks}"
        )
    if problems := check(schedule):
        more = f" (and {len(problems) - 1} more problems)" if len(problems) > 1 else ""
        return f"{schedule!r} cannot run: {problems[0]}{more}"
    return None


def _problem_of_stages(
    modules: Modules, here: Sequence[int], options: PipelineOptions
) -> str | None:
    if list(modules) != list(here):
        given = f"stages {list(modules)}"
        if list(modules) == [-1]:
            given = f"one {type(modules[-1]).__name__}"
        return (
            f"given {given}, but the schedule places stages {list(here)} here: pass {{stage:"
            " module} for each of them"
        )
    home: dict[nn.Parameter, int] = {}
    for stage, module in modules.items():
        if module is None:
            continue
        if problem := problem_of_wrappers(module, f"stage {stage}"):
            return problem
        for name, parameter in module.named_parameters():
            if not is_dtensor(parameter):
                continue
            # Its gradient is summed once, over its own mesh, and must not be summed again here.
            what = f"{name!r} of stage {stage} is a DTensor (fully_shard, parallelize_module)"
            if len(options.schedule.placement[stage]) > 1:
                return (
                    f"{what}, and the stage is replicated: replicate it with fully_shard on a 2-D"
                    " mesh instead"
                )
            if any(tie.get(stage) == name for tie in options.tied or ()):
                return (
                    f"{what} and tied: leave it whole, or use course_pp.parallel, which ties"
                    " sharded weights"
                )
            if home.setdefault(parameter, stage) != stage:
                return (
                    f"{what} and is in stage {home[parameter]} too: shard each stage's own"
                    " parameters"
                )
    return None


def _problem_of_versions(modules: Modules, options: PipelineOptions) -> str | None:
    schedule = options.schedule
    optimizers, versions = options.optimizers, options.versions
    if not any(part.kind == "U" for part in schedule.parts):
        if versions is None and optimizers is None:
            return None
        return (
            f"versions={versions!r} with {schedule!r}, which flushes: leave versions and optimizers"
            " out and step your optimizer between steps, or build('pipedream', …)"
        )
    if versions is None or optimizers is None:
        return (
            f"{schedule!r} updates weights within the step (U): pass optimizers={{stage:"
            " optimizer} and versions='stash' (or 'vertical', '2bw', 'none'), or run a"
            " synchronous schedule"
        )
    ledger(schedule, versions)  # raises where it has not the versions it needs
    if options.scaler is not None and options.scaler.is_enabled():
        return (
            f"scaler with versions={versions!r}: no stage sees that another's gradient overflows;"
            " leave it out"
        )
    if options.tied:
        ties = [dict(tie) for tie in options.tied]
        return (
            f"tied={ties} with versions={versions!r}: each end would update by itself; untie them"
        )
    if options.recompute and versions == "none":
        return (
            "recompute=True with versions='none': the forward would be computed again with other"
            " weights"
        )
    trained = [stage for stage, module in modules.items() if trained_parameters(module)]
    if sorted(optimizers) != trained:
        return (
            f"optimizers for stages {sorted(optimizers)}, but stages {trained} are trained here:"
            " give one for each"
        )
    for stage in trained:
        if problem := _problem_of_optimizer(stage, optimizers[stage], modules):
            return problem
    return None


def _problem_of_optimizer(
    stage: int, optimizer: torch.optim.Optimizer, modules: Modules
) -> str | None:
    module = modules[stage]
    assert module is not None  # it is trained
    own = trained_parameters(module)
    for name, parameter in own.items():
        if is_dtensor(parameter):
            return (
                f"{name!r} of stage {stage} is a DTensor, of which no versions can be kept: leave"
                " it whole"
            )
    if problem := problem_of_hooks(stage, own):
        return problem
    elsewhere: dict[nn.Parameter, int] = {}
    for other, another in modules.items():
        if another is not None and other != stage:
            elsewhere |= dict.fromkeys(another.parameters(), other)
    for name, parameter in own.items():
        if parameter in elsewhere:
            other = elsewhere[parameter]
            return (
                f"{name!r} of stage {stage} is in stage {other} too: each would update by itself;"
                " untie them"
            )
    held: set[torch.Tensor] = set()
    for group in optimizer.param_groups:
        held.update(group["params"])
    for name, parameter in own.items():
        if parameter not in held:
            return (
                f"parameter {name!r} of stage {stage} is in no optimizer: give optimizers[{stage}]"
                " all that it trains"
            )
    if held - {*module.parameters()}:
        return (
            f"optimizers[{stage}] holds a parameter that is not stage {stage}'s: give each stage"
            " its own"
        )
    return None


def _facts(options: PipelineOptions, device: torch.device) -> dict[str, Any]:
    """Return the options that must be the same on every rank, by name."""
    return {
        "schedule": f"{options.schedule!r} {options.schedule.fingerprint}",
        "loss_fn": "None" if options.loss_fn is None else "a loss",
        "recompute": options.recompute,
        "tied": None if options.tied is None else [dict(tie) for tie in options.tied],
        "versions": options.versions,
        "scaler": None if options.scaler is None else options.scaler.state_dict(),
        "transport": options.transport,
        "device": device.type,
        "cluster": repr(options.cluster),
        # An emulated rank trusts the others' clocks.
        "host": "" if options.cluster is None else host_identity(),
    }


def _look_into(modules: Modules, options: PipelineOptions, device: torch.device) -> _RankStages:
    """Return what the other ranks get to know of the modules.

    Raises ValueError if one weight of a stage became two.
    """
    parameters: dict[int, Mapping[str, Fact]] = {}
    for stage, module in modules.items():
        is_copied = len(options.schedule.placement[stage]) > 1
        facts = {}
        for name, p in [] if module is None else module.named_parameters():
            kind = f"{tuple(p.shape)} {p.dtype} {'trained' if p.requires_grad else 'frozen'}"
            # Values are read only where they must be equal, as that takes time on a GPU.
            facts[name] = Fact(kind, _fingerprint(p) if is_copied and not p.is_meta else "")
        if is_copied and options.optimizers and stage in options.optimizers:
            facts["the optimizer"] = Fact(settings_of(options.optimizers[stage], module))
        parameters[stage] = facts

    if problem := problem_of_two_ties(modules, options.tied or ()):
        raise ValueError(problem)
    # A schedule without backwards changes no weight, so copies cannot drift apart.
    if options.trains:
        for stage, module in modules.items():
            if module is not None and (problem := problem_of_broken_ties(stage, module)):
                raise ValueError(problem)
    nothing_is_tied = options.tied is not None and not options.tied
    return _RankStages(
        facts=_facts(options, device),
        declared={stage: declared_by(stage, module) for stage, module in modules.items()},
        parameters=parameters,
        looks=looks_of(modules if options.trains and not nothing_is_tied else {}),
        of_cut=ties_of_cut(modules) if options.trains else None,
        n_data=math.prod(group.size() for group in ShardedStages(modules.values()).data_groups),
        series=1 + secrets.randbelow(2**15 - 1),
    )


def _fingerprint(tensor: torch.Tensor) -> str:
    values = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()[:12]


def _compared(
    everyone: Sequence[_RankStages], tied: Sequence[Mapping[int, str]] | None
) -> tuple[Mapping[int, Declared], Mapping[int, Mapping[str, Fact]]]:
    """Return the declared values and the parameters of each stage.

    Raises ValueError if ranks differ, or if weights look tied and nobody said so.
    """
    problem = difference([told.facts for told in everyone])
    if problem is None and tied is None:
        problem = problem_of_forgotten_ties(_looks(everyone), _of_cut(everyone))
    if problem is not None:
        raise ValueError(problem)
    parameters: dict[int, Mapping[str, Fact]] = {}
    declared: dict[int, Declared] = {}
    for rank, told in enumerate(everyone):
        for stage, ours in told.parameters.items():
            theirs = parameters.setdefault(stage, ours)
            for name in (*ours, *theirs):
                if ours.get(name) != theirs.get(name):
                    raise ValueError(
                        f"rank {rank} has {name!r} of stage {stage} as {ours.get(name)}, another"
                        f" replica as {theirs.get(name)}: give all replicas of a stage the same"
                        " parameters, with equal values"
                    )
        for stage, values in told.declared.items():
            if declared.setdefault(stage, values) != values:
                raise ValueError(
                    f"rank {rank} has stage {stage} as {values}, another replica as"
                    f" {declared[stage]}: give all replicas of a stage the same reads and writes"
                )
    return declared, parameters


def _looks(everyone: Sequence[_RankStages]) -> Mapping[int, Mapping[str, Look]]:
    looks: dict[int, Mapping[str, Look]] = {}
    for told in everyone:
        looks |= told.looks
    return looks


def _of_cut(everyone: Sequence[_RankStages]) -> Sequence[Mapping[int, str]] | None:
    return next((told.of_cut for told in everyone if told.of_cut is not None), None)


def _shared_weights(
    schedule: Schedule,
    parameters: Mapping[int, Mapping[str, Fact]],
    tied: Sequence[Mapping[int, str]],
) -> tuple[Weight, ...]:
    """Return every weight that is in several places: tied stages, or the replicas of one stage."""
    seen: set[tuple[int, str]] = set()
    for tie in tied:
        _refuse_bad_tie(tie, parameters)
        seen |= tie.items()
    shared: list[Mapping[int, str]] = list(tied)
    for stage, ranks in enumerate(schedule.placement):
        if len(ranks) > 1:
            shared += [{stage: name} for name in parameters[stage] if (stage, name) not in seen]
    weights = []
    for names in shared:
        places = []
        for stage, name in names.items():
            places += [WeightPlace(rank, stage, name) for rank in schedule.placement[stage]]
        weights.append(tuple(sorted(places)))
    return tuple(weights)


def _refuse_bad_tie(tie: Mapping[int, str], parameters: Mapping[int, Mapping[str, Fact]]) -> None:
    if len(tie) < 2:
        raise ValueError(
            f"tied weight {dict(tie)} is in {len(tie)} stage: give a name for each of at least two"
            " stages"
        )
    for stage, name in tie.items():
        if name not in parameters.get(stage, ()):
            held = ", ".join(parameters.get(stage, ())) or "none"
            raise ValueError(
                f"tied weight {dict(tie)}: stage {stage} has no parameter {name!r}; it has {held}"
            )
    first = min(tie)
    kind = parameters[first][tie[first]].kind
    for stage, name in sorted(tie.items()):
        other = parameters[stage][name].kind
        if other != kind:
            raise ValueError(
                f"tied weight {dict(tie)} is {kind} in stage {first}, but {other} in stage {stage}:"
                " give it one shape and dtype, and train or freeze it in all its stages"
            )
