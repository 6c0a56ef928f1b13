"""Curves and points: bubble against memory, speed-up against ranks, and where one way to train
becomes the slower.

Costs are those of all layers of a rank, or of the whole model: a schedule that cuts them finer gets
a share for each stage, so that every schedule does the same work and keeps the same bytes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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
        raise ValueError(
            "schedules is empty, so there is nothing to draw: give at least one schedule"
        )
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
            raise ValueError(
                f"costs: {name} has a value for each stage, which schedules differ in: give one"
                " number"
            )
        if value is not None and n_parts > 1:
            shares[name] = value / n_parts
    return replace(costs, **shares)


def _colour(i: int) -> str:
    return _COLOURS[i % len(_COLOURS)]


def _dash(i: int) -> Any:
    return _DASHES[i % len(_DASHES)]


def _marker(i: int) -> dict[str, Any]:
    # Two curves in one place stay visible: of two neighbours one marker is smaller.
    size = 7.5 - 1.5 * (i % 2)
    marker = _MARKERS[i % len(_MARKERS)]
    return {
        "color": _colour(i),
        "marker": marker,
        "markersize": size,
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
    """Write the names right of the axes with their markers, each at its curve's end, moved apart where ends meet."""
    _, inches = chart.size_in_inches(axes)
    beside = axes.transAxes + ScaledTranslation(9 / 72, 0, figure.dpi_scale_trans)
    scaled = axes.transScale + axes.transLimits  # to shares of the height
    heights = [float(scaled.transform((1, end))[1]) for end in ends.values()]
    order = sorted(range(len(ends)), key=lambda i: (heights[i], -i))
    places = _apart([heights[i] for i in order], 1.3 * _LABEL / 72 / inches)
    for i, place in zip(order, places, strict=True):
        axes.plot([1], [place], transform=beside, clip_on=False, **_marker(i))
        look: dict[str, Any] = {
            "textcoords": "offset points",
            "size": _LABEL,
            "va": "center_baseline",
        }
        axes.annotate(list(ends)[i], (1, place), xycoords="axes fraction", xytext=(17, 0), **look)


def _apart(values: Sequence[float], least: float) -> list[float]:
    """Ascending ``values`` moved as little as needed to be ``least`` apart."""
    groups: list[tuple[float, int]] = []  # middle and number of labels that touch
    for value in values:
        middle, number = value, 1
        while groups and middle - number * least / 2 < groups[-1][0] + groups[-1][1] * least / 2:
            other, others = groups.pop()
            middle, number = (middle * number + other * others) / (number + others), number + others
        groups.append((middle, number))
    return [
        middle + least * (i - (number - 1) / 2) for middle, number in groups for i in range(number)
    ]


@dataclass(frozen=True)
class _Point:
    """What a schedule, or several that come out alike, cost."""

    names: tuple[str, ...]
    memory: float
    bubble: float

    @property
    def label(self) -> str:
        return listed(
            [f"{name} (asynchronous)" if name == _ASYNCHRONOUS else name for name in self.names]
        )

    @property
    def is_asynchronous(self) -> bool:
        return self.names == (_ASYNCHRONOUS,)

    def beats(self, other: "_Point") -> bool:
        """Return whether it is as good in both and better in one."""
        here, there = (self.memory, self.bubble), (other.memory, other.bubble)
        return here != there and all(a <= b for a, b in zip(here, there, strict=True))


