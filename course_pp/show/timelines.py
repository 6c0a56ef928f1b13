"""A timeline as a chart: one row a rank, one box an action, labels where they fit, idle time in
grey.

:func:`timeline` draws one; other figures of rows (chains, comparisons, memory, versions) use its
parts.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backend_bases import RendererBase
from matplotlib.backends.backend_agg import RendererAgg
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path
from matplotlib.textpath import TextPath
from matplotlib.transforms import Affine2D

from course_pp.base.arguments import checked
from course_pp.schedule import KINDS, Action, Span, Timeline
from course_pp.schedule.edges import spelled
from course_pp.show import chart
from course_pp.show.chart import SMALL, WIDTH, ChartFigure, add_legend, points_per_unit, text_width
from course_pp.show.wording import (
    axis_unit,
    finding,
    has_several_stages_a_rank,
    named,
    percent,
    spelled_peaks,
)

ROW_FILL = 0.86
_LABEL_SIZES = (8.5, 7.0, 6.0)
_LABEL_PADDING = 1.6
_FOOT, _ALL_FEET = 0.11, 0.22  # of a row: one step at most, and the highest


@dataclass(frozen=True)
class BarStyle:
    """How a kind of action is drawn. Light and dark alternate, so grey scale tells F from B, and I from W."""

    colour: str
    hatch: str = ""


LOOKS = {
    "F": BarStyle(chart.SKY_BLUE),
    "B": BarStyle(chart.VERMILION),
    "I": BarStyle(chart.ORANGE, hatch="...."),
    "W": BarStyle(chart.GREEN, hatch="////"),
    "U": BarStyle(chart.YELLOW, hatch="xxxx"),
}
# Of messages that skip stages.
_LINES: dict[str, tuple[str, tuple[float, tuple[float, ...]]]] = {
    "value": ("value over an edge", (0, (1, 0))),
    "value gradient": ("its gradient", (0, (2, 1.5))),
    "token": ("token", (0, (1, 0))),
}


@checked
def timeline(tl: Timeline, title: str | None = None) -> ChartFigure:
    """Draw a predicted or measured timeline. The title is its finding unless one is given.

    A box reads ``F3``, forward of microbatch 3, or ``2F3`` where a rank has several stages; a label
    that does not fit is shortened to the microbatch, then left out. A dark foot tells a rank's
    later chunks from its first. Lines are messages beyond the neighbour: values of edges, their
    gradients, and tokens on their way back. The right margin has each rank's busy share.
    """
    figure, axes, scale, unit = begin(tl, heights=(0.13, 0.42, 4.2), right=0.75)
    draw_idle(axes, tl.n_ranks, float(tl.makespan) * scale)
    boxes = boxes_of(tl, scale)
    draw_boxes(axes, boxes)
    n_chunks = _draw_feet(axes, tl, boxes)
    label_boxes(axes, boxes, with_stage=has_several_stages_a_rank(tl))
    ranks = name_ranks(axes, tl.n_ranks)
    name_time(axes, unit)
    if tl.makespan:
        note_ranks(axes, {rank: percent(tl.busy[rank] / tl.makespan) for rank in ranks}, "busy")
    lines = _draw_far_messages(axes, tl, scale)
    draw_key(axes, {box.action.kind for box in boxes}, tl.bubble_fraction > 0, n_chunks, lines)
    what = named(tl.name, f"{'Measured timeline' if tl.measured else 'Timeline'}, one row a rank")
    # Forwards alone hold nothing: nothing waits for a backward, as in generation.
    forward_only = {part.kind for span in tl.spans for part in span.action.parts} == {"F"}
    held = (
        "forwards only"
        if forward_only
        else f"peak activations held: {spelled_peaks(tl.peak_activations)}"
    )
    held += f"; values of edges held: {spelled_peaks(tl.peak_values)}" * any(tl.peak_values)
    found = finding(tl)
    return figure.finish(axes, title, found, f"{what}. {found}; {held}.{_told_far_messages(tl)}")


def begin(
    tl: Timeline, heights: tuple[float, float, float], right: float
) -> tuple[ChartFigure, Axes, float, str]:
    """Begin a figure with a row a rank over the length of ``tl``; return it, and the factor to the
    unit of its axis.

    ``heights`` are inches of a row at least, at most, and of all rows together between these
    bounds; ``right`` the margin's.
    """
    least, most, together = heights
    figure = ChartFigure(WIDTH, 1.15 + tl.n_ranks * min(most, max(least, together / tl.n_ranks)))
    axes = figure.axes_with_margins(left=0.75, right=right, bottom=0.68, top=0.47)
    scale, unit = axis_unit(tl.makespan, tl.unit)
    axes.set_xlim(0, float(tl.makespan) * scale or 1)
    axes.set_ylim(tl.n_ranks - 0.5, -0.5)
    return figure, axes, scale, unit


@dataclass(frozen=True)
class Box:
    """One action to draw: left and right in the axis's unit, bottom and top in rows."""

    action: Action
    left: float
    right: float
    bottom: float
    top: float

    def corners(self, gap_x: float = 0, gap_y: float = 0) -> list[tuple[float, float]]:
        """Return the corners of the box, each side moved inwards."""
        return rectangle(
            self.left + gap_x, self.right - gap_x, self.bottom + gap_y, self.top - gap_y
        )


