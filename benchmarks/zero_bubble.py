"""The gain of ZB-H1 over 1F1B on this machine, and the cost of splitting the backward.

    python benchmarks/zero_bubble.py [repeats]

Two real ranks each have a stage of linear layers, wide enough to be bound by arithmetic. Steps of
three orders take turns: 1F1B; 1F1B with each backward split into I and W, one right after the
other; and ZB-H1. The second has the order of the first, so they differ by the cost of splitting,
less the gain of gradients that leave sooner.

The table has the medians of the ratios to 1F1B's step in the same round, beside the prediction for
equal F, I and W. Ratios of two ranks that share a core say nothing: leave the machine alone, and
compare nothing across runs.
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
LAYERS = 3
WIDTH = 1024
ROWS = 128


def main(repeats: int = 30) -> None:
    halves = time_halves()
    shown = ", ".join(f"{kind} {1e3 * seconds:.1f} ms" for kind, seconds in halves.items())
    split = (halves["I"] + halves["W"]) / halves["B"]
    print(f"torch {torch.__version__}, {N_RANKS} ranks")
    print(f"a transformer block alone: {shown}; (I + W) / B {split:.2f}")
    print(f"{'m':>3}  {'order':<14}{'ms':>8}{'of 1f1b':>10}{'quartiles':>14}{'predicted':>11}")
    for m in (2, 4, 8):
        orders = orders_of(m)
        seconds = on_ranks(N_RANKS, take_turns, orders, repeats, timeout_s=300.0)[0]
        whole = float(simulate(orders[0]).makespan)
        for order, row in zip(orders, seconds, strict=True):
            ratios = [mine / base for mine, base in zip(row, seconds[0], strict=True)]
            low = middle = high = ratios[0]
            if len(ratios) > 1:
                low, middle, high = statistics.quantiles(ratios, n=4)
            predicted = float(simulate(order).makespan) / whole
            measured = f"{1e3 * statistics.median(row):>8.1f}{middle:>10.2f}{low:>8.2f}–{high:.2f}"
            print(f"{m:>3}  {order.name:<14}{measured}{predicted:>11.2f}")


def orders_of(m: int) -> list[Schedule]:
    """Return 1F1B, the same with split backwards, and ZB-H1."""
    whole = build("1f1b", N_RANKS, m)
    rows = []
    for row in whole.actions:
        actions: list[Action] = []
        for action in row:
            for part in action.parts:
                kinds = "IW" if part.kind == "B" else part.kind
                actions += [Action(part.stage, kind, part.microbatch) for kind in kinds]
        rows.append(tuple(actions))
    split = Schedule("1f1b, split", whole.placement, tuple(rows))
    return [whole, split, build("zb_h1", N_RANKS, m)]


def take_turns(rank: int, orders: list[Schedule], repeats: int) -> list[list[float]]:
    """Return the seconds of each repeat of each order, from the first start to the last end."""
    module = stage_of(rank)
    pipelines = [Pipeline(order, {rank: module}, nn.functional.mse_loss) for order in orders]
    batch = torch.randn(ROWS * orders[0].n_microbatches, WIDTH)
    inputs = batch if rank == 0 else None
    targets = batch if rank == N_RANKS - 1 else None
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
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)]
    return nn.Sequential(*layers)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
