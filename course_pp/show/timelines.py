"""A timeline as a chart: one row a rank, one box an action, labels where they fit, idle time grey.

:func:`timeline` draws one. Other figures with rows (chains, comparisons, memory, versions) use its
parts.
"""

from collections import Counter, defaultdict
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
    name_of_part,
    named,
    percent,
    spelled_peaks,
)

ROW_FILL = 0.86
_LABEL_SIZES = (8.5, 7.0, 6.0)
_LABEL_PADDING = 1.6
# The dark foot of a rank's second chunk and of its last one, at most, in rows.
_FOOT = 0.11
_ALL_FEET = 0.22


@dataclass(frozen=True)
class BarStyle:
    """The look of a kind of action.

    Light and dark alternate, so grey scale tells F from B, and I from W.
    """

    colour: str
    hatch: str = ""


LOOKS = {
    "F": BarStyle(chart.SKY_BLUE),
    "B": BarStyle(chart.VERMILION),
    "I": BarStyle(chart.ORANGE, hatch="...."),
    "W": BarStyle(chart.GREEN, hatch="////"),
    "U": BarStyle(chart.YELLOW, hatch="xxxx"),
}
# The entry in the key and the dashes of each message that skips stages.
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
    kinds = {box.action.kind for box in boxes}
    draw_key(axes, kinds, has_idle=tl.bubble_fraction > 0, n_chunks=n_chunks, lines=lines)

    # Forwards alone hold nothing: nothing waits for a backward, as in generation.
    held = f"peak activations held: {spelled_peaks(tl.peak_activations)}"
    if kinds == {"F"}:
        held = "forwards only"
    if any(tl.peak_values):
        held += f"; values of edges held: {spelled_peaks(tl.peak_values)}"
    subject = "Measured timeline" if tl.measured else "Timeline"
    what = named(tl.name, f"{subject}, one row a rank")
    found = finding(tl)
    return figure.finish(axes, title, found, f"{what}. {found}; {held}.{_told_far_messages(tl)}")


