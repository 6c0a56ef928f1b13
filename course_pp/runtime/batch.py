"""A batch as microbatches, and the loss of the batch as shares of its microbatches."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from course_pp.runtime.payload import map_tensors, tensors_of

__all__ = ["LossFn", "TokenLoss", "loss_shares", "split"]

LossFn = Callable[[Any, Any], Tensor]
"""``loss_fn(output, target)``: a scalar, the mean loss of one microbatch."""


@runtime_checkable
class TokenLoss(Protocol):
    """A loss that averages over tokens and can say over how many, so that unequal microbatches are weighted right."""

    def total(self, output: Any, target: Any) -> Tensor:
        """Sum of the loss over the tokens of ``target`` that count; a scalar."""

    def count(self, target: Any) -> Tensor:
        """Number of tokens of ``target`` that count; a scalar."""


def split(name: str, batch: Any, n: int) -> Sequence[Any]:
    """``batch`` as ``n`` microbatches.

    A list holds the microbatches already, which may differ in size and shape. Tensors (also in tuples and dicts) are
    cut along their first dimension, as evenly as possible.

    Raises:
        ValueError: for a list of another length, a batch without tensors, or one of fewer than ``n`` samples.
    """
    if isinstance(batch, list):
        if len(batch) != n:
            raise ValueError(f"{name} is a list of {len(batch)} microbatches, but the schedule has {n}: give {n}")
        return batch
    tensors = tensors_of(batch)
    if not tensors:
        raise ValueError(f"{name} is {batch!r} on a rank that needs it: give a batch, or a list of {n} microbatches")
    sizes = {len(tensor) if tensor.dim() else 0 for tensor in tensors}
    if len(sizes) > 1 or min(sizes) < n:
        raise ValueError(
            f"{name} has tensors of {', '.join(map(str, sorted(sizes)))} samples, to be cut into {n} microbatches: "
            f"give tensors of the same first dimension, at least {n}, or a list of {n} microbatches"
        )
    pieces = [tensor.tensor_split(n) for tensor in tensors]
    return [_piece(batch, pieces, i) for i in range(n)]


def _piece(batch: Any, pieces: Sequence[Sequence[Tensor]], index: int) -> Any:
    numbered = iter(pieces)
    return map_tensors(lambda _: next(numbered)[index], batch)


def loss_shares(loss_fn: LossFn, targets: Sequence[Any]) -> Callable[[int, Any], Tensor]:
    """A function that gives microbatch i's share of the batch's loss from i and the output; the shares add up to it.

    Dividing happens here and nowhere else. The mean of a :class:`TokenLoss` is over the counted tokens of all
    microbatches; any other mean is over samples (the first dimension of the targets), which for equal microbatches is
    the factor 1/m.
    """
    if isinstance(loss_fn, TokenLoss):
        counted = sum(loss_fn.count(target) for target in targets)
        divisor = torch.as_tensor(counted).clamp(min=1)
        return lambda i, output: _scalar(loss_fn.total(output, targets[i])) / divisor
    sizes = [_samples(target) for target in targets]
    if not sum(sizes):
        raise ValueError(f"targets has no samples in any of {len(sizes)} microbatches: give at least one")
    weights = [size / sum(sizes) for size in sizes]
    return lambda i, output: _scalar(loss_fn(output, targets[i])) * weights[i]


def _samples(target: Any) -> int:
    tensors = tensors_of(target)
    return len(tensors[0]) if tensors and tensors[0].dim() else 1


def _scalar(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.dim():
        shape = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"loss_fn returned {shape}: return a scalar tensor, the mean over the microbatch")
    return loss
