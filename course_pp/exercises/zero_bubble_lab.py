"""What notebook 05 measures on the machine at hand, the halves of a backward; and steps strung together."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from course_pp.model import ModelConfig, build_stage_module
from course_pp.runtime.stage import Stage
from course_pp.schedule import Action, Overlap, Schedule

__all__ = ["blocks", "one_after_another", "time_halves"]


def time_halves(module: nn.Module | None = None, x: Tensor | None = None, repeats: int = 15) -> dict[str, float]:
    """Seconds of F, B, I and W of ``module``, medians of ``repeats`` rounds in which they take turns.

    Where a half takes longer than the whole, it prints that this machine was too busy.

    Args:
        module: unless given, one transformer block of width 256.
        x: its input; unless given, 4 sequences of 128 tokens.
        repeats: rounds; two more come before, unmeasured.
    """
    config = ModelConfig(dim=256, n_layers=3, n_heads=4, vocab_size=256)
    module = build_stage_module(config, 1, 3) if module is None else module
    x = torch.randn(4, 128, config.dim) if x is None else x
    stage = Stage(0, module, x.device, False, None)
    gradient = torch.randn_like(stage.evaluate(x, None)[0])
    seconds: dict[str, list[float]] = {kind: [] for kind in "FBIW"}
    for _ in range(repeats + 2):
        for kinds in ("FB", "FIW"):
            given = x.detach().requires_grad_()
            work: dict[str, Callable[[], object]] = {
                "F": lambda: stage.forward(0, given, None, kinds == "FIW"),  # noqa: B023
                "B": lambda: stage.backward(0, (gradient,)),
                "I": lambda: stage.backward_input(0, (gradient,)),
                "W": lambda: stage.backward_weight(0),
            }
            for kind in kinds:
                start = time.perf_counter()
                work[kind]()
                seconds[kind].append(time.perf_counter() - start)
            module.zero_grad()
    medians = {kind: statistics.median(row[2:]) for kind, row in seconds.items()}
    for half in "IW":
        if medians[half] > medians["B"]:
            print(f"This machine was too busy: {half} is a part of B but took longer. Run the cell again.")
    return medians


def blocks(n: int = 8) -> nn.Sequential:
    """A small model of ``n`` equal blocks, which can be cut into stages of one or of several."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(n)))


def one_after_another(schedule: Schedule, n_steps: int = 2) -> Schedule:
    """``n_steps`` steps without a stop between them: each rank begins its next one as soon as it can.

    The microbatches of the second step follow those of the first in number.
    """
    m = schedule.n_microbatches
    rows = tuple(
        tuple(_later(action, step * m) for step in range(n_steps) for action in row) for row in schedule.actions
    )
    return Schedule(f"{schedule.name}, {n_steps} steps", schedule.placement, rows)


def _later(action: Action | Overlap, by: int) -> Action | Overlap:
    parts = [Action(part.stage, part.kind, part.microbatch + by) for part in action.parts]
    return parts[0] if isinstance(action, Action) else Overlap(*parts)
