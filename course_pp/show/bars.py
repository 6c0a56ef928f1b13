"""Stacked bars: the bytes of a training step by kind, and the lost time of a run by cause."""

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
    """Draw a stacked bar a row from each kind's width in each row, negative ones left of 0.

    Yields each kind when it is drawn: its name, its look, and its start and width in each row.
    """
    n_rows = len(next(iter(bars.values())))
    lefts = [0.0] * n_rows
    rights = [0.0] * n_rows
    for (kind, widths), look in zip(bars.items(), looks, strict=False):
        colour, hatch, _ = look
        starts = []
        for row, width in enumerate(widths):
            if width < 0:
                starts.append(lefts[row])
                lefts[row] += width
            else:
                starts.append(rights[row])
                rights[row] += width
        more: dict[str, Any] = {"hatch": hatch, "hatchcolor": "#FFFFFF80", "edgecolor": "white"}
        axes.barh(
            range(n_rows),
            widths,
            left=starts,
            height=height,
            color=colour,
            linewidth=linewidth,
            label=kind,
            **more,
        )
        yield kind, look, list(zip(starts, widths, strict=True))


def _label(axes: Axes, row: int, bar: tuple[float, float], text: str, look: Look) -> None:
    """Write into a bar, over its hatch and any line that crosses it."""
    start, width = bar
    colour, _, ink = look
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
            name (``{"predicted": {…}, "measured": {…}}``); up to 7 kinds.
        budget: bytes that one bar may use.
    """
    keys = listed(repr(key) for key in parts)
    mixed = f"parts {keys} mix numbers and mappings: give all as mappings"
    bars: dict[str, Mapping[str, float]] = by_group(parts, mixed)
    if not any(bars.values()):
        raise ValueError(
            "no bytes to draw: parts is empty; give at least one kind, such as {'weights': 1024}"
        )
    _refuse_bytes("budget", budget or 0)
    kinds: dict[str, None] = {}  # in the order in which they first occur
    for bar in bars.values():
        for kind, n_bytes in bar.items():
            _refuse_bytes(kind, n_bytes)
            kinds[kind] = None
    if len(kinds) > len(BYTES):
        given = f"parts has {len(kinds)} kinds of bytes in one bar"
        raise ValueError(f"{given}: sum the small ones, up to {len(BYTES)}")
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
            for text in (f"{kind} {size}", size):
                if text_width(text, SMALL) + 6 <= place[1] * points_x:
                    _label(axes, row, place, text=text, look=look)
                    break
    add_legend(axes, gap=0.3, spacing=1.4)

    look_of_note: dict[str, Any] = {"size": 9, "textcoords": "offset points"}
    behind = {"facecolor": "white", "edgecolor": "none", "pad": 1}
    for row, total in enumerate(totals.values()):
        axes.annotate(
            format_bytes(total),
            (total / unit_size, row),
            xytext=(5, 0),
            va="center_baseline",
            weight="bold",
            bbox=behind,
            **look_of_note,
        )
    if budget is not None:
        at = budget / unit_size
        axes.axvline(at, color="black", linestyle=(0, (5, 3)), linewidth=1.4, zorder=3)
        axes.annotate(
            f"budget {format_bytes(budget)}",
            (at, 1),
            xycoords=("data", "axes fraction"),
            xytext=(0, 4),
            ha="center",
            **look_of_note,
        )
    name_rows(axes, bars)
    axes.set_xlabel(f"bytes ({unit})", loc="left", fontsize=9)

    finding = _finding_of_bytes(totals, budget)
    told = []
    for name, bar in bars.items():
        sizes = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in bar.items())
        told.append(f"{name}: {sizes}" if name else sizes)
    alt_text = f"Stacked bars of bytes by kind. {finding}. {'; '.join(told)}."
    return figure.finish(axes, title, finding, alt_text, pad=9 if budget is None else 22)


def _refuse_bytes(name: str, n_bytes: float) -> None:
    if not 0 <= n_bytes < math.inf:
        raise ValueError(f"{name} of {n_bytes} bytes: give a finite number, 0 or more")


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
    counts on the rank that receives it. Time by which the run is shorter goes to the left of 0.

    ``fit`` is the result of :func:`course_pp.schedule.fit`.
    """
    tl = fit.measured
    whole = float(tl.makespan)
    figure, axes, *_ = timelines.begin(tl, heights=(0.16, 0.5, 4.6), right=0.95)
    least = 0.0
    most = 0.0
    lost = []
    for times in zip(*(loss.per_rank for loss in fit.lost), strict=True):
        least = min(least, sum(time for time in times if time < 0))
        most = max(most, sum(time for time in times if time > 0))
        lost.append(sum(times))
    # Less than a thousandth of the run stays a sliver, also where nothing else is lost.
    room = max(most - least, 1e-3 * whole) or 1.0
    scale, unit = axis_unit(room, tl.unit)
    margin = 0.02 * room if least < 0 else 0
    axes.set_xlim((least - margin) * scale, (least + 1.03 * room) * scale)
    points_x, points_y = points_per_unit(axes)
    widths = {cause: [time * scale for time in fit.lost_to(cause).per_rank] for cause in _CAUSES}
    looks = list(_CAUSES.values())
    for cause, look, drawn in stack(axes, widths, looks, timelines.ROW_FILL, linewidth=0.6):
        for rank, place in enumerate(drawn):
            if text_width(cause, SMALL) + 8 <= abs(place[1]) * points_x and points_y >= 12:
                _label(axes, rank, place, text=cause, look=look)
    axes.axvline(0, color="black", linewidth=0.8, zorder=3)
    ranks = timelines.name_ranks(axes, tl.n_ranks)

    def told(time: float) -> str:
        """Write a time in the timeline's unit; less than a millionth of the makespan as 0."""
        rounded = 0.0 if abs(time) < 1e-6 * whole else time
        sign = "−" if rounded < 0 else ""
        return sign + format_time(abs(rounded), tl.unit)

    timelines.note_ranks(axes, {rank: told(lost[rank]) for rank in ranks}, "lost", size=9.0)
    timelines.name_time(axes, unit, "makespan lost on the rank")
    handles = []
    for cause, (colour, hatch, _) in _CAUSES.items():
        style: dict[str, Any] = {"facecolor": colour, "hatch": hatch, "edgecolor": "white"}
        handles.append(Patch(hatchcolor="#FFFFFF80", label=cause, **style))
    add_legend(axes, handles)

    finding = _finding_of_losses(fit, whole)
    causes = "; ".join(f"{loss.cause} {told(loss.time)}" for loss in fit.lost)
    in_all = f"time lost by cause, {told(fit.total_lost)} of {told(whole)}"
    what = named(tl.name, f"Bars of {counted(tl.n_ranks, 'rank')}: {in_all}")
    alt_text = f"{what}. {finding}. {causes}."
    worst = max(range(tl.n_ranks), key=lost.__getitem__)
    if lost[worst] > 0:
        alt_text += f" Most is lost on rank {worst}, {told(lost[worst])}."
    return figure.finish(axes, title, finding, alt_text)


def _finding_of_losses(fit: Fit, whole: float) -> str:
    worth_saying = [loss for loss in fit.lost if loss.time >= 0.01 * whole > 0]
    if not worth_saying:
        return "No cause costs a hundredth of the makespan"
    told: list[str] = []
    for loss in worth_saying[:2]:
        of_makespan = "" if told else " of the makespan"
        told.append(f"{percent(loss.time / whole)}{of_makespan} to {_blamed(loss)}")
    return f"Lost: {', '.join(told)}"


def _blamed(loss: Loss) -> str:
    """Return ``straggling rank 2``, the link that transfers wait for, or the cause in a word."""
    where = loss.where
    if isinstance(where, tuple):
        # The link alone only if it has all the time that the title gives: another may have the
        # rest.
        share = loss.per_link[where] / loss.time
        if share > 0.995:
            return name_of(where)
        return f"transfers (most on {name_of(where)})" if share > 0.5 else "transfers"
    names = {"launch": "launching", "imbalance": f"the stages of rank {where}", "rest": "jitter"}
    return names.get(loss.cause, f"straggling rank {where}")
