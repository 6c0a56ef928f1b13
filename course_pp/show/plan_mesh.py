"""Where one rank of a planned run stands: its nodes, and who is its neighbour in which dimension, over which link."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from course_pp.show import chart
from course_pp.show.sketch import LEAST, SERIES, SMALL, WORDS, Pen, Point
from course_pp.show.wording import counted

__all__ = ["Neighbours", "describe", "draw_neighbours", "height_of_neighbours", "neighbours_of", "nodes_shown"]

_MOST_NODES = 8
_HIGH, _BETWEEN, _LABEL, _TOP, _LINE = 0.28, 0.17, 0.75, 0.32, 0.22
_WIDEST = 0.62
_LETTERS = {"pp": "p", "dp_replicate": "r", "dp_shard": "s", "tp": "t"}


@dataclass(frozen=True)
class Neighbours:
    """The group of a rank along one dimension.

    Attributes:
        name, letter: of the dimension.
        ranks: of the group, in order.
        apart: from one to the next.
        crosses: whether it has ranks on several nodes.
        link: over which links it sends, in words.
    """

    name: str
    letter: str
    ranks: tuple[int, ...]
    apart: int
    crosses: bool
    link: str

    def after(self, rank: int) -> int:
        """Return the next rank of the group, after the last the first; for the last stage, the one before."""
        at = self.ranks.index(rank)
        if self.name == "pp" and at + 1 == len(self.ranks):
            return self.ranks[at - 1]
        return self.ranks[(at + 1) % len(self.ranks)]

    def __str__(self) -> str:
        return f"{self.name}: {counted(len(self.ranks), 'rank')}, {self.apart} apart, {self.link}"


def neighbours_of(
    sizes: Mapping[str, int], rank: int, gpus_per_node: int, inside: float, between: float
) -> tuple[Neighbours, ...]:
    """Return the groups of more than one rank, innermost dimension first; ranks are numbered node by node.

    Args:
        sizes: by dimension, outermost first.
        inside, between: bandwidths of the links inside nodes and between them, in bytes a second.
    """
    found, stride = [], 1
    for name, size in reversed(list(sizes.items())):
        if size > 1:
            first = rank - rank // stride % size * stride
            ranks = tuple(first + i * stride for i in range(size))
            crosses = len({each // gpus_per_node for each in ranks}) > 1
            link = (
                f"between nodes, {between / 1e9:.3g} GB/s a GPU" if crosses else f"in a node, {inside / 1e9:.3g} GB/s"
            )
            found.append(Neighbours(name, _LETTERS[name], ranks, stride, crosses, link))
        stride *= size
    return tuple(found)


def nodes_shown(groups: Sequence[Neighbours], rank: int, n_nodes: int, gpus_per_node: int) -> list[int]:
    """Return all nodes; of too many, those of ``rank`` and of the next in each of its groups, and the last."""
    if n_nodes <= _MOST_NODES:
        return list(range(n_nodes))
    near = [rank, *(group.after(rank) for group in groups)]
    return sorted({*(each // gpus_per_node for each in near), n_nodes - 1})


def height_of_neighbours(groups: Sequence[Neighbours], nodes: Sequence[int]) -> float:
    """Return the inches that :func:`draw_neighbours` takes."""
    gaps = sum(b - a > 1 for a, b in pairwise((-1, *nodes)))
    return _TOP + len(nodes) * (_HIGH + _BETWEEN) + gaps * _BETWEEN + 0.05 + (1 + len(groups)) * _LINE


def draw_neighbours(
    pen: Pen, groups: Sequence[Neighbours], nodes: Sequence[int], rank: int, n_ranks: int, per_node: int, width: float
) -> None:
    """Draw the nodes as rows of GPUs, the groups of ``rank`` coloured and lettered, an arrow to the next in each."""
    cell = min(_WIDEST, (width - _LABEL) / per_node)
    n_nodes = n_ranks // per_node
    tops = _rows(pen, nodes, _LABEL + cell * per_node)
    excerpt = f", {len(nodes)} of {n_nodes:,} nodes" if len(nodes) < n_nodes else ""
    pen.text((0, 0.08), f"Rank {rank:,} of {n_ranks:,} and its neighbours{excerpt}", WORDS + 1, bold=True)
    looks = {each: (i, group) for i, group in enumerate(groups) for each in group.ranks}

    def corner(of: int) -> Point:
        return _LABEL + of % per_node * cell, tops[of // per_node]

    for node in nodes:
        for each in range(node * per_node, (node + 1) * per_node):
            _draw_rank(pen, corner(each), cell, each, rank, looks.get(each))
    for i, group in enumerate(groups):
        x = (i + 1) / (len(groups) + 1)
        _draw_link(pen, corner(rank), corner(group.after(rank)), cell, x)
    below = tops[nodes[-1]] + _HIGH + 0.2
    for i, group in enumerate(groups):
        y = below + i * _LINE
        fill, ink = SERIES[i]
        pen.box((0, y - 0.08), (0.22, 0.16), group.letter, fill=fill, ink=ink, edge="white", sizes=(SMALL, LEAST))
        pen.text((0.3, y), str(group), SMALL)
    key = (
        "arrow: to the next of a group, of the last stage to the one before; dashed: it leaves the node"
        if groups
        else "one rank has no neighbours"
    )
    pen.text((0, below + len(groups) * _LINE), key, SMALL, ink=chart.TEXT_GREY)


def describe(groups: Sequence[Neighbours], rank: int) -> str:
    """Describe the groups in words."""
    if not groups:
        return "One rank, without neighbours."
    told = [f"{group}, an arrow to rank {group.after(rank)}" for group in groups]
    return f"Neighbours of rank {rank}: {'; '.join(told)}."


def _rows(pen: Pen, nodes: Sequence[int], right: float) -> dict[int, float]:
    """Return where each node's row begins; names them, and says how many are left out before each."""
    y, tops = _TOP + 0.02, {}
    for before, node in pairwise((-1, *nodes)):
        if node - before > 1:
            words = f"{counted(node - before - 1, 'node')} not shown"
            pen.text((right, y - 0.02), words, LEAST, align="right", ink=chart.TEXT_GREY)
            y += _BETWEEN
        tops[node] = y
        pen.text((0, y + _HIGH / 2), f"node {node}", SMALL, ink=chart.TEXT_GREY)
        y += _HIGH + _BETWEEN
    return tops


