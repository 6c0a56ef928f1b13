"""Messages that skip stages, drawn over a timeline: values of edges, their gradients, and tokens on their way back."""

from collections.abc import Iterator

from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.lines import Line2D

from course_pp.schedule import Product, Span, Timeline
from course_pp.schedule.edges import spelled
from course_pp.show import chart

__all__ = ["describe_far_messages", "draw_far_messages"]

_LOOKS: dict[str, tuple[str, tuple[float, tuple[float, ...]]]] = {
    "value": ("value over an edge", (0, (1, 0))),
    "value gradient": ("its gradient", (0, (2, 1.5))),
    "token": ("token", (0, (1, 0))),
}


def draw_far_messages(axes: Axes, tl: Timeline, scale: float) -> list[Line2D]:
    """Draw a line for each message between two ranks, from the end of its maker to the start of its reader.

    Returns:
        The entries of a key: one for each kind of message that was drawn.
    """
    lines: dict[str, list[list[tuple[float, float]]]] = {}
    for product, start, end in _messages(tl):
        way = [(float(start.end) * scale, float(start.rank)), (float(end.start) * scale, float(end.rank))]
        lines.setdefault(product.what, []).append(way)
    for what, ways in lines.items():
        drawn = LineCollection(ways, linestyles=[_LOOKS[what][1]], colors=[chart.BLACK], linewidths=[1.1], zorder=4)
        drawn.set_alpha(0.75)
        axes.add_collection(drawn, autolim=False)
    return [
        Line2D([], [], color=chart.BLACK, linewidth=1.1, linestyle=_LOOKS[what][1], label=_LOOKS[what][0])
        for what in _LOOKS
        if what in lines
    ]


def describe_far_messages(tl: Timeline) -> str:
    """Return a sentence on the edges and their messages, with a blank before it; nothing without edges."""
    n = {what: sum(product.what == what for product, _, _ in _messages(tl)) for what in _LOOKS}
    told = ""
    if tl.edges:
        told += f" Lines show {spelled(tl.edges)}: {n['value']} messages forward, {n['value gradient']} back."
    if n["token"]:
        told += f" Lines show {n['token']} tokens on their way from the last stage to the first."
    return told


def _messages(tl: Timeline) -> Iterator[tuple[Product, Span, Span]]:
    """Yield what crosses edges between ranks, once for each rank, with the spans that make it and first need it."""
    if not tl.edges and not tl.feedback:
        return
    places = {
        ("F" if part.kind == "F" else "B", part.stage, part.microbatch): span
        for span in tl.spans
        for part in span.action.parts
        if part.kind in "FBI"
    }
    microbatches = sorted({action.microbatch for action in tl.actions})
    for i in microbatches:
        for edge in tl.edges:
            seen: set[int] = set()
            for reader in edge.readers:
                made, read = places.get(("F", edge.writer, i)), places.get(("F", reader, i))
                if made is None or read is None or read.rank in seen | {made.rank}:
                    continue
                seen.add(read.rank)
                yield Product("value", edge.writer, i, edge.name), made, read
                back, taken = places.get(("B", reader, i)), places.get(("B", edge.writer, i))
                if back is not None and taken is not None:
                    yield Product("value gradient", reader, i, edge.name), back, taken
        last = tl.n_stages - 1
        made, read = places.get(("F", last, i)), places.get(("F", 0, i + tl.feedback))
        if tl.feedback and made is not None and read is not None and made.rank != read.rank:
            yield Product("token", last, i), made, read
