"""A timeline as a chart: one row a rank, one box a span, idle time in grey."""

from collections.abc import Callable, Sequence

from course_pp.arguments import checked
from course_pp.schedule import Time, Timeline, format_time
from course_pp.show import rows
from course_pp.show.chart import ChartFigure
from course_pp.show.far_messages import describe_far_messages, draw_far_messages
from course_pp.show.wording import amount, counted, listed, named, percent


@checked
def timeline(tl: Timeline, title: str | None = None) -> ChartFigure:
    """Draw a predicted or measured timeline. The title is its finding unless one is given.

    A box reads ``F3``, forward of microbatch 3, or ``2F3`` where a rank has several stages; a label that
    does not fit is shortened to the microbatch, then left out. A dark foot tells a rank's later chunks from its first.
    Lines are messages beyond the neighbour: values of edges, their gradients, and tokens on their way back.
    The right margin has each rank's busy share.
    """
    figure, axes, scale, unit = rows.begin(tl, heights=(0.13, 0.42, 4.2), right=0.75)
    rows.draw_idle(axes, tl.n_ranks, float(tl.makespan) * scale)
    boxes = rows.boxes_of(tl, scale)
    rows.draw_boxes(axes, boxes)
    chunks = rows.chunks_of(tl)
    rows.draw_feet(axes, boxes, chunks)
    rows.label_boxes(axes, boxes, with_stage=rows.has_several_stages_a_rank(tl))
    ranks = rows.name_ranks(axes, tl.n_ranks)
    rows.name_time(axes, unit)
    if tl.makespan:
        rows.note_ranks(axes, {rank: percent(tl.busy[rank] / tl.makespan) for rank in ranks}, "busy")
    n_chunks = 1 + max(chunks.values(), default=0)
    lines = draw_far_messages(axes, tl, scale)
    rows.draw_key(axes, {box.action.kind for box in boxes}, tl.bubble_fraction > 0, n_chunks, lines)
    axes.set_title(finding(tl) if title is None else title, loc="left", fontsize=11.5, pad=9)
    figure.alt_text = describe(tl)
    return figure


def finding(tl: Timeline) -> str:
    """Return the sizes, busy share and bubble in one line."""
    if not tl.spans:
        return f"{counted(tl.n_ranks, 'rank')}, nothing done"
    # An emulated run is off by a little: more digits than two would be noise.
    took = tl.makespan if tl.unit == "s" or tl.makespan < 10 else round(float(tl.makespan), 2)
    shares = f"busy {percent(tl.utilisation)} of {format_time(took, tl.unit)}, bubble {percent(tl.bubble_fraction)}"
    # More work than time has been done by several at once; only otherwise is it worth a look.
    if tl.n_ranks > 1 and sum(tl.busy) <= 1.001 * tl.makespan and most_busy_at_once(tl) == 1:
        return f"One rank works at a time: {sizes(tl)}, {shares}"
    return f"{sizes(tl)}: {shares}"


def sizes(tl: Timeline) -> str:
    """Return ``4 ranks, 8 microbatches``."""
    return f"{counted(tl.n_ranks, 'rank')}, {counted(tl.n_microbatches, 'microbatch', 'microbatches')}"


def describe(tl: Timeline) -> str:
    """Return the finding and the peaks in a sentence for those who do not see the figure."""
    kind = "Measured timeline" if tl.measured else "Timeline"
    what = named(tl.name, f"{kind}, one row a rank")
    return f"{what}. {finding(tl)}; {_held(tl)}.{describe_far_messages(tl)}"


def _held(tl: Timeline) -> str:
    """Describe the activations held. Forwards alone hold none: nothing waits for a backward, as in generation."""
    values = f"; values of edges held: {spelled_peaks(tl.peak_values)}" if any(tl.peak_values) else ""
    if {part.kind for span in tl.spans for part in span.action.parts} == {"F"}:
        return f"forwards only{values}"
    return f"peak activations held: {spelled_peaks(tl.peak_activations)}{values}"


def spelled_peaks(peaks: Sequence[Time], spell: Callable[[Time], str] = amount) -> str:
    """Return ``4, 3, 2 and 1 on ranks 0 to 3``, shorter where they are equal or many."""
    if len(set(peaks)) == 1:
        return f"{spell(peaks[0])} on every rank"
    if len(peaks) <= 8:
        return f"{listed([spell(peak) for peak in peaks])} on ranks 0 to {len(peaks) - 1}"
    if list(peaks) in (sorted(peaks), sorted(peaks, reverse=True)):
        return f"{spell(peaks[0])} on rank 0 to {spell(peaks[-1])} on rank {len(peaks) - 1}"
    most, least = (f"{spell(peak)}, on rank {peaks.index(peak)}" for peak in (max(peaks), min(peaks)))
    return f"at most {most}; at least {least}"


def most_busy_at_once(tl: Timeline) -> int:
    """Return how many ranks work at the same time, at the most."""
    # At equal times an end sorts before a start: handing over is not working at the same time.
    changes = sorted((time, step) for s in tl.spans if s.duration for time, step in ((s.start, 1), (s.end, -1)))
    busy = most = 0
    for _, step in changes:
        busy += step
        most = max(most, busy)
    return most
