"""Check a pipeline's arguments on every rank, and agree on them before the first message."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from course_pp.arguments import WrongArgument, check_arguments, refuse_bad_timeout
from course_pp.loss import LossFn, TokenLoss, counted
from course_pp.runtime.agreement import Fact, agree_on_pipeline
from course_pp.runtime.clocks import host_identity
from course_pp.runtime.cluster import EmulatedCluster
from course_pp.runtime.recorder import Recorder
from course_pp.runtime.sharded import ShardedStages
from course_pp.runtime.shared import Weight, shared_weights
from course_pp.runtime.stages import Stages, by_stage, device_of, facts_of_parameters, problem_of_stages
from course_pp.runtime.versions import Optimizers, problem_of_versions, settings_of
from course_pp.runtime.wire import TRANSPORTS
from course_pp.schedule import Edge, Ledger, Schedule, Versions, check, ledger
from course_pp.schedule.declared import Declared, declared_by, edges_from
from course_pp.tied import Look, looks_of, problem_of_left_out_copies

__all__ = ["Settled", "settle"]


@dataclass(frozen=True)
class Settled:
    """Arguments that this rank has checked and all ranks have agreed on.

    Attributes:
        rank: in the pipeline's group.
        modules: this rank's stages.
        device: where they compute.
        weights: weights that lie in several places, on all ranks.
        series: keeps this pipeline's messages apart from others'.
        planned: which versions its actions use, if stages update their own weights.
        schedule: what it was given, with the edges between the stages.
        declared: the values that this rank's stages read and write beyond their neighbours'.
        n_data: ranks over which FSDP2 averages gradients, the most of any stage.
    """

    rank: int
    modules: Mapping[int, nn.Module | None]
    device: torch.device
    weights: tuple[Weight, ...]
    series: int
    planned: Ledger | None
    schedule: Schedule
    declared: Mapping[int, Declared]
    n_data: int

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Ranks that exchange the gradients of shared weights."""
        return [(a.rank, b.rank) for weight in self.weights for a in weight for b in weight]


def settle(
    schedule: Schedule,
    stages: Stages,
    loss_fn: LossFn | TokenLoss | None,
    *,
    group: dist.ProcessGroup | None,
    device: torch.device | str | None,
    recompute: bool,
    tied: Sequence[Mapping[int, str]] | None,
    recorder: Recorder | None,
    cluster: EmulatedCluster | None,
    transport: str | None,
    timeout_s: float,
    optimizers: Optimizers | None,
    versions: Versions | None,
    generates: bool = False,
) -> Settled:
    """Check this rank's arguments and compare them with the others'; they are those of ``Pipeline``.

    ``generates`` is whether tokens are fed back, which :class:`~course_pp.runtime.Pipeline` does not do.

    Raises:
        TypeError: for a ``group`` that is not a process group: without one the ranks cannot agree on the rest.
        ValueError: on every rank, for whatever is wrong on any of them, or differs between them.
    """
    given = locals()
    check_arguments(settle, {"group": group}, "Pipeline")
    ties = () if tied is None else tied
    in_group = dist.is_available() and dist.is_initialized()
    rank, n_ranks = (dist.get_rank(group), dist.get_world_size(group)) if in_group else (0, 1)
    if rank < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in the pipeline's group: call it on the group's ranks only")
    mine = _Mine()
    try:  # whatever is wrong on one rank alone must not keep the others waiting
        check_arguments(settle, given, "Pipeline")
        refuse_bad_timeout("Pipeline", timeout_s)
        if loss_fn is not None:
            counted(loss_fn)
        here = [stage for stage, ranks in enumerate(schedule.placement) if rank in ranks]
        mine.modules = by_stage(stages, here)
        problem = _problem_of_pipeline(schedule, n_ranks, transport, generates)
        problem = problem or problem_of_stages(mine.modules, here, schedule, ties)
        problem = problem or problem_of_versions(
            schedule, mine.modules, optimizers, versions, tied=ties, recompute=recompute
        )
        mine.device = torch.device(device) if device is not None else device_of(mine.modules)
        mine.facts = _facts(schedule, loss_fn, recompute, tied, versions, transport, mine.device, cluster)
        problem = problem or mine.look(schedule, optimizers, tied, cluster)
    except WrongArgument as error:
        problem = str(error)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    agreed = agree_on_pipeline(problem, mine.facts, mine.parameters, group, mine.declared, mine.looks, mine.n_data)
    schedule = _with_edges(schedule, edges_from(agreed.declared))
    if cluster is not None and (problem := cluster.problem_with(schedule)):
        raise ValueError(problem)
    # Stages that update by themselves exchange gradients at each update.
    planned = None if versions is None else ledger(schedule, versions)
    weights = shared_weights(schedule, agreed.parameters, ties) if planned is None else ()
    if problem := problem_of_left_out_copies(agreed.looks, ties):
        raise ValueError(problem)
    return Settled(
        rank, mine.modules, mine.device, weights, agreed.series, planned, schedule, mine.declared, agreed.n_data
    )


