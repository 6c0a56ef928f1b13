"""What an asynchronous pipeline reaches on emulated ranks, against the slowest stage and against 1F1B with its flush.

    python benchmarks/pipedream.py [milliseconds]

A forward takes that long (20 ms unless given), a backward twice as long, an update a tenth. The time of a microbatch in
the steady state is what 24 more of them add to a step; no pipeline can be below its slowest stage's work on one,
divided by the ranks that share it. Gradients and updates are real.
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn

from course_pp.launch import on_ranks
from course_pp.runtime import EmulatedCluster, Pipeline, Recorder
from course_pp.schedule import Costs, Schedule, Versions, build

WIDTH, SHORT, LONG = 16, 12, 36


def main(milliseconds: float = 20.0) -> None:
    f = milliseconds / 1e3
    equal = Costs(f, f, f, update=f / 10)
    uneven = Costs((2 * f, f), (2 * f, f), (2 * f, f), update=f / 10)
    rows: list[tuple[str, tuple[int, ...], Costs, Versions | None, float]] = [
        ("1f1b, flushed every 12", (1, 1, 1, 1), equal, None, 3 * f),
        *((f"pipedream {v}", (1, 1, 1, 1), equal, v, 3.1 * f) for v in ("stash", "vertical", "none")),
        ("pipedream 2bw", (1, 1, 1, 1), equal, "2bw", 3.025 * f),
        ("pipedream, slow stage", (1, 1), uneven, "stash", 6.1 * f),
        ("pipedream, slow stage shared", (2, 1), uneven, "stash", 3.05 * f),
    ]
    print(f"{'':<30}{'bound ms':>10}{'emulated ms':>13}{'over bound':>12}{'overruns':>10}")
    for name, shares, costs, versions, bound in rows:
        took = [
            on_ranks(sum(shares), step, schedule_of(shares, versions, m), costs, versions)[0] for m in (SHORT, LONG)
        ]
        each = (took[1][0] - took[0][0]) / (LONG - SHORT) if versions else took[0][0] / SHORT
        overruns = took[0][1] + took[1][1]
        print(f"{name:<30}{1e3 * bound:>10.1f}{1e3 * each:>13.1f}{each / bound - 1:>12.1%}{overruns:>10}", flush=True)


def schedule_of(shares: tuple[int, ...], versions: Versions | None, m: int) -> Schedule:
    if versions is None:
        return build("1f1b", len(shares), m)
    return build("pipedream", sum(shares), m, replicas=shares, group=len(shares) if versions == "2bw" else None)


def step(rank: int, schedule: Schedule, costs: Costs, versions: Versions | None) -> tuple[float, int]:
    """The second of two steps: the first settles shapes. Its makespan in seconds, and what overran."""
    torch.manual_seed(0)
    stages = {s: nn.Linear(WIDTH, WIDTH) for s, ranks in enumerate(schedule.placement) if rank in ranks}
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
        pipeline.step(batch, batch)
    run = recorder.timeline()
    return float(run.makespan), len(run.overruns)


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
