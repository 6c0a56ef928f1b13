"""One step of any schedule on real ranks: at an emulated cluster's pace, or beside one process.

`emulate` runs the step in times that do not depend on this machine. It measures how many seconds a
unit of cost must last, so that the real work fits into every action. A slow or busy machine takes
longer and shows the same picture. If nothing fits, the result is the simulated timeline, and a line
says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
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
# An update gets a fourth of a unit and seldom fits into a shorter one. A run that does not fit
# costs a second run.
_FIRST_UNIT_WITH_UPDATES_S = 0.012
# The unit is this many times the longest real work so far, because ranks that share a core take
# turns of several milliseconds.
_MARGIN = 2.0
_LONGEST_RUN_S = 8.0
# Cost of an update if stages update their own weights. With 0, every real update would overrun.
_UPDATE = 0.25
_MOST_RANKS = 8
# Shape of a microbatch in `compare_gradients`.
_ROWS = 4
_WIDTH = 16


@dataclass(frozen=True, repr=False)
class EmulatedRun(Timeline):
    """The timeline of one emulated step in the unit of its costs, with memory and losses.

    If this machine was too busy, the times are the simulator's and ``measured`` is False.

    Attributes:
        memory: bytes that each rank really kept, over times in the same unit.
        losses: each microbatch's share of the loss.
        unit_s: seconds that one unit lasted.
        ledger: the version of the weights that each action used; None for a schedule that flushes.
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
        schedule: any schedule of :class:`course_pp.runtime.Pipeline` with at most 8 ranks.
        cluster: times in a unit of your choice, bandwidths in bytes a unit; unless given,
            ``Costs()``: a forward takes 1, a backward 2, a message nothing.
        model: a model that is cut evenly into stages; unless given, a small block of two linear
            layers for each stage.
        inputs: the batch; unless given, 16 rows a microbatch.
        targets: the targets of the batch; unless given, zeros. The loss is the mean squared error.
        recompute: whether ranks keep only the input of each microbatch.
        versions: the rule by which stages update their own weights (``U``), as
            :class:`course_pp.runtime.Pipeline` takes it; None for a schedule that flushes.
        optimizer: a function that makes the optimizer of a stage from its parameters, with
            ``versions`` only; unless given, SGD with a learning rate of 0.01.
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
        # Rank 0 has the timeline and the memory of all ranks, but each rank has its own ledger.
        run, memory, losses, used = by_rank[0]
        for *_, ledger in by_rank[1:]:
            if used is not None:
                used |= ledger
        if not run.trouble:
            kept = _stretched(memory, 1 / unit_s)
            return _in_units(run, unit_s, memory=kept, losses=losses, ledger=used)
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
    """Run the step on a rank; return timeline, memory, losses, and the ledger if it has one."""
    import torch

    from course_pp.runtime import Pipeline, Recorder

    if inputs is None:
        seeded = torch.Generator().manual_seed(0)
        inputs = torch.randn(16 * schedule.n_microbatches, 32, generator=seeded)
    if targets is None:
        targets = torch.zeros_like(inputs)
    if model is None:
        model = _blocks(schedule.n_stages, 32)
    stages = _stages_of(rank, schedule, model=model)
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
    pipeline.step(inputs, target=targets)
    ledger = None if versions is None else pipeline.ledger
    return recorder.timeline(name=schedule.name), recorder.memory(), pipeline.shares, ledger


def _optimizers(
    stages: dict[int, nn.Sequential], optimizer: Callable[..., Optimizer] | None
) -> dict[int, Optimizer]:
    import torch

    make = optimizer or partial(torch.optim.SGD, lr=0.01)
    # The first step in a process takes many times as long as the second, and no update has that
    # much time. So take the first one here.
    unused = torch.nn.Parameter(torch.zeros(1))
    unused.grad = torch.zeros(1)
    make([unused]).step()
    return {number: make(stage.parameters()) for number, stage in stages.items()}


