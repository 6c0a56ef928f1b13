"""The boxes of a timeline: one row a rank, one box an action, labels where they fit."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backend_bases import RendererBase
from matplotlib.backends.backend_agg import RendererAgg
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path
from matplotlib.textpath import TextPath
from matplotlib.transforms import Affine2D

from course_pp.schedule import KINDS, Action, Timeline
from course_pp.show import chart
from course_pp.show.chart import WIDTH, ChartFigure

ROW_FILL = 0.86
_LABEL_SIZES = (8.5, 7.0, 6.0)
_LABEL_PADDING = 1.6
_FOOT, _ALL_FEET = 0.11, 0.22  # of a row: one step at most, and the highest


def begin(tl: Timeline, heights: tuple[float, float, float], right: float) -> tuple[ChartFigure, Axes, float, str]:
    """Begin a figure with a row a rank over the length of ``tl``; return it, and the factor to the unit of its axis.

    Args:
        heights: of a row at least, at most, and of all rows together between these bounds, in inches.
        right: margin in inches.
    """
    least, most, together = heights
    figure = ChartFigure(WIDTH, 1.15 + tl.n_ranks * min(most, max(least, together / tl.n_ranks)))
    axes = figure.axes_with_margins(left=0.75, right=right, bottom=0.68, top=0.47)
    scale, unit = axis_unit(tl)
    axes.set_xlim(0, float(tl.makespan) * scale or 1)
    axes.set_ylim(tl.n_ranks - 0.5, -0.5)
    return figure, axes, scale, unit


@dataclass(frozen=True)
class Look:
    """How a kind of action is drawn. Light and dark alternate, so grey scale tells F from B, and I from W."""

    colour: str
    hatch: str = ""


LOOKS = {
    "F": Look(chart.SKY_BLUE),
    "B": Look(chart.VERMILION),
    "I": Look(chart.ORANGE, hatch="...."),
    "W": Look(chart.GREEN, hatch="////"),
    "U": Look(chart.YELLOW, hatch="xxxx"),
}


@dataclass(frozen=True)
class Box:
    """One action to draw: left and right in the axis's unit, bottom and top in rows."""

    action: Action
    left: float
    right: float
    bottom: float
    top: float


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
        """Write ``text`` in ``size`` points, centred on x and y."""
        self._points[text, size].append((x, y))

    @property
    def placed(self) -> list[Placed]:
        """Text, size, x and y of each label."""
        return [(text, size, x, y) for (text, size), points in self._points.items() for x, y in points]

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
                renderer.draw_markers(graphics, outline, to_pixels, places, self.axes.transData, self._colour)
                continue
            half_width, half_height = pixels * chart.text_width(text, size) / 2, pixels * _digit_height(size) / 2
            _, height = renderer.get_canvas_width_height()
            for x, y in self.axes.transData.transform(points):
                baseline = y - half_height
                baseline = height - baseline if renderer.flipy() else baseline
                renderer.draw_text(graphics, x - half_width, baseline, text, FontProperties(size=size), 0)
        graphics.restore()


@cache
def _glyphs(text: str, size: float) -> Path:
    """Return the outlines of ``text`` in points, centred on the origin."""
    outline = TextPath((-chart.text_width(text, size) / 2, -_digit_height(size) / 2), text, size=size)
    return Path(outline.vertices, outline.codes)


@cache
def _digit_height(size: float) -> float:
    return float(TextPath((0, 0), "0", size=size).get_extents().height)


