"""One step of any schedule on real ranks: at the pace of an emulated cluster, or beside one
process.

`emulate` runs it in times that do not depend on this machine. How many seconds a unit of cost lasts
is measured: long enough for the real work to fit into every action. So a run on a slow or busy
machine takes longer and shows the same picture. Where nothing fits, the simulated timeline is shown
instead, and says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial, reduce
from operator import or_
from typing import TYPE_CHECKING, Any

from course_pp.base.arguments import checked
from course_pp.launch import on_ranks
from course_pp.schedule import Costs, Ledger, Schedule, Timeline, Versions

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from course_pp.runtime import EmulatedCluster, EmulatedLink, RankMemory
    from course_pp.runtime.emulation import EmulatedTimeline

_TRIES = 3
_FIRST_UNIT_S = 0.008
# Updates, of a fourth of a unit, seldom fit into less, and a run that does not fit is run again.
_FIRST_UNIT_WITH_UPDATES_S = 0.012
# The unit is this many times the longest real work seen: ranks that share a core take turns of
# several milliseconds.
_MARGIN = 2.0
_LONGEST_RUN_S = 8.0
# Of a forward, where stages update their own weights: not 0, or every real update would overrun.
_UPDATE = 0.25
_MOST_RANKS = 8
# In comparisons: rows of a microbatch, and the width of a stage.
_ROWS, _WIDTH = 4, 16


@dataclass(frozen=True, repr=False)
class EmulatedRun(Timeline):
    """The timeline of one emulated step in the unit of its costs, and what it kept.

    It is not ``measured`` if this machine was too busy, and the times are the simulator's.
    """

    # what each rank really kept, in bytes; its times are in the same unit
    memory: tuple[RankMemory, ...] = ()
    losses: tuple[float, ...] = ()  # each microbatch's share of the loss
    unit_s: float = 1.0  # seconds that one unit lasted
    # which version of its weights each action used; None for a schedule that flushes
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
        cluster: times in a unit of your choice, bandwidths in bytes a unit; unless given,
            ``Costs()``: a forward takes 1, a backward 2, a message nothing.
        model: cut evenly into stages; unless given, a small block of two linear layers for each
            stage.
        inputs: the batch; unless given, 16 rows a microbatch.
        targets: of the batch; unless given, zeros. The loss is the mean squared error.
        recompute: keep each microbatch's input only.
        versions: for a schedule whose stages update their own weights (``U``): by which rule, as
            :class:`course_pp.runtime.Pipeline` takes it.
        optimizer: for the same: makes a stage's from its parameters; unless given, SGD with a
            learning rate of 0.01.
    """
    from course_pp.runtime import EmulatedCluster

    if optimizer is not None and versions is None:
        raise ValueError(
            f"optimizer is {optimizer!r}, but versions is None: give a rule, or leave the"
            " optimizer out"
        )
    if cluster is None:
        cluster = Costs(update=_UPDATE) if versions is not None else Costs()
    if isinstance(cluster, Costs):
        cluster = EmulatedCluster(cluster)
    predicted = cluster.predict(schedule)
    given = (schedule, model, inputs, targets, recompute, versions, optimizer)
    unit_s = _FIRST_UNIT_S if versions is None else _FIRST_UNIT_WITH_UPDATES_S
    for _ in range(_TRIES):
        by_rank = on_ranks(schedule.n_ranks, _emulated, _in_seconds(cluster, unit_s), *given)
        run, memory, losses, _ = by_rank[0]
        used = None if versions is None else reduce(or_, (ledger for *_, ledger in by_rank))
        if not run.trouble:
            return _in_units(
                run, unit_s, memory=_stretched(memory, 1 / unit_s), losses=losses, ledger=used
            )
        unit_s = max(1.5 * unit_s, _MARGIN * _longest_work(run, predicted))
        if unit_s * float(predicted.makespan) > _LONGEST_RUN_S:
            break
    print(
        "This machine is too busy to emulate a cluster: times are simulated; messages, losses and"
        " memory are real."
    )
    kept = _stretched(memory, float(predicted.makespan) / float(run.makespan))
    return _run_of(
        predicted, name=f"{schedule.name}, simulated", memory=kept, losses=losses, ledger=used
    )


def _run_of(timeline: Timeline, **more: Any) -> EmulatedRun:
    kept = {each.name: getattr(timeline, each.name) for each in fields(Timeline)}
    return EmulatedRun(**(kept | {"unit": ""} | more))


def _emulated(
    rank: int,
    cluster: EmulatedCluster,
    schedule: Schedule,
    model: nn.Sequential | None,
    inputs: Tensor | None,
    targets: Tensor | None,
    recompute: bool,
    versions: Versions | None,
    optimizer: Callable[..., Optimizer] | None,
) -> tuple[Any, Any, tuple[float, ...], Ledger | None]:
    """Run the step on a rank; return its timeline and memory, the losses, and the ledger if there are versions."""
    import torch

    from course_pp.runtime import Pipeline, Recorder

    if inputs is None:
        inputs = torch.randn(
            16 * schedule.n_microbatches, 32, generator=torch.Generator().manual_seed(0)
        )
    stages = _stages_of(rank, schedule, _blocks(schedule.n_stages, 32) if model is None else model)
    recorder = Recorder(memory=True)
    pipeline = Pipeline(
        schedule,
        stages,
        torch.nn.functional.mse_loss,
        recorder=recorder,
        cluster=cluster,
        recompute=recompute,
        optimizers=None if versions is None else _optimizers(stages, optimizer),
        versions=versions,
    )
    pipeline.step(inputs, target=torch.zeros_like(inputs) if targets is None else targets)
    ledger = None if versions is None else pipeline.ledger
    return recorder.timeline(name=schedule.name), recorder.memory(), pipeline.shares, ledger


