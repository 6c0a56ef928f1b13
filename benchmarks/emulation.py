"""How near an emulated cluster of eight ranks comes to the bubble that was simulated for it.

    python benchmarks/emulation.py [milliseconds]

Every synchronous schedule with 16 microbatches, each of forward, input gradient and weight gradient
taking that long (20 ms unless given); once plain, once with latency and a rank that is half as slow
again. Gradients are real. Late is the longest that a rank's work began after its chosen time:
harmless until it makes an action overrun.
"""

import os
import sys

import torch
import torch.nn.functional as F
from torch import nn

from course_pp.launch import on_ranks
from course_pp.runtime import EmulatedCluster, EmulatedTimeline, Pipeline, Recorder
from course_pp.schedule import Costs, Schedule, Timeline, build, names

N_RANKS, N_MICROBATCHES, WIDTH = 8, 16, 32


def main(milliseconds: float = 20.0) -> None:
    each = milliseconds / 1e3
    clusters = {
        "plain": EmulatedCluster(Costs(each, each, each)),
        "latency, straggler": EmulatedCluster(
            Costs(each, each, each, latency=each / 2), stragglers={3: 1.5}
        ),
    }
    print(
        f"{N_RANKS} ranks on {os.cpu_count()} cores, {N_MICROBATCHES} microbatches,"
        f" {milliseconds:g} ms an action"
    )
    columns = ("simulated", "emulated", "points off", "overruns", "late ms", "real s")
    print(f"{'schedule':<18}{'cluster':<20}" + "".join(f"{name:>11}" for name in columns))
    for name in (name for name in names() if name != "pipedream"):
        schedule = build(name, N_RANKS, N_MICROBATCHES)
        for kind, cluster in clusters.items():
            found = on_ranks(N_RANKS, emulate, schedule, cluster, timeout_s=300.0)[0]
            expected = float(cluster.predict(schedule).bubble_fraction)
            off = 100 * (float(found.bubble_fraction) - expected)
            bubbles = f"{expected:>11.2%}{float(found.bubble_fraction):>11.2%}{off:>11.3f}"
            real = f"{1e3 * max(found.lateness):>11.1f}{float(found.wall.makespan):>11.2f}"
            numbers = f"{bubbles}{len(found.overruns):>11}{real}"
            print(f"{name:<18}{kind:<20}{numbers}  {found.trouble}", flush=True)


def emulate(rank: int, schedule: Schedule, cluster: EmulatedCluster) -> EmulatedTimeline | Timeline:
    """The second of two steps: the first settles shapes."""
    torch.manual_seed(0)
    stages = [nn.Linear(WIDTH, WIDTH) for _ in range(schedule.n_stages)]
    mine = {stage: stages[stage] for stage, ranks in enumerate(schedule.placement) if rank in ranks}
    recorder = Recorder()
    pipeline = Pipeline(schedule, mine, F.mse_loss, recorder=recorder, cluster=cluster)
    batch = torch.randn(4 * N_MICROBATCHES, WIDTH)
    for _ in range(2):
        recorder.clear()
        pipeline.step(batch, target=batch)
    return recorder.timeline()


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
