"""The ring all-reduce, chunk by chunk and step by step."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from course_pp.arguments import checked, refuse_below
from course_pp.show import chart
from course_pp.show.byte_bars import format_bytes
from course_pp.show.chart import WIDTH, ChartFigure
from course_pp.show.sketch import MARGIN, SMALL, Sketch, fitting_size
from course_pp.show.wording import counted

_MOST_RANKS, _MOST_WHOLE, _IN_A_ROW = 16, 5, 4
_HEAD, _FOOT, _GAP = 0.42, 0.2, 0.34
_LEAST_CELL, _MOST_CELL = 0.12, 0.46

Held = tuple[tuple[frozenset[int], ...], ...]
"""For each rank, for each chunk, the ranks whose parts are in the sum that it holds."""


@dataclass(frozen=True)
class RingStep:
    """What one step of the ring does.

    Attributes:
        sends: for each rank the chunk that it sends to the next.
        adds: whether the receiver adds it to its own (reduce-scatter) or puts it in its place (all-gather).
        held: what every rank holds afterwards.
    """

    sends: tuple[int, ...]
    adds: bool
    held: Held


def ring_steps(n_ranks: int) -> tuple[Held, tuple[RingStep, ...]]:
    """Return what the ranks hold at first, and the 2 (n - 1) steps of a ring all-reduce.

    Rank r sends chunk r - s in step s of the reduce-scatter, and chunk r + 1 - s in step s of the all-gather, always to
    rank r + 1 (Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002).
    """
    held = [[frozenset((rank,)) for _ in range(n_ranks)] for rank in range(n_ranks)]
    first, steps = tuple(map(tuple, held)), []
    for step in range(2 * (n_ranks - 1)):
        adds = step < n_ranks - 1
        sends = tuple((rank - step if adds else rank + 1 - (step - n_ranks + 1)) % n_ranks for rank in range(n_ranks))
        # All messages leave before any arrives.
        under_way = [held[rank][chunk] for rank, chunk in enumerate(sends)]
        for rank, (chunk, parts) in enumerate(zip(sends, under_way, strict=True)):
            receiver = held[(rank + 1) % n_ranks]
            receiver[chunk] = receiver[chunk] | parts if adds else parts
        steps.append(RingStep(sends, adds, tuple(map(tuple, held))))
    return first, tuple(steps)


@dataclass(frozen=True)
class _Frame:
    heading: str
    held: Held
    sends: tuple[int, ...] = ()


@checked
def ring(
    n_ranks: int = 4, step: int | None = None, n_bytes: int | None = None, title: str | None = None
) -> ChartFigure:
    """Draw a ring all-reduce: one frame a step, a row a rank, a column a chunk, filled as far as it is summed.

    An arrow goes from each chunk that is sent to the rank below; the last rank's goes to the first. Digits are the
    ranks whose parts are in the sum; with more than five ranks it is their number.

    Args:
        step: only this one, counted from 1: before and after it. Of long rings only some steps are drawn otherwise.
        n_bytes: size of the tensor; unless given, what is sent is told as a fraction of it.
        title: instead of the finding.

    Raises:
        ValueError: for fewer than 2 ranks or more than 16, and for a step that does not exist.
    """
    refuse_below(1, "ring", n_bytes=n_bytes)
    if not 2 <= n_ranks <= _MOST_RANKS:
        raise ValueError(f"n_ranks={n_ranks}: rings from 2 to {_MOST_RANKS} are drawn")
    n_steps = 2 * (n_ranks - 1)
    if step is not None and not 1 <= step <= n_steps:
        raise ValueError(f"step {step}: a ring of {n_ranks} has steps 1 to {n_steps}")
    frames = _frames(n_ranks, step)
    finding = _finding(n_ranks, step, n_bytes)

    # The reduce-scatter has the first row, the all-gather the second.
    columns = min(max(3, n_ranks) if n_ranks <= _MOST_WHOLE else _IN_A_ROW, len(frames))
    room = (WIDTH - 2 * MARGIN - 0.6 - (columns - 1) * _GAP) / columns
    cell = min(_MOST_CELL, max(_LEAST_CELL, room / n_ranks))
    side, n_rows = cell * n_ranks, -(-len(frames) // columns)
    left, high = 0.55, _HEAD + side + _FOOT
    told = "digits: whose parts are in the sum" if n_ranks <= 5 else "number: how many parts are in the sum"
    note = f"column: chunk; {told}; ✓ all of them"
    sketch = Sketch(left + columns * side + (columns - 1) * _GAP + 0.05, n_rows * high, title or finding, note)
    for i, frame in enumerate(frames):
        x, y = left + i % columns * (side + _GAP), i // columns * high
        _draw_frame(sketch, frame, (x, y + _HEAD), cell, with_names=i % columns == 0)
    return sketch.finish(_alt_text(n_ranks, finding, frames))


def _frames(n_ranks: int, step: int | None) -> list[_Frame]:
    first, steps = ring_steps(n_ranks)
    states = [first, *(each.held for each in steps)]
    sends = [*(each.sends for each in steps), ()]
    named = ["at first"] + [
        f"after step {i + 1}\n{'reduce-scatter' if each.adds else 'all-gather'}" for i, each in enumerate(steps)
    ]
    if step is not None:
        return [
            _Frame(named[step - 1] if step == 1 else f"before step {step}", states[step - 1], sends[step - 1]),
            _Frame(named[step], states[step]),
        ]
    wanted = list(range(len(states)))
    if n_ranks > _MOST_WHOLE:
        half = n_ranks - 1  # where the reduce-scatter is done
        wanted = sorted({0, 1, 2, half - 1, half, half + 1, len(states) - 2, len(states) - 1})
    return [_Frame(named[i], states[i], sends[i]) for i in wanted]


def _draw_frame(sketch: Sketch, frame: _Frame, corner: tuple[float, float], cell: float, with_names: bool) -> None:
    n_ranks, (x, y) = len(frame.held), corner
    sketch.text((x + cell * n_ranks / 2, y - 0.2), frame.heading, SMALL, align="center", bold=True)
    for rank, row in enumerate(frame.held):
        if with_names and (cell > 0.15 or rank % 2 == 0):
            sketch.text((x - 0.08, y + cell * (rank + 0.5)), f"rank {rank}", SMALL, align="right")
        for chunk, parts in enumerate(row):
            _draw_chunk(sketch, parts, n_ranks, (x + cell * chunk, y + cell * rank), cell)
    for rank, chunk in enumerate(frame.sends):
        _draw_message(sketch, (x + cell * (chunk + 0.84), y + cell * rank), cell, is_last=rank == n_ranks - 1)


def _draw_chunk(sketch: Sketch, parts: frozenset[int], n_ranks: int, corner: tuple[float, float], cell: float) -> None:
    x, y = corner
    done, high = len(parts) == n_ranks, cell * len(parts) / n_ranks
    sketch.box((x, y), (cell, cell), fill="none", edge="#999999", line=0.6, zorder=1.4)
    fill = chart.BLUE if done else chart.SKY_BLUE
    sketch.box((x, y + cell - high), (cell, high), fill=fill, edge="none", line=0, zorder=1.2)
    words = "✓" if done else "".join(map(str, sorted(parts))) if n_ranks <= 5 else str(len(parts))
    if size := fitting_size(words, cell * 0.85 + 0.08, cell, (9.0, 8.0, 7.0, 6.0)):
        ink = "white" if done else "black"
        sketch.text((x + cell * 0.42, y + cell / 2), words, size, align="center", ink=ink, bold=done)


def _draw_message(sketch: Sketch, start: tuple[float, float], cell: float, is_last: bool) -> None:
    x, y = start
    head, line = min(8.0, 30 * cell), 1.5 if cell > 0.2 else 1.0
    reach = 1.32 if is_last else 1.45  # the last one's leaves at the bottom, where the ring closes
    sketch.arrow((x, y + cell * 0.55), (x, y + cell * reach), line=line, head=head)


def _finding(n_ranks: int, step: int | None, n_bytes: int | None) -> str:
    n_steps = 2 * (n_ranks - 1)
    sent = Fraction(n_steps, n_ranks)
    if step is not None:
        done = "added to its own" if step < n_ranks else "put in its place"
        return f"Step {step} of {n_steps}: every rank sends one chunk to the next, where it is {done}"
    amount = f"{n_steps}/{n_ranks} of the tensor"
    if n_bytes is not None:
        amount = f"{format_bytes(float(sent * n_bytes))} for a tensor of {format_bytes(n_bytes)}"
    steps = counted(n_ranks - 1, "step")
    adding = f"{steps} {'adds' if n_ranks == 2 else 'add'} up, {n_ranks - 1} {'passes' if n_ranks == 2 else 'pass'} on"
    return f"Ring of {n_ranks}: {adding}; each rank sends {amount}"


def _alt_text(n_ranks: int, finding: str, frames: Sequence[_Frame]) -> str:
    def told(frame: _Frame) -> str:
        done = [sum(len(parts) == n_ranks for parts in row) for row in frame.held]
        sums = f"{done[0]} of {n_ranks} chunks complete on every rank" if len(set(done)) == 1 else f"complete: {done}"
        return f"{frame.heading.replace(chr(10), ', ')}: {sums}"

    return (
        f"Ring all-reduce of {counted(n_ranks, 'rank')}, a row a rank, a column a chunk. {finding}. "
        f"{'; '.join(map(told, frames))}. Arrows: what each rank sends to the rank below, the last to rank 0."
    )
