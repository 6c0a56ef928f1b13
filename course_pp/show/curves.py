"""Schedules against each other: bubble over the number of microbatches, and bubble over peak memory.

Costs are those of all layers of a rank: a schedule that cuts them into v chunks gets a v-th of each for a chunk, so
that every schedule does the same work and keeps the same bytes for a microbatch that passes a whole rank.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import nan
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator
from matplotlib.transforms import ScaledTranslation

from course_pp.arguments import checked
from course_pp.schedule import Costs, Schedule, Timeline, build, find, names, simulate, theory
from course_pp.show import chart
from course_pp.show.chart import WIDTH, ChartFigure
from course_pp.show.wording import amount, counted, listed, percent

_TIMES = ("forward", "input_grad", "weight_grad", "recompute", "update", "overlapped")
_AMOUNTS = ("activation", "released_by_input_grad", "weights")
_COLOURS = (chart.BLUE, chart.VERMILION, chart.GREEN, chart.PURPLE, chart.ORANGE, chart.SKY_BLUE, chart.BLACK)
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


@checked
def bubble_curve(
    schedules: str | Sequence[str] = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1"),
    n_ranks: int = 4,
    microbatches: Sequence[int] = (1, 2, 4, 8, 16, 32, 64),
    costs: Costs | None = None,
    within_span: bool = False,
    title: str | None = None,
) -> ChartFigure:
    """Draw the bubble against the number of microbatches: simulated points on the lines of the closed forms.

    A schedule that does not allow a number of microbatches has no point there; where its closed form does not hold, it
    has no line.

    Args:
        schedules: names as for :func:`course_pp.schedule.build`, or one of them.
        costs: of all layers of a rank, one number each; a chunk gets its share.
        within_span: draw ``span_bubble_fraction``, the bubble as the zero-bubble papers count it.

    Raises:
        ValueError: for no schedule or number, an unknown schedule, one that allows none of the numbers, and for costs
            with a value for each stage.
    """
    schedules = _as_names(schedules)
    if not schedules or not microbatches:
        raise ValueError(
            "schedules or microbatches is empty: give at least one schedule and one number of microbatches"
        )
    if min(microbatches) < 1:
        raise ValueError(f"a curve from {min(microbatches)} microbatches: give numbers of at least 1")
    _refuse_unknown(schedules)
    costs = Costs() if costs is None else costs
    simulated = {name: dict(_simulated(name, n_ranks, microbatches, costs, within_span)) for name in schedules}
    for name, points in simulated.items():
        if not points:
            build(name, n_ranks, max(microbatches))  # says which numbers work
            raise ValueError(f"{name} allows none of {listed([str(m) for m in microbatches])} microbatches")
    figure = ChartFigure(WIDTH, 4.2)
    longest = max(chart.text_width(name, _LABEL) for name in schedules) / 72
    axes = figure.axes_with_margins(left=0.75, right=longest + 0.4, bottom=0.6, top=0.47)
    lowest, highest = min(microbatches), max(microbatches)
    axes.set_xscale("log", base=2)
    axes.set_xlim(lowest * 0.93, highest * 1.07 if highest > lowest else 2 * lowest)
    _span_bubbles(axes, [value for points in simulated.values() for value in points.values()])
    for i, (name, points) in enumerate(simulated.items()):
        shared = _share(costs, _chunks(build(name, n_ranks, max(points))))
        line = dict(_predicted(name, n_ranks, range(lowest, highest + 1), shared, within_span))
        dash = _DASHES[i % len(_DASHES)]
        axes.plot(list(line), list(line.values()), color=_colour(i), linestyle=dash, linewidth=1.6)
        axes.plot(list(points), list(points.values()), **_marker(i))
    _name_ends(figure, axes, {name: points[max(points)] for name, points in simulated.items()})
    axes.set_xticks(sorted(set(microbatches)), [str(m) for m in sorted(set(microbatches))])
    axes.xaxis.set_minor_locator(NullLocator())
    _describe(axes, "microbatches m (points: simulated, lines: closed forms)", within_span)
    finding = _curve_finding(simulated, n_ranks)
    axes.set_title(finding if title is None else title, loc="left", fontsize=11.5, pad=9)
    figure.alt_text = _curve_alt_text(simulated, finding, within_span)
    return figure


def _refuse_unknown(schedules: Sequence[str]) -> None:
    for name in schedules:
        try:
            find(name)
        except ValueError as problem:
            raise ValueError(f"schedules: {problem}") from None


def _as_names(schedules: str | Sequence[str]) -> tuple[str, ...]:
    return (schedules,) if isinstance(schedules, str) else tuple(schedules)


def _share(costs: Costs, n_chunks: int) -> Costs:
    """Return the costs of one of ``n_chunks`` equal parts of what a rank holds."""
    shares = {}
    for name in (*_TIMES, *_AMOUNTS):
        value = getattr(costs, name)
        if isinstance(value, tuple):
            raise ValueError(
                f"{name} has a value for each stage, but schedules differ in their number of stages: give one number"
            )
        if value is not None and n_chunks > 1:
            shares[name] = value / n_chunks
    return replace(costs, **shares)


def _run(schedule: Schedule, costs: Costs) -> tuple[Timeline, Costs]:
    shared = _share(costs, _chunks(schedule))
    return simulate(schedule, shared), shared


def _chunks(schedule: Schedule) -> int:
    return max(1, schedule.n_stages // schedule.n_ranks)


def _bubble(of: Timeline | theory.Prediction, within_span: bool) -> float:
    return float(of.span_bubble_fraction if within_span else of.bubble_fraction)


def _simulated(
    name: str, n_ranks: int, microbatches: Iterable[int], costs: Costs, within_span: bool
) -> Iterator[tuple[int, float]]:
    for m in sorted(set(microbatches)):
        try:
            schedule = build(name, n_ranks, m)
        except ValueError:
            continue
        yield m, _bubble(_run(schedule, costs)[0], within_span)


def _predicted(
    name: str, n_ranks: int, microbatches: Iterable[int], costs: Costs, within_span: bool
) -> Iterator[tuple[int, float]]:
    for m in microbatches:
        try:
            yield m, _bubble(theory.predict(name, n_ranks, m, costs), within_span)
        except theory.NoClosedForm:
            yield m, nan  # interrupts the line
        except ValueError:
            continue


def _colour(i: int) -> str:
    return _COLOURS[i % len(_COLOURS)]


def _marker(i: int) -> dict[str, Any]:
    # Two curves in one place stay visible: of two neighbours one marker is smaller.
    size = 7.5 - 1.5 * (i % 2)
    marker = _MARKERS[i % len(_MARKERS)]
    return {"color": _colour(i), "marker": marker, "markersize": size, "markerfacecolor": "white", "linestyle": ""}


def _span_bubbles(axes: Axes, bubbles: Sequence[float]) -> None:
    """Limits with room for a marker at 0 and at the largest."""
    largest = max([*bubbles, 0.01])
    axes.set_ylim(-0.03 * largest, 1.07 * largest)


def _name_ends(figure: ChartFigure, axes: Axes, ends: dict[str, float]) -> None:
    """Write the names right of the axes with their markers, each at its curve's end, moved apart where ends meet."""
    _, points_y = chart.points_per_unit(axes)
    beside = axes.get_yaxis_transform() + ScaledTranslation(9 / 72, 0, figure.dpi_scale_trans)
    order = sorted(range(len(ends)), key=lambda i: (list(ends.values())[i], -i))
    places = _apart([list(ends.values())[i] for i in order], 1.3 * _LABEL / points_y)
    for i, place in zip(order, places, strict=True):
        axes.plot([1], [place], transform=beside, clip_on=False, **_marker(i))
        axes.annotate(
            list(ends)[i],
            (1, place),
            xycoords=("axes fraction", "data"),
            xytext=(17, 0),
            textcoords="offset points",
            size=_LABEL,
            va="center_baseline",
        )


