"""What ZB-H1 gains over 1F1B on this machine, and what splitting the backward costs it.

    python benchmarks/zero_bubble.py [repeats]

Two real ranks, each with a stage of linear layers wide enough to be bound by arithmetic. Steps of
three orders take
turns: 1F1B; 1F1B with each backward split into I and W, done one right after the other (the same
    order, so the
difference is what splitting costs, less what it gains as gradients leave sooner); and ZB-H1.
Printed are the medians of their ratios to 1F1B's step in the same round, beside what equal F, I and
W predict. Ratios of two ranks that share a core say nothing: leave the machine alone, and compare
nothing across runs.
"""

import statistics
import sys
from functools import partial

import torch
from runtime_speed import in_turn, time_of
from torch import nn

from course_pp.exercises.zero_bubble import time_halves
from course_pp.launch import on_ranks
from course_pp.runtime import Pipeline
from course_pp.schedule import Action, Schedule, build, simulate

N_RANKS = 2
LAYERS, WIDTH, ROWS = 3, 1024, 128


def main(repeats: int = 30) -> None:
    halves = time_halves(stage_of(0), torch.randn(ROWS, WIDTH))
    shown = ", ".join(f"{kind} {1e3 * seconds:.1f} ms" for kind, seconds in halves.items())
    print(
        f"torch {torch.__version__}, {N_RANKS} ranks; a stage alone: {shown}; (I + W) / B ", end=""
    )
    print(f"{(halves['I'] + halves['W']) / halves['B']:.2f}")
    print(f"{'m':>3}  {'order':<14}{'ms':>8}{'of 1f1b':>10}{'quartiles':>14}{'predicted':>11}")
    for m in (2, 4, 8):
        orders = orders_of(m)
        seconds = on_ranks(N_RANKS, take_turns, orders, repeats, timeout_s=300.0)[0]
        whole = float(simulate(orders[0]).makespan)
        for order, row in zip(orders, seconds, strict=True):
            ratios = [mine / base for mine, base in zip(row, seconds[0], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else 3 * ratios
            predicted = float(simulate(order).makespan) / whole
            name, milliseconds = order.name, 1e3 * statistics.median(row)
            print(
                f"{m:>3} "
                f" {name:<14}{milliseconds:>8.1f}{middle:>10.2f}{low:>8.2f}–{high:.2f}{predicted:>11.2f}"
            )


def orders_of(m: int) -> list[Schedule]:
    """1F1B, the same with split backwards, and ZB-H1."""
    whole = build("1f1b", N_RANKS, m)
    rows = [[part for action in row for part in action.parts] for row in whole.actions]
    split = tuple(tuple(half for action in row for half in halves_of(action)) for row in rows)
    return [whole, Schedule("1f1b, split", whole.placement, split), build("zb_h1", N_RANKS, m)]


def halves_of(action: Action) -> list[Action]:
    if action.kind != "B":
        return [action]
    return [Action(action.stage, kind, action.microbatch) for kind in "IW"]


def take_turns(rank: int, orders: list[Schedule], repeats: int) -> list[list[float]]:
    """Seconds of each repeat of each order, from the first rank's start to the last rank's end."""
    module = stage_of(rank)
    pipelines = [Pipeline(order, {rank: module}, nn.functional.mse_loss) for order in orders]
    batch = torch.randn(ROWS * orders[0].n_microbatches, WIDTH)
    inputs, targets = batch if rank == 0 else None, batch if rank == N_RANKS - 1 else None
    seconds: list[list[float]] = [[] for _ in orders]
    for repeat in range(repeats + 2):
        for pipeline, row in in_turn(list(zip(pipelines, seconds, strict=True)), repeat):
            module.zero_grad()
            lasted = time_of(partial(pipeline.step, inputs, target=targets))
            if repeat >= 2:
                row.append(lasted)
    return seconds


def stage_of(rank: int) -> nn.Module:
    torch.manual_seed(rank)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS))
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
