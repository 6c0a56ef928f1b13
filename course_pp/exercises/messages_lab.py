"""What the ranks of notebook 00 run: a ring that sends in an order, and sums whose parts can be told apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from course_pp.exercises.ranks_and_messages import all_gather

__all__ = ["added_up", "contributions", "even_ranks_send_first"]

Half = Callable[[Sequence[Tensor], int, int], object]
"""One half of a ring all-reduce: ``half(chunks, rank, p)`` changes ``chunks`` in place."""


def even_ranks_send_first(rank: int) -> int:
    """Send this rank's number to the right with blocking sends, odd ranks receiving first; return what came."""
    p = dist.get_world_size()
    mine, theirs = torch.tensor([rank]), torch.empty(1, dtype=torch.int64)
    right, left = (rank + 1) % p, (rank - 1) % p
    if rank % 2 == 0:
        dist.send(mine, dst=right)
        dist.recv(theirs, src=left)
    else:
        dist.recv(theirs, src=left)
        dist.send(mine, dst=right)
    return int(theirs)


def contributions(rank: int, *halves: Half) -> list[int]:
    """Run halves of a ring all-reduce in which rank r contributes 10^r to each chunk; return the chunks.

    So 111 is the complete sum of three ranks, and 101 lacks the part of rank 1.
    """
    p = dist.get_world_size()
    x = torch.full((p,), 10**rank)
    for half in halves:
        half(x.tensor_split(p), rank, p)
    return x.tolist()


def added_up(rank: int, n_bytes: int, reduce_scatter: Callable[[Sequence[Tensor], int, int], int]) -> tuple[bool, int]:
    """All-reduce a float32 tensor in a ring: the half given, then the course's own all-gather.

    Returns:
        Whether the sum is that of ``dist.all_reduce``, and the bytes that this rank sent. The entries are small whole
        numbers, whose sums are exact in any order.
    """
    p = dist.get_world_size()
    x = torch.arange(n_bytes // 4, dtype=torch.float32) % 1000 * (rank + 1)
    total = x.clone()
    chunks = total.tensor_split(p)
    sent = reduce_scatter(chunks, rank, p) + all_gather(chunks, rank, p)
    dist.all_reduce(x)
    return torch.equal(total, x), sent
