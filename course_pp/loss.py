"""The mean loss of a batch, put together from its microbatches. A loss is divided here and nowhere else.

The mean of the microbatches' means is the mean of the batch only if all of them average over equally many tokens. So
each microbatch adds its sum over the divisor, which is the same for all: the number of all tokens of the batch.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from course_pp.arguments import checked

LossFn = Callable[[Any, Any], Tensor]
"""``loss_fn(output, target)``: a scalar, the mean loss of one microbatch."""


@runtime_checkable
class TokenLoss(Protocol):
    """A loss that averages over tokens and can say over how many, so that unequal microbatches are weighted right."""

    def total(self, output: Any, target: Any) -> Tensor:
        """Return the sum of the loss over the tokens of ``target`` that count; a scalar."""

    def count(self, target: Any) -> Tensor:
        """Return the number of tokens of ``target`` that count; a scalar."""


class Share(NamedTuple):
    """What a microbatch adds to the mean loss of its batch: ``value`` times ``weight``.

    The product needs no place in autograd's graph: backward begins at ``value``, with ``weight`` as its gradient.
    """

    value: Tensor
    weight: Tensor

    def product(self) -> Tensor:
        """Return a scalar without a graph."""
        return self.value.detach() * self.weight


@dataclass(frozen=True)
class _OverSamples:
    """A mean over samples, seen as a :class:`TokenLoss`: each sample is a token."""

    loss_fn: LossFn
    samples: Callable[[Any], int]

    def total(self, output: Any, target: Any) -> Tensor:
        return self.mean(output, target) * self.samples(target)

    def mean(self, output: Any, target: Any) -> Tensor:
        return _scalar(self.loss_fn(output, target))

    def count(self, target: Any) -> Any:
        return self.samples(target)


@checked
def counted(loss_fn: LossFn | TokenLoss, samples: Callable[[Any], int] = len) -> TokenLoss:
    """Return ``loss_fn`` if it counts its tokens; else the same mean as a loss that counts ``samples`` of a target."""
    if isinstance(loss_fn, type):  # it can be called, but returns a loss function
        raise TypeError(f"loss_fn is the class {loss_fn.__name__}: pass an instance, such as {loss_fn.__name__}()")
    if isinstance(loss_fn, TokenLoss):
        return loss_fn
    if not callable(loss_fn):
        raise TypeError(
            f"loss_fn is {loss_fn!r}: pass a function of (output, target) that returns the mean loss, or a TokenLoss"
        )
    return _OverSamples(loss_fn, samples)


def divisor_of(
    loss: TokenLoss,
    targets: Iterable[Any],
    given: float | None,
    groups: Sequence[dist.ProcessGroup],
    device: torch.device | None = None,
) -> Tensor | float:
    """Return the divisor of the microbatches' sums; a collective of ``groups`` unless it is ``given``.

    Data-parallel ranks average their gradients, so it is the tokens of the global batch over the number of these ranks.

    Args:
        given: the tokens of the global batch, if the caller knows them.
        groups: those over which gradients are averaged.
    """
    if given is not None:
        return given / math.prod(dist.get_world_size(group) for group in groups)
    count = sum(loss.count(target) for target in targets)
    if not groups and not isinstance(count, Tensor):
        return float(max(count, 1))
    count = average_over(groups, torch.as_tensor(count, dtype=torch.float64, device=device).clone())
    return torch.where(count > 0, count, 1.0)


def average_over(groups: Iterable[dist.ProcessGroup], value: Tensor) -> Tensor:
    """Return ``value``, changed in place to its mean over the ranks of all ``groups``; a collective."""
    for group in groups:
        dist.all_reduce(value, group=group)
        value /= dist.get_world_size(group)
    return value


def loss_share(loss: TokenLoss, output: Any, target: Any, divisor: Tensor | float) -> Tensor:
    """Return what a microbatch adds to the mean loss of its batch, a scalar.

    Args:
        divisor: the sum of ``loss.count`` over all microbatches whose gradients add up, at least 1.
    """
    return _scalar(loss.total(output, target)) / divisor


def share_of(loss: TokenLoss, output: Any, target: Any, divisor: Tensor | float) -> Share:
    """As :func:`loss_share`, with the division left to backward and to :meth:`Share.product`."""
    if isinstance(loss, _OverSamples):
        value, counts = loss.mean(output, target), loss.count(target)
    else:
        value, counts = _scalar(loss.total(output, target)), 1
    # A count of errors may be a whole number, its weight is none.
    dtype = value.dtype if value.is_floating_point() else torch.get_default_dtype()
    if isinstance(divisor, Tensor):
        return Share(value, (counts / divisor.double()).to(value.device, dtype))
    return Share(value, torch.full_like(value, counts / divisor, dtype=dtype))


def _scalar(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.dim():
        shape = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"loss_fn returned {shape}: return a scalar tensor, the mean over the microbatch")
    return loss
