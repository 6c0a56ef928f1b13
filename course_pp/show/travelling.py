"""Microbatches on their way through the ranks, in a few frames."""

from collections.abc import Sequence
from dataclasses import dataclass

from course_pp.arguments import checked, refuse_below
from course_pp.schedule import Action, Schedule, Span, Time, Timeline, format_time, simulate
from course_pp.show import chart
from course_pp.show.chart import WIDTH, ChartFigure
from course_pp.show.intervals import held_activations
from course_pp.show.rows import LOOKS
from course_pp.show.sketch import LEAST, MARGIN, SMALL, WORDS, Sketch, width_of
from course_pp.show.timelines import most_busy_at_once
from course_pp.show.wording import counted, listed, named

_MOST_RANKS = 8
_TIME, _SIDE, _HEAD, _HIGH, _BETWEEN, _CARD = 0.55, 1.55, 0.3, 0.62, 0.12, 0.18


@dataclass(frozen=True)
class Frame:
    """What every rank does at one time.

    Attributes:
        at_work: for each rank its span, None for one that idles.
        waiting: microbatches that no rank has begun.
        kept: for each rank the microbatches whose activations it holds, once for each of its stages.
        done: microbatches whose backward is through.
    """

    time: Time
    at_work: tuple[Span | None, ...]
    waiting: tuple[int, ...]
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
    return Frame(
        time,
        tuple(at_work),
        tuple(sorted(set(ends) - begun)),
        tuple(map(tuple, kept)),
        tuple(sorted(number for number, end in ends.items() if end <= time)),
    )


@checked
def microbatches(
    timeline: Timeline | Schedule, frames: int = 6, times: Sequence[Time] | None = None, title: str | None = None
) -> ChartFigure:
    """Draw a batch cut into microbatches on its way through the ranks, a frame a row.

    In each frame: what waits, what each rank does (``F2`` to the right, ``B2`` to the left) and whose activations it
    keeps, and what is through.

    Args:
        timeline: what to draw; a schedule is simulated with a forward of 1 and a backward of 2.
        frames: how many: the first in a row, the first with most ranks at work, the others evenly until the end.
        times: when instead.
        title: instead of the finding.

    Raises:
        ValueError: for more than 8 ranks, an empty timeline, or no frames.
    """
    refuse_below(1, "microbatches", frames=frames)
    tl = simulate(timeline) if isinstance(timeline, Schedule) else timeline
    if tl.n_ranks > _MOST_RANKS or not tl.spans:
        raise ValueError(f"{tl.n_ranks} ranks, {len(tl.spans)} spans: up to {_MOST_RANKS} ranks that work are drawn")
    chosen = list(_chosen(tl, frames) if times is None else times)
    if not chosen:
        raise ValueError("no frames: give at least one of them (times)")
    shown = [frame_at(tl, time) for time in chosen]
    finding = _finding(tl)
    side = _SIDE if tl.n_ranks <= 6 else 1.2
    each = min(1.6, (WIDTH - 2 * MARGIN - _TIME - 2 * side) / tl.n_ranks - 0.12)
    width = _TIME + 2 * side + tl.n_ranks * (each + 0.12)
    note = "→ forward, ← backward; small cards: microbatches whose activations the rank keeps; grey: it idles"
    sketch = Sketch(width, _HEAD + len(shown) * (_HIGH + _BETWEEN), title or finding, note)
    sketch.text((0, 0.1), "time", bold=True)
    sketch.text((_TIME, 0.1), "waiting", bold=True)
    sketch.text((width - side + 0.1, 0.1), "through", bold=True)
    for rank in range(tl.n_ranks):
        x = _TIME + side + rank * (each + 0.12)
        sketch.text((x + each / 2, 0.1), f"rank {rank}", align="center", bold=True)
    for i, frame in enumerate(shown):
        y = _HEAD + i * (_HIGH + _BETWEEN)
        sketch.text((0, y + _HIGH / 2), format_time(frame.time, tl.unit), SMALL)
        _draw_cards(sketch, frame.waiting, (_TIME, y + _HIGH / 2 - _CARD / 2), side - 0.1, chart.YELLOW)
        _draw_cards(sketch, frame.done, (width - side + 0.1, y + _HIGH / 2 - _CARD / 2), side - 0.1, chart.GREEN)
        for rank in range(tl.n_ranks):
            corner = (_TIME + side + rank * (each + 0.12), y)
            _draw_rank(sketch, frame.at_work[rank], frame.kept[rank], corner, each, tl)
    what = named(tl.name, f"{counted(tl.n_microbatches, 'microbatch', 'microbatches')} on their way through")
    told = "; ".join(_told(frame, tl) for frame in shown)
    return sketch.finish(f"{what} {counted(tl.n_ranks, 'rank')}, a frame a row. {finding}. {told}.")


