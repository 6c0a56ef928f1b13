"""A mesh of ranks laid over nodes: the neighbours of a rank in each dimension, and their links."""

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
# Inches: the heading, the names of nodes, the space between panels, and between nodes.
_HEAD = 0.55
_LABEL = 0.3
_GAP = 0.3
_BETWEEN = 0.28


@dataclass(frozen=True)
class Dimension:
    """The groups of ranks along one dimension of a mesh.

    Attributes:
        stride: the distance between the numbers of two neighbours in a group.
        groups: the ranks of each group, in order.
        crosses: the number of groups with ranks on more than one node.
    """

    name: str
    stride: int
    groups: tuple[tuple[int, ...], ...]
    crosses: int


def dimensions_of(
    sizes: Mapping[str, int], gpus_per_node: int, rank: int | None = None
) -> tuple[Dimension, ...]:
    """Return the dimensions of more than one rank.

    Ranks are numbered node by node, and the last dimension is the fastest. With a ``rank``, only
    its groups are in them.
    """
    ranks = range(prod(sizes.values())) if rank is None else (rank,)
    found = []
    stride = 1
    for name, size in reversed(list(sizes.items())):
        if size > 1:
            groups = []
            crosses = 0
            for first in dict.fromkeys(each - each // stride % size * stride for each in ranks):
                group = tuple(range(first, first + size * stride, stride))
                groups.append(group)
                crosses += first // gpus_per_node != group[-1] // gpus_per_node
            found.append(Dimension(name, stride, tuple(groups), crosses=crosses))
        stride *= size
    return tuple(reversed(found))


@checked
def mesh(
    layout: Mapping[str, int] | Any, gpus_per_node: int = 8, rank: int = 0, title: str | None = None
) -> ChartFigure:
    """Draw the ranks on their nodes, once for each dimension of the mesh.

    One letter is a group; links join the group of ``rank``. Solid links stay inside a node, dashed
    ones leave it and are slow. The numbers of the ranks stand where all of them have room.

    Args:
        layout: a :class:`course_pp.parallel.DistributedConfig`, or sizes by name, outermost
            dimension first: ``{"pp": 2, "tp": 8}``, of up to 128 ranks.
        rank: the rank whose neighbours are marked.
    """
    if not isinstance(layout, Mapping):
        layout = {name: getattr(layout, name) for name in DIMENSIONS}
    sizes = dict(layout)
    refuse_below(1, "mesh", **sizes, gpus_per_node=gpus_per_node)
    n_ranks = prod(sizes.values())
    refuse_outside(1, _MOST_RANKS, ranks_of_layout=n_ranks)
    per_node = min(gpus_per_node, n_ranks)
    remedy = f"{n_ranks} ranks do not fill such nodes; change it, or a size of the layout"
    refuse_unless(n_ranks % per_node == 0, "mesh", "gpus_per_node", gpus_per_node, remedy)
    refuse_unless(0 <= rank < n_ranks, "mesh", "rank", rank, f"give one from 0 to {n_ranks - 1}")

    dimensions = dimensions_of(sizes, per_node) or (Dimension("one rank", 1, ((0,),), crosses=0),)
    inside = [each.name for each in dimensions if not each.crosses]
    across = [each.name for each in dimensions if each.crosses]
    links = []
    if inside:
        stay = "stays" if len(inside) == 1 else "stay"
        links.append(f"{listed(inside)} {stay} inside a node")
    if across:
        cross = "crosses" if len(across) == 1 else "cross"
        links.append(f"{listed(across)} {cross} the slow links")
    finding = f"{counted(n_ranks, 'rank')}, {per_node} a node: {', '.join(links)}"

    # Narrow panels get wider cells, so that their heading has room.
    n_panels = len(dimensions)
    n_nodes = n_ranks // per_node
    room = (WIDTH - 2 * MARGIN - _LABEL - 0.05 - (n_panels - 1) * _GAP) / n_panels
    cell = min(0.62, room / per_node)
    if cell * per_node < 1.9:
        cell = min(room, 1.9) / per_node
    panel = cell * per_node
    high = min(cell, 0.42)
    links_are = f"thick: the group of rank {rank}; dashed link: leaves the node, slow"
    key = f"n0: node; letter: group; {links_are}"
    width = _LABEL + n_panels * panel + (n_panels - 1) * _GAP + 0.05
    height = _HEAD + n_nodes * (high + _BETWEEN) + 0.08
    sketch = Sketch(width, height, title or finding, note=key)
    told = []
    for i, dimension in enumerate(dimensions):
        grid = _Grid(_LABEL + i * (panel + _GAP), cell, high, per_node=per_node, n_nodes=n_nodes)
        _draw_panel(sketch, dimension, grid, rank=rank)

        mine = next(group for group in dimension.groups if rank in group)
        groups = f"{counted(len(dimension.groups), 'group')} of {len(mine)}"
        apart = f"{dimension.stride} apart, {dimension.crosses} of them across nodes"
        near = f"rank {rank} is with {listed(mine)}"
        told.append(f"{dimension.name}: {groups}, {apart}; {near}")
    for node in range(n_nodes):
        y = _HEAD + _BETWEEN + node * (high + _BETWEEN) + high / 2
        sketch.text((0, y), f"n{node}", SMALL, ink=chart.TEXT_GREY)
    nodes = f"{counted(n_nodes, 'node')} of {per_node}, once for each dimension of the mesh"
    return sketch.finish(f"Ranks on {nodes}. {finding}. {'. '.join(told)}.")


@dataclass(frozen=True)
class _Grid:
    """The cells of a panel: a row a node, a column a GPU, from ``left`` on, in inches."""

    left: float
    width: float
    high: float
    per_node: int
    n_nodes: int

    def corner(self, rank: int) -> Point:
        """Return the upper left corner of a rank's cell."""
        node, column = divmod(rank, self.per_node)
        y = _HEAD + _BETWEEN + node * (self.high + _BETWEEN)
        return self.left + column * self.width, y


def _draw_panel(sketch: Sketch, dimension: Dimension, grid: _Grid, rank: int) -> None:
    panel = grid.width * grid.per_node
    number = len(dimension.groups)
    size = len(dimension.groups[0])
    where = "inside a node: all"
    if dimension.crosses:
        where = f"across nodes: {dimension.crosses} of {number}"
    words = f"{counted(number, 'group')} of {size}, {dimension.stride} apart\n{where}"
    if width_of(words, SMALL) >= panel + _GAP:
        words = wrapped(words, panel, LEAST)
    sketch.text((grid.left, 0.08), dimension.name, WORDS + 1, bold=True)
    sketch.text((grid.left, 0.4), words, SMALL)

    for node in range(grid.n_nodes):
        x, y = grid.corner(node * grid.per_node)
        frame = ((x - 0.04, y - 0.04), (panel + 0.08, grid.high + 0.08))
        sketch.box(*frame, edge="#999999", line=0.8, rounded=True, zorder=1)

    letters = {}
    for index, group in enumerate(dimension.groups):
        letters.update(dict.fromkeys(group, _letter(index)))
    names = {each: f"{each}{letter}" for each, letter in letters.items()}
    sizes = (WORDS, SMALL)
    if not all(fitting_size(name, grid.width, grid.high, sizes=sizes) for name in names.values()):
        names = letters
    for index, group in enumerate(dimension.groups):
        fill, ink = SERIES[index % len(SERIES)]
        is_mine = rank in group
        edge, line, depth = ("black", 2.4, 3.0) if is_mine else ("white", 0.8, 2.0)
        look: dict[str, Any] = {"fill": fill, "ink": ink, "edge": edge, "line": line}
        for each in group:
            cell = (grid.corner(each), (grid.width, grid.high))
            sketch.box(*cell, names[each], bold=is_mine, zorder=depth, **look)
        if is_mine:
            for one, other in pairwise(group):
                _draw_link(sketch, grid.corner(one), grid.corner(other), grid=grid)


def _letter(index: int) -> str:
    """Return a to z, then aa, ab and so on."""
    first, last = divmod(index, len(ascii_lowercase))
    letter = ascii_lowercase[last]
    return ascii_lowercase[first - 1] + letter if first else letter


def _draw_link(sketch: Sketch, one: Point, other: Point, grid: _Grid) -> None:
    (x0, y0), (x1, y1) = one, other
    if y0 == y1:
        # Over the boxes between.
        start = x0 + grid.width * 0.5
        end = x1 + grid.width * 0.4
        top = y0 - 0.02
        points = [(start, top), (start, top - 0.11), (end, top - 0.11), (end, top)]
        sketch.arrow(*points, ink="black", line=1.4, head=6, zorder=6)
        return

    # Down the left edge of the boxes, where no number is.
    start = x0 + 0.05
    end = x1 + 0.05
    points = [(start, y0 + grid.high), (end, y1)]
    if x0 != x1:
        lane = y0 + grid.high + 0.09
        points[1:1] = [(start, lane), (end, lane)]
    sketch.arrow(*points, ink=chart.VERMILION, line=2, dashed=True, head=9, zorder=6)
