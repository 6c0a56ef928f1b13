"""The chain of actions that an action waited for, drawn on the timeline."""

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Rectangle

from course_pp.base.arguments import checked
from course_pp.schedule import Action, Overlap, Product, Span, Time, Timeline, format_time
from course_pp.show import chart, timelines
from course_pp.show.chart import ChartFigure
from course_pp.show.wording import counted, has_several_stages_a_rank

_SPELLED_CHAIN = 12
_FADED = 0.22


class _Cause(NamedTuple):
    """A reason for the start of a span.

    Attributes:
        span: the span that came before.
        arrival: the time at which its result was at hand.
        product: the result; None if only the rank was needed.
    """

    span: Span
    arrival: Time
    product: Product | None = None


@checked
def dependencies(
    tl: Timeline, action: Action | Overlap | str, title: str | None = None
) -> ChartFigure:
    """Draw the chain of actions that set the start of ``action``; everything else fades.

    From the action back, each step is the cause that was ready last: the last input to come, or
    the rank itself, busy with another action. Solid arrows follow the chain, dashed ones come from
    the inputs that were ready before.

    Args:
        action: an action of the timeline, as a value or as it prints: ``"0B3"``.
    """
    chain, others = _chain(tl, _find(tl, action))
    span = chain[0].span
    figure, axes, scale, unit = timelines.begin(tl, heights=(0.13, 0.46, 4.2), right=0.35)
    timelines.draw_idle(axes, tl.n_ranks, float(tl.makespan) * scale)
    boxes = timelines.boxes_of(tl, scale)
    timelines.draw_boxes(axes, boxes, alpha=_FADED)
    spans = {cause.span for cause in (*chain, *others)}
    lit = timelines.boxes_of(Timeline(tl.n_ranks, tuple(spans), tl.unit), scale)
    timelines.draw_boxes(axes, lit)
    timelines.label_boxes(axes, lit, with_stage=has_several_stages_a_rank(tl))
    for before, after in zip(chain[1:], chain, strict=False):
        _draw_arrow(axes, before.span, after.span, scale=scale, solid=True)
    for cause in others:
        _draw_arrow(axes, cause.span, span, scale=scale, solid=False)
    corner = (float(span.start) * scale, span.rank - timelines.ROW_FILL / 2)
    width = float(span.duration) * scale
    look: dict[str, Any] = {"fill": False, "edgecolor": "black", "linewidth": 2}
    frame = Rectangle(corner, width, timelines.ROW_FILL, zorder=5, **look)
    frame.set_clip_on(False)
    axes.add_patch(frame)
    timelines.name_ranks(axes, tl.n_ranks)
    timelines.name_time(axes, f"{unit}; dashed: needed too, ready before" if others else unit)
    timelines.draw_key(axes, {box.action.kind for box in boxes}, has_idle=tl.bubble_fraction > 0)

    finding = _finding(tl, chain)
    actions = [str(cause.span.action) for cause in reversed(chain)]
    if len(actions) > _SPELLED_CHAIN:
        actions[4:-4] = ["…"]
    told = f"Timeline with one chain of actions in full colour. {finding}. The chain:"
    told += f" {' → '.join(actions)}."
    for cause in others:
        told += f" It also needs {cause.product}, which is ready before."
    return figure.finish(axes, title, finding, told)


def _find(tl: Timeline, action: Action | Overlap | str) -> Span:
    if isinstance(action, str):
        kind = Overlap if action.strip().startswith("(") else Action
        action = kind.parse(action)
    for span in tl.spans:
        if action == span.action or action in span.action.parts:
            return span
    stages = counted(tl.n_stages, "stage")
    microbatches = counted(tl.n_microbatches, "microbatch")
    raise ValueError(
        f"{action} is not in this timeline: its {stages} and {microbatches} are counted from 0"
    )


def _chain(tl: Timeline, span: Span) -> tuple[list[_Cause], list[_Cause]]:
    """Return the causes from ``span`` back to the start, and the other inputs of ``span``."""
    makers = defaultdict[Product, list[Span]](list)
    for made in tl.spans:
        for part in made.action.parts:
            for product in part.provides:
                makers[product].append(made)
    before: dict[Span, Span] = {}
    for row in tl.by_rank:
        before.update((after, first) for first, after in pairwise(row))

    def causes(of: Span) -> Iterator[_Cause]:
        for part in of.action.parts:
            for product in part.needs(tl.n_stages):
                # A timeline may hold a product more than once; the last in time counts.
                made = [each for each in makers[product] if each.end <= of.start]
                if not made:
                    continue
                last = max(made, key=lambda each: each.end)
                arrival = last.end
                if last.rank != of.rank and tl.transfers:
                    arrival += tl.transfers[product.stage - (product.what == "gradient")]
                yield _Cause(last, arrival, product)
        if of in before:
            yield _Cause(before[of], before[of].end)

    chain = [_Cause(span, span.start)]
    while True:
        # Of several that are ready together, the message from another rank tells most.
        rank = chain[-1].span.rank
        found = list(causes(chain[-1].span))
        if not found:
            break
        chain.append(max(found, key=lambda cause: (cause.arrival, cause.span.rank != rank)))
    taken = chain[1].span if len(chain) > 1 else None
    others = [cause for cause in causes(span) if cause.product and cause.span != taken]
    return chain, others


def _draw_arrow(axes: Axes, start: Span, end: Span, scale: float, solid: bool) -> None:
    if start.rank == end.rank and start.end == end.start:
        return  # the boxes touch
    left = float(start.end) * scale
    right = float(end.start) * scale
    bend = _bend(axes, right - left, start.rank) if start.rank == end.rank else 0
    look: dict[str, Any] = {"linewidth": 1.6, "linestyle": "-", "color": "black"}
    if not solid:
        look = {"linewidth": 1.0, "linestyle": (0, (4, 3)), "color": chart.TEXT_GREY}
    axes.add_patch(
        FancyArrowPatch(
            (left, start.rank),
            (right, end.rank),
            arrowstyle="-|>",
            connectionstyle=f"arc3,rad={bend}",
            mutation_scale=11,
            shrinkA=0,
            shrinkB=0,
            zorder=4,
            **look,
        )
    )


def _bend(axes: Axes, length: float, rank: int) -> float:
    """Return how an arrow within a row bends over the boxes between.

    It bends upwards, but downwards from the top row.
    """
    points_x, points_y = chart.points_per_unit(axes)
    bottom, top = axes.get_ylim()
    share_of_row = 0.9 if abs(bottom - top) > 1 else 0.4
    # The arc of arc3 is half as high as its bend times its length.
    highest = 2 * share_of_row * points_y / (length * points_x)
    return min(0.15, highest) * (1 if rank == 0 else -1)


def _finding(tl: Timeline, chain: list[_Cause]) -> str:
    span = chain[0].span
    at = format_time(span.start, tl.unit)
    if len(chain) == 1:
        return f"{span.action} waits for nothing and starts at {at}"
    what = chain[1].product or f"rank {span.rank}, busy with {chain[1].span.action}"
    in_a_row = f"{counted(len(chain) - 1, 'action')} in a row"
    return f"{span.action} starts at {at}, after {in_a_row}; last for {what}"
