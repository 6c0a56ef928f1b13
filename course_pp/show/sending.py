"""Messages between processes that each have a memory of their own: one message, and a ring that adds up."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from course_pp.base.arguments import checked, refuse_below, refuse_unless
from course_pp.show import chart
from course_pp.show.chart import WIDTH, ChartFigure, refuse_outside
from course_pp.show.sketch import MARGIN, SMALL, WORDS, Point, Sketch, fitting_size, width_of
from course_pp.show.wording import counted, format_bytes, listed_ranks

_MOST_CELLS = 6
_CELL, _GAP = 0.28, 0.22
# Of rings: of more than so many ranks only some steps are drawn, so many in a row.
_MOST_WHOLE, _IN_A_ROW = 5, 4
_HEAD, _FOOT, _BETWEEN = 0.42, 0.2, 0.34
_LEAST_CHUNK, _MOST_CHUNK = 0.12, 0.46


@checked
def message(
    values: Any = (1.0, 2.0, 3.0),
    n_ranks: int = 2,
    sender: int = 0,
    receiver: int = 1,
    title: str | None = None,
) -> ChartFigure:
    """Draw up to 8 processes, each with its own memory, and one message: what is sent, and where it
    is put.

    The receiver has made room before (zeros); the message is bytes, without shape or dtype.
    ``values`` are a tensor or array of one dimension, or numbers, which are taken as float32.
    """
    refuse_outside(2, 8, n_ranks=n_ranks)
    refuse_outside(0, n_ranks - 1, sender=sender, receiver=receiver)
    refuse_unless(
        sender != receiver, "message", "receiver", receiver, "this is the sender: give another rank"
    )
    sent = np.asarray(values, dtype=None if hasattr(values, "dtype") else np.float32)
    full, empty, size = _spelled(sent), _spelled(np.zeros_like(sent)), format_bytes(sent.nbytes)
    others = [rank for rank in range(n_ranks) if rank not in (sender, receiver)]
    finding = f"{size} go from the memory of rank {sender} to that of rank {receiver}"
    finding += (
        f"; {listed_ranks(others)} {'learns' if len(others) == 1 else 'learn'} nothing"
        if others
        else ""
    )

    each = min(2.6, (WIDTH - 2 * MARGIN - (n_ranks - 1) * _GAP) / n_ranks)
    sketch = Sketch(n_ranks * each + (n_ranks - 1) * _GAP, 2.45, title or finding)
    for rank in range(n_ranks):
        rows = {sender: [("x", full)], receiver: [("x before", empty), ("x after", full)]}.get(
            rank, []
        )
        _draw_process(sketch, rank, rank * (each + _GAP), each, rows)
    start, end = (rank * (each + _GAP) + each / 2 for rank in (sender, receiver))
    floor = 2.3
    sketch.arrow(
        (start, 1.8),
        (start, floor),
        (end, floor),
        (end, 1.83),
        ink=chart.VERMILION,
        line=2.2,
        head=15,
    )
    words = f"send → recv: {size}, no shape, no dtype"
    words = words if width_of(words, WORDS) <= abs(end - start) - 0.15 else size
    sketch.text(((start + end) / 2, floor - 0.13), words, align="center", on_white=True)
    return sketch.finish(
        f"{counted(n_ranks, 'process')} side by side, each a box with its own memory."
        f" {finding}. Rank {sender} sends x = {full}; rank {receiver} made room beforehand, x ="
        f" {empty}, and holds {full} afterwards. The message is bytes without shape and dtype."
    )


def _spelled(values: np.ndarray) -> str:
    numbers = [f"{value:g}" for value in values.tolist()]
    return " ".join(
        numbers if len(numbers) <= _MOST_CELLS else [*numbers[: _MOST_CELLS - 2], "…", numbers[-1]]
    )


def _draw_process(
    sketch: Sketch, rank: int, x: float, width: float, rows: Sequence[tuple[str, str]]
) -> None:
    middle = x + width / 2
    sketch.box(
        (x, 0.0), (width, 1.8), rounded=True, line=1.6 if rows else 1.0, dashed=not rows, zorder=1.2
    )
    sketch.text((middle, 0.2), f"rank {rank}", align="center", bold=True)
    sketch.box((x + 0.1, 0.4), (width - 0.2, 1.28), fill="#F4F4F4", edge="#BBBBBB", zorder=1.5)
    words = "its own memory" if width_of("its own memory", SMALL) < width - 0.25 else "memory"
    sketch.text((middle, 0.55), words, SMALL, align="center", ink=chart.TEXT_GREY)
    for i, (name, told) in enumerate(rows):
        y, numbers = 0.72 + 0.47 * i, told.split(" ")
        sketch.text((x + 0.18, y + 0.07), name, SMALL)
        wanted = max(width_of(number, SMALL) for number in numbers) + 0.16
        each = min(max(_CELL, wanted), (width - 0.36) / len(numbers))
        fill = chart.SKY_BLUE if name != "x before" else "white"
        for j, number in enumerate(numbers):
            sketch.box((x + 0.18 + j * each, y + 0.17), (each, 0.25), number, fill=fill)
    if not rows:
        sketch.text((middle, 1.1), "no x", SMALL, align="center", ink=chart.TEXT_GREY)


Sums = tuple[tuple[frozenset[int], ...], ...]
"""For each rank, for each chunk, the ranks whose parts are in the sum that it holds."""


class RingStep(NamedTuple):
    """What one step of the ring does."""

    sends: tuple[int, ...]  # for each rank the chunk that it sends to the next
    adds: bool  # to the receiver's own (reduce-scatter), else in its place (all-gather)
    held: Sums  # afterwards


def ring_steps(n_ranks: int) -> tuple[Sums, tuple[RingStep, ...]]:
    """Return what the ranks hold at first, and the 2 (n - 1) steps of a ring all-reduce.

    Rank r sends chunk r - s in step s of the reduce-scatter, and chunk r + 1 - s in step s of the
    all-gather, always to rank r + 1 (Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002).
    """
    held = [[frozenset((rank,)) for _ in range(n_ranks)] for rank in range(n_ranks)]
    first, steps = tuple(map(tuple, held)), []
    for step in range(2 * (n_ranks - 1)):
        adds = step < n_ranks - 1
        sends = tuple(
            (rank - step if adds else rank + 1 - (step - n_ranks + 1)) % n_ranks
            for rank in range(n_ranks)
        )
        # All messages leave before any arrives.
        under_way = [held[rank][chunk] for rank, chunk in enumerate(sends)]
        for rank, (chunk, parts) in enumerate(zip(sends, under_way, strict=True)):
            receiver = held[(rank + 1) % n_ranks]
            receiver[chunk] = receiver[chunk] | parts if adds else parts
        steps.append(RingStep(sends, adds, tuple(map(tuple, held))))
    return first, tuple(steps)


class _RingFrame(NamedTuple):
    heading: str
    held: Sums
    sends: tuple[int, ...] = ()


@checked
def ring(
    n_ranks: int = 4, step: int | None = None, n_bytes: int | None = None, title: str | None = None
) -> ChartFigure:
    """Draw a ring all-reduce of 2 to 16 ranks: a frame a step, a row a rank, a column a chunk,
    filled as it is summed.

    An arrow goes from each chunk that is sent to the rank below; the last rank's goes to the first.
    Digits are the ranks whose parts are in the sum; with more than five ranks it is their number.

    Args:
        step: only this one, counted from 1: before and after it. Of long rings only some steps are
            drawn otherwise.
        n_bytes: size of the tensor; unless given, what is sent is told as a fraction of it.
    """
    refuse_below(1, "ring", n_bytes=n_bytes)
    refuse_outside(2, 16, n_ranks=n_ranks)
    n_steps = 2 * (n_ranks - 1)
    refuse_unless(
        step is None or 1 <= step <= n_steps,
        "ring",
        "step",
        step,
        f"this ring has steps 1 to {n_steps}",
    )
    frames = _frames(n_ranks, step)
    if step is not None:
        done = "added to its own" if step < n_ranks else "put in its place"
        finding = (
            f"Step {step} of {n_steps}: every rank sends one chunk to the next, where it is {done}"
        )
    else:
        sent = f"{n_steps}/{n_ranks} of the tensor"
        if n_bytes is not None:
            part = format_bytes(float(Fraction(n_steps, n_ranks) * n_bytes))
            sent = f"{part} for a tensor of {format_bytes(n_bytes)}"
        adds, passes = ("adds", "passes") if n_ranks == 2 else ("add", "pass")
        adding = f"{counted(n_ranks - 1, 'step')} {adds} up, {n_ranks - 1} {passes} on"
        finding = f"Ring of {n_ranks}: {adding}; each rank sends {sent}"

    # The reduce-scatter has the first row, the all-gather the second.
    columns = min(max(3, n_ranks) if n_ranks <= _MOST_WHOLE else _IN_A_ROW, len(frames))
    room = (WIDTH - 2 * MARGIN - 0.6 - (columns - 1) * _BETWEEN) / columns
    cell = min(_MOST_CHUNK, max(_LEAST_CHUNK, room / n_ranks))
    side, n_rows = cell * n_ranks, -(-len(frames) // columns)
    left, high = 0.55, _HEAD + side + _FOOT
    told = (
        "digits: whose parts are in the sum"
        if n_ranks <= 5
        else "number: how many parts are in the sum"
    )
    note = f"column: chunk; {told}; ✓ all of them"
    sketch = Sketch(
        left + columns * side + (columns - 1) * _BETWEEN + 0.05,
        n_rows * high,
        title or finding,
        note,
    )
    for i, frame in enumerate(frames):
        x, y = left + i % columns * (side + _BETWEEN), i // columns * high
        _draw_frame(sketch, frame, (x, y + _HEAD), cell, with_names=i % columns == 0)

    def sums(frame: _RingFrame) -> str:
        done = [sum(len(parts) == n_ranks for parts in row) for row in frame.held]
        all_alike = f"{done[0]} of {n_ranks} chunks complete on every rank"
        return (
            f"{frame.heading.replace(chr(10), ', ')}:"
            f" {all_alike if len(set(done)) == 1 else f'complete: {done}'}"
        )

    return sketch.finish(
        f"Ring all-reduce of {counted(n_ranks, 'rank')}, a row a rank, a column a chunk. {finding}."
        f" {'; '.join(map(sums, frames))}. Arrows: what each rank sends to the rank below, the last"
        " to rank 0."
    )


def _frames(n_ranks: int, step: int | None) -> list[_RingFrame]:
    first, steps = ring_steps(n_ranks)
    names = [
        f"after step {i}\n{'reduce-scatter' if each.adds else 'all-gather'}"
        for i, each in enumerate(steps, 1)
    ]
    states, sends = [first, *(each.held for each in steps)], [*(each.sends for each in steps), ()]
    frames = [_RingFrame(*each) for each in zip(["at first", *names], states, sends, strict=True)]
    if step is not None:
        before, after = frames[step - 1 : step + 1]
        heading = "at first" if step == 1 else f"before step {step}"
        return [before._replace(heading=heading), after._replace(sends=())]
    if n_ranks > _MOST_WHOLE:
        half, last = n_ranks - 1, len(frames) - 1  # where the reduce-scatter is done
        return [frames[i] for i in sorted({0, 1, 2, half - 1, half, half + 1, last - 1, last})]
    return frames


def _draw_frame(
    sketch: Sketch, frame: _RingFrame, corner: Point, cell: float, with_names: bool
) -> None:
    n_ranks, (x, y) = len(frame.held), corner
    sketch.text((x + cell * n_ranks / 2, y - 0.2), frame.heading, SMALL, align="center", bold=True)
    for rank, row in enumerate(frame.held):
        if with_names and (cell > 0.15 or rank % 2 == 0):
            sketch.text((x - 0.08, y + cell * (rank + 0.5)), f"rank {rank}", SMALL, align="right")
        for chunk, parts in enumerate(row):
            _draw_chunk(sketch, parts, n_ranks, (x + cell * chunk, y + cell * rank), cell)
    head, line = min(8.0, 30 * cell), 1.5 if cell > 0.2 else 1.0
    for rank, chunk in enumerate(frame.sends):
        # the last one's leaves at the bottom, where the ring closes
        reach = 1.32 if rank == n_ranks - 1 else 1.45
        start, top = x + cell * (chunk + 0.84), y + cell * rank
        sketch.arrow((start, top + cell * 0.55), (start, top + cell * reach), line=line, head=head)


def _draw_chunk(
    sketch: Sketch, parts: frozenset[int], n_ranks: int, corner: Point, cell: float
) -> None:
    x, y = corner
    done, high = len(parts) == n_ranks, cell * len(parts) / n_ranks
    sketch.box((x, y), (cell, cell), fill="none", edge="#999999", line=0.6, zorder=1.4)
    fill = chart.BLUE if done else chart.SKY_BLUE
    sketch.box((x, y + cell - high), (cell, high), fill=fill, edge="none", line=0, zorder=1.2)
    words = "✓" if done else "".join(map(str, sorted(parts))) if n_ranks <= 5 else str(len(parts))
    if size := fitting_size(words, cell * 0.85 + 0.08, cell, (9.0, 8.0, 7.0, 6.0)):
        ink = "white" if done else "black"
        sketch.text(
            (x + cell * 0.42, y + cell / 2), words, size, align="center", ink=ink, bold=done
        )
