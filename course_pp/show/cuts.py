"""A model cut into stages, and what crosses each cut: a model of equal layers, and one of any modules."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from course_pp.base.arguments import checked, refuse_below, refuse_unless
from course_pp.show import chart
from course_pp.show.chart import WIDTH, ChartFigure, refuse_outside
from course_pp.show.sketch import LEAST, MARGIN, SMALL, Point, Sketch, width_of
from course_pp.show.wording import counted, format_bytes, listed

_TOP, _HIGH = 0.3, 1.15
# Of a row of modules: a box, a level of arrows, what is below, a row of words.
_BOX, _LEVEL, _BELOW, _ROW = 0.62, 0.24, 0.44, 0.18
_FILLS = (chart.SKY_BLUE, chart.YELLOW, chart.ORANGE, chart.PURPLE)


@checked
def cut(
    config: Any,
    layers: Sequence[tuple[int, int]],
    tokens: int,
    itemsize: int = 4,
    title: str | None = None,
) -> ChartFigure:
    """Draw a model cut into stages, one a rank: what each holds, and what crosses each cut on the
    way there and back.

    Over each cut go ``tokens × dim`` numbers of activations, and as many of their gradients.

    Args:
        config: a :class:`course_pp.model.ModelConfig`, or anything with its ``dim``, ``n_layers``
            and numbers of parameters of the embedding, each layer and the head.
        layers: (start, end) of the layers of each of up to 8 stages, as
            :func:`course_pp.model.compute_layer_assignment` gives them.
        tokens: that go through at once, rows × length.
        itemsize: bytes of a number.
    """
    refuse_below(1, "cut", tokens=tokens, itemsize=itemsize)
    p = len(layers)
    refuse_outside(1, 8, stages_of_layers=p)
    covered = [layer for start, end in layers for layer in range(start, end)]
    remedy = f"give ranges that cover each of {config.n_layers} layers once, in order"
    refuse_unless(covered == list(range(config.n_layers)), "cut", "layers", layers, remedy)
    crossing = format_bytes(tokens * config.dim * itemsize)
    sizes, contents = [], []
    for stage, (start, end) in enumerate(layers):
        first, last = (
            config.n_embedding_parameters * (stage == 0),
            config.n_head_parameters * (stage == p - 1),
        )
        sizes.append(itemsize * (first + sum(config.layer_parameters[start:end]) + last))
        held = ["the embedding"] * (stage == 0)
        held += [f"layers {start} to {end - 1}" if end - start > 1 else f"layer {start}"] * (
            end > start
        )
        contents.append(", ".join([*held, *["norm and head"] * (stage == p - 1)]))
    finding = f"{counted(config.n_layers, 'layer')} in one piece: nothing crosses"
    if p > 1:
        stay = f"{format_bytes(sum(sizes))} of weights stay"
        over = f"{crossing} go over {'the cut' if p == 2 else 'each cut'} and back"
        finding = f"{counted(config.n_layers, 'layer')} in {p} stages: {over}, {stay}"

    gap = min(1.15, 3.2 / max(p - 1, 1)) if p > 1 else 0.0
    each = min(2.9, (WIDTH - 2 * MARGIN - (p - 1) * gap) / p)
    note = f"{tokens:,} tokens; solid arrow: activation, dashed: gradient, {crossing} each" * (
        p > 1
    )
    sketch = Sketch(p * each + (p - 1) * gap, _TOP + _HIGH + 0.4, title or finding, note)
    for stage in range(p):
        left = stage * (each + gap)
        _draw_stage(sketch, layers, stage, left, each)
        middle = left + each / 2
        sketch.text(
            (middle, _TOP + _HIGH + 0.14), format_bytes(sizes[stage]), SMALL, align="center"
        )
        sketch.text(
            (middle, _TOP + _HIGH + 0.29), "of weights", SMALL, align="center", ink=chart.TEXT_GREY
        )
    for stage in range(p - 1):
        x, there, back = stage * (each + gap) + each, _TOP + 0.42, _TOP + 0.86
        sketch.arrow((x + 0.05, there), (x + gap - 0.05, there), ink=chart.BLUE, line=2, head=13)
        sketch.arrow(
            (x + gap - 0.05, back),
            (x + 0.05, back),
            ink=chart.VERMILION,
            line=2,
            head=13,
            dashed=True,
        )
        words = {"activation": there - 0.2, "gradient": back + 0.2}
        if max(width_of(word, SMALL) for word in (*words, crossing)) < gap - 0.1:
            for name, y in words.items():
                sketch.text((x + gap / 2, y), f"{name}\n{crossing}", SMALL, align="center")
    held_by = "; ".join(
        f"stage {stage} holds {contents[stage]}, {format_bytes(size)} of weights"
        for stage, size in enumerate(sizes)
    )
    return sketch.finish(
        f"A model as a row of {counted(p, 'stage')}, one a rank. {finding}. {held_by}."
    )


def _draw_stage(
    sketch: Sketch, layers: Sequence[tuple[int, int]], stage: int, x: float, width: float
) -> None:
    start, end = layers[stage]
    sketch.text((x + width / 2, 0.13), f"rank {stage}", align="center", bold=True)
    sketch.box((x, _TOP), (width, _HIGH), rounded=True, line=1.5)
    slabs = [("emb", chart.YELLOW)] * (stage == 0)
    slabs += [(str(layer), chart.SKY_BLUE) for layer in range(start, end)]
    slabs += [("head", chart.ORANGE)] * (stage == len(layers) - 1)
    sketch.text(
        (x + width / 2, _TOP + 0.16), f"stage {stage}", SMALL, align="center", ink=chart.TEXT_GREY
    )
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
        sketch.text(
            (corner + wide / 2, top + high / 2),
            f"{start}–{end - 1}",
            SMALL,
            align="center",
            on_white=True,
        )


@checked
def carried(cut: Any, title: str | None = None) -> ChartFigure:
    """Draw the calls of a model's modules in a row, the cuts between stages, and each tensor that
    crosses one.

    An arrow leads from the module that makes tensors to each that reads them, and out to the right
    if the model returns them; ×3 stands at the arrow of three. It is blue if each stage on its way
    reads them, and orange and dashed if some only hand them on. ``cut`` is what
    :func:`course_pp.parallel.split.crossing` returns, of up to 24 calls.
    """
    n_calls = len(cut.calls)
    refuse_outside(1, 24, calls_of_cut=n_calls)
    drawn = {(value.made, value.read): value for value in cut.values}
    counts = Counter((value.made, value.read) for value in cut.values)
    levels = _levels([*drawn.values()])
    top = (1 + max(levels, default=0)) * _LEVEL + 0.1
    each = min(0.95, (WIDTH - 2 * MARGIN) / n_calls)
    finding = _finding(cut)
    note = (
        "blue: read in every stage on its way; orange, dashed: some only hand it on"
        if cut.values
        else ""
    )
    labels = _labels(cut, each)
    below = _BELOW + _ROW * max([1, *(row for *_, row in labels)])
    sketch = Sketch(n_calls * each, top + _BOX + below, title or finding, note)
    for number, name in enumerate(cut.calls):
        *_, before, last = ["", *str(name).split(".")]
        # h.3 of transformer.h.3, norm of model.norm
        short = f"{before}.{last}" if last.isdigit() and before else last
        fill = _FILLS[_stage_of(cut, number) % len(_FILLS)]
        place = ((number * each + 0.03, top), (each - 0.06, _BOX))
        sketch.box(*place, short.replace("_", "\n"), fill=fill, sizes=(SMALL, LEAST))
    for stage, (start, end) in enumerate(pairwise((0, *cut.begins, n_calls))):
        words = (
            f"stage {stage}" if (end - start) * each > width_of("stage 0", SMALL) else str(stage)
        )
        sketch.text(
            ((start + end) / 2 * each, top + _BOX + 0.14), words, SMALL, align="center", bold=True
        )
    for begin, (words, x, row) in zip(cut.begins, labels, strict=True):
        line = [(begin * each, 0.0), (begin * each, top + _BOX + 0.22)]
        sketch.line(*line, ink="black", line=1.6, dashed=True, zorder=3)
        sketch.text((x, top + _BOX + 0.36 + _ROW * row), words, SMALL, align="center")
    for (key, value), level in zip(drawn.items(), levels, strict=True):
        _draw_value(sketch, cut, value, counts[key], each, (top, top - 0.1 - level * _LEVEL))
    told = [
        f"the cut before {cut.calls[begin]} carries"
        f" {format_bytes(sum(value.n_bytes for value in over))}, made by"
        f" {listed(_makers(cut, over))}"
        for begin in cut.begins
        if (over := _over(cut, begin))
    ]
    spelled = "; ".join(told)
    return sketch.finish(
        f"A model's modules in a row. {finding}. "
        + (f"{spelled[0].upper()}{spelled[1:]}." if told else "")
    )


def _labels(cut: Any, each: float) -> list[tuple[str, float, int]]:
    """Return what each cut carries in all, the middle of these words, and their row, so that none lies on another."""
    labels, row_ends = [], [float("-inf")] * len(cut.begins)
    for begin in cut.begins:
        over = _over(cut, begin)
        words = (
            f"{counted(len(over), 'tensor')}, {format_bytes(sum(value.n_bytes for value in over))}"
        )
        half = width_of(words, SMALL) / 2 + 0.04
        x = min(max(begin * each, half), len(cut.calls) * each - half)
        row = next(i for i, end in enumerate(row_ends) if end <= x - half)
        row_ends[row] = x + half
        labels.append((words, x, row))
    return labels


def _levels(values: Sequence[Any]) -> list[int]:
    """Return how high each arrow goes, so that none lies on another."""
    taken: list[list[tuple[int, int]]] = []
    found: dict[int, int] = {}
    for index, value in sorted(enumerate(values), key=lambda each: each[1].read[-1] - each[1].made):
        start, end = value.made, value.read[-1]
        level = next(
            (i for i, row in enumerate(taken) if all(end <= a or b <= start for a, b in row)),
            len(taken),
        )
        taken += [[]] if level == len(taken) else []
        taken[level].append((start, end))
        found[index] = level
    return [found[index] for index in range(len(values))]


def _draw_value(
    sketch: Sketch, cut: Any, value: Any, count: int, each: float, between: Point
) -> None:
    top, height = between
    past, start = _passes(cut, value), (value.made + 0.62) * each
    ink = chart.VERMILION if past else chart.BLUE
    for call in value.read:
        end = (call + 0.38) * each
        # What comes after the last call is the model's result.
        ends = [(end, height), (end, top)] if call < len(cut.calls) else [(call * each, height)]
        sketch.arrow((start, top), (start, height), *ends, ink=ink, line=1.8, dashed=past, head=10)
    if count > 1:
        sketch.text((start + 0.04, height - 0.1), f"×{count}", LEAST)


def _stage_of(cut: Any, call: int) -> int:
    return sum(begin <= call for begin in cut.begins)


def _passes(cut: Any, value: Any) -> bool:
    """Return whether it crosses a stage that does not read it."""
    stages = {_stage_of(cut, call) for call in value.read}
    return any(stage not in stages for stage in range(_stage_of(cut, value.made) + 1, max(stages)))


def _over(cut: Any, begin: int) -> list[Any]:
    return [value for value in cut.values if value.made < begin <= value.read[-1]]


def _finding(cut: Any) -> str:
    if not cut.begins:
        return f"{counted(len(cut.calls), 'call')} in one piece: nothing crosses"
    counts = {len(_over(cut, begin)) for begin in cut.begins}
    past = sum(_passes(cut, value) for value in cut.values)
    up_to = "each cut carries" if len(counts) == 1 else "a cut carries up to"
    words = f"{len(cut.begins) + 1} stages: {up_to} {counted(max(counts), 'tensor')}"
    return f"{words}; {past} skip a stage" if past else words


def _makers(cut: Any, values: Sequence[Any]) -> list[str]:
    """Return ``block.0 (3 tensors)`` and ``down1 (for down2 and up1)``: the makers of values, and for whom."""
    named = []
    for (made, read), count in Counter((value.made, value.read) for value in values).items():
        readers = [cut.calls[call] if call < len(cut.calls) else "the result" for call in read]
        several = [f"{count} tensors"] * (count > 1) + [f"for {listed(readers)}"] * (len(read) > 1)
        named.append(f"{cut.calls[made]} ({' '.join(several)})" if several else cut.calls[made])
    return named
