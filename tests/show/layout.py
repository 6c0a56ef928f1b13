"""Flaws in the layout of a figure: words that overlap, leave their place, or are too small."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
from matplotlib.axis import Axis
from matplotlib.patches import FancyBboxPatch, Rectangle
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from numpy.typing import NDArray

from course_pp.show import chart
from course_pp.show.chart import ChartFigure
from course_pp.show.timelines import Labels

Edges: TypeAlias = NDArray[np.float64]

LEAST_POINTS = 6.0
_SLACK = 1.5  # pixels of the doubled resolution: letters touch before their boxes do


def flaws(figure: ChartFigure) -> list[str]:
    """One sentence for each flaw; empty for a figure whose words can all be read."""
    figure.draw_without_rendering()
    words = list(_words(figure))
    extents = []
    for axes in figure.axes:
        for patch in axes.findobj(lambda artist: isinstance(artist, Rectangle | FancyBboxPatch)):
            if patch is not axes.patch and patch.get_visible():
                extents.append(patch.get_window_extent())
    boxes = _edges(extents)

    found = []
    for text, size, extent in words:
        if size < LEAST_POINTS:
            found.append(f"{text!r} has letters of {size} points")
        if not _contains(figure.bbox, extent):
            found.append(f"{text!r} leaves the sheet")
        if _leaves_its_box(extent, boxes):
            found.append(f"{text!r} leaves its box")
    for one, other in _overlaps(words):
        found.append(f"{words[one][0]!r} and {words[other][0]!r} overlap")
    return found


def _contains(outer: Bbox, inner: Bbox) -> bool:
    across = outer.x0 <= inner.x0 and inner.x1 <= outer.x1
    return across and outer.y0 <= inner.y0 and inner.y1 <= outer.y1


def _edges(extents: Iterable[Bbox]) -> Edges:
    """A row for each: left, bottom, right and top."""
    return np.array([extent.extents for extent in extents]).reshape(-1, 4)


def _leaves_its_box(words: Bbox, boxes: Edges) -> bool:
    """Whether words are wider than the smallest box that has their middle.

    Sideways only: the height of a text counts room for letters that it may not have.
    """
    x, y = (words.x0 + words.x1) / 2, (words.y0 + words.y1) / 2
    left, bottom, right, top = boxes.T
    around = boxes[(left <= x) & (x <= right) & (bottom <= y) & (y <= top)]
    if not len(around):
        return False
    sides = around[:, 2:] - around[:, :2]
    left, _, right, _ = around[np.argmin(sides[:, 0] * sides[:, 1])]
    return bool(words.x0 < left - _SLACK or right + _SLACK < words.x1)


def _overlaps(words: Sequence[tuple[str, float, Bbox]]) -> NDArray[np.intp]:
    """A row for each two words that lie over each other: their numbers."""
    left, bottom, right, top = _edges(extent for *_, extent in words).T
    wide = np.minimum.outer(right, right) - np.maximum.outer(left, left)
    high = np.minimum.outer(top, top) - np.maximum.outer(bottom, bottom)
    return np.argwhere(np.triu((wide > _SLACK) & (high > _SLACK), k=1))


def _beyond(axis: Axis) -> Iterator[Text]:
    """Labels of ticks that matplotlib keeps ready beyond the ends of an axis, and does not draw."""
    low, high = sorted(axis.get_view_interval())
    for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
        if not low <= tick.get_loc() <= high:
            yield from (tick.label1, tick.label2)


def _words(figure: ChartFigure) -> Iterator[tuple[str, float, Bbox]]:
    """Text, size and extent, in pixels, of all words."""
    hidden: set[Text] = set()
    for axes in figure.axes:
        hidden.update(_beyond(axes.xaxis), _beyond(axes.yaxis))
    for text in figure.findobj(Text):
        if text not in hidden and text.get_visible() and text.get_text().strip():
            extent = Text.get_window_extent(text)
            if extent.width:
                yield text.get_text(), float(text.get_fontsize()), extent

    pixels = figure.dpi / 72
    for axes in figure.axes:
        for labels in axes.findobj(Labels):
            for text, size, x, y in labels.placed:
                middle_x, middle_y = axes.transData.transform((x, y))
                wide = chart.text_width(text, size) * pixels
                high = 0.8 * size * pixels
                corner = (middle_x - wide / 2, middle_y - high / 2)
                yield text, size, Bbox.from_bounds(*corner, wide, high)