def _apart(values: Sequence[float], least: float) -> list[float]:
    """Ascending ``values`` moved as little as needed to be ``least`` apart."""
    groups: list[tuple[float, int]] = []  # middle and number of labels that touch
    for value in values:
        middle, number = value, 1
        while groups and middle - number * least / 2 < groups[-1][0] + groups[-1][1] * least / 2:
            other, others = groups.pop()
            middle, number = (middle * number + other * others) / (number + others), number + others
        groups.append((middle, number))
    return [middle + least * (i - (number - 1) / 2) for middle, number in groups for i in range(number)]


def _describe(axes: Axes, x: str, within_span: bool) -> None:
    axes.set_xlabel(x, loc="left", fontsize=9)
    axes.set_ylabel("bubble, of the longest span" if within_span else "bubble, of all rank time", fontsize=9)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
    axes.tick_params(labelsize=8.5)
    axes.grid(color=chart.IDLE_GREY, linewidth=0.8, zorder=0)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _curve_finding(simulated: dict[str, dict[int, float]], n_ranks: int) -> str:
    most = max(m for points in simulated.values() for m in points)
    at_most = {name: points[most] for name, points in simulated.items() if most in points}
    best, worst = min(at_most, key=at_most.__getitem__), max(at_most, key=at_most.__getitem__)
    sizes = f"{counted(n_ranks, 'rank')}, {counted(most, 'microbatch', 'microbatches')}"
    if best == worst:
        return f"{sizes}: {best} has a bubble of {percent(at_most[best])}"
    return f"{sizes}: bubble from {percent(at_most[best])} ({best}) to {percent(at_most[worst])} ({worst})"


