"""The course as a picture: its notebooks, and which of them each builds on."""

from typing import Any, NamedTuple

from course_pp.base.arguments import checked
from course_pp.show import chart
from course_pp.show.chart import WIDTH, ChartFigure
from course_pp.show.sketch import MARGIN, SMALL, Point, Sketch, wrapped
from course_pp.show.wording import counted, listed


class Notebook(NamedTuple):
    """A notebook of the course, and the numbers of the notebooks to know before."""

    number: str
    topic: str
    after: tuple[str, ...] = ()


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
    Notebook("12", "experts", ("08",)),
    Notebook("13", "capstone", ("09", "11", "12")),
)

# Inches: the box of a notebook, and the space between two.
_HIGH = 0.78
_GAP_X = 0.3
_GAP_Y = 0.24


@checked
def course_map(here: str | None = None, title: str | None = None) -> ChartFigure:
    """Draw the notebooks of the course, an arrow from each to those that build on it.

    ``here="03"`` marks one.
    """
    numbers = [notebook.number for notebook in NOTEBOOKS]
    if here is not None and here not in numbers:
        known = ", ".join(numbers)
        raise ValueError(f"here is {here!r}: give the number of a notebook, one of {known}")
    spine = [number for number in numbers if number <= "03"]
    *most, last = (notebook.number for notebook in NOTEBOOKS if "03" in notebook.after)
    finding = f"{counted(len(numbers), 'notebook')}: {spine[0]} to {spine[-1]} in order, "
    finding += f"then {', '.join(most)} or {last}"

    places = _places()
    n_columns = 1 + max(column for column, _ in places.values())
    n_rows = 1 + max(row for _, row in places.values())
    width = (WIDTH - 2 * MARGIN - (n_columns - 1) * _GAP_X) / n_columns
    height = n_rows * (_HIGH + _GAP_Y) - _GAP_Y
    key = f"thick frame: you are here, {here}" if here else ""
    sketch = Sketch(WIDTH - 2 * MARGIN, height, title or finding, note=key)

    def corner(number: str) -> Point:
        column, row = places[number]
        return column * (width + _GAP_X), row * (_HIGH + _GAP_Y)

    told = []
    for number, topic, after in NOTEBOOKS:
        x, y = corner(number)
        look: dict[str, Any] = {}
        if number == here:
            look = {"edge": chart.VERMILION, "line": 3.0}
        sketch.box((x, y), (width, _HIGH), zorder=3, **look)
        tag: dict[str, Any] = {"fill": chart.SKY_BLUE, "edge": "none", "bold": True, "zorder": 3.2}
        sketch.box((x + 0.04, y + 0.04), (0.3, 0.22), number, **tag)
        sketch.text((x + 0.07, y + 0.51), wrapped(topic, width - 0.1, SMALL), SMALL)
        for before in after:
            _draw_arrow(sketch, corner(before), (x, y), width=width)
        told.append(f"{number} {topic} after {listed(after)}" if after else f"{number} {topic}")
    alt_text = "Map of the course, an arrow from each notebook to those that build on it."
    alt_text += f" {finding}. {'; '.join(told)}."
    if here:
        alt_text += f" You are at {here}."
    return sketch.finish(alt_text)


def _places() -> dict[str, tuple[int, int]]:
    """Return column and row of each notebook.

    Its column is the length of its longest way in; each branch has a row of its own.
    """
    columns: dict[str, int] = {}
    for notebook in NOTEBOOKS:  # each is listed after the notebooks it builds on
        before = [columns[number] for number in notebook.after]
        columns[notebook.number] = 1 + max(before, default=-1)

    last = max(columns.values())
    places: dict[str, tuple[int, int]] = {}
    for notebook in NOTEBOOKS:
        column = columns[notebook.number]
        row = 0
        if notebook.after:
            _, row = places[notebook.after[0]]
        # A branch keeps its row if no other notebook comes before or behind it there.
        taken = set(places.values())
        while any((each, row) in taken for each in range(column, last + 1)):
            row += 1
        places[notebook.number] = (column, row)
    return places


def _draw_arrow(sketch: Sketch, start: Point, end: Point, width: float) -> None:
    (x0, y0), (x1, y1) = start, end
    leaves = y0 + _HIGH / 2
    arrives = y1 + _HIGH / 2
    points = [(x0 + width, leaves), (x1, arrives)]
    if y0 != y1:
        middle = x1 - _GAP_X / 2
        points[1:1] = [(middle, leaves), (middle, arrives)]
    sketch.arrow(*points, ink=chart.TEXT_GREY, line=1.4, head=10, zorder=2.5)
