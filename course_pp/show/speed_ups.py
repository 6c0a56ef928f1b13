"""Speed-up against the number of ranks, for one model and one batch: where near-linear ends."""

from collections.abc import Mapping, Sequence
from math import log2
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator
from matplotlib.transforms import ScaledTranslation

from course_pp.arguments import checked
from course_pp.schedule import Costs, Schedule, Timeline, build, find, simulate
from course_pp.show import chart
from course_pp.show.chart import WIDTH, ChartFigure
from course_pp.show.curves import (
    _DASHES,
    _LABEL,
    _apart,
    _as_names,
    _colour,
    _marker,
    _refuse_unknown,
    _share,
)
from course_pp.show.wording import counted, listed

_NEAR_LINEAR = 0.8
_HEIGHT, _BOTTOM, _TOP = 4.4, 0.6, 0.47


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
    """Draw how many times as fast as one rank each schedule is, on more and more ranks, with one model and one batch.

    Lines are simulated, filled points are measured. Where a schedule does not allow a number of ranks, it has no point.

    Args:
        schedules: names as for :func:`course_pp.schedule.build`, or one of them.
        ranks: numbers of ranks; the model is cut into as many stages, times the chunks.
        n_microbatches: m, however many ranks there are.
        n_chunks: stages a rank, for the schedules that allow another number; their own unless given.
        costs: of all layers of the model, one number each; a stage gets its share. Messages cost what they cost.
        measured: steps under ``schedules``, by their names; of those that a busy machine simulated there is no point.
        title: instead of the finding.

    Raises:
        ValueError: for no schedule or number, an unknown schedule, numbers below 1, a measured schedule that is not
            among ``schedules``, and for costs with a value for each stage.
    """
    schedules = _as_names(schedules)
    if not schedules or not ranks:
        raise ValueError("schedules or ranks is empty: give at least one schedule and one number of ranks")
    if min(ranks) < 1:
        raise ValueError(f"ranks has {min(ranks)}: give numbers of at least 1")
    if n_chunks is not None and n_chunks < 1:
        raise ValueError(f"n_chunks is {n_chunks}: give at least 1, or leave it out")
    _refuse_unknown(schedules)
    ran = _ran(measured, schedules)
    ranks, costs = sorted(set(ranks)), Costs() if costs is None else costs
    simulated = {name: _simulated(name, ranks, n_microbatches, n_chunks, costs) for name in schedules}
    figure = ChartFigure(WIDTH, _HEIGHT)
    longest = max(chart.text_width(name, _LABEL) for name in schedules) / 72
    axes = figure.axes_with_margins(left=0.75, right=longest + 0.4, bottom=_BOTTOM, top=_TOP)
    _span(axes, ranks)
    for i, (name, points) in enumerate(simulated.items()):
        axes.plot(list(points), list(points.values()), color=_colour(i), linestyle=_DASHES[i % len(_DASHES)], lw=1.6)
        seen = ran.get(name, {})
        axes.plot(list(seen), list(seen.values()), **(_marker(i) | {"markerfacecolor": _colour(i)}), zorder=3)
    _name_ends(figure, axes, {name: points[max(points)] for name, points in simulated.items()})
    finding = _finding(simulated, n_microbatches)
    axes.set_title(finding if title is None else title, loc="left", fontsize=11.5, pad=9)
    figure.alt_text = _alt_text(simulated, ran, finding)
    return figure


def _ran(timelines: Sequence[Timeline], schedules: Sequence[str]) -> dict[str, dict[int, float]]:
    """Return by schedule and number of ranks how much work was done at once."""
    points: dict[str, dict[int, float]] = {}
    for tl in timelines:
        if tl.measured and tl.name not in schedules:
            raise ValueError(f"measured has {tl.name!r}, which is not drawn: name it in schedules, or leave it out")
        if tl.measured:
            points.setdefault(tl.name, {})[tl.n_ranks] = float(tl.n_ranks * tl.utilisation)
    return points