def boxes_of(tl: Timeline, scale: float = 1.0, offset: float = 0.0, fill: float = ROW_FILL) -> list[Box]:
    """Return one box an action; an overlapped pair shares its span, forward above backward.

    Args:
        scale: units of the axis for one unit of the timeline.
        offset: rows that the boxes are moved down.
        fill: height of a box in rows.
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


def draw_idle(axes: Axes, n_ranks: int, end: float, offset: float = 0.0, fill: float = ROW_FILL) -> None:
    """Lay a grey bar under each row, which shows where nothing covers it."""
    bars = [_corners(0, end, rank + offset - fill / 2, rank + offset + fill / 2) for rank in range(n_ranks)]
    axes.add_collection(PolyCollection(bars, facecolors=chart.IDLE_GREY, linewidths=0, zorder=0))


def draw_boxes(axes: Axes, boxes: Collection[Box], alpha: float = 1.0) -> None:
    """Draw each kind in its colour and hatch, as one path: hundreds of boxes then cost what one does."""
    points_x, points_y = chart.points_per_unit(axes)
    for kind, look in LOOKS.items():
        mine = [box for box in boxes if box.action.kind == kind]
        if not mine:
            continue
        widths = sorted(points_x * (box.right - box.left) for box in mine)
        # A full gap between boxes of two points would leave nothing of them. White lines instead would take longer.
        gap = min(0.9, 0.15 * widths[len(widths) // 2])
        corners = np.array([_inner_corners(box, gap / 2 / points_x, gap / 2 / points_y) for box in mine])
        # add_patch would walk along every edge to find data limits, which are set already.
        axes.add_artist(
            PathPatch(
                Path.make_compound_path_from_polys(corners),
                facecolor=look.colour,
                edgecolor="none",
                linewidth=0,
                hatch=look.hatch or None,
                hatchcolor="#FFFFFF66",
                alpha=alpha if alpha < 1 else None,
                snap=False,  # or narrow gaps would come and go
            )
        )


def _inner_corners(box: Box, gap_x: float, gap_y: float) -> list[tuple[float, float]]:
    gap_x = min(gap_x, (box.right - box.left) / 4)
    return _corners(box.left + gap_x, box.right - gap_x, box.bottom + gap_y, box.top - gap_y)


def _corners(left: float, right: float, bottom: float, top: float) -> list[tuple[float, float]]:
    return [(left, bottom), (right, bottom), (right, top), (left, top)]


def draw_feet(axes: Axes, boxes: Collection[Box], chunk_of: Mapping[int, int]) -> None:
    """Give each box a dark foot as high as its chunk's number on the rank, none for the first: colours tell kinds.

    Args:
        chunk_of: for each stage, its number among the stages of its rank, from 0.
    """
    step = min(_FOOT, _ALL_FEET / max([1, *chunk_of.values()]))
    feet = [
        _corners(box.left, box.right, box.top - step * chunk_of[box.action.stage], box.top)
        for box in boxes
        if chunk_of[box.action.stage]
    ]
    if feet:
        path = Path.make_compound_path_from_polys(np.array(feet))
        axes.add_artist(PathPatch(path, facecolor=chart.TEXT_GREY, edgecolor="white", linewidth=0.4, zorder=1.5))


def chunks_of(tl: Timeline) -> dict[int, int]:
    """Return for each stage its number among the stages of its rank, from 0."""
    held = [sorted({part.stage for span in row for part in span.action.parts}) for row in tl.by_rank]
    return {stage: chunk for stages in held for chunk, stage in enumerate(stages)}


def label_boxes(axes: Axes, boxes: Iterable[Box], with_stage: bool) -> None:
    """Label what has room. Boxes of one size are labelled alike: room is judged by the widest letter and number."""
    boxes = list(boxes)
    points_x, points_y = chart.points_per_unit(axes)
    width_of = cache(chart.text_width)
    digits = "0" * len(str(max((box.action.microbatch for box in boxes), default=0)))
    widest = max((box.action.kind for box in boxes), key=lambda kind: width_of(kind, 10), default="")

    @cache
    def fitting(width: float, height: float, stage: str) -> tuple[bool, float] | None:
        """Return whether stage and kind have room, and the size of the letters; None without room for the number."""
        # A full name in the smallest letters is read by nobody; the number alone has room for larger ones.
        for is_full, size in [*((True, size) for size in _LABEL_SIZES[:-1]), *((False, size) for size in _LABEL_SIZES)]:
            room = points_x * width - _LABEL_PADDING
            if size <= points_y * height and width_of(is_full * (stage + widest) + digits, size) <= room:
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
    points_x, points_y = chart.points_per_unit(axes)
    for colour, labels in placed.items():
        patches = []
        for text, size, x, y in labels:
            wide, high = (chart.text_width(text, size) / 2 + 1) / points_x, (_digit_height(size) / 2 + 1) / points_y
            patches.append(_corners(x - wide, x + wide, y - high, y + high))
        path = Path.make_compound_path_from_polys(np.array(patches))
        axes.add_artist(PathPatch(path, facecolor=colour, edgecolor="none", linewidth=0, zorder=1.2))


def has_several_stages_a_rank(tl: Timeline) -> bool:
    """Return whether a label needs the stage, because the row does not tell it."""
    return any(len({part.stage for span in row for part in span.action.parts}) > 1 for row in tl.by_rank)


def axis_unit(tl: Timeline) -> tuple[float, str]:
    """Return the factor from the timeline's times to those of the axis, and the unit to write under it."""
    if tl.unit != "s":
        return 1.0, "relative cost"
    return (1.0, "s") if tl.makespan >= 1 else (1e3, "ms") if tl.makespan >= 1e-3 else (1e6, "µs")


