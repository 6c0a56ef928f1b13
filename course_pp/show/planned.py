"""A prediction of the planner: step, memory, neighbours; and published steps beside it."""

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
# All in inches. The bar of the step.
_ABOVE = 1.55
# The nodes: a row, the space between two, the names of nodes, the heading, a line of the key, and
# the widest box.
_HIGH = 0.28
_BETWEEN = 0.17
_LABEL = 0.75
_TOP = 0.32
_LINE = 0.22
_WIDEST = 0.62
_LETTERS = {"pp": "p", "dp_replicate": "r", "dp_shard": "s", "tp": "t"}


@checked
def plan(prediction: Prediction, title: str | None = None, rank: int = 0) -> ChartFigure:
    """Draw a prediction: the parts of its step, the memory of each pipeline rank, and its mesh.

    The mesh shows the groups of ``rank`` on the nodes: with whom it shares tensors, stages and
    data, and over which links. With more than 8 nodes, only the nodes of its neighbours are drawn.
    Up to 64 pipeline ranks have room.
    """
    ranks = prediction.peak_memory
    cluster = prediction.cluster
    parts = prediction.parts
    budget = prediction.budget
    refuse_outside(1, _MOST_RANKS, ranks_of_prediction=len(ranks))
    sizes = {name: getattr(prediction.layout, name) for name in DIMENSIONS}
    n_ranks = prod(sizes.values())
    refuse_unless(0 <= rank < n_ranks, "plan", "rank", rank, f"give one from 0 to {n_ranks - 1}")
    groups = tuple(reversed(dimensions_of(sizes, cluster.gpus_per_node, rank)))
    nodes = _nodes_shown(groups, rank, cluster.n_nodes, gpus_per_node=cluster.gpus_per_node)

    # From the top: the bar of the step, the bars of memory, the nodes.
    gaps = sum(b - a > 1 for a, b in pairwise((-1, *nodes)))
    nodes_end = _TOP + len(nodes) * (_HIGH + _BETWEEN) + gaps * _BETWEEN
    meshed = nodes_end + 0.05 + (1 + len(groups)) * _LINE
    height = 0.8 + 0.22 * len(ranks)
    below = meshed + 0.1
    width = WIDTH - 0.35
    figure = ChartFigure(WIDTH, _ABOVE + height + below)
    times = figure.axes_with_margins(left=0.8, right=0.2, bottom=below + height + 0.7, top=0.45)
    memory = figure.axes_with_margins(left=0.8, right=0.2, bottom=below + 0.75, top=_ABOVE - 0.05)
    mesh = figure.axes_with_margins(left=0.15, right=0.2, bottom=0.1, top=_ABOVE + height)
    _stack(times, [parts], ["step"], unit=1.0)
    times.set_xlabel("seconds, of the rank that ends last", loc="left", fontsize=9)
    _stack(memory, ranks, [f"rank {each}" for each in range(len(ranks))], unit=1e9)
    memory.axvline(budget / 1e9, color="black", linestyle=(0, (5, 3)), linewidth=1.4)
    totals = [sum(each.values()) for each in ranks]
    memory.set_xlim(0, 1.05 * max(*totals, budget) / 1e9)
    memory.set_xlabel("GB at the fullest; dashed: what a GPU can give", loc="left", fontsize=9)

    told = []
    near = []
    for group in groups:
        link = f"in a node, {float(cluster.intra_bandwidth or 0) / 1e9:.3g} GB/s"
        if group.crosses:
            link = f"between nodes, {cluster.inter_bandwidth / 1e9:.3g} GB/s a GPU"
        n_in_group = counted(len(group.groups[0]), "rank")
        words = f"{group.name}: {n_in_group}, {group.stride} apart, {link}"
        told.append(words)
        near.append(f"{words}, an arrow to rank {_after(group, rank)}")
    pen = Pen(mesh, width, meshed)
    _draw_neighbours(
        pen,
        groups,
        told=told,
        nodes=nodes,
        rank=rank,
        n_ranks=n_ranks,
        per_node=cluster.gpus_per_node,
        width=width,
    )

    fullest = max(range(len(ranks)), key=totals.__getitem__)
    largest = max(parts, key=parts.__getitem__)
    fits = "fits" if totals[fullest] <= budget else "does not fit"
    share = parts[largest] / prediction.step_s
    finding = f"{share:.0%} of a step is {largest}; the fullest rank, {fullest}, {fits}"
    spent = ", ".join(
        f"{name} {seconds:.3g} s" for name, seconds in parts.items() if seconds > 1e-9
    )
    alt = f"{finding}: {totals[fullest] / 1e9:.3g} of {budget / 1e9:.3g} GB. "
    alt += f"A step takes {prediction.step_s:.3g} s: {spent}. "
    if groups:
        alt += f"Neighbours of rank {rank}: {'; '.join(near)}."
    else:
        alt += "One rank, without neighbours."
    return figure.finish(times, title, finding, alt, pad=6)