def _curve_alt_text(simulated: dict[str, dict[int, float]], finding: str, within_span: bool) -> str:
    curves = "; ".join(
        f"{name} " + ", ".join(f"{percent(value)} at {m}" for m, value in points.items())
        for name, points in simulated.items()
    )
    what = "the longest span" if within_span else "all rank time"
    return f"Bubble as a share of {what} against the number of microbatches. {finding}. {curves}."


@dataclass(frozen=True)
class _Point:
    """What a schedule, or several that come out alike, cost."""

    names: tuple[str, ...]
    memory: float
    bubble: float

    @property
    def label(self) -> str:
        return listed([f"{name} (asynchronous)" if name == _ASYNCHRONOUS else name for name in self.names])

    def beats(self, other: "_Point") -> bool:
        """Return whether it is as good in both and better in one."""
        return (
            self.memory <= other.memory
            and self.bubble <= other.bubble
            and (self.memory, self.bubble) != (other.memory, other.bubble)
        )


@checked
def pareto(
    n_ranks: int = 4,
    n_microbatches: int = 8,
    costs: Costs | None = None,
    schedules: str | Sequence[str] | None = None,
    within_span: bool = False,
    title: str | None = None,
) -> ChartFigure:
    """Draw the bubble of schedules against the peak memory of their fullest rank; a line joins those none other beats.

    ``pipedream`` is drawn hollow and left out of the line: it computes another step, with older weights.

    Args:
        costs: of all layers of a rank, one number each; a chunk gets its share. Unless given, memory counts activations
            of one microbatch in all layers of a rank.
        schedules: all unless given; those that do not allow these sizes are named under the axis.
        within_span: draw ``span_bubble_fraction``, the bubble as the zero-bubble papers count it.

    Raises:
        ValueError: when no schedule allows these sizes, for an unknown schedule, and for costs with a value for each
            stage.
    """
    chosen = names() if schedules is None else _as_names(schedules)
    if not chosen:
        raise ValueError("schedules is empty, so there is nothing to draw: give at least one, or leave it out for all")
    _refuse_unknown(chosen)
    of_layers = Costs() if costs is None else costs
    points, refused = _points(chosen, n_ranks, n_microbatches, of_layers, within_span)
    best = sorted((p for p in points if _is_best(p, points)), key=lambda point: point.memory)
    figure = ChartFigure(WIDTH, 4.6)
    axes = figure.axes_with_margins(left=0.75, right=0.4, bottom=0.6, top=0.47)
    axes.set_xlim(0, 1.12 * max(point.memory for point in points) or 1)
    _span_bubbles(axes, [point.bubble for point in points])
    steps = [(point.memory, point.bubble) for point in best]
    axes.plot(*zip(*steps, strict=True), color=chart.TEXT_GREY, linewidth=1.0, drawstyle="steps-post", zorder=1)
    for group, look in _LOOKS.items():
        if mine := [point for point in points if _group(point, best) == group]:
            x, y = [point.memory for point in mine], [point.bubble for point in mine]
            axes.plot(x, y, linestyle="", markersize=7, clip_on=False, label=group, **look)
    axes.legend(loc="upper right", fontsize=8.5, frameon=False)
    _label_points(axes, points, best)
    what = "activations of one microbatch in all layers of a rank" if costs is None else "unit of the costs"
    note = f"; not possible with these sizes: {', '.join(refused)}" if refused else ""
    _describe(axes, f"peak memory of the fullest rank ({what}){note}", within_span)
    finding = _pareto_finding(best, n_ranks, n_microbatches)
    axes.set_title(finding if title is None else title, loc="left", fontsize=11.5, pad=9)
    figure.alt_text = _pareto_alt_text(points, finding, refused)
    return figure


