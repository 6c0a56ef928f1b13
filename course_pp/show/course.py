"""The course as a picture: its notebooks, and which of them each builds on."""

from dataclasses import dataclass
from functools import cache

from course_pp.arguments import checked
from course_pp.show import chart
from course_pp.show.chart import WIDTH, ChartFigure
from course_pp.show.sketch import MARGIN, SMALL, Sketch, wrapped
from course_pp.show.wording import counted, listed


@dataclass(frozen=True)
class Notebook:
    """A notebook of the course.

    Attributes:
        number: ``"03"``.
        topic: in a few words.
        after: numbers of the notebooks to know before.
        is_written: False for one that is still to come.
    """

    number: str
    topic: str
    after: tuple[str, ...] = ()
    is_written: bool = True


NOTEBOOKS = (
    Notebook("00", "ranks and messages"),
    Notebook("01", "a naive split", ("00",)),
    Notebook("02", "GPipe", ("01",)),
    Notebook("03", "1F1B", ("02",)),
    Notebook("04", "interleaved stages", ("03",)),
    Notebook("05", "zero bubble", ("03",)),
    Notebook("06", "PipeDream", ("03",)),
    Notebook("07", "tensor parallelism", ("03",)),
    Notebook("08", "FSDP", ("07",)),
    Notebook("09", "checkpoints", ("08",)),
    Notebook("10", "models of others", ("03",)),
    Notebook("11", "your own schedule", ("05",)),
    Notebook("12", "capstone", ("09", "11")),
)

_HIGH, _GAP_X, _GAP_Y = 0.78, 0.3, 0.24


@checked
def course_map(here: str | None = None, title: str | None = None) -> ChartFigure:
    """Draw the notebooks of the course, an arrow from each to those that build on it; dashed are those to come.

    Args:
        here: the number of the notebook to mark, such as ``"03"``.
        title: instead of the finding.

    Raises:
        ValueError: for a notebook that is not in the course.
    """
    numbers = [notebook.number for notebook in NOTEBOOKS]
    if here is not None and here not in numbers:
        raise ValueError(f"here is {here!r}: give the number of a notebook, one of {', '.join(numbers)}")
    finding = _finding()
    places = _places()
    n_columns, n_rows = (1 + max(place[i] for place in places.values()) for i in (0, 1))
    each = (WIDTH - 2 * MARGIN - (n_columns - 1) * _GAP_X) / n_columns
    keys = ["dashed: to come"] * (not all(notebook.is_written for notebook in NOTEBOOKS))
    key = "; ".join([*keys, *([f"thick frame: you are here, {here}"] if here else [])])
    sketch = Sketch(WIDTH - 2 * MARGIN, n_rows * (_HIGH + _GAP_Y) - _GAP_Y, title or finding, key)

    def corner(number: str) -> tuple[float, float]:
        column, row = places[number]
        return column * (each + _GAP_X), row * (_HIGH + _GAP_Y)

    for notebook in NOTEBOOKS:
        _draw_notebook(sketch, notebook, corner(notebook.number), each, notebook.number == here)
        for before in notebook.after:
            _draw_arrow(sketch, corner(before), corner(notebook.number), each, notebook.is_written)
    what = "Map of the course, an arrow from each notebook to those that build on it"
    you = f" You are at {here}." if here else ""
    return sketch.finish(f"{what}. {finding}. {'; '.join(map(_told, NOTEBOOKS))}.{you}")


def _told(notebook: Notebook) -> str:
    after = f" after {listed(list(notebook.after))}" if notebook.after else ""
    return f"{notebook.number} {notebook.topic}{after}{' (to come)' * (not notebook.is_written)}"


def _finding() -> str:
    spine = [n.number for n in NOTEBOOKS if n.number <= "03"]
    after = [n.number for n in NOTEBOOKS if "03" in n.after]
    return (
        f"{counted(len(NOTEBOOKS), 'notebook')}: {spine[0]} to {spine[-1]} in order, "
        f"then {' or '.join([', '.join(after[:-1]), after[-1]])}"
    )


@cache
def _places() -> dict[str, tuple[int, int]]:
    """Return column and row of each notebook: as far right as its longest way in, each branch in a row of its own."""
    columns: dict[str, int] = {}
    for notebook in NOTEBOOKS:  # what comes before is listed before
        columns[notebook.number] = 1 + max((columns[before] for before in notebook.after), default=-1)
    rows: dict[str, int] = {}
    taken: set[tuple[int, int]] = set()
    for notebook in NOTEBOOKS:
        column = columns[notebook.number]
        row = rows[notebook.after[0]] if notebook.after else 0
        # A branch keeps its row if no other notebook comes before or behind it there.
        while any((each, row) in taken for each in range(column, max(columns.values()) + 1)):
            row += 1
        rows[notebook.number] = row
        taken.add((column, row))
    return {number: (columns[number], rows[number]) for number in columns}


def _draw_notebook(
    sketch: Sketch, notebook: Notebook, corner: tuple[float, float], width: float, is_here: bool
) -> None:
    (x, y), fill = corner, chart.SKY_BLUE if notebook.is_written else "white"
    edge = chart.VERMILION if is_here else chart.TEXT_GREY
    sketch.box(
        corner,
        (width, _HIGH),
        fill="white",
        edge=edge,
        line=3.0 if is_here else 1.0,
        dashed=not notebook.is_written,
        zorder=3,
    )
    sketch.box((x + 0.04, y + 0.04), (0.3, 0.22), notebook.number, fill=fill, bold=True, edge="none", zorder=3.2)
    topic = wrapped(notebook.topic, width - 0.1, SMALL)
    sketch.text((x + 0.07, y + 0.51), topic, SMALL, bold=False)


def _draw_arrow(
    sketch: Sketch, start: tuple[float, float], end: tuple[float, float], width: float, is_written: bool
) -> None:
    (x0, y0), (x1, y1) = start, end
    middle = x1 - _GAP_X / 2
    lift = y1 + _HIGH / 2
    points = [(x0 + width, y0 + _HIGH / 2), (middle, y0 + _HIGH / 2), (middle, lift), (x1, lift)]
    if y0 == y1:
        points = [points[0], points[-1]]
    sketch.arrow(*points, ink=chart.TEXT_GREY, line=1.4, head=10, dashed=not is_written, zorder=2.5)
