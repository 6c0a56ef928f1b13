"""An emulated cluster: chosen times for real work, and the timeline that it leaves.

An action starts when its rank is free and its inputs have arrived. It ends its chosen time later,
or when the real work is done if that takes longer. The rank sleeps until then, and stamps the end
on the messages it sends. A receiver adds the link's time to that stamp, not to the moment when it
woke up, so the scheduling noise of many ranks on a few cores does not add up. The real times are
kept beside the emulated times, to show that this is no replay of the simulator.
"""

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from course_pp.base.arguments import checked
from course_pp.runtime.messages import Message
from course_pp.runtime.payload import plain_tensors
from course_pp.schedule import Action, Costs, Overlap, Product, Schedule, Time, Timeline, simulate
from course_pp.schedule.action import format_time
from course_pp.schedule.costs import refuse_impossible_number
from course_pp.schedule.edges import Lane, lanes_of
from course_pp.schedule.simulation import durations_of

_NANOSECONDS = 10**9
# If a run loses more than this part of its time to overruns, it is not the chosen run any more.
_TOLERATED = 0.005


@checked
@dataclass(frozen=True)
class EmulatedLink:
    """A link on which a message of n bytes takes ``latency + n / bandwidth``.

    Attributes:
        latency: seconds.
        bandwidth: bytes a second; None is unlimited.
    """

    latency: float = 0.0
    bandwidth: float | None = None

    def __post_init__(self) -> None:
        refuse_impossible_number("latency", self.latency, "in seconds")
        if self.bandwidth is not None:
            refuse_impossible_number(
                "bandwidth", self.bandwidth, "in bytes a second, or None if unlimited"
            )
            if self.bandwidth == 0:
                raise ValueError(
                    "bandwidth is 0: give bytes a second above 0, or None if unlimited"
                )

    def seconds(self, nbytes: float) -> float:
        """Return the time of a message of ``nbytes``."""
        if self.bandwidth is None:
            return self.latency
        return self.latency + nbytes / self.bandwidth