def rectangle(left: float, right: float, bottom: float, top: float) -> list[tuple[float, float]]:
    return [(left, bottom), (right, bottom), (right, top), (left, top)]


def boxes_of(
    tl: Timeline, scale: float = 1.0, offset: float = 0.0, fill: float = ROW_FILL
) -> list[Box]:
    """Return one box an action; an overlapped pair shares its span, forward above backward.

    ``scale`` leads to units of the axis; boxes are ``fill`` rows high, and moved down by
    ``offset``.
    """
    return [
        Box(
            part,
            float(span.start) * scale,
            float(span.end) * scale,
            span.rank + offset - fill / 2 + i * fill / len(span.action.parts),
            span.rank + offset - fill / 2 + (i + 1) * fill / len(span.action.parts),
        )
        for span in tl.spans
        for i, part in enumerate(span.action.parts)
    ]


def draw_idle(
    axes: Axes, n_ranks: int, end: float, offset: float = 0.0, fill: float = ROW_FILL
) -> None:
    """Lay a grey bar under each row, which shows where nothing covers it."""
    bars = [
        rectangle(0, end, rank + offset - fill / 2, rank + offset + fill / 2)
        for rank in range(n_ranks)
    ]
    axes.add_collection(PolyCollection(bars, facecolors=chart.IDLE_GREY, linewidths=0, zorder=0))


