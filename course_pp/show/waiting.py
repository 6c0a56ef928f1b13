"""The picture of a deadlock: an arrow from each waiting rank to its peers."""

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Circle, FancyArrowPatch

from course_pp.base.arguments import checked
from course_pp.base.cycles import find_cycle
from course_pp.show import chart
from course_pp.show.chart import ChartFigure
from course_pp.show.wording import listed, listed_ranks

_NODE_RADIUS = 0.3
_SPELLED_CYCLE = 3  # longer cycles are named as a whole
_CLEARANCE = 22  # points between the centre of a rank and the tip of an arrow


@checked
def waits(waits: Iterable[Any]) -> ChartFigure:
    """Draw an arrow from each waiting rank to each rank it waits for, and highlight a cycle.

    ``waits`` has for each rank its ``rank``, the ``operation`` it is in, and the ``peers`` it waits
    for, if any. The peers of a collective are the ranks that have not entered it. A peer without a
    report is drawn too.
    """
    given = sorted(waits, key=lambda wait: wait.rank)
    by_rank = {wait.rank: wait for wait in given}
    if len(by_rank) < max(1, len(given)):
        told = f"waits has {len(given)}, for {len(by_rank)} ranks"
        raise ValueError(f"{told}: give one for each rank")
    cycle = find_cycle({rank: sorted(wait.peers) for rank, wait in by_rank.items()})
    # Told and drawn from its lowest rank on.
    first = cycle.index(min(cycle)) if cycle else 0
    cycle = cycle[first:] + cycle[:first]
    after = dict(zip(cycle, cycle[1:] + cycle[:1], strict=True))

    ranks = sorted(set(by_rank).union(*(wait.peers for wait in given)))
    places = _places(ranks)
    figure, axes = _canvas(places)
    told_each = []
    for rank, wait in by_rank.items():
        for peer in sorted(wait.peers):
            in_cycle = after.get(rank) == peer
            _draw_arrow(axes, places[rank], places[peer], wait.operation, in_cycle=in_cycle)
        if wait.peers:
            told_each.append(
                f"rank {rank} waits in {wait.operation} for {_spelled_ranks(wait.peers)}"
            )
        else:
            told_each.append(f"rank {rank} waits for nobody ({_state(wait)})")
    for rank in ranks:
        state = _state(by_rank.get(rank))
        _draw_rank(axes, rank, places[rank], state=state, in_cycle=rank in cycle)
    finding = _finding(by_rank, cycle, after, ranks=ranks)
    top = 1 - 0.3 / figure.get_figheight()
    figure.text(0.5, top, finding, ha="center", va="center", fontsize=11.5)
    figure.alt_text = f"Who waits for whom. {finding}. {'; '.join(told_each)}."
    return figure


def _state(wait: Any) -> str:
    if wait is None:
        return "no report"
    return "" if wait.peers else wait.operation or "working"


def _finding(
    by_rank: dict[int, Any], cycle: Sequence[int], after: dict[int, int], ranks: Sequence[int]
) -> str:
    waiting = [wait for wait in by_rank.values() if wait.peers]
    if not waiting:
        return "No rank waits for another"
    if not cycle:
        steps = [f"rank {w.rank} waits for {_spelled_ranks(w.peers)}" for w in waiting]
        if len(steps) > 3:
            steps[3:] = ["…"]
        return f"{'; '.join(steps)}: no cycle"
    if len(cycle) == 1:
        return f"rank {cycle[0]} waits for itself: it can never move"

    # Ranks that wait for a stuck rank are stuck as well.
    stuck = set(cycle)
    while True:
        more = {wait.rank for wait in waiting if stuck.intersection(wait.peers)} - stuck
        if not more:
            break
        stuck |= more
    who = "none" if len(stuck) == len(ranks) else "none of them"
    if len(cycle) > _SPELLED_CYCLE:
        return f"{_spelled_ranks(cycle)} wait for each other in a cycle: {who} can move"
    first, *others = cycle
    steps = [f"rank {first} waits for rank {after[first]}"]
    steps += [f"rank {rank} for rank {after[rank]}" for rank in others]
    return f"{listed(steps)}: {who} can move"


