"""The way through the ranks: where stages live, microbatches in a few frames, the graph that autograd walks back."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from course_pp.base.arguments import checked, refuse_below, refuse_unless
from course_pp.schedule import Schedule, Span, Time, Timeline, format_time, simulate
from course_pp.show import chart
from course_pp.show.chart import WIDTH, ChartFigure, refuse_outside
from course_pp.show.sketch import LEAST, MARGIN, SERIES, SMALL, Point, Sketch, width_of
from course_pp.show.timelines import LOOKS
from course_pp.show.trace import held_activations
from course_pp.show.wording import counted, listed, most_busy_at_once, named

# Inches: of a stage, and between two rows of them.
_HEAD, _STAGE, _BETWEEN = 0.3, 0.42, 0.34
# Of a frame: the time, what waits or is through, a row, between two, a card.
_TIME, _SIDE, _HIGH, _GAP, _CARD = 0.55, 1.55, 0.62, 0.12, 0.18
# Of a graph: the names, the heading, a row, a box, the weights.
_LEFT, _TOP, _ROW, _BOX, _FOOT = 1.05, 0.4, 0.56, 0.34, 0.62


@checked
def placement(schedule: Schedule, title: str | None = None) -> ChartFigure:
    """Draw which stages each of up to 16 ranks holds, and the way that a microbatch takes through
    them.

    Stages are slices of the model, numbered from the embedding to the head. A solid arrow is a
    message, a dashed one stays on its rank.
    """
    p, placed = schedule.n_ranks, schedule.placement
    refuse_outside(1, 16, ranks_of_schedule=p)
    held = [[stage for stage, ranks in enumerate(placed) if rank in ranks] for rank in range(p)]
    n_rows = max(map(len, held))
    finding = _finding_of_placement(schedule)
    gap = 0.3 if p <= 8 else 0.15
    each = min(1.5, (WIDTH - 2 * MARGIN - (p - 1) * gap) / p)
    row = _STAGE + _BETWEEN
    key = "the way of a microbatch in forward; solid: a message; dashed: no message, the same rank"
    sketch = Sketch(p * each + (p - 1) * gap, _HEAD + n_rows * row - 0.05, title or finding, key)
    places: dict[tuple[int, int], Point] = {}
    for rank, stages in enumerate(held):
        x = rank * (each + gap)
        name = f"rank {rank}" if p <= 12 else str(rank)
        sketch.text((x + each / 2, 0.08), name, align="center", bold=True)
        sketch.box((x, 0.22), (each, n_rows * row), rounded=True, zorder=1)
        for i, stage in enumerate(stages):
            places[stage, rank] = (x + 0.07, _HEAD + i * row + 0.06)
            fill, ink = SERIES[stage % len(SERIES)]
            what = {0: "\nembedding", schedule.n_stages - 1: "\nhead"}.get(stage, "")
            for words in (f"stage {stage}{what}", f"stage {stage}", str(stage)):
                if sketch.box(
                    places[stage, rank], (each - 0.14, _STAGE), words, fill=fill, ink=ink
                ):
                    break
    for stage, (before, ranks) in enumerate(pairwise(placed), start=1):
        for i in range(max(len(before), len(ranks))):
            start, end = (stage - 1, before[i % len(before)]), (stage, ranks[i % len(ranks)])
            _draw_way(sketch, places[start], places[end], each - 0.14, gap + 0.14)
    each_rank = "; ".join(
        f"rank {rank}: stage{'s' if len(stages) > 1 else ''} {listed(stages) or 'none'}"
        for rank, stages in enumerate(held)
    )
    return sketch.finish(
        f"Ranks as columns, the stages that each holds as slices. {finding}. {each_rank}."
    )


def _draw_way(sketch: Sketch, start: Point, end: Point, width: float, gap: float) -> None:
    (x0, y0), (x1, y1) = start, end
    middle = _STAGE / 2
    if x0 == x1:  # it stays
        x = x0 + width / 2
        sketch.arrow((x, y0 + _STAGE), (x, y1), dashed=True, ink=chart.TEXT_GREY, line=1.8)
    elif abs(y0 - y1) < 1e-9 and abs(x1 - x0) < width + gap + 0.01:
        there = 1 if x1 > x0 else -1
        first = x0 + width if there > 0 else x0
        sketch.arrow((first, y0 + middle), (first + there * gap, y0 + middle), line=1.8)
    else:  # between two rows, to the beginning of the next
        lane = max(y0, y1) - _BETWEEN / 2 if y0 != y1 else y0 + _STAGE + _BETWEEN / 2
        out = (x0 + width / 2, y0 if y1 < y0 else y0 + _STAGE)
        into = (x1 + width / 2, y1 if y1 > y0 else y1 + _STAGE)
        sketch.arrow(out, (out[0], lane), (into[0], lane), into, line=1.8)


def _finding_of_placement(schedule: Schedule) -> str:
    stages, p = schedule.placement, schedule.n_ranks
    sizes = f"{counted(len(stages), 'stage')} on {counted(p, 'rank')}"
    if len(stages) == 1 or p == 1:
        return f"{sizes}: no messages"
    one_way = sum(before != after for before, after in pairwise(stages))
    ends = (
        "first and last stage on one rank"
        if set(stages[0]) & set(stages[-1])
        else "first and last stage far apart"
    )
    ranks = [each[0] for each in stages]
    zigzag = [rank if not stage // p % 2 else p - 1 - rank for stage, rank in enumerate(ranks)]
    shape = "A placement of its own"
    if stages == tuple((stage, p - 1 - stage) for stage in range(p)):
        shape = "Two ways, a copy of every stage for each"
    elif any(len(each) > 1 for each in stages):
        # Where ranks share a stage, the way of a microbatch has more than one beginning.
        return f"Replicated stages: {sizes}, {counted(one_way, 'message')} each way"
    elif ranks == list(range(p)):
        shape = "A line"
    elif ranks == [stage % p for stage in range(len(ranks))]:
        shape = "A loop"
    elif ranks == [*range(p), *reversed(range(p))]:
        shape = "A V"
    elif len(ranks) % (2 * p) == 0 and zigzag == [stage % p for stage in range(len(ranks))]:
        shape = f"{len(ranks) // (2 * p)} waves"
    return f"{shape}: {sizes}, {counted(one_way, 'message')} each way, {ends}"


@dataclass(frozen=True)
class Frame:
    """What every rank does at one time, and where the microbatches are."""

    time: Time
    at_work: tuple[Span | None, ...]  # for each rank; None for one that idles
    waiting: tuple[int, ...]  # no rank has begun them
    # for each rank those whose activations it holds, once for each of its stages
    kept: tuple[tuple[int, ...], ...]
    done: tuple[int, ...]


def frame_at(tl: Timeline, time: Time) -> Frame:
    """Return the state of a timeline at ``time``: what begins just then has begun, what ends has ended."""
    at_work: list[Span | None] = [None] * tl.n_ranks
    ends: dict[int, Time] = {}
    begun: set[int] = set()
    for span in tl.spans:
        numbers = {part.microbatch for part in span.action.parts}
        ends.update({number: max(ends.get(number, span.end), span.end) for number in numbers})
        if span.start <= time < span.end:
            at_work[span.rank] = span
        if span.start <= time:
            begun |= numbers
    kept: list[list[int]] = [[] for _ in range(tl.n_ranks)]
    for held in sorted(held_activations(tl), key=lambda each: (each.stage, each.microbatch)):
        if held.start <= time < held.end:
            kept[held.rank].append(held.microbatch)
    done = tuple(sorted(number for number, end in ends.items() if end <= time))
    return Frame(
        time, tuple(at_work), tuple(sorted(set(ends) - begun)), tuple(map(tuple, kept)), done
    )


@checked
def microbatches(
    timeline: Timeline | Schedule, frames: int = 6, title: str | None = None
) -> ChartFigure:
    """Draw a batch cut into microbatches on its way through the ranks, a frame a row.

    In each frame: what waits, what each rank does (``F2`` to the right, ``B2`` to the left) and
    whose activations it keeps, and what is through.

    Args:
        timeline: of up to 8 ranks; a schedule is simulated with a forward of 1 and a backward of 2.
        frames: how many: the first in a row, the first with most ranks at work, the others evenly
            until the end.
    """
    refuse_below(1, "microbatches", frames=frames)
    tl = simulate(timeline) if isinstance(timeline, Schedule) else timeline
    refuse_outside(1, 8, ranks_of_timeline=tl.n_ranks)
    refuse_unless(
        bool(tl.spans), "microbatches", "timeline", timeline, "give one in which ranks work"
    )
    shown = [frame_at(tl, time) for time in _chosen(tl, frames)]
    most, batch = most_busy_at_once(tl), counted(tl.n_microbatches, "microbatch")
    finding = f"A batch cut into {batch}: up to {most} of {tl.n_ranks} ranks work at once"
    if tl.n_microbatches == 1:
        finding = f"One microbatch: {counted(most, 'rank')} of {tl.n_ranks} at work at a time"
    side = _SIDE if tl.n_ranks <= 6 else 1.2
    each = min(1.6, (WIDTH - 2 * MARGIN - _TIME - 2 * side) / tl.n_ranks - 0.12)
    width = _TIME + 2 * side + tl.n_ranks * (each + 0.12)
    lefts = [_TIME + side + rank * (each + 0.12) for rank in range(tl.n_ranks)]
    note = (
        "→ forward, ← backward; small cards: microbatches whose activations the rank keeps; grey:"
        " it idles"
    )
    sketch = Sketch(width, _HEAD + len(shown) * (_HIGH + _GAP), title or finding, note)
    sketch.text((0, 0.1), "time", bold=True)
    sketch.text((_TIME, 0.1), "waiting", bold=True)
    sketch.text((width - side + 0.1, 0.1), "through", bold=True)
    for rank, x in enumerate(lefts):
        sketch.text((x + each / 2, 0.1), f"rank {rank}", align="center", bold=True)
    for i, frame in enumerate(shown):
        y = _HEAD + i * (_HIGH + _GAP)
        card = y + _HIGH / 2 - _CARD / 2
        sketch.text((0, y + _HIGH / 2), format_time(frame.time, tl.unit), SMALL)
        _draw_cards(sketch, frame.waiting, (_TIME, card), side - 0.1, chart.YELLOW)
        _draw_cards(sketch, frame.done, (width - side + 0.1, card), side - 0.1, chart.GREEN)
        for x, span, kept in zip(lefts, frame.at_work, frame.kept, strict=True):
            _draw_rank(sketch, span, kept, (x, y), each, with_stage=tl.n_stages > tl.n_ranks)
    told = []
    for frame in shown:
        at_work = [f"rank {span.rank} {span.action}" for span in frame.at_work if span is not None]
        at = format_time(frame.time, tl.unit)
        told.append(f"at {at}: {listed(at_work) or 'nobody at work'}, {len(frame.done)} through")
    what = named(tl.name, f"{batch} on their way through")
    return sketch.finish(
        f"{what} {counted(tl.n_ranks, 'rank')}, a frame a row. {finding}. {'; '.join(told)}."
    )


def _chosen(tl: Timeline, number: int) -> list[Time]:
    """Choose times: the first starts one after the other, the one with most ranks at work, the rest evenly."""
    starts = sorted({span.start for span in tl.spans})
    if len(starts) <= number:
        return starts
    first = number // 2
    busiest = max(starts, key=lambda time: sum(span.start <= time < span.end for span in tl.spans))
    chosen = {*starts[:first], busiest}
    n_more = number - len(chosen)
    chosen.update(
        starts[first + (i + 1) * (len(starts) - 1 - first) // n_more] for i in range(n_more)
    )
    return sorted(chosen)


def _draw_cards(
    sketch: Sketch, cards: Sequence[int], corner: Point, room: float, fill: str
) -> None:
    x, y = corner
    each = max(_CARD, max((width_of(str(card), LEAST) for card in cards), default=0) + 0.09)
    fits = int(room / each)
    shown = cards if len(cards) <= fits else cards[: max(1, fits - 2)]
    for i, card in enumerate(shown):
        sketch.box((x + i * each, y), (each, _CARD), str(card), fill=fill, sizes=(LEAST,), line=0.8)
    if len(shown) < len(cards):
        sketch.text(
            (x + len(shown) * each + 0.04, y + _CARD / 2), f"+{len(cards) - len(shown)}", LEAST
        )


def _draw_rank(
    sketch: Sketch,
    span: Span | None,
    kept: Sequence[int],
    corner: Point,
    width: float,
    with_stage: bool,
) -> None:
    (x, y), half = corner, _HIGH * 0.52
    sketch.box(corner, (width, _HIGH), fill="white", line=0.8, zorder=1)
    if span is None:
        sketch.box(
            (x + 0.04, y + 0.04),
            (width - 0.08, half - 0.04),
            "idle",
            fill=chart.IDLE_GREY,
            edge="none",
            line=0,
        )
    else:
        parts = span.action.parts
        each = (width - 0.08) / len(parts)
        for i, part in enumerate(parts):
            name = f"{part.stage if with_stage else ''}{part.kind}{part.microbatch}"
            words = f"{name} →" if part.kind == "F" else f"← {name}" if part.kind in "BI" else name
            place, look = ((x + 0.04 + i * each, y + 0.04), (each, half - 0.04)), LOOKS[part.kind]
            sketch.box(*place, words, fill=look.colour, hatch=look.hatch, bold=True)
    _draw_cards(sketch, kept, (x + 0.05, y + half + 0.055), width - 0.1, chart.SKY_BLUE)


@checked
def autograd(n_stages: int = 2, n_microbatches: int = 3, title: str | None = None) -> ChartFigure:
    """Draw the graph of one step: microbatches through stages to their losses, times 1/m, summed;
    and all of it back.

    Solid arrows are forward, dashed ones backward. Between two stages a tensor crosses to another
    rank, where it begins a graph of its own; its gradient is sent back, and backward goes on there.
    Each stage adds up the gradients of all microbatches in its weights.
    """
    refuse_outside(1, 8, n_stages=n_stages, n_microbatches=n_microbatches)
    m, p = n_microbatches, n_stages
    factor = "1" if m == 1 else f"1/{m}"
    finding = (
        f"The loss is the mean of {m}, so {counted(m, 'backward')}"
        f" {'starts' if m == 1 else 'start'} from {factor}, and each stage adds up what they give"
    )
    gap = 0.42 if p <= 4 else 0.26
    each = min(1.0, (WIDTH - 2 * MARGIN - _LEFT - 1.9 - (p + 2) * gap) / p)
    loss_x = _LEFT + p * (each + gap)
    mean_x = loss_x + 0.55 + gap
    sum_x = mean_x + 0.5 + gap
    floor, middle = _TOP + m * _ROW, _TOP + (m - 1) * _ROW / 2
    note = "solid: forward; dashed: backward; grey line: from one rank to the next, a message"
    sketch = Sketch(sum_x + 0.75, floor + _FOOT, title or finding, note)
    small = (SMALL, LEAST)

    def there_and_back(start: Point, end: Point, line: float) -> None:
        (x0, y0), (x1, y1), there, back = start, end, _BOX * 0.3, _BOX * 0.72
        sketch.arrow((x0, y0 + there), (x1, y1 + there), line=line, head=8)
        sketch.arrow(
            (x1, y1 + back), (x0, y0 + back), ink=chart.VERMILION, line=line, head=8, dashed=True
        )

    lefts = [_LEFT + stage * (each + gap) for stage in range(p)]
    for stage, x in enumerate(lefts):
        centre = x + each / 2
        sketch.text((centre, 0.06), f"stage {stage}", SMALL, align="center", bold=True)
        if stage:
            sketch.line(
                (x - gap / 2, 0), (x - gap / 2, floor + _FOOT - 0.05), dashed=True, ink="#999999"
            )
        # Its weights under its column, and the gradients of all microbatches on their way down to
        # them.
        down: dict[str, Any] = {
            "ink": chart.VERMILION,
            "line": 1.6,
            "dashed": True,
            "head": 9,
            "zorder": 2,
        }
        sketch.arrow((centre, _TOP + _BOX), (centre, floor + 0.12), **down)
        for words in (
            f"W{stage}.grad = sum of {m}",
            f"W{stage}.grad\nsum of {m}",
            f"W{stage}\n.grad",
        ):
            if sketch.box((x, floor + 0.12), (each, 0.4), words, fill=chart.GREEN, sizes=small):
                break
    for i in range(m):
        y = _TOP + i * _ROW
        sketch.text((0, y + _BOX / 2), f"microbatch {i}", SMALL)
        for x in lefts:
            sketch.box(
                (x, y), (each, _BOX), f"F{i}, B{i}", fill=chart.SKY_BLUE, zorder=3, sizes=small
            )
        sketch.box((loss_x, y), (0.55, _BOX), f"loss {i}", fill=chart.ORANGE, sizes=small)
        sketch.box(
            (mean_x, y), (0.5, _BOX), f"× {factor}", fill=chart.YELLOW, sizes=small, bold=True
        )
        for (left, wide), (right, _) in pairwise(
            [*((x, each) for x in lefts), (loss_x, 0.55), (mean_x, 0.5)]
        ):
            there_and_back((left + wide, y), (right, y), 1.4)
        there_and_back((mean_x + 0.5, y), (sum_x, middle), 1.2)
    sketch.box(
        (sum_x, middle), (0.65, _BOX), "Σ = loss", fill="white", bold=True, line=1.6, sizes=small
    )
    return sketch.finish(
        f"A graph: {counted(m, 'microbatch')} through {counted(p, 'stage')}, one a"
        f" rank. {finding}. Forward goes from each microbatch through all stages to its loss, which"
        f" enters the sum times {factor}. Backward goes the same way back; between stages the"
        f" gradient of what was received is sent. In W.grad of each stage, {counted(m, 'gradient')}"
        " add up."
    )