def _stack(axes: Axes, bars: Sequence[Mapping[str, float]], names: list[str], unit: float) -> None:
    """Draw one stacked bar a row, the kinds in their own order.

    The legend leaves out kinds without bytes.
    """
    widths = {}
    for kind in bars[0]:
        if any(bar[kind] > 1e-9 for bar in bars):
            widths[kind] = [bar[kind] / unit for bar in bars]
    for _ in stack(axes, widths, BYTES, height=0.75, linewidth=0.6):
        pass  # no labels
    axes.set_ylim(len(bars) - 0.5, -0.5)
    name_rows(axes, names, chart.SMALL)
    add_legend(axes, gap=0.4, spacing=1.2)


def _after(group: Dimension, rank: int) -> int:
    """Return the next rank of its group, and after the last rank the first.

    The last stage has no next one: its neighbour is the stage before.
    """
    [ranks] = group.groups
    at = ranks.index(rank)
    if group.name == "pp" and at + 1 == len(ranks):
        return ranks[at - 1]
    return ranks[(at + 1) % len(ranks)]


def _nodes_shown(
    groups: Sequence[Dimension], rank: int, n_nodes: int, gpus_per_node: int
) -> list[int]:
    """Return all nodes, or a few of too many.

    The few are the node of ``rank``, of the next rank in each of its groups, and the last node.
    """
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
    """Draw the nodes as rows of GPUs, with the groups of ``rank``.

    A group has its colour and letter, and an arrow to its next rank.
    """
    cell = min(_WIDEST, (width - _LABEL) / per_node)
    n_nodes = n_ranks // per_node
    y = _TOP + 0.02
    tops = {}
    for before, node in pairwise((-1, *nodes)):
        n_skipped = node - before - 1
        if n_skipped:
            place = (_LABEL + cell * per_node, y - 0.02)
            words = f"{counted(n_skipped, 'node')} not shown"
            pen.text(place, words, LEAST, align="right", ink=chart.TEXT_GREY)
            y += _BETWEEN
        tops[node] = y
        pen.text((0, y + _HIGH / 2), f"node {node}", SMALL, ink=chart.TEXT_GREY)
        y += _HIGH + _BETWEEN
    heading = f"Rank {rank:,} of {n_ranks:,} and its neighbours"
    if len(nodes) < n_nodes:
        heading += f", {len(nodes)} of {n_nodes:,} nodes"
    pen.text((0, 0.08), heading, WORDS + 1, bold=True)

    looks = {}
    for (fill, ink), group in zip(SERIES, groups, strict=False):
        look = (fill, ink, _LETTERS[group.name])
        looks.update(dict.fromkeys(group.groups[0], look))
    looks[rank] = ("black", "white", "")

    def corner(of: int) -> Point:
        node, column = divmod(of, per_node)
        return _LABEL + column * cell, tops[node]

    for node in nodes:
        for each in range(node * per_node, (node + 1) * per_node):
            fill, ink, letter = looks.get(each, ("#E8E8E8", "black", ""))
            forms = [f"{each} {letter}".strip(), letter, ""]
            # Without a letter the second form is the last.
            if not letter:
                forms.pop()
            pen.box_with_first_fitting(
                corner(each),
                (cell, _HIGH),
                forms,
                fill=fill,
                ink=ink,
                edge="white",
                bold=each == rank,
                zorder=3,
            )
    for i, group in enumerate(groups):
        # Arrows leave the box side by side.
        x = (i + 1) / (len(groups) + 1)
        _draw_link(pen, corner(rank), corner(_after(group, rank)), cell=cell, x=x)

    y = tops[nodes[-1]] + _HIGH + 0.2
    for (fill, ink), group, words in zip(SERIES, groups, told, strict=False):
        box = ((0, y - 0.08), (0.22, 0.16))
        look_of_key: dict[str, Any] = {"fill": fill, "ink": ink, "edge": "white"}
        pen.box(*box, _LETTERS[group.name], sizes=(SMALL, LEAST), **look_of_key)
        pen.text((0.3, y), words, SMALL)
        y += _LINE
    key = "one rank has no neighbours"
    if groups:
        key = (
            "arrow: to the next of a group, of the last stage to the one before; dashed: it leaves"
            " the node"
        )
    pen.text((0, y), key, SMALL, ink=chart.TEXT_GREY)


