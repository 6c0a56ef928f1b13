"""Two timelines on one axis, rank by rank: the predicted one above the measured one."""

from dataclasses import dataclass

from matplotlib.axes import Axes

from course_pp.base.arguments import checked
from course_pp.schedule import Timeline, format_time
from course_pp.show import chart, timelines
from course_pp.show.chart import WIDTH, ChartFigure
from course_pp.show.wording import (
    amount,
    axis_unit,
    counted,
    has_several_stages_a_rank,
    listed,
    named,
    percent,
    spelled_peaks,
)

# The height of each bar, and the distance of its middle from the row's, in rows.
_FILL = 0.4
_OFFSET = 0.21
# Points: from a name to the axes, and the size of its letters.
_NAME_GAP = 4
_NAME_SIZE = 8.0


@dataclass(frozen=True)
class _Side:
    """One of the two timelines, with the factor that brings it to the unit of the axis."""

    tl: Timeline
    name: str
    scale: float

    @property
    def end(self) -> float:
        return float(self.tl.makespan) * self.scale

    def end_of(self, rank: int) -> float:
        row = self.tl.by_rank[rank]
        return float(row[-1].end) * self.scale if row else 0.0


@checked
def compare(
    predicted: Timeline,
    measured: Timeline,
    names: tuple[str, str] | None = None,
    title: str | None = None,
) -> ChartFigure:
    """Draw two timelines on one time axis, rank by rank: ``predicted`` above ``measured``.

    Dashed and solid lines mark where each ends; the right margin has how much later (+) or earlier
    (−) each rank finishes than in the first.

    Args:
        predicted: the first timeline. If it has relative costs and ``measured`` seconds, one unit
            lasts so long that ranks are busy equally long in both: the figure shows the difference
            in waiting alone.
        names: two names, for example of two schedules; "predicted", and "measured" or "simulated",
            unless given.
    """
    names = names or ("predicted", measured.how)
    n_ranks = measured.n_ranks
    if predicted.n_ranks != n_ranks:
        raise ValueError(
            f"{names[0]} has {predicted.n_ranks} ranks and {names[1]} {n_ranks}: "
            "give two timelines with the same number of ranks"
        )
    longest = max(tl.makespan if tl.unit else 0 for tl in (predicted, measured))
    scale, unit = axis_unit(longest, measured.unit)
    rate = _seconds_per_unit(predicted, measured)
    sides = (_Side(predicted, names[0], scale * rate), _Side(measured, names[1], scale))
    labels = []
    for name, end in zip(names, (float(predicted.makespan) * rate, measured.makespan), strict=True):
        # Relative costs have four digits; a number of seconds gets a suitable unit.
        told = end if measured.unit else float(amount(end))
        labels.append(f"{name} {format_time(told, measured.unit)}")

    # The ranks stand left of the two names.
    names_end = _NAME_GAP + max(chart.text_width(name, _NAME_SIZE) for name in names) + 6
    ranks_end = names_end + chart.text_width(f"rank {n_ranks}", 9) + 4
    left = min(WIDTH / 2, max(1.35, ranks_end / 72))
    right = max(0.95, 0.15 + max(chart.text_width(label, 8.5) for label in labels) / 72)
    row_inches = min(0.62, max(0.17, 5.0 / n_ranks))
    figure = ChartFigure(WIDTH, 1.35 + row_inches * n_ranks)
    axes = figure.axes_with_margins(left=left, right=right, bottom=0.68, top=0.67)
    axes.set_xlim(0, max(side.end for side in sides) or 1)
    axes.set_ylim(n_ranks - 0.5, -0.5)
    late = [sides[1].end_of(rank) - sides[0].end_of(rank) for rank in range(n_ranks)]
    ranks = timelines.name_ranks(axes, n_ranks, gap=names_end)
    kinds = _draw_rows(axes, sides, ranks)
    timelines.note_ranks(axes, {rank: f"ends {_signed(late[rank])}" for rank in ranks})
    timelines.draw_key(axes, kinds, has_idle=any(side.tl.bubble_fraction > 0 for side in sides))
    _mark_ends(axes, sides, labels)
    with_rate = unit
    if rate != 1:
        with_rate += f"; one unit of cost is {format_time(rate, 's')}"
    timelines.name_time(axes, with_rate)
    finding = _finding(sides)
    alt_text = _alt_text(sides, labels, finding, late=late, unit=unit)
    return figure.finish(axes, title, finding, alt_text, pad=22, x=-0.6 / 7.2)


