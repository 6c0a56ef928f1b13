"""What the planner predicts: one run's time, memory and neighbours; and published steps beside predicted ones."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod
from statistics import median
from typing import Any

from matplotlib.axes import Axes

from course_pp.base.arguments import checked, refuse_unless
from course_pp.plan import Prediction
from course_pp.show import chart
from course_pp.show.bars import BYTES, stack
from course_pp.show.chart import WIDTH, ChartFigure, add_legend, name_rows, refuse_outside
from course_pp.show.meshes import DIMENSIONS, Dimension, dimensions_of
from course_pp.show.sketch import LEAST, SERIES, SMALL, WORDS, Pen, Point
from course_pp.show.wording import counted

_MOST_RANKS = 64
_MOST_NODES = 8
_ABOVE = 1.55  # inches of the bar of the step
# Of the nodes: a row, what is between two, the names of nodes, the heading, a line of the key, and
# the widest box.
_HIGH, _BETWEEN, _LABEL, _TOP, _LINE, _WIDEST = 0.28, 0.17, 0.75, 0.32, 0.22, 0.62
_LETTERS = {"pp": "p", "dp_replicate": "r", "dp_shard": "s", "tp": "t"}


@checked
def plan(prediction: Prediction, title: str | None = None, rank: int = 0) -> ChartFigure:
    """Draw a prediction: the parts of its step, the memory of each pipeline rank, and the mesh on
    the nodes.

    The mesh shows the groups of ``rank``: with whom it shares tensors, stages and data, and over
    which links. With more than 8 nodes, only the nodes of its neighbours are drawn. Up to 64
    pipeline ranks have room.
    """
    ranks, cluster, parts = prediction.peak_memory, prediction.cluster, prediction.parts
    refuse_outside(1, _MOST_RANKS, ranks_of_prediction=len(ranks))
    sizes = {name: getattr(prediction.layout, name) for name in DIMENSIONS}
    n_ranks = prod(sizes.values())
    refuse_unless(0 <= rank < n_ranks, "plan", "rank", rank, f"give one from 0 to {n_ranks - 1}")
    groups = tuple(reversed(dimensions_of(sizes, cluster.gpus_per_node, rank)))
    nodes = _nodes_shown(groups, rank, cluster.n_nodes, cluster.gpus_per_node)

    gaps = sum(b - a > 1 for a, b in pairwise((-1, *nodes)))
    meshed = (
        _TOP + len(nodes) * (_HIGH + _BETWEEN) + gaps * _BETWEEN + 0.05 + (1 + len(groups)) * _LINE
    )
    height, below, width = 0.8 + 0.22 * len(ranks), meshed + 0.1, WIDTH - 0.35
    figure = ChartFigure(WIDTH, _ABOVE + height + below)
    times = figure.axes_with_margins(left=0.8, right=0.2, bottom=below + height + 0.7, top=0.45)
    memory = figure.axes_with_margins(left=0.8, right=0.2, bottom=below + 0.75, top=_ABOVE - 0.05)
    mesh = figure.axes_with_margins(left=0.15, right=0.2, bottom=0.1, top=_ABOVE + height)
    _stack(times, [parts], ["step"], 1.0)
    times.set_xlabel("seconds, of the rank that ends last", loc="left", fontsize=9)
    _stack(memory, ranks, [f"rank {rank}" for rank in range(len(ranks))], 1e9)
    memory.axvline(prediction.budget / 1e9, color="black", linestyle=(0, (5, 3)), linewidth=1.4)
    totals = [sum(each.values()) for each in ranks]
    memory.set_xlim(0, 1.05 * max(*totals, prediction.budget) / 1e9)
    memory.set_xlabel("GB at the fullest; dashed: what a GPU can give", loc="left", fontsize=9)
    links = [
        (
            f"between nodes, {cluster.inter_bandwidth / 1e9:.3g} GB/s a GPU"
            if group.crosses
            else f"in a node, {float(cluster.intra_bandwidth or 0) / 1e9:.3g} GB/s"
        )
        for group in groups
    ]
    told = [
        f"{group.name}: {counted(len(group.groups[0]), 'rank')}, {group.stride} apart, {link}"
        for group, link in zip(groups, links, strict=True)
    ]
    _draw_neighbours(
        Pen(mesh, width, meshed), groups, told, nodes, rank, n_ranks, cluster.gpus_per_node, width
    )

    fullest = max(range(len(ranks)), key=totals.__getitem__)
    largest = max(parts, key=lambda name: parts[name])
    fits = "fits" if totals[fullest] <= prediction.budget else "does not fit"
    share = parts[largest] / prediction.step_s
    finding = f"{share:.0%} of a step is {largest}; the fullest rank, {fullest}, {fits}"
    alt = f"{finding}: {totals[fullest] / 1e9:.3g} of {prediction.budget / 1e9:.3g} GB. "
    alt += f"A step takes {prediction.step_s:.3g} s: "
    alt += ", ".join(f"{name} {seconds:.3g} s" for name, seconds in parts.items() if seconds > 1e-9)
    near = [
        f"{words}, an arrow to rank {_after(group, rank)}"
        for words, group in zip(told, groups, strict=True)
    ]
    alt += (
        f". Neighbours of rank {rank}: {'; '.join(near)}."
        if groups
        else ". One rank, without neighbours."
    )
    return figure.finish(times, title, finding, alt, pad=6)


def _stack(axes: Axes, bars: Sequence[Mapping[str, float]], names: list[str], unit: float) -> None:
    """Draw one stacked bar a row, the kinds in their own order; a kind without bytes is not in the legend."""
    kinds = [kind for kind in bars[0] if any(bar[kind] > 1e-9 for bar in bars)]
    list(
        stack(
            axes,
            {kind: [bar[kind] / unit for bar in bars] for kind in kinds},
            BYTES,
            height=0.75,
            linewidth=0.6,
        )
    )
    axes.set_ylim(len(bars) - 0.5, -0.5)
    name_rows(axes, names, chart.SMALL)
    add_legend(axes, gap=0.4, spacing=1.2)


def _after(group: Dimension, rank: int) -> int:
    """Return the next rank of its group, after the last the first; for the last stage, the one before."""
    [ranks] = group.groups
    at = ranks.index(rank)
    if group.name == "pp" and at + 1 == len(ranks):
        return ranks[at - 1]
    return ranks[(at + 1) % len(ranks)]


def _nodes_shown(
    groups: Sequence[Dimension], rank: int, n_nodes: int, gpus_per_node: int
) -> list[int]:
    """Return all nodes; of too many, those of ``rank`` and of the next in each of its groups, and the last."""
    if n_nodes <= _MOST_NODES:
        return list(range(n_nodes))
    near = [rank, *(_after(group, rank) for group in groups)]
    return sorted({*(each // gpus_per_node for each in near), n_nodes - 1})


def _draw_neighbours(
    pen: Pen,
    groups: Sequence[Dimension],
    told: Sequence[str],
    nodes: Sequence[int],
    rank: int,
    n_ranks: int,
    per_node: int,
    width: float,
) -> None:
    """Draw the nodes as rows of GPUs, the groups of ``rank`` coloured and lettered, an arrow to the next in each."""
    cell, n_nodes = min(_WIDEST, (width - _LABEL) / per_node), n_ranks // per_node
    y, tops = _TOP + 0.02, {}
    for before, node in pairwise((-1, *nodes)):
        if node - before > 1:
            words, right = (
                f"{counted(node - before - 1, 'node')} not shown",
                _LABEL + cell * per_node,
            )
            pen.text((right, y - 0.02), words, LEAST, align="right", ink=chart.TEXT_GREY)
            y += _BETWEEN
        tops[node] = y
        pen.text((0, y + _HIGH / 2), f"node {node}", SMALL, ink=chart.TEXT_GREY)
        y += _HIGH + _BETWEEN
    excerpt = f", {len(nodes)} of {n_nodes:,} nodes" if len(nodes) < n_nodes else ""
    pen.text(
        (0, 0.08), f"Rank {rank:,} of {n_ranks:,} and its neighbours{excerpt}", WORDS + 1, bold=True
    )
    looks = {
        each: (*SERIES[i], _LETTERS[group.name])
        for i, group in enumerate(groups)
        for each in group.groups[0]
    }

    def corner(of: int) -> Point:
        return _LABEL + of % per_node * cell, tops[of // per_node]

    for each in (node * per_node + i for node in nodes for i in range(per_node)):
        fill, ink, letter = looks.get(each, ("#E8E8E8", "black", ""))
        if each == rank:
            fill, ink, letter = "black", "white", ""
        look: dict[str, Any] = {
            "fill": fill,
            "ink": ink,
            "edge": "white",
            "bold": each == rank,
            "zorder": 3,
        }
        for words in (f"{each} {letter}".strip(), letter, ""):
            if pen.box(corner(each), (cell, _HIGH), words, **look) or not words:
                break
    for i, group in enumerate(groups):
        _draw_link(
            pen, corner(rank), corner(_after(group, rank)), cell, (i + 1) / (len(groups) + 1)
        )
    y = tops[nodes[-1]] + _HIGH + 0.2
    for (fill, ink), group, words in zip(SERIES, groups, told, strict=False):
        letter = _LETTERS[group.name]
        pen.box(
            (0, y - 0.08),
            (0.22, 0.16),
            letter,
            fill=fill,
            ink=ink,
            edge="white",
            sizes=(SMALL, LEAST),
        )
        pen.text((0.3, y), words, SMALL)
        y += _LINE
    key = (
        "arrow: to the next of a group, of the last stage to the one before; dashed: it leaves the"
        " node"
    )
    pen.text((0, y), key if groups else "one rank has no neighbours", SMALL, ink=chart.TEXT_GREY)


def _draw_link(pen: Pen, one: Point, other: Point, cell: float, x: float) -> None:
    """Draw a link over the boxes of a row, or down or up behind them."""
    (x0, y0), (x1, y1) = one, other
    if y0 == y1:
        start, end, top = x0 + cell * x, x1 + cell * 0.5, y0 - 0.01
        pen.arrow(
            (start, top),
            (start, top - 0.08),
            (end, top - 0.08),
            (end, top),
            line=1.2,
            head=6,
            zorder=6,
        )
        return
    start, end = x0 + cell * x, x1 + cell * x
    leaves, arrives, lane = (
        (y0 + _HIGH, y1, y1 - 0.08) if y1 > y0 else (y0, y1 + _HIGH, y1 + _HIGH + 0.08)
    )
    points = [(start, leaves), (end, arrives)]
    if start != end:
        points = [(start, leaves), (start, lane), (end, lane), (end, arrives)]
    pen.arrow(*points, ink=chart.VERMILION, line=1.8, dashed=True, head=8, zorder=2)


@checked
def published(rows: Mapping[str, tuple[float, float]], title: str | None = None) -> ChartFigure:
    """Draw for each run (by name: seconds published, seconds predicted) both as points; the error stands beside."""
    errors = {name: predicted / told - 1 for name, (told, predicted) in rows.items()}
    sizes = [abs(each) for each in errors.values()]
    finding = f"Median error {median(sizes):.1%}, worst {max(sizes):.1%}"
    figure = ChartFigure(WIDTH, 1.3 + 0.26 * len(rows))
    longest = max(chart.text_width(name, 9.0) for name in rows) / 72
    axes = figure.axes_with_margins(left=longest + 0.35, right=0.9, bottom=0.8, top=0.45)
    told, predicted = zip(*rows.values(), strict=True)
    places = range(len(rows))
    axes.hlines(places, told, predicted, color=chart.VERMILION, linewidth=2.5, zorder=2)
    look: dict[str, Any] = {"linestyle": "", "marker": "o", "zorder": 3}
    axes.plot(told, places, color=chart.BLUE, markersize=5, label="published", **look)
    look |= {"markerfacecolor": "none", "markersize": 11}
    axes.plot(predicted, places, color=chart.VERMILION, label="predicted", **look)
    axes.set_xlim(0, 1.06 * max(*told, *predicted))
    axes.set_ylim(len(rows) - 0.4, -0.6)
    for i, error in enumerate(errors.values()):
        axes.text(
            1.01,
            i,
            f"{error:+.1%}",
            transform=axes.get_yaxis_transform(),
            size=9,
            va="center_baseline",
        )
    name_rows(axes, rows)
    axes.grid(axis="x", color=chart.IDLE_GREY, linewidth=0.8, zorder=0)
    axes.set_xlabel("seconds of a step", loc="left", fontsize=9)
    axes.legend(loc="upper right", frameon=False, fontsize=chart.SMALL)
    each = "; ".join(
        f"{name} {told:.3g} s, predicted {p:.3g} s ({errors[name]:+.1%})"
        for name, (told, p) in rows.items()
    )
    return figure.finish(
        axes, title, finding, f"Published steps and predicted ones. {finding}. {each}."
    )