def _draw_link(pen: Pen, one: Point, other: Point, cell: float, x: float) -> None:
    """Draw a link over the boxes of a row, or down or up behind them."""
    (x0, y0), (x1, y1) = one, other
    start = x0 + cell * x
    if y0 == y1:
        end = x1 + cell * 0.5
        top = y0 - 0.01
        points = [(start, top), (start, top - 0.08), (end, top - 0.08), (end, top)]
        pen.arrow(*points, line=1.2, head=6, zorder=6)
        return

    end = x1 + cell * x
    if y1 > y0:
        leaves, arrives = y0 + _HIGH, y1
        lane = arrives - 0.08
    else:
        leaves, arrives = y0, y1 + _HIGH
        lane = arrives + 0.08
    points = [(start, leaves), (end, arrives)]
    if start != end:
        points[1:1] = [(start, lane), (end, lane)]
    pen.arrow(*points, ink=chart.VERMILION, line=1.8, dashed=True, head=8, zorder=2)


@checked
def published(rows: Mapping[str, tuple[float, float]], title: str | None = None) -> ChartFigure:
    """Draw the published and the predicted step time of each run, with the error beside them.

    Args:
        rows: ``{name: (seconds published, seconds predicted)}``.
    """
    errors = {}
    told = []
    for name, (known, predicted) in rows.items():
        errors[name] = predicted / known - 1
        told.append(f"{name} {known:.3g} s, predicted {predicted:.3g} s ({errors[name]:+.1%})")
    sizes = [abs(error) for error in errors.values()]
    finding = f"Median error {median(sizes):.1%}, worst {max(sizes):.1%}"
    figure = ChartFigure(WIDTH, 1.3 + 0.26 * len(rows))
    longest = max(chart.text_width(name, 9.0) for name in rows) / 72
    axes = figure.axes_with_margins(left=longest + 0.35, right=0.9, bottom=0.8, top=0.45)
    all_known, all_predicted = zip(*rows.values(), strict=True)
    places = range(len(rows))
    axes.hlines(places, all_known, all_predicted, color=chart.VERMILION, linewidth=2.5, zorder=2)
    look: dict[str, Any] = {"linestyle": "", "marker": "o", "zorder": 3}
    axes.plot(all_known, places, color=chart.BLUE, markersize=5, label="published", **look)
    # A hollow marker around the other: both are seen where they agree.
    look |= {"markerfacecolor": "none", "markersize": 11}
    axes.plot(all_predicted, places, color=chart.VERMILION, label="predicted", **look)
    axes.set_xlim(0, 1.06 * max(*all_known, *all_predicted))
    axes.set_ylim(len(rows) - 0.4, -0.6)
    beside = axes.get_yaxis_transform()
    for i, error in enumerate(errors.values()):
        axes.text(1.01, i, f"{error:+.1%}", transform=beside, size=9, va="center_baseline")
    name_rows(axes, rows)
    axes.grid(axis="x", color=chart.IDLE_GREY, linewidth=0.8, zorder=0)
    axes.set_xlabel("seconds of a step", loc="left", fontsize=9)
    axes.legend(loc="upper right", frameon=False, fontsize=chart.SMALL)
    what = "Published steps and predicted ones"
    return figure.finish(axes, title, finding, f"{what}. {finding}. {'; '.join(told)}.")
