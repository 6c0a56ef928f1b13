"""A model as a row of modules, cut into stages, and what crosses each cut, skip connections included."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

from course_pp.arguments import checked
from course_pp.show import chart
from course_pp.show.byte_bars import format_bytes
from course_pp.show.chart import WIDTH, ChartFigure
from course_pp.show.sketch import LEAST, MARGIN, SMALL, Sketch, width_of
from course_pp.show.wording import counted, listed

_MOST_CALLS = 24
_HIGH, _LEVEL, _BELOW = 0.62, 0.24, 0.62
_FILLS = (chart.SKY_BLUE, chart.YELLOW, chart.ORANGE, chart.PURPLE)


class Value(Protocol):
    """A tensor that crosses a cut; :class:`course_pp.parallel.split.CrossingTensor` is one."""

    @property
    def made(self) -> int: ...
    @property
    def read(self) -> tuple[int, ...]: ...
    @property
    def n_bytes(self) -> int: ...


class Cut(Protocol):
    """A model cut into stages; :func:`course_pp.parallel.split.crossing` returns it."""

    @property
    def calls(self) -> tuple[str, ...]: ...
    @property
    def begins(self) -> tuple[int, ...]: ...
    @property
    def values(self) -> Sequence[Value]: ...


@checked
def carried(cut: Cut, title: str | None = None) -> ChartFigure:
    """Draw the calls of a model's modules in a row, the cuts between stages, and each tensor that crosses one.

    An arrow leads from the module that makes tensors to the last that reads them. It is blue if that is in the next
    stage, and red and dashed if stages on its way only hand it on. Under each cut is what it carries in all.

    Args:
        cut: as :func:`course_pp.parallel.split.crossing` returns it.
        title: instead of the finding.

    Raises:
        ValueError: for more than 24 calls, or none.
    """
    n_calls = len(cut.calls)
    if not 1 <= n_calls <= _MOST_CALLS:
        raise ValueError(f"cut has {n_calls} calls: from 1 to {_MOST_CALLS} are drawn")
    drawn = list({(value.made, value.read): value for value in cut.values}.values())
    levels = _levels(drawn)
    top = (1 + max(levels, default=0)) * _LEVEL + 0.1
    each = min(0.95, (WIDTH - 2 * MARGIN) / n_calls)
    finding = _finding(cut)
    note = "blue: to the next stage; red, dashed: past stages that only hand it on" if cut.values else ""
    sketch = Sketch(n_calls * each, top + _HIGH + _BELOW, title or finding, note)
    bounds = (0, *cut.begins, n_calls)
    for number, name in enumerate(cut.calls):
        fill = _FILLS[_stage_of(cut, number) % len(_FILLS)]
        words = _short(name).replace("_", "\n")
        sketch.box((number * each + 0.03, top), (each - 0.06, _HIGH), words, fill=fill, sizes=(SMALL, LEAST))
    for stage, (start, end) in enumerate(pairwise(bounds)):
        place = ((start + end) / 2 * each, top + _HIGH + 0.14)
        sketch.text(place, f"stage {stage}" if (end - start) * each > width_of("stage 0", SMALL) else str(stage),
                    SMALL, align="center", bold=True)  # fmt: skip
    row_ends = [0.0, 0.0]
    for begin in cut.begins:
        x, over = begin * each, _over(cut, begin)
        words = f"{counted(len(over), 'tensor')}, {format_bytes(sum(value.n_bytes for value in over))}"
        half = width_of(words, SMALL) / 2 + 0.04
        x_words = min(max(x, half), n_calls * each - half)
        row = next((i for i, end in enumerate(row_ends) if end <= x_words - half), 1)
        row_ends[row] = x_words + half
        sketch.line((x, 0.0), (x, top + _HIGH + 0.22), ink="black", line=1.6, dashed=True, zorder=3)
        sketch.text((x_words, top + _HIGH + 0.36 + 0.18 * row), words, SMALL, align="center")
    for value, level in zip(drawn, levels, strict=True):
        _draw_value(sketch, cut, value, each, top, top - 0.1 - level * _LEVEL)
    return sketch.finish(f"A model's modules in a row. {finding}. {_told(cut)}")


def _levels(values: Sequence[Value]) -> list[int]:
    """Return how high each arrow goes, so that none lies on another."""
    taken: list[list[tuple[int, int]]] = []
    found: dict[int, int] = {}
    for index, value in sorted(enumerate(values), key=lambda each: each[1].read[-1] - each[1].made):
        start, end = value.made, value.read[-1]
        level = next((i for i, row in enumerate(taken) if all(end <= a or b <= start for a, b in row)), len(taken))
        taken += [[]] if level == len(taken) else []
        taken[level].append((start, end))
        found[index] = level
    return [found[index] for index in range(len(values))]


def _draw_value(sketch: Sketch, cut: Cut, value: Value, each: float, top: float, height: float) -> None:
    past = _passes(cut, value)
    last = min(value.read[-1], len(cut.calls) - 1)
    start, end = (value.made + 0.62) * each, (last + 0.38) * each
    ink = chart.VERMILION if past else chart.BLUE
    points = [(start, top), (start, height), (end, height), (end, top)]
    sketch.arrow(*points, ink=ink, line=1.8, dashed=past, head=10)


def _stage_of(cut: Cut, call: int) -> int:
    return sum(begin <= call for begin in cut.begins)


def _passes(cut: Cut, value: Value) -> bool:
    """Return whether it crosses a stage that does not read it."""
    stages = {_stage_of(cut, call) for call in value.read}
    return any(stage not in stages for stage in range(_stage_of(cut, value.made) + 1, max(stages)))


def _over(cut: Cut, begin: int) -> list[Value]:
    return [value for value in cut.values if value.made < begin <= value.read[-1]]


def _short(name: str) -> str:
    """Return ``h.3`` of ``transformer.h.3``, and ``norm`` of ``model.norm``."""
    *_, before, last = ("", *name.split("."))
    return f"{before}.{last}" if last.isdigit() and before else last


def _finding(cut: Cut) -> str:
    if not cut.begins:
        return f"{counted(len(cut.calls), 'call')} in one piece: nothing crosses"
    counts = {len(_over(cut, begin)) for begin in cut.begins}
    past = sum(_passes(cut, value) for value in cut.values)
    up_to = "each cut carries" if len(counts) == 1 else "a cut carries up to"
    words = f"{len(cut.begins) + 1} stages: {up_to} {counted(max(counts), 'tensor')}"
    return f"{words}; {past} skip a stage" if past else words


def _told(cut: Cut) -> str:
    cuts = [
        f"the cut before {cut.calls[begin]} carries {format_bytes(sum(v.n_bytes for v in over))}, made by "
        f"{listed([cut.calls[v.made] for v in over])}"
        for begin in cut.begins
        if (over := _over(cut, begin))
    ]
    return "; ".join(cuts)[:1].upper() + "; ".join(cuts)[1:] + "." if cuts else ""
