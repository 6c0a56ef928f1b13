"""A mesh of ranks laid over nodes: who is whose neighbour in which dimension, and over which link."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from string import ascii_lowercase
from typing import Any

from course_pp.base.arguments import checked, refuse_below, refuse_unless
from course_pp.show import chart
from course_pp.show.chart import WIDTH, ChartFigure, refuse_outside
from course_pp.show.sketch import (
    LEAST,
    MARGIN,
    SERIES,
    SMALL,
    WORDS,
    Point,
    Sketch,
    fitting_size,
    width_of,
    wrapped,
)
from course_pp.show.wording import counted, listed

DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "tp")
_MOST_RANKS = 128
_HEAD, _LABEL, _GAP, _BETWEEN = 0.55, 0.3, 0.3, 0.28


@dataclass(frozen=True)
class Dimension:
    """The groups of ranks along one dimension of a mesh.

    Attributes:
        stride: how far apart two neighbours of a group are numbered.
        groups: the ranks of each group, in order.
        crosses: how many groups have ranks on more than one node.
    """

    name: str
    stride: int
    groups: tuple[tuple[int, ...], ...]
    crosses: int


def dimensions_of(
    sizes: Mapping[str, int], gpus_per_node: int, rank: int | None = None
) -> tuple[Dimension, ...]:
    """Return the dimensions of more than one rank, for ranks numbered node by node and the last
    dimension fastest.

    With a ``rank``, only its groups are in them.
    """
    ranks, found, stride = range(prod(sizes.values())) if rank is None else (rank,), [], 1
    for name, size in reversed(list(sizes.items())):
        if size > 1:
            firsts = dict.fromkeys(each - each // stride % size * stride for each in ranks)
            groups = tuple(tuple(first + i * stride for i in range(size)) for first in firsts)
            crosses = sum(len({each // gpus_per_node for each in group}) > 1 for group in groups)
            found.append(Dimension(name, stride, groups, crosses))
        stride *= size
    return tuple(reversed(found))


@checked
def mesh(
    layout: Mapping[str, int] | Any, gpus_per_node: int = 8, rank: int = 0, title: str | None = None
) -> ChartFigure:
    """Draw the ranks on their nodes, once for each dimension: one letter a group, and the links of
    ``rank``'s group.

    Solid links stay inside a node, dashed ones leave it and are slow. The numbers of the ranks
    stand where all of them have room.

    Args:
        layout: a :class:`course_pp.parallel.DistributedConfig`, or sizes by name, outermost
            dimension first: ``{"pp": 2, "tp": 8}``, of up to 128 ranks.
        rank: whose neighbours to mark.
    """
    sizes = (
        dict(layout)
        if isinstance(layout, Mapping)
        else {name: getattr(layout, name) for name in DIMENSIONS}
    )
    refuse_below(1, "mesh", **sizes, gpus_per_node=gpus_per_node)
    n_ranks = prod(sizes.values())
    refuse_outside(1, _MOST_RANKS, ranks_of_layout=n_ranks)
    per_node = min(gpus_per_node, n_ranks)
    remedy = f"{n_ranks} ranks do not fill such nodes; change it, or a size of the layout"
    refuse_unless(n_ranks % per_node == 0, "mesh", "gpus_per_node", gpus_per_node, remedy)
    refuse_unless(0 <= rank < n_ranks, "mesh", "rank", rank, f"give one from 0 to {n_ranks - 1}")
    dimensions = dimensions_of(sizes, per_node) or (Dimension("one rank", 1, ((0,),), 0),)
    inside = [each.name for each in dimensions if not each.crosses]
    across = [each.name for each in dimensions if each.crosses]
    links = [f"{listed(inside)} {'stays' if len(inside) == 1 else 'stay'} inside a node"] * bool(
        inside
    )
    links += [
        f"{listed(across)} {'crosses' if len(across) == 1 else 'cross'} the slow links"
    ] * bool(across)
    finding = f"{counted(n_ranks, 'rank')}, {per_node} a node: {', '.join(links)}"

    n_panels, n_nodes = len(dimensions), n_ranks // per_node
    room = (WIDTH - 2 * MARGIN - _LABEL - 0.05 - (n_panels - 1) * _GAP) / n_panels
    cell = min(0.62, room / per_node)
    if cell * per_node < 1.9:
        cell = min(room, 1.9) / per_node
    panel, high = cell * per_node, min(cell, 0.42)
    key = (
        f"n0: node; letter: group; thick: the group of rank {rank}; dashed link: leaves the node,"
        " slow"
    )
    width = _LABEL + n_panels * panel + (n_panels - 1) * _GAP + 0.05
    sketch = Sketch(width, _HEAD + n_nodes * (high + _BETWEEN) + 0.08, title or finding, key)
    for i, dimension in enumerate(dimensions):
        _draw_panel(
            sketch, dimension, _LABEL + i * (panel + _GAP), (cell, high), per_node, n_nodes, rank
        )
    for node in range(n_nodes):
        y = _HEAD + _BETWEEN + node * (high + _BETWEEN) + high / 2
        sketch.text((0, y), f"n{node}", SMALL, ink=chart.TEXT_GREY)
    told = []
    for dimension in dimensions:
        mine = next(group for group in dimension.groups if rank in group)
        told.append(
            f"{dimension.name}: {counted(len(dimension.groups), 'group')} of {len(mine)},"
            f" {dimension.stride} apart, {dimension.crosses} of them across nodes; rank {rank} is"
            f" with {listed(mine)}"
        )
    grid = f"{counted(n_nodes, 'node')} of {per_node}, once for each dimension of the mesh"
    return sketch.finish(f"Ranks on {grid}. {finding}. {'. '.join(told)}.")


def _draw_panel(
    sketch: Sketch,
    dimension: Dimension,
    left: float,
    cell: Point,
    per_node: int,
    n_nodes: int,
    rank: int,
) -> None:
    (width, high), row = cell, cell[1] + _BETWEEN
    panel = width * per_node
    sketch.text((left, 0.08), dimension.name, WORDS + 1, bold=True)
    size, number = len(dimension.groups[0]), len(dimension.groups)
    where = (
        f"across nodes: {dimension.crosses} of {number}"
        if dimension.crosses
        else "inside a node: all"
    )
    words = f"{counted(number, 'group')} of {size}, {dimension.stride} apart\n{where}"
    sketch.text(
        (left, 0.4),
        words if width_of(words, SMALL) < panel + _GAP else wrapped(words, panel, LEAST),
        SMALL,
    )

    def corner(of: int) -> Point:
        return left + of % per_node * width, _HEAD + _BETWEEN + of // per_node * row

    for node in range(n_nodes):
        frame = (left - 0.04, _HEAD + _BETWEEN + node * row - 0.04)
        sketch.box(
            frame, (panel + 0.08, high + 0.08), edge="#999999", line=0.8, rounded=True, zorder=1
        )
    letters = {
        each: _letter(index) for index, group in enumerate(dimension.groups) for each in group
    }
    names = {each: f"{each}{letter}" for each, letter in letters.items()}
    if not all(fitting_size(name, width, high, (WORDS, SMALL)) for name in names.values()):
        names = letters
    for index, group in enumerate(dimension.groups):
        fill, ink = SERIES[index % len(SERIES)]
        mine = rank in group
        edge, line, depth = ("black", 2.4, 3.0) if mine else ("white", 0.8, 2.0)
        for each in group:
            place = (corner(each), (width, high), names[each])
            sketch.box(*place, fill=fill, ink=ink, edge=edge, line=line, bold=mine, zorder=depth)
        for one, other in pairwise(group if mine else ()):
            _draw_link(sketch, corner(one), corner(other), cell)


def _letter(index: int) -> str:
    first, last = divmod(index, len(ascii_lowercase))
    return (ascii_lowercase[first - 1] if first else "") + ascii_lowercase[last]


def _draw_link(sketch: Sketch, one: Point, other: Point, cell: Point) -> None:
    width, high = cell
    (x0, y0), (x1, y1) = one, other
    if y0 == y1:  # over the boxes between
        start, end, top = x0 + width * 0.5, x1 + width * 0.4, y0 - 0.02
        points = [(start, top), (start, top - 0.11), (end, top - 0.11), (end, top)]
        sketch.arrow(*points, ink="black", line=1.4, head=6, zorder=6)
        return
    # Down the left edge of the boxes, where no number is.
    points = [(x0 + 0.05, y0 + high), (x1 + 0.05, y1)]
    if x0 != x1:
        lane = y0 + high + 0.09
        points = [points[0], (points[0][0], lane), (points[1][0], lane), points[1]]
    sketch.arrow(*points, ink=chart.VERMILION, line=2, dashed=True, head=9, zorder=6)
