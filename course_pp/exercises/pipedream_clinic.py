"""What notebook 06 looks at: hand-written asynchronous training on real ranks, update by update beside one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.nn.functional import mse_loss

from course_pp.exercises.pipedream_steps import PATIENTS, delayed, first_wrong, trained_by
from course_pp.launch import on_ranks

__all__ = ["PATIENTS", "Findings", "examine"]


@dataclass(frozen=True)
class Findings:
    """The weights of a run beside those of delayed gradients in one process.

    Attributes:
        first_wrong: for each stage the first update after which its weights differ; None where all are right.
    """

    first_wrong: tuple[int | None, ...]

    @property
    def equal(self) -> bool:
        """Whether every stage has the right weights after every update."""
        return all(update is None for update in self.first_wrong)

    def __str__(self) -> str:
        if self.equal:
            return "right"
        told = ["right" if update is None else f"from update {update}" for update in self.first_wrong]
        return "wrong, by stage: " + ", ".join(told)


def examine(
    step: Callable[..., Any], replicas: Sequence[int] = (1, 1, 1, 1), momentum: float = 0.9, n_microbatches: int = 8
) -> Findings:
    """Train with a hand-written step on real ranks, and compare the weights after each update with one process.

    Args:
        step: ``step(stage, optimizer, microbatches, targets, loss_fn, link)``.
        replicas: how many ranks share each stage.
        momentum: of SGD.
        n_microbatches: each has an update of its own; replicas share theirs.

    Raises:
        Whatever :func:`course_pp.launch.on_ranks` raises for the step.
    """
    ranks = on_ranks(sum(replicas), trained_by, step, tuple(replicas), (n_microbatches,), momentum, mse_loss)
    expected = delayed(replicas, n_microbatches, momentum)
    firsts = [sum(replicas[:stage]) for stage in range(len(replicas))]
    found = [first_wrong(ranks[rank][0].after, expected[stage]) for stage, rank in enumerate(firsts)]
    return Findings(tuple(found))
