"""An emulated cluster: chosen times for real work, and the timeline that it leaves.

An action starts when its rank is free and its inputs have arrived. It ends its chosen time later,
or when the real work is done if that takes longer. The rank sleeps until then, and stamps the end
on the messages it sends. A receiver adds the link's time to that stamp, not to the moment it woke
up, so the scheduling noise of many ranks on a few cores does not add up. To show that this is no
replay of the simulator, the real times are kept beside the emulated ones.
"""

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
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
# A run that lost more than this part of its time to overruns is not the one that was asked for.
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
        return self.latency + (nbytes / self.bandwidth if self.bandwidth else 0.0)


@checked
@dataclass(frozen=True)
class EmulatedCluster:
    """Chosen times for a run on real processes, with real messages and gradients.

    Attributes:
        costs: seconds of each action, stage by stage; and of each message, unless there are
            ``links``.
        links: one for all pairs of ranks; or one for each pair of neighbours: ``links[r]`` joins
            ranks r and r + 1. With as many links as ranks (more than two), the last one joins the
            last rank and rank 0. Other pairs use the links between them, the shorter way round.
        stragglers: by rank, the factor by which all that it computes takes longer: 1.5 is half as
            long again.
        jitter: standard deviation of an action's time over its mean. Times are log-normal, each
            action's own, and the same in every step.
        seed: of the jitter.

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
        fits = {n - 1: "a line"} | ({n: "a ring"} if n > 2 else {})
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
        slowness = self.stragglers.get(rank, 1.0)
        return [
            float(time) * slowness * self._luck(rank, index) for index, time in enumerate(planned)
        ]

    def transfer(
        self, product: Product, source: int, target: int, nbytes: float, schedule: Schedule
    ) -> float:
        """Return the seconds in which ``product`` gets from rank ``source`` to rank ``target``.

        A token's size does not count. What replicas of a stage exchange costs nothing by ``costs``.
        """
        if self.links is not None:
            return self._link(source, target, schedule.n_ranks).seconds(
                0.0 if product.what == "token" else nbytes
            )
        if product.what == "token":
            return float(self.costs.token_transfer(schedule.n_stages))
        if product.name:
            number, edge = next(
                (i, e) for i, e in enumerate(schedule.edges) if e.name == product.name
            )
            reader = product.stage
            if product.what == "value":  # the first reader there receives it
                reader = next(
                    stage
                    for stage in edge.readers
                    if schedule.rank_of(stage, product.microbatch) == target
                )
            lane = lanes_of(schedule.edges).index(Lane(number, edge.writer, reader))
            return float(self.costs.edge_transfers(schedule.edges, schedule.n_stages)[lane])
        boundary = {"activation": product.stage, "gradient": product.stage - 1}.get(product.what)
        return 0.0 if boundary is None else float(self.costs.transfers(schedule.n_stages)[boundary])

    def predict(self, schedule: Schedule) -> Timeline:
        """Simulate ``schedule`` with these times; return the timeline, in seconds.

        If links have a bandwidth, ``costs.message_bytes`` is the size of messages. What replicas
        exchange before an update is left out. Raises ValueError where replicas have different links
        between two stages.
        """
        if problem := self.problem_with(schedule):
            raise ValueError(problem)
        durations = [self.durations(schedule, rank) for rank in range(schedule.n_ranks)]
        costs = self.costs
        if self.links is not None:
            lanes, sizes = (
                lanes_of(schedule.edges),
                costs.each("message_bytes", schedule.n_stages - 1),
            )
            edge_sizes = costs.each("edge_bytes", len(lanes))
            over_edges = zip(lanes, edge_sizes, strict=True)
            costs = replace(
                costs,
                latency=[
                    self._over_links(schedule, stage, stage + 1, size)
                    for stage, size in enumerate(sizes)
                ],
                edge_latency=[
                    self._over_links(schedule, lane.writer, lane.reader, size)
                    for lane, size in over_edges
                ],
                token_latency=(
                    self._over_links(schedule, schedule.n_stages - 1, 0, 0)
                    if schedule.feedback
                    else None
                ),
            )
        return replace(simulate(schedule, costs, durations), unit="s")

    def _luck(self, rank: int, index: int) -> float:
        if not self.jitter:
            return 1.0
        # so that the mean is 1 and the standard deviation `jitter`
        variance = math.log1p(self.jitter**2)
        return random.Random(f"{self.seed} {rank} {index}").lognormvariate(
            -variance / 2, math.sqrt(variance)
        )

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
        """Return the seconds of a message of ``nbytes`` between two stages; 0 if they are always on one rank."""
        pairs = {
            tuple(schedule.rank_of(stage, microbatch) for stage in (source, target))
            for microbatch in range(schedule.n_microbatches)
        }
        times = sorted(
            self._link(a, b, schedule.n_ranks).seconds(float(nbytes)) for a, b in pairs if a != b
        )
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
    """What an emulated cluster did, in chosen times, and on the ``wall`` clock, with the same time 0."""

    wall: Timeline = field(default_factory=lambda: Timeline(1, ()))
    overruns: tuple[Overrun, ...] = ()

    @cached_property
    def lateness(self) -> tuple[float, ...]:
        """For each rank the largest delay of an action's real start behind its chosen start, in
        seconds.

        The rank was still asleep, or waited for a core. A delay does no harm if the work ends
        within its chosen time.
        """
        late = [0.0] * self.n_ranks
        for chosen, real in zip(self.by_rank, self.wall.by_rank, strict=True):
            for planned, began in zip(chosen, real, strict=True):
                late[planned.rank] = max(late[planned.rank], float(began.start - planned.start))
        return tuple(late)

    @cached_property
    def trouble(self) -> str:
        """Why this is not the run that was asked for; empty if it is, to half a percent."""
        # In all, because overruns add up along a chain of actions even if each is on another rank.
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
        told = (
            f"{len(self.overruns)} overruns, late by {format_time(max(self.lateness), 's')} at most"
        )
        told += f", {format_time(self.wall.makespan, 's')} of real time"
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
    """The clock of one rank."""

    def __init__(
        self,
        cluster: EmulatedCluster,
        schedule: Schedule,
        rank: int,
        wait_for_device: Callable[[], None],
    ) -> None:
        self._cluster, self._schedule = cluster, schedule
        self._durations = [
            round(seconds * _NANOSECONDS) for seconds in cluster.durations(schedule, rank)
        ]
        self._wait_for_device = wait_for_device
        self.begin()

    def begin(self) -> None:
        self.done: list[Emulated] = []
        self.received: list[tuple[Product, int, int]] = []
        self._index, self._begun = 0, time.monotonic_ns()
        self._free: int | None = None
        self._arrivals: list[tuple[Product, int]] = []

    def stamped(self, value: Any) -> Any:
        """Return ``value`` with the time at which it was ready, as it is sent."""
        return {"value": value, "ready": torch.tensor(self._free)}

    def opened(self, message: Message, stamped: Any) -> Any:
        """Return the value in what was received, and note when it arrives."""
        value, product = stamped["value"], message.content
        assert isinstance(product, Product)
        nbytes = sum(tensor.nbytes for tensor in plain_tensors(value))
        on_its_way = self._cluster.transfer(
            product, message.source, message.target, nbytes, self._schedule
        )
        self._arrivals.append((product, int(stamped["ready"]) + round(on_its_way * _NANOSECONDS)))
        return value

    @contextmanager
    def action(self, action: Action | Overlap) -> Iterator[None]:
        """Run the real work of ``action`` in the body of a ``with``, and sleep until its chosen end."""
        start = self._start()
        _sleep_until(start)
        real_start = time.monotonic_ns()
        yield
        self._wait_for_device()
        real_end, due = time.monotonic_ns(), start + self._durations[self._index]
        _sleep_until(due)
        end = self._free = max(due, real_end)
        self.done.append(Emulated(action, start, end, real_start, real_end, end - due))
        self._index += 1

    def _start(self) -> int:
        arrivals, self._arrivals = self._arrivals, []
        if self._free is None and not arrivals:
            return time.monotonic_ns()
        # A rank that was late for the step is taken to have been there: that is noise of this
        # machine too.
        free = (
            min(self._begun, *(arrival for _, arrival in arrivals))
            if self._free is None
            else self._free
        )
        for product, arrival in arrivals:
            if arrival > free:
                self.received.append((product, free, arrival))
                free = arrival
        return free


def _sleep_until(moment: int) -> None:
    remaining = moment - time.monotonic_ns()
    if remaining > 0:
        time.sleep(remaining / _NANOSECONDS)
