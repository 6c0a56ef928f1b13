"""A model cut into stages, and what crosses each cut."""

from collections.abc import Sequence
from typing import Protocol

from course_pp.arguments import checked, refuse_below
from course_pp.show import chart
from course_pp.show.byte_bars import format_bytes
from course_pp.show.chart import WIDTH, ChartFigure
from course_pp.show.sketch import MARGIN, SMALL, Sketch, width_of
from course_pp.show.wording import counted

_MOST_STAGES = 8
_TOP, _HIGH = 0.3, 1.15


class Sizes(Protocol):
    """What a picture of a model needs to know of it; :class:`course_pp.model.ModelConfig` has it."""

    @property
    def dim(self) -> int: ...
    @property
    def n_layers(self) -> int: ...
    @property
    def n_embedding_parameters(self) -> int: ...
    @property
    def n_layer_parameters(self) -> int: ...
    @property
    def n_head_parameters(self) -> int: ...


@checked
def cut(
    config: Sizes, layers: Sequence[tuple[int, int]], tokens: int, itemsize: int = 4, title: str | None = None
) -> ChartFigure:
    """Draw a model cut into stages, one a rank: what each holds, and what crosses each cut on the way there and back.

    Over each cut go ``tokens × dim`` numbers of activations, and as many of their gradients.

    Args:
        config: sizes of the model.
        layers: (start, end) of the layers of each stage, end excluded, as
            :func:`course_pp.model.compute_layer_assignment` gives them.
        tokens: that go through at once, rows × length.
        itemsize: bytes of a number.
        title: instead of the finding.

    Raises:
        ValueError: for ranges that do not cover the layers once each, more than 8 stages, or no tokens.
    """
    refuse_below(1, "cut", tokens=tokens, itemsize=itemsize)
    _refuse(config, layers)
    p = len(layers)
    crossing = tokens * config.dim * itemsize
    weights = [itemsize * _n_parameters(config, layers, stage) for stage in range(p)]
    finding = _finding(config, p, crossing, weights)

    gap = min(1.15, 3.2 / max(p - 1, 1)) if p > 1 else 0.0
    each = min(2.9, (WIDTH - 2 * MARGIN - (p - 1) * gap) / p)
    note = f"{tokens:,} tokens; solid arrow: activation, dashed: gradient, {format_bytes(crossing)} each" * (p > 1)
    sketch = Sketch(p * each + (p - 1) * gap, _TOP + _HIGH + 0.4, title or finding, note)
    for stage in range(p):
        _draw_stage(sketch, config, layers, stage, (stage * (each + gap), each))
        middle = stage * (each + gap) + each / 2
        words = [format_bytes(weights[stage]), "of weights"]
        sketch.text((middle, _TOP + _HIGH + 0.14), words[0], SMALL, align="center")
        sketch.text((middle, _TOP + _HIGH + 0.29), words[1], SMALL, align="center", ink=chart.TEXT_GREY)
    for stage in range(p - 1):
        _draw_crossing(sketch, stage * (each + gap) + each, gap, format_bytes(crossing))
    held = "; ".join(
        f"stage {stage} holds {_contents(config, layers, stage)}, {format_bytes(weights[stage])} of weights"
        for stage in range(p)
    )
    return sketch.finish(f"A model as a row of {counted(p, 'stage')}, one a rank. {finding}. {held}.")


def _refuse(config: Sizes, layers: Sequence[tuple[int, int]]) -> None:
    if not 1 <= len(layers) <= _MOST_STAGES:
        raise ValueError(f"layers has {len(layers)} stages: from 1 to {_MOST_STAGES} are drawn")
    covered = [layer for start, end in layers for layer in range(start, end)]
    if covered != list(range(config.n_layers)):
        raise ValueError(
            f"layers {list(layers)} of {config.n_layers} layers: give ranges that cover each layer once, in order"
        )


def _n_parameters(config: Sizes, layers: Sequence[tuple[int, int]], stage: int) -> int:
    start, end = layers[stage]
    first = config.n_embedding_parameters * (stage == 0)
    last = config.n_head_parameters * (stage == len(layers) - 1)
    return first + (end - start) * config.n_layer_parameters + last


def _contents(config: Sizes, layers: Sequence[tuple[int, int]], stage: int) -> str:
    start, end = layers[stage]
    parts = ["the embedding"] * (stage == 0)
    parts += [f"layers {start} to {end - 1}" if end - start > 1 else f"layer {start}"] * (end > start)
    parts += ["norm and head"] * (stage == len(layers) - 1)
    return ", ".join(parts)


def _draw_stage(
    sketch: Sketch, config: Sizes, layers: Sequence[tuple[int, int]], stage: int, span: tuple[float, float]
) -> None:
    x, width = span
    start, end = layers[stage]
    sketch.text((x + width / 2, 0.13), f"rank {stage}", align="center", bold=True)
    sketch.box((x, _TOP), (width, _HIGH), rounded=True, line=1.5)
    slabs = [("emb", chart.YELLOW)] * (stage == 0)
    slabs += [(str(layer), chart.SKY_BLUE) for layer in range(start, end)]
    slabs += [("head", chart.ORANGE)] * (stage == len(layers) - 1)
    sketch.text((x + width / 2, _TOP + 0.16), f"stage {stage}", SMALL, align="center", ink=chart.TEXT_GREY)
    inner, left = width - 0.16, x + 0.08
    # Ends are as wide as their names, layers share the rest.
    ends = {name: min(0.42, inner / 3) for name, _ in slabs if not name.isdigit()}
    each = (inner - sum(ends.values())) / max(end - start, 1)
    top, high = _TOP + 0.32, _HIGH - 0.42
    for name, fill in slabs:
        wide = ends.get(name, each)
        if name.isdigit() and each < 0.17:
            if int(name) > start:
                sketch.line((left, top), (left, top + high), line=0.6, zorder=2.2)
        else:
            text = "\n".join(name) if not name.isdigit() and wide < 0.34 else name
            sketch.box((left, top), (wide, high), text, fill=fill)
        left += wide
    if each < 0.17:  # too thin for a name each
        corner, wide = x + 0.08 + ends.get("emb", 0.0), each * (end - start)
        sketch.box((corner, top), (wide, high), fill=chart.SKY_BLUE)
        sketch.text((corner + wide / 2, top + high / 2), f"{start}–{end - 1}", SMALL, align="center", on_white=True)


def _draw_crossing(sketch: Sketch, x: float, gap: float, size: str) -> None:
    there, back = _TOP + 0.42, _TOP + 0.86
    sketch.arrow((x + 0.05, there), (x + gap - 0.05, there), ink=chart.BLUE, line=2, head=13)
    sketch.arrow((x + gap - 0.05, back), (x + 0.05, back), ink=chart.VERMILION, line=2, head=13, dashed=True)
    words = {"activation": there - 0.2, "gradient": back + 0.2}
    if max(width_of(word, SMALL) for word in (*words, size)) < gap - 0.1:
        for name, y in words.items():
            sketch.text((x + gap / 2, y), f"{name}\n{size}", SMALL, align="center")


def _finding(config: Sizes, p: int, crossing: int, weights: Sequence[int]) -> str:
    if p == 1:
        return f"{counted(config.n_layers, 'layer')} in one piece: nothing crosses"
    cuts = "the cut" if p == 2 else "each cut"
    return (
        f"{counted(config.n_layers, 'layer')} in {p} stages: {format_bytes(crossing)} go over {cuts} and back, "
        f"{format_bytes(sum(weights))} of weights stay"
    )