def _optimizers(
    stages: dict[int, nn.Sequential], optimizer: Callable[..., Optimizer] | None
) -> dict[int, Optimizer]:
    import torch

    make = partial(torch.optim.SGD, lr=0.01) if optimizer is None else optimizer
    # The first step in a process takes many times as long as the second, and no update has so much
    # time.
    unused = torch.nn.Parameter(torch.zeros(1))
    unused.grad = torch.zeros(1)
    make([unused]).step()
    return {number: make(stage.parameters()) for number, stage in stages.items()}


def _blocks(n: int, width: int) -> nn.Sequential:
    import torch
    from torch import nn

    torch.manual_seed(0)
    blocks = (
        nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        for _ in range(n)
    )
    return nn.Sequential(*blocks)


def _stages_of(rank: int, schedule: Schedule, model: nn.Sequential) -> dict[int, nn.Sequential]:
    from course_pp.runtime import partition_model

    return {
        stage: partition_model(model, schedule.n_stages, stage)
        for stage, ranks in enumerate(schedule.placement)
        if rank in ranks
    }


def _in_seconds(cluster: EmulatedCluster, unit_s: float) -> EmulatedCluster:
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
    return replace(
        link, latency=link.latency * unit_s, bandwidth=link.bandwidth and link.bandwidth / unit_s
    )


def _times(factor: float, value: Any) -> Any:
    if value is None:
        return None
    return (
        tuple(factor * float(each) for each in value)
        if isinstance(value, tuple)
        else factor * float(value)
    )


def _longest_work(run: EmulatedTimeline, predicted: Timeline) -> float:
    """Return the longest real work, in seconds for each unit that it was given."""
    given = {(span.rank, span.action): float(span.duration) for span in predicted.spans}
    ratios = [
        float(span.duration) / given[span.rank, span.action]
        for span in run.wall.spans
        if given[span.rank, span.action]
    ]
    return max(ratios, default=0.0)


def _in_units(run: EmulatedTimeline, unit_s: float, **more: Any) -> EmulatedRun:
    def scaled(each: Any) -> Any:
        return replace(each, start=each.start / unit_s, end=each.end / unit_s)

    spans, receives = (tuple(map(scaled, each)) for each in (run.spans, run.receives))
    return _run_of(run, spans=spans, receives=receives, unit_s=unit_s, measured=True, **more)


def _stretched(memory: tuple[RankMemory, ...], factor: float) -> tuple[RankMemory, ...]:
    def stretch(curve: tuple[tuple[float, int], ...]) -> tuple[tuple[float, int], ...]:
        return tuple((factor * when, amount) for when, amount in curve)

    return tuple(
        replace(kept, curves={kind: stretch(curve) for kind, curve in kept.curves.items()})
        for kept in memory
    )


@checked
def compare_gradients(schedules: Sequence[Schedule]) -> tuple[float, ...]:
    """Run one step of each schedule, of at most 8 ranks, on real ranks and in one process; print a
    line for each.

    The model has a small block for each stage, in float64. Every copy of a stage that lives on
    several ranks counts.

    Returns:
        For each schedule the largest absolute difference, of all its gradients and of the loss.
    """
    if not schedules:
        raise ValueError(
            "schedules is empty: give at least one, as in compare_gradients([build('zb_h1', 4, 8)])"
        )
    for schedule in schedules:
        if schedule.n_ranks > _MOST_RANKS:
            raise ValueError(
                f"{schedule.name} has {schedule.n_ranks} ranks: at most {_MOST_RANKS} are started"
                " on one machine"
            )
    found: dict[int, tuple[int, float]] = {}
    for n_ranks in sorted({schedule.n_ranks for schedule in schedules}):
        mine = [i for i, schedule in enumerate(schedules) if schedule.n_ranks == n_ranks]
        by_rank = on_ranks(n_ranks, _compared, tuple(schedules[i] for i in mine))
        for i, ranks in zip(mine, zip(*by_rank, strict=True), strict=True):
            found[i] = (
                sum(count for count, _ in ranks),
                max(difference for _, difference in ranks),
            )
    width = max(len(schedule.name) for schedule in schedules)
    for i, schedule in enumerate(schedules):
        count, difference = found[i]
        size = f"{schedule.n_ranks} rank{'s' if schedule.n_ranks > 1 else ''}"
        print(
            f"{schedule.name:{width}}  {size}, {count} gradients: at most {difference:.0e} from one"
            " process"
        )
    return tuple(found[i][1] for i in range(len(schedules)))


def _compared(rank: int, schedules: Sequence[Schedule]) -> list[tuple[int, float]]:
    """Return for each schedule how many gradients this rank holds, and the largest difference."""
    return [_compared_one(rank, schedule) for schedule in schedules]


def _compared_one(rank: int, schedule: Schedule) -> tuple[int, float]:
    import torch

    from course_pp.runtime import run_step

    model = _blocks(schedule.n_stages, _WIDTH).double()
    seeded = torch.Generator().manual_seed(1)
    shape = (2, _ROWS * schedule.n_microbatches, _WIDTH)
    inputs, targets = torch.randn(shape, dtype=torch.float64, generator=seeded)
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    stages = _stages_of(rank, schedule, model)
    found, _ = run_step(schedule, stages, inputs, targets, torch.nn.functional.mse_loss)
    differences = [abs(found.item() - loss.item())]
    for stage in stages.values():
        for name, parameter in stage.named_parameters():
            differences.append(_difference(parameter.grad, expected[name]))
    return len(differences) - 1, max(differences)


def _difference(found: Tensor | None, expected: Tensor | None) -> float:
    if found is None or expected is None:
        return float("inf")
    return float((found - expected).abs().max())
