"""The messages between the actions of a schedule: where each rank sends and receives.

All messages from one rank to another form a *channel*. The receiver takes them in the order in
which its own actions need them. The sender sends them in the same order, and holds back a message
that is ready before its turn. So both ends know the order without a message, and need no tags (NCCL
has none). That adds no deadlock: a message waits only for messages that the receiver needs first
anyway, for actions that the schedule itself puts earlier.

A step ends with every rank reporting to one of them, the root, and the root answering: a rank that
returns knows that all the others are through.

A value that stages beyond the neighbour read travels once to each rank that reads it. The rank's
first reader receives it, goes backward last, and sends the sum of the readers' gradients. The
writer adds up the sums of all ranks.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from course_pp.schedule import Action, Edge, Overlap, Product, Schedule
from course_pp.schedule.precedence import Dependencies

Content = Product | str
"""A product of an action, or one of ``"shared gradients"``, ``"report"``, ``"answer"``."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of the channel from rank ``source`` to rank ``target``.

    Attributes:
        number: the place in the channel, counted from 0 in each step.
    """

    source: int
    target: int
    number: int
    content: Content

    def __str__(self) -> str:
        if isinstance(self.content, Product):
            return str(self.content)
        return f"the {self.content} of rank {self.source}"


@dataclass(frozen=True, slots=True)
class Step:
    """One action of a rank and the messages around it.

    Attributes:
        receives: messages that must be there before the action starts.
        sends: messages that can be sent once it is done.
        arrived: earlier sends whose buffers can be freed, because a message that this action
            receives was made after they were taken.
    """

    action: Action | Overlap
    receives: tuple[Message, ...]
    sends: tuple[Message, ...]
    arrived: tuple[Message, ...]


@dataclass(frozen=True)
class RankPlan:
    """One rank's part of a step.

    Attributes:
        steps: its actions in order.
        incoming, outgoing: its channels by the rank at the other end.
    """

    rank: int
    steps: tuple[Step, ...]
    incoming: Mapping[int, tuple[Message, ...]]
    outgoing: Mapping[int, tuple[Message, ...]]


def plan_messages(
    schedule: Schedule, pairs: Sequence[tuple[int, int]] = ()
) -> tuple[RankPlan, ...]:
    """Return the plan of each rank.

    Args:
        pairs: ranks that share weights, and exchange their gradients after the last action.
    """
    channels: dict[tuple[int, int], list[Message]] = defaultdict(list)

    def add(source: int, target: int, content: Content) -> Message:
        row = channels[source, target]
        row.append(Message(source, target, len(row), content))
        return row[-1]

    dependencies = Dependencies.of(schedule)
    makers: dict[Product, tuple[int, int]] = {}
    for rank, index, part in _walk(schedule):
        for number in dependencies.made_by(part):
            makers[dependencies.describe(number)] = rank, index

    # Channels get their messages in the order in which the receiver's actions need them.
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

    both_ways = {*pairs, *((b, a) for a, b in pairs)}
    for source, target in sorted(both_ways):
        if source != target:
            add(source, target, "shared gradients")
    # In most schedules the rank of the first stage ends last, and finds all reports waiting.
    root = schedule.rank_of(0, 0)
    others = [rank for rank in range(schedule.n_ranks) if rank != root]
    for rank in others:
        add(rank, root, "report")
    for rank in others:
        add(root, rank, "answer")

    plans = []
    for rank, actions in enumerate(schedule.actions):
        steps = []
        for i, action in enumerate(actions):
            here = rank, i
            steps.append(
                Step(
                    action,
                    receives=tuple(receives[here]),
                    sends=tuple(sends[here]),
                    arrived=tuple(arrived[here]),
                )
            )
        incoming = {a: tuple(row) for (a, b), row in channels.items() if b == rank}
        outgoing = {b: tuple(row) for (a, b), row in channels.items() if a == rank}
        plans.append(RankPlan(rank, tuple(steps), incoming=incoming, outgoing=outgoing))
    return tuple(plans)


def _comes_with_another(schedule: Schedule, dependencies: Dependencies, number: int) -> bool:
    """Return whether a product comes with the message for an earlier reader on the same rank."""
    lane = dependencies.lane_of(number)
    if lane is None:
        return False
    microbatch = dependencies.describe(number).microbatch
    rank = schedule.rank_of(lane.reader, microbatch)
    for reader in schedule.edges[lane.edge].readers:
        if reader < lane.reader and schedule.rank_of(reader, microbatch) == rank:
            return True
    return False


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
    """Return the sent messages that each action, by rank and index, shows to be taken.

    A rank learns it from vector clocks (Fidge 1988, Mattern 1989). ``begun[rank][other]`` counts
    the actions of ``other`` that began, with their inputs, before the latest message that reached
    ``rank`` was made.
    """
    n_ranks = schedule.n_ranks
    begun = [[0] * n_ranks for _ in range(n_ranks)]
    # The clock of each action that has begun, by rank and index.
    seen: dict[tuple[int, int], list[int]] = {}
    # Messages not yet known to be taken, by sender: (receiver, index of the action there, message).
    open_sends: list[list[tuple[int, int, Message]]] = [[] for _ in range(n_ranks)]
    for (rank, index), messages in receives.items():
        for message in messages:
            open_sends[message.source].append((rank, index, message))
    arrived: dict[tuple[int, int], list[Message]] = defaultdict(list)
    # Walk all ranks at once, each as far as its received messages are made.
    place = [0] * n_ranks
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.actions):
            while place[rank] < len(row):
                here = (rank, place[rank])
                contents = [message.content for message in receives.get(here, ())]
                sources = [makers[each] for each in contents if isinstance(each, Product)]
                if any(source not in seen for source in sources):
                    break
                clocks = [begun[rank], *(seen[source] for source in sources)]
                clock = [max(times) for times in zip(*clocks, strict=True)]
                clock[rank] = place[rank] + 1
                begun[rank] = seen[here] = clock
                still = []
                for receiver, needed_at, message in open_sends[rank]:
                    if clock[receiver] > needed_at:
                        arrived[here].append(message)
                    else:
                        still.append((receiver, needed_at, message))
                open_sends[rank] = still
                place[rank] += 1
                moved = True
    return arrived


@dataclass(frozen=True)
class Read:
    """A value as a stage reads it.

    Attributes:
        is_last: whether the stage is the last reader on its rank.
        gradient: the product in which the gradients of the rank's readers add up.
    """

    name: str
    value: Product
    is_last: bool
    gradient: Product


@dataclass(frozen=True)
class Write:
    """A value as a stage makes it.

    Attributes:
        is_read_here: whether a later stage of the same rank reads it.
        gradients: the gradients of the value, one from each reading rank.
    """

    name: str
    value: Product
    is_read_here: bool
    gradients: tuple[Product, ...]


def reads_of(schedule: Schedule, stage: int, microbatch: int) -> tuple[Read, ...]:
    """Return the values that a stage reads beyond its neighbour's."""
    found = []
    for edge in schedule.edges:
        if stage in edge.readers:
            here = _readers(schedule, edge, microbatch)[schedule.rank_of(stage, microbatch)]
            value = Product("value", edge.writer, microbatch, edge.name)
            gradient = Product("value gradient", here[0], microbatch, edge.name)
            found.append(Read(edge.name, value, stage == here[-1], gradient))
    return tuple(found)


def writes_of(schedule: Schedule, stage: int, microbatch: int) -> tuple[Write, ...]:
    """Return the values that a stage makes for stages beyond its neighbour."""
    found = []
    for edge in schedule.edges:
        if stage == edge.writer:
            ranks = _readers(schedule, edge, microbatch)
            value = Product("value", stage, microbatch, edge.name)
            gradients = []
            for first, *_ in ranks.values():
                gradients.append(Product("value gradient", first, microbatch, edge.name))
            is_read_here = schedule.rank_of(stage, microbatch) in ranks
            found.append(Write(edge.name, value, is_read_here, tuple(gradients)))
    return tuple(found)


def _readers(schedule: Schedule, edge: Edge, microbatch: int) -> Mapping[int, Sequence[int]]:
    """Return the readers of an edge by the rank that works on ``microbatch`` for them."""
    ranks: dict[int, list[int]] = {}
    for reader in edge.readers:
        ranks.setdefault(schedule.rank_of(reader, microbatch), []).append(reader)
    return ranks
