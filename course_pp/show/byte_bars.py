"""Where the bytes of a training step go."""

import math
from collections.abc import Mapping, Sequence
from functools import cache

from matplotlib.axes import Axes

from course_pp.arguments import checked
from course_pp.schedule import Time
from course_pp.show import chart
from course_pp.show.chart import ChartFigure
from course_pp.show.wording import listed

# Neighbours differ in lightness and in hatch, so a bar reads the same without colour.
LOOKS = (
    (chart.BLUE, "", "white"),
    (chart.SKY_BLUE, "////", "black"),
    (chart.GREEN, "", "black"),
    (chart.YELLOW, "....", "black"),
    (chart.VERMILION, "", "black"),
    (chart.PURPLE, "\\\\\\\\", "black"),
    (chart.ORANGE, "xxxx", "black"),
)
_SMALL = 8.5


@checked
def format_bytes(n_bytes: Time) -> str:
    """Write a number of bytes for people, in powers of 1024: ``512 B``, ``1.5 KiB``, ``12.3 MiB``."""
    value = float(n_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1023.5:
            return f"{value:.0f} B" if unit == "B" else f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.3g} TiB"


@checked
def bytes_by_kind(
    parts: Mapping[str, float | Mapping[str, float]],
    budget: float | None = None,
    title: str | None = None,
) -> ChartFigure:
    """Draw stacked horizontal bars of bytes, with a dashed line at the budget.

    Args:
        parts: bytes for each kind (``{"weights": …, "gradients": …}``), or several such bars by name
            (``{"predicted": {…}, "measured": {…}}``).
        budget: bytes that may be used by one bar.
        title: instead of the finding.

    Raises:
        ValueError: when there is nothing to draw, or a number of bytes is negative or not finite.
    """
    bars = _as_bars(parts)
    if budget is not None:
        _refuse_impossible("the budget", budget)
    kinds = list(dict.fromkeys(kind for bar in bars.values() for kind in bar))
    if len(kinds) > len(LOOKS):
        raise ValueError(f"{len(kinds)} kinds of bytes in one bar: sum the small ones, up to {len(LOOKS)}")
    totals = {name: sum(bar.values()) for name, bar in bars.items()}
    longest = max([*totals.values(), budget or 0]) or 1
    unit_size, unit = _axis_unit(longest)

    top = 0.5 if budget is None else 0.7
    name_width = max(chart.text_width(name, 9) for name in bars) / 72
    figure = ChartFigure(9.5, top + 0.72 + 0.5 * len(bars))
    axes = figure.axes_with_margins(left=name_width + 0.3, right=0.95, bottom=0.72, top=top)
    axes.set_xlim(0, 1.03 * longest / unit_size)
    axes.set_ylim(len(bars) - 0.5, -0.5)
    _draw_bars(axes, bars, kinds, unit_size)
    for row, total in enumerate(totals.values()):
        _note_beside(axes, total / unit_size, row, format_bytes(total))
    if budget is not None:
        _draw_budget(axes, budget, unit_size)
    axes.set_yticks(range(len(bars)), list(bars), fontsize=9)
    axes.set_xlabel(f"bytes ({unit})", loc="left", fontsize=9)
    axes.tick_params(axis="x", labelsize=_SMALL)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    finding = _finding(totals, budget)
    axes.set_title(finding if title is None else title, loc="left", fontsize=11.5, pad=9 if budget is None else 22)
    figure.alt_text = _alt_text(bars, finding)
    return figure


def _as_bars(parts: Mapping[str, float | Mapping[str, float]]) -> dict[str, dict[str, float]]:
    bars: dict[str, dict[str, float]] = {}
    for name, value in parts.items():
        if isinstance(value, Mapping):
            bars[name] = dict(value)
        else:
            bars.setdefault("", {})[name] = value
    if "" in bars and len(bars) > 1:
        raise ValueError(f"bars {_listed_keys(parts)} mix numbers and mappings: give all of them as mappings")
    if not any(bars.values()):
        raise ValueError("no bytes to draw: parts is empty; give at least one kind, such as {'weights': 1024}")
    for bar in bars.values():
        for kind, n_bytes in bar.items():
            _refuse_impossible(kind, n_bytes)
    return bars


def _listed_keys(parts: Mapping[str, object]) -> str:
    return listed([repr(key) for key in parts])


