"""The memory of each rank over time, and the versions of its weights."""

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
# The colours of versions: light enough for black letters; neighbours are told apart.
_COLOURS = (chart.SKY_BLUE, chart.ORANGE, chart.YELLOW, chart.PURPLE, chart.GREEN)
# The height of a box with its version, and the distance of its middle below the row's, in rows.
_FILL = 0.6
_LOWER = 0.16
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
    """Draw the memory of each rank over time, all to one scale, with the peak in the margin.

    Args:
        costs: the weight of activations, values of edges and versions of the weights. Without it
            (stage, microbatch) activations count 1, from the start of their ``F`` to the end of
            ``B`` or ``W``, as do values of edges.
        measured: the bytes that a recorder counted in that run, to be drawn instead:
            ``recorder.memory()``.
        kind: the measured kind: ``activation``, ``buffer``, ``queued``, ``version`` or ``total``.
    """
    if kind not in _KINDS:
        raise ValueError(f"unknown kind {kind!r}: choose from {', '.join(_KINDS)}")
    has_values = any(tl.peak_values)
    curves: Sequence[_Curve] = tl.memory_curve(costs)
    spell: Callable[[Time], str] = amount
    what = "Peak activations and values held" if has_values else "Peak activations held"
    if costs is not None:
        what = "Peak memory"
    if measured is not None:
        if costs is not None:
            raise ValueError("both costs and what was measured: draw one figure for each")
        if len(measured) != tl.n_ranks:
            told = f"measured has memory of {len(measured)} ranks for a timeline of {tl.n_ranks}"
            raise ValueError(f"{told}: give recorder.memory() of it")
        curves = [rank.curves[kind] for rank in measured]
        spell = format_bytes
        what = "Peak bytes kept in all" if kind == "total" else f"Peak {kind} bytes kept"
    peaks = [max(held for _, held in curve) for curve in curves]

    figure, axes, scale, unit = timelines.begin(tl, heights=(0.16, 0.5, 4.6), right=0.75)
    end = float(tl.makespan) * scale
    highest = float(max(peaks))
    timelines.draw_idle(axes, tl.n_ranks, end)
    areas = _areas(curves, scale, end, highest=highest)
    outlines = [area[1:-1] for area in areas]
    levels = []
    for area in areas:
        top = min(y for _, y in area)
        levels.append([(0, top), (end, top)])
    axes.add_collection(PolyCollection(areas, facecolors=chart.SKY_BLUE, linewidths=0, zorder=1))
    axes.add_collection(LineCollection(outlines, colors=chart.BLUE, linewidths=1.1, zorder=3))
    axes.add_collection(
        LineCollection(
            levels, colors=chart.TEXT_GREY, linewidths=0.7, linestyles="dotted", zorder=4
        )
    )
    if costs is not None and any(costs.each("weights", tl.n_stages)):
        only_weights = replace(costs, activation=0, released_by_input_grad=0, edge_activation=0)
        bottoms = _areas(tl.memory_curve(only_weights), scale, end, highest=highest)
        axes.add_collection(
            PolyCollection(bottoms, facecolors=chart.ORANGE, linewidths=0, zorder=2, **_STRIPES)
        )
        others = "activations and values" if has_values else "activations"
        weights = Patch(facecolor=chart.ORANGE, label="weights, every version", **_STRIPES)
        add_legend(axes, [weights, Patch(facecolor=chart.SKY_BLUE, label=others)])
    ranks = timelines.name_ranks(axes, tl.n_ranks)
    timelines.name_time(axes, unit)
    timelines.note_ranks(axes, {rank: spell(peaks[rank]) for rank in ranks}, "peak", size=9.0)

    told = named(tl.name, f"What each rank holds over time, to one scale; {sizes(tl)}")
    told += f", bubble {percent(tl.bubble_fraction)}."
    if not tl.actions:
        finding = f"{counted(tl.n_ranks, 'rank')}, nothing held"
        return figure.finish(axes, title, finding, f"{told} {finding}.")
    finding = f"{what}: {spelled_peaks(peaks, spell)}"
    fullest = max(range(tl.n_ranks), key=peaks.__getitem__)
    first = next(time for time, held in curves[fullest] if held == peaks[fullest])
    at = f"{round(float(first) * scale, 4):g}"
    if tl.unit:
        at += f" {unit}"
    told += f" {finding}. Rank {fullest} reaches {spell(peaks[fullest])} at time {at}."
    kept = []
    for rank, n_versions in enumerate(tl.weight_versions):
        if n_versions > 1:
            kept.append(f"rank {rank} {n_versions}")
    if kept:
        told += f" Versions of the weights kept: {listed(kept)}."
    return figure.finish(axes, title, finding, told)


def _areas(
    curves: Sequence[_Curve], scale: float, end: float, highest: float
) -> list[list[tuple[float, float]]]:
    """Return the corners of the area under the curve of each rank, in the rank's row."""
    areas = []
    for rank, curve in enumerate(curves):
        floor = rank + ROW_FILL / 2
        level = floor
        corners = [(0.0, floor)]
        # Of several changes at one time the last counts: one released and the next taken at once
        # is no change.
        for time, held in dict(curve).items():
            x = float(time) * scale
            height = ROW_FILL * float(held) / (highest or 1)
            corners += [(x, level), (x, floor - height)]
            level = floor - height
        areas.append([*corners, (end, level), (end, floor)])
    return areas