def _blocks(n: int, width: int) -> nn.Sequential:
    import torch
    from torch import nn

    torch.manual_seed(0)  # the same weights on every rank
    model = nn.Sequential()
    for _ in range(n):
        up = nn.Linear(width, 2 * width)
        down = nn.Linear(2 * width, width)
        model.append(nn.Sequential(up, nn.GELU(), down))
    return model


def _stages_of(rank: int, schedule: Schedule, model: nn.Sequential) -> dict[int, nn.Sequential]:
    from course_pp.runtime import partition_model

    stages = {}
    for stage, ranks in enumerate(schedule.placement):
        if rank in ranks:
            stages[stage] = partition_model(model, schedule.n_stages, stage)
    return stages


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
    bandwidth = link.bandwidth and link.bandwidth / unit_s  # None stays None
    return replace(link, latency=link.latency * unit_s, bandwidth=bandwidth)


def _times(factor: float, value: Any) -> Any:
    """Return ``factor * value`` for a number, for each number of a tuple, or None for None."""
    if value is None:
        return None
    if isinstance(value, tuple):
        return tuple(factor * float(each) for each in value)
    return factor * float(value)


def _longest_work(run: EmulatedTimeline, predicted: Timeline) -> float:
    """Return the longest real work: seconds of an action divided by its cost in units."""
    given = {(span.rank, span.action): float(span.duration) for span in predicted.spans}
    longest = 0.0
    for span in run.wall.spans:
        units = given[span.rank, span.action]
        # An action that costs nothing overruns in any unit.
        if units:
            longest = max(longest, float(span.duration) / units)
    return longest


def _in_units(run: EmulatedTimeline, unit_s: float, **more: Any) -> EmulatedRun:
    def scaled(each: Any) -> Any:
        return replace(each, start=each.start / unit_s, end=each.end / unit_s)

    spans = tuple(map(scaled, run.spans))
    receives = tuple(map(scaled, run.receives))
    return _run_of(run, spans=spans, receives=receives, unit_s=unit_s, measured=True, **more)


def _stretched(memory: tuple[RankMemory, ...], factor: float) -> tuple[RankMemory, ...]:
    """Return the memory with all times multiplied by ``factor``."""
    stretched = []
    for kept in memory:
        curves = {}
        for kind, curve in kept.curves.items():
            curves[kind] = tuple((factor * when, amount) for when, amount in curve)
        stretched.append(replace(kept, curves=curves))
    return tuple(stretched)


@checked
def compare_gradients(schedules: Sequence[Schedule]) -> tuple[float, ...]:
    """Run one step of each schedule on real ranks and in one process, and print how they differ.

    A schedule has at most 8 ranks. The model has a small block for each stage, in float64. If a
    stage lives on several ranks, each of its copies counts.

    Returns:
        The largest absolute difference of all gradients and of the loss, one for each schedule.
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

    # One call of on_ranks serves all schedules that have the same number of ranks.
    found: dict[int, tuple[int, float]] = {}
    for n_ranks in sorted({schedule.n_ranks for schedule in schedules}):
        mine = [i for i, schedule in enumerate(schedules) if schedule.n_ranks == n_ranks]
        by_rank = on_ranks(n_ranks, _compared, tuple(schedules[i] for i in mine))
        for i, ranks in zip(mine, zip(*by_rank, strict=True), strict=True):
            counts, differences = zip(*ranks, strict=True)
            found[i] = (sum(counts), max(differences))

    width = max(len(schedule.name) for schedule in schedules)
    for i, schedule in enumerate(schedules):
        count, difference = found[i]
        size = "1 rank" if schedule.n_ranks == 1 else f"{schedule.n_ranks} ranks"
        print(
            f"{schedule.name:{width}}  {size}, {count} gradients: at most {difference:.0e} from one"
            " process"
        )
    return tuple(found[i][1] for i in range(len(schedules)))


def _compared(rank: int, schedules: Sequence[Schedule]) -> list[tuple[int, float]]:
    """Return (gradients that this rank holds, largest difference) for each schedule."""
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
    model.zero_grad()  # sets them to None, so `expected` keeps the values

    stages = _stages_of(rank, schedule, model=model)
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