def _seconds_per_unit(predicted: Timeline, measured: Timeline) -> float:
    if predicted.unit == measured.unit:
        return 1.0
    if measured.unit != "s":
        raise ValueError(
            "the first timeline is in seconds, the second in relative costs: give the measured one"
            " second"
        )
    if not sum(predicted.busy) or not sum(measured.busy):
        raise ValueError("one of the timelines has no work, so their units cannot be matched")
    return float(sum(measured.busy)) / float(sum(predicted.busy))


def _draw_rows(axes: Axes, sides: tuple[_Side, _Side], ranks: range) -> set[str]:
    """Draw both timelines, their names beside each rank; return the kinds of actions drawn."""
    kinds: set[str] = set()
    with_stage = any(has_several_stages_a_rank(side.tl) for side in sides)
    points_y = chart.points_per_unit(axes)[1]
    size = min(_NAME_SIZE, 0.5 * ranks.step * points_y)
    for side, offset in zip(sides, (-_OFFSET, _OFFSET), strict=True):
        timelines.draw_idle(axes, side.tl.n_ranks, side.end, offset, fill=_FILL)
        boxes = timelines.boxes_of(side.tl, side.scale, offset, fill=_FILL)
        timelines.draw_boxes(axes, boxes)
        timelines.label_boxes(axes, boxes, with_stage)
        kinds |= {box.action.kind for box in boxes}
        for rank in ranks:
            axes.annotate(
                side.name,
                (0, rank + offset * ranks.step),
                xytext=(-_NAME_GAP, 0),
                textcoords="offset points",
                ha="right",
                va="center",
                size=size,
                color=chart.TEXT_GREY,
            )
    return kinds


def _mark_ends(axes: Axes, sides: tuple[_Side, _Side], labels: list[str]) -> None:
    """Draw a labelled line at each makespan; the labels point away from each other."""
    is_first_earlier = sides[0].end <= sides[1].end
    looks = ((0, (4, 2)), is_first_earlier), ("-", not is_first_earlier)
    for side, label, (style, is_earlier) in zip(sides, labels, looks, strict=True):
        # Below the boxes, or it would run through their labels.
        axes.axvline(
            side.end, color="black", linestyle=style, linewidth=1.3, clip_on=False, zorder=0.5
        )
        axes.annotate(
            label,
            (side.end, 1),
            xycoords=("data", "axes fraction"),
            xytext=(-3 if is_earlier else 3, 4),
            textcoords="offset points",
            ha="right" if is_earlier else "left",
            size=8.5,
        )


def _signed(amount: float) -> str:
    rounded = f"{abs(amount):.3g}"
    if rounded == "0" or abs(amount) < 5e-10:
        return "±0"
    sign = "+" if amount > 0 else "−"
    return sign + rounded


def _finding(sides: tuple[_Side, _Side]) -> str:
    before, after = (side.end for side in sides)
    change = after / before - 1 if before else 0.0
    if abs(change) < 5e-4:
        what = "as long as"
    elif change >= 1:
        what = f"{after / before:.3g} times as long as"
    else:
        what = f"{percent(abs(change))} {'longer' if change > 0 else 'shorter'} than"
    name = sides[1].name
    subject = name[:1].upper() + name[1:]
    other, bubble = (percent(side.tl.bubble_fraction) for side in sides)
    bubbles = f"{bubble} for both" if bubble == other else f"{bubble} instead of {other}"
    return f"{subject} is {what} {sides[0].name}: bubble {bubbles}"


def _alt_text(
    sides: tuple[_Side, _Side], labels: list[str], finding: str, late: list[float], unit: str
) -> str:
    worst = max(range(len(late)), key=lambda rank: abs(late[rank]))
    difference = _signed(late[worst])
    if difference == "±0":
        where = "Every rank finishes at the same time in both"
    else:
        where = f"The end of rank {worst} differs most, by {difference}"
        if unit != "relative cost":
            where += f" {unit}"

    numbers = listed(dict.fromkeys(side.tl.n_microbatches for side in sides))
    microbatches = "microbatch" if numbers == "1" else "microbatches"
    sizes = f"{counted(len(late), 'rank')}, {numbers} {microbatches}"
    schedules = listed(dict.fromkeys(side.tl.name for side in sides if side.tl.name))
    what = named(schedules, f"Two timelines of {sizes} on one axis, {' and '.join(labels)} long")
    peaks = "; ".join(f"{side.name} {spelled_peaks(side.tl.peak_activations)}" for side in sides)
    told = f"{what}. {finding}. {where}. Peak activations held: {peaks}."
    if any(any(side.tl.peak_values) for side in sides):
        values = "; ".join(f"{side.name} {spelled_peaks(side.tl.peak_values)}" for side in sides)
        told += f" Values of edges held: {values}."
    return told