def name_ranks(axes: Axes, n_ranks: int, gap: float = 5) -> range:
    """Name the rows, every fourth where they are thin, ``gap`` points from the axes; returns the ranks with a name."""
    points_x, points_y = chart.points_per_unit(axes)
    every = 1 if points_y >= 9 else 4
    ranks, size = range(0, n_ranks, every), min(9, every * points_y)
    # Tick labels would be a third of the time that the panel has for a picture.
    names = Labels()
    for rank in ranks:
        middle = axes.get_xlim()[0] - (gap + chart.text_width(f"rank {rank}", size) / 2) / points_x
        names.add(middle, rank, f"rank {rank}", size)
    axes.add_artist(names)
    axes.yaxis.set_visible(False)
    axes.spines[["top", "right", "left"]].set_visible(False)
    return ranks


def name_time(axes: Axes, unit: str) -> None:
    """Label the time axis."""
    axes.set_xlabel(f"time ({unit})", loc="left", fontsize=9)
    axes.tick_params(axis="x", labelsize=8.5)


def note_ranks(axes: Axes, notes: Mapping[int, str], heading: str = "", size: float = 8.5) -> None:
    """Write a note in the right margin for each rank, in letters that fit its row, and a heading above."""
    points_x, points_y = chart.points_per_unit(axes)
    _, right = axes.get_xlim()
    gaps = [after - before for before, after in pairwise(notes)]
    size = min(size, min(gaps, default=1) * points_y)
    labels = Labels(chart.TEXT_GREY)
    for rank, note in notes.items():
        labels.add(right + (5 + chart.text_width(note, size) / 2) / points_x, rank, note, size)
    axes.add_artist(labels)
    axes.annotate(
        heading,
        (1, 1),
        xycoords="axes fraction",
        xytext=(5, 4),
        textcoords="offset points",
        size=8.5,
        color=chart.TEXT_GREY,
    )


def draw_key(
    axes: Axes, kinds: Collection[str], has_idle: bool, n_chunks: int = 1, lines: Sequence[Line2D] = ()
) -> None:
    """Name every colour in use, the foot of a rank's later chunks, and lines, on the line of the axis label."""
    handles: list[Patch | Line2D] = [
        Patch(facecolor=look.colour, hatch=look.hatch, edgecolor="white", label=f"{kind}  {KINDS[kind]}")
        for kind, look in LOOKS.items()
        if kind in kinds
    ]
    if has_idle:
        handles.append(Patch(facecolor=chart.IDLE_GREY, label="idle"))
    if n_chunks > 1:
        label = "2nd chunk" if n_chunks == 2 else "later chunk"
        handles.append(Patch(facecolor=chart.TEXT_GREY, label=label))
    handles += lines
    if handles:
        add_legend(axes, handles)


def add_legend(axes: Axes, handles: Sequence[Patch | Line2D]) -> None:
    """A legend in one line, on the right of the axis label."""
    _, height = chart.size_in_inches(axes)
    axes.legend(
        handles=handles,
        ncols=len(handles),
        loc="upper right",
        bbox_to_anchor=(1, -0.27 / height),
        frameon=False,
        fontsize=8.5,
        handlelength=1.3,
        columnspacing=1.1,
        borderaxespad=0,
    )
