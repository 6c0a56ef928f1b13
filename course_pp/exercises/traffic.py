"""The messages and collectives of a rank, for graders that count bytes or refuse collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast
from unittest.mock import patch

import torch.distributed as dist

from course_pp.exercises.mistakes import Mistake


@dataclass
class Traffic:
    """The messages and collectives that this rank has begun.

    Attributes:
        n_bytes: bytes of all messages.
        collectives: names of the collectives that it called, without barriers.
    """

    n_bytes: int = 0
    collectives: list[str] = field(default_factory=list)


@contextmanager
def watched_traffic() -> Iterator[Traffic]:
    """Note every message and collective that this process begins in the block, over any group."""
    traffic = Traffic()
    send = dist.ProcessGroup.send

    def noted_send(self: Any, tensors: list[Any], *args: Any, **kwargs: Any) -> Any:
        traffic.n_bytes += sum(tensor.nbytes for tensor in tensors)
        return send(self, tensors, *args, **kwargs)

    def noted(_: Any, call: Any) -> None:
        if call.collective and call.operation != "barrier":
            traffic.collectives.append(call.operation)

    with patch.object(dist.ProcessGroup, "send", noted_send), _begun(noted):
        yield traffic


@contextmanager
def _begun(note: Callable[[Any, Any], None]) -> Iterator[None]:
    """Call ``note(handle, call)`` for each call that the launcher notes."""
    calls = cast(Any, dist.ProcessGroup).course_pp_calls
    begin = calls.begin

    def noted(handle: Any, call: Any) -> None:
        begin(handle, call)
        note(handle, call)

    with patch.object(calls, "begin", noted):
        yield


@contextmanager
def last_message_waited_for(rank: int, to: int) -> Iterator[None]:
    """Refuse an answer that returns while its last message to rank ``to`` may still be on its way.

    Without this the verdict would be luck: a message whose handle is dropped still arrives if its
    receiver was waiting already. If a rank waits for a message, all earlier messages to the same
    rank are taken. The same holds after a barrier. Other collectives prove nothing, because an
    answer calls them for their results.

    Args:
        rank: this rank.
        to: the other rank; no message is watched if it is below 0.

    Raises:
        Mistake: at the end of the block.
    """
    calls = cast(Any, dist.ProcessGroup).course_pp_calls
    of = calls.of
    pending = set[int]()

    def noted(handle: Any, call: Any) -> None:
        if call.operation == "barrier":
            pending.clear()
        elif (call.operation, call.peer) == ("send", to):
            pending.clear()
            pending.add(id(handle))

    def noted_of(handle: Any) -> Any:
        """Note a wait: the launcher asks this when one begins."""
        pending.discard(id(handle))
        return of(handle)

    with _begun(noted), patch.object(calls, "of", noted_of):
        yield
    if pending:
        raise Mistake(
            f"Rank {rank} returned before its last message to rank {to} was known to be taken.",
            "`isend`, `send_activation` and `send_gradient` only begin to send, and the message"
            " lives as long as the handle that they return. Keep that, and `wait()` for it at the"
            " end: otherwise the message may be lost.",
        )
