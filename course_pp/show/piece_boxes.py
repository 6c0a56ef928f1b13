"""Which rank wrote which rectangle of which tensor."""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from course_pp.base.arguments import checked
from course_pp.show import chart
from course_pp.show.chart import ChartFigure
from course_pp.show.sketch import HATCHES, SERIES, Point
from course_pp.show.wording import counted, listed, listed_ranks

# Inches: the box of a tensor, the row of one, and the space between two columns.
_BOX_HEIGHT = 0.8
_LEAST_WIDTH = 0.34
_MOST_WIDTH = 2.0
_ROW_HEIGHT = 1.0
_GAP = 0.45
_SIZE = 8.5

# The pieces of each tensor. A piece has its `offsets` and `sizes`, and the `rank` that wrote it.
_Tensors = dict[str, list[Any]]


@checked
def pieces(
    tensors: Mapping[str, Iterable[Any] | Mapping[str, Iterable[Any]]], title: str | None = None
) -> ChartFigure:
    """Draw each tensor as a box cut into its pieces, each with the rank that wrote it.

    The first dimension goes down, the second to the right. Boxes are equally high, whatever the
    tensor's size; the part that no piece covers is grey.

    Args:
        tensors: the pieces of each tensor by its name, each with ``offsets``, ``sizes`` and
            ``rank``, in at most two dimensions; or several such mappings by name, to be drawn side
            by side.
    """
    mixed = (
        "tensors and checkpoints are mixed: give pieces for every name, or a mapping for every name"
    )
    columns: dict[str, _Tensors] = {}
    cuts: dict[str, list[Any]] = {}  # by tensor, from all checkpoints
    for checkpoint, held in chart.by_group(tensors, mixed).items():
        columns[checkpoint] = {name: list(cut) for name, cut in held.items()}
        for name, cut in columns[checkpoint].items():
            cuts[name] = cuts.get(name, []) + cut
    if not any(cuts.values()):
        raise ValueError(
            "no pieces to draw: give in tensors at least one, with the pieces it was written in"
        )
    shapes = {name: _extent(name, cut) for name, cut in cuts.items()}
    widths = {name: _width_of(shape) for name, shape in shapes.items()}
    spelled = {name: " × ".join(map(str, shape)) or "one number" for name, shape in shapes.items()}
    finding = _finding(columns)
    heading = finding if title is None else title

    # As wide as the names need on the left, and the boxes or the names of checkpoints above.
    heads = [chart.text_width(checkpoint, 10) / 72 for checkpoint in columns]
    column_width = max([*widths.values(), *heads]) + _GAP
    names = [chart.text_width(text, 9) for text in (*spelled, *spelled.values())]
    left = max(names) / 72 + 0.35
    width = left + column_width * len(columns)
    sheet = max(width, chart.text_width(heading, 11.5) / 72 + 0.3)
    top = 0.8 if any(columns) else 0.5
    bottom = 0.34
    height = _ROW_HEIGHT * len(shapes)
    figure = ChartFigure(sheet, height + top + bottom)
    right = figure.get_figwidth() - width
    axes = figure.axes_with_margins(left=left, right=right, bottom=bottom, top=top)
    axes.set_xlim(0, column_width * len(columns))
    axes.set_ylim(height, 0)
    axes.set_axis_off()

    for row, (name, shape) in enumerate(shapes.items()):
        middle = _ROW_HEIGHT * (row + 0.5)
        axes.text(-0.15, middle, f"{name}\n{spelled[name]}", ha="right", va="center", size=9)
        box = (widths[name], _BOX_HEIGHT)
        for column, held in enumerate(columns.values()):
            corner = (column * column_width, middle - _BOX_HEIGHT / 2)
            _draw_tensor(axes, held.get(name, []), shape, corner=corner, box=box)
    for column, checkpoint in enumerate(columns):
        x = column * column_width
        axes.text(x, -0.1, checkpoint, ha="left", va="bottom", size=10, weight="bold")
    note = "number: the rank that wrote the piece"
    axes.text(0, height + 0.1, note, va="top", size=_SIZE, color=chart.TEXT_GREY)
    place = (0.15 / figure.get_figwidth(), 1 - 0.24 / figure.get_figheight())
    figure.text(*place, heading, va="center", size=11.5)
    figure.alt_text = _alt_text(columns, spelled, finding)
    return figure


