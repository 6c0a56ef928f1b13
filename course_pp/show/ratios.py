"""Where one way to train becomes slower than another: ratios of step times over the tokens of a sequence."""

from collections.abc import Mapping
from itertools import pairwise
from math import inf, log2

from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from course_pp.arguments import checked
from course_pp.show import chart
from course_pp.show.chart import WIDTH, ChartFigure
from course_pp.show.curves import _COLOURS, _DASHES, _LABEL, _marker, _name_ends

__all__ = ["break_even", "crossing"]

_MOST = len(_COLOURS)


@checked
def break_even(curves: Mapping[str, Mapping[int, float]], title: str | None = None) -> ChartFigure:
    """Draw how long steps take beside data parallelism's, over the tokens of a sequence; both axes are logarithmic.

    Args:
        curves: up to 7; by name, for each number of tokens the time over data parallelism's.
        title: instead of the finding: where the curves pass 1.

    Raises:
        ValueError: for no curve or too many, one of fewer than 2 points, tokens below 1 or times that are not above 0.
    """
    _refuse_unusable(curves)
    figure = ChartFigure(WIDTH, 4.2)
    longest = max(chart.text_width(name, _LABEL) for name in curves) / 72
    axes = figure.axes_with_margins(left=0.75, right=longest + 0.4, bottom=0.6, top=0.47)
    heights = {name: {tokens: log2(curve[tokens]) for tokens in sorted(curve)} for name, curve in curves.items()}
    _frame(axes, heights)
    for i, points in enumerate(heights.values()):
        look = {**_marker(i), "linestyle": _DASHES[i % len(_DASHES)], "linewidth": 1.6}
        axes.plot(list(points), list(points.values()), **look)
    _name_ends(figure, axes, {name: points[max(points)] for name, points in heights.items()})
    crossings = {name: crossing(curve) for name, curve in curves.items()}
    finding = _finding(crossings)
    axes.set_title(finding if title is None else title, loc="left", fontsize=11.5, pad=9)
    figure.alt_text = _alt_text(curves, crossings, finding)
    return figure


def crossing(curve: Mapping[int, float]) -> float | None:
    """From how many tokens on data parallelism is as fast; None if it is nowhere slower before, or nowhere as fast."""
    for a, b in pairwise(sorted(curve)):
        low, high = log2(curve[a]), log2(curve[b])
        if low < 0 <= high:
            return float(2 ** (log2(a) + (log2(b) - log2(a)) * low / (low - high)))
    return None


def _refuse_unusable(curves: Mapping[str, Mapping[int, float]]) -> None:
    if not 1 <= len(curves) <= _MOST:
        raise ValueError(f"curves has {len(curves)}: give 1 to {_MOST}")
    for name, curve in curves.items():
        if len(curve) < 2:
            raise ValueError(f"curves[{name!r}] has {len(curve)} points: give at least 2")
        for tokens, ratio in curve.items():
            if tokens < 1 or not 0 < ratio < inf:
                raise ValueError(
                    f"curves[{name!r}] has {ratio} at {tokens} tokens: give ratios above 0, from 1 token on"
                )


def _frame(axes: Axes, heights: Mapping[str, Mapping[int, float]]) -> None:
    tokens = sorted({each for points in heights.values() for each in points})
    every = [height for points in heights.values() for height in points.values()]
    low, high = min(*every, -1.0) - 0.2, max(*every, 1.0) + 0.2
    axes.set_xscale("log", base=2)
    axes.set_xlim(tokens[0] * 0.93, tokens[-1] * 1.07)
    axes.set_ylim(low, high)
    axes.axhspan(0, high, color=chart.IDLE_GREY, zorder=0, lw=0)
    axes.axhline(0, color=chart.TEXT_GREY, lw=1.2, zorder=1)
    ticks = [each for each in range(-10, 11) if low <= each <= high]
    axes.set_yticks(ticks, [f"{2**each}" if each >= 0 else f"1/{2**-each}" for each in ticks])
    axes.set_xticks(tokens, [f"{each:,}" for each in tokens])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("tokens of a sequence; grey: data parallelism is the faster", loc="left", fontsize=9)
    axes.set_ylabel("step, over data parallelism's", fontsize=9)
    axes.tick_params(labelsize=8.5)
    axes.spines[["top", "right"]].set_visible(False)


def _finding(crossings: Mapping[str, float | None]) -> str:
    found = [each for each in crossings.values() if each is not None]
    if not found:
        return "No curve passes data parallelism here"
    if len(found) == 1:
        return f"Data parallelism is the faster from {_rounded(found[0])} tokens a sequence on"
    return f"Data parallelism becomes the faster between {_rounded(min(found))} and {_rounded(max(found))} tokens"


def _rounded(tokens: float) -> str:
    return f"{float(f'{tokens:.2g}'):,.0f}"


def _alt_text(curves: Mapping[str, Mapping[int, float]], crossings: Mapping[str, float | None], finding: str) -> str:
    told = []
    for name, curve in curves.items():
        points = ", ".join(f"{curve[each]:.3g} at {each:,}" for each in sorted(curve))
        at = crossings[name]
        told.append(f"{name}: {points}" + (f"; passes 1 near {_rounded(at)}" if at is not None else ""))
    what = "Step times over data parallelism's, against the tokens of a sequence"
    return f"{what}. {finding}. {'. '.join(told)}."
