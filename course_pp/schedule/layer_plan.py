"""PipeDream's planner: it cuts layers into stages and shares stages among ranks, for most speed.

The algorithm is from Narayanan et al. 2019, "PipeDream", section 3.1. It is dynamic programming
over the last stage and its ranks. It runs first for the ranks of one node, then once more with
nodes in place of ranks and the slower links between them.
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
# The least microbatches in a quarter of a simulated run. The first quarter holds the warm-up and
# the last one the drain, so the pace is measured over the two quarters in the middle.
_FEWEST_PACED = 12
_MOST_PACED = 200_000  # forwards in a simulation; it takes seconds


@dataclass(frozen=True)
class LayerCost:
    """The costs of a layer.

    Attributes:
        time: time of the layer's forward and backward for one microbatch, in any unit.
        output_bytes: size of the layer's output for one microbatch. It crosses a boundary behind
            the layer, and comes back as a gradient.
        weight_bytes: size of the layer's weights, and so of their gradients.
    """

    time: float
    output_bytes: float = 0.0
    weight_bytes: float = 0.0


@dataclass(frozen=True)
class ClusterLevel:
    """One level of a cluster: the ranks of a node, or the nodes.

    Attributes:
        size: the number of ranks or nodes.
        bandwidth: bytes in a unit of time between any two of them.
    """

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
        slowest: the time that the planner minimises. It is the time between two microbatches in the
            steady state, if no rank waits and the exchange of gradients is hidden behind work. No
            run is faster; :meth:`pace` returns the time of a run in which ranks wait.
        work: time of each stage, for one microbatch on one rank.
        messages: time that an activation is on its way over each boundary. A gradient takes as
            long.
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

        Args:
            forward: the share of the forward in a stage's work.
            update: the share of the optimizer step. The rest is backward, half of it for the
                weights.
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
        """Return the time between two microbatches in the steady state, waiting included.

        It is `slowest` unless NOAM microbatches under way (:func:`theory.noam`) are too few. Long
        messages need more. So do replicas, which update together and then all ask for a microbatch
        at once. The arguments are the ones of :meth:`costs`. The time is simulated, because no
        closed form is known.
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
    """Return the contiguous stages, and the ranks of each, whose slowest part is the fastest.

    The exchange of the gradients of m replicas takes 2 (m - 1) weight bytes over the bandwidth. The
    time of a stage is the larger of its work and this exchange, divided by m. A boundary takes
    twice its bytes over the bandwidth. Among equally fast plans the one with fewer stages is
    taken.

    Args:
        layers: costs of the layers, first to last.
        levels: levels of the cluster from inside out, such as ``[ClusterLevel(8, 300e9),
            ClusterLevel(4, 25e9)]`` for four nodes of eight ranks. A number stands for so many
            ranks with links that cost nothing.
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
        """Return T^k(start → end, size) of the paper: these layers as one stage on all parts."""
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
