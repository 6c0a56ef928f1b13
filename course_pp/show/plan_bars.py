"""One planned run: where the step's time goes, what each pipeline rank holds, and who is whose neighbour."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Protocol

from matplotlib.axes import Axes

from course_pp.arguments import checked
from course_pp.show import chart
from course_pp.show.byte_bars import stack_bars
from course_pp.show.chart import ChartFigure
from course_pp.show.mesh_grid import DIMENSIONS, Layout
from course_pp.show.plan_mesh import describe, draw_neighbours, height_of_neighbours, neighbours_of, nodes_shown
from course_pp.show.sketch import Pen

__all__ = ["plan"]

_SMALL = 8.5
_MOST_RANKS = 64
_ABOVE = 1.55  # inches of the bar of the step


class Nodes(Protocol):
    """What a run is on; :class:`course_pp.plan.Cluster` has it."""

    @property
    def n_nodes(self) -> int: ...
    @property
    def gpus_per_node(self) -> int: ...
    @property
    def intra_bandwidth(self) -> float | None: ...
    @property
    def inter_bandwidth(self) -> float: ...


class Planned(Protocol):
    """What is drawn; :class:`course_pp.plan.Prediction` has it."""

    @property
    def step_s(self) -> float: ...
    @property
    def parts(self) -> Mapping[str, float]: ...
    @property
    def peak_memory(self) -> Sequence[Mapping[str, int]]: ...
    @property
    def budget(self) -> float: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def cluster(self) -> Nodes: ...


@checked
def plan(prediction: Planned, title: str | None = None, rank: int = 0) -> ChartFigure:
    """Draw a prediction: the parts of its step, the memory of each pipeline rank, and the mesh on the nodes.

    The mesh shows the groups of one rank: with whom it shares tensors, stages and data, and over which links. With more
    than 8 nodes, only the nodes of its neighbours are drawn. :func:`course_pp.show.mesh` draws all ranks of a smaller
    mesh.

    Args:
        prediction: of at most 64 pipeline ranks.
        title: instead of the finding.
        rank: whose neighbours to mark.

    Raises:
        ValueError: for more ranks, and a rank that does not exist.
    """
    ranks = prediction.peak_memory
    if len(ranks) > _MOST_RANKS:
        raise ValueError(f"prediction has {len(ranks)} pipeline ranks: bars of at most {_MOST_RANKS} can be read")
    sizes = {name: getattr(prediction.layout, name) for name in DIMENSIONS}
    cluster, n_ranks = prediction.cluster, prod(sizes.values())
    if not 0 <= rank < n_ranks:
        raise ValueError(f"rank={rank}: give one from 0 to {n_ranks - 1}")
    per_node = cluster.gpus_per_node
    links = float(cluster.intra_bandwidth or 0), cluster.inter_bandwidth
    groups = neighbours_of(sizes, rank, per_node, *links)
    nodes = nodes_shown(groups, rank, cluster.n_nodes, per_node)
    finding, alt = _in_words(prediction)

    height, meshed = 0.8 + 0.22 * len(ranks), height_of_neighbours(groups, nodes)
    below = meshed + 0.1
    figure = ChartFigure(chart.WIDTH, _ABOVE + height + below)
    times = figure.axes_with_margins(left=0.8, right=0.2, bottom=below + height + 0.7, top=0.45)
    memory = figure.axes_with_margins(left=0.8, right=0.2, bottom=below + 0.75, top=_ABOVE - 0.05)
    mesh = figure.axes_with_margins(left=0.15, right=0.2, bottom=0.1, top=_ABOVE + height)
    _stack(times, [prediction.parts], ["step"], 1.0)
    times.set_title(title or finding, loc="left", fontsize=11.5)
    times.set_xlabel("seconds, of the rank that ends last", loc="left", fontsize=9)
    _stack(memory, ranks, [f"rank {rank}" for rank in range(len(ranks))], 1e9)
    memory.axvline(prediction.budget / 1e9, color="black", linestyle=(0, (5, 3)), linewidth=1.4)
    most = max(sum(each.values()) for each in ranks)
    memory.set_xlim(0, 1.05 * max(most, prediction.budget) / 1e9)
    memory.set_xlabel("GB at the fullest; dashed: what a GPU can give", loc="left", fontsize=9)
    width = chart.WIDTH - 0.35
    draw_neighbours(Pen(mesh, width, meshed), groups, nodes, rank, n_ranks, per_node, width)
    figure.alt_text = f"{alt}. {describe(groups, rank)}"
    return figure


def _in_words(prediction: Planned) -> tuple[str, str]:
    """Return the finding, and what the bars say."""
    ranks = prediction.peak_memory
    fullest = max(range(len(ranks)), key=lambda rank: sum(ranks[rank].values()))
    most = sum(ranks[fullest].values())
    largest = max(prediction.parts, key=lambda name: prediction.parts[name])
    share = prediction.parts[largest] / prediction.step_s
    fits = "fits" if most <= prediction.budget else "does not fit"
    finding = f"{share:.0%} of a step is {largest}; the fullest rank, {fullest}, {fits}"
    alt = f"{finding}: {most / 1e9:.3g} of {prediction.budget / 1e9:.3g} GB. A step takes {prediction.step_s:.3g} s: "
    alt += ", ".join(f"{name} {seconds:.3g} s" for name, seconds in prediction.parts.items() if seconds > 1e-9)
    return finding, alt


def _stack(axes: Axes, bars: Sequence[Mapping[str, float]], names: list[str], unit: float) -> None:
    """Draw one stacked bar a row, the kinds in their own order; a kind without bytes is not in the legend."""
    kinds = [kind for kind in bars[0] if any(bar[kind] > 1e-9 for bar in bars)]
    stack_bars(axes, bars, kinds, unit, height=0.75, linewidth=0.6)
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.set_yticks(range(len(bars)), names, fontsize=_SMALL)
    axes.tick_params(axis="x", labelsize=_SMALL)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    _, inches = chart.size_in_inches(axes)
    axes.legend(
        loc="upper right",
        bbox_to_anchor=(1, -0.4 / inches),
        ncols=len(kinds),
        frameon=False,
        fontsize=_SMALL,
        handlelength=1.2,
        columnspacing=1.2,
        borderaxespad=0,
    )