@checked
@dataclass(frozen=True)
class EmulatedCluster:
    """Chosen times for a run on real processes, with real messages and gradients.

    Attributes:
        costs: seconds of each action, stage by stage; and of each message, unless there are
            ``links``.
        links: one link for all pairs of ranks; or one for each pair of neighbours: ``links[r]``
            joins ranks r and r + 1. With as many links as ranks (more than two), the last link
            joins the last rank and rank 0. Other pairs use the links between them, the shorter way
            round.
        stragglers: the factor of each slow rank's computing time: 1.5 is half as long again.
        jitter: standard deviation of an action's time over its mean. Times are log-normal, differ
            from action to action, and are the same in every step.
        seed: seed of the jitter.

    Raises:
        ValueError: for impossible numbers, and for message times in both ``costs`` and ``links``.
    """

    costs: Costs
    links: EmulatedLink | Sequence[EmulatedLink] | None = None
    stragglers: Mapping[int, float] = field(default_factory=dict)
    jitter: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        refuse_impossible_number("jitter", self.jitter, "such as 0.1 for a tenth")
        for rank, factor in self.stragglers.items():
            refuse_impossible_number(f"the straggler factor of rank {rank}", factor, "such as 1.5")
        if self.links is not None and (self.costs.latency or self.costs.bandwidth is not None):
            raise ValueError(
                "both costs and links say how long messages take: leave one of them out"
            )

    def problem_with(self, schedule: Schedule) -> str | None:
        """Return why this cluster cannot run ``schedule``; None if it can."""
        n = schedule.n_ranks
        if odd := [rank for rank in self.stragglers if not 0 <= rank < n]:
            return f"rank {odd[0]} is a straggler of {n} ranks: name ranks from 0 to {n - 1}"
        fits = {n - 1: "a line"}
        if n > 2:
            fits[n] = "a ring"
        if isinstance(self.links, Sequence) and len(self.links) not in fits:
            ways = " or ".join(f"{number} for {shape} of ranks" for number, shape in fits.items())
            return f"{len(self.links)} links for {n} ranks: give one for all of them, or {ways}"
        try:
            self.costs.durations(schedule.n_stages)
            self.costs.transfers(schedule.n_stages)
            self.costs.edge_transfers(schedule.edges, schedule.n_stages)
        except ValueError as error:
            return str(error)
        return None

    def durations(self, schedule: Schedule, rank: int) -> list[float]:
        """Return the seconds of each action of ``rank``, in order."""
        planned = durations_of(schedule, self.costs)[rank]
        factor = self.stragglers.get(rank, 1.0)
        return [float(time) * factor * self._luck(rank, i) for i, time in enumerate(planned)]

    def transfer(
        self, product: Product, source: int, target: int, nbytes: float, schedule: Schedule
    ) -> float:
        """Return the seconds in which ``product`` gets from rank ``source`` to rank ``target``.

        A token's size does not count. ``costs`` gives no time to the exchange between replicas.
        """
        if self.links is not None:
            size = 0.0 if product.what == "token" else nbytes
            return self._link(source, target, schedule.n_ranks).seconds(size)
        if product.what == "token":
            return float(self.costs.token_transfer(schedule.n_stages))
        if product.name:
            number = [edge.name for edge in schedule.edges].index(product.name)
            edge = schedule.edges[number]
            reader = product.stage
            if product.what == "value":  # the first reader there receives it
                ranks = [schedule.rank_of(stage, product.microbatch) for stage in edge.readers]
                reader = edge.readers[ranks.index(target)]
            lane = lanes_of(schedule.edges).index(Lane(number, edge.writer, reader))
            return float(self.costs.edge_transfers(schedule.edges, schedule.n_stages)[lane])
        boundary = {"activation": product.stage, "gradient": product.stage - 1}.get(product.what)
        if boundary is None:
            return 0.0
        return float(self.costs.transfers(schedule.n_stages)[boundary])

    def predict(self, schedule: Schedule) -> Timeline:
        """Simulate ``schedule`` with these times; return the timeline, in seconds.

        If links have a bandwidth, ``costs.message_bytes`` is the size of messages. The exchange of
        replicas before an update is left out. Raises ValueError where replicas have different links
        between two stages.
        """
        if problem := self.problem_with(schedule):
            raise ValueError(problem)
        durations = [self.durations(schedule, rank) for rank in range(schedule.n_ranks)]
        costs = self.costs
        if self.links is not None:
            between = partial(self._over_links, schedule)
            latency = []
            for stage, size in enumerate(costs.each("message_bytes", schedule.n_stages - 1)):
                latency.append(between(stage, stage + 1, size))
            edge_latency = []
            lanes = lanes_of(schedule.edges)
            for lane, size in zip(lanes, costs.each("edge_bytes", len(lanes)), strict=True):
                edge_latency.append(between(lane.writer, lane.reader, size))
            token_latency = None
            if schedule.feedback:
                token_latency = between(schedule.n_stages - 1, 0, 0)
            costs = replace(
                costs, latency=latency, edge_latency=edge_latency, token_latency=token_latency
            )
        return replace(simulate(schedule, costs, durations), unit="s")

    def _luck(self, rank: int, index: int) -> float:
        if not self.jitter:
            return 1.0
        # With this variance of the logarithm the mean is 1 and the standard deviation `jitter`.
        variance = math.log1p(self.jitter**2)
        dice = random.Random(f"{self.seed} {rank} {index}")
        return dice.lognormvariate(-variance / 2, math.sqrt(variance))

    def _link(self, a: int, b: int, n_ranks: int) -> EmulatedLink:
        if not isinstance(self.links, Sequence):
            return self.links or EmulatedLink()
        low, high = sorted((a, b))
        way = [*self.links[low:high]]
        if len(self.links) == n_ranks and high - low > n_ranks - high + low:
            way = [*self.links[high:], *self.links[:low]]
        bandwidths = [link.bandwidth for link in way if link.bandwidth is not None]
        return EmulatedLink(sum(link.latency for link in way), min(bandwidths, default=None))

    def _over_links(self, schedule: Schedule, source: int, target: int, nbytes: Time) -> float:
        """Return the seconds of a message between two stages; 0 if they are always on one rank."""
        found = set()
        for microbatch in range(schedule.n_microbatches):
            a, b = schedule.rank_of(source, microbatch), schedule.rank_of(target, microbatch)
            if a != b:
                found.add(self._link(a, b, schedule.n_ranks).seconds(float(nbytes)))
        times = sorted(found)
        for one, other in pairwise(times):
            if one != other:
                raise ValueError(
                    f"messages between stages {source} and {target} take {one} s or {other} s, as"
                    " replicas have different links: give all of these the same"
                )
        return times[0] if times else 0.0


@dataclass(frozen=True, slots=True)
class Overrun:
    """An action whose real work took ``seconds`` longer than its chosen time."""

    rank: int
    action: Action | Overlap
    seconds: float


