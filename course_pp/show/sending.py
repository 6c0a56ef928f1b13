"""Messages between processes with memories of their own: one message, and a ring that adds up."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from course_pp.base.arguments import checked, refuse_below, refuse_unless
from course_pp.show import chart
from course_pp.show.chart import WIDTH, ChartFigure, refuse_outside
from course_pp.show.sketch import MARGIN, SMALL, WORDS, Point, Sketch, fitting_size, width_of
from course_pp.show.wording import counted, format_bytes, listed_ranks

# The most numbers of a message that are written out; a cell, and the space between processes.
_MOST_CELLS = 6
_CELL = 0.28
_GAP = 0.22
# Rings of more ranks are drawn with some of their steps, so many in a row.
_MOST_WHOLE = 5
_IN_A_ROW = 4
# Sums of up to so many ranks are written as the digits of their ranks.
_MOST_SPELLED = 5
# Inches of a ring's frame: the heading, below the chunks, between frames, the side of a chunk.
_HEAD = 0.42
_FOOT = 0.2
_BETWEEN = 0.34
_LEAST_CHUNK = 0.12
_MOST_CHUNK = 0.46


@checked
def message(
    values: Any = (1.0, 2.0, 3.0),
    n_ranks: int = 2,
    sender: int = 0,
    receiver: int = 1,
    title: str | None = None,
) -> ChartFigure:
    """Draw up to 8 processes, each with its own memory, and one message from one to another.

    The receiver has made room before (zeros); the message is bytes, without shape or dtype.
    ``values`` are a tensor or array of one dimension, or numbers, which are taken as float32.
    """
    refuse_outside(2, 8, n_ranks=n_ranks)
    refuse_outside(0, n_ranks - 1, sender=sender, receiver=receiver)
    remedy = "this is the sender: give another rank"
    refuse_unless(sender != receiver, "message", "receiver", receiver, remedy)
    sent = np.asarray(values, dtype=None if hasattr(values, "dtype") else np.float32)
    full = _spelled(sent)
    empty = _spelled(np.zeros_like(sent))
    size = format_bytes(sent.nbytes)
    others = [rank for rank in range(n_ranks) if rank not in (sender, receiver)]
    finding = f"{size} go from the memory of rank {sender} to that of rank {receiver}"
    if others:
        learn = "learns" if len(others) == 1 else "learn"
        finding += f"; {listed_ranks(others)} {learn} nothing"

    each = min(2.6, (WIDTH - 2 * MARGIN - (n_ranks - 1) * _GAP) / n_ranks)
    sketch = Sketch(n_ranks * each + (n_ranks - 1) * _GAP, 2.45, title or finding)
    rows = {sender: [("x", full)], receiver: [("x before", empty), ("x after", full)]}
    for rank in range(n_ranks):
        _draw_process(sketch, rank, rank * (each + _GAP), width=each, rows=rows.get(rank, []))

    # Out of the sender's box, along below all boxes, and up into the receiver's.
    start = sender * (each + _GAP) + each / 2
    end = receiver * (each + _GAP) + each / 2
    floor = 2.3
    way = [(start, 1.8), (start, floor), (end, floor), (end, 1.83)]
    sketch.arrow(*way, ink=chart.VERMILION, line=2.2, head=15)
    words = f"send → recv: {size}, no shape, no dtype"
    if width_of(words, WORDS) > abs(end - start) - 0.15:
        words = size
    sketch.text(((start + end) / 2, floor - 0.13), words, align="center", on_white=True)
    return sketch.finish(
        f"{counted(n_ranks, 'process')} side by side, each a box with its own memory."
        f" {finding}. Rank {sender} sends x = {full}; rank {receiver} made room beforehand, x ="
        f" {empty}, and holds {full} afterwards. The message is bytes without shape and dtype."
    )


def _spelled(values: np.ndarray) -> str:
    numbers = [f"{value:g}" for value in values.tolist()]
    if len(numbers) > _MOST_CELLS:
        numbers[_MOST_CELLS - 2 : -1] = ["…"]
    return " ".join(numbers)


def _draw_process(
    sketch: Sketch, rank: int, x: float, width: float, rows: Sequence[tuple[str, str]]
) -> None:
    """Draw a process as a box, with a row of cells for each name and its numbers in ``rows``.

    A process without rows has no part in the message.
    """
    middle = x + width / 2
    line = 1.6 if rows else 1.0
    sketch.box((x, 0.0), (width, 1.8), rounded=True, line=line, dashed=not rows, zorder=1.2)
    sketch.text((middle, 0.2), f"rank {rank}", align="center", bold=True)
    sketch.box((x + 0.1, 0.4), (width - 0.2, 1.28), fill="#F4F4F4", edge="#BBBBBB", zorder=1.5)
    words = "its own memory"
    if width_of(words, SMALL) >= width - 0.25:
        words = "memory"
    sketch.text((middle, 0.55), words, SMALL, align="center", ink=chart.TEXT_GREY)
    for i, (name, told) in enumerate(rows):
        y = 0.72 + 0.47 * i
        numbers = told.split(" ")
        sketch.text((x + 0.18, y + 0.07), name, SMALL)
        wanted = max(width_of(number, SMALL) for number in numbers) + 0.16
        each = min(max(_CELL, wanted), (width - 0.36) / len(numbers))
        fill = chart.SKY_BLUE if name != "x before" else "white"
        for j, number in enumerate(numbers):
            sketch.box((x + 0.18 + j * each, y + 0.17), (each, 0.25), number, fill=fill)
    if not rows:
        sketch.text((middle, 1.1), "no x", SMALL, align="center", ink=chart.TEXT_GREY)


Sums = tuple[tuple[frozenset[int], ...], ...]
"""The ranks whose parts are in a sum: ``sums[rank][chunk]``."""


class RingStep(NamedTuple):
    """One step of the ring.

    Attributes:
        sends: the chunk that each rank sends to the next.
        adds: whether the receiver adds it to its own (reduce-scatter), or else puts it in its
            place (all-gather).
        held: the sums of all ranks afterwards.
    """

    sends: tuple[int, ...]
    adds: bool
    held: Sums


def ring_steps(n_ranks: int) -> tuple[Sums, tuple[RingStep, ...]]:
    """Return the sums before the first step, and the 2 (n - 1) steps of a ring all-reduce.

    Rank r sends chunk r - s in step s of the reduce-scatter, and chunk r + 1 - s in step s of the
    all-gather, always to rank r + 1 (Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002).
    """
    held = []
    for rank in range(n_ranks):
        held.append([frozenset((rank,))] * n_ranks)
    first = tuple(map(tuple, held))

    steps = []
    for step in range(2 * (n_ranks - 1)):
        adds = step < n_ranks - 1
        # Rank 0's chunk; each further rank sends the next chunk.
        offset = -step if adds else n_ranks - step
        sends = tuple((rank + offset) % n_ranks for rank in range(n_ranks))
        # All messages leave before any arrives.
        under_way = [held[rank][chunk] for rank, chunk in enumerate(sends)]
        for rank, (chunk, parts) in enumerate(zip(sends, under_way, strict=True)):
            receiver = held[(rank + 1) % n_ranks]
            receiver[chunk] = receiver[chunk] | parts if adds else parts
        steps.append(RingStep(sends, adds, held=tuple(map(tuple, held))))
    return first, tuple(steps)


class _RingFrame(NamedTuple):
    heading: str
    held: Sums
    sends: tuple[int, ...] = ()


@checked
def ring(
    n_ranks: int = 4, step: int | None = None, n_bytes: int | None = None, title: str | None = None
) -> ChartFigure:
    """Draw a ring all-reduce of 2 to 16 ranks: a frame a step, a row a rank, a column a chunk.

    Chunks are filled as they are summed. An arrow goes from each chunk that is sent to the rank
    below; the last rank's goes to the first. Digits are the ranks whose parts are in the sum; with
    more than five ranks it is their number.

    Args:
        step: the only step to draw, counted from 1: the frames before and after it. Without it,
            long rings are drawn with some of their steps.
        n_bytes: the size of the tensor. Without it, the message's size is told as a fraction.
    """
    refuse_below(1, "ring", n_bytes=n_bytes)
    refuse_outside(2, 16, n_ranks=n_ranks)
    n_steps = 2 * (n_ranks - 1)
    is_there = step is None or 1 <= step <= n_steps
    refuse_unless(is_there, "ring", "step", step, f"this ring has steps 1 to {n_steps}")
    frames = _frames(n_ranks, step)
    finding = _finding_of_ring(n_ranks, step, n_bytes)

    # The reduce-scatter has the first row, the all-gather the second.
    in_a_row = max(3, n_ranks) if n_ranks <= _MOST_WHOLE else _IN_A_ROW
    columns = min(in_a_row, len(frames))
    room = (WIDTH - 2 * MARGIN - 0.6 - (columns - 1) * _BETWEEN) / columns
    cell = min(_MOST_CHUNK, max(_LEAST_CHUNK, room / n_ranks))
    side = cell * n_ranks
    n_rows = -(-len(frames) // columns)
    left = 0.55
    high = _HEAD + side + _FOOT
    sum_is = "number: how many parts are in the sum"
    if n_ranks <= _MOST_SPELLED:
        sum_is = "digits: whose parts are in the sum"
    note = f"column: chunk; {sum_is}; ✓ all of them"
    width = left + columns * side + (columns - 1) * _BETWEEN + 0.05
    sketch = Sketch(width, n_rows * high, title or finding, note=note)
    told = []
    for i, frame in enumerate(frames):
        row, column = divmod(i, columns)
        corner = (left + column * (side + _BETWEEN), row * high + _HEAD)
        _draw_frame(sketch, frame, corner, cell=cell, with_names=column == 0)

        done = [sum(len(parts) == n_ranks for parts in chunks) for chunks in frame.held]
        state = f"complete: {done}"
        if len(set(done)) == 1:
            state = f"{done[0]} of {n_ranks} chunks complete on every rank"
        told.append(f"{frame.heading.replace(chr(10), ', ')}: {state}")
    return sketch.finish(
        f"Ring all-reduce of {counted(n_ranks, 'rank')}, a row a rank, a column a chunk. {finding}."
        f" {'; '.join(told)}. Arrows: what each rank sends to the rank below, the last"
        " to rank 0."
    )


def _finding_of_ring(n_ranks: int, step: int | None, n_bytes: int | None) -> str:
    n_steps = 2 * (n_ranks - 1)
    if step is not None:
        done = "added to its own" if step < n_ranks else "put in its place"
        sends = "every rank sends one chunk to the next"
        return f"Step {step} of {n_steps}: {sends}, where it is {done}"

    sent = f"{n_steps}/{n_ranks} of the tensor"
    if n_bytes is not None:
        part = format_bytes(float(Fraction(n_steps, n_ranks) * n_bytes))
        sent = f"{part} for a tensor of {format_bytes(n_bytes)}"
    adds, passes = ("adds", "passes") if n_ranks == 2 else ("add", "pass")
    adding = f"{counted(n_ranks - 1, 'step')} {adds} up, {n_ranks - 1} {passes} on"
    return f"Ring of {n_ranks}: {adding}; each rank sends {sent}"


def _frames(n_ranks: int, step: int | None) -> list[_RingFrame]:
    """Return the frames to draw, each with the messages that leave it."""
    held, steps = ring_steps(n_ranks)
    frames = []
    heading = "at first"
    for i, each in enumerate(steps, start=1):
        frames.append(_RingFrame(heading, held, each.sends))
        heading = f"after step {i}\n{'reduce-scatter' if each.adds else 'all-gather'}"
        held = each.held
    frames.append(_RingFrame(heading, held))

    if step is not None:
        before, after = frames[step - 1 : step + 1]
        heading = "at first" if step == 1 else f"before step {step}"
        return [before._replace(heading=heading), after._replace(sends=())]
    if n_ranks > _MOST_WHOLE:
        half = n_ranks - 1  # where the reduce-scatter is done
        last = len(frames) - 1
        return [frames[i] for i in sorted({0, 1, 2, half - 1, half, half + 1, last - 1, last})]
    return frames


def _draw_frame(
    sketch: Sketch, frame: _RingFrame, corner: Point, cell: float, with_names: bool
) -> None:
    n_ranks = len(frame.held)
    x, y = corner
    sketch.text((x + cell * n_ranks / 2, y - 0.2), frame.heading, SMALL, align="center", bold=True)
    for rank, row in enumerate(frame.held):
        if with_names and (cell > 0.15 or rank % 2 == 0):
            sketch.text((x - 0.08, y + cell * (rank + 0.5)), f"rank {rank}", SMALL, align="right")
        for chunk, parts in enumerate(row):
            place = (x + cell * chunk, y + cell * rank)
            _draw_chunk(sketch, parts, n_ranks, corner=place, cell=cell)

    head = min(8.0, 30 * cell)
    line = 1.5 if cell > 0.2 else 1.0
    for rank, chunk in enumerate(frame.sends):
        # The last one's leaves at the bottom, where the ring closes.
        reach = 1.32 if rank == n_ranks - 1 else 1.45
        start = x + cell * (chunk + 0.84)
        top = y + cell * rank
        sketch.arrow((start, top + cell * 0.55), (start, top + cell * reach), line=line, head=head)


def _draw_chunk(
    sketch: Sketch, parts: frozenset[int], n_ranks: int, corner: Point, cell: float
) -> None:
    """Draw a chunk, filled from below by the share of parts that are in its sum."""
    x, y = corner
    is_done = len(parts) == n_ranks
    high = cell * len(parts) / n_ranks
    sketch.box((x, y), (cell, cell), fill="none", edge="#999999", line=0.6, zorder=1.4)
    fill = chart.BLUE if is_done else chart.SKY_BLUE
    sketch.box((x, y + cell - high), (cell, high), fill=fill, edge="none", line=0, zorder=1.2)

    words = str(len(parts))
    if is_done:
        words = "✓"
    elif n_ranks <= _MOST_SPELLED:
        words = "".join(map(str, sorted(parts)))
    size = fitting_size(words, cell * 0.85 + 0.08, cell, sizes=(9.0, 8.0, 7.0, 6.0))
    if size:
        ink = "white" if is_done else "black"
        middle = (x + cell * 0.42, y + cell / 2)
        sketch.text(middle, words, size, align="center", ink=ink, bold=is_done)
