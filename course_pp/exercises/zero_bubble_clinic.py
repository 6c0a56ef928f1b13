"""What notebook 05 looks at: a step of ZB-H1 on real ranks, its gradients and its norm beside one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from course_pp.exercises.zero_bubble_steps import PATIENTS, gradient_norm
from course_pp.launch import on_ranks
from course_pp.runtime import Link, partition_model

__all__ = ["PATIENTS", "Findings", "examine", "gradient_norm"]

Step = Callable[..., float]
_ROWS, _WIDTH = 8, 16


@dataclass(frozen=True)
class Findings:
    """A step's gradients and norm beside those of one process.

    Attributes:
        by_rank: for each rank its parameters, by name in the whole model, and whether their gradients are right.
        norm: what the step returned on the last rank.
        norm_of_one: that of one process.
    """

    by_rank: tuple[Mapping[str, bool], ...]
    norm: float
    norm_of_one: float

    def __str__(self) -> str:
        lines = [f"norm {self.norm:.6f}, one process {self.norm_of_one:.6f}; gradients:"]
        for rank, found in enumerate(self.by_rank):
            wrong = [name for name, right in found.items() if not right]
            listed = f": {', '.join(wrong)}" if wrong else ""
            lines.append(f"  rank {rank}: {len(found) - len(wrong)} right, {len(wrong)} wrong{listed}")
        return "\n".join(lines)


def examine(step: Step, n_ranks: int = 4, n_microbatches: int = 8, timeout_s: float = 60.0) -> Findings:
    """Run a hand-written step on real ranks, and compare each gradient, and the norm, with one process.

    Args:
        step: ``step(stage, microbatches, targets, loss_fn, link)``; returns the norm of all gradients.
        n_ranks: one stage on each.
        n_microbatches: equal ones.
        timeout_s: the longest that the step may take.

    Raises:
        Whatever :func:`course_pp.launch.on_ranks` raises for the step.
    """
    ranks = on_ranks(n_ranks, _stepped, step, n_microbatches, timeout_s=timeout_s)
    model, (inputs, targets) = _model(), _batch(n_microbatches)
    mse_loss(model(inputs), targets).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    found = tuple({name: _is(g, expected[name]) for name, g in gradients.items()} for _, gradients in ranks)
    return Findings(found, ranks[-1][0], gradient_norm(model))


def _stepped(rank: int, step: Step, m: int) -> tuple[float, dict[str, Tensor | None]]:
    stage, (inputs, targets) = partition_model(_model(), dist.get_world_size(), rank), _batch(m)
    link = Link((_ROWS, _WIDTH), torch.float64)
    norm = step(stage, inputs.chunk(m), targets.chunk(m), mse_loss, link)
    return norm, {name: parameter.grad for name, parameter in stage.named_parameters()}


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(_WIDTH, 2 * _WIDTH), nn.GELU(), nn.Linear(2 * _WIDTH, _WIDTH)) for _ in range(4))
    return nn.Sequential(*blocks).double()


def _batch(m: int) -> tuple[Tensor, Tensor]:
    seeded = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(2, _ROWS * m, _WIDTH, dtype=torch.float64, generator=seeded)
    return inputs, targets


def _is(gradient: Tensor | None, expected: Tensor | None) -> bool:
    return gradient is not None and expected is not None and torch.allclose(gradient, expected, rtol=1e-9, atol=1e-12)
