"""Who waits for whom: the engine under ``check``, ``simulate``, ``fit`` and the runtime's plan.

An action starts as soon as its rank is free and its inputs have arrived
(:meth:`Precedence.allowed`).
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from course_pp.schedule.action import Action, Made, Overlap, Product, Time
from course_pp.schedule.edges import Edge, Lane, lanes_of
from course_pp.schedule.schedule import Schedule

Link = tuple[int, int]
"""Two ranks, the lower one first."""

DelayOf = Callable[[int, int], Time]
"""For the number of an action and a product that it receives, how long that is on its way."""


def round_of(microbatch: int, share: int, n_microbatches: int) -> range:
    """Return the microbatches that the ``share`` replicas of a stage work on at a time.

    Their gradients make one update.
    """
    first = microbatch - microbatch % share
    return range(first, min(first + share, n_microbatches))


_BY_STAGE: tuple[Made, ...] = ("activation", "gradient", "weight gradient")


@dataclass(frozen=True)
class Dependencies:
    """The products that the actions of a pipeline hand to one another.

    :meth:`Action.needs` and :meth:`Action.provides` say the same for single actions. Here there is
    more: an update waits for the gradients of all replicas; values cross edges, and their gradients
    come back; in generation tokens go from the last stage to the first.

    Each product is a number, as objects by the hundred thousand would take seconds: ``product //
    n_microbatches`` is its *channel*, the rest its microbatch. The channels, in order: activations,
    gradients and weight gradients by stage, values and value gradients by reader of each edge,
    tokens.

    Attributes:
        shares: the number of ranks that hold each stage.
    """

    n_microbatches: int
    shares: tuple[int, ...]
    edges: tuple[Edge, ...] = ()
    feedback: int = 0

    @classmethod
    def of(cls, schedule: Schedule) -> "Dependencies":
        """Return the dependencies of a schedule."""
        shares = tuple(map(len, schedule.placement))
        return cls(schedule.n_microbatches, shares, schedule.edges, schedule.feedback)

    @cached_property
    def _lanes(self) -> tuple[Lane, ...]:
        return lanes_of(self.edges)

    def needed_by(self, action: Action | Overlap) -> tuple[int, ...]:
        """Return the products that an action needs."""
        if type(action) is Overlap:
            return self.needed_by(action.forward) + self.needed_by(action.backward)
        assert type(action) is Action
        m, n_stages = self.n_microbatches, len(self.shares)
        kind, stage, microbatch = action.kind, action.stage, action.microbatch
        activation = stage * m + microbatch
        gradient = activation + n_stages * m
        needed: tuple[int, ...]
        if kind == "F":
            needed = (activation - m,) if stage else ()
            if stage == 0 and 0 < self.feedback <= microbatch:
                needed = (self._channel("token") * m + microbatch - self.feedback,)
        elif kind == "W":
            needed = (gradient,)
        elif kind == "U":
            mates = round_of(microbatch, self.shares[stage], m)
            needed = tuple((2 * n_stages + stage) * m + mate for mate in mates)
        elif stage + 1 < n_stages:
            needed = (activation, gradient + m)
        else:
            needed = (activation,)
        if self.edges:
            needed += tuple(self._over_edges(action, makes=False))
        return needed

    def made_by(self, action: Action | Overlap) -> tuple[int, ...]:
        """Return the products that an action makes."""
        if type(action) is Overlap:
            return self.made_by(action.forward) + self.made_by(action.backward)
        assert type(action) is Action
        m, n_stages = self.n_microbatches, len(self.shares)
        kind, stage = action.kind, action.stage
        activation = stage * m + action.microbatch
        gradient = activation + n_stages * m
        weight_gradient = gradient + n_stages * m
        made: tuple[int, ...] = ()
        if kind == "F":
            made = (activation,)
            if self.feedback and stage == n_stages - 1:
                made += (self._channel("token") * m + action.microbatch,)
        elif kind == "B":
            made = (gradient, weight_gradient)
        elif kind == "I":
            made = (gradient,)
        elif kind == "W":
            made = (weight_gradient,)
        if self.edges:
            made += tuple(self._over_edges(action, makes=True))
        return made

    def _over_edges(self, action: Action, makes: bool) -> Iterator[int]:
        """Yield the values and value gradients that an action makes, or those that it needs."""
        if action.kind not in "FIB":
            return
        is_forward = action.kind == "F"
        first = self._channel("value" if is_forward else "value gradient")
        # Writers make values and need their gradients; readers need values and make gradients.
        by_writer = makes == is_forward
        for number, lane in enumerate(self._lanes):
            if action.stage == (lane.writer if by_writer else lane.reader):
                yield (first + number) * self.n_microbatches + action.microbatch

    def _channel(self, what: Literal["value", "value gradient", "token"]) -> int:
        """Return the first channel of a kind that comes after those by stage."""
        lanes_before = ("value", "value gradient", "token").index(what) * len(self._lanes)
        return len(_BY_STAGE) * len(self.shares) + lanes_before

    def describe(self, product: int) -> Product:
        """Return the product that a number stands for."""
        channel, microbatch = divmod(product, self.n_microbatches)
        kind, stage = divmod(channel, len(self.shares))
        if kind < len(_BY_STAGE):
            return Product(_BY_STAGE[kind], stage, microbatch)
        if channel == self._channel("token"):
            return Product("token", len(self.shares) - 1, microbatch)
        lane = self.lane_of(product)
        assert lane is not None
        name = self.edges[lane.edge].name
        if channel < self._channel("value gradient"):
            return Product("value", lane.writer, microbatch, name)
        return Product("value gradient", lane.reader, microbatch, name)

    def lane_of(self, product: int) -> Lane | None:
        """Return the lane that a value or value gradient crosses; None for another product."""
        number = product // self.n_microbatches - self._channel("value")
        if 0 <= number < 2 * len(self._lanes):
            return self._lanes[number % len(self._lanes)]
        return None

    def travel_times(
        self, transfers: Sequence[Time], edge_transfers: Sequence[Time], token_transfer: Time
    ) -> Sequence[Time]:
        """Return for each channel the time of a product on its way to another rank.

        The arguments are those of ``Timeline``; times that are unknown count as 0.
        """
        n_stages, n_lanes = len(self.shares), len(self._lanes)
        boundaries = [*transfers, *[0] * n_stages][: n_stages - 1]
        lanes = [*edge_transfers, *[0] * n_lanes][:n_lanes]
        # No rank needs the activation of the last stage, or the gradient of the first.
        activations = [*boundaries, 0]
        gradients = [0, *boundaries]
        # Replicas exchange weight gradients beside the schedule.
        weight_gradients = [0] * n_stages
        return [
            *activations,
            *gradients,
            *weight_gradients,
            *lanes,  # values
            *lanes,  # value gradients
            token_transfer,
        ]


class Times(NamedTuple):
    """For each action, when its rank and its inputs allow it, and when it is done."""

    ready: Sequence[Time]
    ends: Sequence[Time]

    @property
    def makespan(self) -> Time:
        return max(self.ends)


@dataclass(frozen=True)
class Precedence:
    """The actions of a schedule, numbered so that each comes after the actions it waits for.

    Attributes:
        places: the rank of each action, and its place in that rank's order.
        before: the number of the action before it on its rank; None for the first.
        received: the products that each action takes from other ranks. The products of its own rank
            are there when that rank is free.
        makers: for each product the number of the action that makes it.
        stuck: for each rank that cannot do all, the place of the action that it cannot start.
    """

    schedule: Schedule
    dependencies: Dependencies
    places: Sequence[tuple[int, int]]
    before: Sequence[int | None]
    received: Sequence[Sequence[int]]
    makers: Mapping[int, int]
    stuck: Mapping[int, int]

    @classmethod
    def of(cls, schedule: Schedule) -> "Precedence":
        """Go through a schedule until no rank can go on. It names only stages that exist."""
        dependencies = Dependencies.of(schedule)
        places: list[tuple[int, int]] = []
        before: list[int | None] = []
        received: list[Sequence[int]] = []
        makers: dict[int, int] = {}
        done = [0] * schedule.n_ranks
        last: list[int | None] = [None] * schedule.n_ranks
        # A rank sleeps until the product that it misses is made. So each action is looked at once,
        # and once more for each input that was missing.
        asleep: defaultdict[int, list[int]] = defaultdict(list)
        able = list(range(schedule.n_ranks))
        while able:
            rank = able.pop()
            row = schedule.actions[rank]
            for place in range(done[rank], len(row)):
                foreign: tuple[int, ...] = ()
                missing = None
                for product in dependencies.needed_by(row[place]):
                    maker = makers.get(product)
                    if maker is None:
                        missing = product
                        break
                    if places[maker][0] != rank:
                        foreign += (product,)
                if missing is not None:
                    asleep[missing].append(rank)
                    break

                number = len(places)
                places.append((rank, place))
                before.append(last[rank])
                received.append(foreign)
                last[rank] = number
                done[rank] += 1
                for product in dependencies.made_by(row[place]):
                    makers[product] = number
                    if product in asleep:
                        able += asleep.pop(product)
        stuck = {}
        for rank, row in enumerate(schedule.actions):
            if done[rank] < len(row):
                stuck[rank] = done[rank]
        return cls(schedule, dependencies, places, before, received, makers, stuck)

    def run(self, durations: Sequence[Time], delay_of: DelayOf) -> Times:
        """Do every action as early as its rank and its inputs allow."""
        ready: list[Time] = []
        ends: list[Time] = []
        for number, took in enumerate(durations):
            at, _ = self.allowed(number, ends, delay_of)
            ready.append(at)
            ends.append(at + took)
        return Times(ready, ends)

    def allowed(
        self, number: int, ends: Sequence[Time], delay_of: DelayOf
    ) -> tuple[Time, int | None]:
        """Return when an action may start, given ``ends``, and the product it waited for longest.

        The product is None if the action waited for its rank alone.
        """
        before = self.before[number]
        at = 0 if before is None else ends[before]
        by = None
        for product in self.received[number]:
            arrival = ends[self.makers[product]] + delay_of(number, product)
            if arrival > at:
                at, by = arrival, product
        return at, by

    def longest_path(self, ends: Sequence[Time], delay_of: DelayOf) -> list[tuple[int, int | None]]:
        """Return the actions that set the makespan, last first, and the product each waited for.

        The product is None if the action waited for its rank alone.
        """
        path = []
        last: int | None = max(range(len(ends)), key=ends.__getitem__)
        while last is not None:
            _, product = self.allowed(last, ends, delay_of)
            path.append((last, product))
            last = self.before[last] if product is None else self.makers[product]
        return path

    def link(self, number: int, product: int) -> Link:
        """Return the two ranks that a product travels between to the action ``number``."""
        here, _ = self.places[number]
        there, _ = self.places[self.makers[product]]
        return min(here, there), max(here, there)

    def delays(self, links: Mapping[Link, Time]) -> DelayOf:
        """Return the delay of products, given the delay of each link."""
        return lambda number, product: links[self.link(number, product)]

    def opens(self, number: int) -> bool:
        """Return whether an action waits for nothing, so that its earliest start is unknown."""
        return self.before[number] is None and not self.received[number]
