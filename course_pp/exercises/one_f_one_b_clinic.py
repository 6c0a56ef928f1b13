"""What notebook 03 looks at: a step on real ranks, gradient by gradient beside one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from course_pp.exercises.one_f_one_b_steps import PATIENTS
from course_pp.launch import on_ranks
from course_pp.runtime import Link, partition_model

__all__ = ["PATIENTS", "Findings", "batch", "compare", "examine", "whole_model"]

Step = Callable[..., Any]
Finding = Literal["right", "none", "wrong"]
_WIDTH = 64


@dataclass(frozen=True)
class Findings:
    """A step's gradients beside those of one process.

    Attributes:
        by_rank: for each rank its parameters, by name in the whole model, and what became of their gradients.
        loss: the mean loss that the step returned on the last rank; None if it returned none.
        loss_of_one: that of one process.
    """

    by_rank: tuple[Mapping[str, Finding], ...]
    loss: float | None
    loss_of_one: float

    @property
    def equal(self) -> bool:
        """Whether every gradient is that of one process."""
        return all(finding == "right" for found in self.by_rank for finding in found.values())

    def __str__(self) -> str:
        rows = [f"  rank {rank}: {_counted(found)}" for rank, found in enumerate(self.by_rank)]
        loss = "no loss returned" if self.loss is None else f"loss {self.loss:.4f}"
        return "\n".join([f"{loss}, one process {self.loss_of_one:.4f}; gradients:", *rows])


def examine(
    step: Step, n_ranks: int = 4, n_microbatches: int = 8, stagger_s: float = 0.0, timeout_s: float = 60.0
) -> Findings:
    """Run a hand-written step on real ranks, and compare each gradient with one process.

    Args:
        step: as ``train_step_pipeline_1f1b``: ``step(stage, microbatches, targets, loss_fn, link)``.
        n_ranks: one stage on each.
        n_microbatches: equal ones.
        stagger_s: by how much each rank starts later than the one before, as on a busy cluster.
        timeout_s: the longest that the step may take.

    Raises:
        Whatever :func:`course_pp.launch.on_ranks` raises for the step.
    """
    ranks = on_ranks(n_ranks, _stepped, step, n_microbatches, stagger_s, timeout_s=timeout_s)
    return compare(ranks, n_microbatches)


def compare(ranks: Sequence[tuple[Any, Mapping[str, Tensor | None]]], n_microbatches: int) -> Findings:
    """Compare with one process what the ranks return: the loss, or that of each microbatch, and gradients by name."""
    model, (inputs, targets) = whole_model(), batch(n_microbatches)
    loss = mse_loss(model(inputs), targets)
    loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    found = tuple({name: _finding(g, expected[name]) for name, g in gradients.items()} for _, gradients in ranks)
    return Findings(found, _mean(ranks[-1][0]), loss.item())


def _stepped(rank: int, step: Step, m: int, stagger_s: float) -> tuple[float | None, dict[str, Tensor | None]]:
    stage, (inputs, targets) = partition_model(whole_model(), dist.get_world_size(), rank), batch(m)
    link = Link((len(inputs) // m, _WIDTH), torch.float64)
    dist.barrier()
    time.sleep(stagger_s * rank)
    returned = step(stage, inputs.chunk(m), targets.chunk(m), mse_loss, link)
    return _mean(returned), {name: parameter.grad for name, parameter in stage.named_parameters()}


def _mean(returned: Any) -> float | None:
    """The loss of a step that returns one, or one for each microbatch."""
    if isinstance(returned, Sequence) and returned:
        return sum(map(float, returned)) / len(returned)
    return float(returned) if isinstance(returned, Tensor | float) else None


def whole_model() -> nn.Sequential:
    """Eight blocks of four modules each, in float64, the same on every rank."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(8):
        layers += [nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Linear(4 * _WIDTH, _WIDTH), nn.LayerNorm(_WIDTH)]
    return nn.Sequential(*layers).double()


def batch(m: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, 16 rows for each of m microbatches."""
    seeded = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(2, 16 * m, _WIDTH, dtype=torch.float64, generator=seeded)
    return inputs, targets


def _finding(gradient: Tensor | None, expected: Tensor | None) -> Finding:
    if gradient is None or expected is None:
        return "none"
    return "right" if torch.allclose(gradient, expected, rtol=1e-9, atol=1e-12) else "wrong"


def _counted(found: Mapping[str, Finding]) -> str:
    wrong = [name for name, finding in found.items() if finding == "wrong"]
    counts = [f"{list(found.values()).count(kind):2} {kind}" for kind in ("right", "none", "wrong")]
    return ", ".join(counts) + (f" ({wrong[0]})" if len(wrong) == 1 else "")
