"""Two timelines on one axis, rank by rank: what was predicted above what happened."""

from dataclasses import dataclass

from matplotlib.axes import Axes

from course_pp.arguments import checked
from course_pp.schedule import Timeline, format_time
from course_pp.show import chart, rows
from course_pp.show.chart import WIDTH, ChartFigure
from course_pp.show.timelines import spelled_peaks
from course_pp.show.wording import amount, counted, listed, named, percent

_FILL = 0.4
_OFFSET = 0.21
_NAME_GAP, _NAME_SIZE = 4, 8.0


@dataclass(frozen=True)
class _Pair:
    """The two timelines, and the factors that bring both to the unit of the axis."""

    predicted: Timeline
    measured: Timeline
    names: tuple[str, str]
    predicted_scale: float
    measured_scale: float
    seconds_per_unit: float

    @property
    def ends(self) -> tuple[float, float]:
        """Both makespans in the unit of the axis."""
        return (
            float(self.predicted.makespan) * self.predicted_scale,
            float(self.measured.makespan) * self.measured_scale,
        )

    @property
    def end_labels(self) -> tuple[str, str]:
        """Name and makespan of each, both in the unit of the measured one."""
        before, after = float(self.predicted.makespan) * self.seconds_per_unit, self.measured.makespan
        unit = self.measured.unit
        first, second = (format_time(each if unit else float(amount(each)), unit) for each in (before, after))
        return f"{self.names[0]} {first}", f"{self.names[1]} {second}"

    def lateness(self, rank: int) -> float:
        """Return how much later the rank finishes than predicted, in the unit of the axis."""
        before, after = (
            row[rank][-1].end if row[rank] else 0 for row in (self.predicted.by_rank, self.measured.by_rank)
        )
        return float(after) * self.measured_scale - float(before) * self.predicted_scale


@checked
def compare(
    predicted: Timeline,
    measured: Timeline,
    names: tuple[str, str] | None = None,
    seconds_per_unit: float | None = None,
    title: str | None = None,
) -> ChartFigure:
    """Draw two timelines on one time axis: each rank has a row of ``predicted`` above one of ``measured``.

    Dashed and solid lines mark where each ends; the right margin has how much later (+) or earlier (−) each rank
    finishes than in the first.

    Args:
        names: what to call them, for example two schedules; "predicted", and "measured" or "simulated", unless given.
        seconds_per_unit: how long one unit of cost takes, where ``predicted`` has relative costs and ``measured``
            seconds. Unless given, it is chosen so that the ranks are busy equally long in both, and the figure shows
            the difference in waiting alone.
        title: instead of the finding.

    Raises:
        ValueError: for different numbers of ranks, for measured seconds as a prediction of relative costs, and when
            there is no work from which to choose ``seconds_per_unit``.
    """
    names = ("predicted", measured.how) if names is None else names
    if predicted.n_ranks != measured.n_ranks:
        raise ValueError(
            f"{names[0]} has {predicted.n_ranks} ranks and {names[1]} {measured.n_ranks}: "
            "give two timelines with the same number of ranks"
        )
    scale, unit = rows.axis_unit(max(predicted, measured, key=lambda tl: tl.makespan if tl.unit else 0))
    rate = _seconds_per_unit(predicted, measured, seconds_per_unit)
    pair = _Pair(predicted, measured, names, scale * rate, scale, rate)

    n_ranks = measured.n_ranks
    row_inches = min(0.62, max(0.17, 5.0 / n_ranks))
    figure = ChartFigure(WIDTH, 1.35 + row_inches * n_ranks)
    right = max(0.95, 0.15 + max(chart.text_width(label, 8.5) for label in pair.end_labels) / 72)
    left = min(WIDTH / 2, max(1.35, (_names_end(names) + chart.text_width(f"rank {n_ranks}", 9) + 4) / 72))
    axes = figure.axes_with_margins(left=left, right=right, bottom=0.68, top=0.67)
    axes.set_xlim(0, max(pair.ends) or 1)
    axes.set_ylim(n_ranks - 0.5, -0.5)
    _draw_rows(axes, pair)
    _mark_ends(axes, pair)
    rows.name_time(axes, unit if rate == 1 else f"{unit}; one unit of cost is {format_time(rate, 's')}")
    finding = _finding(pair)
    axes.set_title(finding if title is None else title, loc="left", fontsize=11.5, pad=22, x=-0.6 / 7.2)
    figure.alt_text = _alt_text(pair, finding, unit)
    return figure


def _seconds_per_unit(predicted: Timeline, measured: Timeline, given: float | None) -> float:
    if predicted.unit == measured.unit:
        if given is not None:
            raise ValueError(f"seconds_per_unit is {given}, but both timelines have the same unit: leave it out")
        return 1.0
    if measured.unit != "s":
        raise ValueError("the first timeline is in seconds, the second in relative costs: give the measured one second")
    if given is not None:
        if not 0 < given < float("inf"):
            raise ValueError(f"seconds_per_unit is {given}: give a finite number above 0")
        return given
    work = float(sum(predicted.busy))
    if not work or not sum(measured.busy):
        raise ValueError("one of the timelines has no work, so their units cannot be matched: give seconds_per_unit")
    return float(sum(measured.busy)) / work


