"""The pace of an asynchronous pipeline on emulated ranks, beside its slowest stage and beside 1F1B.

    python benchmarks/pipedream.py [milliseconds]

A forward takes that long (20 ms unless given), a backward twice as long, an update a tenth. To time
a microbatch in the steady state, a step gets 24 more of them. The bound of a pipeline is the work
of its slowest stage on a microbatch, divided by the ranks that share the stage. Gradients and
updates are real.

Then a model of unequal layers is profiled on this machine and cut for two nodes of two ranks,
evenly and by PipeDream's planner. Each cut runs on emulated ranks, with all times and links slowed
down alike, beside the time that was planned. It takes longer where replicas exchange gradients: the
planner assumes that work hides the exchange, and the runtime does not hide it.
"""

import sys
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from course_pp.launch import on_ranks
from course_pp.runtime import EmulatedCluster, EmulatedLink, Pipeline, Recorder, profile_layers
from course_pp.schedule import (
    ClusterLevel,
    Costs,
    LayerCost,
    PlannedStage,
    Schedule,
    Versions,
    build,
    partition,
)

WIDTH = 16
# Microbatches of the shorter and of the longer step.
SHORT = 12
LONG = 36


def main(milliseconds: float = 20.0) -> None:
    f = milliseconds / 1e3
    equal = Costs(f, f, f, update=f / 10)
    uneven = Costs((2 * f, f), (2 * f, f), (2 * f, f), update=f / 10)
    rows: list[tuple[str, tuple[int, ...], Costs, Versions | None, float]] = [
        ("1f1b, flushed every 12", (1, 1, 1, 1), equal, None, 3 * f),
        ("pipedream stash", (1, 1, 1, 1), equal, "stash", 3.1 * f),
        ("pipedream vertical", (1, 1, 1, 1), equal, "vertical", 3.1 * f),
        ("pipedream none", (1, 1, 1, 1), equal, "none", 3.1 * f),
        ("pipedream 2bw", (1, 1, 1, 1), equal, "2bw", 3.025 * f),
        ("pipedream, slow stage", (1, 1), uneven, "stash", 6.1 * f),
        ("pipedream, slow stage shared", (2, 1), uneven, "stash", 3.05 * f),
    ]
    print(f"{'':<30}{'bound ms':>10}{'emulated ms':>13}{'over bound':>12}{'overruns':>10}")
    for name, shares, costs, versions, bound in rows:
        n_ranks = sum(shares)
        short, overruns = on_ranks(
            n_ranks, step, schedule_of(shares, versions, SHORT), costs, versions
        )[0]
        long, more = on_ranks(n_ranks, step, schedule_of(shares, versions, LONG), costs, versions)[
            0
        ]
        each = (long - short) / (LONG - SHORT) if versions else short / SHORT
        print_line(name, bound, each=each, overruns=overruns + more)
    compare_cuts(30 * f)


def print_line(name: str, bound: float, each: float, overruns: int) -> None:
    times = f"{1e3 * bound:>10.1f}{1e3 * each:>13.1f}"
    print(f"{name:<30}{times}{each / bound - 1:>12.1%}{overruns:>10}", flush=True)


def schedule_of(shares: tuple[int, ...], versions: Versions | None, m: int) -> Schedule:
    if versions is None:
        return build("1f1b", len(shares), m)
    return build(
        "pipedream",
        sum(shares),
        m,
        replicas=shares,
        group=len(shares) if versions == "2bw" else None,
    )


def step(
    rank: int, schedule: Schedule, costs: Costs, versions: Versions | None
) -> tuple[float, int]:
    """Run two steps, as the first settles shapes; return seconds and overruns of the second."""
    torch.manual_seed(0)
    stages = {
        s: nn.Linear(WIDTH, WIDTH) for s, ranks in enumerate(schedule.placement) if rank in ranks
    }
    optimizers = {s: torch.optim.SGD(stage.parameters(), lr=0.01) for s, stage in stages.items()}
    recorder = Recorder()
    pipeline = Pipeline(
        schedule,
        stages,
        F.mse_loss,
        recorder=recorder,
        cluster=EmulatedCluster(costs),
        optimizers=optimizers if versions else None,
        versions=versions,
    )
    batch = torch.randn(4 * schedule.n_microbatches, WIDTH)
    for _ in range(2):
        recorder.clear()
        pipeline.step(batch, target=batch)
    run = recorder.timeline()
    return float(run.makespan), len(run.overruns)


