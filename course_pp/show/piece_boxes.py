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

_BOX_HEIGHT, _LEAST_WIDTH, _MOST_WIDTH = 0.8, 0.34, 2.0
_ROW_HEIGHT, _GAP = 1.0, 0.45
_SIZE = 8.5


# A piece has its `offsets` and `sizes`, and the `rank` that wrote it.
_Tensors = dict[str, list[Any]]


@checked
def pieces(
    tensors: Mapping[str, Iterable[Any] | Mapping[str, Iterable[Any]]], title: str | None = None
) -> ChartFigure:
    """Draw each tensor as a box cut into its pieces, each with the number of the rank that wrote
    it.

    The first dimension goes down, the second to the right. Boxes are equally high, whatever the
    tensor's size; what no piece covers is grey.

    Args:
        tensors: the pieces of each tensor by its name, each with ``offsets``, ``sizes`` and
            ``rank``, in at most two dimensions; or several such mappings by name, to be drawn side
            by side.
    """
    mixed = (
        "tensors and checkpoints are mixed: give pieces for every name, or a mapping for every name"
    )
    columns: dict[str, _Tensors] = {
        checkpoint: {name: list(cut) for name, cut in held.items()}
        for checkpoint, held in chart.by_group(tensors, mixed).items()
    }
    if not any(cut for held in columns.values() for cut in held.values()):
        raise ValueError(
            "no pieces to draw: give in tensors at least one, with the pieces it was written in"
        )
    names = dict.fromkeys(name for held in columns.values() for name in held)
    shapes = {
        name: _extent(name, [piece for held in columns.values() for piece in held.get(name, [])])
        for name in names
    }
    widths = {name: _width_of(shape) for name, shape in shapes.items()}
    column_width = (
        max([*widths.values(), *(chart.text_width(name, 10) / 72 for name in columns)]) + _GAP
    )
    spelled = {name: " × ".join(map(str, shape)) or "one number" for name, shape in shapes.items()}
    finding = _finding(columns)
    left = (
        max(chart.text_width(text, 9) for name in shapes for text in (name, spelled[name])) / 72
        + 0.35
    )
    top, bottom, height = 0.5 + 0.3 * any(columns), 0.34, _ROW_HEIGHT * len(shapes)
    width = left + column_width * len(columns)
    heading = finding if title is None else title
    figure = ChartFigure(
        max(width, chart.text_width(heading, 11.5) / 72 + 0.3), height + top + bottom
    )
    axes = figure.axes_with_margins(
        left=left, right=figure.get_figwidth() - width, bottom=bottom, top=top
    )
    axes.set_xlim(0, column_width * len(columns))
    axes.set_ylim(height, 0)
    axes.set_axis_off()
    for row, (name, shape) in enumerate(shapes.items()):
        middle = _ROW_HEIGHT * (row + 0.5)
        axes.text(-0.15, middle, f"{name}\n{spelled[name]}", ha="right", va="center", size=9)
        for column, held in enumerate(columns.values()):
            x, y = column * column_width, middle - _BOX_HEIGHT / 2
            _draw_tensor(axes, held.get(name, []), shape, (x, y), (widths[name], _BOX_HEIGHT))
    for column, checkpoint in enumerate(columns):
        axes.text(
            column * column_width, -0.1, checkpoint, ha="left", va="bottom", size=10, weight="bold"
        )
    axes.text(
        0,
        height + 0.1,
        "number: the rank that wrote the piece",
        va="top",
        size=_SIZE,
        color=chart.TEXT_GREY,
    )
    figure.text(
        0.15 / figure.get_figwidth(),
        1 - 0.24 / figure.get_figheight(),
        heading,
        va="center",
        size=11.5,
    )
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
    (x, y), (width, height) = corner, box
    if not cut:
        axes.text(x, y + height / 2, "absent", va="center", size=_SIZE, color=chart.TEXT_GREY)
        return
    axes.add_patch(
        Rectangle(
            corner,
            width,
            height,
            facecolor=chart.IDLE_GREY,
            edgecolor=chart.TEXT_GREY,
            linestyle=":",
        )
    )
    rows, numbers_in_row = (max(size, 1) for size in (*shape, 1, 1)[:2])
    for piece in cut:
        (first, start), (n, m) = (*piece.offsets, 0, 0)[:2], (*piece.sizes, 1, 1)[:2]
        if n * m == 0:
            continue
        place = (x + width * start / numbers_in_row, y + height * first / rows)
        _draw_piece(axes, piece.rank, place, (width * m / numbers_in_row, height * n / rows))


def _draw_piece(axes: Axes, rank: int, corner: Point, size: Point) -> None:
    (x, y), (width, height) = corner, size
    colour, ink = SERIES[rank % len(SERIES)]
    hatch = HATCHES[rank // len(SERIES) % len(HATCHES)]
    look: dict[str, Any] = {
        "facecolor": colour,
        "edgecolor": "white",
        "hatch": hatch or None,
        "hatchcolor": "#FFFFFF80",
    }
    axes.add_patch(Rectangle(corner, width, height, linewidth=1.2, **look))
    points = min(_SIZE, 72 * height - 1)
    for text in (f"rank {rank}", str(rank)):
        if points >= 5 and chart.text_width(text, points) + 4 <= 72 * width:
            middle = (x + width / 2, y + height / 2)
            axes.text(
                *middle, text, size=points, color=ink, ha="center", va="center_baseline", zorder=3
            )
            return


def _finding(columns: dict[str, _Tensors]) -> str:
    told = []
    for name, held in columns.items():
        cut = [piece for pieces_of_one in held.values() for piece in pieces_of_one]
        ranks = sorted({piece.rank for piece in cut})
        in_a_row = len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1))
        by = f"ranks {ranks[0]} to {ranks[-1]}" if in_a_row else listed_ranks(ranks)
        tensors = counted(sum(map(bool, held.values())), "tensor")
        number = counted(len(cut), "piece")
        told.append(f"{name}: {number}" if name else f"{tensors} in {number}, by {by}")
    return "; ".join(told)


def _alt_text(columns: dict[str, _Tensors], spelled: Mapping[str, str], finding: str) -> str:
    told = []
    for checkpoint, held in columns.items():
        for name, shape in spelled.items():
            cut, each = held.get(name, []), []
            for piece in cut:
                spans = zip(piece.offsets, piece.sizes, strict=True)
                each.append(
                    f"rank {piece.rank} wrote"
                    f" [{', '.join(f'{at}:{at + size}' for at, size in spans)}]"
                )
            missing = (
                prod(_extent(name, cut)) - sum(prod(piece.sizes) for piece in cut) if cut else 0
            )
            hole = f", {missing:,} numbers are in no piece" * (missing > 0)
            told.append(
                f"{checkpoint}{', ' * bool(checkpoint)}{name} ({shape}):"
                f" {listed(each) or 'absent'}{hole}"
            )
    return f"Tensors as boxes, cut into the pieces that ranks wrote. {finding}. {'; '.join(told)}."