def _names_end(names: tuple[str, str]) -> float:
    """Return how many points left of the axes there is room for the rank beside the two names."""
    return _NAME_GAP + max(chart.text_width(name, _NAME_SIZE) for name in names) + 6


def _draw_rows(axes: Axes, pair: _Pair) -> None:
    n_ranks, kinds = pair.measured.n_ranks, set()
    sides = (
        (pair.predicted, pair.names[0], pair.predicted_scale, -_OFFSET, pair.ends[0]),
        (pair.measured, pair.names[1], pair.measured_scale, _OFFSET, pair.ends[1]),
    )
    with_stage = any(map(rows.has_several_stages_a_rank, (pair.predicted, pair.measured)))
    ranks = rows.name_ranks(axes, n_ranks, gap=_names_end(pair.names))
    points_y = chart.points_per_unit(axes)[1]
    for tl, name, scale, offset, end in sides:
        rows.draw_idle(axes, n_ranks, end, offset, _FILL)
        boxes = rows.boxes_of(tl, scale, offset, _FILL)
        rows.draw_boxes(axes, boxes)
        rows.label_boxes(axes, boxes, with_stage)
        kinds |= {box.action.kind for box in boxes}
        for rank in ranks:
            size = min(_NAME_SIZE, 0.5 * ranks.step * points_y)
            place = rank + offset * ranks.step
            axes.annotate(
                name, (0, place), xytext=(-_NAME_GAP, 0), textcoords="offset points", ha="right", va="center",
                size=size, color=chart.TEXT_GREY,
            )  # fmt: skip
    rows.note_ranks(axes, {rank: f"ends {_signed(pair.lateness(rank))}" for rank in ranks})
    rows.draw_key(axes, kinds, has_idle=any(tl.bubble_fraction > 0 for tl, *_ in sides))


def _mark_ends(axes: Axes, pair: _Pair) -> None:
    """A labelled line at each makespan; the labels point away from each other."""
    ends, styles = pair.ends, ((0, (4, 2)), "-")
    for end, label, style, is_earlier in zip(
        ends, pair.end_labels, styles, (ends[0] <= ends[1], ends[0] > ends[1]), strict=True
    ):
        # Below the boxes, or it would run through their labels.
        axes.axvline(end, color="black", linestyle=style, linewidth=1.3, clip_on=False, zorder=0.5)
        axes.annotate(
            label,
            (end, 1),
            xycoords=("data", "axes fraction"),
            xytext=(-3 if is_earlier else 3, 4),
            textcoords="offset points",
            ha="right" if is_earlier else "left",
            size=8.5,
        )


def _signed(amount: float) -> str:
    rounded = f"{abs(amount):.3g}"
    return "±0" if rounded == "0" or abs(amount) < 5e-10 else f"{'+' if amount > 0 else '−'}{rounded}"


def _finding(pair: _Pair) -> str:
    before, after = pair.ends
    change = after / before - 1 if before else 0.0
    if abs(change) < 5e-4:
        what = "as long as"
    elif change >= 1:
        what = f"{after / before:.3g} times as long as"
    else:
        what = f"{percent(abs(change))} {'longer' if change > 0 else 'shorter'} than"
    subject = pair.names[1][:1].upper() + pair.names[1][1:]
    bubble, other = percent(pair.measured.bubble_fraction), percent(pair.predicted.bubble_fraction)
    bubbles = f"{bubble} for both" if bubble == other else f"{bubble} instead of {other}"
    return f"{subject} is {what} {pair.names[0]}: bubble {bubbles}"


def _alt_text(pair: _Pair, finding: str, unit: str) -> str:
    late = [pair.lateness(rank) for rank in range(pair.measured.n_ranks)]
    worst = max(range(len(late)), key=lambda rank: abs(late[rank]))
    suffix = "" if unit == "relative cost" else f" {unit}"
    where = (
        "Every rank finishes at the same time in both"
        if _signed(late[worst]) == "±0"
        else f"The end of rank {worst} differs most, by {_signed(late[worst])}{suffix}"
    )
    both = (pair.predicted, pair.measured)
    numbers = listed(list(dict.fromkeys(str(tl.n_microbatches) for tl in both)))
    sizes = f"{counted(len(late), 'rank')}, {numbers} microbatch{'' if numbers == '1' else 'es'}"
    schedules = listed(list(dict.fromkeys(tl.name for tl in both if tl.name)))
    ends = " and ".join(pair.end_labels)
    what = named(schedules, f"Two timelines of {sizes} on one axis, {ends} long")
    peaks = "; ".join(f"{name} {spelled_peaks(tl.peak_activations)}" for name, tl in zip(pair.names, both, strict=True))
    values = "; ".join(f"{name} {spelled_peaks(tl.peak_values)}" for name, tl in zip(pair.names, both, strict=True))
    of_edges = f" Values of edges held: {values}." if any(any(tl.peak_values) for tl in both) else ""
    return f"{what}. {finding}. {where}. Peak activations held: {peaks}.{of_edges}"
