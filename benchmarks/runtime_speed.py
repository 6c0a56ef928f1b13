"""Our executor against the schedule classes of the installed torch: same model, same order of
actions, same processes.

    python benchmarks/runtime_speed.py [repeats]

For each schedule, number of ranks and width, the steps of torch, of ours and of ours with the
recorder on take turns; printed are the medians of their ratios to torch's. A step lasts from the
first rank's start to the last rank's end. Leave the machine alone meanwhile, and compare nothing
across runs. Torch's V schedules need torch 2.12.
"""

import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

from course_pp.launch import on_ranks
from course_pp.runtime import Pipeline, Recorder
from course_pp.schedule import build

T = TypeVar("T")

N_MICROBATCHES = 8
SCHEDULES = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved_1f1b": pipelining.ScheduleInterleaved1F1B,
    "zb_v": pipelining.ScheduleZBVZeroBubble,
}


class Size(NamedTuple):
    layers: int  # a stage
    width: int
    samples: int  # a microbatch


SIZES = {"messages": Size(1, 64, 8), "arithmetic": Size(2, 1024, 64)}


def main(repeats: int = 100) -> None:
    print(
        f"torch {torch.__version__}, {N_MICROBATCHES} microbatches, medians of {repeats}"
        " interleaved repeats"
    )
    for bound, size in SIZES.items():
        print(f"\nbound by {bound}: {size}")
        titles = f"{'torch ms':>10}{'ours ms':>10}{'ours/torch':>12}{'recorded/torch':>16}"
        print(f"{'ranks':>6}  {'schedule':<18}{titles}")
        ratios = []
        costs = []
        for n_ranks in (2, 4):
            for name in SCHEDULES:
                torchs, ours, recorded = on_ranks(
                    n_ranks, take_turns, name, size, repeats, timeout_s=500.0
                )[0]
                ratio = statistics.median(a / b for a, b in zip(ours, torchs, strict=True))
                cost = statistics.median(a / b for a, b in zip(recorded, torchs, strict=True))
                ratios.append(ratio)
                costs.append(cost)
                times = f"{statistics.median(torchs) * 1e3:>10.1f}"
                times += f"{statistics.median(ours) * 1e3:>10.1f}"
                print(f"{n_ranks:>6}  {name:<18}{times}{ratio:>12.2f}{cost:>16.2f}", flush=True)
        print(
            f"{'geometric mean':<46}{geometric_mean(ratios):>12.2f}{geometric_mean(costs):>16.2f}",
            flush=True,
        )


def take_turns(rank: int, name: str, size: Size, repeats: int) -> list[list[float]]:
    """Seconds of each repeat: torch's, ours, ours recorded."""
    schedule = build(name, dist.get_world_size(), N_MICROBATCHES)
    here = [stage for stage, ranks in enumerate(schedule.placement) if rank in ranks]
    modules = {stage: module_of(stage, size) for stage in here}
    batch = torch.randn(size.samples * N_MICROBATCHES, size.width)
    inputs = batch if 0 in here else None
    target = batch if schedule.n_stages - 1 in here else None

    theirs = torch_schedule(name, modules, schedule.n_stages)
    recorder = Recorder()
    ours = Pipeline(schedule, modules, nn.functional.mse_loss)
    recorded = Pipeline(schedule, modules, nn.functional.mse_loss, recorder=recorder)
    steps: list[Callable[[], object]] = [
        lambda: theirs.step(
            *(() if inputs is None else (inputs,)), **({} if target is None else {"target": target})
        ),
        lambda: ours.step(inputs, target=target),
        lambda: recorded.step(inputs, target=target),
    ]
    seconds: list[list[float]] = [[], [], []]
    for repeat in range(repeats + 2):
        for row, step in in_turn(list(zip(seconds, steps, strict=True)), repeat):
            for module in modules.values():
                module.zero_grad()
            lasted = time_of(step)
            if repeat >= 2:
                row.append(lasted)
        recorder.clear()
    return seconds


def in_turn(steps: list[T], repeat: int) -> list[T]:
    """Return the steps in turn: a step leaves its caches to the next, so each comes first once."""
    first = repeat % len(steps)
    return steps[first:] + steps[:first]


def module_of(stage: int, size: Size) -> nn.Module:
    torch.manual_seed(stage)
    layers = []
    for _ in range(size.layers):
        layers.append(nn.Sequential(nn.Linear(size.width, size.width), nn.ReLU()))
    return nn.Sequential(*layers)


def torch_schedule(name: str, modules: dict[int, nn.Module], n_stages: int) -> Any:
    stages = [
        pipelining.PipelineStage(m, stage, n_stages, torch.device("cpu"))
        for stage, m in modules.items()
    ]
    return SCHEDULES[name](
        stages if len(stages) > 1 else stages[0], N_MICROBATCHES, loss_fn=nn.functional.mse_loss
    )


def time_of(step: Callable[[], object]) -> float:
    dist.barrier()
    start = time.monotonic_ns()
    step()
    times = torch.tensor([-start, time.monotonic_ns()])
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return (times.sum() / 1e9).item()


def geometric_mean(values: list[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