def _draw_rank(pen: Pen, corner: Point, cell: float, each: int, rank: int, look: tuple[int, Neighbours] | None) -> None:
    fill, ink, letter = "#E8E8E8", "black", ""
    if each == rank:
        fill, ink = "black", "white"
    elif look is not None:
        (fill, ink), letter = SERIES[look[0]], f" {look[1].letter}"
    for words in (f"{each}{letter}", letter.strip(), ""):
        bold = each == rank
        if pen.box(corner, (cell, _HIGH), words, fill=fill, ink=ink, edge="white", bold=bold, zorder=3) or not words:
            return


def _draw_link(pen: Pen, one: Point, other: Point, cell: float, x: float) -> None:
    """Draw a link over the boxes of a row, or down or up behind them."""
    (x0, y0), (x1, y1) = one, other
    if y0 == y1:
        start, end, top = x0 + cell * x, x1 + cell * 0.5, y0 - 0.01
        pen.arrow((start, top), (start, top - 0.08), (end, top - 0.08), (end, top), line=1.2, head=6, zorder=6)
        return
    start, end = x0 + cell * x, x1 + cell * x
    leaves, arrives, lane = (y0 + _HIGH, y1, y1 - 0.08) if y1 > y0 else (y0, y1 + _HIGH, y1 + _HIGH + 0.08)
    points = [(start, leaves), (end, arrives)]
    if start != end:
        points = [(start, leaves), (start, lane), (end, lane), (end, arrives)]
    pen.arrow(*points, ink=chart.VERMILION, line=1.8, dashed=True, head=8, zorder=2)
