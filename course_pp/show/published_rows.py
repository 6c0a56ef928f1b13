"""Published steps beside predicted ones, a row a run."""

from collections.abc import Mapping
from math import inf
from statistics import median
from typing import Any

from course_pp.arguments import checked
from course_pp.show import chart
from course_pp.show.chart import ChartFigure

__all__ = ["published"]

_SMALL = 8.5
_MOST = 32


@checked
def published(rows: Mapping[str, tuple[float, float]], title: str | None = None) -> ChartFigure:
    """Draw for each run its published step and, as a ring, the predicted one; the error stands beside.

    Args:
        rows: up to 32; by name, seconds published and predicted.
        title: instead of the finding.

    Raises:
        ValueError: for no run or too many, and times that are not above 0.
    """
    if not 1 <= len(rows) <= _MOST:
        raise ValueError(f"rows has {len(rows)} runs: give 1 to {_MOST}")
    for name, times in rows.items():
        if not all(0 < each < inf for each in times):
            raise ValueError(f"rows[{name!r}] has {times}: give seconds above 0")
    errors = {name: predicted / told - 1 for name, (told, predicted) in rows.items()}
    sizes = [abs(each) for each in errors.values()]
    finding = f"Median error {median(sizes):.1%}, worst {max(sizes):.1%}"
    figure = ChartFigure(chart.WIDTH, 1.3 + 0.26 * len(rows))
    longest = max(chart.text_width(name, 9.0) for name in rows) / 72
    axes = figure.axes_with_margins(left=longest + 0.35, right=0.9, bottom=0.8, top=0.45)
    places = range(len(rows))
    axes.hlines(places, *zip(*rows.values(), strict=True), color=chart.VERMILION, linewidth=2.5, zorder=2)
    seconds = dict(zip(("published", "predicted"), zip(*rows.values(), strict=True), strict=True))
    look: dict[str, Any] = {"linestyle": "", "marker": "o", "zorder": 3}
    axes.plot(seconds["published"], places, color=chart.BLUE, markersize=5, label="published", **look)
    look |= {"markerfacecolor": "none", "markersize": 11}
    axes.plot(seconds["predicted"], places, color=chart.VERMILION, label="predicted", **look)
    axes.set_xlim(0, 1.06 * max(max(times) for times in rows.values()))
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks(places, list(rows), fontsize=9)
    for i, error in enumerate(errors.values()):
        right = axes.get_yaxis_transform()
        axes.text(1.01, i, f"{error:+.1%}", transform=right, size=9, va="center_baseline")
    axes.tick_params(axis="x", labelsize=_SMALL)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color=chart.IDLE_GREY, linewidth=0.8, zorder=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_xlabel("seconds of a step", loc="left", fontsize=9)
    axes.legend(loc="upper right", frameon=False, fontsize=_SMALL)
    axes.set_title(title or finding, loc="left", fontsize=11.5, pad=9)
    told_rows = "; ".join(
        f"{name} {told:.3g} s, predicted {p:.3g} s ({errors[name]:+.1%})" for name, (told, p) in rows.items()
    )
    figure.alt_text = f"Published steps and predicted ones. {finding}. {told_rows}."
    return figure