@checked
def pareto(
    n_ranks: int = 4,
    n_microbatches: int = 8,
    costs: Costs | None = None,
    schedules: str | Sequence[str] | None = None,
    title: str | None = None,
) -> ChartFigure:
    """Draw the bubble of schedules against the peak memory of their fullest rank; a line joins
    those none other beats.

    ``pipedream`` is drawn hollow and left out of the line: it computes another step, with older
    weights.

    Args:
        costs: of all layers of a rank, one number each; a chunk gets its share. Unless given,
            memory counts activations of one microbatch in all layers of a rank.
        schedules: all unless given; those that do not allow these sizes are named under the axis.
    """
    chosen = _known(names() if schedules is None else schedules)
    points, refused = _points(chosen, n_ranks, n_microbatches, Costs() if costs is None else costs)
    rivals = [point for point in points if not point.is_asynchronous]
    best = [point for point in rivals if not any(other.beats(point) for other in rivals)]
    best.sort(key=lambda point: point.memory)
    groups = {
        point: _ANOTHER_STEP if point.is_asynchronous else _UNBEATEN if point in best else _BEATEN
        for point in points
    }
    figure = ChartFigure(WIDTH, 4.6)
    axes = figure.axes_with_margins(left=0.75, right=0.4, bottom=0.6, top=0.47)
    axes.set_xlim(0, 1.12 * max(point.memory for point in points) or 1)
    # With room for a marker at 0 and at the largest.
    largest = max([*(point.bubble for point in points), 0.01])
    axes.set_ylim(-0.03 * largest, 1.07 * largest)
    steps = [(point.memory, point.bubble) for point in best]
    axes.plot(
        *zip(*steps, strict=True),
        color=chart.TEXT_GREY,
        linewidth=1.0,
        drawstyle="steps-post",
        zorder=1,
    )
    for group, look in _LOOKS.items():
        if mine := [point for point in points if groups[point] == group]:
            x, y = [point.memory for point in mine], [point.bubble for point in mine]
            axes.plot(x, y, linestyle="", markersize=7, clip_on=False, label=group, **look)
    axes.legend(loc="upper right", fontsize=8.5, frameon=False)
    _label_points(axes, points, best)
    what = (
        "activations of one microbatch in all layers of a rank"
        if costs is None
        else "unit of the costs"
    )
    note = f"; not possible with these sizes: {', '.join(refused)}" if refused else ""
    _describe(axes, f"peak memory of the fullest rank ({what}){note}", "bubble, of all rank time")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
    axes.grid(color=chart.IDLE_GREY, linewidth=0.8, zorder=0)
    axes.set_axisbelow(True)

    finding = f"{counted(n_ranks, 'rank')}, {counted(n_microbatches, 'microbatch')}: "
    finding += f"from {best[0].label} to {best[-1].label}, less bubble costs memory" * (
        len(best) > 1
    )
    finding += f"{best[0].label} has the least bubble and the least memory" * (len(best) == 1)
    each = "; ".join(f"{p.label} {percent(p.bubble)} at {amount(p.memory)}" for p in points)
    missing = f" Not possible with these sizes: {listed(refused)}." if refused else ""
    told = f"Bubble against peak memory of the fullest rank. {finding}. {each}.{missing}"
    return figure.finish(axes, title, finding, told)


