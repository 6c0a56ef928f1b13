"""Where a rank sends and receives: the messages between the actions of a schedule.

All messages from one rank to another form a *channel*. The receiver takes them in the order in
which its own actions need them; the sender sends them in that same order, holding back one that is
ready before its turn. So both ends agree on the order without a message, and need no tags (NCCL has
none). That adds no deadlock: a message waits only for others that the receiver needs first anyway,
for actions that the schedule itself puts earlier.

A step ends with every rank reporting to one of them, the root, and the root answering: a rank that
returns knows that all the others are through.

A value that stages beyond the neighbour read travels once to each rank that reads it. The rank's
first reader receives it, goes backward last, and sends the sum of their gradients. The writer adds
up what it gets from each rank.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from course_pp.schedule import Action, Edge, Overlap, Product, Schedule
from course_pp.schedule.precedence import Dependencies

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
        return (
            str(self.content)
            if isinstance(self.content, Product)
            else f"the {self.content} of rank {self.source}"
        )


@dataclass(frozen=True, slots=True)
class Step:
    """One action of a rank and the messages around it.

    Attributes:
        receives: what must be there before the action starts.
        sends: what can be sent once it is done.
        arrived: earlier sends whose buffers can be freed: what this action receives was made after
            they were taken.
    """

    action: Action | Overlap
    receives: tuple[Message, ...]
    sends: tuple[Message, ...]
    arrived: tuple[Message, ...]


@dataclass(frozen=True)
class RankPlan:
    """What one rank does in a step: its actions in order, and its channels by the rank at the other end."""

    rank: int
    steps: tuple[Step, ...]
    incoming: Mapping[int, tuple[Message, ...]]
    outgoing: Mapping[int, tuple[Message, ...]]


def plan_messages(
    schedule: Schedule, pairs: Sequence[tuple[int, int]] = ()
) -> tuple[RankPlan, ...]:
    """Return the plan of each rank; ``pairs`` exchange the gradients of shared weights after their last action."""
    channels: dict[tuple[int, int], list[Message]] = defaultdict(list)

    def add(source: int, target: int, content: Content) -> Message:
        row = channels[source, target]
        row.append(Message(source, target, len(row), content))
        return row[-1]

    dependencies = Dependencies.of(schedule)
    makers = {
        dependencies.describe(product): (rank, index)
        for rank, index, part in _walk(schedule)
        for product in dependencies.made_by(part)
    }
    receives: dict[tuple[int, int], list[Message]] = defaultdict(list)
    sends: dict[tuple[int, int], list[Message]] = defaultdict(list)
    for rank, index, part in _walk(schedule):
        for number in dependencies.needed_by(part):
            product = dependencies.describe(number)
            maker = makers[product]
            if maker[0] != rank and not _comes_with_another(schedule, dependencies, number):
                message = add(maker[0], rank, product)
                receives[rank, index].append(message)
                sends[maker].append(message)
    arrived = _arrived(schedule, makers, receives)
    for source, target in sorted(
        {(a, b) for pair in pairs for a, b in (pair, pair[::-1]) if a != b}
    ):
        add(source, target, "shared gradients")
    root = schedule.rank_of(0, 0)
    others = [rank for rank in range(schedule.n_ranks) if rank != root]
    for rank in others:
        add(rank, root, "report")
    for rank in others:
        add(root, rank, "answer")
    return tuple(
        RankPlan(
            rank,
            tuple(
                Step(
                    action, tuple(receives[rank, i]), tuple(sends[rank, i]), tuple(arrived[rank, i])
                )
                for i, action in enumerate(row)
            ),
            {source: tuple(row) for (source, target), row in channels.items() if target == rank},
            {target: tuple(row) for (source, target), row in channels.items() if source == rank},
        )
        for rank, row in enumerate(schedule.actions)
    )


def _comes_with_another(schedule: Schedule, dependencies: Dependencies, number: int) -> bool:
    """Return whether it crosses an edge to or from a rank with an earlier reader: that one's message serves both."""
    lane = dependencies.lane_of(number)
    if lane is None:
        return False
    microbatch = dependencies.describe(number).microbatch
    rank = schedule.rank_of(lane.reader, microbatch)
    readers = schedule.edges[lane.edge].readers
    return any(
        reader < lane.reader and schedule.rank_of(reader, microbatch) == rank for reader in readers
    )


def _walk(schedule: Schedule) -> Iterator[tuple[int, int, Action]]:
    for rank, row in enumerate(schedule.actions):
        for index, action in enumerate(row):
            for part in action.parts:
                yield rank, index, part


def _arrived(
    schedule: Schedule,
    makers: Mapping[Product, tuple[int, int]],
    receives: Mapping[tuple[int, int], list[Message]],
) -> Mapping[tuple[int, int], list[Message]]:
    """Return for each action the messages that its rank has sent and that it now knows to be taken.

    By vector clocks (Fidge 1988, Mattern 1989): ``begun[rank][other]`` is how many actions of
    ``other`` had begun, and so had their inputs, before what ``rank`` has seen so far was made.
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
                sources = [
                    makers[m.content]
                    for m in receives.get(here, ())
                    if isinstance(m.content, Product)
                ]
                if any(source not in seen for source in sources):
                    break
                clock = [
                    max(times)
                    for times in zip(
                        begun[rank], *(seen[source] for source in sources), strict=True
                    )
                ]
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


@dataclass(frozen=True)
class Read:
    """A value as a stage reads it: the last reader on its rank or not, and where its readers' gradients add up."""

    name: str
    value: Product
    is_last: bool
    gradient: Product


@dataclass(frozen=True)
class Write:
    """A value as a stage makes it: read by a later stage of its rank or not, and a gradient from each reading rank."""

    name: str
    value: Product
    is_read_here: bool
    gradients: tuple[Product, ...]


def reads_of(schedule: Schedule, stage: int, microbatch: int) -> tuple[Read, ...]:
    found = []
    for edge in schedule.edges:
        if stage in edge.readers:
            here = _readers(schedule, edge, microbatch)[schedule.rank_of(stage, microbatch)]
            value = Product("value", edge.writer, microbatch, edge.name)
            gradient = Product("value gradient", here[0], microbatch, edge.name)
            found.append(Read(edge.name, value, stage == here[-1], gradient))
    return tuple(found)


def writes_of(schedule: Schedule, stage: int, microbatch: int) -> tuple[Write, ...]:
    found = []
    for edge in schedule.edges:
        if stage == edge.writer:
            ranks = _readers(schedule, edge, microbatch)
            value = Product("value", stage, microbatch, edge.name)
            gradients = tuple(
                Product("value gradient", here[0], microbatch, edge.name) for here in ranks.values()
            )
            found.append(
                Write(edge.name, value, schedule.rank_of(stage, microbatch) in ranks, gradients)
            )
    return tuple(found)


def _readers(schedule: Schedule, edge: Edge, microbatch: int) -> Mapping[int, Sequence[int]]:
    """Return the readers of an edge by the rank on which they work on ``microbatch``, each in order."""
    ranks: dict[int, list[int]] = {}
    for reader in edge.readers:
        ranks.setdefault(schedule.rank_of(reader, microbatch), []).append(reader)
    return ranks
