"""How much of two cores a pipeline of two ranks uses: against one process, against the ceiling, against torch.

    python benchmarks/two_cores.py [repeats]

1F1B on two ranks with m microbatches can be at most 2m/(m + 1) times as fast as one rank that does all the work: that
is 2 · (1 - bubble), with the bubble (p - 1)/(m + p - 1). Each repeat runs the whole model on one rank while the other
sleeps, then the pipeline, then torch's, then both stages at once with no message between them: cores that share caches,
memory and a power budget are not two cores. These stages never wait, so they are the reference: their row says how far
the cores are from two, and each repeat's pipelines are divided by it. Printed are medians of ratios, and in brackets
how far their quartiles are apart: a smaller difference says nothing. Leave the machine alone meanwhile.
"""

import statistics
import sys

import torch
from runtime_speed import N_MICROBATCHES, Size, module_of, time_of, torch_schedule
from torch import nn

from course_pp.launch import on_ranks
from course_pp.runtime import Pipeline
from course_pp.schedule import build

SIZE = Size(layers=4, width=1024, samples=256)


def main(repeats: int = 30) -> None:
    speedups = on_ranks(2, take_turns, repeats, timeout_s=500.0)[0]
    ceiling = 2 * N_MICROBATCHES / (N_MICROBATCHES + 1)
    apart = speedups.pop("apart")
    print(f"torch {torch.__version__}, 1F1B on 2 ranks, {N_MICROBATCHES} microbatches, medians of {repeats} repeats")
    print(f"{SIZE.layers} layers a stage of width {SIZE.width}, {SIZE.samples} samples a microbatch")
    print(f"{'ceiling':<14}{ceiling:>8.3f}   times as fast as one rank")
    print(
        f"{'apart':<14}{median(apart)}   times as fast: two stages side by side that never wait; two cores would be 2"
    )
    for name, row in speedups.items():
        reached = [speedup / reference * 2 / ceiling for speedup, reference in zip(row, apart, strict=True)]
        print(f"{name:<14}{median(row)}   times as fast;{median(reached)} of the ceiling on these cores")
    ours_over_torch = [ours / torchs for ours, torchs in zip(speedups["ours"], speedups["torch"], strict=True)]
    print(f"{'ours / torch':<14}{median(ours_over_torch)}   in the same repeat")


def median(ratios: list[float]) -> str:
    """The median, and how far the quartiles are apart."""
    low, middle, high = statistics.quantiles(ratios, method="inclusive")
    return f"{middle:>8.3f} ({high - low:.3f})"


def take_turns(rank: int, repeats: int) -> dict[str, list[float]]:
    """How many times as fast as one rank ours, torch's and the stages apart were, in each repeat."""
    modules = [module_of(stage, SIZE) for stage in range(2)]
    batch = torch.randn(SIZE.samples * N_MICROBATCHES, SIZE.width)
    ours = Pipeline(build("1f1b", 2, N_MICROBATCHES), modules[rank], nn.functional.mse_loss)
    theirs = torch_schedule("1f1b", {rank: modules[rank]}, 2)
    arguments = ((batch,), {}) if rank == 0 else ((), {"target": batch})

    def alone() -> None:
        if rank == 0:
            for x in batch.chunk(N_MICROBATCHES):
                (nn.functional.mse_loss(modules[1](modules[0](x)), x) / N_MICROBATCHES).backward()

    inputs = batch.clone().requires_grad_(rank > 0)

    def apart() -> None:
        for x in inputs.chunk(N_MICROBATCHES):
            (nn.functional.mse_loss(modules[rank](x), x.detach()) / N_MICROBATCHES).backward()

    speedups: dict[str, list[float]] = {"ours": [], "torch": [], "apart": []}
    for repeat in range(repeats + 2):
        steps = {
            "one": alone,
            "ours": lambda: ours.step(batch, batch),
            "torch": lambda: theirs.step(*arguments[0], **arguments[1]),
            "apart": apart,
        }
        taken = {}
        for name, step in steps.items():
            for module in modules:
                module.zero_grad()
            taken[name] = time_of(step)
        one = taken.pop("one")
        if repeat >= 2:
            for name, seconds in taken.items():
                speedups[name].append(one / seconds)
    return speedups


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