def _points(
    schedules: Sequence[str], n_ranks: int, n_microbatches: int, costs: Costs
) -> tuple[list[_Point], list[str]]:
    """Return a point for each schedule that allows the sizes, alike ones joined; and the names of the others."""
    found: dict[tuple[float, float], list[str]] = {}
    refused, reason = [], None
    for name in schedules:
        try:
            schedule = build(name, n_ranks, n_microbatches)
        except ValueError as problem:
            refused.append(name)
            reason = problem
            continue
        shared = _share(costs, max(1, schedule.n_stages // schedule.n_ranks))
        tl = simulate(schedule, shared)
        place = (round(float(max(tl.peak_memory(shared))), 9), round(float(tl.bubble_fraction), 9))
        found.setdefault(place, []).append(name)
    if not found:
        raise ValueError(f"no schedule to draw: {reason}")
    return [_Point(tuple(alike), *place) for place, alike in found.items()], refused


def _label_points(axes: Axes, points: Sequence[_Point], best: Sequence[_Point]) -> None:
    """Write each name beside its point, on the first side where it covers no point, line or other name."""
    points_x, points_y = points_per_unit(axes)
    taken = [(p.memory * points_x - 4, p.bubble * points_y - 4, 8.0, 8.0) for p in points]
    for before, after in pairwise(best):
        x, y, right, low = (
            v * s for p in (before, after) for v, s in ((p.memory, points_x), (p.bubble, points_y))
        )
        taken += [(x, y - 1, right - x, 2.0), (right - 1, low, 2.0, y - low)]
    edge = axes.get_xlim()[1] * points_x

    def is_free(box: tuple[float, ...]) -> bool:
        x, y, width, height = box
        if x < 2 or x + width > edge + 20 or y < 2:
            return False
        return all(
            x + width <= a or a + w <= x or y + height <= b or b + h <= y for a, b, w, h in taken
        )

    for point in sorted(points, key=lambda each: -each.bubble):
        width, height = text_width(point.label, _LABEL), 1.1 * _LABEL
        x, y = point.memory * points_x, point.bubble * points_y
        sides = [(x + 7, y - height / 2), (x - 7 - width, y - height / 2)]
        sides += [
            (x - width / 2, y + sign * away - height / 2)
            for away in (13, 24, 35)
            for sign in (1, -1)
        ]
        box = next(
            filter(is_free, ((*side, width, height) for side in sides)), (*sides[0], width, height)
        )
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
    """Draw how many times as fast as one rank each schedule is, on more and more ranks, with one
    model and one batch.

    Lines are simulated, filled points are measured. Where a schedule does not allow a number of
    ranks, it has no point.

    Args:
        schedules: names as for :func:`course_pp.schedule.build`, or one of them.
        ranks: numbers of ranks; the model is cut into as many stages, times the chunks.
        n_microbatches: m, however many ranks there are.
        n_chunks: stages a rank, for the schedules that allow another number; their own unless
            given.
        costs: of all layers of the model, one number each; a stage gets its share. Messages cost
            what they cost.
        measured: steps under ``schedules``, by their names; of those that a busy machine simulated
            there is no point.
    """
    schedules = _known(schedules)
    refuse_below(1, "speed_up", ranks=min(ranks, default=0), n_chunks=n_chunks)
    ran: dict[str, dict[int, float]] = {}  # how much work was done at once
    for tl in measured:
        if tl.measured and tl.name not in schedules:
            raise ValueError(
                f"measured has {tl.name!r}, which is not drawn: name it in schedules, or leave"
                " it out"
            )
        if tl.measured:
            ran.setdefault(tl.name, {})[tl.n_ranks] = float(tl.n_ranks * tl.utilisation)
    ranks, costs = sorted(set(ranks)), Costs() if costs is None else costs
    simulated = {name: _faster(name, ranks, n_microbatches, n_chunks, costs) for name in schedules}

    figure, axes = _begin(schedules, 4.4)
    most = max(ranks)
    axes.set_yscale("log", base=2)
    axes.set_xlim(min(ranks) * 0.93, most * 1.07 if most > min(ranks) else 2 * most)
    axes.set_ylim(0.8, max(2, most) * 1.2)
    ends = list(axes.get_xlim())
    axes.plot(ends, ends, color=chart.TEXT_GREY, lw=1.0, zorder=1)
    axes.fill_between(
        ends, [_NEAR_LINEAR * p for p in ends], ends, color=chart.IDLE_GREY, zorder=0, lw=0
    )
    ticks = [2**k for k in range(int(log2(max(2, most))) + 1)]
    axes.set_xticks(list(ranks), [str(p) for p in ranks])
    axes.set_yticks(ticks, [str(tick) for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())
    x = "ranks (lines: simulated, filled points: measured; grey: linear, down to 80 % of it)"
    _describe(axes, x, "times as fast as one rank")
    for i, (name, points) in enumerate(simulated.items()):
        axes.plot(list(points), list(points.values()), color=_colour(i), linestyle=_dash(i), lw=1.6)
        seen = ran.get(name, {})
        axes.plot(
            list(seen),
            list(seen.values()),
            **(_marker(i) | {"markerfacecolor": _colour(i)}),
            zorder=3,
        )
    _name_ends(figure, axes, {name: points[max(points)] for name, points in simulated.items()})

    lines, near = [], dict[int, list[str]]()
    for name, points in simulated.items():
        told = f"{name} " + ", ".join(f"{value:.3g} on {p}" for p, value in points.items())
        if name in ran:
            told += "; measured " + ", ".join(
                f"{value:.3g} on {p}" for p, value in ran[name].items()
            )
        lines.append(told)
        # The most ranks up to which every number drawn keeps 80 % of linear.
        short = [p for p, value in points.items() if value < _NEAR_LINEAR * p]
        near.setdefault(
            max((p for p in points if not short or p < short[0]), default=1), []
        ).append(name)
    ends_of = ", ".join(f"{p} ({listed(near[p])})" for p in sorted(near, reverse=True))
    finding = f"{counted(n_microbatches, 'microbatch')}: near linear up to {ends_of} ranks"
    alt_text = (
        f"How many times as fast as one rank, against the number of ranks. {finding}."
        f" {'. '.join(lines)}."
    )
    return figure.finish(axes, title, finding, alt_text)


def _faster(
    name: str, ranks: Sequence[int], m: int, n_chunks: int | None, costs: Costs
) -> dict[int, float]:
    """Return for each number of ranks that the schedule allows, how many times as fast as one it is."""
    entry, whole = find(name), _share(costs, 1)
    alone = float(
        m
        * sum(
            getattr(whole, kind) for kind in ("forward", "input_grad", "weight_grad", "recompute")
        )
    )
    points, refusal = {}, None
    for p in ranks:
        try:
            schedule = build(
                name, p, m, n_chunks if entry.any_chunks and entry.n_chunks > 1 else None
            )
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
    """Draw how long steps take beside data parallelism's, over the tokens of a sequence; both axes
    are logarithmic.

    Args:
        curves: by name, for each number of tokens, from 2 numbers on, the time over data
            parallelism's.
        title: instead of the finding: where the curves pass 1.
    """
    heights = {
        name: {tokens: log2(curve[tokens]) for tokens in sorted(curve)}
        for name, curve in curves.items()
    }
    figure, axes = _begin(curves, 4.2)
    tokens = sorted({each for points in heights.values() for each in points})
    every = [height for points in heights.values() for height in points.values()]
    low, high = min(*every, -1.0) - 0.2, max(*every, 1.0) + 0.2
    axes.set_xlim(tokens[0] * 0.93, tokens[-1] * 1.07)
    axes.set_ylim(low, high)
    axes.axhspan(0, high, color=chart.IDLE_GREY, zorder=0, lw=0)
    axes.axhline(0, color=chart.TEXT_GREY, lw=1.2, zorder=1)
    ticks = [each for each in range(-10, 11) if low <= each <= high]
    axes.set_yticks(ticks, [f"{2**each}" if each >= 0 else f"1/{2**-each}" for each in ticks])
    axes.set_xticks(tokens, [f"{each:,}" for each in tokens])
    axes.xaxis.set_minor_locator(NullLocator())
    _describe(
        axes,
        "tokens of a sequence; grey: data parallelism is the faster",
        "step, over data parallelism's",
    )
    for i, points in enumerate(heights.values()):
        axes.plot(
            list(points),
            list(points.values()),
            **{**_marker(i), "linestyle": _dash(i), "linewidth": 1.6},
        )
    _name_ends(figure, axes, {name: points[max(points)] for name, points in heights.items()})

    told, passes = [], []
    for name, curve in curves.items():
        told.append(
            f"{name}: " + ", ".join(f"{curve[each]:.3g} at {each:,}" for each in sorted(curve))
        )
        if (at := crossing(curve)) is not None:
            passes.append(at)
            told[-1] += f"; passes 1 near {_rounded(at)}"
    if not passes:
        finding = "No curve passes data parallelism here"
    elif len(passes) == 1:
        finding = f"Data parallelism is the faster from {_rounded(passes[0])} tokens a sequence on"
    else:
        between = f"{_rounded(min(passes))} and {_rounded(max(passes))} tokens"
        finding = f"Data parallelism becomes the faster between {between}"
    what = "Step times over data parallelism's, against the tokens of a sequence"
    return figure.finish(axes, title, finding, f"{what}. {finding}. {'. '.join(told)}.")


def crossing(curve: Mapping[int, float]) -> float | None:
    """From how many tokens on data parallelism is as fast; None if it is nowhere slower before, or nowhere as fast."""
    for a, b in pairwise(sorted(curve)):
        low, high = log2(curve[a]), log2(curve[b])
        if low < 0 <= high:
            return float(2 ** (log2(a) + (log2(b) - log2(a)) * low / (low - high)))
    return None


def _rounded(tokens: float) -> str:
    return f"{float(f'{tokens:.2g}'):,.0f}"
