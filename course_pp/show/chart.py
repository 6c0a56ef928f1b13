"""A matplotlib figure that says in words what it shows."""

from base64 import b64encode
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path
from PIL import Image

from course_pp.arguments import checked

# Masataka Okabe and Kei Ito, "Color Universal Design", 2008: told apart under every common colour blindness.
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
_POINTS_PER_INCH = 72
_DOTS_PER_INCH = 96
# Twice the pixels for sharp screens; the notebook is told the size in single ones.
_SHARPNESS = 2
# Flat colours and grey text fit a small palette, which makes the picture a third of the size.
_PALETTE_SIZE = 128


@checked
class ChartFigure(Figure):
    """A figure of ``width × height`` inches with :attr:`alt_text`, independent of pyplot's global state.

    The last expression of a notebook cell shows it once, as PNG with the alt text in the output's metadata
    (``{"image/png": {"alt": …}}``) and as the plain-text form, so that a committed notebook carries both.
    """

    def __init__(self, width: float, height: float) -> None:
        for name, inches in (("width", width), ("height", height)):
            if not 0 <= inches < float("inf"):
                raise ValueError(f"{name} is {inches}: give a finite number of inches")
        super().__init__(figsize=(width, height), dpi=_SHARPNESS * _DOTS_PER_INCH)
        FigureCanvasAgg(self)
        self.alt_text = ""

    @checked
    def axes_with_margins(self, left: float, right: float, bottom: float, top: float) -> Axes:
        """Return axes that leave margins of so many inches. Fixed margins spare a second drawing to find them."""
        width, height = self.get_size_inches()
        return self.add_axes(
            (left / width, bottom / height, (width - left - right) / width, (height - top - bottom) / height)
        )

    @checked
    def png(self, quick: bool = False) -> bytes:
        """Return the figure as PNG, at twice its size, in a reduced palette; larger but sooner if ``quick``."""
        canvas = FigureCanvasAgg(self)
        canvas.draw()
        drawn = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
        data = BytesIO()
        small = drawn.quantize(_PALETTE_SIZE, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
        small.save(data, format="png", compress_level=1 if quick else 6)
        return data.getvalue()

    def svg(self) -> str:
        """Return the figure as SVG, always the same bytes: text stays text, alt text is title and description."""
        text = BytesIO()
        with matplotlib.rc_context({"svg.hashsalt": "course_pp", "svg.fonttype": "none"}):
            self.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
        head, tag, rest = text.getvalue().decode().partition("<svg ")
        attributes, close, body = rest.partition(">")
        alt = escape(self.alt_text)
        described = f'role="img" {attributes}{close}\n <title>{alt}</title>\n <desc>{alt}</desc>'
        return head + tag + described + body

    @checked
    def save(self, path: str | Path) -> Path:
        """Write ``.png`` or ``.svg``, by the ending of ``path``. Raises ValueError for another ending."""
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
        # `%matplotlib inline` registers its own PNG formatter for every Figure, which would replace the
        # bundle above by a picture of another size without alt text. This hook is asked first.
        from IPython.display import display

        data, metadata = self._repr_mimebundle_()
        data["image/png"] = b64encode(data["image/png"]).decode("ascii")
        display(data, metadata=metadata, raw=True)


@lru_cache(maxsize=4096)
def text_width(text: str, size: float) -> float:
    """Return the width of ``text`` in points, in the default font at ``size`` points."""
    width, _, _ = text_to_path.get_text_width_height_descent(text, FontProperties(size=size), ismath=False)
    return float(width)


def size_in_inches(axes: Axes) -> tuple[float, float]:
    """Return the width and height of the frame of ``axes``."""
    figure = axes.get_figure(root=True)
    if figure is None:
        raise RuntimeError("these axes belong to no figure: add them to one before measuring them")
    width, height = figure.get_size_inches()
    box = axes.get_position()
    return float(box.width * width), float(box.height * height)


def points_per_unit(axes: Axes) -> tuple[float, float]:
    """Return how many points one unit of x and one unit of y are long."""
    width, height = size_in_inches(axes)
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    return _POINTS_PER_INCH * width / abs(right - left), _POINTS_PER_INCH * height / abs(top - bottom)
