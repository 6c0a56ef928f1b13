"""The way through the ranks: places of stages, frames of microbatches, and autograd's graph."""

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
from course_pp.show.wording import counted, listed, most_busy_at_once, name_of_part, named

# All in inches. The heading of every picture, a stage, and the space between two rows of stages.
_HEAD = 0.3
_STAGE = 0.42
_BETWEEN = 0.34
# A frame: the columns of times and of cards on either side, a row, the space between two, a card.
_TIME = 0.55
_SIDE = 1.55
_HIGH = 0.62
_GAP = 0.12
_CARD = 0.18
# A graph: the column of names, the heading, the distance of rows, a box, the weights.
_LEFT = 1.05
_TOP = 0.4
_ROW = 0.56
_BOX = 0.34
_FOOT = 0.62


@checked
def placement(schedule: Schedule, title: str | None = None) -> ChartFigure:
    """Draw the stages of each of up to 16 ranks, and the way of a microbatch through them.

    Stages are slices of the model, numbered from the embedding to the head. A solid arrow is a
    message, a dashed one stays on its rank.
    """
    p = schedule.n_ranks
    refuse_outside(1, 16, ranks_of_schedule=p)
    held: list[list[int]] = [[] for _ in range(p)]
    for stage, ranks in enumerate(schedule.placement):
        for rank in ranks:
            held[rank].append(stage)
    n_rows = max(map(len, held))
    finding = _finding_of_placement(schedule)

    gap = 0.3 if p <= 8 else 0.15
    each = min(1.5, (WIDTH - 2 * MARGIN - (p - 1) * gap) / p)
    row = _STAGE + _BETWEEN
    key = "the way of a microbatch in forward; solid: a message; dashed: no message, the same rank"
    width = p * each + (p - 1) * gap
    sketch = Sketch(width, _HEAD + n_rows * row - 0.05, title or finding, note=key)
    ends = {0: "\nembedding", schedule.n_stages - 1: "\nhead"}
    places: dict[tuple[int, int], Point] = {}
    for rank, stages in enumerate(held):
        x = rank * (each + gap)
        name = f"rank {rank}" if p <= 12 else str(rank)
        sketch.text((x + each / 2, 0.08), name, align="center", bold=True)
        sketch.box((x, 0.22), (each, n_rows * row), rounded=True, zorder=1)
        for i, stage in enumerate(stages):
            place = (x + 0.07, _HEAD + i * row + 0.06)
            places[stage, rank] = place
            fill, ink = SERIES[stage % len(SERIES)]
            forms = (f"stage {stage}{ends.get(stage, '')}", f"stage {stage}", str(stage))
            sketch.box_with_first_fitting(place, (each - 0.14, _STAGE), forms, fill=fill, ink=ink)

    for stage, (before, ranks) in enumerate(pairwise(schedule.placement), start=1):
        # Where ranks share a stage, they take microbatches in turn.
        for i in range(max(len(before), len(ranks))):
            start = places[stage - 1, before[i % len(before)]]
            end = places[stage, ranks[i % len(ranks)]]
            _draw_way(sketch, start, end, width=each - 0.14, gap=gap + 0.14)

    told = []
    for rank, stages in enumerate(held):
        plural = "s" if len(stages) > 1 else ""
        told.append(f"rank {rank}: stage{plural} {listed(stages) or 'none'}")
    return sketch.finish(
        f"Ranks as columns, the stages that each holds as slices. {finding}. {'; '.join(told)}."
    )


def _draw_way(sketch: Sketch, start: Point, end: Point, width: float, gap: float) -> None:
    """Draw an arrow from one stage to the next, given their upper left corners."""
    (x0, y0), (x1, y1) = start, end
    if x0 == x1:
        # The microbatch stays on its rank.
        x = x0 + width / 2
        sketch.arrow((x, y0 + _STAGE), (x, y1), dashed=True, ink=chart.TEXT_GREY, line=1.8)
        return

    are_neighbours = abs(x1 - x0) < width + gap + 0.01
    if abs(y0 - y1) < 1e-9 and are_neighbours:
        middle = y0 + _STAGE / 2
        right = x0 + width
        first, last = (right, right + gap) if x1 > x0 else (x0, x0 - gap)
        sketch.arrow((first, middle), (last, middle), line=1.8)
        return

    # Through the lane between two rows, or below a row of its own.
    lane = y0 + _STAGE + _BETWEEN / 2
    if y0 != y1:
        lane = max(y0, y1) - _BETWEEN / 2
    out = (x0 + width / 2, y0 if y1 < y0 else y0 + _STAGE)
    into = (x1 + width / 2, y1 if y1 > y0 else y1 + _STAGE)
    sketch.arrow(out, (out[0], lane), (into[0], lane), into, line=1.8)


