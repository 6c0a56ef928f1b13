"""A model as a row of modules, cut into stages, and what crosses each cut, skip connections included."""

from collections import Counter
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
_HIGH, _LEVEL, _BELOW, _ROW = 0.62, 0.24, 0.44, 0.18
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

    An arrow leads from the module that makes tensors to each that reads them, and out to the right if the model returns
    them; ×3 stands at the arrow of three. It is blue if each stage on its way reads them, and orange and dashed if some
    only hand them on. Under each cut is what it carries in all.

    Args:
        cut: as :func:`course_pp.parallel.split.crossing` returns it.
        title: instead of the finding.

    Raises:
        ValueError: for more than 24 calls, or none.
    """
    n_calls = len(cut.calls)
    if not 1 <= n_calls <= _MOST_CALLS:
        raise ValueError(f"cut has {n_calls} calls: from 1 to {_MOST_CALLS} are drawn")
    drawn = {(value.made, value.read): value for value in cut.values}
    counts = Counter((value.made, value.read) for value in cut.values)
    levels = _levels([*drawn.values()])
    top = (1 + max(levels, default=0)) * _LEVEL + 0.1
    each = min(0.95, (WIDTH - 2 * MARGIN) / n_calls)
    finding = _finding(cut)
    note = "blue: read in every stage on its way; orange, dashed: some only hand it on" if cut.values else ""
    labels = _labels(cut, each)
    below = _BELOW + _ROW * max([1, *(row for *_, row in labels)])
    sketch = Sketch(n_calls * each, top + _HIGH + below, title or finding, note)
    bounds = (0, *cut.begins, n_calls)
    for number, name in enumerate(cut.calls):
        fill = _FILLS[_stage_of(cut, number) % len(_FILLS)]
        words = _short(name).replace("_", "\n")
        sketch.box((number * each + 0.03, top), (each - 0.06, _HIGH), words, fill=fill, sizes=(SMALL, LEAST))
    for stage, (start, end) in enumerate(pairwise(bounds)):
        place = ((start + end) / 2 * each, top + _HIGH + 0.14)
        sketch.text(place, f"stage {stage}" if (end - start) * each > width_of("stage 0", SMALL) else str(stage),
                    SMALL, align="center", bold=True)  # fmt: skip
    for begin, (words, x, row) in zip(cut.begins, labels, strict=True):
        line = [(begin * each, 0.0), (begin * each, top + _HIGH + 0.22)]
        sketch.line(*line, ink="black", line=1.6, dashed=True, zorder=3)
        sketch.text((x, top + _HIGH + 0.36 + _ROW * row), words, SMALL, align="center")
    for (key, value), level in zip(drawn.items(), levels, strict=True):
        _draw_value(sketch, cut, value, counts[key], each, (top, top - 0.1 - level * _LEVEL))
    return sketch.finish(f"A model's modules in a row. {finding}. {_told(cut)}")


def _labels(cut: Cut, each: float) -> list[tuple[str, float, int]]:
    """Return what each cut carries in all, the middle of these words, and their row, so that none lies on another."""
    labels, row_ends = [], [float("-inf")] * len(cut.begins)
    for begin in cut.begins:
        over = _over(cut, begin)
        words = f"{counted(len(over), 'tensor')}, {format_bytes(sum(value.n_bytes for value in over))}"
        half = width_of(words, SMALL) / 2 + 0.04
        x = min(max(begin * each, half), len(cut.calls) * each - half)
        row = next(i for i, end in enumerate(row_ends) if end <= x - half)
        row_ends[row] = x + half
        labels.append((words, x, row))
    return labels


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


def _draw_value(sketch: Sketch, cut: Cut, value: Value, count: int, each: float, between: tuple[float, float]) -> None:
    top, height = between
    past, start = _passes(cut, value), (value.made + 0.62) * each
    ink = chart.VERMILION if past else chart.BLUE
    for call in value.read:
        end = (call + 0.38) * each
        # What comes after the last call is the model's result.
        ends = [(end, height), (end, top)] if call < len(cut.calls) else [(call * each, height)]
        sketch.arrow((start, top), (start, height), *ends, ink=ink, line=1.8, dashed=past, head=10)
    if count > 1:
        sketch.text((start + 0.04, height - 0.1), f"×{count}", LEAST)


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
        f"{listed(_makers(cut, over))}"
        for begin in cut.begins
        if (over := _over(cut, begin))
    ]
    return "; ".join(cuts)[:1].upper() + "; ".join(cuts)[1:] + "." if cuts else ""


def _makers(cut: Cut, values: Sequence[Value]) -> list[str]:
    """Return ``block.0 (3 tensors)`` and ``down1 (for down2 and up1)``: the makers of values, and for whom."""
    named = []
    for (made, read), count in Counter((value.made, value.read) for value in values).items():
        readers = [cut.calls[call] if call < len(cut.calls) else "the result" for call in read]
        several = [f"{count} tensors"] * (count > 1) + [f"for {listed(readers)}"] * (len(read) > 1)
        named.append(f"{cut.calls[made]} ({' '.join(several)})" if several else cut.calls[made])
    return named
