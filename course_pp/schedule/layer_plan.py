"""PipeDream's planner: which layers make a stage, and how many ranks share it, so that the slowest
part is fastest.

Narayanan et al. 2019, "PipeDream", section 3.1: dynamic programming over the last stage and its
ranks, first for the ranks of one node, then for nodes in place of ranks, with the slower links
between them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

from course_pp.base.arguments import checked, refuse_unless
from course_pp.schedule.costs import Costs
from course_pp.schedule.families import pipedream
from course_pp.schedule.simulation import simulate

_MOST_COMPARISONS = 100_000_000  # a minute or two
# Microbatches of a quarter of a simulated run, of which the two in the middle are the steady state.
_FEWEST_PACED = 12
_MOST_PACED = 200_000  # forwards in a simulation; it takes seconds


@dataclass(frozen=True)
class LayerCost:
    """The costs of a layer.

    Attributes:
        time: time of its forward and backward for one microbatch, in seconds or any other unit.
        output_bytes: size of its output for one microbatch, which crosses a boundary behind it, and
            back as a gradient.
        weight_bytes: size of its weights, and so of their gradients.
    """

    time: float
    output_bytes: float = 0.0
    weight_bytes: float = 0.0


@dataclass(frozen=True)
class ClusterLevel:
    """``size`` ranks of a node, or nodes; ``bandwidth`` bytes in a unit of time between any two."""

    size: int
    bandwidth: float = math.inf


@dataclass(frozen=True, order=True)
class PlannedStage:
    """Layers ``start`` to ``end``, the last excluded, on ``replicas`` ranks."""

    start: int
    end: int
    replicas: int


@dataclass(frozen=True)
class Partition:
    """A plan.

    Attributes:
        slowest: what the planner minimises: the time between two microbatches in the steady state,
            if nobody waits and the exchange of gradients is hidden behind work. No run is faster;
            :meth:`pace` says how much slower one is.
        work: time of each stage, for one microbatch on one rank.
        messages: for each boundary, the time that an activation is on its way, and a gradient back.
    """

    stages: tuple[PlannedStage, ...]
    slowest: float
    work: tuple[float, ...]
    messages: tuple[float, ...]

    @property
    def replicas(self) -> tuple[int, ...]:
        """The ranks of each stage, as ``build("pipedream", …, replicas=…)`` takes them."""
        return tuple(stage.replicas for stage in self.stages)

    def costs(self, *, forward: float = 1 / 3, update: float = 0.0) -> Costs:
        """Return the costs for `simulate` and an emulated cluster.

        Of a stage's work ``forward`` and ``update`` are the shares of the forward and of the
        optimizer step; the rest is backward, half of it for the weights.
        """
        half = tuple((1 - forward - update) / 2 * each for each in self.work)
        return Costs(
            tuple(forward * each for each in self.work),
            half,
            half,
            latency=self.messages or 0,
            update=tuple(update * each for each in self.work),
        )

    def pace(self, *, forward: float = 1 / 3, update: float = 0.0) -> float:
        """Return the time between two microbatches in the steady state, with what ranks wait for
        each other.

        It is `slowest` unless NOAM microbatches under way (:func:`theory.noam`) are too few: long
        messages want more, and so do replicas, which update together and then all want a microbatch
        at once. The arguments are those of :meth:`costs`. It is simulated, as no closed form is
        known.
        """
        turn = math.lcm(*self.replicas)
        quarter = turn * -(-max(_FEWEST_PACED, 2 * sum(self.replicas)) // turn)
        if 4 * quarter * len(self.replicas) > _MOST_PACED:
            raise ValueError(
                f"replicas {self.replicas} take turns that come together only every {turn:,}"
                " microbatches, too many to simulate: give stages numbers of replicas with common"
                " factors, or take slowest, a lower bound"
            )
        order = pipedream(sum(self.replicas), 4 * quarter, self.replicas)
        run = simulate(order, self.costs(forward=forward, update=update))
        ends = {
            part.microbatch: span.end
            for span in run.by_rank[0]
            for part in span.action.parts
            if part.kind == "U"
        }
        return max(self.slowest, float(ends[3 * quarter] - ends[quarter]) / (2 * quarter))


@dataclass(frozen=True, order=True)
class _BestStages:
    slowest: float
    n_stages: int
    stages: tuple[PlannedStage, ...]
    messages: tuple[float, ...]


@checked
def partition(layers: Sequence[LayerCost], levels: Sequence[ClusterLevel] | int) -> Partition:
    """Return the contiguous stages, and ranks for each, whose slowest part is the fastest.

    With m replicas a stage takes the larger of its work and the exchange of its gradients, 2 (m -
    1) weight bytes over the bandwidth, divided by m; a boundary takes twice its bytes over the
    bandwidth. Among equally fast plans it takes fewer stages.

    Args:
        layers: first to last.
        levels: the cluster from inside out, such as ``[ClusterLevel(8, 300e9), ClusterLevel(4,
            25e9)]`` for four nodes of eight ranks. A number of ranks joins them by links that cost
            nothing.
    """
    if isinstance(levels, int):
        levels = [ClusterLevel(levels)]
    refuse_unless(bool(layers), "partition", "layers", layers, "give at least one")
    ranks_fit = bool(levels) and all(level.size >= 1 for level in levels)
    refuse_unless(
        ranks_fit,
        "partition",
        "levels",
        levels,
        "give at least one level of at least one part, or a number",
    )
    n = len(layers)
    comparisons = sum(n**3 * level.size**2 // 4 for level in levels)
    if comparisons > _MOST_COMPARISONS:
        raise ValueError(
            f"layers: {n} of them on levels of {[level.size for level in levels]} make"
            f" {comparisons:,} comparisons: put layers together, or plan for fewer ranks"
        )
    times = list(accumulate((layer.time for layer in layers), initial=0.0))
    weights = list(accumulate((layer.weight_bytes for layer in layers), initial=0.0))

    @cache
    def best(depth: int, start: int, end: int, size: int) -> _BestStages:
        """Return A^k(start → end, size) of the paper: these layers on ``size`` parts of a level."""
        bandwidth = levels[depth - 1].bandwidth
        found = [one_stage(depth, start, end, size)]
        for cut in range(start + 1, end):
            crossing = 2 * layers[cut - 1].output_bytes / bandwidth
            for last in range(1, size):
                before, after = (
                    best(depth, start, cut, size - last),
                    one_stage(depth, cut, end, last),
                )
                slowest = max(before.slowest, crossing, after.slowest)
                stages = before.stages + after.stages
                messages = (*before.messages, crossing / 2, *after.messages)
                found.append(_BestStages(slowest, len(stages), stages, messages))
        return min(found)

    def one_stage(depth: int, start: int, end: int, size: int) -> _BestStages:
        """Return T^k(start → end, size): the same as one stage that all parts share."""
        exchanged = 2 * (size - 1) * (weights[end] - weights[start]) / levels[depth - 1].bandwidth
        if depth == 1:
            inside = _BestStages(times[end] - times[start], 1, (PlannedStage(start, end, 1),), ())
        else:
            inside = best(depth - 1, start, end, levels[depth - 2].size)
        replicated = tuple(PlannedStage(s.start, s.end, s.replicas * size) for s in inside.stages)
        return _BestStages(
            max(inside.slowest, exchanged) / size, len(replicated), replicated, inside.messages
        )

    plan = best(len(levels), 0, n, levels[-1].size)
    work = (
        float(sum(layer.time for layer in layers[stage.start : stage.end])) for stage in plan.stages
    )
    return Partition(plan.stages, plan.slowest, tuple(work), plan.messages)
