"""How many activations each rank holds over time."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection

from course_pp.schedule import Span, Timeline
from course_pp.show import chart, rows
from course_pp.show.chart import ChartFigure, counted
from course_pp.show.timelines import spelled_peaks

_WIDTH = 9.5


def memory(tl: Timeline, title: str | None = None) -> ChartFigure:
    """Draw for each rank the activations it holds over time, all to one scale, with the peak in the margin.

    One (stage, microbatch) activation is held from the start of its ``F`` until the end of its ``B`` or ``W``.
    """
    row_inches = min(0.5, max(0.16, 4.6 / tl.n_ranks))
    figure = ChartFigure(_WIDTH, 1.15 + row_inches * tl.n_ranks)
    axes = figure.axes_with_margins(left=0.75, right=0.75, bottom=0.68, top=0.47)
    scale, unit = rows.axis_unit(tl)
    end = float(tl.makespan) * scale
    axes.set_xlim(0, end or 1)
    axes.set_ylim(tl.n_ranks - 0.5, -0.5)
    _draw_curves(axes, tl, scale, end)
    ranks = rows.name_ranks(axes, tl.n_ranks)
    rows.name_time(axes, unit)
    size = min(9.0, ranks.step * chart.points_per_unit(axes)[1])
    for rank in ranks:
        rows.note_right(axes, str(tl.peak_activations[rank]), rank, "data", 0, size)
    rows.note_right(axes, "peak", 1, "axes fraction", 4, 8.5)
    axes.set_title(_finding(tl) if title is None else title, loc="left", fontsize=11.5, pad=9)
    figure.alt_text = _alt_text(tl)
    return figure


def held_over_time(row: Sequence[Span]) -> list[tuple[float, int]]:
    """The steps of the curve of one rank: from each time on, so many (stage, microbatch) activations are held."""
    held: set[tuple[int, int]] = set()
    steps = [(0.0, 0)]
    for span in row:
        begun = {(part.stage, part.microbatch) for part in span.action.parts if part.kind == "F"}
        ended = {(part.stage, part.microbatch) for part in span.action.parts if part.kind in "BW"}
        for time, now in ((span.start, held | begun), (span.end, (held | begun) - ended)):
            # One released and the next taken at the same time is no change.
            if steps[-1][0] == time:
                steps.pop()
            if not steps or steps[-1][1] != len(now):
                steps.append((float(time), len(now)))
            held = now
    return steps


def _draw_curves(axes: Axes, tl: Timeline, scale: float, end: float) -> None:
    highest = max([*tl.peak_activations, 1])
    areas, outlines, peaks = [], [], []
    for rank, row in enumerate(tl.by_rank):
        floor = rank + rows.ROW_FILL / 2
        steps = held_over_time(row)
        corners, level = [(0.0, floor)], floor
        for time, count in steps:
            corners += [(time * scale, level), (time * scale, level := floor - rows.ROW_FILL * count / highest)]
        corners += [(end, level), (end, floor)]
        areas.append(corners)
        outlines.append(corners[1:-1])
        peak = tl.peak_activations[rank]
        height = floor - rows.ROW_FILL * peak / highest
        peaks.append([(0, height), (end, height)])
    rows.draw_idle(axes, tl.n_ranks, end)
    axes.add_collection(PolyCollection(areas, facecolors=chart.SKY_BLUE, linewidths=0, zorder=1))
    axes.add_collection(LineCollection(outlines, colors=chart.BLUE, linewidths=1.1, zorder=2))
    axes.add_collection(LineCollection(peaks, colors=chart.TEXT_GREY, linewidths=0.7, linestyles="dotted", zorder=3))


def _finding(tl: Timeline) -> str:
    if not tl.actions:
        return f"{counted(tl.n_ranks, 'rank')}, nothing held"
    return f"Peak activations held: {spelled_peaks(tl.peak_activations)}"


def _alt_text(tl: Timeline) -> str:
    peaks = tl.peak_activations
    when = []
    if tl.actions:
        rank = max(range(tl.n_ranks), key=peaks.__getitem__)
        time = next(time for time, count in held_over_time(tl.by_rank[rank]) if count == peaks[rank])
        scale, unit = rows.axis_unit(tl)
        suffix = f" {unit}" if tl.unit else ""
        when = [f" Rank {rank} reaches {peaks[rank]} at time {round(time * scale, 4):g}{suffix}."]
    return f"Activations held over time, one row a rank, all to one scale. {_finding(tl)}.{''.join(when)}"