def _finding_of_placement(schedule: Schedule) -> str:
    stages = schedule.placement
    p = schedule.n_ranks
    sizes = f"{counted(len(stages), 'stage')} on {counted(p, 'rank')}"
    if len(stages) == 1 or p == 1:
        return f"{sizes}: no messages"
    one_way = sum(before != after for before, after in pairwise(stages))
    messages = f"{counted(one_way, 'message')} each way"
    are_together = set(stages[0]) & set(stages[-1])
    ends = f"first and last stage {'on one rank' if are_together else 'far apart'}"

    ranks = [each[0] for each in stages]
    loop = [stage % p for stage in range(len(ranks))]
    down_and_up = [*range(p), *reversed(range(p))]
    n_waves = len(ranks) // (2 * p)
    if stages == tuple((stage, p - 1 - stage) for stage in range(p)):
        shape = "Two ways, a copy of every stage for each"
    elif any(len(each) > 1 for each in stages):
        # Where ranks share a stage, the way of a microbatch has more than one beginning.
        return f"Replicated stages: {sizes}, {messages}"
    elif ranks == list(range(p)):
        shape = "A line"
    elif ranks == loop:
        shape = "A loop"
    elif ranks == down_and_up:
        shape = "A V"
    elif ranks == n_waves * down_and_up:
        shape = f"{n_waves} waves"
    else:
        shape = "A placement of its own"
    return f"{shape}: {sizes}, {messages}, {ends}"


@dataclass(frozen=True)
class Frame:
    """The state of every rank at one time, and the places of the microbatches.

    Attributes:
        at_work: the span of each rank; None for a rank that idles.
        waiting: microbatches that no rank has begun.
        kept: microbatches whose activations each rank holds, once for each of its stages.
        done: microbatches that are through.
    """

    time: Time
    at_work: tuple[Span | None, ...]
    waiting: tuple[int, ...]
    kept: tuple[tuple[int, ...], ...]
    done: tuple[int, ...]


def frame_at(tl: Timeline, time: Time) -> Frame:
    """Return the state of a timeline at ``time``.

    A span that begins just then has begun; a span that ends just then has ended.
    """
    at_work: list[Span | None] = [None] * tl.n_ranks
    ends: dict[int, Time] = {}
    begun: set[int] = set()
    for span in tl.spans:
        numbers = {part.microbatch for part in span.action.parts}
        for number in numbers:
            ends[number] = max(ends.get(number, span.end), span.end)
        if span.start <= time < span.end:
            at_work[span.rank] = span
        if span.start <= time:
            begun |= numbers

    kept: list[list[int]] = [[] for _ in range(tl.n_ranks)]
    for held in sorted(held_activations(tl), key=lambda each: (each.stage, each.microbatch)):
        if held.start <= time < held.end:
            kept[held.rank].append(held.microbatch)
    return Frame(
        time,
        tuple(at_work),
        waiting=tuple(sorted(set(ends) - begun)),
        kept=tuple(map(tuple, kept)),
        done=tuple(sorted(number for number, end in ends.items() if end <= time)),
    )


