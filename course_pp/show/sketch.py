"""A sheet for concepts, measured in inches: boxes, arrows and words, with the finding as title."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Patch, Rectangle
from matplotlib.path import Path

from course_pp.show import chart
from course_pp.show.chart import WIDTH, ChartFigure

Point = tuple[float, float]

TITLE, WORDS, SMALL, LEAST = 11.5, 9.0, 8.0, 7.0
"""Sizes of letters in points: a title, words, notes, and the least that can be read."""
MARGIN = 0.15
_POINTS_PER_INCH = 72
_LINE = 1.35  # height of a line of text over the size of its letters
_PADDING = 0.04

# Fill and ink. Masataka Okabe and Kei Ito's colours in an order in which neighbours differ in
# lightness.
SERIES = (
    (chart.SKY_BLUE, "black"),
    (chart.VERMILION, "black"),
    (chart.YELLOW, "black"),
    (chart.BLUE, "white"),
    (chart.ORANGE, "black"),
    (chart.GREEN, "black"),
    (chart.PURPLE, "black"),
)
HATCHES = ("", "////", "....", "\\\\\\\\")


def width_of(text: str, size: float = WORDS) -> float:
    """Return the inches that the longest line of ``text`` takes."""
    return max(chart.text_width(line, size) for line in text.split("\n")) / _POINTS_PER_INCH


def height_of(text: str, size: float = WORDS) -> float:
    """Return the inches that the lines of ``text`` take."""
    return _LINE * size * (text.count("\n") + 1) / _POINTS_PER_INCH


def wrapped(text: str, width: float, size: float = WORDS) -> str:
    """Return ``text`` broken at spaces into lines of at most ``width`` inches."""
    lines = [""]
    for word in text.split(" "):
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and width_of(longer, size) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return "\n".join(lines)


def fitting_size(
    text: str, width: float, height: float, sizes: Sequence[float] = (WORDS, SMALL, LEAST)
) -> float:
    """Return the largest of ``sizes`` in which ``text`` fits a box, in inches; 0 if none does."""
    for size in sizes:
        if width_of(text, size) <= width - 2 * _PADDING and height_of(text, size) <= height:
            return size
    return 0.0


class Pen:
    """Draws on axes that measure inches from their upper left corner."""

    def __init__(self, axes: Axes, width: float, height: float) -> None:
        self._axes = axes
        axes.set_xlim(0, width)
        axes.set_ylim(height, 0)
        axes.set_axis_off()

    def box(
        self,
        corner: Point,
        size: Point,
        text: str = "",
        *,
        fill: str = "white",
        ink: str = "black",
        edge: str = chart.TEXT_GREY,
        hatch: str = "",
        line: float = 1.0,
        dashed: bool = False,
        rounded: bool = False,
        bold: bool = False,
        sizes: Sequence[float] = (WORDS, SMALL, LEAST),
        zorder: float = 2,
    ) -> bool:
        """Draw a rectangle from its upper left ``corner``, with ``text`` in its middle.

        A text that does not fit is left out. Returns whether it fits.
        """
        x, y = corner
        width, height = size
        style: dict[str, Any] = {
            "facecolor": fill,
            "edgecolor": edge,
            "linewidth": line,
            "linestyle": (0, (4, 2.5)) if dashed else "-",
            "hatch": hatch or None,
            "hatchcolor": "#FFFFFF90",
            "zorder": zorder,
            "clip_on": False,
        }
        patch: Patch
        if rounded:
            corners = "round,pad=0,rounding_size=0.08"
            patch = FancyBboxPatch((x, y), width, height, boxstyle=corners, **style)
        else:
            patch = Rectangle((x, y), width, height, **style)
        self._axes.add_artist(patch)

        points = fitting_size(text, width, height, sizes=sizes) if text else 0.0
        if not points:
            return False
        middle = (x + width / 2, y + height / 2)
        # The box's colour under the letters keeps the hatch away from them.
        behind = {"facecolor": fill, "edgecolor": "none", "pad": 0.6} if hatch else None
        self._write(
            middle,
            text,
            size=points,
            align="center",
            ink=ink,
            bold=bold,
            behind=behind,
            zorder=zorder + 0.5,
        )
        return True

    def box_with_first_fitting(
        self, corner: Point, size: Point, forms: Sequence[str], **look: Any
    ) -> None:
        """Draw a box with the first of ``forms`` that fits."""
        for text in forms:
            if self.box(corner, size, text, **look):
                return

    def text(
        self,
        place: Point,
        text: str,
        size: float = WORDS,
        *,
        align: str = "left",
        ink: str = "black",
        bold: bool = False,
        on_white: bool = False,
        zorder: float = 5,
    ) -> None:
        """Write words at ``place``: their vertical middle, and left end, middle or right end."""
        behind = {"facecolor": "white", "edgecolor": "none", "pad": 1.2} if on_white else None
        self._write(
            place, text, size=size, align=align, ink=ink, bold=bold, behind=behind, zorder=zorder
        )

    def _write(
        self,
        place: Point,
        text: str,
        *,
        size: float,
        align: str,
        ink: str,
        bold: bool,
        behind: dict[str, Any] | None,
        zorder: float,
    ) -> None:
        self._axes.text(
            *place,
            text,
            size=size,
            ha=align,
            # The middle of one line is that of its capitals; several lines have a box.
            va="center" if "\n" in text else "center_baseline",
            color=ink,
            weight="bold" if bold else "normal",
            bbox=behind,
            zorder=zorder,
            linespacing=1.2,
        )

    def arrow(
        self,
        *points: Point,
        ink: str = "black",
        line: float = 1.4,
        dashed: bool = False,
        bend: float = 0.0,
        head: float = 10,
        zorder: float = 4,
    ) -> None:
        """Draw an arrow through ``points``.

        Between two points it may ``bend``, to the left of its way if positive.
        """
        style: dict[str, Any] = {
            "arrowstyle": "-|>" if head else "-",
            "mutation_scale": head or 1,
            "linewidth": line,
            "linestyle": (0, (3.5, 2)) if dashed else "-",
            "color": ink,
            "shrinkA": 0,
            "shrinkB": 0,
            "zorder": zorder,
            "joinstyle": "miter",
            "clip_on": False,
        }
        if len(points) == 2:
            patch = FancyArrowPatch(*points, connectionstyle=f"arc3,rad={bend}", **style)
        else:
            patch = FancyArrowPatch(path=Path(list(points)), **style)
        self._axes.add_artist(patch)

    def line(
        self,
        *points: Point,
        ink: str = chart.TEXT_GREY,
        line: float = 1.0,
        dashed: bool = False,
        zorder: float = 1,
    ) -> None:
        """Draw a line through ``points``, without a head."""
        self.arrow(*points, ink=ink, line=line, dashed=dashed, head=0, zorder=zorder)


class Sketch(Pen):
    """A drawing of ``width × height`` inches between a title and a note.

    :meth:`finish` gives its figure alt text.
    """

    def __init__(self, width: float, height: float, title: str, note: str = "") -> None:
        # A title may be wider than the drawing; a wide title breaks into lines of up to 7.5 inches.
        wanted = max(width + 2 * MARGIN, min(7.5, width_of(title, TITLE) + 2 * MARGIN + 0.1))
        sheet = max(width + 2 * MARGIN, min(WIDTH, wanted))
        words = wrapped(title, sheet - 2 * MARGIN - 0.1, TITLE)
        small = wrapped(note, sheet - 2 * MARGIN, SMALL)
        top = 0.28 + height_of(words, TITLE)
        bottom = MARGIN
        if note:
            bottom += height_of(small, SMALL) + 0.08

        self.figure = ChartFigure(sheet, top + height + bottom)
        right = sheet - MARGIN - width
        axes = self.figure.axes_with_margins(left=MARGIN, right=right, bottom=bottom, top=top)
        super().__init__(axes, width, height)
        left = MARGIN / sheet
        title_top = 1 - 0.14 / self.figure.get_figheight()
        note_bottom = 0.1 / self.figure.get_figheight()
        self.figure.text(left, title_top, words, size=TITLE, va="top", linespacing=1.2)
        look: dict[str, Any] = {"size": SMALL, "color": chart.TEXT_GREY, "linespacing": 1.2}
        self.figure.text(left, note_bottom, small, va="bottom", **look)

    def finish(self, alt_text: str) -> ChartFigure:
        """Return the figure, with a description for readers who do not see it."""
        self.figure.alt_text = alt_text
        return self.figure