@dataclass
class _Mine:
    """What this rank brings to the agreement. A problem leaves the fields that come after it empty.

    Attributes:
        facts: must be the same on every rank.
        parameters: of each stage, what its copies and its weights' other places are compared by.
        looks: of each stage, what tells tied weights that nobody named.
        n_data: ranks over which FSDP2 averages the gradients here.
    """

    modules: Mapping[int, nn.Module | None] = field(default_factory=dict)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    facts: Mapping[str, Any] = field(default_factory=dict)
    declared: Mapping[int, Declared] = field(default_factory=dict)
    parameters: dict[int, dict[str, Fact]] = field(default_factory=dict)
    looks: dict[int, dict[str, Look]] = field(default_factory=dict)
    n_data: int = 1

    def look(
        self,
        schedule: Schedule,
        optimizers: Optimizers | None,
        tied: Sequence[Mapping[int, str]] | None,
        cluster: EmulatedCluster | None,
    ) -> str | None:
        """Look into the modules; return what is wrong with the cluster, if anything."""
        self.declared = {stage: declared_by(stage, module) for stage, module in self.modules.items()}
        self.n_data = math.prod(
            group.size() for group in ShardedStages(self.modules.values(), trains=False).data_groups
        )
        if cluster is not None and (problem := cluster.problem_with(schedule)):
            return problem
        copied = {stage for stage in self.modules if len(schedule.placement[stage]) > 1}
        self.parameters = {
            stage: facts_of_parameters(module, stage in copied) for stage, module in self.modules.items()
        }
        for stage, optimizer in (optimizers or {}).items():
            if stage in copied:
                self.parameters[stage] |= {"the optimizer": Fact(settings_of(optimizer, self.modules[stage]))}
        trains = any(part.kind != "F" for part in schedule.parts)
        self.looks = looks_of(self.modules if trains and (tied is None or tied) else {})
        return None


def _facts(
    schedule: Schedule,
    loss_fn: LossFn | TokenLoss | None,
    recompute: bool,
    tied: Sequence[Mapping[int, str]] | None,
    versions: Versions | None,
    transport: str | None,
    device: torch.device,
    cluster: EmulatedCluster | None,
) -> dict[str, Any]:
    return {
        "schedule": f"{schedule!r} {schedule.fingerprint}",
        "loss_fn": "None" if loss_fn is None else "a loss",
        "recompute": recompute,
        "tied": tied if tied is None else [dict(tie) for tie in tied],
        "versions": versions,
        "transport": transport,
        "device": device.type,
        "cluster": repr(cluster),
        "host": "" if cluster is None else host_identity(),  # an emulated rank trusts the clocks of the others
    }


def _with_edges(schedule: Schedule, found: tuple[Edge, ...]) -> Schedule:
    """Return the schedule with the edges that the stages have; those it was given with must be the same."""
    if schedule.edges and {*schedule.edges} != {*found}:
        raise ValueError(
            f"{schedule!r} has edges {schedule.edges}, but the stages' reads and writes make {found}: leave out the "
            "schedule's, or give the stages these"
        )
    return schedule if schedule.edges else schedule.with_edges(*found)


def _problem_of_pipeline(schedule: Schedule, n_ranks: int, transport: str | None, generates: bool) -> str | None:
    if schedule.feedback and not generates:
        return f"{schedule!r} feeds tokens back to its first stage, which a Pipeline does not: call generate"
    if schedule.n_ranks != n_ranks:
        return (
            f"{schedule!r} on a group of {n_ranks} ranks: build it with n_ranks={n_ranks}, or start {schedule.n_ranks}"
        )
    if problems := check(schedule):
        more = f" (and {len(problems) - 1} more problems)" if len(problems) > 1 else ""
        return f"{schedule!r} cannot run: {problems[0]}{more}"
    if transport is not None and transport not in TRANSPORTS:
        return f"transport is {transport!r}: use one of {', '.join(map(repr, TRANSPORTS))}, or leave it out"
    return None
