"""Which action of a run had to wait for which: a graph of the order alone, whose longest path is the makespan."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from course_pp.schedule.action import Product
from course_pp.schedule.execution import execute
from course_pp.schedule.legality import check
from course_pp.schedule.products import Products
from course_pp.schedule.schedule import Schedule, implied_placement
from course_pp.schedule.span import Span
from course_pp.schedule.timeline import Timeline

Link = tuple[int, int]
"""Two ranks, the lower one first."""


class Message(NamedTuple):
    """What an action gets from another rank: which one, over which link, and the number of the action that makes it."""

    product: Product
    link: Link
    maker: int


class Lengths(NamedTuple):
    """How long each action takes, from when its rank and inputs allow it, and each message over a link."""

    actions: Sequence[float]
    links: Mapping[Link, float]


@dataclass(frozen=True)
class Times:
    """When each action runs, given the lengths of actions and messages.

    Attributes:
        ready: for each action, when its rank and its inputs allow it.
        ends: for each action, when it is done.
        path: the longest path, from its end back: each action, and the link of the message it waited for, if any.
    """

    ready: Sequence[float]
    ends: Sequence[float]
    path: tuple[tuple[int, Link | None], ...]

    @property
    def makespan(self) -> float:
        return max(self.ends)


@dataclass(frozen=True)
class Precedence:
    """The actions of a run, numbered so that each comes after those it waits for.

    Attributes:
        schedule: the order of each rank.
        spans: the actions with their measured times.
        before: for each the number of the one before it on its rank, None for the first.
        messages: for each what it gets from other ranks.
    """

    schedule: Schedule
    spans: tuple[Span, ...]
    before: tuple[int | None, ...]
    messages: tuple[tuple[Message, ...], ...]

    def run(self, lengths: Lengths) -> Times:
        """Run every action as early as its rank and its inputs allow."""
        ready: list[float] = []
        ends: list[float] = []
        reached: list[tuple[int | None, Link | None]] = []
        for number, took in enumerate(lengths.actions):
            at, by = self.allowed(number, ends, lengths.links)
            ready.append(at)
            ends.append(at + took)
            reached.append(by)
        path = []
        last: int | None = max(range(len(ends)), key=ends.__getitem__)
        while last is not None:
            before, link = reached[last]
            path.append((last, link))
            last = before
        return Times(ready, ends, tuple(path))

    def allowed(
        self, number: int, ends: Sequence[float], links: Mapping[Link, float]
    ) -> tuple[float, tuple[int | None, Link | None]]:
        """Return when the rank and the inputs of an action allow it, given ``ends``; and which action and link decide.

        What its own rank made is there as soon as the rank is free.
        """
        before = self.before[number]
        at = 0.0 if before is None else ends[before]
        by: tuple[int | None, Link | None] = (before, None)
        for message in self.messages[number]:
            arrival = ends[message.maker] + links[message.link]
            if arrival > at:
                at, by = arrival, (message.maker, message.link)
        return at, by

    def opens(self, number: int) -> bool:
        """Return whether an action waits for nothing, so that nobody knows when it could have started."""
        return self.before[number] is None and not self.messages[number]


def precedence_of(tl: Timeline) -> Precedence:
    """Read off the spans of one step what had to wait for what.

    Raises:
        ValueError: for a timeline without spans, of several steps, or that lacks actions.
    """
    schedule = schedule_of(tl)
    run = execute(schedule, [[1] * len(row) for row in schedule.actions], [0] * (schedule.n_stages - 1))
    places = sorted((start, rank, i) for rank, starts in enumerate(run.starts) for i, start in enumerate(starts))
    number = {(rank, i): n for n, (_, rank, i) in enumerate(places)}
    spans = tuple(tl.by_rank[rank][i] for _, rank, i in places)
    products = Products.of(schedule)
    makers = {product: n for n, span in enumerate(spans) for product in products.made_by(span.action)}

    def messages_to(span: Span) -> tuple[Message, ...]:
        needed = ((product, makers[product]) for product in products.needed_by(span.action))
        return tuple(
            Message(products.describe(product), link_between(span.rank, spans[maker].rank), maker)
            for product, maker in needed
            if spans[maker].rank != span.rank
        )

    return Precedence(
        schedule,
        spans,
        tuple(number.get((rank, i - 1)) for _, rank, i in places),
        tuple(map(messages_to, spans)),
    )


def schedule_of(tl: Timeline) -> Schedule:
    """Return the schedule that was run: each rank's order, and the placement that it implies.

    Raises:
        ValueError: for a timeline without spans, of several steps, or that lacks actions.
    """
    if not tl.spans:
        raise ValueError(f"{tl!r} has no spans: record a step first")
    seen = set()
    for action in tl.actions:
        if action in seen:
            raise ValueError(
                f"{action} was done more than once, so {tl!r} has several steps: give one, "
                "with clear() of the recorder before it"
            )
        seen.add(action)
    rows = tuple(tuple(span.action for span in row) for row in tl.by_rank)
    found = implied_placement(rows)
    missing = next((stage for stage in range(tl.n_stages) if stage not in found), None)
    if missing is not None:
        raise ValueError(f"{tl!r} has nothing of stage {missing}: give a timeline of all ranks")
    schedule = Schedule(tl.name, tuple(found[stage] for stage in range(tl.n_stages)), rows, tl.edges, tl.feedback)
    if problems := check(schedule):
        raise ValueError(f"{tl!r} is not one whole step: {problems[0]}; record all of one step on every rank")
    return schedule


def link_between(one: int, other: int) -> Link:
    return (min(one, other), max(one, other))
