"""A timeline as a chart: one row a rank, one box a span, idle time in grey."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.patches import Patch

from course_pp.schedule import KINDS, Action, Timeline, format_time
from course_pp.show import chart
from course_pp.show.chart import ChartFigure, counted

_WIDTH = 9.5
_LABEL_SIZES = (8.5, 7.0, 6.0)
_LABEL_PADDING = 1.6
_ROW_FILL = 0.86


@dataclass(frozen=True)
class _Look:
    """How a kind of action is drawn. Light and dark alternate, so grey scale tells F from B, and I from W."""

    colour: str
    hatch: str = ""


_LOOKS = {
    "F": _Look(chart.SKY_BLUE),
    "B": _Look(chart.VERMILION),
    "I": _Look(chart.ORANGE, hatch="...."),
    "W": _Look(chart.GREEN, hatch="////"),
    "U": _Look(chart.YELLOW, hatch="xxxx"),
}


@dataclass(frozen=True)
class _Box:
    """One action to draw: left and right in the axis's unit, bottom and top in rows."""

    action: Action
    left: float
    right: float
    bottom: float
    top: float


def timeline(tl: Timeline, title: str | None = None) -> ChartFigure:
    """Draw a predicted or measured timeline. The title is its finding unless one is given.

    A box reads ``F3``, forward of microbatch 3, or ``2F3`` where a rank has several stages; a label that
    does not fit is shortened to the microbatch, then left out. The right margin has each rank's busy share.
    """
    row_inches = min(0.42, max(0.13, 4.2 / tl.n_ranks))
    figure = ChartFigure(_WIDTH, 1.15 + row_inches * tl.n_ranks)
    axes = figure.axes_with_margins(left=0.75, right=0.75, bottom=0.68, top=0.47)
    scale, unit = _axis_unit(tl)
    end = float(tl.makespan) * scale
    axes.set_xlim(0, end or 1)
    axes.set_ylim(tl.n_ranks - 0.5, -0.5)

    _draw_idle_rows(axes, tl.n_ranks, end)
    boxes = list(_boxes(tl, scale))
    _draw_boxes(axes, boxes)
    _label_boxes(axes, boxes, with_stage=_has_several_stages_a_rank(tl))
    _describe_axes(axes, tl, unit)
    _draw_key(axes, {box.action.kind for box in boxes}, has_idle=tl.bubble_fraction > 0)
    axes.set_title(_finding(tl) if title is None else title, loc="left", fontsize=11.5, pad=9)
    figure.alt_text = _alt_text(tl)
    return figure


def _finding(tl: Timeline) -> str:
    if not tl.spans:
        return f"{counted(tl.n_ranks, 'rank')}, nothing done"
    microbatches = counted(tl.n_microbatches, "microbatch", "microbatches")
    sizes = f"{counted(tl.n_ranks, 'rank')}, {microbatches}"
    length = format_time(tl.makespan, tl.unit)
    if tl.n_ranks > 1 and _most_busy_at_once(tl) == 1:
        return f"One rank works at a time: {sizes}, busy {_percent(tl.utilisation)} of {length}"
    return f"{sizes}: busy {_percent(tl.utilisation)} of {length}, bubble {_percent(tl.bubble_fraction)}"


def _alt_text(tl: Timeline) -> str:
    kind = "Measured timeline" if tl.unit == "s" else "Timeline"
    return f"{kind}, one row a rank. {_finding(tl)}; peak activations held: {_spelled_peaks(tl)}."


def _spelled_peaks(tl: Timeline) -> str:
    peaks = tl.peak_activations
    if len(set(peaks)) == 1:
        return f"{peaks[0]} on every rank"
    if len(peaks) > 8:
        return f"{min(peaks)} to {max(peaks)}, depending on the rank"
    return f"{chart.listed([str(peak) for peak in peaks])} on ranks 0 to {tl.n_ranks - 1}"


def _percent(fraction: object) -> str:
    return f"{100 * float(fraction):.3g} %"  # type: ignore[arg-type]


def _most_busy_at_once(tl: Timeline) -> int:
    # At equal times an end sorts before a start: handing over is not working at the same time.
    changes = sorted((time, step) for s in tl.spans if s.duration for time, step in ((s.start, 1), (s.end, -1)))
    busy = most = 0
    for _, step in changes:
        busy += step
        most = max(most, busy)
    return most


def _has_several_stages_a_rank(tl: Timeline) -> bool:
    return any(len({part.stage for span in row for part in span.action.parts}) > 1 for row in tl.by_rank)


def _axis_unit(tl: Timeline) -> tuple[float, str]:
    if tl.unit != "s":
        return 1.0, "relative cost"
    scale, unit = (1.0, "s") if tl.makespan >= 1 else (1e3, "ms") if tl.makespan >= 1e-3 else (1e6, "µs")
    return scale, unit