def _chosen(tl: Timeline, number: int) -> list[Time]:
    """Choose times: the first starts one after the other, the one with most ranks at work, the rest evenly."""
    starts = sorted({span.start for span in tl.spans})
    if len(starts) <= number:
        return starts

    def at_work(time: Time) -> int:
        return sum(span.start <= time < span.end for span in tl.spans)

    chosen = {*starts[: number // 2], max(starts, key=at_work)}
    n_more = number - len(chosen)
    first = number // 2
    chosen.update(starts[first + (i + 1) * (len(starts) - 1 - first) // n_more] for i in range(n_more))
    return sorted(chosen)


def _draw_cards(
    sketch: Sketch, cards: Sequence[int], corner: tuple[float, float], room: float, fill: str, least: int = 1
) -> None:
    """One card a microbatch; of too many the first, and how many more."""
    x, y = corner
    each = max(_CARD, max((width_of(str(card), LEAST) for card in cards), default=0) + 0.09)
    fits = int(room / each)
    shown = cards if len(cards) <= fits else cards[: max(least, fits - 2)]
    for i, card in enumerate(shown):
        sketch.box((x + i * each, y), (each, _CARD), str(card), fill=fill, sizes=(LEAST,), line=0.8)
    if len(shown) < len(cards):
        sketch.text((x + len(shown) * each + 0.04, y + _CARD / 2), f"+{len(cards) - len(shown)}", LEAST)


def _draw_rank(
    sketch: Sketch, span: Span | None, kept: Sequence[int], corner: tuple[float, float], width: float, tl: Timeline
) -> None:
    (x, y), half = corner, _HIGH * 0.52
    sketch.box(corner, (width, _HIGH), fill="white", line=0.8, zorder=1)
    if span is None:
        sketch.box((x + 0.04, y + 0.04), (width - 0.08, half - 0.04), "idle", fill=chart.IDLE_GREY, edge="none", line=0)
    else:
        several = tl.n_stages > tl.n_ranks
        parts = span.action.parts
        each = (width - 0.08) / len(parts)
        for i, part in enumerate(parts):
            words = _action(part, several)
            look = LOOKS[part.kind]
            sketch.box(
                (x + 0.04 + i * each, y + 0.04),
                (each, half - 0.04),
                words,
                fill=look.colour,
                hatch=look.hatch,
                bold=True,
                sizes=(WORDS, SMALL, LEAST),
            )
    _draw_cards(sketch, kept, (x + 0.05, y + half + 0.055), width - 0.1, chart.SKY_BLUE)


def _action(part: Action, with_stage: bool) -> str:
    name = f"{part.stage if with_stage else ''}{part.kind}{part.microbatch}"
    return f"{name} →" if part.kind == "F" else f"← {name}" if part.kind in "BI" else name


def _finding(tl: Timeline) -> str:
    most = most_busy_at_once(tl)
    batch = counted(tl.n_microbatches, "microbatch", "microbatches")
    if tl.n_microbatches == 1:
        return f"One microbatch: {counted(most, 'rank')} of {tl.n_ranks} at work at a time"
    return f"A batch cut into {batch}: up to {most} of {tl.n_ranks} ranks work at once"


def _told(frame: Frame, tl: Timeline) -> str:
    at_work = [f"rank {span.rank} {span.action}" for span in frame.at_work if span is not None]
    return f"at {format_time(frame.time, tl.unit)}: {listed(at_work) or 'nobody at work'}, {len(frame.done)} through"
