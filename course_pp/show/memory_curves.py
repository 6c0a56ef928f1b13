"""What each rank holds over time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.patches import Patch

from course_pp.arguments import checked
from course_pp.schedule import Costs, Time, Timeline
from course_pp.show import chart, rows
from course_pp.show.byte_bars import format_bytes
from course_pp.show.chart import ChartFigure
from course_pp.show.timelines import sizes, spelled_peaks
from course_pp.show.wording import amount, counted, listed, named, percent

_Curve = tuple[tuple[Time, Time], ...]


class Measured(Protocol):
    """What one rank really kept: :class:`course_pp.runtime.RankMemory`, or any object like it."""

    @property
    def curves(self) -> Mapping[str, tuple[tuple[float, int], ...]]:
        """For each kind the (seconds, bytes) at each change, first at 0."""


_KINDS = ("activation", "buffer", "queued", "version", "total")


@dataclass(frozen=True)
class _Held:
    """What is drawn: a curve a rank, what it is called, and how its amounts are written."""

    curves: Sequence[_Curve]
    what: str
    spell: Callable[[Time], str] = amount

    @cached_property
    def peaks(self) -> tuple[Time, ...]:
        return tuple(max(held for _, held in curve) for curve in self.curves)


@checked
def memory(
    tl: Timeline,
    costs: Costs | None = None,
    title: str | None = None,
    *,
    measured: Sequence[Measured] | None = None,
    kind: str = "activation",
) -> ChartFigure:
    """Draw for each rank what it holds over time, all to one scale, with the peak in the margin.

    Args:
        costs: what a forward keeps, what part of it ``I`` releases, and what a value of an edge and one version of the
            weights weigh. Without it (stage, microbatch) activations are counted, from the start of their ``F`` to the
            end of ``B`` or ``W``, and values of edges (``Timeline.peak_values``), one each.
        measured: draw the bytes that a recorder counted in that run instead, ``recorder.memory()``.
        kind: which of these: ``activation``, ``buffer``, ``queued``, ``version`` or ``total``.

    Raises:
        ValueError: for costs of another number of stages, what was measured on another number of ranks, both of them at
            once, or an unknown kind.
    """
    if kind not in _KINDS:
        raise ValueError(f"unknown kind {kind!r}: choose from {', '.join(_KINDS)}")
    held = _simulated(tl, costs) if measured is None else _measured(tl, costs, measured, kind)
    figure, axes, scale, unit = rows.begin(tl, heights=(0.16, 0.5, 4.6), right=0.75)
    _draw_all(axes, tl, costs, scale, held)
    ranks = rows.name_ranks(axes, tl.n_ranks)
    rows.name_time(axes, unit)
    rows.note_ranks(axes, {rank: held.spell(held.peaks[rank]) for rank in ranks}, "peak", 9.0)
    finding = _finding(tl, held)
    axes.set_title(finding if title is None else title, loc="left", fontsize=11.5, pad=9)
    what = named(tl.name, f"What each rank holds over time, to one scale; {sizes(tl)}")
    bubble = percent(tl.bubble_fraction)
    figure.alt_text = f"{what}, bubble {bubble}. {finding}.{_when(tl, held)}{_versions(tl)}"
    return figure


def _simulated(tl: Timeline, costs: Costs | None) -> _Held:
    counted_ones = "Peak activations and values held" if any(tl.peak_values) else "Peak activations held"
    return _Held(tl.memory_curve(costs), counted_ones if costs is None else "Peak memory")


def _measured(tl: Timeline, costs: Costs | None, measured: Sequence[Measured], kind: str) -> _Held:
    if costs is not None:
        raise ValueError("both costs and what was measured: draw one figure for each")
    if len(measured) != tl.n_ranks:
        raise ValueError(
            f"measured has memory of {len(measured)} ranks for a timeline of {tl.n_ranks}: give recorder.memory() of it"
        )
    what = "Peak bytes kept in all" if kind == "total" else f"Peak {kind} bytes kept"
    return _Held([rank.curves[kind] for rank in measured], what, format_bytes)


def _draw_all(axes: Axes, tl: Timeline, costs: Costs | None, scale: float, held: _Held) -> None:
    end, highest = float(tl.makespan) * scale, float(max(held.peaks))
    rows.draw_idle(axes, tl.n_ranks, end)
    areas = [_area(curve, rank, scale, end, highest) for rank, curve in enumerate(held.curves)]
    axes.add_collection(PolyCollection(areas, facecolors=chart.SKY_BLUE, linewidths=0, zorder=1))
    axes.add_collection(LineCollection([area[1:-1] for area in areas], colors=chart.BLUE, linewidths=1.1, zorder=3))
    tops = [min(y for _, y in area) for area in areas]
    levels = [[(0, top), (end, top)] for top in tops]
    axes.add_collection(LineCollection(levels, colors=chart.TEXT_GREY, linewidths=0.7, linestyles="dotted", zorder=4))
    if costs is None or not any(costs.each("weights", tl.n_stages)):
        return
    weights = tl.memory_curve(replace(costs, activation=0, released_by_input_grad=0, edge_activation=0))
    bottoms = [_area(curve, rank, scale, end, highest) for rank, curve in enumerate(weights)]
    striped = PolyCollection(
        bottoms, facecolors=chart.ORANGE, linewidths=0, hatch="////", hatchcolor="#FFFFFF66", zorder=2
    )
    axes.add_collection(striped)
    key = Patch(facecolor=chart.ORANGE, hatch="////", hatchcolor="#FFFFFF66", label="weights, every version")
    rows.add_legend(
        axes,
        [
            key,
            Patch(facecolor=chart.SKY_BLUE, label="activations and values" if any(tl.peak_values) else "activations"),
        ],
    )


def _area(curve: _Curve, rank: int, scale: float, end: float, highest: float) -> list[tuple[float, float]]:
    """Return the corners of the area under a curve, in the row of ``rank``."""
    floor = rank + rows.ROW_FILL / 2
    corners, level = [(0.0, floor)], floor
    # Of several changes at one time the last counts: one released and the next taken at once is no change.
    for time, held in dict(curve).items():
        x, height = float(time) * scale, rows.ROW_FILL * float(held) / (highest or 1)
        corners += [(x, level), (x, floor - height)]
        level = floor - height
    return [*corners, (end, level), (end, floor)]


def _finding(tl: Timeline, held: _Held) -> str:
    if not tl.actions:
        return f"{counted(tl.n_ranks, 'rank')}, nothing held"
    return f"{held.what}: {spelled_peaks(held.peaks, held.spell)}"


def _when(tl: Timeline, held: _Held) -> str:
    if not tl.actions:
        return ""
    rank = max(range(tl.n_ranks), key=held.peaks.__getitem__)
    time = next(time for time, amount in held.curves[rank] if amount == held.peaks[rank])
    scale, unit = rows.axis_unit(tl)
    suffix = f" {unit}" if tl.unit else ""
    return f" Rank {rank} reaches {held.spell(held.peaks[rank])} at time {round(float(time) * scale, 4):g}{suffix}."


def _versions(tl: Timeline) -> str:
    kept = [f"rank {rank} {versions}" for rank, versions in enumerate(tl.weight_versions) if versions > 1]
    return f" Versions of the weights kept: {listed(kept)}." if kept else ""
