"""Where things live: ranks as columns, stages as slices of the model, and the way a microbatch takes."""

from itertools import pairwise

from course_pp.arguments import checked
from course_pp.schedule import Schedule
from course_pp.show import chart
from course_pp.show.chart import WIDTH, ChartFigure
from course_pp.show.sketch import LEAST, MARGIN, SERIES, SMALL, WORDS, Point, Sketch
from course_pp.show.wording import counted, listed

_MOST_RANKS = 16
_HEAD, _HIGH, _BETWEEN = 0.3, 0.42, 0.34


@checked
def placement(schedule: Schedule, title: str | None = None) -> ChartFigure:
    """Draw which stages each rank holds, and the way that a microbatch takes through them.

    Stages are slices of the model, numbered from the embedding to the head. A solid arrow is a message, a dashed one
    stays on its rank.

    Args:
        schedule: whose ``placement`` to draw; of replicated stages, every replica is drawn.
        title: instead of the finding.

    Raises:
        ValueError: for more than 16 ranks.
    """
    p = schedule.n_ranks
    if p > _MOST_RANKS:
        raise ValueError(f"{p} ranks: up to {_MOST_RANKS} are drawn")
    held = [[stage for stage, ranks in enumerate(schedule.placement) if rank in ranks] for rank in range(p)]
    n_rows = max(map(len, held))
    finding = _finding(schedule)
    gap = 0.3 if p <= 8 else 0.15
    each = min(1.5, (WIDTH - 2 * MARGIN - (p - 1) * gap) / p)
    row = _HIGH + _BETWEEN
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
            _draw_stage(sketch, schedule, stage, places[stage, rank], each - 0.14)
    for stage, ranks in enumerate(schedule.placement[1:], start=1):
        before = schedule.placement[stage - 1]
        for i in range(max(len(before), len(ranks))):
            start, end = (stage - 1, before[i % len(before)]), (stage, ranks[i % len(ranks)])
            _draw_way(sketch, places[start], places[end], each - 0.14, gap + 0.14)
    each_rank = "; ".join(
        f"rank {rank}: stage{'s' if len(stages) > 1 else ''} {listed([str(stage) for stage in stages]) or 'none'}"
        for rank, stages in enumerate(held)
    )
    return sketch.finish(f"Ranks as columns, the stages that each holds as slices. {finding}. {each_rank}.")


def _draw_stage(sketch: Sketch, schedule: Schedule, stage: int, corner: Point, width: float) -> None:
    fill, ink = SERIES[stage % len(SERIES)]
    what = {0: "\nembedding", schedule.n_stages - 1: "\nhead"}.get(stage, "")
    for words in (f"stage {stage}{what}", f"stage {stage}", str(stage)):
        if sketch.box(corner, (width, _HIGH), words, fill=fill, ink=ink, sizes=(WORDS, SMALL, LEAST)):
            return


def _draw_way(sketch: Sketch, start: Point, end: Point, width: float, gap: float) -> None:
    (x0, y0), (x1, y1) = start, end
    middle = _HIGH / 2
    if x0 == x1:  # it stays
        x = x0 + width / 2
        sketch.arrow((x, y0 + _HIGH), (x, y1), dashed=True, ink=chart.TEXT_GREY, line=1.8)
    elif abs(y0 - y1) < 1e-9 and abs(x1 - x0) < width + gap + 0.01:
        there = 1 if x1 > x0 else -1
        first = x0 + width if there > 0 else x0
        sketch.arrow((first, y0 + middle), (first + there * gap, y0 + middle), line=1.8)
    else:  # between two rows, to the beginning of the next
        lane = max(y0, y1) - _BETWEEN / 2 if y0 != y1 else y0 + _HIGH + _BETWEEN / 2
        out, into = (x0 + width / 2, y0 + _HIGH), (x1 + width / 2, y1 if y1 > y0 else y1 + _HIGH)
        if y1 < y0:
            out = (x0 + width / 2, y0)
        sketch.arrow(out, (out[0], lane), (into[0], lane), into, line=1.8)


def _finding(schedule: Schedule) -> str:
    stages = schedule.placement
    sizes = f"{counted(len(stages), 'stage')} on {counted(schedule.n_ranks, 'rank')}"
    one_way = sum(before != after for before, after in pairwise(stages))
    ends = "first and last stage on one rank" if set(stages[0]) & set(stages[-1]) else "first and last stage far apart"
    if len(stages) == 1 or schedule.n_ranks == 1:
        return f"{sizes}: no messages"
    told = f"{_shape(schedule)}: {sizes}, {counted(one_way, 'message')} each way"
    # Where ranks share a stage, the way of a microbatch has more than one beginning.
    return told if _is_replicated(schedule) else f"{told}, {ends}"


def _is_replicated(schedule: Schedule) -> bool:
    return _shape(schedule) == "Replicated stages"


def _shape(schedule: Schedule) -> str:
    ranks, p = [each[0] for each in schedule.placement], schedule.n_ranks
    if schedule.placement == tuple((stage, p - 1 - stage) for stage in range(p)):
        return "Two ways, a copy of every stage for each"
    if any(len(each) > 1 for each in schedule.placement):
        return "Replicated stages"
    if ranks == list(range(p)):
        return "A line"
    if ranks == [stage % p for stage in range(len(ranks))]:
        return "A loop"
    if ranks == [*range(p), *reversed(range(p))]:
        return "A V"
    zigzag = [rank if not stage // p % 2 else p - 1 - rank for stage, rank in enumerate(ranks)]
    if len(ranks) % (2 * p) == 0 and zigzag == [stage % p for stage in range(len(ranks))]:
        return f"{len(ranks) // (2 * p)} waves"
    return "A placement of its own"
