"""A timeline as text, for terminals."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from course_pp.base.arguments import checked
from course_pp.schedule import Span, Timeline
from course_pp.show.wording import counted, has_several_stages_a_rank, name_of_part

# The nearest of a terminal's 256 colours to those of the figures, as background under black
# letters.
_COLOURS = {"F": 75, "B": 166, "I": 214, "W": 36, "U": 227}
_IDLE = "·"
_BUSY = "─"
_MOST_LINES = 48


@dataclass(frozen=True)
class _Cell:
    """One character of a row, and the kind of its action; an idle cell has no kind."""

    character: str
    kind: str = ""


@checked
def timeline_text(tl: Timeline, width: int = 100, colour: bool = False) -> str:
    """Write a timeline as lines of at most ``width`` characters: a rank per row, ``·`` when idle.

    ``F3───`` is forward of microbatch 3, or ``2F3`` where a rank has several stages; an overlapped
    pair is ``0F1+7B0``. A chart too long for one line is cut into several, one below the other. A
    chart that would need more than a screen of lines is squeezed into the width instead; a box
    without room then loses its number. ``colour`` adds ANSI escape sequences, which do not count
    towards ``width``.
    """
    if width < 40:
        raise ValueError(f"width is {width}: give at least 40 characters")
    names = [f"rank {rank} " for rank in range(tl.n_ranks)]
    margin = max(map(len, names))
    room = width - margin
    with_stage = has_several_stages_a_rank(tl)
    per_unit = _columns_per_unit(tl, room, with_stage)
    n_columns = max(1, round(float(tl.makespan) * per_unit))

    # Cut between units of time, so that boxes of one unit stay whole.
    unit = int(per_unit) if per_unit == int(per_unit) and per_unit <= room else 1
    step = room // unit * unit
    rows = []
    n_hidden = 0
    for spans in tl.by_rank:
        cells = _row(spans, per_unit, n_columns, step=step, with_stage=with_stage)
        n_hidden += _show_short(spans, cells, per_unit)
        rows.append(cells)

    blocks = []
    for at in range(0, n_columns, step):
        lines = []
        for name, cells in zip(names, rows, strict=True):
            lines.append(f"{name:<{margin}}{_painted(cells[at : at + step], colour)}")
        ruler = _ruler(tl, per_unit, at, min(at + step, n_columns))
        blocks.append("\n".join([*lines, " " * margin + ruler]))
    if n_hidden:
        blocks[-1] += f"\n{counted(n_hidden, 'box')} too short to show"
    return "\n\n".join(blocks)


def _columns_per_unit(tl: Timeline, room: int, with_stage: bool) -> float:
    """Return the characters for a unit of time.

    They leave room for every label if that many lines can be afforded; else the whole chart fits
    one line.
    """
    makespan = float(tl.makespan)
    if not makespan:
        return 1.0
    needed = 0
    for span in tl.spans:
        if span.duration:
            per_unit = len(_label(span, with_stage)) / float(span.duration)
            needed = max(needed, math.ceil(per_unit))

    # One character more than needed sets the labels apart.
    choices = (needed + 1, needed)
    for columns in choices:
        if columns * makespan <= room:
            return columns
    for columns in choices:
        if columns <= room:
            n_blocks = math.ceil(makespan / (room // columns))
            if n_blocks * (tl.n_ranks + 2) <= _MOST_LINES:
                return columns
    return room / makespan


def _label(span: Span, with_stage: bool) -> str:
    return "+".join(name_of_part(part, with_stage) for part in span.action.parts)


def _row(
    spans: Iterable[Span], per_unit: float, n_columns: int, step: int, with_stage: bool
) -> list[_Cell]:
    """Return the cells of a rank, which will be cut into lines of ``step`` cells."""
    cells = [_Cell(_IDLE)] * n_columns
    for span in spans:
        first, last = _columns(span, per_unit, n_columns)
        length = last - first
        parts = span.action.parts
        label = _label(span, with_stage)
        if len(label) > length:
            label = parts[0].kind

        # A label that the end of a line would cut goes to the next line.
        until_cut = step - first % step
        before = until_cut if until_cut < len(label) <= length - until_cut else 0
        text = (_BUSY * before + label).ljust(length, _BUSY)
        for i in range(length):
            cells[first + i] = _Cell(text[i], parts[i * len(parts) // length].kind)
    return cells


def _columns(span: Span, per_unit: float, n_columns: int) -> tuple[int, int]:
    """Return the first column of a span, and the column after its last."""
    first = min(n_columns, round(float(span.start) * per_unit))
    last = min(n_columns, round(float(span.end) * per_unit))
    return first, last


def _show_short(spans: Iterable[Span], cells: list[_Cell], per_unit: float) -> int:
    """Give boxes of less than half a column an idle cell each; return how many find none."""
    n_hidden = 0
    for span in spans:
        first, last = _columns(span, per_unit, len(cells))
        if first < last or not span.duration:
            continue
        place = min(int(float(span.start) * per_unit), len(cells) - 1)
        if cells[place].kind:
            n_hidden += 1
        else:
            kind = span.action.parts[0].kind
            cells[place] = _Cell(kind, kind)
    return n_hidden


def _painted(cells: list[_Cell], colour: bool) -> str:
    if not colour:
        return "".join(cell.character for cell in cells)
    painted, kind = "", None
    for cell in cells:
        if cell.kind != kind:
            kind = cell.kind
            painted += f"\x1b[0;30;48;5;{_COLOURS[kind]}m" if kind else "\x1b[0;2m"
        # Colour shows how far a box reaches.
        painted += " " if cell.character == _BUSY else cell.character
    return painted + "\x1b[0m"


def _ruler(tl: Timeline, per_unit: float, first: int, last: int) -> str:
    """Return the times under the columns from ``first`` to ``last``, at round numbers."""
    scale = 1.0
    unit = ""
    if tl.unit == "s":
        unit = " s"
        if tl.makespan < 1:
            scale = 1e3
            unit = " ms"
    per_number = per_unit / scale

    # The smallest of 1, 2, 5, 10, 20, … that keeps numbers 7 columns apart.
    every = 1.0
    if tl.makespan:
        least = 7 / per_number
        power = 10.0 ** math.floor(math.log10(least))
        fitting = (power * step for step in (1, 2, 5, 10) if power * step >= least * (1 - 1e-9))
        every = next(fitting)

    line = ""
    number = math.ceil(first / per_number / every - 1e-9)
    while True:
        column = round(number * every * per_number) - first
        text = f"{number * every:.6g}"
        if column + len(text) + len(unit) > last - first:
            return line + unit
        line = line.ljust(column) + text
        number += 1
