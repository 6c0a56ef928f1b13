"""What an action waited for: the chain of actions that led to it, drawn on the timeline."""

from collections.abc import Iterator
from typing import NamedTuple

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
    """A span that another one needed, since when its result was at hand, and what it was; None: only the rank."""

    span: Span
    arrival: Time
    product: Product | None = None


@checked
def dependencies(
    tl: Timeline, action: Action | Overlap | str, title: str | None = None
) -> ChartFigure:
    """Draw the chain of actions that set the start of ``action``; everything else fades.

    From the action back, each step is what was ready last: the input that came last, or the rank
    itself, busy with something else. Solid arrows follow the chain, dashed ones come from the
    inputs that were ready before.

    Args:
        action: one that is in the timeline, as a value or as it prints: ``"0B3"``.
    """
    chain, others = _chain(tl, _find(tl, action))
    span, actions = chain[0].span, [str(cause.span.action) for cause in reversed(chain)]
    figure, axes, scale, unit = timelines.begin(tl, heights=(0.13, 0.46, 4.2), right=0.35)
    timelines.draw_idle(axes, tl.n_ranks, float(tl.makespan) * scale)
    boxes = timelines.boxes_of(tl, scale)
    timelines.draw_boxes(axes, boxes, alpha=_FADED)
    lit = timelines.boxes_of(
        Timeline(tl.n_ranks, tuple({cause.span for cause in (*chain, *others)}), tl.unit), scale
    )
    timelines.draw_boxes(axes, lit)
    timelines.label_boxes(axes, lit, with_stage=has_several_stages_a_rank(tl))
    for cause, after in zip(chain[1:], chain, strict=False):
        _draw_arrow(axes, cause.span, after.span, scale, solid=True)
    for cause in others:
        _draw_arrow(axes, cause.span, span, scale, solid=False)
    corner, width = (
        (float(span.start) * scale, span.rank - timelines.ROW_FILL / 2),
        float(span.duration) * scale,
    )
    frame = Rectangle(
        corner, width, timelines.ROW_FILL, fill=False, edgecolor="black", linewidth=2, zorder=5
    )
    frame.set_clip_on(False)
    axes.add_patch(frame)
    timelines.name_ranks(axes, tl.n_ranks)
    timelines.name_time(axes, f"{unit}; dashed: needed too, ready before" if others else unit)
    timelines.draw_key(axes, {box.action.kind for box in boxes}, has_idle=tl.bubble_fraction > 0)
    finding = _finding(tl, chain)
    if len(actions) > _SPELLED_CHAIN:
        actions = [*actions[:4], "…", *actions[-4:]]
    sooner = "".join(f" It also needs {cause.product}, which is ready before." for cause in others)
    told = (
        f"Timeline with one chain of actions in full colour. {finding}. The chain:"
        f" {' → '.join(actions)}.{sooner}"
    )
    return figure.finish(axes, title, finding, told)


def _find(tl: Timeline, action: Action | Overlap | str) -> Span:
    if isinstance(action, str):
        action = Overlap.parse(action) if action.strip().startswith("(") else Action.parse(action)
    for span in tl.spans:
        if action == span.action or action in span.action.parts:
            return span
    raise ValueError(
        f"{action} is not in this timeline: its {counted(tl.n_stages, 'stage')} and "
        f"{counted(tl.n_microbatches, 'microbatch')} are counted from 0"
    )


def _chain(tl: Timeline, span: Span) -> tuple[list[_Cause], list[_Cause]]:
    """Return the causes from ``span`` back to the start, and the inputs of ``span`` that are not among them."""
    makers: dict[Product, list[Span]] = {}
    for made in tl.spans:
        for part in made.action.parts:
            for product in part.provides:
                makers.setdefault(product, []).append(made)
    before = {row[i]: row[i - 1] for row in tl.by_rank for i in range(1, len(row))}

    def causes(of: Span) -> Iterator[_Cause]:
        for part in of.action.parts:
            for product in part.needs(tl.n_stages):
                made = [each for each in makers.get(product, ()) if each.end <= of.start]
                if made:
                    last = max(made, key=lambda each: each.end)
                    is_message = last.rank != of.rank and tl.transfers
                    transfer = (
                        tl.transfers[product.stage - (product.what == "gradient")]
                        if is_message
                        else 0
                    )
                    yield _Cause(last, last.end + transfer, product)
        if of in before:
            yield _Cause(before[of], before[of].end)

    chain, others = [_Cause(span, span.start)], [cause for cause in causes(span) if cause.product]
    while found := list(causes(chain[-1].span)):
        # Of several that are ready together, what came from another rank tells most.
        rank = chain[-1].span.rank
        chain.append(max(found, key=lambda cause: (cause.arrival, cause.span.rank != rank)))
    taken = chain[1].span if len(chain) > 1 else None
    return chain, [cause for cause in others if cause.span != taken]


def _draw_arrow(axes: Axes, start: Span, end: Span, scale: float, solid: bool) -> None:
    if start.rank == end.rank and start.end == end.start:
        return  # the boxes touch
    left, right = float(start.end) * scale, float(end.start) * scale
    bend = _bend(axes, right - left, start.rank) if start.rank == end.rank else 0
    axes.add_patch(
        FancyArrowPatch(
            (left, start.rank),
            (right, end.rank),
            arrowstyle="-|>",
            connectionstyle=f"arc3,rad={bend}",
            mutation_scale=11,
            shrinkA=0,
            shrinkB=0,
            linewidth=1.6 if solid else 1.0,
            linestyle="-" if solid else (0, (4, 3)),
            color="black" if solid else chart.TEXT_GREY,
            zorder=4,
        )
    )


def _bend(axes: Axes, length: float, rank: int) -> float:
    """Return how an arrow within a row bends over the boxes between: upwards, but downwards from the top row."""
    points_x, points_y = chart.points_per_unit(axes)
    rows_in_frame = abs(axes.get_ylim()[0] - axes.get_ylim()[1])
    # The arc of arc3 is half as high as its bend times its length.
    highest = 2 * (0.9 if rows_in_frame > 1 else 0.4) * points_y / (length * points_x)
    return min(0.15, highest) * (1 if rank == 0 else -1)


def _finding(tl: Timeline, chain: list[_Cause]) -> str:
    span = chain[0].span
    at = format_time(span.start, tl.unit)
    if len(chain) == 1:
        return f"{span.action} waits for nothing and starts at {at}"
    what = chain[1].product or f"rank {span.rank}, busy with {chain[1].span.action}"
    return (
        f"{span.action} starts at {at}, after {counted(len(chain) - 1, 'action')} in a row; last"
        f" for {what}"
    )