def _boxes(tl: Timeline, scale: float) -> Iterable[_Box]:
    """One box an action; an overlapped pair shares its span, forward above backward."""
    for span in tl.spans:
        parts = span.action.parts
        height = _ROW_FILL / len(parts)
        for i, part in enumerate(parts):
            bottom = span.rank - _ROW_FILL / 2 + i * height
            yield _Box(part, float(span.start) * scale, float(span.end) * scale, bottom, bottom + height)


def _draw_idle_rows(axes: Axes, n_ranks: int, end: float) -> None:
    for rank in range(n_ranks):
        axes.barh(rank, end, height=_ROW_FILL, color=chart.IDLE_GREY, zorder=0)


def _draw_boxes(axes: Axes, boxes: list[_Box]) -> None:
    """One collection a kind: hundreds of boxes then cost what one does."""
    points_x, _ = chart.points_per_unit(axes)
    for kind, look in _LOOKS.items():
        mine = [box for box in boxes if box.action.kind == kind]
        if not mine:
            continue
        widths = sorted(points_x * (box.right - box.left) for box in mine)
        axes.add_collection(
            PolyCollection(
                [[(b.left, b.bottom), (b.right, b.bottom), (b.right, b.top), (b.left, b.top)] for b in mine],
                facecolors=look.colour,
                edgecolors="white",
                # A full line around a box of two points would leave nothing of the box.
                linewidths=min(0.9, 0.15 * widths[len(widths) // 2]),
                hatch=look.hatch or None,
                hatchcolor="#FFFFFF66",
            )
        )


def _label_boxes(axes: Axes, boxes: list[_Box], with_stage: bool) -> None:
    """Label what has room. Boxes of one size are labelled alike: room is judged by the widest number."""
    points_x, points_y = chart.points_per_unit(axes)
    width_of = cache(chart.text_width)
    n_digits = len(str(max((box.action.microbatch for box in boxes), default=0)))
    for box in boxes:
        action = box.action
        prefix = f"{action.stage}{action.kind}" if with_stage else action.kind
        room_x = points_x * (box.right - box.left) - _LABEL_PADDING
        room_y = points_y * (box.top - box.bottom)
        for before, size in ((before, size) for before in (prefix, "") for size in _LABEL_SIZES):
            if size <= room_y and width_of(before + n_digits * "0", size) <= room_x:
                x, y = (box.left + box.right) / 2, (box.bottom + box.top) / 2
                text = f"{before}{action.microbatch}"
                axes.text(x, y, text, size=size, ha="center", va="center_baseline")
                break


def _describe_axes(axes: Axes, tl: Timeline, unit: str) -> None:
    _, points_y = chart.points_per_unit(axes)
    every = 1 if points_y >= 9 else 4
    ranks = range(0, tl.n_ranks, every)
    axes.set_yticks(ranks, [f"rank {rank}" for rank in ranks], fontsize=min(9, every * points_y))
    axes.set_xlabel(f"time ({unit})", loc="left", fontsize=9)
    axes.tick_params(axis="x", labelsize=8.5)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    if tl.makespan:
        for rank in ranks:
            share = _percent(tl.busy[rank] / tl.makespan)
            _note_right(axes, share, rank, "data", 0, min(8.5, every * points_y))
        _note_right(axes, "busy", 1, "axes fraction", 4, 8.5)


def _note_right(axes: Axes, text: str, y: float, coordinate: str, raised: float, size: float) -> None:
    """Write in the right margin at height ``y``."""
    axes.annotate(
        text,
        (1, y),
        xycoords=("axes fraction", coordinate),
        xytext=(5, raised),
        textcoords="offset points",
        size=size,
        va="center" if coordinate == "data" else "baseline",
        color=chart.TEXT_GREY,
    )


def _draw_key(axes: Axes, kinds: set[str], has_idle: bool) -> None:
    """Name every colour in use, on the line of the axis label."""
    handles = [
        Patch(facecolor=look.colour, hatch=look.hatch, edgecolor="white", label=f"{kind}  {KINDS[kind]}")
        for kind, look in _LOOKS.items()
        if kind in kinds
    ]
    if has_idle:
        handles.append(Patch(facecolor=chart.IDLE_GREY, label="idle"))
    if handles:
        _, height = chart.size_in_inches(axes)
        axes.legend(
            handles=handles,
            ncols=len(handles),
            loc="upper right",
            bbox_to_anchor=(1, -0.27 / height),
            frameon=False,
            fontsize=8.5,
            handlelength=1.3,
            columnspacing=1.4,
            borderaxespad=0,
        )