# Inner widths of the layers, to which the work is in proportion.
HIDDEN = (256, 256, 1024, 256, 256, 512, 256, 256)
ROWS = 32
# Bytes a second within a node and between nodes.
NODE = 2e10
NETWORK = 1e9


def model() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(256, h), nn.Tanh(), nn.Linear(h, 256)) for h in HIDDEN]


def compare_cuts(seconds: float) -> None:
    """Return the even cut and the planned one of layers with measured times.

    The times are slowed down so that the sum of all layers is ``seconds``.
    """
    torch.set_num_threads(1)
    layers = profile_layers(model(), torch.randn(ROWS, 256), repeats=20)
    times = ", ".join(f"{1e3 * layer.time:.1f}" for layer in layers)
    print(f"\nlayers of {times} ms on this machine, alone")
    planned = partition(layers, [ClusterLevel(2, NODE), ClusterLevel(2, NETWORK)])
    quarter = len(layers) // 4
    even = tuple(PlannedStage(i * quarter, (i + 1) * quarter, 1) for i in range(4))
    slowdown = seconds / sum(layer.time for layer in layers)
    titles = f"{'planned ms':>10}{'emulated ms':>13}{'over':>12}{'overruns':>10}"
    print(f"{'cut, layers × replicas':<30}{titles}")
    for name, stages in (("even", even), ("planned", planned.stages)):
        bound = slowdown * slowest(layers, stages)
        each, overruns = on_ranks(4, pace, layers, stages, slowdown)[0]
        cut = f"{name}:"
        for stage in stages:
            cut += f" {stage.end - stage.start}"
            if stage.replicas > 1:
                cut += f"×{stage.replicas}"
        print_line(cut, bound, each=each, overruns=overruns)


def slowest(layers: Sequence[LayerCost], stages: Sequence[PlannedStage]) -> float:
    """Return the seconds of the slowest stage or boundary of a cut.

    The first half of the ranks is one node, the second half another one.
    """
    times = []
    rank = 0
    for stage in stages:
        work = sum(layer.time for layer in layers[stage.start : stage.end])
        weights = sum(layer.weight_bytes for layer in layers[stage.start : stage.end])
        rank += stage.replicas
        times.append(max(work, 2 * (stage.replicas - 1) * weights / NODE) / stage.replicas)
        if rank < 4:
            times.append(2 * layers[stage.end - 1].output_bytes / (NETWORK if rank == 2 else NODE))
    return max(times)


def pace(
    rank: int, layers: Sequence[LayerCost], stages: Sequence[PlannedStage], slowdown: float
) -> tuple[float, int]:
    """Return the seconds of a microbatch in the steady state, and the number of overruns."""
    third = []
    update = []
    for stage in stages:
        work = slowdown * sum(layer.time for layer in layers[stage.start : stage.end])
        third.append(0.3 * work)
        update.append(0.1 * work)
    costs = Costs(third, third, third, update=update)
    links = [EmulatedLink(bandwidth=bandwidth / slowdown) for bandwidth in (NODE, NETWORK, NODE)]
    schedule = build("pipedream", 4, LONG, replicas=[stage.replicas for stage in stages])
    modules = {}
    for s, ranks in enumerate(schedule.placement):
        if rank in ranks:
            modules[s] = nn.Sequential(*model()[stages[s].start : stages[s].end])
    optimizers = {s: torch.optim.SGD(stage.parameters(), lr=0.01) for s, stage in modules.items()}
    recorder = Recorder()
    cluster = EmulatedCluster(costs, links)
    pipeline = Pipeline(
        schedule,
        modules,
        F.mse_loss,
        recorder=recorder,
        cluster=cluster,
        optimizers=optimizers,
        versions="stash",
    )
    batch = torch.randn(ROWS * LONG, 256)
    for _ in range(2):
        recorder.clear()
        pipeline.step(batch, target=batch)
    run = recorder.timeline()
    ends = {}
    for span in run.by_rank[0]:
        for part in span.action.parts:
            if part.kind == "U":
                ends[part.microbatch] = span.end
    return float(ends[2 * SHORT] - ends[SHORT]) / SHORT, len(run.overruns)


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
