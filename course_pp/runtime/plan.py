"""Where a rank sends and receives: the messages between the actions of a schedule.

All messages from one rank to another form a *channel*. The receiver takes them in the order in which its own actions
need them; the sender sends them in that same order, holding back one that is ready before its turn. So both ends agree
on the order without a message, and need no tags (NCCL has none).

Holding messages back adds no deadlock. A message waits only for others that the receiver needs first anyway. So every
wait is for an action that the schedule itself puts earlier, and a legal schedule has no cycle of those
(:func:`course_pp.schedule.check`).

A step ends with every rank reporting to one of them, the root, and the root answering: a rank that returns knows that
all the others are through.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from course_pp.schedule import Action, Overlap, Product, Schedule
from course_pp.schedule.products import Products

__all__ = ["Content", "Message", "Plan", "Step", "plan"]


Content = Product | str
"""A product of an action, or what else is sent: ``"shared gradients"``, ``"report"``, ``"answer"``."""


@dataclass(frozen=True, slots=True)
class Message:
    """Message ``number`` of the channel from rank ``source`` to rank ``target``, counted from 0 in each step."""

    source: int
    target: int
    number: int
    content: Content

    def __str__(self) -> str:
        return str(self.content) if isinstance(self.content, Product) else f"the {self.content} of rank {self.source}"


@dataclass(frozen=True, slots=True)
class Step:
    """One action of a rank and the messages around it.

    Attributes:
        receives: what must be there before the action starts.
        sends: what can be sent once it is done.
        arrived: earlier sends whose buffers can be freed: what this action receives was made after they were taken.
    """

    action: Action | Overlap
    receives: tuple[Message, ...]
    sends: tuple[Message, ...]
    arrived: tuple[Message, ...]


@dataclass(frozen=True)
class Plan:
    """What one rank does in a step.

    Attributes:
        steps: its actions with their messages, in order.
        shares: ranks that hold a weight this rank holds too, with which gradients are exchanged.
        root: the rank that collects every rank's report and answers.
        incoming: the channel from each rank that sends here.
        outgoing: the channel to each rank that receives from here.
    """

    rank: int
    steps: tuple[Step, ...]
    shares: tuple[int, ...]
    root: int
    incoming: Mapping[int, tuple[Message, ...]]
    outgoing: Mapping[int, tuple[Message, ...]]


def plan(schedule: Schedule, shares: Sequence[tuple[int, int]] = ()) -> tuple[Plan, ...]:
    """Return the plan of each rank.

    Args:
        schedule: a legal one.
        shares: pairs of ranks that exchange the gradients of shared weights after their last action.
    """
    products, channels = Products.of(schedule), _Channels()
    makers = {
        products.describe(product): (rank, index)
        for rank, index, part in _walk(schedule)
        for product in products.made_by(part)
    }
    receives: dict[tuple[int, int], list[Message]] = defaultdict(list)
    sends: dict[tuple[int, int], list[Message]] = defaultdict(list)
    for rank, index, part in _walk(schedule):
        for number in products.needed_by(part):
            product = products.describe(number)
            maker = makers[product]
            if maker[0] != rank and not _comes_with_another(schedule, products, number):
                message = channels.add(maker[0], rank, product)
                receives[rank, index].append(message)
                sends[maker].append(message)
    arrived = _arrived(schedule, makers, receives)
    root = schedule.rank_of(0, 0)
    partners = channels.close(shares, root, schedule.n_ranks)
    return tuple(
        Plan(
            rank,
            tuple(
                Step(action, tuple(receives[rank, i]), tuple(sends[rank, i]), tuple(arrived[rank, i]))
                for i, action in enumerate(row)
            ),
            tuple(sorted(partners[rank])),
            root,
            {source: tuple(row) for (source, target), row in channels.rows.items() if target == rank},
            {target: tuple(row) for (source, target), row in channels.rows.items() if source == rank},
        )
        for rank, row in enumerate(schedule.actions)
    )


class _Channels:
    """Messages by (source, target), in the order in which the target takes them."""

    def __init__(self) -> None:
        self.rows: dict[tuple[int, int], list[Message]] = defaultdict(list)

    def add(self, source: int, target: int, content: Content) -> Message:
        row = self.rows[source, target]
        row.append(Message(source, target, len(row), content))
        return row[-1]

    def close(self, shares: Sequence[tuple[int, int]], root: int, n_ranks: int) -> Mapping[int, set[int]]:
        """Add what follows the last action; who shares weights with whom."""
        partners: dict[int, set[int]] = defaultdict(set)
        for pair in sorted({(a, b) for one, other in shares for a, b in ((one, other), (other, one)) if a != b}):
            self.add(*pair, "shared gradients")
            partners[pair[0]].add(pair[1])
        others = [rank for rank in range(n_ranks) if rank != root]
        for rank in others:
            self.add(rank, root, "report")
        for rank in others:
            self.add(root, rank, "answer")
        return partners


def _comes_with_another(schedule: Schedule, products: Products, number: int) -> bool:
    """Return whether it crosses an edge to or from a rank with an earlier reader: that one's message serves both."""
    lane = products.lane_of(number)
    if lane is None:
        return False
    microbatch = products.describe(number).microbatch
    rank = schedule.rank_of(lane.reader, microbatch)
    readers = schedule.edges[lane.edge].readers
    return any(reader < lane.reader and schedule.rank_of(reader, microbatch) == rank for reader in readers)


def _walk(schedule: Schedule) -> Iterator[tuple[int, int, Action]]:
    for rank, row in enumerate(schedule.actions):
        for index, action in enumerate(row):
            for part in action.parts:
                yield rank, index, part


def _arrived(
    schedule: Schedule, makers: Mapping[Product, tuple[int, int]], receives: Mapping[tuple[int, int], list[Message]]
) -> Mapping[tuple[int, int], list[Message]]:
    """Return for each action the messages that its rank has sent and that it now knows to be taken.

    By vector clocks (Fidge 1988, Mattern 1989): ``begun[rank][other]`` is how many actions of ``other`` had begun, and
    so had their inputs, before what ``rank`` has seen so far was made.
    """
    n_ranks = schedule.n_ranks
    begun = [[0] * n_ranks for _ in range(n_ranks)]
    seen: dict[tuple[int, int], list[int]] = {}
    # Sent and not yet known to be taken, by sender: (receiver, index of the action there, message).
    open_sends: list[list[tuple[int, int, Message]]] = [[] for _ in range(n_ranks)]
    for (rank, index), messages in receives.items():
        for message in messages:
            open_sends[message.source].append((rank, index, message))
    arrived: dict[tuple[int, int], list[Message]] = defaultdict(list)
    place = [0] * n_ranks
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.actions):
            while place[rank] < len(row):
                here = (rank, place[rank])
                sources = [makers[m.content] for m in receives.get(here, ()) if isinstance(m.content, Product)]
                if any(source not in seen for source in sources):
                    break
                clock = [max(times) for times in zip(begun[rank], *(seen[source] for source in sources), strict=True)]
                clock[rank] = place[rank] + 1
                begun[rank] = seen[here] = clock
                still = []
                for entry in open_sends[rank]:
                    if clock[entry[0]] > entry[1]:
                        arrived[here].append(entry[2])
                    else:
                        still.append(entry)
                open_sends[rank] = still
                place[rank] += 1
                moved = True
    return arrived