def begin(
    tl: Timeline, heights: tuple[float, float, float], right: float
) -> tuple[ChartFigure, Axes, float, str]:
    """Begin a figure with a row a rank over the length of ``tl``.

    Returns the figure, its axes, the factor to the unit of the time axis, and that unit.

    Args:
        heights: inches of a row at least, at most, and of all rows together between these bounds.
        right: inches of the right margin.
    """
    least, most, together = heights
    row_height = min(most, max(least, together / tl.n_ranks))
    figure = ChartFigure(WIDTH, 1.15 + tl.n_ranks * row_height)
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

    Args:
        scale: the factor from times to the unit of the axis.
        offset: the rows that all boxes are moved down by.
        fill: the height of a box in rows.
    """
    boxes = []
    for span in tl.spans:
        left = float(span.start) * scale
        right = float(span.end) * scale
        first = span.rank + offset - fill / 2
        parts = span.action.parts
        for i, part in enumerate(parts):
            bottom = first + i * fill / len(parts)
            top = first + (i + 1) * fill / len(parts)
            boxes.append(Box(part, left, right, bottom, top))
    return boxes


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
    """Draw each kind in its colour and hatch, as one path: hundreds of boxes then cost one."""
    points_x, points_y = points_per_unit(axes)
    for kind, look in LOOKS.items():
        mine = [box for box in boxes if box.action.kind == kind]
        if not mine:
            continue

        # A full gap between boxes of two points would leave nothing of them. White lines instead
        # would take longer.
        widths = sorted(points_x * (box.right - box.left) for box in mine)
        gap = min(0.9, 0.15 * widths[len(widths) // 2]) / 2
        corners = []
        for box in mine:
            gap_x = min(gap / points_x, (box.right - box.left) / 4)
            corners.append(box.corners(gap_x, gap / points_y))

        more: dict[str, Any] = {"hatch": look.hatch or None, "hatchcolor": "#FFFFFF66"}
        more["alpha"] = alpha if alpha < 1 else None
        # Snapped to pixels, narrow gaps would come and go.
        _draw_path(axes, corners, look.colour, snap=False, **more)


def _draw_path(
    axes: Axes, polygons: Sequence[Sequence[tuple[float, float]]], colour: str, **more: object
) -> None:
    """Draw polygons of equally many corners as one path."""
    path = Path.make_compound_path_from_polys(np.array(polygons))
    patch = PathPatch(path, **{"facecolor": colour, "edgecolor": "none", "linewidth": 0, **more})
    # add_patch would walk along every edge to find limits, which are set already.
    axes.add_artist(patch)


def _draw_feet(axes: Axes, tl: Timeline, boxes: Collection[Box]) -> int:
    """Give each box a dark foot as high as its chunk's number on the rank.

    Returns the most chunks of a rank.
    """
    chunk_of: dict[int, int] = {}
    for row in tl.by_rank:
        held = {part.stage for span in row for part in span.action.parts}
        for chunk, stage in enumerate(sorted(held)):
            chunk_of[stage] = chunk

    step = min(_FOOT, _ALL_FEET / max([1, *chunk_of.values()]))
    feet = []
    for box in boxes:
        chunk = chunk_of[box.action.stage]
        if chunk:
            feet.append(rectangle(box.left, box.right, box.top - step * chunk, box.top))
    if feet:
        _draw_path(axes, feet, chart.TEXT_GREY, edgecolor="white", linewidth=0.4, zorder=1.5)
    return 1 + max(chunk_of.values(), default=0)


Placed = tuple[str, float, float, float]
"""A label: text, size in points, x and y."""


class Labels(Artist):
    """Short texts, each centred on a point in data coordinates.

    Hundreds of them cost the time of a few Text objects.
    """

    def __init__(self, colour: str = chart.BLACK) -> None:
        super().__init__()
        self.set_zorder(3)
        self._colour = to_rgb(colour)
        self._points: defaultdict[tuple[str, float], list[tuple[float, float]]] = defaultdict(list)

    def add(self, x: float, y: float, text: str, size: float) -> None:
        self._points[text, size].append((x, y))

    @property
    def placed(self) -> list[Placed]:
        found = []
        for (text, size), points in self._points.items():
            found += [(text, size, x, y) for x, y in points]
        return found

    def draw(self, renderer: RendererBase) -> None:
        """Draw glyphs that are rasterised once and copied. Other renderers, as SVG's, draw text."""
        if self.axes is None or not self.get_visible():
            return
        graphics = renderer.new_gc()
        graphics.set_linewidth(0)
        graphics.set_foreground(self._colour)
        pixels = float(np.asarray(renderer.points_to_pixels(1)))
        to_pixels = Affine2D().scale(pixels)
        _, height = renderer.get_canvas_width_height()
        for (text, size), points in self._points.items():
            if isinstance(renderer, RendererAgg):
                outline = _glyphs(text, size)
                renderer.draw_markers(
                    graphics, outline, to_pixels, Path(points), self.axes.transData, self._colour
                )
                continue
            half_width = pixels * text_width(text, size) / 2
            half_height = pixels * _digit_height(size) / 2
            font = FontProperties(size=size)
            for x, y in self.axes.transData.transform(points):
                baseline = y - half_height
                if renderer.flipy():
                    baseline = height - baseline
                renderer.draw_text(graphics, x - half_width, baseline, text, font, 0)
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
    """Label the boxes that have room.

    Boxes of one size are labelled alike, because the widest letter and number decide about room.
    """
    boxes = list(boxes)
    points_x, points_y = points_per_unit(axes)
    digits = "0" * len(str(max((box.action.microbatch for box in boxes), default=0)))
    kinds = {box.action.kind for box in boxes}
    widest = max(sorted(kinds), key=lambda kind: text_width(kind, 10), default="")

    # A full name in the smallest letters is read by nobody; the number alone has room for larger
    # ones.
    forms = [(True, size) for size in _LABEL_SIZES[:-1]]
    forms += [(False, size) for size in _LABEL_SIZES]

    @cache
    def fitting(width: float, height: float, stage: str) -> tuple[bool, float] | None:
        """Return whether stage and kind have room, and the size of the letters.

        None if the number alone has no room.
        """
        room = points_x * width - _LABEL_PADDING
        for is_full, size in forms:
            text = stage + widest + digits if is_full else digits
            if size <= points_y * height and text_width(text, size) <= room:
                return is_full, size
        return None

    labels = Labels()
    on_hatch = defaultdict[str, list[Placed]](list)
    for box in boxes:
        stage = str(box.action.stage) if with_stage else ""
        # Rounded, so that boxes of one cost count as equal.
        fit = fitting(round(box.right - box.left, 9), round(box.top - box.bottom, 9), stage)
        if fit is None:
            continue
        is_full, size = fit
        text = str(box.action.microbatch)
        if is_full:
            text = name_of_part(box.action, with_stage)
        x = (box.left + box.right) / 2
        y = (box.bottom + box.top) / 2
        labels.add(x, y, text, size)
        look = LOOKS[box.action.kind]
        if look.hatch:
            on_hatch[look.colour].append((text, size, x, y))
    back_labels(axes, on_hatch)
    axes.add_artist(labels)


def back_labels(axes: Axes, placed: Mapping[str, Collection[Placed]]) -> None:
    """Lay a patch under each label, by the colour of its hatched box.

    No line of the hatch then runs through its letters.
    """
    points_x, points_y = points_per_unit(axes)
    for colour, labels in placed.items():
        patches = []
        for text, size, x, y in labels:
            wide = (text_width(text, size) / 2 + 1) / points_x
            high = (_digit_height(size) / 2 + 1) / points_y
            patches.append(rectangle(x - wide, x + wide, y - high, y + high))
        _draw_path(axes, patches, colour, zorder=1.2)


