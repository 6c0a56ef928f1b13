"""A model cut into stages, and what crosses each cut: equal layers, or modules of any kind."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from course_pp.base.arguments import checked, refuse_below, refuse_unless
from course_pp.show import chart
from course_pp.show.chart import TEXT_GREY, WIDTH, ChartFigure, refuse_outside
from course_pp.show.sketch import LEAST, MARGIN, SMALL, Sketch, width_of
from course_pp.show.wording import counted, format_bytes, listed

# All in inches. A stage: the heading, and the box below it.
_TOP = 0.3
_HIGH = 1.15
# A row of modules: a box, a level of arrows, the space below, a row of words.
_BOX = 0.62
_LEVEL = 0.24
_BELOW = 0.44
_ROW = 0.18
_FILLS = (chart.SKY_BLUE, chart.YELLOW, chart.ORANGE, chart.PURPLE)


@checked
def cut(
    config: Any,
    layers: Sequence[tuple[int, int]],
    tokens: int,
    itemsize: int = 4,
    title: str | None = None,
) -> ChartFigure:
    """Draw a model cut into stages, one a rank, and what crosses each cut there and back.

    Over each cut go ``tokens × dim`` numbers of activations, and as many of their gradients.

    Args:
        config: a :class:`course_pp.model.ModelConfig`, or anything with its ``dim``, ``n_layers``
            and numbers of parameters of the embedding, each layer and the head.
        layers: (start, end) of the layers of each of up to 8 stages, as
            :func:`course_pp.model.compute_layer_assignment` gives them.
        tokens: tokens that go through at once, rows × length.
        itemsize: bytes of a number.
    """
    refuse_below(1, "cut", tokens=tokens, itemsize=itemsize)
    p = len(layers)
    refuse_outside(1, 8, stages_of_layers=p)
    covered = [layer for start, end in layers for layer in range(start, end)]
    remedy = f"give ranges that cover each of {config.n_layers} layers once, in order"
    refuse_unless(covered == list(range(config.n_layers)), "cut", "layers", layers, remedy)
    crossing = format_bytes(tokens * config.dim * itemsize)

    # The content of each stage, in words and in bytes.
    contents = []
    sizes = []
    for stage, (start, end) in enumerate(layers):
        held = []
        n_parameters = sum(config.layer_parameters[start:end])
        if stage == 0:
            held.append("the embedding")
            n_parameters += config.n_embedding_parameters
        if end - start > 1:
            held.append(f"layers {start} to {end - 1}")
        elif end > start:
            held.append(f"layer {start}")
        if stage == p - 1:
            held.append("norm and head")
            n_parameters += config.n_head_parameters
        contents.append(", ".join(held))
        sizes.append(itemsize * n_parameters)

    finding = f"{counted(config.n_layers, 'layer')} in one piece: nothing crosses"
    note = ""
    gap = 0.0
    if p > 1:
        cuts = "the cut" if p == 2 else "each cut"
        over = f"{crossing} go over {cuts} and back"
        stay = f"{format_bytes(sum(sizes))} of weights stay"
        finding = f"{counted(config.n_layers, 'layer')} in {p} stages: {over}, {stay}"
        arrows = f"solid arrow: activation, dashed: gradient, {crossing} each"
        note = f"{tokens:,} tokens; {arrows}"
        gap = min(1.15, 3.2 / (p - 1))
    each = min(2.9, (WIDTH - 2 * MARGIN - (p - 1) * gap) / p)
    sketch = Sketch(p * each + (p - 1) * gap, _TOP + _HIGH + 0.4, title or finding, note=note)
    lefts = [stage * (each + gap) for stage in range(p)]
    for stage, left in enumerate(lefts):
        _draw_stage(sketch, layers, stage, x=left, width=each)
        middle = left + each / 2
        size = format_bytes(sizes[stage])
        below = _TOP + _HIGH
        sketch.text((middle, below + 0.14), size, SMALL, align="center")
        sketch.text((middle, below + 0.29), "of weights", SMALL, align="center", ink=TEXT_GREY)

    there = _TOP + 0.42
    back = _TOP + 0.86
    words = {"activation": there - 0.2, "gradient": back + 0.2}
    widest = max(width_of(word, SMALL) for word in (*words, crossing))
    for left in lefts[:-1]:
        x = left + each
        start_x = x + 0.05
        end_x = x + gap - 0.05
        look: dict[str, Any] = {"line": 2, "head": 13}
        sketch.arrow((start_x, there), (end_x, there), ink=chart.BLUE, **look)
        sketch.arrow((end_x, back), (start_x, back), ink=chart.VERMILION, dashed=True, **look)
        if widest < gap - 0.1:
            for name, y in words.items():
                sketch.text((x + gap / 2, y), f"{name}\n{crossing}", SMALL, align="center")
    held_by = []
    for stage, size_of_stage in enumerate(sizes):
        weights = f"{format_bytes(size_of_stage)} of weights"
        held_by.append(f"stage {stage} holds {contents[stage]}, {weights}")
    return sketch.finish(
        f"A model as a row of {counted(p, 'stage')}, one a rank. {finding}. {'; '.join(held_by)}."
    )


def _draw_stage(
    sketch: Sketch, layers: Sequence[tuple[int, int]], stage: int, x: float, width: float
) -> None:
    """Draw a stage as a box with a slab for each layer, and for embedding and head at the ends."""
    start, end = layers[stage]
    centre = x + width / 2
    sketch.text((centre, 0.13), f"rank {stage}", align="center", bold=True)
    sketch.box((x, _TOP), (width, _HIGH), rounded=True, line=1.5)
    sketch.text((centre, _TOP + 0.16), f"stage {stage}", SMALL, align="center", ink=TEXT_GREY)

    # Ends are as wide as their names, layers share the rest.
    inner = width - 0.16
    end_width = min(0.42, inner / 3)
    has_embedding = stage == 0
    has_head = stage == len(layers) - 1
    each = (inner - end_width * (has_embedding + has_head)) / max(end - start, 1)
    top = _TOP + 0.32
    high = _HIGH - 0.42

    def draw_end(name: str, left: float, fill: str) -> None:
        # Letters below each other where the name has no room.
        text = "\n".join(name) if end_width < 0.34 else name
        sketch.box((left, top), (end_width, high), text, fill=fill)

    left = x + 0.08
    if has_embedding:
        draw_end("emb", left, fill=chart.YELLOW)
        left += end_width
    first = left
    is_thin = each < 0.17
    for layer in range(start, end):
        if not is_thin:
            sketch.box((left, top), (each, high), str(layer), fill=chart.SKY_BLUE)
        elif layer > start:
            sketch.line((left, top), (left, top + high), line=0.6, zorder=2.2)
        left += each
    if has_head:
        draw_end("head", left, fill=chart.ORANGE)
    if is_thin:
        # One box with all numbers: layers this thin have no room for a name each.
        wide = each * (end - start)
        sketch.box((first, top), (wide, high), fill=chart.SKY_BLUE)
        middle = (first + wide / 2, top + high / 2)
        sketch.text(middle, f"{start}–{end - 1}", SMALL, align="center", on_white=True)


@checked
def carried(cut: Any, title: str | None = None) -> ChartFigure:
    """Draw the calls of a model's modules in a row, and each tensor that crosses a cut.

    An arrow leads from the module that makes tensors to each that reads them, and out to the right
    if the model returns them; ×3 stands at the arrow of three. It is blue if each stage on its way
    reads them, and orange and dashed if some only hand them on. ``cut`` is the result of
    :func:`course_pp.parallel.split.crossing`, of up to 24 calls.
    """
    n_calls = len(cut.calls)
    refuse_outside(1, 24, calls_of_cut=n_calls)
    drawn = {(value.made, value.read): value for value in cut.values}
    counts = Counter((value.made, value.read) for value in cut.values)
    levels = _levels([*drawn.values()])
    top = (1 + max(levels, default=0)) * _LEVEL + 0.1
    each = min(0.95, (WIDTH - 2 * MARGIN) / n_calls)
    finding = _finding(cut)
    note = ""
    if cut.values:
        note = "blue: read in every stage on its way; orange, dashed: some only hand it on"
    labels = _labels(cut, each)
    below = _BELOW + _ROW * max([1, *(row for *_, row in labels)])
    sketch = Sketch(n_calls * each, top + _BOX + below, title or finding, note=note)
    for number, name in enumerate(cut.calls):
        *_, before, last = ["", *str(name).split(".")]
        # h.3 of transformer.h.3, norm of model.norm
        short = f"{before}.{last}" if last.isdigit() and before else last
        fill = _FILLS[_stage_of(cut, number) % len(_FILLS)]
        place = ((number * each + 0.03, top), (each - 0.06, _BOX))
        sketch.box(*place, short.replace("_", "\n"), fill=fill, sizes=(SMALL, LEAST))

    for stage, (start, end) in enumerate(pairwise((0, *cut.begins, n_calls))):
        words = str(stage)
        if (end - start) * each > width_of("stage 0", SMALL):
            words = f"stage {stage}"
        middle = (start + end) / 2 * each
        sketch.text((middle, top + _BOX + 0.14), words, SMALL, align="center", bold=True)
    for begin, (words, x, row) in zip(cut.begins, labels, strict=True):
        line = ((begin * each, 0.0), (begin * each, top + _BOX + 0.22))
        sketch.line(*line, ink="black", line=1.6, dashed=True, zorder=3)
        sketch.text((x, top + _BOX + 0.36 + _ROW * row), words, SMALL, align="center")
    for (key, value), level in zip(drawn.items(), levels, strict=True):
        height = top - 0.1 - level * _LEVEL
        _draw_value(sketch, cut, value, count=counts[key], each=each, top=top, height=height)

    told = []
    for begin in cut.begins:
        over = _over(cut, begin)
        if over:
            size = format_bytes(sum(value.n_bytes for value in over))
            makers = listed(_makers(cut, over))
            told.append(f"the cut before {cut.calls[begin]} carries {size}, made by {makers}")
    alt_text = f"A model's modules in a row. {finding}. "
    if told:
        spelled = "; ".join(told)
        alt_text += f"{spelled[0].upper()}{spelled[1:]}."
    return sketch.finish(alt_text)


def _labels(cut: Any, each: float) -> list[tuple[str, float, int]]:
    """Return for each cut its tensors in words, the middle of these words, and their row.

    The rows are such that no words lie on others.
    """
    labels = []
    row_ends = [float("-inf")] * len(cut.begins)
    for begin in cut.begins:
        over = _over(cut, begin)
        size = format_bytes(sum(value.n_bytes for value in over))
        words = f"{counted(len(over), 'tensor')}, {size}"
        half = width_of(words, SMALL) / 2 + 0.04
        x = min(max(begin * each, half), len(cut.calls) * each - half)
        row = next(i for i, end in enumerate(row_ends) if end <= x - half)
        row_ends[row] = x + half
        labels.append((words, x, row))
    return labels


def _levels(values: Sequence[Any]) -> list[int]:
    """Return how high each arrow goes, so that none lies on another."""
    levels = [0] * len(values)
    taken: list[list[tuple[int, int]]] = []

    def length(index: int) -> int:
        return values[index].read[-1] - values[index].made

    # Short arrows first, so that long ones go over them.
    for index in sorted(range(len(values)), key=length):
        start = values[index].made
        end = values[index].read[-1]
        level = 0
        while level < len(taken) and any(start < b and a < end for a, b in taken[level]):
            level += 1
        if level == len(taken):
            taken.append([])
        taken[level].append((start, end))
        levels[index] = level
    return levels


def _draw_value(
    sketch: Sketch, cut: Any, value: Any, count: int, each: float, top: float, height: float
) -> None:
    """Draw an arrow from ``top``, up to ``height``, and down to each reader."""
    skips = _passes(cut, value)
    start = (value.made + 0.62) * each
    ink = chart.VERMILION if skips else chart.BLUE
    for call in value.read:
        ends = [(call * each, height)]
        # A reader after the last call is the model's result.
        if call < len(cut.calls):
            end = (call + 0.38) * each
            ends = [(end, height), (end, top)]
        sketch.arrow((start, top), (start, height), *ends, ink=ink, line=1.8, dashed=skips, head=10)
    if count > 1:
        sketch.text((start + 0.04, height - 0.1), f"×{count}", LEAST)


def _stage_of(cut: Any, call: int) -> int:
    return sum(begin <= call for begin in cut.begins)


def _passes(cut: Any, value: Any) -> bool:
    """Return whether ``value`` crosses a stage that does not read it."""
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
    """Return the makers of values: ``block.0 (3 tensors)``, ``down1 (for down2 and up1)``.

    Readers are named where there are several.
    """
    told = []
    for (made, read), count in Counter((value.made, value.read) for value in values).items():
        notes = []
        if count > 1:
            notes.append(f"{count} tensors")
        if len(read) > 1:
            calls = [*cut.calls, "the result"]
            notes.append(f"for {listed(calls[call] for call in read)}")
        maker = cut.calls[made]
        told.append(f"{maker} ({' '.join(notes)})" if notes else maker)
    return told
