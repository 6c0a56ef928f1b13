"""Bytes from rank to rank: one interface over gloo, which has tags, and NCCL, which has only order."""

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
    """Sends and receives uint8 buffers that lie on ``device``; ranks are those of the pipeline's
    group.

    ``window`` is how many receives of one channel may be posted at a time, at most. Both methods
    only begin: ``buffer`` belongs to message ``number`` of its channel until the work is done.
    """

    device: torch.device
    window: int

    def isend(self, buffer: Tensor, target: int, number: int) -> dist.Work: ...

    def irecv(self, buffer: Tensor, source: int, number: int) -> dist.Work: ...


class Tagged:
    """Messages told apart by tags, through host memory: gloo.

    Args:
        group: the ranks of the pipeline.
        series: below 2**15, the same on all ranks: keeps this pipeline's messages apart from
            another's in the group.
        back: connections of the same ranks for messages to lower ones; None where nothing is sent.
            While a thread writes to a peer, gloo's own cannot read what that has sent, and keeps a
            core busy trying.
    """

    device = torch.device("cpu")
    # gloo asks the receiver before it sends, unless the receive is posted already: for small
    # messages that is most of their time.
    window = 32

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        series: int,
        back: dist.ProcessGroupGloo | None = None,
    ) -> None:
        # The groups' own methods are called: dist.isend and dist.irecv check for each message what
        # is settled here.
        self._there: Any = group or dist.group.WORLD  # None in a process alone, which sends nothing
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
    """Messages told apart by their order alone: NCCL, or gloo made to do without tags.

    Each channel, a (source, target), has a process group of its own. With one group for both
    directions between two ranks, a send would queue behind a receive that waits for the other rank,
    whose own send queues likewise.
    """

    # A value whose shape has changed comes in a second message, which must not be taken for the
    # next value.
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
        me, everyone = dist.get_rank(group), dist.get_process_group_ranks(group or dist.group.WORLD)
        self._groups: dict[tuple[int, int], tuple[dist.ProcessGroup, int]] = {}
        # In one order everywhere: making a group waits for its other member. Torch names a group
        # after its ranks and the number of groups its process has made, so whoever is not in the
        # channel makes one too, for itself.
        for source, target in sorted(channels):
            ours = me in (source, target)
            made: Any = dist.new_group(
                [everyone[source], everyone[target]] if ours else [everyone[me]],
                timeout=timeout,
                backend=backend if ours else "gloo",
                use_local_synchronization=True,
                group_desc=f"pipeline {source} to {target}",
            )
            if ours:
                self._groups[source, target] = made, 1 - dist.get_rank(made)
        self._me = me
        # A first message on each channel: NCCL makes its connection then, and waits for the peer
        # while it does.
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
    """Return what carries the messages of the plans of all ranks.

    The transport is ``"gloo"`` (CUDA tensors go through host memory, so ranks can share a GPU),
    ``"nccl"``, ``"gloo without tags"`` to have NCCL's rules without a GPU, or None: NCCL where the
    group has it for the device, else gloo.
    """
    options, device, series = agreement.options, agreement.device, agreement.series
    group, transport, timeout = options.group, options.transport, options.timeout
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


# By group: its pipelines share sockets and threads, which end with it.
_WAYS_BACK: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroupGloo] = WeakKeyDictionary()


def _way_back(group: dist.ProcessGroup | None, series: int) -> dist.ProcessGroupGloo:
    """Return connections beside the group's own, as no group of torch's: that would outlive it, and rename others."""
    group = group or dist.group.WORLD
    assert group is not None
    if group not in _WAYS_BACK:
        store = dist.PrefixStore(f"pipeline {series}, back", group.get_group_store())
        _WAYS_BACK[group] = dist.ProcessGroupGloo(
            store, group.rank(), group.size(), timedelta(seconds=300)
        )
    return _WAYS_BACK[group]


def _refuse_unlike_groups(group: dist.ProcessGroup | None) -> None:
    """Ranks in unlike numbers of groups would wait for each other under unlike names."""
    numbers = Ranks(group).gather(n_process_groups())
    if len(set(numbers)) > 1:
        raise ValueError(
            f"the pipeline's ranks are in {', '.join(map(str, numbers))} process groups, and torch"
            " names the next one after that number: put all of them into as many groups, or use"
            " transport 'gloo'"
        )
