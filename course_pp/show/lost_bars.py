"""What a run lost, to which cause, and on which rank."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from course_pp.arguments import checked
from course_pp.schedule import Fit, Loss, format_time
from course_pp.schedule.fitting import name_of
from course_pp.show import chart, rows
from course_pp.show.chart import ChartFigure
from course_pp.show.wording import counted, named, percent

_SMALL = 8.5


@dataclass(frozen=True)
class _Look:
    colour: str
    hatch: str
    ink: str


# Neighbours differ in lightness and in hatch, so a bar reads the same without colour.
_LOOKS = {
    "straggler": _Look(chart.VERMILION, "", "black"),
    "transfer": _Look(chart.SKY_BLUE, "////", "black"),
    "imbalance": _Look(chart.BLUE, "xxxx", "white"),
    "launch": _Look(chart.YELLOW, "....", "black"),
    "rest": _Look(chart.PURPLE, "\\\\\\\\", "black"),
}


@checked
def lost_time(fit: Fit, title: str | None = None) -> ChartFigure:
    """Draw for each rank the time that it adds to the makespan, stacked by cause.

    All bars together are the difference between the measured and the ideal makespan; a message counts on the rank that
    receives it. What makes the run shorter goes to the left of 0.

    Args:
        fit: as :func:`course_pp.schedule.fit` returns it.
        title: instead of the finding.
    """
    figure, axes, *_ = rows.begin(fit.measured, heights=(0.16, 0.5, 4.6), right=0.95)
    least, most = _extent(fit)
    # What is below a thousandth of the run stays a sliver, also where nothing else is lost.
    room = max(most - least, 1e-3 * float(fit.measured.makespan)) or 1.0
    scale, unit = _axis_unit(room, fit.measured.unit)
    axes.set_xlim((least - (0.02 * room if least < 0 else 0)) * scale, (least + 1.03 * room) * scale)
    _draw_bars(axes, fit, scale)
    axes.axvline(0, color="black", linewidth=0.8, zorder=3)
    ranks = rows.name_ranks(axes, fit.measured.n_ranks)
    told = _teller(fit)
    rows.note_ranks(axes, {rank: told(_lost_on(fit, rank)) for rank in ranks}, "lost", 9.0)
    rows.name_time(axes, unit)
    axes.set_xlabel(f"makespan lost on the rank ({unit})", loc="left", fontsize=9)
    handles = [
        Patch(facecolor=look.colour, hatch=look.hatch, edgecolor="white", hatchcolor="#FFFFFF80", label=cause)
        for cause, look in _LOOKS.items()
    ]
    rows.add_legend(axes, handles)
    finding = _finding(fit)
    axes.set_title(finding if title is None else title, loc="left", fontsize=11.5, pad=9)
    figure.alt_text = _alt_text(fit, finding)
    return figure


def _extent(fit: Fit) -> tuple[float, float]:
    """Return how far the bars reach to the left and to the right."""
    parts = list(zip(*(loss.per_rank for loss in fit.lost), strict=True))
    return (
        min(sum(time for time in of_rank if time < 0) for of_rank in parts),
        max(sum(time for time in of_rank if time > 0) for of_rank in parts),
    )


def _axis_unit(longest: float, unit: str) -> tuple[float, str]:
    """Return the factor from times to those of the axis, and the unit to write under it."""
    if unit != "s":
        return 1.0, "relative cost"
    return (1.0, "s") if longest >= 1 else (1e3, "ms") if longest >= 1e-3 else (1e6, "µs")


def _lost_on(fit: Fit, rank: int) -> float:
    return sum(loss.per_rank[rank] for loss in fit.lost)


def _teller(fit: Fit) -> Callable[[float], str]:
    """Writes times in the timeline's unit; what is below a millionth of the makespan as 0."""

    def told(time: float) -> str:
        rounded = 0.0 if abs(time) < 1e-6 * float(fit.measured.makespan) else time
        return f"{'−' if rounded < 0 else ''}{format_time(abs(rounded), fit.measured.unit)}"

    return told


def _draw_bars(axes: Axes, fit: Fit, scale: float) -> None:
    ranks = range(fit.measured.n_ranks)
    points_x, points_y = chart.points_per_unit(axes)
    width_of = cache(chart.text_width)
    right, left = [0.0] * len(ranks), [0.0] * len(ranks)
    for cause, look in _LOOKS.items():
        widths = [time * scale for time in fit.lost_to(cause).per_rank]
        starts = [right[rank] if widths[rank] >= 0 else left[rank] for rank in ranks]
        axes.barh(
            ranks,
            widths,
            left=starts,
            height=rows.ROW_FILL,
            color=look.colour,
            hatch=look.hatch,
            edgecolor="white",
            linewidth=0.6,
            hatchcolor="#FFFFFF80",
        )
        for rank in ranks:
            if width_of(cause, _SMALL) + 8 <= abs(widths[rank]) * points_x and points_y >= 12:
                axes.text(
                    starts[rank] + widths[rank] / 2,
                    rank,
                    cause,
                    size=_SMALL,
                    color=look.ink,
                    ha="center",
                    va="center_baseline",
                    bbox={"facecolor": look.colour, "edgecolor": "none", "pad": 0.8},
                    zorder=4,
                )
            right[rank] += max(widths[rank], 0.0)
            left[rank] += min(widths[rank], 0.0)


def _blamed(loss: Loss) -> str:
    """Return ``straggling rank 2``, the link that transfers wait for, else the cause in a word."""
    where = loss.where
    if isinstance(where, tuple):
        return _blamed_link(loss, where)
    names = {"launch": "launching", "imbalance": f"the stages of rank {where}", "rest": "jitter"}
    return names.get(loss.cause, f"straggling rank {where}")


def _blamed_link(loss: Loss, link: tuple[int, int]) -> str:
    """Return the link alone only if it has all the time that the title gives: another may have the rest."""
    share = loss.per_link[link] / loss.time
    if share > 0.995:
        return name_of(link)
    return f"transfers (most on {name_of(link)})" if share > 0.5 else "transfers"


def _finding(fit: Fit) -> str:
    whole = float(fit.measured.makespan)
    worth_saying = [loss for loss in fit.lost if loss.time >= 0.01 * whole > 0]
    if not worth_saying:
        return "No cause costs a hundredth of the makespan"
    first, *others = (f"{percent(loss.time / whole)}{{}} to {_blamed(loss)}" for loss in worth_saying[:2])
    return "Lost: " + ", ".join([first.format(" of the makespan"), *(other.format("") for other in others)])


def _alt_text(fit: Fit, finding: str) -> str:
    told, whole = _teller(fit), float(fit.measured.makespan)
    causes = "; ".join(f"{loss.cause} {told(loss.time)}" for loss in fit.lost)
    what = named(
        fit.measured.name,
        f"Bars of {counted(fit.measured.n_ranks, 'rank')}: time lost by cause, {told(fit.total_lost)} of {told(whole)}",
    )
    worst = max(range(fit.measured.n_ranks), key=lambda rank: _lost_on(fit, rank))
    most = f" Most is lost on rank {worst}, {told(_lost_on(fit, worst))}." if _lost_on(fit, worst) > 0 else ""
    return f"{what}. {finding}. {causes}.{most}"