def name_ranks(axes: Axes, n_ranks: int, gap: float = 5) -> range:
    """Name the rows, every fourth where they are thin, ``gap`` points from the axes.

    Returns the ranks with a name.
    """
    points_x, points_y = points_per_unit(axes)
    every = 1 if points_y >= 9 else 4
    ranks = range(0, n_ranks, every)
    size = min(9, every * points_y)

    # Tick labels would be a third of the time that the panel has for a picture.
    names = Labels()
    for rank in ranks:
        name = f"rank {rank}"
        middle = axes.get_xlim()[0] - (gap + text_width(name, size) / 2) / points_x
        names.add(middle, rank, name, size)
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
    """Write a note beside each rank, in letters that fit its row, and a heading above."""
    points_x, points_y = points_per_unit(axes)
    _, right = axes.get_xlim()
    gaps = [after - before for before, after in pairwise(notes)]
    size = min(size, min(gaps, default=1) * points_y)
    labels = Labels(chart.TEXT_GREY)
    for rank, note in notes.items():
        labels.add(right + (5 + text_width(note, size) / 2) / points_x, rank, note, size)
    axes.add_artist(labels)
    axes.annotate(
        heading,
        (1, 1),
        xytext=(5, 4),
        size=SMALL,
        xycoords="axes fraction",
        textcoords="offset points",
        color=chart.TEXT_GREY,
    )


def draw_key(
    axes: Axes,
    kinds: Collection[str],
    has_idle: bool,
    n_chunks: int = 1,
    lines: Sequence[Line2D] = (),
) -> None:
    """Name every colour in use, the foot of later chunks, and lines, beside the axis label."""
    handles: list[Patch | Line2D] = []
    for kind, look in LOOKS.items():
        if kind in kinds:
            label = f"{kind}  {KINDS[kind]}"
            patch = Patch(facecolor=look.colour, hatch=look.hatch, edgecolor="white", label=label)
            handles.append(patch)
    if has_idle:
        handles.append(Patch(facecolor=chart.IDLE_GREY, label="idle"))
    if n_chunks > 1:
        label = "2nd chunk" if n_chunks == 2 else "later chunk"
        handles.append(Patch(facecolor=chart.TEXT_GREY, label=label))
    if handles or lines:
        add_legend(axes, [*handles, *lines])


def _draw_far_messages(axes: Axes, tl: Timeline, scale: float) -> list[Line2D]:
    """Draw a line for each message that skips stages; return entries for a key."""
    ways = defaultdict[str, list[list[tuple[float, float]]]](list)
    for what, maker, reader in _far_messages(tl):
        start = (float(maker.end) * scale, float(maker.rank))
        end = (float(reader.start) * scale, float(reader.rank))
        ways[what].append([start, end])
    for what, drawn in ways.items():
        _, style = _LINES[what]
        lines = LineCollection(
            drawn, linestyles=[style], colors=[chart.BLACK], linewidths=[1.1], zorder=4
        )
        lines.set_alpha(0.75)
        axes.add_collection(lines, autolim=False)

    handles = []
    for what, (label, style) in _LINES.items():
        if what in ways:
            line = Line2D([], [], color=chart.BLACK, linewidth=1.1, linestyle=style, label=label)
            handles.append(line)
    return handles


def _told_far_messages(tl: Timeline) -> str:
    """Return a sentence on the edges and their messages, with a blank before it, or nothing."""
    n = Counter(what for what, _, _ in _far_messages(tl))
    told = ""
    if tl.edges:
        there_and_back = f"{n['value']} messages forward, {n['value gradient']} back"
        told += f" Lines show {spelled(tl.edges)}: {there_and_back}."
    if n["token"]:
        told += f" Lines show {n['token']} tokens on their way from the last stage to the first."
    return told


def _far_messages(tl: Timeline) -> Iterator[tuple[str, Span, Span]]:
    """Yield each message over an edge, with its maker and with the first reader on its rank."""
    if not tl.edges and not tl.feedback:
        return
    places: dict[tuple[str, int, int], Span] = {}
    for span in tl.spans:
        for part in span.action.parts:
            if part.kind in "FBI":
                kind = "F" if part.kind == "F" else "B"
                places[kind, part.stage, part.microbatch] = span

    for i in sorted({action.microbatch for action in tl.actions}):
        for edge in tl.edges:
            made = places.get(("F", edge.writer, i))
            seen: set[int] = set()
            for reader in edge.readers:
                read = places.get(("F", reader, i))
                if made is None or read is None or read.rank in seen | {made.rank}:
                    continue
                seen.add(read.rank)
                yield "value", made, read
                back = places.get(("B", reader, i))
                taken = places.get(("B", edge.writer, i))
                if back is not None and taken is not None:
                    yield "value gradient", back, taken
        # In generation, microbatch i + feedback of the first stage reads the token of microbatch i.
        made = places.get(("F", tl.n_stages - 1, i))
        read = places.get(("F", 0, i + tl.feedback))
        if tl.feedback and made is not None and read is not None and made.rank != read.rank:
            yield "token", made, read
