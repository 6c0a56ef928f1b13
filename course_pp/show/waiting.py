"""Who waits for whom: the picture of a deadlock."""

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
    for, if any. The peers of a collective are the ranks that have not entered it. A peer that
    nobody reports on is drawn too.
    """
    given = list(waits)
    by_rank = {wait.rank: wait for wait in sorted(given, key=lambda wait: wait.rank)}
    if len(by_rank) < max(1, len(given)):
        raise ValueError(
            f"waits has {len(given)}, for {len(by_rank)} ranks: give one for each rank"
        )
    cycle = find_cycle({rank: sorted(wait.peers) for rank, wait in by_rank.items()})
    first = cycle.index(min(cycle)) if cycle else 0
    cycle = cycle[first:] + cycle[:first]
    after = dict(zip(cycle, cycle[1:] + cycle[:1], strict=True))
    ranks = sorted({*by_rank, *(peer for wait in by_rank.values() for peer in wait.peers)})
    places = _places(ranks)
    figure, axes = _canvas(places)
    for wait in by_rank.values():
        for peer in sorted(wait.peers):
            _draw_arrow(
                axes, places[wait.rank], places[peer], wait.operation, after.get(wait.rank) == peer
            )
    for rank in ranks:
        _draw_rank(axes, rank, places[rank], _state(by_rank.get(rank)), rank in cycle)
    finding = _finding(by_rank, cycle, after, ranks)
    figure.text(
        0.5, 1 - 0.3 / figure.get_figheight(), finding, ha="center", va="center", fontsize=11.5
    )
    each = [
        (
            f"rank {w.rank} waits in {w.operation} for {_spelled_ranks(w.peers)}"
            if w.peers
            else f"rank {w.rank} waits for nobody ({_state(w)})"
        )
        for w in by_rank.values()
    ]
    figure.alt_text = f"Who waits for whom. {finding}. {'; '.join(each)}."
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
        return f"{'; '.join(steps[:3])}{'; …' if len(steps) > 3 else ''}: no cycle"
    if len(cycle) == 1:
        return f"rank {cycle[0]} waits for itself: it can never move"
    stuck = set(cycle)
    while more := {w.rank for w in waiting if stuck.intersection(w.peers)} - stuck:
        stuck |= more
    who = "none" if len(stuck) == len(ranks) else "none of them"
    if len(cycle) > _SPELLED_CYCLE:
        return f"{_spelled_ranks(cycle)} wait for each other in a cycle: {who} can move"
    steps = [f"rank {a} {'waits ' * (i == 0)}for rank {after[a]}" for i, a in enumerate(cycle)]
    return f"{listed(steps)}: {who} can move"


def _spelled_ranks(ranks: Collection[int]) -> str:
    """Return ``ranks 0, 1 and 3``, or ``ranks 0, 1, … and 15`` when they are many."""
    if len(ranks) <= 8:
        return listed_ranks(ranks)
    first, second, *_, last = sorted(ranks)
    return f"ranks {first}, {second}, … and {last}"


def _places(ranks: Sequence[int]) -> dict[int, tuple[float, float]]:
    """Place two ranks side by side, more on a circle, rank 0 on top and then clockwise."""
    if len(ranks) <= 2:
        return {rank: (3.0 * i - 1.5 * (len(ranks) - 1), 0.0) for i, rank in enumerate(ranks)}
    radius = max(1.5, 0.28 * len(ranks))
    angles = {rank: math.pi / 2 - 2 * math.pi * i / len(ranks) for i, rank in enumerate(ranks)}
    return {rank: (1.5 * radius * math.cos(a), radius * math.sin(a)) for rank, a in angles.items()}


def _canvas(places: dict[int, tuple[float, float]]) -> tuple[ChartFigure, Axes]:
    xs, ys = zip(*places.values(), strict=True)
    margin_x, margin_y, title_height = 1.4, 0.75, 0.5
    width, height = max(xs) - min(xs) + 2 * margin_x, max(ys) - min(ys) + 2 * margin_y
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
    axes.add_patch(
        Circle(
            place,
            _NODE_RADIUS,
            facecolor="#FBE6D8" if in_cycle else "white",
            edgecolor=chart.VERMILION if in_cycle else chart.TEXT_GREY,
            linewidth=2.6 if in_cycle else 1.2,
            zorder=3,
        )
    )
    axes.text(
        *place, str(rank), ha="center", va="center_baseline", size=13, weight="bold", zorder=4
    )
    if state:
        (x, y), away = place, _NODE_RADIUS + 0.1
        # Outside the circle of ranks, where no arrow runs.
        if abs(x) > abs(y):
            side = math.copysign(1, x)
            axes.text(
                x + side * away, y, state, ha="left" if x > 0 else "right", va="center", size=9
            )
        else:
            axes.text(
                x,
                y + math.copysign(away, y),
                state,
                ha="center",
                va="bottom" if y > 0 else "top",
                size=9,
            )


def _draw_arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], operation: str, in_cycle: bool
) -> None:
    colour = chart.VERMILION if in_cycle else chart.TEXT_GREY
    if start == end:
        axes.text(
            start[0],
            start[1] + _NODE_RADIUS + 0.1,
            f"↻ {operation}",
            ha="center",
            size=9,
            color=colour,
        )
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
            linewidth=2.6 if in_cycle else 1.2,
            linestyle="-" if in_cycle else (0, (4, 3)),
            color=colour,
            zorder=2,
        )
    )
    # The middle of the quadratic curve that arc3 draws.
    (x0, y0), (x1, y1) = start, end
    x, y = (x0 + x1) / 2 + bend / 2 * (y1 - y0), (y0 + y1) / 2 - bend / 2 * (x1 - x0)
    axes.text(
        x,
        y,
        operation,
        ha="center",
        va="center",
        size=9,
        weight="bold" if in_cycle else "normal",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
        zorder=5,
    )