@checked
def microbatches(
    timeline: Timeline | Schedule, frames: int = 6, title: str | None = None
) -> ChartFigure:
    """Draw a batch cut into microbatches on its way through the ranks, a frame a row.

    Each frame has the microbatches that wait, the action of each rank (``F2`` to the right, ``B2``
    to the left), the microbatches whose activations it keeps, and those that are through.

    Args:
        timeline: a timeline of up to 8 ranks; a schedule is simulated with a forward of 1 and a
            backward of 2.
        frames: the number of frames: the first in a row, the first with most ranks at work, the
            others evenly until the end.
    """
    refuse_below(1, "microbatches", frames=frames)
    tl = simulate(timeline) if isinstance(timeline, Schedule) else timeline
    refuse_outside(1, 8, ranks_of_timeline=tl.n_ranks)
    remedy = "give one in which ranks work"
    refuse_unless(bool(tl.spans), "microbatches", "timeline", timeline, remedy)
    shown = [frame_at(tl, time) for time in _chosen(tl, frames)]
    most = most_busy_at_once(tl)
    batch = counted(tl.n_microbatches, "microbatch")
    finding = f"A batch cut into {batch}: up to {most} of {tl.n_ranks} ranks work at once"
    if tl.n_microbatches == 1:
        finding = f"One microbatch: {counted(most, 'rank')} of {tl.n_ranks} at work at a time"

    side = _SIDE if tl.n_ranks <= 6 else 1.2
    each = min(1.6, (WIDTH - 2 * MARGIN - _TIME - 2 * side) / tl.n_ranks - 0.12)
    width = _TIME + 2 * side + tl.n_ranks * (each + 0.12)
    lefts = [_TIME + side + rank * (each + 0.12) for rank in range(tl.n_ranks)]
    through = width - side + 0.1
    note = (
        "→ forward, ← backward; small cards: microbatches whose activations the rank keeps; grey:"
        " it idles"
    )
    sketch = Sketch(width, _HEAD + len(shown) * (_HIGH + _GAP), title or finding, note=note)
    sketch.text((0, 0.1), "time", bold=True)
    sketch.text((_TIME, 0.1), "waiting", bold=True)
    sketch.text((through, 0.1), "through", bold=True)
    for rank, x in enumerate(lefts):
        sketch.text((x + each / 2, 0.1), f"rank {rank}", align="center", bold=True)
    with_stage = tl.n_stages > tl.n_ranks
    for i, frame in enumerate(shown):
        y = _HEAD + i * (_HIGH + _GAP)
        card = y + _HIGH / 2 - _CARD / 2
        sketch.text((0, y + _HIGH / 2), format_time(frame.time, tl.unit), SMALL)
        _draw_cards(sketch, frame.waiting, (_TIME, card), room=side - 0.1, fill=chart.YELLOW)
        _draw_cards(sketch, frame.done, (through, card), room=side - 0.1, fill=chart.GREEN)
        for x, span, kept in zip(lefts, frame.at_work, frame.kept, strict=True):
            _draw_rank(sketch, span, kept, corner=(x, y), width=each, with_stage=with_stage)

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
    """Choose so many starts of spans: the first in a row, the busiest one, the rest evenly."""
    starts = sorted({span.start for span in tl.spans})
    if len(starts) <= number:
        return starts

    def n_at_work(time: Time) -> int:
        return sum(span.start <= time < span.end for span in tl.spans)

    first = number // 2
    chosen = {*starts[:first], max(starts, key=n_at_work)}
    n_more = number - len(chosen)
    for i in range(n_more):
        chosen.add(starts[first + (i + 1) * (len(starts) - 1 - first) // n_more])
    return sorted(chosen)


def _draw_cards(
    sketch: Sketch, cards: Sequence[int], corner: Point, room: float, fill: str
) -> None:
    """Draw numbered cards side by side; where they have no room, the first and how many follow."""
    x, y = corner
    widest = max((width_of(str(card), LEAST) for card in cards), default=0)
    each = max(_CARD, widest + 0.09)
    fits = int(room / each)
    # Two cards' room for the number of the others.
    shown = cards if len(cards) <= fits else cards[: max(1, fits - 2)]
    for i, card in enumerate(shown):
        sketch.box((x + i * each, y), (each, _CARD), str(card), fill=fill, sizes=(LEAST,), line=0.8)
    n_more = len(cards) - len(shown)
    if n_more:
        sketch.text((x + len(shown) * each + 0.04, y + _CARD / 2), f"+{n_more}", LEAST)


def _draw_rank(
    sketch: Sketch,
    span: Span | None,
    kept: Sequence[int],
    corner: Point,
    width: float,
    with_stage: bool,
) -> None:
    """Draw the action of a rank, or that it idles, above the cards of its microbatches."""
    x, y = corner
    half = _HIGH * 0.52
    high = half - 0.04
    sketch.box(corner, (width, _HIGH), fill="white", line=0.8, zorder=1)
    if span is None:
        place = ((x + 0.04, y + 0.04), (width - 0.08, high))
        sketch.box(*place, "idle", fill=chart.IDLE_GREY, edge="none", line=0)
    else:
        parts = span.action.parts
        each = (width - 0.08) / len(parts)
        for i, part in enumerate(parts):
            words = name_of_part(part, with_stage)
            if part.kind == "F":
                words = f"{words} →"
            elif part.kind in "BI":
                words = f"← {words}"
            place = ((x + 0.04 + i * each, y + 0.04), (each, high))
            look = LOOKS[part.kind]
            sketch.box(*place, words, fill=look.colour, hatch=look.hatch, bold=True)
    cards = (x + 0.05, y + half + 0.055)
    _draw_cards(sketch, kept, cards, room=width - 0.1, fill=chart.SKY_BLUE)


@checked
def autograd(n_stages: int = 2, n_microbatches: int = 3, title: str | None = None) -> ChartFigure:
    """Draw the graph of one step: microbatches through stages to one loss, and back.

    Solid arrows are forward, dashed ones backward. Each microbatch's loss enters the sum times 1/m.
    Between two stages a tensor crosses to another rank, where it begins a graph of its own; its
    gradient is sent back, and backward goes on there. Each stage adds up the gradients of all
    microbatches in its weights.
    """
    refuse_outside(1, 8, n_stages=n_stages, n_microbatches=n_microbatches)
    m = n_microbatches
    p = n_stages
    factor = "1" if m == 1 else f"1/{m}"
    start = "starts" if m == 1 else "start"
    finding = (
        f"The loss is the mean of {m}, so {counted(m, 'backward')} {start} from {factor}, and each"
        " stage adds up what they give"
    )

    # From left to right: the names, the stages, the losses, the factors, the sum.
    gap = 0.42 if p <= 4 else 0.26
    each = min(1.0, (WIDTH - 2 * MARGIN - _LEFT - 1.9 - (p + 2) * gap) / p)
    lefts = [_LEFT + stage * (each + gap) for stage in range(p)]
    loss_x = _LEFT + p * (each + gap)
    mean_x = loss_x + 0.55 + gap
    sum_x = mean_x + 0.5 + gap
    floor = _TOP + m * _ROW
    note = "solid: forward; dashed: backward; grey line: from one rank to the next, a message"
    sketch = Sketch(sum_x + 0.75, floor + _FOOT, title or finding, note=note)
    small = (SMALL, LEAST)
    back_look: dict[str, Any] = {"ink": chart.VERMILION, "dashed": True}

    for stage, x in enumerate(lefts):
        centre = x + each / 2
        sketch.text((centre, 0.06), f"stage {stage}", SMALL, align="center", bold=True)
        if stage:
            border = x - gap / 2
            ends = ((border, 0), (border, floor + _FOOT - 0.05))
            sketch.line(*ends, dashed=True, ink="#999999")
        # Its weights under its column, and the gradients of all microbatches on their way down to
        # them.
        down = ((centre, _TOP + _BOX), (centre, floor + 0.12))
        sketch.arrow(*down, line=1.6, head=9, zorder=2, **back_look)
        sums = f"W{stage}.grad = sum of {m}"
        forms = (sums, sums.replace(" = ", "\n"), f"W{stage}\n.grad")
        weights = ((x, floor + 0.12), (each, 0.4))
        sketch.box_with_first_fitting(*weights, forms, fill=chart.GREEN, sizes=small)

    def there_and_back(start: Point, end: Point, line: float) -> None:
        (x0, y0), (x1, y1) = start, end
        there = _BOX * 0.3
        back = _BOX * 0.72
        sketch.arrow((x0, y0 + there), (x1, y1 + there), line=line, head=8)
        sketch.arrow((x1, y1 + back), (x0, y0 + back), line=line, head=8, **back_look)

    middle = _TOP + (m - 1) * _ROW / 2
    # The boxes of a microbatch: left end and width.
    boxes = [(x, each) for x in lefts] + [(loss_x, 0.55), (mean_x, 0.5)]
    for i in range(m):
        y = _TOP + i * _ROW
        sketch.text((0, y + _BOX / 2), f"microbatch {i}", SMALL)
        for x in lefts:
            stage_box = ((x, y), (each, _BOX))
            sketch.box(*stage_box, f"F{i}, B{i}", fill=chart.SKY_BLUE, zorder=3, sizes=small)
        sketch.box((loss_x, y), (0.55, _BOX), f"loss {i}", fill=chart.ORANGE, sizes=small)
        mean = ((mean_x, y), (0.5, _BOX))
        sketch.box(*mean, f"× {factor}", fill=chart.YELLOW, sizes=small, bold=True)
        for (left, wide), (right, _) in pairwise(boxes):
            there_and_back((left + wide, y), (right, y), line=1.4)
        there_and_back((mean_x + 0.5, y), (sum_x, middle), line=1.2)
    total = ((sum_x, middle), (0.65, _BOX))
    sketch.box(*total, "Σ = loss", fill="white", bold=True, line=1.6, sizes=small)
    return sketch.finish(
        f"A graph: {counted(m, 'microbatch')} through {counted(p, 'stage')}, one a"
        f" rank. {finding}. Forward goes from each microbatch through all stages to its loss, which"
        f" enters the sum times {factor}. Backward goes the same way back; between stages the"
        f" gradient of what was received is sent. In W.grad of each stage, {counted(m, 'gradient')}"
        " add up."
    )