@dataclass(frozen=True)
class _Used:
    """A forward or backward to draw.

    Attributes:
        version: the version of the weights that it used.
        differs: whether its microbatch's forward used another version.
    """

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
    """Draw which version of its stage's weights each action used, and which each update made.

    A box has the colour and the number of its version; backwards are hatched. A diamond is an
    update, with the version that it makes. A heavy frame and ``≠`` mark a backward that used
    another version than its forward. ``ledger`` is of the same schedule: ``EmulatedRun.ledger``, or
    the result of :func:`course_pp.schedule.ledger`.
    """
    if not any(action.kind == "U" for action in tl.actions):
        raise ValueError(f"{tl!r} has no updates (U), so one version: draw it with show.timeline")
    figure, axes, scale, unit = timelines.begin(tl, heights=(0.42, 0.66, 4.6), right=0.35)
    timelines.draw_idle(axes, tl.n_ranks, float(tl.makespan) * scale, _LOWER, fill=_FILL)
    used = []
    for box in timelines.boxes_of(tl, scale, _LOWER, fill=_FILL):
        if box.action.kind != "U":
            use = ledger.of(box.action.stage, box.action.microbatch)
            version = use.forward if box.action.kind == "F" else use.backward
            used.append(_Used(box, version, differs=version != use.forward))
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
        label = "≠  not its forward's"
        handles.append(Patch(facecolor="white", edgecolor="black", linewidth=2, label=label))
    mark: dict[str, Any] = {"linestyle": "", "marker": "D", "color": chart.BLACK, "markersize": 5}
    handles.append(Line2D([], [], label="an update makes a version", **mark))
    add_legend(axes, handles)

    finding = _late(ledger)
    uses_of = defaultdict[int, list[str]](list)
    for use in ledger.uses:
        told = f"F{use.microbatch} v{use.forward}, B{use.microbatch} v{use.backward}"
        uses_of[use.stage].append(told)
    rows = []
    for stage in sorted(uses_of):
        n_updates = counted(len(ledger.updates(stage)), "update")
        rows.append(f"Stage {stage}: {', '.join(uses_of[stage])}, {n_updates}")
    what = f"Timeline with the version of the weights that each action used; {sizes(tl)}"
    return figure.finish(axes, title, finding, f"{what}. {finding}. {'. '.join(rows)}.")


def _draw_versions(axes: Axes, used: Collection[_Used]) -> None:
    points_x, points_y = points_per_unit(axes)
    for hatch, kinds in (("", "F"), ("////", "BIW")):
        mine = [each for each in used if each.box.action.kind in kinds]
        # The hatch takes the colour of the edge.
        axes.add_collection(
            PolyCollection(
                [each.box.corners(0.5 / points_x, 0.5 / points_y) for each in mine],
                facecolors=[each.colour for each in mine],
                edgecolors="#FFFFFF99",
                linewidths=0,
                hatch=hatch,
                zorder=1,
            )
        )
    wrong = [each.box.corners(1.4 / points_x, 1.4 / points_y) for each in used if each.differs]
    if wrong:
        frames = PolyCollection(
            wrong, facecolors="none", edgecolors=chart.BLACK, linewidths=2.0, zorder=1.5
        )
        axes.add_collection(frames)


def _label_versions(axes: Axes, used: Collection[_Used]) -> None:
    """Write the action and its version below, all in one size.

    Where room is scarce the version stands alone.
    """
    points_x, points_y = points_per_unit(axes)
    high = points_y * _FILL

    def fits(size: float, n_lines: int) -> bool:
        """Return whether so many of the lower lines fit into every box."""
        if n_lines * 1.15 * size > high:
            return False
        for each in used:
            room = points_x * (each.box.right - each.box.left) - 2
            if max(text_width(text, size) for text in each.words[-n_lines:]) > room:
                return False
        return True

    forms = [(2, size) for size in _SIZES] + [(1, size) for size in _SIZES]
    # The smallest form is drawn even where it does not fit: the picture says nothing without it.
    n_lines, size = next((form for form in forms if fits(form[1], form[0])), forms[-1])
    step = 0.62 * size / points_y
    labels = Labels()
    on_hatch = defaultdict[str, list[timelines.Placed]](list)
    for each in used:
        box = each.box
        x = (box.left + box.right) / 2
        y = (box.bottom + box.top) / 2
        places = (y - step, y + step) if n_lines == 2 else (y,)
        for at, text in zip(places, each.words[-n_lines:], strict=True):
            labels.add(x, at, text, size)
            if box.action.kind != "F":
                on_hatch[each.colour].append((text, size, x, at))
    timelines.back_labels(axes, on_hatch)
    axes.add_artist(labels)


def _draw_updates(axes: Axes, tl: Timeline, scale: float) -> None:
    points_x, points_y = points_per_unit(axes)
    wide = 4.5 / points_x
    high = 4.5 / points_y
    labels = Labels()
    diamonds = []
    done = Counter[tuple[int, int]]()
    for span in sorted(tl.spans, key=lambda span: (span.start, span.end)):
        for part in span.action.parts:
            if part.kind != "U":
                continue
            done[span.rank, part.stage] += 1
            x = scale * float(span.start + span.end) / 2
            y = span.rank + _LOWER - _FILL / 2
            diamonds.append([(x - wide, y), (x, y - high), (x + wide, y), (x, y + high)])
            # Beside the diamond, on its left: on its right there is no room behind the last.
            text = f"v{done[span.rank, part.stage]}"
            left = x - wide - (2 + text_width(text, 7.5) / 2) / points_x
            labels.add(left, y - 5.5 / points_y, text, 7.5)
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
    told = f"{listed(late)} updates late on stages 0 to {len(late) - 1}"
    if len(set(late)) == 1:
        told = f"{counted(late[0], 'update')} late on every stage"
    return f"{ledger.versions}: gradients are up to {told}; forward and backward agree"
