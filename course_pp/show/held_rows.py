"""What each rank holds over time: activations, values and weights; and which version of its weights it uses when."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from course_pp.base.arguments import checked
from course_pp.schedule import Costs, Ledger, Time, Timeline
from course_pp.show import chart, timelines
from course_pp.show.chart import ChartFigure, add_legend, points_per_unit, text_width
from course_pp.show.timelines import ROW_FILL, Box, Labels
from course_pp.show.wording import (
    amount,
    counted,
    format_bytes,
    listed,
    named,
    percent,
    sizes,
    spelled_peaks,
)

_KINDS = ("activation", "buffer", "queued", "version", "total")
_STRIPES: dict[str, Any] = {"hatch": "////", "hatchcolor": "#FFFFFF66"}
# Of versions. All of them light enough for black letters; neighbours are told apart.
_COLOURS = (chart.SKY_BLUE, chart.ORANGE, chart.YELLOW, chart.PURPLE, chart.GREEN)
_FILL, _LOWER = 0.6, 0.16  # of a row: the boxes, and how far they sit below its middle
_SIZES = (8.5, 7.0, 6.0)


_Curve = tuple[tuple[Time, Time], ...]


@checked
def memory(
    tl: Timeline,
    costs: Costs | None = None,
    title: str | None = None,
    *,
    measured: Sequence[Any] | None = None,
    kind: str = "activation",
) -> ChartFigure:
    """Draw for each rank what it holds over time, all to one scale, with the peak in the margin.

    Args:
        costs: what activations, values of edges and versions of the weights weigh. Without it
            (stage, microbatch) activations count 1, from the start of their ``F`` to the end of
            ``B`` or ``W``, as do values of edges.
        measured: draw the bytes that a recorder counted in that run instead: ``recorder.memory()``.
        kind: which of these: ``activation``, ``buffer``, ``queued``, ``version`` or ``total``.
    """
    if kind not in _KINDS:
        raise ValueError(f"unknown kind {kind!r}: choose from {', '.join(_KINDS)}")
    has_values = any(tl.peak_values)
    curves: Sequence[_Curve]
    spell: Callable[[Time], str]
    if measured is None:
        curves, spell = tl.memory_curve(costs), amount
        what = "Peak activations and values held" if has_values else "Peak activations held"
        what = what if costs is None else "Peak memory"
    else:
        if costs is not None:
            raise ValueError("both costs and what was measured: draw one figure for each")
        if len(measured) != tl.n_ranks:
            told = f"measured has memory of {len(measured)} ranks for a timeline of {tl.n_ranks}"
            raise ValueError(f"{told}: give recorder.memory() of it")
        curves, spell = [rank.curves[kind] for rank in measured], format_bytes
        what = "Peak bytes kept in all" if kind == "total" else f"Peak {kind} bytes kept"
    peaks = [max(held for _, held in curve) for curve in curves]

    figure, axes, scale, unit = timelines.begin(tl, heights=(0.16, 0.5, 4.6), right=0.75)
    end, highest = float(tl.makespan) * scale, float(max(peaks))
    timelines.draw_idle(axes, tl.n_ranks, end)
    areas = [_area(curve, rank, scale, end, highest) for rank, curve in enumerate(curves)]
    axes.add_collection(PolyCollection(areas, facecolors=chart.SKY_BLUE, linewidths=0, zorder=1))
    axes.add_collection(
        LineCollection([area[1:-1] for area in areas], colors=chart.BLUE, linewidths=1.1, zorder=3)
    )
    levels = [[(0, top), (end, top)] for top in (min(y for _, y in area) for area in areas)]
    axes.add_collection(
        LineCollection(
            levels, colors=chart.TEXT_GREY, linewidths=0.7, linestyles="dotted", zorder=4
        )
    )
    if costs is not None and any(costs.each("weights", tl.n_stages)):
        weights = tl.memory_curve(
            replace(costs, activation=0, released_by_input_grad=0, edge_activation=0)
        )
        bottoms = [_area(curve, rank, scale, end, highest) for rank, curve in enumerate(weights)]
        axes.add_collection(
            PolyCollection(bottoms, facecolors=chart.ORANGE, linewidths=0, zorder=2, **_STRIPES)
        )
        key = [Patch(facecolor=chart.ORANGE, label="weights, every version", **_STRIPES)]
        others = "activations and values" if has_values else "activations"
        add_legend(axes, [*key, Patch(facecolor=chart.SKY_BLUE, label=others)])
    ranks = timelines.name_ranks(axes, tl.n_ranks)
    timelines.name_time(axes, unit)
    timelines.note_ranks(axes, {rank: spell(peaks[rank]) for rank in ranks}, "peak", 9.0)

    told = named(tl.name, f"What each rank holds over time, to one scale; {sizes(tl)}")
    told += f", bubble {percent(tl.bubble_fraction)}."
    if not tl.actions:
        finding = f"{counted(tl.n_ranks, 'rank')}, nothing held"
        return figure.finish(axes, title, finding, f"{told} {finding}.")
    finding = f"{what}: {spelled_peaks(peaks, spell)}"
    rank = max(range(tl.n_ranks), key=peaks.__getitem__)
    first = next(time for time, held in curves[rank] if held == peaks[rank])
    at = f"{round(float(first) * scale, 4):g}" + (f" {unit}" if tl.unit else "")
    told += f" {finding}. Rank {rank} reaches {spell(peaks[rank])} at time {at}."
    kept = [
        f"rank {rank} {versions}"
        for rank, versions in enumerate(tl.weight_versions)
        if versions > 1
    ]
    told += f" Versions of the weights kept: {listed(kept)}." if kept else ""
    return figure.finish(axes, title, finding, told)


def _area(
    curve: _Curve, rank: int, scale: float, end: float, highest: float
) -> list[tuple[float, float]]:
    """Return the corners of the area under a curve, in the row of ``rank``."""
    floor = rank + ROW_FILL / 2
    corners, level = [(0.0, floor)], floor
    # Of several changes at one time the last counts: one released and the next taken at once is no
    # change.
    for time, held in dict(curve).items():
        x, height = float(time) * scale, ROW_FILL * float(held) / (highest or 1)
        corners += [(x, level), (x, floor - height)]
        level = floor - height
    return [*corners, (end, level), (end, floor)]


@dataclass(frozen=True)
class _Used:
    """A forward or backward to draw, and the version it used; whether its forward used another."""

    box: Box
    version: int
    differs: bool

    @property
    def colour(self) -> str:
        return _COLOURS[self.version % len(_COLOURS)]

    @property
    def words(self) -> tuple[str, str]:
        action = self.box.action
        return f"{action.kind}{action.microbatch}", f"{'≠' * self.differs}v{self.version}"


@checked
def versions(tl: Timeline, ledger: Ledger, title: str | None = None) -> ChartFigure:
    """Draw which version of its stage's weights each forward and backward used, and which each
    update made.

    A box has the colour and the number of its version; backwards are hatched. A diamond is an
    update, with the version that it makes. A heavy frame and ``≠`` mark a backward that used
    another version than its forward. ``ledger`` is of the same schedule: ``EmulatedRun.ledger``, or
    what :func:`course_pp.schedule.ledger` returns.
    """
    if not any(action.kind == "U" for action in tl.actions):
        raise ValueError(f"{tl!r} has no updates (U), so one version: draw it with show.timeline")
    figure, axes, scale, unit = timelines.begin(tl, heights=(0.42, 0.66, 4.6), right=0.35)
    timelines.draw_idle(axes, tl.n_ranks, float(tl.makespan) * scale, _LOWER, _FILL)
    used = []
    for box in timelines.boxes_of(tl, scale, _LOWER, _FILL):
        if box.action.kind != "U":
            use = ledger.of(box.action.stage, box.action.microbatch)
            version = use.forward if box.action.kind == "F" else use.backward
            used.append(_Used(box, version, version != use.forward))
    _draw_versions(axes, used)
    _label_versions(axes, used)
    _draw_updates(axes, tl, scale)
    timelines.name_ranks(axes, tl.n_ranks)
    timelines.name_time(axes, unit)
    handles: list[Patch | Line2D] = [
        Patch(facecolor=chart.SKY_BLUE, label="F  forward, with its version"),
        Patch(facecolor=chart.SKY_BLUE, hatch="////", edgecolor="white", label="B  backward"),
    ]
    if any(each.differs for each in used):
        handles.append(
            Patch(facecolor="white", edgecolor="black", linewidth=2, label="≠  not its forward's")
        )
    mark: dict[str, Any] = {"linestyle": "", "marker": "D", "color": chart.BLACK, "markersize": 5}
    add_legend(axes, [*handles, Line2D([], [], label="an update makes a version", **mark)])

    finding, told = (
        _late(ledger),
        f"Timeline with the version of the weights that each action used; {sizes(tl)}",
    )
    rows_of = []
    for stage in sorted({use.stage for use in ledger.uses}):
        uses = [use for use in ledger.uses if use.stage == stage]
        each = [
            f"F{use.microbatch} v{use.forward}, B{use.microbatch} v{use.backward}" for use in uses
        ]
        rows_of.append(
            f"Stage {stage}: {', '.join(each)}, {counted(len(ledger.updates(stage)), 'update')}"
        )
    return figure.finish(axes, title, finding, f"{told}. {finding}. {'. '.join(rows_of)}.")


def _draw_versions(axes: Axes, used: Collection[_Used]) -> None:
    points_x, points_y = points_per_unit(axes)
    for hatch, kinds in (("", "F"), ("////", "BIW")):
        mine = [each for each in used if each.box.action.kind in kinds]
        corners, colours = (
            [each.box.corners(0.5 / points_x, 0.5 / points_y) for each in mine],
            [u.colour for u in mine],
        )
        # The hatch takes the colour of the edge.
        axes.add_collection(
            PolyCollection(
                corners,
                facecolors=colours,
                edgecolors="#FFFFFF99",
                linewidths=0,
                hatch=hatch,
                zorder=1,
            )
        )
    wrong = [each.box.corners(1.4 / points_x, 1.4 / points_y) for each in used if each.differs]
    if wrong:
        axes.add_collection(
            PolyCollection(
                wrong, facecolors="none", edgecolors=chart.BLACK, linewidths=2.0, zorder=1.5
            )
        )


def _label_versions(axes: Axes, used: Collection[_Used]) -> None:
    """The action above, its version below, in one size; only the version, without its v, where room is scarce."""
    points_x, points_y = points_per_unit(axes)
    high = points_y * _FILL

    def fits(size: float, n_lines: int) -> bool:
        """Return whether so many of the lower lines fit into every box."""
        return n_lines * 1.15 * size <= high and all(
            text_width(text, size) <= points_x * (each.box.right - each.box.left) - 2
            for each in used
            for text in each.words[-n_lines:]
        )

    n_lines, size = next(
        ((n, size) for n in (2, 1) for size in _SIZES if fits(size, n)), (1, _SIZES[-1])
    )
    labels, step = Labels(), 0.62 * size / points_y
    on_hatch = defaultdict[str, list[timelines.Placed]](list)
    for each in used:
        box = each.box
        x, y = (box.left + box.right) / 2, (box.bottom + box.top) / 2
        places = (y - step, y + step) if n_lines == 2 else (y,)
        for at, text in zip(places, each.words[-n_lines:], strict=True):
            labels.add(x, at, text, size)
            if box.action.kind != "F":
                on_hatch[each.colour].append((text, size, x, at))
    timelines.back_labels(axes, on_hatch)
    axes.add_artist(labels)


def _draw_updates(axes: Axes, tl: Timeline, scale: float) -> None:
    points_x, points_y = points_per_unit(axes)
    labels, diamonds, done = Labels(), [], Counter[tuple[int, int]]()
    for span in sorted(tl.spans, key=lambda span: (span.start, span.end)):
        for part in span.action.parts:
            if part.kind != "U":
                continue
            done[span.rank, part.stage] += 1
            x, y = scale * float(span.start + span.end) / 2, span.rank + _LOWER - _FILL / 2
            wide, high = 4.5 / points_x, 4.5 / points_y
            diamonds.append([(x - wide, y), (x, y - high), (x + wide, y), (x, y + high)])
            text = f"v{done[span.rank, part.stage]}"
            # Beside the diamond, on its left: on its right there is no room behind the last.
            labels.add(
                x - wide - (2 + text_width(text, 7.5) / 2) / points_x, y - 5.5 / points_y, text, 7.5
            )
    axes.add_collection(
        PolyCollection(
            diamonds,
            facecolors=chart.BLACK,
            edgecolors="white",
            linewidths=0.8,
            zorder=4,
            clip_on=False,
        )
    )
    axes.add_artist(labels)


def _late(ledger: Ledger) -> str:
    uses = ledger.uses
    mixed = sum(use.forward != use.backward for use in uses)
    if mixed:
        n = counted(len(uses), "backward")
        return f"{ledger.versions}: {mixed} of {n} use another version than their forward"
    late = [max(ledger.staleness(stage)) for stage in sorted({use.stage for use in uses})]
    if len(set(late)) == 1:
        told = f"up to {counted(late[0], 'update')} late on every stage"
    else:
        told = f"up to {listed(late)} updates late on stages 0 to {len(late) - 1}"
    return f"{ledger.versions}: gradients are {told}; forward and backward agree"
