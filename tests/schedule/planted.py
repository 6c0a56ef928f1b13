"""Simulated runs with planted faults, and the true cost of each fault."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise, permutations

from course_pp.schedule import Costs, Schedule, Span, Timeline, simulate
from course_pp.schedule.simulation import durations_of

CAUSES = ("imbalance", "transfer", "launch", "straggler")
COSTS = Costs(forward=0.02, input_grad=0.02, weight_grad=0.02)


@dataclass(frozen=True)
class Planted:
    """A pipeline with faults, in seconds.

    Attributes:
        links: {(lower rank, higher rank): time of a message}. Other links take
            ``usual_transfer``.
        launch: mean time before each action. It varies by the share ``launch_spread`` either way.
        jitter: standard deviation of an action's time, divided by its mean.
    """

    schedule: Schedule
    costs: Costs = COSTS
    slowdown: Mapping[int, float] = field(default_factory=dict)
    links: Mapping[tuple[int, int], float] = field(default_factory=dict)
    usual_transfer: float = 0.0005
    launch: float = 0.0002
    launch_spread: float = 0.5
    jitter: float = 0.02
    seed: int = 0

    def measured(self) -> Timeline:
        return self.run(frozenset(CAUSES), varied=True)

    def run(self, causes: frozenset[str], varied: bool = False) -> Timeline:
        """Return the run with just these causes, and with jitter if ``varied``."""
        schedule, luck = self.schedule, random.Random(self.seed)
        work = self._work() if "imbalance" in causes else self._balanced_work()
        gaps, lengths = [], []
        for rank, row in enumerate(work):
            slowdown = self.slowdown.get(rank, 1.0) if "straggler" in causes else 1.0
            spread = self.launch_spread * varied
            launch = self.launch * ("launch" in causes)
            gaps.append([launch * luck.uniform(1 - spread, 1 + spread) for _ in row])
            lengths.append(
                [time * slowdown * (luck.gauss(1, self.jitter) if varied else 1) for time in row]
            )
        together = [
            [gap + time for gap, time in zip(*both, strict=True)]
            for both in zip(gaps, lengths, strict=True)
        ]
        transfers = self._transfers() if "transfer" in causes else 0
        tl = simulate(schedule, Costs(latency=transfers), together)
        spans = [
            Span(span.rank, span.action, span.start + gap, span.end)
            for rank, row in enumerate(tl.by_rank)
            for span, gap in zip(row, gaps[rank], strict=True)
        ]
        # A recorder's time 0 is the start of the first action.
        zero = min(span.start for span in spans)
        spans = [replace(span, start=span.start - zero, end=span.end - zero) for span in spans]
        return Timeline(schedule.n_ranks, tuple(spans), "s", name=schedule.name, measured=True)

    def truth(self) -> dict[str, float]:
        """Return the true loss to each cause, and the rest.

        The loss is the time that a cause adds to the makespan, averaged over all orders in which
        the causes can be added. The rest is due to jitter.
        """

        @cache
        def makespan(causes: frozenset[str]) -> float:
            return float(self.run(causes).makespan)

        orders = list(permutations(CAUSES))
        lost = dict.fromkeys(CAUSES, 0.0)
        for order in orders:
            for place, cause in enumerate(order):
                before = frozenset(order[:place])
                lost[cause] += (makespan(before | {cause}) - makespan(before)) / len(orders)
        return lost | {"rest": float(self.measured().makespan) - makespan(frozenset(CAUSES))}

    def _work(self) -> list[list[float]]:
        return [[float(time) for time in row] for row in durations_of(self.schedule, self.costs)]

    def _balanced_work(self) -> list[list[float]]:
        mean = {
            kind: sum(times) / len(times)
            for kind, times in self.costs.durations(self.schedule.n_stages).items()
        }
        return [
            [sum(mean[part.kind] for part in action.parts) for action in row]
            for row in self.schedule.actions
        ]

    def _transfers(self) -> list[float]:
        ranks = [placed[0] for placed in self.schedule.placement]
        pairs = [(min(pair), max(pair)) for pair in pairwise(ranks)]
        return [self.links.get(pair, self.usual_transfer) for pair in pairs]
