"""A matplotlib figure with its finding in words."""

from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any, Self
from xml.sax.saxutils import escape

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.textpath import text_to_path
from PIL import Image

# Masataka Okabe and Kei Ito, "Color Universal Design", 2008: told apart under every common colour
# blindness.
BLACK = "#000000"
ORANGE = "#E69F00"
SKY_BLUE = "#56B4E9"
GREEN = "#009E73"
YELLOW = "#F0E442"
BLUE = "#0072B2"
VERMILION = "#D55E00"
PURPLE = "#CC79A7"
IDLE_GREY = "#ECECEC"
TEXT_GREY = "#444444"

WIDTH = 9.5
SMALL = 8.5  # points: of letters beside a chart
POINTS_PER_INCH = 72
_DOTS_PER_INCH = 96
# Twice the pixels for sharp screens; the notebook is told the size in single ones.
_SHARPNESS = 2
# Flat colours and grey text fit a small palette, which makes the picture a third of the size.
_PALETTE_SIZE = 128


class ChartFigure(Figure):
    """A figure of ``width × height`` inches with :attr:`alt_text`, free of pyplot's global state.

    A notebook gets it as PNG, with the alt text in the output's metadata and as the plain-text
    form.
    """

    def __init__(self, width: float, height: float) -> None:
        super().__init__(figsize=(width, height), dpi=_SHARPNESS * _DOTS_PER_INCH)
        FigureCanvasAgg(self)
        self.alt_text = ""

    def axes_with_margins(self, left: float, right: float, bottom: float, top: float) -> Axes:
        """Return axes that leave margins of so many inches."""
        # Fixed margins spare a second drawing, which would only measure the words.
        width, height = self.get_size_inches()
        corner = (left / width, bottom / height)
        size = ((width - left - right) / width, (height - top - bottom) / height)
        return self.add_axes((*corner, *size))

    def png(self, quick: bool = False) -> bytes:
        """Return the figure as PNG, at twice its size, in a reduced palette.

        ``quick`` gives a larger file sooner.
        """
        canvas = FigureCanvasAgg(self)
        canvas.draw()
        drawn = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
        small = drawn.quantize(
            _PALETTE_SIZE, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE
        )
        data = BytesIO()
        small.save(data, format="png", compress_level=1 if quick else 6)
        return data.getvalue()

    def svg(self) -> str:
        """Return the figure as SVG: text stays text, alt text is title and description.

        The bytes are the same in every process.
        """
        text = BytesIO()
        with matplotlib.rc_context({"svg.hashsalt": "course_pp", "svg.fonttype": "none"}):
            self.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
        head, tag, rest = text.getvalue().decode().partition("<svg ")
        attributes, close, body = rest.partition(">")
        alt = escape(self.alt_text)
        described = f'role="img" {attributes}{close}\n <title>{alt}</title>\n <desc>{alt}</desc>'
        return head + tag + described + body

    def finish(
        self,
        axes: Axes,
        title: str | None,
        finding: str,
        alt_text: str,
        pad: float = 9,
        x: float = 0,
    ) -> Self:
        """Head ``axes`` with ``title``, or else with the finding; return the figure, described."""
        heading = finding if title is None else title
        axes.set_title(heading, loc="left", fontsize=11.5, pad=pad, x=x)
        self.alt_text = alt_text
        return self

    def save(self, path: str | Path) -> Path:
        """Write ``.png`` or ``.svg``, by the ending of ``path``; ValueError for another ending."""
        path = Path(path)
        ending = path.suffix.lower()
        if ending == ".png":
            path.write_bytes(self.png())
        elif ending == ".svg":
            path.write_text(self.svg(), encoding="utf-8")
        else:
            raise ValueError(f"cannot save a figure as {path.name!r}: end the name in .png or .svg")
        return path

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict, dict]:
        width, height = (round(inches * _DOTS_PER_INCH) for inches in self.get_size_inches())
        data = {"image/png": self.png(), "text/plain": self.alt_text}
        return data, {"image/png": {"alt": self.alt_text, "width": width, "height": height}}

    def _ipython_display_(self) -> None:
        # `%matplotlib inline` registers its own PNG formatter for every Figure, which would replace
        # the bundle above by a picture of another size without alt text. This hook is asked first.
        from IPython.display import display

        data, metadata = self._repr_mimebundle_()
        data["image/png"] = b64encode(data["image/png"]).decode("ascii")
        display(data, metadata=metadata, raw=True)


@lru_cache(maxsize=4096)
def text_width(text: str, size: float) -> float:
    """Return the width of ``text`` in points, in the default font at ``size`` points."""
    width, _, _ = text_to_path.get_text_width_height_descent(
        text, FontProperties(size=size), ismath=False
    )
    return float(width)


def points_per_unit(axes: Axes) -> tuple[float, float]:
    """Return how many points one unit of x and one unit of y are long."""
    width, height = size_in_inches(axes)
    left, right = axes.get_xlim()
    bottom, top = axes.get_ylim()
    return POINTS_PER_INCH * width / abs(right - left), POINTS_PER_INCH * height / abs(top - bottom)


def size_in_inches(axes: Axes) -> tuple[float, float]:
    """Return the width and height of the frame of ``axes``."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    box = axes.get_position()
    width, height = figure.get_size_inches()
    return float(box.width * width), float(box.height * height)


def add_legend(
    axes: Axes,
    handles: Sequence[Patch | Line2D] | None = None,
    gap: float = 0.27,
    spacing: float = 1.1,
) -> None:
    """Add a legend in one line, ``gap`` inches below the axes on the right.

    Without ``handles`` it has every artist with a label.
    """
    shown = axes.get_legend_handles_labels()[0] if handles is None else handles
    axes.legend(
        handles=shown,
        ncols=len(shown),
        loc="upper right",
        bbox_to_anchor=(1, -gap / size_in_inches(axes)[1]),
        frameon=False,
        fontsize=SMALL,
        handlelength=1.3,
        columnspacing=spacing,
        borderaxespad=0,
    )


def name_rows(axes: Axes, names: Iterable[str], size: float = 9) -> None:
    """Name the rows of bars or points from the top down; of the frame only the x axis stays."""
    names = list(names)
    axes.set_yticks(range(len(names)), names, fontsize=size)
    axes.tick_params(axis="x", labelsize=SMALL)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def by_group(given: Mapping[str, Any], mixed: str) -> dict[str, Any]:
    """Return several mappings by name as they are, and a single one under an empty name.

    Raises ValueError with the words ``mixed`` if only some of the values are mappings.
    """
    several = [isinstance(value, Mapping) for value in given.values()]
    if any(several) and not all(several):
        raise ValueError(mixed)
    return dict(given) if any(several) else {"": given}


def refuse_outside(least: int, most: int, **sizes: int) -> None:
    """Raise ValueError for the first of ``sizes`` that is not from ``least`` to ``most``."""
    for name, size in sizes.items():
        if not least <= size <= most:
            words = name.replace("_of_", " of ")
            raise ValueError(f"{words} is {size}: give one from {least} to {most}")
