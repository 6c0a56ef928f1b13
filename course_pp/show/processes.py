"""Processes with a memory of their own, and a message between two of them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from course_pp.arguments import checked, refuse_unless
from course_pp.show import chart
from course_pp.show.byte_bars import format_bytes
from course_pp.show.chart import WIDTH, ChartFigure
from course_pp.show.sketch import MARGIN, SMALL, WORDS, Sketch, width_of
from course_pp.show.wording import counted, listed

_MOST_RANKS, _MOST_CELLS = 8, 6
_CELL, _GAP = 0.28, 0.22


@checked
def message(
    values: Any = (1.0, 2.0, 3.0),
    n_ranks: int = 2,
    sender: int = 0,
    receiver: int = 1,
    title: str | None = None,
) -> ChartFigure:
    """Draw ``n_ranks`` processes, each with its own memory, and one message: what is sent, and where it is put.

    The receiver has made room before (zeros); the message is bytes, without shape or dtype. The other processes learn
    nothing.

    Args:
        values: what is sent, of one dimension: a tensor, an array or numbers (then taken as float32).
        title: instead of the finding.

    Raises:
        ValueError: for fewer than 2 ranks or more than 8, a sender or receiver that is no rank or both the same, and
            for values of another number of dimensions.
    """
    _refuse(n_ranks, sender, receiver)
    try:
        sent = np.asarray(values, dtype=None if hasattr(values, "dtype") else np.float32)
    except (OverflowError, TypeError, ValueError):
        refuse_unless(False, "message", "values", values, "give a tensor, an array or numbers, in one dimension")
    if sent.ndim != 1 or not sent.size:
        raise ValueError(f"values of shape {sent.shape}: give at least one number, in one dimension")
    full, empty = _spelled(sent), _spelled(np.zeros_like(sent))
    size = format_bytes(sent.nbytes)
    others = [rank for rank in range(n_ranks) if rank not in (sender, receiver)]
    finding = f"{size} go from the memory of rank {sender} to that of rank {receiver}"
    finding += f"; {_named(others)} {'learns' if len(others) == 1 else 'learn'} nothing" if others else ""

    each = min(2.6, (WIDTH - 2 * MARGIN - (n_ranks - 1) * _GAP) / n_ranks)
    sketch = Sketch(n_ranks * each + (n_ranks - 1) * _GAP, 2.45, title or finding)
    for rank in range(n_ranks):
        rows = {sender: [("x", full)], receiver: [("x before", empty), ("x after", full)]}.get(rank, [])
        _draw_process(sketch, rank, rank * (each + _GAP), each, rows)
    start, end = (rank * (each + _GAP) + each / 2 for rank in (sender, receiver))
    floor = 2.3
    sketch.arrow((start, 1.8), (start, floor), (end, floor), (end, 1.83), ink=chart.VERMILION, line=2.2, head=15)
    words = f"send → recv: {size}, no shape, no dtype"
    room = abs(end - start) - 0.15
    words = words if width_of(words, WORDS) <= room else size
    sketch.text(((start + end) / 2, floor - 0.13), words, align="center", on_white=True)
    return sketch.finish(
        f"{counted(n_ranks, 'process', 'processes')} side by side, each a box with its own memory. {finding}. "
        f"Rank {sender} sends x = {full}; rank {receiver} made room beforehand, x = {empty}, and holds {full} "
        "afterwards. The message is bytes without shape and dtype."
    )


def _refuse(n_ranks: int, sender: int, receiver: int) -> None:
    if not 2 <= n_ranks <= _MOST_RANKS:
        raise ValueError(f"n_ranks={n_ranks}: a message needs 2, and up to {_MOST_RANKS} are drawn")
    for name, rank in (("sender", sender), ("receiver", receiver)):
        if not 0 <= rank < n_ranks:
            raise ValueError(f"{name} {rank}: give a rank from 0 to {n_ranks - 1}")
    if sender == receiver:
        raise ValueError(f"sender and receiver are both rank {sender}: give another receiver")


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {listed([str(rank) for rank in ranks])}"


def _spelled(values: np.ndarray) -> str:
    numbers = [f"{value:g}" for value in values.tolist()]
    return " ".join(numbers if len(numbers) <= _MOST_CELLS else [*numbers[: _MOST_CELLS - 2], "…", numbers[-1]])


def _draw_process(sketch: Sketch, rank: int, x: float, width: float, rows: Sequence[tuple[str, str]]) -> None:
    sketch.box((x, 0.0), (width, 1.8), rounded=True, line=1.6 if rows else 1.0, dashed=not rows, zorder=1.2)
    sketch.text((x + width / 2, 0.2), f"rank {rank}", align="center", bold=True)
    sketch.box((x + 0.1, 0.4), (width - 0.2, 1.28), fill="#F4F4F4", edge="#BBBBBB", zorder=1.5)
    words = "its own memory" if width_of("its own memory", SMALL) < width - 0.25 else "memory"
    sketch.text((x + width / 2, 0.55), words, SMALL, align="center", ink=chart.TEXT_GREY)
    for i, (name, numbers) in enumerate(rows):
        y = 0.72 + 0.47 * i
        sketch.text((x + 0.18, y + 0.07), name, SMALL)
        fill = chart.SKY_BLUE if name != "x before" else "white"
        _draw_cells(sketch, (x + 0.18, y + 0.17), width - 0.36, numbers.split(" "), fill)
    if not rows:
        sketch.text((x + width / 2, 1.1), "no x", SMALL, align="center", ink=chart.TEXT_GREY)


def _draw_cells(sketch: Sketch, corner: tuple[float, float], room: float, numbers: Sequence[str], fill: str) -> None:
    wanted = max(width_of(number, SMALL) for number in numbers) + 0.16
    each = min(max(_CELL, wanted), room / len(numbers))
    for i, number in enumerate(numbers):
        sketch.box((corner[0] + i * each, corner[1]), (each, 0.25), number, fill=fill)
