"""What a rank sends: for graders that count bytes, and that want a collective written out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

_COLLECTIVES = (
    "allgather",
    "allgather_coalesced",
    "allreduce",
    "alltoall",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
    "_allgather_base",
    "_reduce_scatter_base",
)


@dataclass
class Traffic:
    """What this rank has begun to send.

    Attributes:
        sent: (rank it goes to, bytes) for each message, in the order in which they were begun.
        collectives: the collectives it called, by their names in ``ProcessGroup``.
    """

    sent: list[tuple[int, int]] = field(default_factory=list)
    collectives: list[str] = field(default_factory=list)

    @property
    def n_bytes(self) -> int:
        return sum(n_bytes for _, n_bytes in self.sent)


@contextmanager
def watched_traffic() -> Iterator[Traffic]:
    """Note every message and collective that this process begins in the block, over any process group."""
    traffic, group = Traffic(), dist.ProcessGroup
    send = group.send

    def noted_send(self: Any, tensors: list[Any], to: int, *args: Any, **kwargs: Any) -> Any:
        traffic.sent.append((to, sum(tensor.nbytes for tensor in tensors)))
        return send(self, tensors, to, *args, **kwargs)

    def noted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def collective(self: Any, *args: Any, **kwargs: Any) -> Any:
            traffic.collectives.append(name)
            return method(self, *args, **kwargs)

        return collective

    with ExitStack() as patches:
        patches.enter_context(patch.object(group, "send", noted_send))
        for name in _COLLECTIVES:
            if (method := getattr(group, name, None)) is not None:
                patches.enter_context(patch.object(group, name, noted(name, method)))
        yield traffic
