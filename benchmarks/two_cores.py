"""How much of two cores a pipeline of two ranks uses: against one process, against the ceiling,
against torch.

    python benchmarks/two_cores.py [repeats]

1F1B on two ranks with m microbatches can be at most 2m/(m + 1) times as fast as one rank that does
all the work: that is 2 · (1 - bubble), with the bubble (p - 1)/(m + p - 1). In each repeat four
steps take turns: the whole model on one rank while the other sleeps, our pipeline, torch's, and
both stages at once with no message between them. Cores that share caches, memory and a power budget
are not two cores, so these stages, which never wait, are the reference: their row says how far the
cores are from two, and each repeat's pipelines are divided by it. All but torch's add weight
gradients up as our stages do (:mod:`course_pp.step.late_weights`), so that our row shows waiting
and messages alone.

Printed are medians of ratios, the interval that holds the true median in 19 of 20 runs, and how far
the quartiles are
apart: a smaller difference says nothing of a single step. Small microbatches show the arithmetic of
    a step, large ones
leave little but waiting. Leave the machine alone meanwhile.
"""

import math
import statistics
import sys

import torch
from runtime_speed import N_MICROBATCHES, Size, in_turn, module_of, time_of, torch_schedule
from torch import nn

from course_pp.launch import on_ranks
from course_pp.runtime import Pipeline
from course_pp.schedule import build
from course_pp.step.late_weights import Fusing

SIZES = (Size(layers=4, width=1024, samples=64), Size(layers=4, width=1024, samples=256))
CEILING = 2 * N_MICROBATCHES / (N_MICROBATCHES + 1)


def main(repeats: int = 60) -> None:
    print(
        f"torch {torch.__version__}, 1F1B on 2 ranks, {N_MICROBATCHES} microbatches, medians of"
        f" {repeats} repeats"
    )
    print(f"ceiling {CEILING:.3f} times as fast as one rank")
    for size in SIZES:
        report(size, on_ranks(2, take_turns, size, repeats, timeout_s=500.0)[0])


def report(size: Size, speedups: dict[str, list[float]]) -> None:
    apart, ours, torchs = (speedups[name] for name in ("apart", "ours", "torch"))
    print(
        f"\n{size.layers} layers a stage of width {size.width}, {size.samples} samples a microbatch"
    )
    print(f"{'':<37}{'median':>8}{'interval':>18}{'quartiles':>11}")
    for name, row in speedups.items():
        print(line(f"{name}: times as fast as one rank", row))
    for name, row in (("ours", ours), ("torch", torchs)):
        reached = [
            speedup / reference * 2 / CEILING for speedup, reference in zip(row, apart, strict=True)
        ]
        print(line(f"{name}: of the ceiling on these cores", reached))
    print(line("ours / torch", [a / b for a, b in zip(ours, torchs, strict=True)]))


def line(what: str, ratios: list[float]) -> str:
    """Return the median, its interval at 95 % by rank order, and the distance of the quartiles."""
    low, middle, high = statistics.quantiles(ratios, method="inclusive")
    # 1.96 standard deviations of a binomial count with probability 1/2
    reach = 0.98 * len(ratios) ** 0.5
    first, last = math.floor(len(ratios) / 2 - reach), math.ceil(len(ratios) / 2 + reach)
    ordered = sorted(ratios)
    interval = f"{ordered[max(first, 0)]:.3f} to {ordered[min(last, len(ratios) - 1)]:.3f}"
    return f"{what:<37}{middle:>8.3f}{interval:>18}{high - low:>11.3f}"


def take_turns(rank: int, size: Size, repeats: int) -> dict[str, list[float]]:
    """Return the speed-ups over one rank, in each repeat: ours, torch's, and the stages apart."""
    modules = [module_of(stage, size) for stage in range(2)]
    batch = torch.randn(size.samples * N_MICROBATCHES, size.width)
    ours = Pipeline(build("1f1b", 2, N_MICROBATCHES), modules[rank], nn.functional.mse_loss)
    theirs = torch_schedule("1f1b", {rank: modules[rank]}, 2)
    arguments = ((batch,), {}) if rank == 0 else ((), {"target": batch})

    def learn(modules: list[nn.Module], x: torch.Tensor) -> None:
        y = x
        with Fusing():
            for module in modules:
                y = module(y)
        (nn.functional.mse_loss(y, x.detach()) / N_MICROBATCHES).backward()

    def alone() -> None:
        if rank == 0:
            for x in batch.chunk(N_MICROBATCHES):
                learn(modules, x)

    inputs = batch.clone().requires_grad_(rank > 0)

    def apart() -> None:
        for x in inputs.chunk(N_MICROBATCHES):
            learn([modules[rank]], x)

    steps = {
        "one": alone,
        "ours": lambda: ours.step(batch, target=batch),
        "torch": lambda: theirs.step(*arguments[0], **arguments[1]),
        "apart": apart,
    }
    speedups: dict[str, list[float]] = {"ours": [], "torch": [], "apart": []}
    for repeat in range(repeats + 2):
        taken = {}
        for name, step in in_turn(list(steps.items()), repeat):
            for module in modules:
                module.zero_grad()
            taken[name] = time_of(step)
        if repeat >= 2:
            for name, row in speedups.items():
                row.append(taken["one"] / taken[name])
    return speedups


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