def draw_boxes(axes: Axes, boxes: Collection[Box], alpha: float = 1.0) -> None:
    """Draw each kind in its colour and hatch, as one path: hundreds of boxes then cost what one does."""
    points_x, points_y = points_per_unit(axes)
    for kind, look in LOOKS.items():
        mine = [box for box in boxes if box.action.kind == kind]
        if not mine:
            continue
        widths = sorted(points_x * (box.right - box.left) for box in mine)
        # A full gap between boxes of two points would leave nothing of them. White lines instead
        # would take longer.
        gap = min(0.9, 0.15 * widths[len(widths) // 2]) / 2
        corners = [
            box.corners(min(gap / points_x, (box.right - box.left) / 4), gap / points_y)
            for box in mine
        ]
        more = {
            "hatch": look.hatch or None,
            "hatchcolor": "#FFFFFF66",
            "alpha": alpha if alpha < 1 else None,
        }
        # snapped, narrow gaps would come and go
        _draw_path(axes, corners, look.colour, snap=False, **more)


def _draw_path(
    axes: Axes, polygons: Sequence[Sequence[tuple[float, float]]], colour: str, **more: object
) -> None:
    """Draw equal polygons as one path. add_patch would walk along every edge to find limits, which are set already."""
    path = Path.make_compound_path_from_polys(np.array(polygons))
    axes.add_artist(
        PathPatch(path, **{"facecolor": colour, "edgecolor": "none", "linewidth": 0, **more})
    )


def _draw_feet(axes: Axes, tl: Timeline, boxes: Collection[Box]) -> int:
    """Give each box a dark foot as high as its chunk's number on the rank; return the most chunks of a rank."""
    held = [
        sorted({part.stage for span in row for part in span.action.parts}) for row in tl.by_rank
    ]
    chunk_of = {stage: chunk for stages in held for chunk, stage in enumerate(stages)}
    step = min(_FOOT, _ALL_FEET / max([1, *chunk_of.values()]))
    later = [box for box in boxes if chunk_of[box.action.stage]]
    feet = [
        rectangle(box.left, box.right, box.top - step * chunk_of[box.action.stage], box.top)
        for box in later
    ]
    if feet:
        _draw_path(axes, feet, chart.TEXT_GREY, edgecolor="white", linewidth=0.4, zorder=1.5)
    return 1 + max(chunk_of.values(), default=0)


Placed = tuple[str, float, float, float]
"""A label: text, size in points, x and y."""


class Labels(Artist):
    """Short texts, each centred on a point in data coordinates; hundreds of them cost what a few Text objects do."""

    def __init__(self, colour: str = chart.BLACK) -> None:
        super().__init__()
        self.set_zorder(3)
        self._colour = to_rgb(colour)
        self._points: defaultdict[tuple[str, float], list[tuple[float, float]]] = defaultdict(list)

    def add(self, x: float, y: float, text: str, size: float) -> None:
        self._points[text, size].append((x, y))

    @property
    def placed(self) -> list[Placed]:
        return [
            (text, size, x, y) for (text, size), points in self._points.items() for x, y in points
        ]

    def draw(self, renderer: RendererBase) -> None:
        """Draw as glyphs that are rasterised once and copied, or, where text stays text (SVG), as text."""
        if self.axes is None or not self.get_visible():
            return
        graphics = renderer.new_gc()
        graphics.set_linewidth(0)
        graphics.set_foreground(self._colour)
        pixels = float(np.asarray(renderer.points_to_pixels(1)))
        for (text, size), points in self._points.items():
            if isinstance(renderer, RendererAgg):
                to_pixels = Affine2D().scale(pixels)
                places, outline = Path(points), _glyphs(text, size)
                renderer.draw_markers(
                    graphics, outline, to_pixels, places, self.axes.transData, self._colour
                )
                continue
            half_width, half_height = (
                pixels * text_width(text, size) / 2,
                pixels * _digit_height(size) / 2,
            )
            _, height = renderer.get_canvas_width_height()
            for x, y in self.axes.transData.transform(points):
                baseline = y - half_height
                baseline = height - baseline if renderer.flipy() else baseline
                renderer.draw_text(
                    graphics, x - half_width, baseline, text, FontProperties(size=size), 0
                )
        graphics.restore()


@cache
def _glyphs(text: str, size: float) -> Path:
    """Return the outlines of ``text`` in points, centred on the origin."""
    outline = TextPath((-text_width(text, size) / 2, -_digit_height(size) / 2), text, size=size)
    return Path(outline.vertices, outline.codes)


@cache
def _digit_height(size: float) -> float:
    return float(TextPath((0, 0), "0", size=size).get_extents().height)


def label_boxes(axes: Axes, boxes: Iterable[Box], with_stage: bool) -> None:
    """Label what has room. Boxes of one size are labelled alike: room is judged by the widest letter and number."""
    boxes = list(boxes)
    points_x, points_y = points_per_unit(axes)
    digits = "0" * len(str(max((box.action.microbatch for box in boxes), default=0)))
    widest = max(
        (box.action.kind for box in boxes), key=lambda kind: text_width(kind, 10), default=""
    )

    @cache
    def fitting(width: float, height: float, stage: str) -> tuple[bool, float] | None:
        """Return whether stage and kind have room, and the size of the letters; None without room for the number."""
        # A full name in the smallest letters is read by nobody; the number alone has room for
        # larger ones.
        for is_full, size in [
            *((True, size) for size in _LABEL_SIZES[:-1]),
            *((False, size) for size in _LABEL_SIZES),
        ]:
            room = points_x * width - _LABEL_PADDING
            if (
                size <= points_y * height
                and text_width(is_full * (stage + widest) + digits, size) <= room
            ):
                return is_full, size
        return None

    labels, on_hatch = Labels(), defaultdict[str, list[Placed]](list)
    for box in boxes:
        stage = str(box.action.stage) if with_stage else ""
        # Rounded, so that boxes of one cost count as equal.
        if fit := fitting(round(box.right - box.left, 9), round(box.top - box.bottom, 9), stage):
            is_full, size = fit
            text = f"{is_full * (stage + box.action.kind)}{box.action.microbatch}"
            x, y = (box.left + box.right) / 2, (box.bottom + box.top) / 2
            labels.add(x, y, text, size)
            if (look := LOOKS[box.action.kind]).hatch:
                on_hatch[look.colour].append((text, size, x, y))
    back_labels(axes, on_hatch)
    axes.add_artist(labels)


def back_labels(axes: Axes, placed: Mapping[str, Collection[Placed]]) -> None:
    """Lay a patch under each label of a hatched box, by the box's colour: no line then runs through its letters."""
    points_x, points_y = points_per_unit(axes)
    for colour, labels in placed.items():
        patches = []
        for text, size, x, y in labels:
            wide, high = (
                (text_width(text, size) / 2 + 1) / points_x,
                (_digit_height(size) / 2 + 1) / points_y,
            )
            patches.append(rectangle(x - wide, x + wide, y - high, y + high))
        _draw_path(axes, patches, colour, zorder=1.2)


def name_ranks(axes: Axes, n_ranks: int, gap: float = 5) -> range:
    """Name the rows, every fourth where they are thin, ``gap`` points from the axes; returns the ranks with a name."""
    points_x, points_y = points_per_unit(axes)
    every = 1 if points_y >= 9 else 4
    ranks, size = range(0, n_ranks, every), min(9, every * points_y)
    # Tick labels would be a third of the time that the panel has for a picture.
    names = Labels()
    for rank in ranks:
        middle = axes.get_xlim()[0] - (gap + text_width(f"rank {rank}", size) / 2) / points_x
        names.add(middle, rank, f"rank {rank}", size)
    axes.add_artist(names)
    axes.yaxis.set_visible(False)
    axes.spines[["top", "right", "left"]].set_visible(False)
    return ranks


def name_time(axes: Axes, unit: str, what: str = "time") -> None:
    axes.set_xlabel(f"{what} ({unit})", loc="left", fontsize=9)
    axes.tick_params(axis="x", labelsize=SMALL)


def note_ranks(
    axes: Axes, notes: Mapping[int, str], heading: str = "", size: float = SMALL
) -> None:
    """Write a note in the right margin for each rank, in letters that fit its row, and a heading above."""
    points_x, points_y = points_per_unit(axes)
    _, right = axes.get_xlim()
    gaps = [after - before for before, after in pairwise(notes)]
    size = min(size, min(gaps, default=1) * points_y)
    labels = Labels(chart.TEXT_GREY)
    for rank, note in notes.items():
        labels.add(right + (5 + text_width(note, size) / 2) / points_x, rank, note, size)
    axes.add_artist(labels)
    look: dict[str, Any] = {
        "xycoords": "axes fraction",
        "textcoords": "offset points",
        "color": chart.TEXT_GREY,
    }
    axes.annotate(heading, (1, 1), xytext=(5, 4), size=SMALL, **look)


def draw_key(
    axes: Axes,
    kinds: Collection[str],
    has_idle: bool,
    n_chunks: int = 1,
    lines: Sequence[Line2D] = (),
) -> None:
    """Name every colour in use, the foot of a rank's later chunks, and lines, on the line of the axis label."""
    handles: list[Patch | Line2D] = [
        Patch(
            facecolor=look.colour,
            hatch=look.hatch,
            edgecolor="white",
            label=f"{kind}  {KINDS[kind]}",
        )
        for kind, look in LOOKS.items()
        if kind in kinds
    ]
    if has_idle:
        handles.append(Patch(facecolor=chart.IDLE_GREY, label="idle"))
    if n_chunks > 1:
        label = "2nd chunk" if n_chunks == 2 else "later chunk"
        handles.append(Patch(facecolor=chart.TEXT_GREY, label=label))
    if handles or lines:
        add_legend(axes, [*handles, *lines])


def _draw_far_messages(axes: Axes, tl: Timeline, scale: float) -> list[Line2D]:
    """Draw a line for each message that skips stages, from its maker to its reader; return entries for a key."""
    ways: dict[str, list[list[tuple[float, float]]]] = {}
    for what, start, end in _far_messages(tl):
        way = [
            (float(start.end) * scale, float(start.rank)),
            (float(end.start) * scale, float(end.rank)),
        ]
        ways.setdefault(what, []).append(way)
    for what, drawn in ways.items():
        lines = LineCollection(
            drawn, linestyles=[_LINES[what][1]], colors=[chart.BLACK], linewidths=[1.1], zorder=4
        )
        lines.set_alpha(0.75)
        axes.add_collection(lines, autolim=False)
    return [
        Line2D([], [], color=chart.BLACK, linewidth=1.1, linestyle=style, label=label)
        for what, (label, style) in _LINES.items()
        if what in ways
    ]


def _told_far_messages(tl: Timeline) -> str:
    """Return a sentence on the edges and their messages, with a blank before it; nothing without edges."""
    n = {kind: sum(what == kind for what, _, _ in _far_messages(tl)) for kind in _LINES}
    told = ""
    if tl.edges:
        told += (
            f" Lines show {spelled(tl.edges)}: {n['value']} messages forward, {n['value gradient']}"
            " back."
        )
    if n["token"]:
        told += f" Lines show {n['token']} tokens on their way from the last stage to the first."
    return told


def _far_messages(tl: Timeline) -> Iterator[tuple[str, Span, Span]]:
    """Yield what crosses edges between ranks, once for each rank, with the spans that make it and first need it."""
    if not tl.edges and not tl.feedback:
        return
    places = {
        ("F" if part.kind == "F" else "B", part.stage, part.microbatch): span
        for span in tl.spans
        for part in span.action.parts
        if part.kind in "FBI"
    }
    for i in sorted({action.microbatch for action in tl.actions}):
        for edge in tl.edges:
            seen: set[int] = set()
            for reader in edge.readers:
                made, read = places.get(("F", edge.writer, i)), places.get(("F", reader, i))
                if made is None or read is None or read.rank in seen | {made.rank}:
                    continue
                seen.add(read.rank)
                yield "value", made, read
                back, taken = places.get(("B", reader, i)), places.get(("B", edge.writer, i))
                if back is not None and taken is not None:
                    yield "value gradient", back, taken
        made, read = places.get(("F", tl.n_stages - 1, i)), places.get(("F", 0, i + tl.feedback))
        if tl.feedback and made is not None and read is not None and made.rank != read.rank:
            yield "token", made, read