def _simulated(name: str, ranks: Sequence[int], m: int, n_chunks: int | None, costs: Costs) -> dict[int, float]:
    alone = float(m * sum(_time(costs, kind) for kind in ("forward", "input_grad", "weight_grad", "recompute")))
    points, refusal = {}, None
    for p in ranks:
        try:
            schedule = _build(name, p, m, n_chunks)
        except ValueError as problem:
            refusal = problem
            continue
        # Schedules with a stage on two ranks have as many stages as ranks; others have v times as many.
        points[p] = alone / float(simulate(schedule, _share(costs, schedule.n_stages)).makespan)
    if not points:
        raise ValueError(f"{name} allows none of the numbers in ranks, {list(ranks)}: {refusal}") from refusal
    return points


def _time(costs: Costs, name: str) -> Any:
    value = getattr(costs, name)
    if isinstance(value, tuple):
        raise ValueError(
            f"{name} has a value for each stage, but the model is cut anew for each number: give one number"
        )
    return value


def _build(name: str, p: int, m: int, n_chunks: int | None) -> Schedule:
    entry = find(name)
    return build(name, p, m, n_chunks if entry.any_chunks and entry.n_chunks > 1 else None)


def _span(axes: Axes, ranks: Sequence[int]) -> None:
    most = max(ranks)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlim(min(ranks) * 0.93, most * 1.07 if most > min(ranks) else 2 * most)
    axes.set_ylim(0.8, max(2, most) * 1.2)
    ends = list(axes.get_xlim())
    axes.plot(ends, ends, color=chart.TEXT_GREY, lw=1.0, zorder=1)
    axes.fill_between(ends, [_NEAR_LINEAR * p for p in ends], ends, color=chart.IDLE_GREY, zorder=0, lw=0)
    ticks = [2**k for k in range(int(log2(max(2, most))) + 1)]
    axes.set_xticks(list(ranks), [str(p) for p in ranks])
    axes.set_yticks(ticks, [str(tick) for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(
        "ranks (lines: simulated, filled points: measured; grey: linear, down to 80 % of it)", loc="left", fontsize=9
    )
    axes.set_ylabel("times as fast as one rank", fontsize=9)
    axes.tick_params(labelsize=8.5)
    axes.spines[["top", "right"]].set_visible(False)


def _name_ends(figure: ChartFigure, axes: Axes, ends: dict[str, float]) -> None:
    """Write the names right of the axes with their markers, each at its line's end, moved apart where ends meet."""
    low, high = (log2(limit) for limit in axes.get_ylim())
    inches = _HEIGHT - _BOTTOM - _TOP
    beside = axes.get_yaxis_transform() + ScaledTranslation(9 / 72, 0, figure.dpi_scale_trans)
    order = sorted(range(len(ends)), key=lambda i: (list(ends.values())[i], -i))
    places = _apart([log2(list(ends.values())[i]) for i in order], 1.3 * _LABEL / 72 / inches * (high - low))
    for i, place in zip(order, places, strict=True):
        axes.plot([1], [2**place], transform=beside, clip_on=False, **_marker(i))
        axes.annotate(
            list(ends)[i],
            (1, 2**place),
            xycoords=("axes fraction", "data"),
            xytext=(17, 0),
            textcoords="offset points",
            size=_LABEL,
            va="center_baseline",
        )


def _near_linear(points: dict[int, float]) -> int:
    """Return the most ranks up to which every number drawn keeps 80 % of linear; 1 if not even the first does."""
    most = 1
    for p, value in points.items():
        if value < _NEAR_LINEAR * p:
            break
        most = p
    return most


def _finding(simulated: dict[str, dict[int, float]], m: int) -> str:
    ends: dict[int, list[str]] = {}
    for name, points in simulated.items():
        ends.setdefault(_near_linear(points), []).append(name)
    near = ", ".join(f"{p} ({listed(ends[p])})" for p in sorted(ends, reverse=True))
    return f"{counted(m, 'microbatch', 'microbatches')}: near linear up to {near} ranks"


def _alt_text(simulated: dict[str, dict[int, float]], ran: Mapping[str, Mapping[int, float]], finding: str) -> str:
    lines = []
    for name, points in simulated.items():
        lines.append(f"{name} " + ", ".join(f"{value:.3g} on {p}" for p, value in points.items()))
        if seen := ran.get(name):
            lines[-1] += "; measured " + ", ".join(f"{value:.3g} on {p}" for p, value in seen.items())
    return f"How many times as fast as one rank, against the number of ranks. {finding}. {'. '.join(lines)}."
