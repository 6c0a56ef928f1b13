"""A cluster to emulate: how long its ranks compute and its messages travel."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from course_pp.arguments import checked
from course_pp.schedule import Costs, Schedule, Time, Timeline, simulate
from course_pp.schedule.costs import refuse_impossible_number
from course_pp.schedule.edges import Lane, lanes_of
from course_pp.schedule.simulation import durations_of

__all__ = ["EmulatedCluster", "EmulatedLink"]

_MOST_JITTER = 10.0


@checked
@dataclass(frozen=True)
class EmulatedLink:
    """A link on which a message of n bytes takes ``latency + n / bandwidth``.

    Attributes:
        latency: seconds.
        bandwidth: bytes a second; None is unlimited.

    Raises:
        ValueError: for a negative or infinite number, or a bandwidth of 0.
    """

    latency: float = 0.0
    bandwidth: float | None = None

    def __post_init__(self) -> None:
        refuse_impossible_number("latency", self.latency, "in seconds")
        if self.bandwidth is not None:
            refuse_impossible_number("bandwidth", self.bandwidth, "in bytes a second, or None if unlimited")
            if self.bandwidth == 0:
                raise ValueError("bandwidth is 0: give bytes a second above 0, or None if unlimited")

    def seconds(self, nbytes: float) -> float:
        return self.latency + (nbytes / self.bandwidth if self.bandwidth else 0.0)


@checked
@dataclass(frozen=True)
class EmulatedCluster:
    """Chosen times for a run on real processes, with real messages and gradients.

    Attributes:
        costs: seconds of each action, stage by stage; and of each message, unless there are ``links``.
        links: one for all pairs of ranks; or one for each pair of neighbours: ``links[r]`` joins ranks r and r + 1.
            With as many links as ranks (more than two), the last one joins the last rank and rank 0. Other pairs use
            the links between them, the shorter way round.
        stragglers: by rank, the factor by which all that it computes takes longer: 1.5 is half as long again.
        jitter: standard deviation of an action's time over its mean. Times are log-normal, each action's own, and the
            same in every step.
        seed: of the jitter.

    Raises:
        ValueError: for numbers that are NaN, negative or infinite, and for message times in both ``costs`` and
            ``links``.
    """

    costs: Costs
    links: EmulatedLink | Sequence[EmulatedLink] | None = None
    stragglers: Mapping[int, float] = field(default_factory=dict)
    jitter: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        refuse_impossible_number("jitter", self.jitter, "such as 0.1 for a tenth")
        if self.jitter > _MOST_JITTER:
            raise ValueError(f"jitter is {self.jitter}: give at most {_MOST_JITTER}, such as 0.1 for a tenth")
        for rank, factor in self.stragglers.items():
            refuse_impossible_number(
                f"the straggler factor of rank {rank}", factor, "such as 1.5 for half as long again"
            )
        if self.links is None:
            return
        if self.costs.latency or self.costs.bandwidth is not None:
            raise ValueError("both costs and links say how long messages take: leave one of them out")

    @checked
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

    @checked
    def durations(self, schedule: Schedule, rank: int) -> list[float]:
        """Return the seconds of each action of ``rank``, in order."""
        planned = durations_of(schedule, self.costs)[rank]
        slowness = self.stragglers.get(rank, 1.0)
        return [float(time) * slowness * self._luck(rank, index) for index, time in enumerate(planned)]

    def transfer(
        self, source: int, target: int, crossed: int | Lane | str | None, nbytes: float, schedule: Schedule
    ) -> float:
        """Return the seconds of a message of ``nbytes``; a token is a few numbers, so its size does not count.

        Args:
            crossed: the boundary between stages ``crossed`` and ``crossed + 1``; or a reader of an edge; or ``"token"``
                for one that goes back to the first stage. None is any other message: gradients that replicas of a stage
                exchange, which cost nothing by ``costs``.
        """
        if self.links is None:
            if isinstance(crossed, str):
                return float(self.costs.token_transfer(schedule.n_stages))
            if isinstance(crossed, Lane):
                lanes = lanes_of(schedule.edges)
                return float(self.costs.edge_transfers(schedule.edges, schedule.n_stages)[lanes.index(crossed)])
            return 0.0 if crossed is None else float(self.costs.transfers(schedule.n_stages)[crossed])
        return self._link(source, target, schedule.n_ranks).seconds(0.0 if isinstance(crossed, str) else nbytes)

    @checked
    def predict(self, schedule: Schedule) -> Timeline:
        """Simulate ``schedule`` with these times; return the timeline, in seconds.

        If links have a bandwidth, ``costs.message_bytes`` is the size of messages. What replicas exchange before an
        update is left out.

        Raises:
            ValueError: for a schedule that cannot run on this cluster, and where the links between two stages differ
                from replica to replica.
        """
        if problem := self.problem_with(schedule):
            raise ValueError(problem)
        durations = [self.durations(schedule, rank) for rank in range(schedule.n_ranks)]
        sizes = self.costs.each("message_bytes", schedule.n_stages - 1)
        transfers = [self._between(schedule, boundary, size) for boundary, size in enumerate(sizes)]
        lanes = lanes_of(schedule.edges)
        sizes = self.costs.each("edge_bytes", len(lanes))
        over_edges = [self._between(schedule, *each) for each in zip(lanes, sizes, strict=True)]
        token = self._between(schedule, "token", 0) if schedule.feedback else None
        costs = replace(self.costs, latency=transfers, edge_latency=over_edges, token_latency=token, bandwidth=None)
        return replace(simulate(schedule, costs, durations), unit="s")

    def _luck(self, rank: int, index: int) -> float:
        if not self.jitter:
            return 1.0
        variance = math.log1p(self.jitter**2)  # so that the mean is 1 and the standard deviation `jitter`
        return random.Random(f"{self.seed} {rank} {index}").lognormvariate(-variance / 2, math.sqrt(variance))

    def _link(self, a: int, b: int, n_ranks: int) -> EmulatedLink:
        if self.links is None or isinstance(self.links, EmulatedLink):
            return self.links or EmulatedLink()
        low, high = sorted((a, b))
        way = [*self.links[low:high]]
        if len(self.links) == n_ranks and high - low > n_ranks - high + low:
            way = [*self.links[high:], *self.links[:low]]
        bandwidths = [link.bandwidth for link in way if link.bandwidth is not None]
        return EmulatedLink(sum(link.latency for link in way), min(bandwidths, default=None))

    def _between(self, schedule: Schedule, crossed: int | Lane | str, nbytes: Time) -> float:
        """Return the seconds of messages over a boundary, to a reader of an edge, or of tokens to the first stage."""
        if isinstance(crossed, str):
            ends = (schedule.n_stages - 1, 0)
        else:
            ends = (crossed.writer, crossed.reader) if isinstance(crossed, Lane) else (crossed, crossed + 1)
        pairs = {
            tuple(schedule.rank_of(stage, microbatch) for stage in ends)
            for microbatch in range(schedule.n_microbatches)
        }
        times = sorted(self.transfer(a, b, crossed, float(nbytes), schedule) for a, b in pairs if a != b)
        for one, other in pairwise(times):
            if one != other:
                raise ValueError(
                    f"messages between stages {ends[0]} and {ends[1]} take {one} s or {other} s, as replicas "
                    "have different links: give all of these the same"
                )
        return times[0] if times else 0.0
