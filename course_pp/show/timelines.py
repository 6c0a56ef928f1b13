"""A timeline as a chart: one row a rank, one box a span, idle time in grey."""

from collections.abc import Sequence

from course_pp.schedule import Timeline, format_time
from course_pp.show import rows
from course_pp.show.chart import ChartFigure
from course_pp.show.wording import counted, listed, percent

WIDTH = 9.5


def timeline(tl: Timeline, title: str | None = None) -> ChartFigure:
    """Draw a predicted or measured timeline. The title is its finding unless one is given.

    A box reads ``F3``, forward of microbatch 3, or ``2F3`` where a rank has several stages; a label that
    does not fit is shortened to the microbatch, then left out. The right margin has each rank's busy share.
    """
    row_inches = min(0.42, max(0.13, 4.2 / tl.n_ranks))
    figure = ChartFigure(WIDTH, 1.15 + row_inches * tl.n_ranks)
    axes = figure.axes_with_margins(left=0.75, right=0.75, bottom=0.68, top=0.47)
    scale, unit = rows.axis_unit(tl)
    end = float(tl.makespan) * scale
    axes.set_xlim(0, end or 1)
    axes.set_ylim(tl.n_ranks - 0.5, -0.5)

    rows.draw_idle(axes, tl.n_ranks, end)
    boxes = rows.boxes_of(tl, scale)
    rows.draw_boxes(axes, boxes)
    rows.label_boxes(axes, boxes, with_stage=rows.has_several_stages_a_rank(tl))
    ranks = rows.name_ranks(axes, tl.n_ranks)
    rows.name_time(axes, unit)
    if tl.makespan:
        rows.note_ranks(axes, {rank: percent(tl.busy[rank] / tl.makespan) for rank in ranks}, "busy")
    rows.draw_key(axes, {box.action.kind for box in boxes}, has_idle=tl.bubble_fraction > 0)
    axes.set_title(finding(tl) if title is None else title, loc="left", fontsize=11.5, pad=9)
    figure.alt_text = describe(tl)
    return figure


def finding(tl: Timeline) -> str:
    """Sizes, busy share and bubble in one line."""
    if not tl.spans:
        return f"{counted(tl.n_ranks, 'rank')}, nothing done"
    microbatches = counted(tl.n_microbatches, "microbatch", "microbatches")
    sizes = f"{counted(tl.n_ranks, 'rank')}, {microbatches}"
    length = format_time(tl.makespan, tl.unit)
    if tl.n_ranks > 1 and _most_busy_at_once(tl) == 1:
        return f"One rank works at a time: {sizes}, busy {percent(tl.utilisation)} of {length}"
    return f"{sizes}: busy {percent(tl.utilisation)} of {length}, bubble {percent(tl.bubble_fraction)}"


def describe(tl: Timeline) -> str:
    """The finding and the peaks in a sentence for those who do not see the figure."""
    kind = "Measured timeline" if tl.unit == "s" else "Timeline"
    return f"{kind}, one row a rank. {finding(tl)}; peak activations held: {spelled_peaks(tl.peak_activations)}."


def spelled_peaks(peaks: Sequence[object]) -> str:
    """``4, 3, 2 and 1 on ranks 0 to 3``, shorter where they are equal or many."""
    if len(set(peaks)) == 1:
        return f"{peaks[0]} on every rank"
    if len(peaks) > 8:
        first, last = (f"{peaks[rank]} on rank {rank}" for rank in (0, -1 % len(peaks)))
        return f"{first} to {last}"
    return f"{listed([str(peak) for peak in peaks])} on ranks 0 to {len(peaks) - 1}"


def _most_busy_at_once(tl: Timeline) -> int:
    # At equal times an end sorts before a start: handing over is not working at the same time.
    changes = sorted((time, step) for s in tl.spans if s.duration for time, step in ((s.start, 1), (s.end, -1)))
    busy = most = 0
    for _, step in changes:
        busy += step
        most = max(most, busy)
    return most