def _extent(name: str, cut: Sequence[Any]) -> tuple[int, ...]:
    """Return the smallest shape that holds all pieces."""
    n_dims = {len(numbers) for piece in cut for numbers in (piece.offsets, piece.sizes)}
    if len(n_dims) > 1 or max(n_dims, default=0) > 2:
        raise ValueError(
            f"{name} has pieces of {listed(sorted(n_dims))} dimensions: draw up to two"
        )
    ends = [tuple(map(sum, zip(piece.offsets, piece.sizes, strict=True))) for piece in cut]
    return tuple(map(max, zip(*ends, strict=True)))


def _width_of(shape: tuple[int, ...]) -> float:
    if len(shape) < 2:
        return _LEAST_WIDTH
    rows, numbers_in_row = shape
    return min(_MOST_WIDTH, max(_LEAST_WIDTH, _BOX_HEIGHT * numbers_in_row / max(rows, 1)))


def _draw_tensor(
    axes: Axes, cut: Sequence[Any], shape: tuple[int, ...], corner: Point, box: Point
) -> None:
    x, y = corner
    width, height = box
    if not cut:
        axes.text(x, y + height / 2, "absent", va="center", size=_SIZE, color=chart.TEXT_GREY)
        return
    look: dict[str, Any] = {"facecolor": chart.IDLE_GREY, "edgecolor": chart.TEXT_GREY}
    axes.add_patch(Rectangle(corner, width, height, linestyle=":", **look))
    # A vector is a column, a number a box of one row.
    n_rows, n_columns = (max(size, 1) for size in (*shape, 1, 1)[:2])
    for piece in cut:
        first, start = (*piece.offsets, 0, 0)[:2]
        n, m = (*piece.sizes, 1, 1)[:2]
        if n * m == 0:
            continue
        place = (x + width * start / n_columns, y + height * first / n_rows)
        size = (width * m / n_columns, height * n / n_rows)
        _draw_piece(axes, piece.rank, place, size=size)


def _draw_piece(axes: Axes, rank: int, corner: Point, size: Point) -> None:
    x, y = corner
    width, height = size
    colour, ink = SERIES[rank % len(SERIES)]
    # More ranks than colours: each round of colours has a hatch of its own.
    hatch = HATCHES[rank // len(SERIES) % len(HATCHES)]
    look: dict[str, Any] = {"facecolor": colour, "edgecolor": "white", "hatch": hatch or None}
    axes.add_patch(Rectangle(corner, width, height, linewidth=1.2, hatchcolor="#FFFFFF80", **look))
    points = min(_SIZE, 72 * height - 1)
    for text in (f"rank {rank}", str(rank)):
        if points >= 5 and chart.text_width(text, points) + 4 <= 72 * width:
            middle = (x + width / 2, y + height / 2)
            words: dict[str, Any] = {"ha": "center", "va": "center_baseline", "zorder": 3}
            axes.text(*middle, text, size=points, color=ink, **words)
            return


def _finding(columns: dict[str, _Tensors]) -> str:
    told = []
    for name, held in columns.items():
        cut = [piece for pieces_of_one in held.values() for piece in pieces_of_one]
        number = counted(len(cut), "piece")
        if name:
            told.append(f"{name}: {number}")
            continue
        ranks = sorted({piece.rank for piece in cut})
        by = listed_ranks(ranks)
        if len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1)):
            by = f"ranks {ranks[0]} to {ranks[-1]}"
        tensors = counted(sum(map(bool, held.values())), "tensor")
        told.append(f"{tensors} in {number}, by {by}")
    return "; ".join(told)


def _alt_text(columns: dict[str, _Tensors], spelled: Mapping[str, str], finding: str) -> str:
    told = []
    for checkpoint, held in columns.items():
        for name, shape in spelled.items():
            cut = held.get(name, [])
            each = []
            for piece in cut:
                spans = zip(piece.offsets, piece.sizes, strict=True)
                place = ", ".join(f"{at}:{at + size}" for at, size in spans)
                each.append(f"rank {piece.rank} wrote [{place}]")
            words = f"{name} ({shape}): {listed(each) or 'absent'}"
            if cut:
                missing = prod(_extent(name, cut)) - sum(prod(piece.sizes) for piece in cut)
                if missing > 0:
                    words += f", {missing:,} numbers are in no piece"
            told.append(f"{checkpoint}, {words}" if checkpoint else words)
    return f"Tensors as boxes, cut into the pieces that ranks wrote. {finding}. {'; '.join(told)}."
