"""One step of any schedule on real ranks that pretend to be a cluster, in times that do not depend on this machine.

Costs are in a unit of their own, usually the time of one forward. How many seconds the unit lasts is measured: long
enough for the real work to fit into every action. So a run on a slow or busy machine takes longer and shows the same
picture. Where nothing fits, the simulated timeline is shown instead, and says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import or_
from typing import TYPE_CHECKING, Any

from course_pp.arguments import checked, fits, refuse_unless, spelled
from course_pp.launch import on_ranks
from course_pp.schedule import Costs, Ledger, Receive, Schedule, Span, Timeline, Versions

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from course_pp.runtime import EmulatedCluster, EmulatedLink, RankMemory
    from course_pp.runtime.emulation import EmulatedTimeline

__all__ = ["EmulatedRun", "emulate"]

_TRIES = 3
_FIRST_UNIT_S = 0.008
# Updates, of a fourth of a unit, seldom fit into less, and a run that does not fit is run again.
_FIRST_UNIT_WITH_UPDATES_S = 0.012
# The unit is this many times the longest real work seen: ranks that share a core take turns of several milliseconds.
_MARGIN = 2.0
_LONGEST_RUN_S = 8.0
# Of a forward, where stages update their own weights: not 0, or every real update would overrun.
_UPDATE = 0.25


@checked
@dataclass(frozen=True, repr=False)
class EmulatedRun(Timeline):
    """The timeline of one emulated step in the unit of its costs, and what it kept.

    Attributes:
        memory: what each rank really kept, in bytes; its times are in the same unit.
        losses: each microbatch's share of the loss.
        unit_s: seconds that one unit lasted.
        measured: False if this machine was too busy, and the times are the simulator's.
        ledger: which version of its weights each action used; None for a schedule that flushes.
    """

    memory: tuple[RankMemory, ...] = ()
    losses: tuple[float, ...] = ()
    unit_s: float = 1.0
    ledger: Ledger | None = None


@checked
def emulate(
    schedule: Schedule,
    cluster: Costs | EmulatedCluster | None = None,
    *,
    model: nn.Sequential | None = None,
    inputs: Tensor | None = None,
    targets: Tensor | None = None,
    recompute: bool = False,
    versions: Versions | None = None,
    optimizer: Callable[..., Optimizer] | None = None,
) -> EmulatedRun:
    """Run one step of ``schedule`` on as many real ranks, at the pace of ``cluster``.

    Args:
        schedule: any that :class:`course_pp.runtime.Pipeline` runs, of at most 8 ranks.
        cluster: times in a unit of your choice, bandwidths in bytes a unit; unless given, ``Costs()``: a forward takes
            1, a backward 2, a message nothing.
        model: cut evenly into stages; unless given, a small block of two linear layers for each stage.
        inputs: the batch; unless given, 16 rows a microbatch.
        targets: of the batch; unless given, zeros. The loss is the mean squared error.
        recompute: keep each microbatch's input only.
        versions: for a schedule whose stages update their own weights (``U``): by which rule, as
            :class:`course_pp.runtime.Pipeline` takes it.
        optimizer: for the same: makes a stage's from its parameters; unless given, SGD with a learning rate of 0.01.

    Raises:
        ValueError: for a schedule that the cluster or the runtime cannot run, or an optimizer without versions.
    """
    from course_pp.runtime import EmulatedCluster

    _refuse_wrong_types(cluster=cluster, model=model, inputs=inputs, targets=targets, optimizer=optimizer)
    if optimizer is not None and versions is None:
        raise ValueError(f"optimizer is {optimizer!r}, but versions is None: give a rule, or leave the optimizer out")
    if cluster is None:
        cluster = Costs(update=_UPDATE) if versions is not None else Costs()
    if isinstance(cluster, Costs):
        cluster = EmulatedCluster(cluster)
    predicted = cluster.predict(schedule)
    step = _Step(schedule, model, inputs, targets, recompute, versions, optimizer)
    unit_s = _FIRST_UNIT_S if versions is None else _FIRST_UNIT_WITH_UPDATES_S
    for _ in range(_TRIES):
        by_rank = on_ranks(schedule.n_ranks, step, _in_seconds(cluster, unit_s))
        run, memory, losses, _ = by_rank[0]
        used = None if versions is None else reduce(or_, (ledger for *_, ledger in by_rank))
        if not run.trouble:
            return replace(_in_units(run, unit_s, memory, losses), ledger=used)
        unit_s = max(1.5 * unit_s, _MARGIN * _longest_work(run, predicted))
        if unit_s * float(predicted.makespan) > _LONGEST_RUN_S:
            break
    print("This machine is too busy to emulate a cluster: times are simulated; messages, losses and memory are real.")
    kept = _stretched(memory, float(predicted.makespan) / float(run.makespan))
    return _simulated(predicted, f"{schedule.name}, simulated", kept, losses, used)


def _refuse_wrong_types(**given: object) -> None:
    """Hold the arguments of ``emulate`` to types that are not imported before it is called."""
    from torch import Tensor, nn

    from course_pp.runtime import EmulatedCluster

    kinds = {
        "cluster": Costs | EmulatedCluster | None,
        "model": nn.Sequential | None,
        "inputs": Tensor | None,
        "targets": Tensor | None,
        "optimizer": Callable | None,
    }
    for name, value in given.items():
        what = f"pass {spelled(kinds[name], True)}, or leave it out"
        refuse_unless(fits(value, kinds[name]), "emulate", name, value, what)


def _simulated(
    predicted: Timeline, name: str, memory: tuple[RankMemory, ...], losses: tuple[float, ...], used: Ledger | None
) -> EmulatedRun:
    return EmulatedRun(
        predicted.n_ranks,
        predicted.spans,
        "",
        predicted.transfers,
        predicted.receives,
        name,
        memory,
        losses,
        ledger=used,
        edges=predicted.edges,
        edge_transfers=predicted.edge_transfers,
        feedback=predicted.feedback,
        token_transfer=predicted.token_transfer,
    )


@dataclass(frozen=True)
class _Step:
    """What each rank does. A class and not a closure: it is sent to the ranks by name."""

    schedule: Schedule
    model: nn.Sequential | None
    inputs: Tensor | None
    targets: Tensor | None
    recompute: bool
    versions: Versions | None
    optimizer: Callable[..., Optimizer] | None

    def __call__(self, rank: int, cluster: EmulatedCluster) -> tuple[Any, Any, tuple[float, ...], Ledger | None]:
        import torch

        from course_pp.runtime import Pipeline, Recorder, partition_model

        schedule, recorder = self.schedule, Recorder(memory=True)
        model = _blocks(schedule.n_stages) if self.model is None else self.model
        rows = torch.randn(16 * schedule.n_microbatches, 32, generator=torch.Generator().manual_seed(0))
        inputs = rows if self.inputs is None else self.inputs
        targets = torch.zeros_like(inputs) if self.targets is None else self.targets
        stages = {
            stage: partition_model(model, schedule.n_stages, stage)
            for stage, ranks in enumerate(schedule.placement)
            if rank in ranks
        }
        pipeline = Pipeline(
            schedule,
            stages,
            torch.nn.functional.mse_loss,
            recorder=recorder,
            cluster=cluster,
            recompute=self.recompute,
            optimizers=None if self.versions is None else self._optimizers(stages),
            versions=self.versions,
        )
        losses = pipeline.step(inputs, targets)
        ledger = None if self.versions is None else pipeline.ledger
        return recorder.timeline(name=schedule.name), recorder.memory(), losses, ledger

    def _optimizers(self, stages: dict[int, nn.Sequential]) -> dict[int, Optimizer]:
        import torch

        make = partial(torch.optim.SGD, lr=0.01) if self.optimizer is None else self.optimizer
        # The first step in a process takes many times as long as the second, and no update has so much time.
        unused = torch.nn.Parameter(torch.zeros(1))
        unused.grad = torch.zeros(1)
        make([unused]).step()
        return {number: make(stage.parameters()) for number, stage in stages.items()}


def _blocks(n: int) -> nn.Sequential:
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(n)))


def _in_seconds(cluster: EmulatedCluster, unit_s: float) -> EmulatedCluster:
    """Return the same cluster where one unit of time lasts ``unit_s``."""
    from course_pp.runtime import EmulatedLink

    costs = cluster.costs
    times = ("forward", "input_grad", "weight_grad", "latency", "recompute", "overlapped", "update")
    scaled: dict[str, Any] = {name: _times(unit_s, getattr(costs, name)) for name in times}
    scaled["bandwidth"] = costs.bandwidth and float(costs.bandwidth) / unit_s
    links = cluster.links
    if isinstance(links, EmulatedLink):
        links = _link_in_seconds(links, unit_s)
    elif links is not None:
        links = [_link_in_seconds(link, unit_s) for link in links]
    return replace(cluster, costs=replace(costs, **scaled), links=links)


def _link_in_seconds(link: EmulatedLink, unit_s: float) -> EmulatedLink:
    return replace(link, latency=link.latency * unit_s, bandwidth=link.bandwidth and link.bandwidth / unit_s)


def _times(factor: float, value: Any) -> Any:
    if value is None:
        return None
    return tuple(factor * float(each) for each in value) if isinstance(value, tuple) else factor * float(value)


def _longest_work(run: EmulatedTimeline, predicted: Timeline) -> float:
    """Return the longest real work, in seconds for each unit that it was given."""
    given = {(span.rank, span.action): float(span.duration) for span in predicted.spans}
    ratios = [
        float(span.duration) / given[span.rank, span.action] for span in run.wall.spans if given[span.rank, span.action]
    ]
    return max(ratios, default=0.0)


def _in_units(
    run: EmulatedTimeline, unit_s: float, memory: tuple[RankMemory, ...], losses: tuple[float, ...]
) -> EmulatedRun:
    def scale(each: Any) -> Any:
        return replace(each, start=each.start / unit_s, end=each.end / unit_s)

    spans: tuple[Span, ...] = tuple(map(scale, run.spans))
    receives: tuple[Receive, ...] = tuple(map(scale, run.receives))
    kept = _stretched(memory, 1 / unit_s)
    return EmulatedRun(
        run.n_ranks,
        spans,
        "",
        (),
        receives,
        run.name,
        kept,
        losses,
        unit_s,
        edges=run.edges,
        feedback=run.feedback,
        measured=True,
    )


def _stretched(memory: tuple[RankMemory, ...], factor: float) -> tuple[RankMemory, ...]:
    def stretch(curve: tuple[tuple[float, int], ...]) -> tuple[tuple[float, int], ...]:
        return tuple((factor * when, amount) for when, amount in curve)

    return tuple(replace(kept, curves={kind: stretch(curve) for kind, curve in kept.curves.items()}) for kept in memory)