def _refuse_impossible(what: str, n_bytes: float) -> None:
    if not math.isfinite(n_bytes) or n_bytes < 0:
        raise ValueError(f"{what} of {n_bytes} bytes: give a finite number, 0 or more")


def _axis_unit(n_bytes: float) -> tuple[float, str]:
    unit = format_bytes(n_bytes).split()[1]
    return 1024.0 ** ("B", "KiB", "MiB", "GiB", "TiB").index(unit), unit


def _draw_bars(axes: Axes, bars: dict[str, dict[str, float]], kinds: list[str], unit_size: float) -> None:
    points_x, _ = chart.points_per_unit(axes)
    width_of = cache(chart.text_width)
    rows = list(bars.values())
    stacks = stack_bars(axes, rows, kinds, unit_size, height=0.62, linewidth=0.8)
    for (colour, _, ink), (kind, lefts, widths) in zip(LOOKS, stacks, strict=False):
        for row, (bar, width) in enumerate(zip(rows, widths, strict=True)):
            size = format_bytes(bar.get(kind, 0))
            for text in (f"{kind} {size}", size):
                if width_of(text, _SMALL) + 6 <= width * points_x:
                    axes.text(
                        lefts[row] + width / 2,
                        row,
                        text,
                        size=_SMALL,
                        color=ink,
                        ha="center",
                        va="center_baseline",
                        # Keeps the words legible where the budget line crosses them.
                        bbox={"facecolor": colour, "edgecolor": "none", "pad": 0.8},
                        zorder=4,
                    )
                    break
    _, height = chart.size_in_inches(axes)
    axes.legend(
        loc="upper right",
        bbox_to_anchor=(1, -0.3 / height),
        ncols=len(kinds),
        frameon=False,
        fontsize=_SMALL,
        handlelength=1.3,
        columnspacing=1.4,
        borderaxespad=0,
    )


def stack_bars(
    axes: Axes,
    bars: Sequence[Mapping[str, float]],
    kinds: Sequence[str],
    unit_size: float,
    height: float,
    linewidth: float,
) -> list[tuple[str, list[float], list[float]]]:
    """Draw one stacked bar a row, each kind in its look; return for each kind where it begins and how wide it is."""
    drawn: list[tuple[str, list[float], list[float]]] = []
    lefts = [0.0] * len(bars)
    for kind, (colour, hatch, _) in zip(kinds, LOOKS, strict=False):
        widths = [bar.get(kind, 0) / unit_size for bar in bars]
        axes.barh(
            range(len(bars)),
            widths,
            left=lefts,
            height=height,
            label=kind,
            color=colour,
            hatch=hatch,
            edgecolor="white",
            linewidth=linewidth,
            hatchcolor="#FFFFFF80",
        )
        drawn.append((kind, lefts, widths))
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    return drawn


def _note_beside(axes: Axes, x: float, row: int, text: str) -> None:
    axes.annotate(
        text,
        (x, row),
        xytext=(5, 0),
        textcoords="offset points",
        size=9,
        va="center_baseline",
        weight="bold",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
    )


def _draw_budget(axes: Axes, budget: float, unit_size: float) -> None:
    axes.axvline(budget / unit_size, color="black", linestyle=(0, (5, 3)), linewidth=1.4, zorder=3)
    axes.annotate(
        f"budget {format_bytes(budget)}",
        (budget / unit_size, 1),
        xycoords=("data", "axes fraction"),
        xytext=(0, 4),
        textcoords="offset points",
        size=9,
        ha="center",
    )


def _finding(totals: dict[str, float], budget: float | None) -> str:
    def judged(name: str, total: float) -> str:
        amount = f"{name} {format_bytes(total)}" if name else f"{format_bytes(total)} in all"
        if budget is None:
            return amount
        if total > budget:
            return f"{amount}, {format_bytes(total - budget)} over the budget"
        return f"{amount}, {format_bytes(budget - total)} below the budget"

    if len(totals) <= 3:
        return "; ".join(judged(name, total) for name, total in totals.items())
    most = max(totals, key=totals.__getitem__)
    return f"Largest of {len(totals)}: {judged(most, totals[most])}"


def _alt_text(bars: dict[str, dict[str, float]], finding: str) -> str:
    described = [
        f"{name}: " * bool(name) + ", ".join(f"{kind} {format_bytes(size)}" for kind, size in bar.items())
        for name, bar in bars.items()
    ]
    return f"Stacked bars of bytes by kind. {finding}. {'; '.join(described)}."
