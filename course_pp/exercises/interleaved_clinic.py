"""What notebook 04 looks at: an interleaved step on real ranks, chunk by chunk beside one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from course_pp.exercises.interleaved_steps import PATIENTS, Finding, compared, of_one_process, stepped
from course_pp.launch import on_ranks

__all__ = ["PATIENTS", "Findings", "examine"]

_N_CHUNKS = 2


@dataclass(frozen=True)
class Findings:
    """A step's gradients beside those of one process.

    Attributes:
        by_chunk: what became of the gradients of each chunk, by rank and chunk.
        loss: that the step returned on the last rank; None if it returned none.
        loss_of_one: that of one process.
    """

    by_chunk: Mapping[tuple[int, int], Finding]
    loss: float | None
    loss_of_one: float

    @property
    def equal(self) -> bool:
        """Whether every gradient is that of one process."""
        return set(self.by_chunk.values()) == {"right"}

    def __str__(self) -> str:
        loss = "no loss returned" if self.loss is None else f"loss {self.loss:.4f}"
        rows = [
            f"  chunk {c}: " + ", ".join(f"{found:5}" for (_, chunk), found in self.by_chunk.items() if chunk == c)
            for c in sorted({chunk for _, chunk in self.by_chunk})
        ]
        ranks = (
            f"{loss}, one process {self.loss_of_one:.4f}; gradients on ranks 0 to {max(r for r, _ in self.by_chunk)}:"
        )
        return "\n".join([ranks, *(row.rstrip() for row in rows)])


def examine(step: Callable[..., Any], n_ranks: int = 4, n_microbatches: int = 8) -> Findings:
    """Run a hand-written step with two chunks a rank on real ranks, and compare each gradient with one process.

    Args:
        step: ``step(chunks, order, microbatches, targets, loss_fn, ring)``; returns the loss on the last rank.
        n_ranks: with two chunks each.
        n_microbatches: equal ones.

    Raises:
        Whatever :func:`course_pp.launch.on_ranks` raises for the step.
    """
    ranks = on_ranks(n_ranks, stepped, step, _N_CHUNKS, n_microbatches, nn.MSELoss(), 16)
    loss, expected = of_one_process(_N_CHUNKS * n_ranks, n_microbatches, nn.MSELoss(), 16)
    gradients = {chunk: named for rank, _ in ranks for chunk, named in rank.items()}
    returned = ranks[-1][1]
    return Findings(compared(gradients, expected), float(returned) if isinstance(returned, Tensor) else None, loss)