@dataclass(frozen=True, repr=False)
class EmulatedTimeline(Timeline):
    """The run of an emulated cluster in chosen times.

    Attributes:
        wall: the same run in real times, with the same time 0.
        overruns: the actions whose real work outlasted their chosen time.
    """

    wall: Timeline = field(default_factory=lambda: Timeline(1, ()))
    overruns: tuple[Overrun, ...] = ()

    @cached_property
    def lateness(self) -> tuple[float, ...]:
        """The largest delay of an action's real start behind its chosen start, in seconds, by rank.

        A delayed rank was still asleep, or waited for a core. A delay does no harm if the work ends
        within its chosen time.
        """
        late = [0.0] * self.n_ranks
        for chosen, real in zip(self.by_rank, self.wall.by_rank, strict=True):
            for planned, began in zip(chosen, real, strict=True):
                late[planned.rank] = max(late[planned.rank], float(began.start - planned.start))
        return tuple(late)

    @cached_property
    def trouble(self) -> str:
        """The reason why this is not the chosen run; empty if it is, to half a percent."""
        # All overruns together, because they add up along a chain of actions on several ranks.
        lost = sum(overrun.seconds for overrun in self.overruns)
        share = lost / self.makespan if self.makespan else 0.0
        if share <= _TOLERATED:
            return ""
        longest = max(span.duration for span in self.wall.spans)
        return (
            f"not the cluster that was asked for: {len(self.overruns)} of {len(self.spans)} actions"
            f" outlasted their chosen time, by {share:.1%} of the run in all. Real work takes up to"
            f" {format_time(longest, 's')} an action here: choose times of twice that, or compute"
            " less"
        )

    def __repr__(self) -> str:
        late = format_time(max(self.lateness), "s")
        real = format_time(self.wall.makespan, "s")
        told = f"{len(self.overruns)} overruns, late by {late} at most, {real} of real time"
        trouble = f"; {self.trouble}" if self.trouble else ""
        return f"Emulated{super().__repr__()[:-1]}, {told}{trouble})"


class Emulated(NamedTuple):
    """One action of an emulated rank: chosen and real times, in nanoseconds of the host's clock."""

    action: Action | Overlap
    start: int
    end: int
    real_start: int
    real_end: int
    overrun: int


class Emulator:
    """The emulated clock of one rank.

    Attributes:
        done: the actions of this step.
        received: the waits of this step: a product, and the start and the end of the wait.
    """

    def __init__(
        self,
        cluster: EmulatedCluster,
        schedule: Schedule,
        rank: int,
        wait_for_device: Callable[[], None],
    ) -> None:
        self._cluster = cluster
        self._schedule = schedule
        seconds = cluster.durations(schedule, rank)
        self._durations = [round(each * _NANOSECONDS) for each in seconds]
        self._wait_for_device = wait_for_device
        self.begin()

    def begin(self) -> None:
        """Start a step."""
        self.done: list[Emulated] = []
        self.received: list[tuple[Product, int, int]] = []
        self._index = 0
        self._begun = time.monotonic_ns()
        self._free: int | None = None
        self._arrivals: list[tuple[Product, int]] = []

    def stamped(self, value: Any) -> Any:
        """Return ``value`` with the time at which it was ready, for sending."""
        return {"value": value, "ready": torch.tensor(self._free)}

    def opened(self, message: Message, stamped: Any) -> Any:
        """Return the value in a received message, and note when it arrives."""
        value = stamped["value"]
        product = message.content
        assert isinstance(product, Product)
        nbytes = sum(tensor.nbytes for tensor in plain_tensors(value))
        on_its_way = self._cluster.transfer(
            product, message.source, message.target, nbytes=nbytes, schedule=self._schedule
        )
        self._arrivals.append((product, int(stamped["ready"]) + round(on_its_way * _NANOSECONDS)))
        return value

    @contextmanager
    def action(self, action: Action | Overlap) -> Iterator[None]:
        """Run the real work of ``action`` inside, and sleep until its chosen end."""
        start = self._start()
        _sleep_until(start)
        real_start = time.monotonic_ns()
        yield
        self._wait_for_device()
        real_end = time.monotonic_ns()
        due = start + self._durations[self._index]
        _sleep_until(due)
        end = self._free = max(due, real_end)
        self.done.append(Emulated(action, start, end, real_start, real_end, end - due))
        self._index += 1

    def _start(self) -> int:
        arrivals, self._arrivals = self._arrivals, []
        if self._free is None and not arrivals:
            return time.monotonic_ns()
        free = self._free
        if free is None:
            # A rank that came late to the step counts as ready for the first message: the delay is
            # noise of this machine too.
            free = min(self._begun, *(arrival for _, arrival in arrivals))
        for product, arrival in arrivals:
            if arrival > free:
                self.received.append((product, free, arrival))
                free = arrival
        return free


def _sleep_until(moment: int) -> None:
    remaining = moment - time.monotonic_ns()
    if remaining > 0:
        time.sleep(remaining / _NANOSECONDS)
