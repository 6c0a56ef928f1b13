"""The gradients of schedules on real ranks beside those of one process: what every drawn order has to stand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from course_pp.arguments import checked
from course_pp.launch import on_ranks
from course_pp.schedule import Schedule

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["compare_gradients"]

_MOST_RANKS = 8
_ROWS, _WIDTH = 4, 16


@checked
def compare_gradients(schedules: Sequence[Schedule]) -> tuple[float, ...]:
    """Run one step of each schedule on real ranks, and compare it with one process; prints a line for each.

    The model has a small block for each stage, in float64. Every copy of a stage that lives on several ranks counts.

    Args:
        schedules: of at most 8 ranks each. Those of equally many ranks run on the same ones, one after another.

    Returns:
        For each schedule the largest absolute difference, of all its gradients and of the loss.

    Raises:
        ValueError: for no schedule, for one of more ranks, and for one that the runtime cannot run.
    """
    if not schedules:
        raise ValueError("schedules is empty: give at least one, as in compare_gradients([build('zb_h1', 4, 8)])")
    for schedule in schedules:
        if schedule.n_ranks > _MOST_RANKS:
            raise ValueError(
                f"{schedule.name} has {schedule.n_ranks} ranks: at most {_MOST_RANKS} are started on one machine"
            )
    found: dict[int, tuple[int, float]] = {}
    for n_ranks in sorted({schedule.n_ranks for schedule in schedules}):
        mine = [i for i, schedule in enumerate(schedules) if schedule.n_ranks == n_ranks]
        by_rank = on_ranks(n_ranks, _Steps(tuple(schedules[i] for i in mine)))
        for i, ranks in zip(mine, zip(*by_rank, strict=True), strict=True):
            found[i] = (sum(count for count, _ in ranks), max(difference for _, difference in ranks))
    width = max(len(schedule.name) for schedule in schedules)
    for i, schedule in enumerate(schedules):
        count, difference = found[i]
        size = f"{schedule.n_ranks} rank{'s' if schedule.n_ranks > 1 else ''}"
        print(f"{schedule.name:{width}}  {size}, {count} gradients: at most {difference:.0e} from one process")
    return tuple(found[i][1] for i in range(len(schedules)))


@dataclass(frozen=True)
class _Steps:
    """What each rank does. A class and not a closure: it is sent to the ranks by name."""

    schedules: Sequence[Schedule]

    def __call__(self, rank: int) -> list[tuple[int, float]]:
        """Return for each schedule how many gradients this rank holds, and the largest difference."""
        return [_compared(schedule, rank) for schedule in self.schedules]


def _compared(schedule: Schedule, rank: int) -> tuple[int, float]:
    import torch

    from course_pp.runtime import partition_model, run_step

    model, n = _model(schedule.n_stages), schedule.n_stages
    seeded = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(
        2, _ROWS * schedule.n_microbatches, _WIDTH, dtype=torch.float64, generator=seeded
    ).unbind()
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    stages: Mapping[int, nn.Module] = {
        stage: partition_model(model, n, stage) for stage, ranks in enumerate(schedule.placement) if rank in ranks
    }
    losses, _ = run_step(schedule, dict(stages), inputs, targets, torch.nn.functional.mse_loss)
    differences = [abs(sum(losses) - loss.item())]
    for stage in stages.values():
        for name, parameter in stage.named_parameters():
            differences.append(_difference(parameter.grad, expected[name]))
    return len(differences) - 1, max(differences)


def _difference(found: Tensor | None, expected: Tensor | None) -> float:
    if found is None or expected is None:
        return float("inf")
    return float((found - expected).abs().max())


def _model(n_stages: int) -> nn.Sequential:
    import torch
    from torch import nn

    torch.manual_seed(0)
    blocks = (
        nn.Sequential(nn.Linear(_WIDTH, 2 * _WIDTH), nn.GELU(), nn.Linear(2 * _WIDTH, _WIDTH)) for _ in range(n_stages)
    )
    return nn.Sequential(*blocks).double()
