"""Stacked bars: where the bytes of a training step go, and what a run lost, to which cause, on which rank."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from course_pp.base.arguments import checked
from course_pp.schedule import Fit, Loss, format_time
from course_pp.schedule.fitting import name_of
from course_pp.show import chart, timelines
from course_pp.show.chart import (
    SMALL,
    WIDTH,
    ChartFigure,
    add_legend,
    by_group,
    name_rows,
    points_per_unit,
    text_width,
)
from course_pp.show.wording import axis_unit, counted, format_bytes, listed, named, percent

# Colour, hatch and letters. Neighbours differ in lightness and in hatch, so a bar reads the same
# without colour.
Look = tuple[str, str, str]
BYTES: tuple[Look, ...] = (
    (chart.BLUE, "", "white"),
    (chart.SKY_BLUE, "////", "black"),
    (chart.GREEN, "", "black"),
    (chart.YELLOW, "....", "black"),
    (chart.VERMILION, "", "black"),
    (chart.PURPLE, "\\\\\\\\", "black"),
    (chart.ORANGE, "xxxx", "black"),
)
_CAUSES: dict[str, Look] = {
    "straggler": (chart.VERMILION, "", "black"),
    "transfer": (chart.SKY_BLUE, "////", "black"),
    "imbalance": (chart.BLUE, "xxxx", "white"),
    "launch": (chart.YELLOW, "....", "black"),
    "rest": (chart.PURPLE, "\\\\\\\\", "black"),
}


def stack(
    axes: Axes,
    bars: Mapping[str, Sequence[float]],
    looks: Sequence[Look],
    height: float,
    linewidth: float,
) -> Iterator[tuple[str, Look, list[tuple[float, float]]]]:
    """Draw a stacked bar a row from each kind's width in each row, negative ones to the left of 0.

    Yields each kind when it is drawn, with its look, and where it begins and how wide it is in each
    row.
    """
    ends = [(0.0, 0.0)] * len(next(iter(bars.values())))
    for (kind, widths), look in zip(bars.items(), looks, strict=False):
        starts = [
            left if width < 0 else right for (left, right), width in zip(ends, widths, strict=True)
        ]
        colour, hatch, _ = look
        more: dict[str, Any] = {
            "height": height,
            "label": kind,
            "color": colour,
            "hatch": hatch,
            "edgecolor": "white",
        }
        axes.barh(
            range(len(widths)),
            widths,
            left=starts,
            linewidth=linewidth,
            hatchcolor="#FFFFFF80",
            **more,
        )
        yield kind, look, list(zip(starts, widths, strict=True))
        ends = [
            (a + min(width, 0.0), b + max(width, 0.0))
            for (a, b), width in zip(ends, widths, strict=True)
        ]


def _label(axes: Axes, row: int, bar: tuple[float, float], text: str, look: Look) -> None:
    """Write into a bar, over its hatch and any line that crosses it."""
    (start, width), (colour, _, ink) = bar, look
    behind = {"facecolor": colour, "edgecolor": "none", "pad": 0.8}
    middle: dict[str, Any] = {"ha": "center", "va": "center_baseline"}
    axes.text(start + width / 2, row, text, size=SMALL, color=ink, bbox=behind, zorder=4, **middle)


@checked
def bytes_by_kind(
    parts: Mapping[str, float | Mapping[str, float]],
    budget: float | None = None,
    title: str | None = None,
) -> ChartFigure:
    """Draw stacked horizontal bars of bytes, with a dashed line at the budget.

    Args:
        parts: bytes for each kind (``{"weights": …, "gradients": …}``), or several such bars by
            name (``{"predicted": {…}, "measured": {…}}``); of up to 7 kinds.
        budget: bytes that may be used by one bar.
    """
    mixed = (
        f"parts {listed([repr(key) for key in parts])} mix numbers and mappings: give all as"
        " mappings"
    )
    bars: dict[str, Mapping[str, float]] = by_group(parts, mixed)
    if not any(bars.values()):
        raise ValueError(
            "no bytes to draw: parts is empty; give at least one kind, such as {'weights': 1024}"
        )
    for name, n_bytes in [
        ("budget", budget or 0),
        *(pair for bar in bars.values() for pair in bar.items()),
    ]:
        if not 0 <= n_bytes < math.inf:
            raise ValueError(f"{name} of {n_bytes} bytes: give a finite number, 0 or more")
    kinds = list(dict.fromkeys(kind for bar in bars.values() for kind in bar))
    if len(kinds) > len(BYTES):
        raise ValueError(
            f"parts has {len(kinds)} kinds of bytes in one bar: sum the small ones, up to"
            f" {len(BYTES)}"
        )
    totals = {name: sum(bar.values()) for name, bar in bars.items()}
    longest = max([*totals.values(), budget or 0]) or 1
    unit = format_bytes(longest).split()[1]
    unit_size = 1024.0 ** ("B", "KiB", "MiB", "GiB", "TiB").index(unit)

    top = 0.5 if budget is None else 0.7
    name_width = max(text_width(name, 9) for name in bars) / 72
    figure = ChartFigure(WIDTH, top + 0.72 + 0.5 * len(bars))
    axes = figure.axes_with_margins(left=name_width + 0.3, right=0.95, bottom=0.72, top=top)
    axes.set_xlim(0, 1.03 * longest / unit_size)
    axes.set_ylim(len(bars) - 0.5, -0.5)
    points_x, _ = points_per_unit(axes)
    widths = {kind: [bar.get(kind, 0) / unit_size for bar in bars.values()] for kind in kinds}
    for kind, look, drawn in stack(axes, widths, BYTES, height=0.62, linewidth=0.8):
        for row, (bar, place) in enumerate(zip(bars.values(), drawn, strict=True)):
            size = format_bytes(bar.get(kind, 0))
            fitting = (
                text
                for text in (f"{kind} {size}", size)
                if text_width(text, SMALL) + 6 <= place[1] * points_x
            )
            if text := next(fitting, ""):
                _label(axes, row, place, text, look)
    add_legend(axes, gap=0.3, spacing=1.4)
    for row, total in enumerate(totals.values()):
        beside: dict[str, Any] = {
            "size": 9,
            "va": "center_baseline",
            "weight": "bold",
            "textcoords": "offset points",
        }
        behind = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        axes.annotate(
            format_bytes(total), (total / unit_size, row), xytext=(5, 0), bbox=behind, **beside
        )
    if budget is not None:
        axes.axvline(
            budget / unit_size, color="black", linestyle=(0, (5, 3)), linewidth=1.4, zorder=3
        )
        line: dict[str, Any] = {
            "xytext": (0, 4),
            "textcoords": "offset points",
            "size": 9,
            "ha": "center",
        }
        top_of = (budget / unit_size, 1)
        axes.annotate(
            f"budget {format_bytes(budget)}", top_of, xycoords=("data", "axes fraction"), **line
        )
    name_rows(axes, bars)
    axes.set_xlabel(f"bytes ({unit})", loc="left", fontsize=9)
    finding = _finding_of_bytes(totals, budget)
    told = [
        f"{name}: " * bool(name)
        + ", ".join(f"{kind} {format_bytes(size)}" for kind, size in bar.items())
        for name, bar in bars.items()
    ]
    alt_text = f"Stacked bars of bytes by kind. {finding}. {'; '.join(told)}."
    return figure.finish(axes, title, finding, alt_text, pad=9 if budget is None else 22)


def _finding_of_bytes(totals: dict[str, float], budget: float | None) -> str:
    def judged(name: str, total: float) -> str:
        amount = f"{name} {format_bytes(total)}" if name else f"{format_bytes(total)} in all"
        if budget is None:
            return amount
        if total > budget:
            return f"{amount}, {format_bytes(total - budget)} over the budget"
        return f"{amount}, {format_bytes(budget - total)} below the budget"

    if len(totals) <= 3:
        return "; ".join(judged(name, total) for name, total in totals.items())
    most = max(totals, key=totals.__getitem__)
    return f"Largest of {len(totals)}: {judged(most, totals[most])}"


@checked
def lost_time(fit: Fit, title: str | None = None) -> ChartFigure:
    """Draw for each rank the time that it adds to the makespan, stacked by cause.

    All bars together are the difference between the measured and the ideal makespan; a message
    counts on the rank that receives it. What makes the run shorter goes to the left of 0.

    ``fit`` is what :func:`course_pp.schedule.fit` returns.
    """
    tl, whole = fit.measured, float(fit.measured.makespan)
    figure, axes, *_ = timelines.begin(tl, heights=(0.16, 0.5, 4.6), right=0.95)
    on_rank = list(zip(*(loss.per_rank for loss in fit.lost), strict=True))
    least = min(sum(time for time in times if time < 0) for times in on_rank)
    most = max(sum(time for time in times if time > 0) for times in on_rank)
    # What is below a thousandth of the run stays a sliver, also where nothing else is lost.
    room = max(most - least, 1e-3 * whole) or 1.0
    scale, unit = axis_unit(room, tl.unit)
    axes.set_xlim(
        (least - (0.02 * room if least < 0 else 0)) * scale, (least + 1.03 * room) * scale
    )
    points_x, points_y = points_per_unit(axes)
    widths = {cause: [time * scale for time in fit.lost_to(cause).per_rank] for cause in _CAUSES}
    for cause, look, drawn in stack(
        axes, widths, [*_CAUSES.values()], height=timelines.ROW_FILL, linewidth=0.6
    ):
        for rank, place in enumerate(drawn):
            if text_width(cause, SMALL) + 8 <= abs(place[1]) * points_x and points_y >= 12:
                _label(axes, rank, place, cause, look)
    axes.axvline(0, color="black", linewidth=0.8, zorder=3)
    ranks = timelines.name_ranks(axes, tl.n_ranks)

    def told(time: float) -> str:
        """Write a time in the timeline's unit; what is below a millionth of the makespan as 0."""
        rounded = 0.0 if abs(time) < 1e-6 * whole else time
        return f"{'−' if rounded < 0 else ''}{format_time(abs(rounded), tl.unit)}"

    lost = [sum(times) for times in on_rank]
    timelines.note_ranks(axes, {rank: told(lost[rank]) for rank in ranks}, "lost", 9.0)
    timelines.name_time(axes, unit, "makespan lost on the rank")
    add_legend(
        axes,
        [
            Patch(
                facecolor=colour,
                hatch=hatch,
                edgecolor="white",
                hatchcolor="#FFFFFF80",
                label=cause,
            )
            for cause, (colour, hatch, _) in _CAUSES.items()
        ],
    )
    finding = _finding_of_losses(fit, whole)
    causes = "; ".join(f"{loss.cause} {told(loss.time)}" for loss in fit.lost)
    in_all = f"time lost by cause, {told(fit.total_lost)} of {told(whole)}"
    what = named(tl.name, f"Bars of {counted(tl.n_ranks, 'rank')}: {in_all}")
    worst = max(range(tl.n_ranks), key=lost.__getitem__)
    most_lost = f" Most is lost on rank {worst}, {told(lost[worst])}." if lost[worst] > 0 else ""
    return figure.finish(axes, title, finding, f"{what}. {finding}. {causes}.{most_lost}")


def _finding_of_losses(fit: Fit, whole: float) -> str:
    worth_saying = [loss for loss in fit.lost if loss.time >= 0.01 * whole > 0]
    if not worth_saying:
        return "No cause costs a hundredth of the makespan"
    first, *others = (
        f"{percent(loss.time / whole)}{{}} to {_blamed(loss)}" for loss in worth_saying[:2]
    )
    return "Lost: " + ", ".join(
        [first.format(" of the makespan"), *(other.format("") for other in others)]
    )


def _blamed(loss: Loss) -> str:
    """Return ``straggling rank 2``, the link that transfers wait for, else the cause in a word."""
    where = loss.where
    if isinstance(where, tuple):
        # The link alone only if it has all the time that the title gives: another may have the
        # rest.
        share = loss.per_link[where] / loss.time
        most = f"transfers (most on {name_of(where)})" if share > 0.5 else "transfers"
        return name_of(where) if share > 0.995 else most
    names = {"launch": "launching", "imbalance": f"the stages of rank {where}", "rest": "jitter"}
    return names.get(loss.cause, f"straggling rank {where}")
