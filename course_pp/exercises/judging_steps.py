"""What hand-written pipeline steps are judged with: a small model, one process's gradients, and what a rank holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_pp.exercises.exercise import Mistake
from course_pp.exercises.lopsided import LopsidedLoss
from course_pp.runtime import Link

__all__ = [
    "MICROBATCHES",
    "TOLERANCE",
    "InputsWatched",
    "Wrong",
    "batch",
    "judge_gradients",
    "layers",
    "microbatch_link",
    "one_process",
    "received_activations",
    "same",
]

MICROBATCHES = {4: (8, 2), 3: (5,), 2: (1, 3)}
"""For each number of ranks, with how many microbatches a step is tried."""
TOLERANCE = 1e-9
_ROWS, _WIDTH, _LAYERS = 3, 4, 4

Wrong = Mapping[tuple[int, str], Tensor]
"""Gradients that differ, by rank and name."""


def microbatch_link() -> Link:
    """What crosses between ranks: one microbatch."""
    return Link((_ROWS, _WIDTH), torch.float64)


def layers() -> nn.Sequential:
    """The model, to be cut into stages of whole blocks."""
    torch.manual_seed(0)
    blocks = (
        nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh(), nn.Linear(_WIDTH, _WIDTH)).double() for _ in range(_LAYERS)
    )
    return nn.Sequential(*blocks)


def batch(m: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of m microbatches."""
    seeded = torch.Generator().manual_seed(m)
    inputs, targets = torch.randn(2, m * _ROWS, _WIDTH, dtype=torch.float64, generator=seeded)
    return inputs, targets


def one_process(m: int) -> dict[str, Tensor]:
    """The gradients of m microbatches in one process, by name."""
    model, (inputs, targets) = layers(), batch(m)
    LopsidedLoss()(model(inputs), targets).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def same(found: Tensor, expected: Tensor) -> bool:
    """Whether a gradient is right but for rounding."""
    return float((found - expected).abs().max()) <= TOLERANCE * float(expected.abs().max())


class InputsWatched(nn.Module):
    """A stage that notes the memory of what it is given."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage, self._most_bytes = stage, 0
        # A storage keeps its Python object for as long as it lives.
        self._storages: WeakSet[torch.UntypedStorage] = WeakSet()

    def note(self, received: Tensor) -> None:
        """Count the memory of an input for as long as it is there."""
        self._storages.add(received.untyped_storage())
        self._most_bytes = max(self._most_bytes, sum(storage.nbytes() for storage in self._storages))

    @property
    def places(self) -> int:
        """Return the most memory that inputs took at once, in units of one input."""
        return self._most_bytes // (_ROWS * _WIDTH * torch.float64.itemsize)


_FACTORIES = [
    *((torch, f"{name}{suffix}") for name in ("empty", "zeros", "ones", "full") for suffix in ("", "_like")),
    *((Tensor, f"new_{name}") for name in ("empty", "zeros", "ones", "full")),
]


@contextmanager
def received_activations(source: int, note: Callable[[Tensor], None]) -> Iterator[None]:
    """Call ``note`` with each tensor into which a message of rank ``source`` is received in the block.

    And with each that `torch.empty` and its like make before the first message: it is there to be received into, used
    or not.
    """
    recv, received = dist.ProcessGroup.recv, False

    def noted(self: Any, tensors: list[Tensor], peer: int, *args: Any, **kwargs: Any) -> Any:
        nonlocal received
        received = True
        if peer == source:
            for tensor in tensors:
                note(tensor)
        return recv(self, tensors, peer, *args, **kwargs)

    def noting(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @wraps(make)
        def made(*args: Any, **kwargs: Any) -> Tensor:
            tensor = make(*args, **kwargs)
            if not received:
                note(tensor)
            return tensor

        return made

    # No TorchFunctionMode: of a rank that waits in `dist.recv`, its line would be told instead of the learner's.
    with ExitStack() as patches:
        for owner, name in _FACTORIES:
            patches.enter_context(patch.object(owner, name, noting(getattr(owner, name))))
        patches.enter_context(patch.object(dist.ProcessGroup, "recv", noted))
        yield


def judge_gradients(
    where: str,
    ranks: Sequence[Mapping[str, Tensor | None]],
    expected: Mapping[str, Tensor],
    why_missing: str,
    why_wrong: Callable[[Wrong], str],
) -> None:
    """Refuse gradients that are not those of one process.

    Args:
        where: on how many ranks, with how many microbatches.
        ranks: for each its gradients by name; None where there is none.
        expected: those of one process.
        why_missing: the likely cause of a gradient that is not there.
        why_wrong: gives that of gradients that differ.

    Raises:
        Mistake: with a table of what differs.
    """
    wrong = {}
    for rank, gradients in enumerate(ranks):
        for name, gradient in gradients.items():
            if gradient is None:
                raise Mistake(f"{where}, `{name}` on rank {rank} has no gradient.", why_missing)
            if not same(gradient, expected[name]):
                wrong[rank, name] = gradient
    if not wrong:
        return
    table = "\n".join(
        f"rank {rank}: {', '.join(name for r, name in wrong if r == rank) or 'none'}" for rank in range(len(ranks))
    )
    symptom = f"{where}, {len(wrong)} of {len(expected)} gradients differ from those of one process."
    raise Mistake(symptom, why_wrong(wrong), f"These differ:\n{table}")
