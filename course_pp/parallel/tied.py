"""Gradients of a weight that two pipeline stages share: the input embedding and the output head."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

__all__ = ["tied_gradients"]


@contextmanager
def tied_gradients(ends: Sequence[nn.Parameter], peer: int | None, group: dist.ProcessGroup | None) -> Iterator[None]:
    """Give both ends of a tie the sum of the gradients computed inside the ``with`` block.

    Only what the block added is exchanged: gradients accumulated by earlier steps are sums already, and exchanging
    them again would count the peer's share twice. Both ranks compute the same two-term sum, which is exact in either
    order, so weights that started equal stay equal bit by bit.

    Args:
        ends: this rank's ends of the tie: none, one (``peer`` holds the other), or both.
        peer: group rank that holds the other end; None if this rank holds both or none.
    """
    ends = [end for end in ends if end.requires_grad]
    before = [end.grad for end in ends]
    for end in ends:
        end.grad = None
    try:
        yield
        if peer is not None and ends:
            _add(ends[0], _swap(_gradient(ends[0]), peer, group))
        elif len(ends) == 2:
            total = _gradient(ends[0]) + _gradient(ends[1])
            for end in ends:
                end.grad = total.clone()
    finally:
        for end, earlier in zip(ends, before, strict=True):
            if earlier is not None:
                _add(end, earlier)


def _gradient(end: nn.Parameter) -> torch.Tensor:
    return torch.zeros_like(end) if end.grad is None else end.grad


def _add(end: nn.Parameter, other: torch.Tensor) -> None:
    end.grad = other if end.grad is None else end.grad + other


def _swap(mine: torch.Tensor, peer: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The peer's gradient; where both ends are sharded, the peer holds the same rows, and those are exchanged."""
    theirs = torch.empty_like(mine)
    swap = [
        dist.P2POp(dist.isend, _local(mine).contiguous(), group=group, group_peer=peer),
        dist.P2POp(dist.irecv, _local(theirs), group=group, group_peer=peer),
    ]
    for work in dist.batch_isend_irecv(swap):
        work.wait()
    return theirs


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
