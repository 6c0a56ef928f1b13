"""What is wrong with how a figure is laid out: words over each other, out of their box, off the sheet, or too small."""

from collections.abc import Iterator
from itertools import combinations

from matplotlib.axis import Axis
from matplotlib.patches import FancyBboxPatch, Rectangle
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from course_pp.show import chart
from course_pp.show.chart import ChartFigure
from course_pp.show.rows import Labels

LEAST_POINTS = 6.0
_SLACK = 1.5  # pixels of the doubled resolution: letters touch before their boxes do


def flaws(figure: ChartFigure) -> list[str]:
    """One sentence for each flaw; empty for a figure whose words can all be read."""
    figure.draw_without_rendering()
    words = list(_words(figure))
    boxes = [
        patch.get_window_extent()
        for axes in figure.axes
        for patch in axes.findobj(lambda artist: isinstance(artist, Rectangle | FancyBboxPatch))
        if patch is not axes.patch and patch.get_visible()
    ]
    sheet = figure.bbox
    found = []
    for text, size, extent in words:
        if size < LEAST_POINTS:
            found.append(f"{text!r} has letters of {size} points")
        if not (sheet.x0 <= extent.x0 and extent.x1 <= sheet.x1 and sheet.y0 <= extent.y0 and extent.y1 <= sheet.y1):
            found.append(f"{text!r} leaves the sheet")
        around = [box for box in boxes if box.contains((extent.x0 + extent.x1) / 2, (extent.y0 + extent.y1) / 2)]
        if around and not _holds(min(around, key=lambda box: box.width * box.height), extent):
            found.append(f"{text!r} leaves its box")
    for (text, _, one), (other, _, two) in combinations(words, 2):
        if min(one.x1, two.x1) - max(one.x0, two.x0) > _SLACK and min(one.y1, two.y1) - max(one.y0, two.y0) > _SLACK:
            found.append(f"{text!r} and {other!r} overlap")
    return found


def _holds(box: Bbox, words: Bbox) -> bool:
    # Sideways only: the height of a text counts room for letters that it may not have.
    return bool(box.x0 - _SLACK <= words.x0 and words.x1 <= box.x1 + _SLACK)


def _beyond(axis: Axis) -> Iterator[Text]:
    """Labels of ticks that matplotlib keeps ready beyond the ends of an axis, and does not draw."""
    low, high = sorted(axis.get_view_interval())
    for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
        if not low <= tick.get_loc() <= high:
            yield from (tick.label1, tick.label2)


def _words(figure: ChartFigure) -> Iterator[tuple[str, float, Bbox]]:
    """Text, size and extent, in pixels, of all words."""
    hidden = {label for axes in figure.axes for axis in (axes.xaxis, axes.yaxis) for label in _beyond(axis)}
    for text in figure.findobj(Text):
        if text not in hidden and text.get_visible() and text.get_text().strip():
            extent = Text.get_window_extent(text)
            if extent.width:
                yield text.get_text(), float(text.get_fontsize()), extent
    for axes in figure.axes:
        for labels in axes.findobj(Labels):
            for text, size, x, y in labels.placed:
                middle_x, middle_y = axes.transData.transform((x, y))
                wide = chart.text_width(text, size) * figure.dpi / 72
                high = 0.8 * size * figure.dpi / 72
                yield text, size, Bbox.from_bounds(middle_x - wide / 2, middle_y - high / 2, wide, high)
