"""Bytes from rank to rank: one interface over gloo, which has tags, and NCCL, which has none."""

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from course_pp.base.ranks import Ranks
from course_pp.base.torch_private import n_process_groups
from course_pp.runtime.messages import RankPlan

if TYPE_CHECKING:
    from course_pp.runtime.agreement import Agreement

_TAGS_PER_PIPELINE = 1 << 16


class Wire(Protocol):
    """Sends and receives uint8 buffers; ranks are numbered in the pipeline's group.

    Both methods only begin: ``buffer`` belongs to message ``number`` of its channel until the work
    is done.

    Attributes:
        device: device of the buffers.
        window: the most receives of one channel that may be posted at a time.
    """

    device: torch.device
    window: int

    def isend(self, buffer: Tensor, target: int, number: int) -> dist.Work: ...

    def irecv(self, buffer: Tensor, source: int, number: int) -> dist.Work: ...


class Tagged:
    """Messages with tags, through host memory: gloo.

    Args:
        group: the ranks of the pipeline.
        series: a number below 2**15, the same on all ranks, which keeps this pipeline's messages
            apart from another's in the group.
        back: connections of the same ranks for messages to lower ranks; None where nothing is sent.
            On one connection, gloo's thread could not read while another thread writes, and would
            keep a core busy trying.
    """

    device = torch.device("cpu")
    # If no receive is posted yet, gloo asks the receiver before it sends. For a small message that
    # is most of its time.
    window = 32

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        series: int,
        back: dist.ProcessGroupGloo | None = None,
    ) -> None:
        # The groups' own methods are called, as dist.isend and dist.irecv check each message again.
        # The group is None in a process alone, which sends nothing.
        self._there: Any = group or dist.group.WORLD
        self._back: Any = back or self._there
        self._me = 0 if self._there is None else dist.get_rank(group)
        self._first = series * _TAGS_PER_PIPELINE

    def isend(self, buffer: Tensor, target: int, number: int) -> dist.Work:
        group = self._there if target > self._me else self._back
        return group.send([buffer], target, self._first + number % _TAGS_PER_PIPELINE)

    def irecv(self, buffer: Tensor, source: int, number: int) -> dist.Work:
        group = self._there if source < self._me else self._back
        return group.recv([buffer], source, self._first + number % _TAGS_PER_PIPELINE)


class Ordered:
    """Messages with an order and no tags: NCCL, or gloo without its tags.

    Each channel, a (source, target), has a process group of its own. With one group for both
    directions between two ranks, a send would queue behind a receive that waits for the other rank,
    whose own send queues likewise.
    """

    # A value of a new shape comes in a second message, which a receive for the next value must not
    # take.
    window = 1

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        channels: Iterable[tuple[int, int]],
        backend: str,
        device: torch.device,
        timeout: timedelta,
    ) -> None:
        self.device = device
        me = dist.get_rank(group)
        everyone = dist.get_process_group_ranks(group or dist.group.WORLD)
        self._groups: dict[tuple[int, int], tuple[dist.ProcessGroup, int]] = {}
        # In one order everywhere, because making a group waits for its other member. torch names a
        # group after its ranks and the number of groups so far, so a rank outside the channel makes
        # a group too, of itself.
        for source, target in sorted(channels):
            ours = me in (source, target)
            members = (source, target) if ours else (me,)
            made: Any = dist.new_group(
                [everyone[member] for member in members],
                timeout=timeout,
                backend=backend if ours else "gloo",
                use_local_synchronization=True,
                group_desc=f"pipeline {source} to {target}",
            )
            if ours:
                self._groups[source, target] = made, 1 - dist.get_rank(made)
        self._me = me
        # NCCL connects with the first message of a channel, and waits for the peer meanwhile. Let
        # that happen here, not in the middle of a step.
        for source, target in self._groups:
            greeting = torch.zeros(1, dtype=torch.uint8, device=device)
            if source == me:
                self.isend(greeting, target, 0).wait()
            else:
                self.irecv(greeting, source, 0).wait()

    def isend(self, buffer: Tensor, target: int, number: int) -> dist.Work:
        channel, other = self._groups[self._me, target]
        return channel.send([buffer], other, 0)

    def irecv(self, buffer: Tensor, source: int, number: int) -> dist.Work:
        channel, other = self._groups[source, self._me]
        return channel.recv([buffer], other, 0)


def open_wire(agreement: "Agreement", plans: Sequence[RankPlan]) -> Wire:
    """Return the wire for the plans of all ranks.

    The option ``transport`` is ``"gloo"`` (CUDA tensors go through host memory, so ranks can share
    a GPU), ``"nccl"``, ``"gloo without tags"`` (NCCL's rules without a GPU), or None: NCCL where
    the group has it for the device, else gloo.
    """
    options = agreement.options
    group, transport, timeout = options.group, options.transport, options.timeout
    device, series = agreement.device, agreement.series
    channels = {(source, plan.rank) for plan in plans for source in plan.incoming}
    if not channels:  # one rank, perhaps without a process group
        return Tagged(group, series)
    backends = dist.get_backend_config(group)
    nccl = device.type == "cuda" and "cuda:nccl" in backends
    if transport is None:
        transport = "nccl" if nccl else "gloo"
    if transport == "nccl" and nccl:
        _refuse_unlike_groups(group)
        return Ordered(group, channels, "nccl", device, timeout)
    if transport == "gloo" and "gloo" in backends:
        return Tagged(group, series, _way_back(group, series))
    if transport == "gloo without tags" and "gloo" in backends:
        _refuse_unlike_groups(group)
        return Ordered(group, channels, "gloo", torch.device("cpu"), timeout)
    raise ValueError(
        f"transport {transport!r} cannot carry tensors on {device} over a process group with"
        f" {backends}: use 'gloo', 'nccl' (stages on CUDA, group initialised with nccl) or 'gloo"
        " without tags'"
    )


# One for each group: its pipelines share sockets and threads, which end with it.
_WAYS_BACK: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroupGloo] = WeakKeyDictionary()


def _way_back(group: dist.ProcessGroup | None, series: int) -> dist.ProcessGroupGloo:
    """Return a group's second connections, for messages to lower ranks.

    They are no group that torch knows: such a group would outlive this one, and change the names of
    later groups.
    """
    group = group or dist.group.WORLD
    assert group is not None
    if group not in _WAYS_BACK:
        store = dist.PrefixStore(f"pipeline {series}, back", group.get_group_store())
        limit = timedelta(seconds=300)
        _WAYS_BACK[group] = dist.ProcessGroupGloo(store, group.rank(), group.size(), limit)
    return _WAYS_BACK[group]


def _refuse_unlike_groups(group: dist.ProcessGroup | None) -> None:
    """Refuse ranks in unlike numbers of groups, which would name the next group unlike and hang."""
    numbers = Ranks(group).gather(n_process_groups())
    if len(set(numbers)) > 1:
        spelled = ", ".join(map(str, numbers))
        raise ValueError(
            f"the pipeline's ranks are in {spelled} process groups, and torch names the next one"
            " after that number: put all of them into as many groups, or use transport 'gloo'"
        )