def _spelled_ranks(ranks: Collection[int]) -> str:
    """Return ``ranks 0, 1 and 3``, or ``ranks 0, 1, … and 15`` when they are many."""
    if len(ranks) <= 8:
        return listed_ranks(ranks)
    first, second, *_, last = sorted(ranks)
    return f"ranks {first}, {second}, … and {last}"


def _places(ranks: Sequence[int]) -> dict[int, tuple[float, float]]:
    """Place two ranks side by side, more on a circle, rank 0 on top and then clockwise."""
    n = len(ranks)
    if n <= 2:
        return {rank: (3.0 * i - 1.5 * (n - 1), 0.0) for i, rank in enumerate(ranks)}
    radius = max(1.5, 0.28 * n)
    places = {}
    for i, rank in enumerate(ranks):
        angle = math.pi / 2 - 2 * math.pi * i / n
        # Wider than high: operations are written along the arrows.
        places[rank] = (1.5 * radius * math.cos(angle), radius * math.sin(angle))
    return places


def _canvas(places: dict[int, tuple[float, float]]) -> tuple[ChartFigure, Axes]:
    xs, ys = zip(*places.values(), strict=True)
    margin_x = 1.4
    margin_y = 0.75
    title_height = 0.5
    width = max(xs) - min(xs) + 2 * margin_x
    height = max(ys) - min(ys) + 2 * margin_y
    figure = ChartFigure(max(7.5, width), height + title_height)
    side = (figure.get_figwidth() - width) / 2
    axes = figure.axes_with_margins(left=side, right=side, bottom=0, top=title_height)
    axes.set_xlim(min(xs) - margin_x, max(xs) + margin_x)
    axes.set_ylim(min(ys) - margin_y, max(ys) + margin_y)
    axes.set_axis_off()
    return figure, axes


def _draw_rank(
    axes: Axes, rank: int, place: tuple[float, float], state: str, in_cycle: bool
) -> None:
    look = {"facecolor": "white", "edgecolor": chart.TEXT_GREY}
    if in_cycle:
        look = {"facecolor": "#FBE6D8", "edgecolor": chart.VERMILION}
    line = 2.6 if in_cycle else 1.2
    axes.add_patch(Circle(place, _NODE_RADIUS, linewidth=line, zorder=3, **look))
    words: dict[str, Any] = {"ha": "center", "va": "center_baseline", "zorder": 4}
    axes.text(*place, str(rank), size=13, weight="bold", **words)
    if not state:
        return

    # Outside the circle of ranks, where no arrow runs.
    x, y = place
    away = _NODE_RADIUS + 0.1
    if abs(x) > abs(y):
        align = "left" if x > 0 else "right"
        axes.text(x + math.copysign(away, x), y, state, ha=align, va="center", size=9)
    else:
        align = "bottom" if y > 0 else "top"
        axes.text(x, y + math.copysign(away, y), state, ha="center", va=align, size=9)


def _draw_arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], operation: str, in_cycle: bool
) -> None:
    look: dict[str, Any] = {"color": chart.TEXT_GREY, "linewidth": 1.2, "linestyle": (0, (4, 3))}
    weight = "normal"
    if in_cycle:
        look = {"color": chart.VERMILION, "linewidth": 2.6, "linestyle": "-"}
        weight = "bold"
    x0, y0 = start
    x1, y1 = end
    if start == end:
        above = y0 + _NODE_RADIUS + 0.1
        axes.text(x0, above, f"↻ {operation}", ha="center", size=9, color=look["color"])
        return

    # Curved, so that two ranks waiting for each other give two arrows.
    bend = 0.22
    axes.add_patch(
        FancyArrowPatch(
            start,
            end,
            connectionstyle=f"arc3,rad={bend}",
            arrowstyle="-|>",
            mutation_scale=16,
            shrinkA=_CLEARANCE,
            shrinkB=_CLEARANCE + 1,
            zorder=2,
            **look,
        )
    )
    # The middle of the quadratic curve that arc3 draws.
    x = (x0 + x1) / 2 + bend / 2 * (y1 - y0)
    y = (y0 + y1) / 2 - bend / 2 * (x1 - x0)
    behind = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
    middle: dict[str, Any] = {"ha": "center", "va": "center", "zorder": 5}
    axes.text(x, y, operation, size=9, weight=weight, bbox=behind, **middle)
