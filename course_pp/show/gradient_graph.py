"""Forward, loss, 1/m and backward of a step, as the graph that autograd walks back."""

from itertools import pairwise

from course_pp.arguments import checked
from course_pp.show import chart
from course_pp.show.chart import WIDTH, ChartFigure
from course_pp.show.sketch import LEAST, MARGIN, SMALL, Sketch
from course_pp.show.wording import counted

_MOST = 8
_LEFT, _HEAD, _ROW, _HIGH, _FOOT = 1.05, 0.4, 0.56, 0.34, 0.62


@checked
def autograd(n_stages: int = 2, n_microbatches: int = 3, title: str | None = None) -> ChartFigure:
    """Draw the graph of one step: microbatches through stages to their losses, times 1/m, summed; and all of it back.

    Solid arrows are forward, dashed ones backward. Between two stages a tensor crosses to another rank, where it begins
    a graph of its own; its gradient is sent back, and backward goes on there. Each stage adds up the gradients of all
    microbatches in its weights.

    Raises:
        ValueError: for fewer than 1 or more than 8 stages or microbatches.
    """
    for name, number in (("n_stages", n_stages), ("n_microbatches", n_microbatches)):
        if not 1 <= number <= _MOST:
            raise ValueError(f"{name}={number}: from 1 to {_MOST} are drawn")
    m, p = n_microbatches, n_stages
    factor = "1" if m == 1 else f"1/{m}"
    finding = (
        f"The loss is the mean of {m}, so {counted(m, 'backward')} {'starts' if m == 1 else 'start'} from {factor}, "
        "and each stage adds up what they give"
    )
    gap = 0.42 if p <= 4 else 0.26
    each = min(1.0, (WIDTH - 2 * MARGIN - _LEFT - 1.9 - (p + 2) * gap) / p)
    loss_x = _LEFT + p * (each + gap)
    mean_x = loss_x + 0.55 + gap
    sum_x = mean_x + 0.5 + gap
    floor = _HEAD + m * _ROW
    note = "solid: forward; dashed: backward; grey line: from one rank to the next, a message"
    sketch = Sketch(sum_x + 0.75, floor + _FOOT, title or finding, note)
    for stage in range(p):
        x = _LEFT + stage * (each + gap)
        sketch.text((x + each / 2, 0.06), f"stage {stage}", SMALL, align="center", bold=True)
        if stage:
            sketch.line((x - gap / 2, 0), (x - gap / 2, floor + _FOOT - 0.05), dashed=True, ink="#999999")
        _draw_weights(sketch, stage, m, (x, each), floor)
    for i in range(m):
        y = _HEAD + i * _ROW
        sketch.text((0, y + _HIGH / 2), f"microbatch {i}", SMALL)
        stops = [_LEFT + stage * (each + gap) for stage in range(p)]
        for x in stops:
            sketch.box((x, y), (each, _HIGH), f"F{i}, B{i}", fill=chart.SKY_BLUE, zorder=3, sizes=(SMALL, LEAST))
        sketch.box((loss_x, y), (0.55, _HIGH), f"loss {i}", fill=chart.ORANGE, sizes=(SMALL, LEAST))
        sketch.box((mean_x, y), (0.5, _HIGH), f"× {factor}", fill=chart.YELLOW, sizes=(SMALL, LEAST), bold=True)
        xs = [*((x, each) for x in stops), (loss_x, 0.55), (mean_x, 0.5)]
        for (left, wide), (right, _) in pairwise(xs):
            _there_and_back(sketch, (left + wide, y), right)
        _to_the_sum(sketch, (mean_x + 0.5, y), sum_x, (_HEAD + (m - 1) * _ROW / 2))
    middle = _HEAD + (m - 1) * _ROW / 2
    sketch.box((sum_x, middle), (0.65, _HIGH), "Σ = loss", fill="white", bold=True, line=1.6, sizes=(SMALL, LEAST))
    return sketch.finish(
        f"A graph: {counted(m, 'microbatch', 'microbatches')} through {counted(p, 'stage')}, one a rank. {finding}. "
        f"Forward goes from each microbatch through all stages to its loss, which enters the sum times {factor}. "
        "Backward goes the same way back; between stages the gradient of what was received is sent. "
        f"In W.grad of each stage, {counted(m, 'gradient')} add up."
    )


def _there_and_back(sketch: Sketch, start: tuple[float, float], right: float) -> None:
    x, y = start
    sketch.arrow((x, y + _HIGH * 0.3), (right, y + _HIGH * 0.3), line=1.4, head=8)
    sketch.arrow((right, y + _HIGH * 0.72), (x, y + _HIGH * 0.72), ink=chart.VERMILION, line=1.4, head=8, dashed=True)


def _to_the_sum(sketch: Sketch, start: tuple[float, float], right: float, middle: float) -> None:
    x, y = start
    sketch.arrow((x, y + _HIGH * 0.3), (right, middle + _HIGH * 0.3), line=1.2, head=8)
    sketch.arrow(
        (right, middle + _HIGH * 0.72), (x, y + _HIGH * 0.72), ink=chart.VERMILION, line=1.2, head=8, dashed=True
    )


def _draw_weights(sketch: Sketch, stage: int, m: int, span: tuple[float, float], floor: float) -> None:
    """The stage's weights under its column, and the gradients of all microbatches on their way down to them."""
    (x, width), middle = span, span[0] + span[1] / 2
    sketch.arrow(
        (middle, _HEAD + _HIGH), (middle, floor + 0.12), ink=chart.VERMILION, line=1.6, dashed=True, head=9, zorder=2
    )
    for words in (f"W{stage}.grad = sum of {m}", f"W{stage}.grad\nsum of {m}", f"W{stage}\n.grad"):
        size = (width, 0.4)
        if sketch.box((x, floor + 0.12), size, words, fill=chart.GREEN, sizes=(SMALL, LEAST)):
            return
