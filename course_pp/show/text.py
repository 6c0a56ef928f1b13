"""A timeline as text, for terminals."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from course_pp.base.arguments import checked
from course_pp.schedule import Span, Timeline
from course_pp.show.wording import counted, has_several_stages_a_rank

# The nearest of a terminal's 256 colours to those of the figures, as background under black
# letters.
_COLOURS = {"F": 75, "B": 166, "I": 214, "W": 36, "U": 227}
_IDLE = "·"
_BUSY = "─"
_MOST_LINES = 48


@dataclass(frozen=True)
class _Cell:
    """One character of a row, and the kind of action it belongs to, if any."""

    character: str
    kind: str = ""


@checked
def timeline_text(tl: Timeline, width: int = 100, colour: bool = False) -> str:
    """Write a timeline as lines of at most ``width`` characters: a rank per row, ``·`` where it is
    idle.

    ``F3───`` is forward of microbatch 3, or ``2F3`` where a rank has several stages; an overlapped pair is
    ``0F1+7B0``. A chart too long for one line is cut into several, one below the other; one that
    would need more than a screen of lines is squeezed into the width instead, and what has no room
    loses its number. ``colour`` adds ANSI escape sequences, which do not count towards ``width``.
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
    cells = [_row(row, per_unit, n_columns, step, with_stage) for row in tl.by_rank]
    n_hidden = sum(
        _show_short(spans, row, per_unit) for spans, row in zip(tl.by_rank, cells, strict=True)
    )
    blocks = [
        "\n".join(
            [
                *(
                    f"{n:<{margin}}{_painted(row[at : at + step], colour)}"
                    for n, row in zip(names, cells, strict=True)
                ),
                " " * margin + _ruler(tl, per_unit, at, min(at + step, n_columns)),
            ]
        )
        for at in range(0, n_columns, step)
    ]
    if n_hidden:
        blocks[-1] += f"\n{counted(n_hidden, 'box')} too short to show"
    return "\n\n".join(blocks)


def _columns_per_unit(tl: Timeline, room: int, with_stage: bool) -> float:
    """So many characters for each unit of time that labels fit, if that many lines can be afforded."""
    makespan = float(tl.makespan)
    if not makespan:
        return 1.0
    needed = math.ceil(
        max(
            len(_label(span, with_stage)) / float(span.duration)
            for span in tl.spans
            if span.duration
        )
    )
    for per_unit in (needed + 1, needed):  # one more sets the labels apart
        if per_unit * makespan <= room:
            return per_unit
    for per_unit in (needed + 1, needed):
        if (
            per_unit <= room
            and math.ceil(makespan / (room // per_unit)) * (tl.n_ranks + 2) <= _MOST_LINES
        ):
            return per_unit
    return room / makespan


def _label(span: Span, with_stage: bool) -> str:
    return "+".join(
        f"{part.stage if with_stage else ''}{part.kind}{part.microbatch}"
        for part in span.action.parts
    )


def _row(
    spans: Iterable[Span], per_unit: float, n_columns: int, step: int, with_stage: bool
) -> list[_Cell]:
    """Return the cells of a rank, which will be cut into lines of ``step`` cells."""
    cells = [_Cell(_IDLE)] * n_columns
    for span in spans:
        first, last = (
            min(n_columns, round(float(time) * per_unit)) for time in (span.start, span.end)
        )
        length, label, parts = last - first, _label(span, with_stage), span.action.parts
        if len(label) > length:
            label = parts[0].kind
        until_cut = step - first % step
        # keep the label on one line
        before = until_cut if until_cut < len(label) <= length - until_cut else 0
        text = (_BUSY * before + label).ljust(length, _BUSY)
        cells[first:last] = [
            _Cell(text[i], parts[i * len(parts) // length].kind) for i in range(length)
        ]
    return cells


def _show_short(spans: Iterable[Span], cells: list[_Cell], per_unit: float) -> int:
    """Give boxes of less than half a column an idle cell each; returns how many find none."""
    n_hidden = 0
    for span in spans:
        first, last = (
            min(len(cells), round(float(time) * per_unit)) for time in (span.start, span.end)
        )
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
    scale = 1.0 if tl.unit != "s" or tl.makespan >= 1 else 1e3
    unit = "" if tl.unit != "s" else " s" if scale == 1 else " ms"
    per_number = per_unit / scale
    every = 1.0
    if tl.makespan:
        least = 7 / per_number
        power = 10.0 ** math.floor(math.log10(least))
        every = next(power * step for step in (1, 2, 5, 10) if power * step >= least * (1 - 1e-9))
    line = ""
    number = math.ceil(first / per_number / every - 1e-9)
    while (column := round(number * every * per_number) - first) + len(
        f"{number * every:.6g}{unit}"
    ) <= last - first:
        line = line.ljust(column) + f"{number * every:.6g}"
        number += 1
    return line + unit
