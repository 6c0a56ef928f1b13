"""Curves and points: bubble over memory, speed-up over ranks, step time over tokens.

Costs are those of all layers of a rank, or of the whole model: a schedule that cuts them finer gets
a share for each stage, so that every schedule does the same work and keeps the same bytes.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from math import log2
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator
from matplotlib.transforms import ScaledTranslation

from course_pp.base.arguments import checked, refuse_below
from course_pp.schedule import Costs, Timeline, build, find, names, simulate
from course_pp.show import chart
from course_pp.show.chart import WIDTH, ChartFigure, points_per_unit, text_width
from course_pp.show.wording import amount, counted, listed, percent

_COLOURS = (
    chart.BLUE,
    chart.VERMILION,
    chart.GREEN,
    chart.PURPLE,
    chart.ORANGE,
    chart.SKY_BLUE,
    chart.BLACK,
)
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">")
_DASHES = ("-", (0, (6, 2)), (0, (2, 1.5)), (0, (6, 2, 1, 2)))
_LABEL = 9.0
_ASYNCHRONOUS = "pipedream"
_UNBEATEN = "no other is better"
_BEATEN = "another is better in one and no worse in the other"
_ANOTHER_STEP = "asynchronous: another step"
_LOOKS: dict[str, dict[str, Any]] = {
    _UNBEATEN: {"marker": "o", "color": chart.BLUE},
    _BEATEN: {"marker": "s", "color": chart.VERMILION},
    _ANOTHER_STEP: {"marker": "D", "color": chart.VERMILION, "markerfacecolor": "white"},
}
_NEAR_LINEAR = 0.8


def _known(schedules: str | Sequence[str]) -> tuple[str, ...]:
    chosen = (schedules,) if isinstance(schedules, str) else tuple(schedules)
    if not chosen:
        raise ValueError("schedules is empty: give at least one schedule to draw")
    for name in chosen:
        find(name)
    return chosen


def _share(costs: Costs, n_parts: int) -> Costs:
    """Return the costs of one of so many equal parts."""
    of_parts = ("forward", "input_grad", "weight_grad", "recompute", "update", "overlapped")
    shares = {}
    for name in (*of_parts, "activation", "released_by_input_grad", "weights"):
        value = getattr(costs, name)
        if isinstance(value, tuple):
            given = f"costs: {name} has a value for each stage, which schedules differ in"
            raise ValueError(f"{given}: give one number")
        if value is not None and n_parts > 1:
            shares[name] = value / n_parts
    return replace(costs, **shares)


def _colour(i: int) -> str:
    return _COLOURS[i % len(_COLOURS)]


def _dash(i: int) -> Any:
    return _DASHES[i % len(_DASHES)]


def _marker(i: int) -> dict[str, Any]:
    return {
        "color": _colour(i),
        "marker": _MARKERS[i % len(_MARKERS)],
        # Two curves in one place stay visible: of two neighbours one marker is smaller.
        "markersize": 7.5 - 1.5 * (i % 2),
        "markerfacecolor": "white",
        "linestyle": "",
    }


def _begin(curves: Iterable[str], height: float) -> tuple[ChartFigure, Axes]:
    """Begin a figure with room for the names of curves on the right; its x axis is logarithmic."""
    figure = ChartFigure(WIDTH, height)
    longest = max(text_width(name, _LABEL) for name in curves) / 72
    axes = figure.axes_with_margins(left=0.75, right=longest + 0.4, bottom=0.6, top=0.47)
    axes.set_xscale("log", base=2)
    return figure, axes


def _describe(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x, loc="left", fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.tick_params(labelsize=8.5)
    axes.spines[["top", "right"]].set_visible(False)


def _name_ends(figure: ChartFigure, axes: Axes, ends: dict[str, float]) -> None:
    """Write the names right of the axes with their markers, each at the end of its curve.

    Names are moved apart where ends meet.
    """
    _, inches = chart.size_in_inches(axes)
    beside = axes.transAxes + ScaledTranslation(9 / 72, 0, figure.dpi_scale_trans)
    scaled = axes.transScale + axes.transLimits  # to shares of the height
    names = list(ends)
    heights = [float(scaled.transform((1, end))[1]) for end in ends.values()]
    order = sorted(range(len(ends)), key=lambda i: (heights[i], -i))
    places = _apart([heights[i] for i in order], least=1.3 * _LABEL / 72 / inches)
    for i, place in zip(order, places, strict=True):
        axes.plot([1], [place], transform=beside, clip_on=False, **_marker(i))
        axes.annotate(
            names[i],
            (1, place),
            xycoords="axes fraction",
            xytext=(17, 0),
            textcoords="offset points",
            size=_LABEL,
            va="center_baseline",
        )


def _apart(values: Sequence[float], least: float) -> list[float]:
    """Return ascending ``values``, moved as little as needed to be ``least`` apart."""
    # Labels that touch form a group around their common middle; a group that touches the one before
    # joins it.
    groups: list[tuple[float, int]] = []
    for value in values:
        middle = value
        number = 1
        while groups:
            before, n_before = groups[-1]
            if middle - number * least / 2 >= before + n_before * least / 2:
                break
            groups.pop()
            middle = (middle * number + before * n_before) / (number + n_before)
            number += n_before
        groups.append((middle, number))

    moved = []
    for middle, number in groups:
        moved += [middle + least * (i - (number - 1) / 2) for i in range(number)]
    return moved


@dataclass(frozen=True)
class _Point:
    """The memory and bubble of a schedule, or of several that have the same."""

    names: tuple[str, ...]
    memory: float
    bubble: float

    @property
    def label(self) -> str:
        return listed(self.names).replace(_ASYNCHRONOUS, f"{_ASYNCHRONOUS} (asynchronous)")

    @property
    def is_asynchronous(self) -> bool:
        return self.names == (_ASYNCHRONOUS,)

    def beats(self, other: "_Point") -> bool:
        """Return whether it is no worse in memory and in bubble, and better in one of them."""
        is_as_good = self.memory <= other.memory and self.bubble <= other.bubble
        return is_as_good and (self.memory < other.memory or self.bubble < other.bubble)


@checked
def pareto(
    n_ranks: int = 4,
    n_microbatches: int = 8,
    costs: Costs | None = None,
    schedules: str | Sequence[str] | None = None,
    title: str | None = None,
) -> ChartFigure:
    """Draw the bubble of schedules against the peak memory of their fullest rank.

    A line joins the schedules that no other beats. ``pipedream`` is drawn hollow and left out of
    the line: it computes another step, with older weights.

    Args:
        costs: the costs of all layers of a rank, one number each; a chunk gets its share. Unless
            given, memory counts activations of one microbatch in all layers of a rank.
        schedules: names of schedules, or one name; all unless given. Schedules that do not allow
            these sizes are named under the axis.
    """
    chosen = _known(names() if schedules is None else schedules)
    points, refused = _points(chosen, n_ranks, n_microbatches, costs=costs or Costs())
    rivals = [point for point in points if not point.is_asynchronous]
    groups: dict[str, list[_Point]] = {group: [] for group in _LOOKS}
    for point in points:
        if point.is_asynchronous:
            group = _ANOTHER_STEP
        elif any(other.beats(point) for other in rivals):
            group = _BEATEN
        else:
            group = _UNBEATEN
        groups[group].append(point)
    best = sorted(groups[_UNBEATEN], key=lambda point: point.memory)

    figure = ChartFigure(WIDTH, 4.6)
    axes = figure.axes_with_margins(left=0.75, right=0.4, bottom=0.6, top=0.47)
    axes.set_xlim(0, 1.12 * max(point.memory for point in points) or 1)
    # With room for a marker at 0 and at the largest.
    largest = max([*(point.bubble for point in points), 0.01])
    axes.set_ylim(-0.03 * largest, 1.07 * largest)
    axes.plot(
        [point.memory for point in best],
        [point.bubble for point in best],
        color=chart.TEXT_GREY,
        linewidth=1.0,
        drawstyle="steps-post",
        zorder=1,
    )
    for group, look in _LOOKS.items():
        if groups[group]:
            x = [point.memory for point in groups[group]]
            y = [point.bubble for point in groups[group]]
            axes.plot(x, y, linestyle="", markersize=7, clip_on=False, label=group, **look)
    axes.legend(loc="upper right", fontsize=8.5, frameon=False)
    _label_points(axes, points, best)

    what = "activations of one microbatch in all layers of a rank"
    if costs is not None:
        what = "unit of the costs"
    note = f"; not possible with these sizes: {', '.join(refused)}" if refused else ""
    _describe(axes, f"peak memory of the fullest rank ({what}){note}", "bubble, of all rank time")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
    axes.grid(color=chart.IDLE_GREY, linewidth=0.8, zorder=0)
    axes.set_axisbelow(True)

    if len(best) > 1:
        found = f"from {best[0].label} to {best[-1].label}, less bubble costs memory"
    else:
        found = f"{best[0].label} has the least bubble and the least memory"
    sizes = f"{counted(n_ranks, 'rank')}, {counted(n_microbatches, 'microbatch')}"
    finding = f"{sizes}: {found}"
    each = "; ".join(f"{p.label} {percent(p.bubble)} at {amount(p.memory)}" for p in points)
    missing = f" Not possible with these sizes: {listed(refused)}." if refused else ""
    told = f"Bubble against peak memory of the fullest rank. {finding}. {each}.{missing}"
    return figure.finish(axes, title, finding, told)


def _points(
    schedules: Sequence[str], n_ranks: int, n_microbatches: int, costs: Costs
) -> tuple[list[_Point], list[str]]:
    """Return a point for each schedule that allows the sizes, and the names of the others.

    Schedules at one place share a point.
    """
    found: dict[tuple[float, float], list[str]] = {}
    refused = []
    reason = None
    for name in schedules:
        try:
            schedule = build(name, n_ranks, n_microbatches)
        except ValueError as problem:
            refused.append(name)
            reason = problem
            continue
        shared = _share(costs, max(1, schedule.n_stages // schedule.n_ranks))
        tl = simulate(schedule, shared)
        peak = float(max(tl.peak_memory(shared)))
        # Rounded, so that places which differ by the last digit of a float are one.
        place = (round(peak, 9), round(float(tl.bubble_fraction), 9))
        found.setdefault(place, []).append(name)
    if not found:
        raise ValueError(f"no schedule to draw: {reason}")
    return [_Point(tuple(alike), *place) for place, alike in found.items()], refused


def _label_points(axes: Axes, points: Sequence[_Point], best: Sequence[_Point]) -> None:
    """Write each name on the first side of its point where it covers nothing else."""
    points_x, points_y = points_per_unit(axes)

    def place_of(point: _Point) -> tuple[float, float]:
        return point.memory * points_x, point.bubble * points_y

    # Rectangles as left, bottom, width and height, in points: the markers, and each step of the
    # line, which goes right and then down.
    taken: list[tuple[float, float, float, float]] = []
    for point in points:
        x, y = place_of(point)
        taken.append((x - 4, y - 4, 8.0, 8.0))
    for before, after in pairwise(best):
        x, y = place_of(before)
        right, low = place_of(after)
        taken += [(x, y - 1, right - x, 2.0), (right - 1, low, 2.0, y - low)]
    edge = axes.get_xlim()[1] * points_x

    def is_free(box: tuple[float, float, float, float]) -> bool:
        x, y, width, height = box
        if x < 2 or x + width > edge + 20 or y < 2:
            return False
        for left, bottom, wide, high in taken:
            apart_x = x + width <= left or left + wide <= x
            apart_y = y + height <= bottom or bottom + high <= y
            if not apart_x and not apart_y:
                return False
        return True

    for point in sorted(points, key=lambda each: -each.bubble):
        width = text_width(point.label, _LABEL)
        height = 1.1 * _LABEL
        x, y = place_of(point)
        # On its right, on its left, then above and below, farther and farther away.
        corners = [(x + 7, y - height / 2), (x - 7 - width, y - height / 2)]
        for away in (13, 24, 35):
            corners += [(x - width / 2, y + sign * away - height / 2) for sign in (1, -1)]
        boxes = [(*corner, width, height) for corner in corners]
        box = next(filter(is_free, boxes), boxes[0])
        taken.append(box)
        offset = (box[0] - x, box[1] - y + 0.15 * height)
        where = (point.memory, point.bubble)
        axes.annotate(point.label, where, xytext=offset, textcoords="offset points", size=_LABEL)


@checked
def speed_up(
    schedules: str | Sequence[str] = ("naive", "gpipe", "1f1b", "interleaved_1f1b"),
    ranks: Sequence[int] = (1, 2, 4, 8, 16, 32, 64),
    n_microbatches: int = 64,
    n_chunks: int | None = None,
    costs: Costs | None = None,
    measured: Sequence[Timeline] = (),
    title: str | None = None,
) -> ChartFigure:
    """Draw how many times as fast as one rank each schedule is, on more and more ranks.

    The model and the batch stay the same. Lines are simulated, filled points are measured. Where a
    schedule does not allow a number of ranks, it has no point.

    Args:
        schedules: names as for :func:`course_pp.schedule.build`, or one of them.
        ranks: numbers of ranks; the model is cut into as many stages, times the chunks.
        n_microbatches: m, however many ranks there are.
        n_chunks: stages a rank, for the schedules that allow another number; their own unless
            given.
        costs: the costs of all layers of the model, one number each; a stage gets its share. A
            message costs what it costs.
        measured: steps under ``schedules``, by their names. A step that a busy machine simulated
            has no point.
    """
    schedules = _known(schedules)
    refuse_below(1, "speed_up", ranks=min(ranks, default=0), n_chunks=n_chunks)
    ranks = sorted(set(ranks))
    costs = costs or Costs()
    ran = defaultdict[str, dict[int, float]](dict)
    for tl in measured:
        if not tl.measured:
            continue
        if tl.name not in schedules:
            raise ValueError(
                f"measured has {tl.name!r}, which is not drawn: name it in schedules, or leave"
                " it out"
            )
        # The work done at once is the speed-up over a rank that is never idle.
        ran[tl.name][tl.n_ranks] = float(tl.n_ranks * tl.utilisation)
    simulated = {}
    for name in schedules:
        simulated[name] = _faster(name, ranks, n_microbatches, n_chunks=n_chunks, costs=costs)

    figure, axes = _begin(schedules, 4.4)
    most = max(ranks)
    axes.set_yscale("log", base=2)
    axes.set_xlim(min(ranks) * 0.93, most * 1.07 if most > min(ranks) else 2 * most)
    axes.set_ylim(0.8, max(2, most) * 1.2)
    ends = list(axes.get_xlim())
    near_linear = [_NEAR_LINEAR * p for p in ends]
    axes.plot(ends, ends, color=chart.TEXT_GREY, lw=1.0, zorder=1)
    axes.fill_between(ends, near_linear, ends, color=chart.IDLE_GREY, zorder=0, lw=0)
    ticks = [2**k for k in range(int(log2(max(2, most))) + 1)]
    axes.set_xticks(list(ranks), list(map(str, ranks)))
    axes.set_yticks(ticks, list(map(str, ticks)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())
    x = "ranks (lines: simulated, filled points: measured; grey: linear, down to 80 % of it)"
    _describe(axes, x, "times as fast as one rank")
    for i, (name, points) in enumerate(simulated.items()):
        axes.plot(list(points), list(points.values()), color=_colour(i), linestyle=_dash(i), lw=1.6)
        seen = ran.get(name, {})
        look = _marker(i) | {"markerfacecolor": _colour(i)}
        axes.plot(list(seen), list(seen.values()), **look, zorder=3)
    last = {name: points[max(points)] for name, points in simulated.items()}
    _name_ends(figure, axes, last)

    lines = []
    near = defaultdict[int, list[str]](list)
    for name, points in simulated.items():
        told = f"{name} {_told_speed_ups(points)}"
        if name in ran:
            told += f"; measured {_told_speed_ups(ran[name])}"
        lines.append(told)
        near[_near_linear_up_to(points)].append(name)
    ends_of = ", ".join(f"{p} ({listed(near[p])})" for p in sorted(near, reverse=True))
    finding = f"{counted(n_microbatches, 'microbatch')}: near linear up to {ends_of} ranks"
    what = "How many times as fast as one rank, against the number of ranks"
    return figure.finish(axes, title, finding, f"{what}. {finding}. {'. '.join(lines)}.")


def _told_speed_ups(points: Mapping[int, float]) -> str:
    return ", ".join(f"{value:.3g} on {p}" for p, value in points.items())


def _near_linear_up_to(points: Mapping[int, float]) -> int:
    """Return the most ranks up to which every point keeps 80 % of linear; 1 if none does."""
    most = 1
    for p, value in points.items():
        if value < _NEAR_LINEAR * p:
            break
        most = p
    return most


def _faster(
    name: str, ranks: Sequence[int], m: int, n_chunks: int | None, costs: Costs
) -> dict[int, float]:
    """Return the speed-up over one rank for each number of ranks that the schedule allows."""
    entry = find(name)
    whole = _share(costs, 1)
    one = sum(getattr(whole, k) for k in ("forward", "input_grad", "weight_grad", "recompute"))
    alone = float(m * one)
    chunks = n_chunks if entry.any_chunks and entry.n_chunks > 1 else None
    points = {}
    refusal = None
    for p in ranks:
        try:
            schedule = build(name, p, m, chunks)
        except ValueError as problem:
            refusal = problem
            continue
        # Schedules with a stage on two ranks have as many stages as ranks; others have v times as
        # many.
        points[p] = alone / float(simulate(schedule, _share(costs, schedule.n_stages)).makespan)
    if not points:
        raise ValueError(
            f"{name} allows none of the numbers in ranks, {list(ranks)}: {refusal}"
        ) from refusal
    return points


@checked
def break_even(curves: Mapping[str, Mapping[int, float]], title: str | None = None) -> ChartFigure:
    """Draw step times over data parallelism's, against the tokens of a sequence.

    Both axes are logarithmic.

    Args:
        curves: ``{name: {tokens: step time / data-parallel step time}}``, two or more token counts.
        title: a heading in place of the finding, which says where the curves pass 1.
    """
    heights: dict[str, dict[int, float]] = {}
    for name, curve in curves.items():
        heights[name] = {tokens: log2(curve[tokens]) for tokens in sorted(curve)}
    figure, axes = _begin(curves, 4.2)
    tokens = sorted({each for points in heights.values() for each in points})
    every = [height for points in heights.values() for height in points.values()]
    low = min(*every, -1.0) - 0.2
    high = max(*every, 1.0) + 0.2
    axes.set_xlim(tokens[0] * 0.93, tokens[-1] * 1.07)
    axes.set_ylim(low, high)
    axes.axhspan(0, high, color=chart.IDLE_GREY, zorder=0, lw=0)
    axes.axhline(0, color=chart.TEXT_GREY, lw=1.2, zorder=1)
    ticks = [power for power in range(-10, 11) if low <= power <= high]
    # Fraction writes 2 and 1/2 as readers do.
    axes.set_yticks(ticks, [str(Fraction(2) ** power) for power in ticks])
    axes.set_xticks(tokens, [f"{each:,}" for each in tokens])
    axes.xaxis.set_minor_locator(NullLocator())
    x = "tokens of a sequence; grey: data parallelism is the faster"
    _describe(axes, x, "step, over data parallelism's")
    for i, points in enumerate(heights.values()):
        look = _marker(i) | {"linestyle": _dash(i), "linewidth": 1.6}
        axes.plot(list(points), list(points.values()), **look)
    _name_ends(figure, axes, {name: points[max(points)] for name, points in heights.items()})

    lines = []
    passes = []
    for name, curve in curves.items():
        told = f"{name}: " + ", ".join(f"{curve[each]:.3g} at {each:,}" for each in sorted(curve))
        at = crossing(curve)
        if at is not None:
            passes.append(at)
            told += f"; passes 1 near {_rounded(at)}"
        lines.append(told)
    if not passes:
        finding = "No curve passes data parallelism here"
    elif len(passes) == 1:
        finding = f"Data parallelism is the faster from {_rounded(passes[0])} tokens a sequence on"
    else:
        between = f"{_rounded(min(passes))} and {_rounded(max(passes))} tokens"
        finding = f"Data parallelism becomes the faster between {between}"
    what = "Step times over data parallelism's, against the tokens of a sequence"
    return figure.finish(axes, title, finding, f"{what}. {finding}. {'. '.join(lines)}.")


def crossing(curve: Mapping[int, float]) -> float | None:
    """Return the number of tokens from which data parallelism is as fast.

    None if it is nowhere slower before, or nowhere as fast.
    """
    for a, b in pairwise(sorted(curve)):
        low = log2(curve[a])
        high = log2(curve[b])
        if low < 0 <= high:
            # Between two points the curve is straight on logarithmic axes.
            return float(2 ** (log2(a) + (log2(b) - log2(a)) * low / (low - high)))
    return None


def _rounded(tokens: float) -> str:
    return f"{float(f'{tokens:.2g}'):,.0f}"