def _points(
    schedules: Sequence[str], n_ranks: int, n_microbatches: int, costs: Costs, within_span: bool
) -> tuple[list[_Point], list[str]]:
    """Return a point for each schedule that allows the sizes, alike ones joined; and the names of the others."""
    found: dict[tuple[float, float], list[str]] = {}
    refused, reason = [], None
    for name in schedules:
        try:
            schedule = build(name, n_ranks, n_microbatches)
        except ValueError as problem:
            if name not in names():
                raise
            refused.append(name)
            reason = problem
            continue
        tl, shared = _run(schedule, costs)
        place = (round(float(max(tl.peak_memory(shared))), 9), round(_bubble(tl, within_span), 9))
        found.setdefault(place, []).append(name)
    if not found:
        raise ValueError(f"no schedule to draw: {reason}")
    return [_Point(tuple(alike), *place) for place, alike in found.items()], refused


def _is_best(point: _Point, points: Iterable[_Point]) -> bool:
    if point.names == (_ASYNCHRONOUS,):
        return False
    return not any(other.beats(point) for other in points if other.names != (_ASYNCHRONOUS,))


def _group(point: _Point, best: Sequence[_Point]) -> str:
    if point.names == (_ASYNCHRONOUS,):
        return _ANOTHER_STEP
    return _UNBEATEN if point in best else _BEATEN


def _label_points(axes: Axes, points: Sequence[_Point], best: Sequence[_Point]) -> None:
    """Write each name beside its point, on the first side where it covers no point, line or other name."""
    points_x, points_y = chart.points_per_unit(axes)
    taken = [(p.memory * points_x - 4, p.bubble * points_y - 4, 8.0, 8.0) for p in points]
    for before, after in pairwise(best):
        x, y, right, low = (v * s for p in (before, after) for v, s in ((p.memory, points_x), (p.bubble, points_y)))
        taken += [(x, y - 1, right - x, 2.0), (right - 1, low, 2.0, y - low)]
    right = axes.get_xlim()[1] * points_x
    for point in sorted(points, key=lambda each: -each.bubble):
        width, height = chart.text_width(point.label, _LABEL), 1.1 * _LABEL
        x, y = point.memory * points_x, point.bubble * points_y
        sides = [(x + 7, y - height / 2), (x - 7 - width, y - height / 2)]
        sides += [(x - width / 2, y + sign * away - height / 2) for away in (13, 24, 35) for sign in (1, -1)]
        free = (box for box in ((*side, width, height) for side in sides) if _is_free(box, taken, right))
        box = next(free, (*sides[0], width, height))
        taken.append(box)
        axes.annotate(
            point.label,
            (point.memory, point.bubble),
            xytext=(box[0] - x, box[1] - y + 0.15 * height),
            textcoords="offset points",
            size=_LABEL,
        )


def _is_free(box: tuple[float, ...], taken: Sequence[tuple[float, ...]], right: float) -> bool:
    x, y, width, height = box
    if x < 2 or x + width > right + 20 or y < 2:
        return False
    return all(x + width <= a or a + w <= x or y + height <= b or b + h <= y for a, b, w, h in taken)


def _pareto_finding(best: Sequence[_Point], n_ranks: int, n_microbatches: int) -> str:
    sizes = f"{counted(n_ranks, 'rank')}, {counted(n_microbatches, 'microbatch', 'microbatches')}"
    if len(best) == 1:
        return f"{sizes}: {best[0].label} has the least bubble and the least memory"
    return f"{sizes}: from {best[0].label} to {best[-1].label}, less bubble costs memory"


def _pareto_alt_text(points: Sequence[_Point], finding: str, refused: Sequence[str]) -> str:
    each = "; ".join(f"{p.label} {percent(p.bubble)} at {amount(p.memory)}" for p in points)
    missing = f" Not possible with these sizes: {listed(list(refused))}." if refused else ""
    return f"Bubble against peak memory of the fullest rank. {finding}. {each}.{missing}"
