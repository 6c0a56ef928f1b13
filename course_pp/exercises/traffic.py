"""What a rank sends: for graders that count bytes, and that want a collective written out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast
from unittest.mock import patch

import torch.distributed as dist

from course_pp.exercises.mistakes import Mistake

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


@contextmanager
def last_message_waited_for(rank: int, to: int) -> Iterator[None]:
    """Refuse an answer that returns while its last message to rank ``to`` may still be on its way; none if below 0.

    Without this the verdict is luck: a message whose handle is dropped arrives if its receiver was waiting already.
    Whoever waits for a message knows that all before it to the same rank are taken; so does who joins a collective.

    Raises:
        Mistake: at the end of the block.
    """
    # Of the launcher's own notes, so that none of these functions is in the way where a rank blocks.
    calls = cast(Any, dist.ProcessGroup).course_pp_calls
    begin, of = calls.begin, calls.of
    pending: set[int] = set()

    def noted_begin(handle: Any, call: Any) -> None:
        begin(handle, call)
        if call.collective:
            pending.clear()
        elif (call.operation, call.peer) == ("send", to):
            pending.clear()
            pending.add(id(handle))

    def noted_of(handle: Any) -> Any:
        """What the launcher asks when a wait begins."""
        pending.discard(id(handle))
        return of(handle)

    with patch.object(calls, "begin", noted_begin), patch.object(calls, "of", noted_of):
        yield
    if pending:
        raise Mistake(
            f"Rank {rank} returned before its last message to rank {to} was known to be taken.",
            "`isend`, `send_activation` and `send_gradient` only begin to send, and the message lives as long as the "
            "handle that they return. Keep that, and `wait()` for it at the end: otherwise the message may be lost.",
        )
