"""Weights cut over ranks: FSDP2's gathers along a step, and tensor parallelism's exchanges."""

from collections.abc import Sequence
from fractions import Fraction
from itertools import groupby
from typing import Literal, NamedTuple

from course_pp.base.arguments import checked, refuse_below, refuse_unless
from course_pp.schedule import Action, Schedule
from course_pp.show import chart
from course_pp.show.chart import WIDTH, ChartFigure, refuse_outside
from course_pp.show.sketch import LEAST, MARGIN, SERIES, SMALL, WORDS, Point, Sketch, fitting_size
from course_pp.show.wording import counted, format_bytes, listed

_MOST_COLUMNS = 72
# Inches: the names of layers, the sums on the right, the heading, a row, the space below it all.
_LEFT = 0.85
_RIGHT = 1.25
_HEAD = 0.72
_ROW = 0.26
_BETWEEN = 0.5


class Moment(NamedTuple):
    """One layer at work in one action.

    Attributes:
        held: the fraction of each layer's weights that this rank holds meanwhile.
        gathers: the layers that are put together for this moment, or meanwhile for the next.
        reduces: the layers whose gradients are reduced after it.
    """

    action: Action
    layer: int
    held: tuple[Fraction, ...]
    gathers: frozenset[int]
    reduces: frozenset[int] = frozenset()


def sharded_step(
    n_layers: int, reshard: bool | int, n_shards: int, actions: Sequence[Action], pipeline: bool
) -> tuple[Moment, ...]:
    """Follow the weights of ``n_layers`` layers through the actions of a step, as FSDP2 does.

    Forward gathers a layer that is not whole, and leaves what the policy says: its shard (True),
    all of it (False), a k-th (k). Backward gathers what is not whole, and meanwhile the layer
    before. Without a pipeline it reduces the gradients at once, and frees. In a pipeline it leaves
    all whole, and reduces and frees after the last action.
    """
    shard = Fraction(1, n_shards)
    after_forward = Fraction(1)
    if reshard is True:
        after_forward = shard
    elif reshard is not False:
        after_forward = Fraction(1, reshard)
    held = [shard] * n_layers

    def gather(*layers: int) -> frozenset[int]:
        lacking = frozenset(layer for layer in layers if held[layer] != 1)
        for layer in lacking:
            held[layer] = Fraction(1)
        return lacking

    moments = []
    for action in actions:
        if action.kind == "F":
            for layer in range(n_layers):
                gathers = gather(layer)
                moments.append(Moment(action, layer, tuple(held), gathers=gathers))
                held[layer] = after_forward
        elif action.kind in "BI":
            for layer in reversed(range(n_layers)):
                if pipeline:
                    gathers = gather(layer)
                    moments.append(Moment(action, layer, tuple(held), gathers=gathers))
                    continue
                gathers = gather(layer, layer - 1) if layer else gather(layer)
                reduces = frozenset((layer,))
                moments.append(Moment(action, layer, tuple(held), gathers=gathers, reduces=reduces))
                held[layer] = shard
    if pipeline and moments:
        moments[-1] = moments[-1]._replace(reduces=frozenset(range(n_layers)))
    return tuple(moments)


def gathers_of(moments: Sequence[Moment], layer: int) -> int:
    """Return how often ``layer`` is gathered."""
    return sum(layer in moment.gathers for moment in moments)


def most_held(moments: Sequence[Moment]) -> Fraction:
    """Return the most that is held at once, in layers, without the shards that are always there."""
    shard = min(min(moment.held) for moment in moments)
    most = Fraction(0)
    for moment in moments:
        most = max(most, sum((held for held in moment.held if held > shard), Fraction(0)))
    return most


@checked
def fsdp_step(
    reshard: bool | int | Sequence[bool | int] = (True, False),
    n_layers: int = 3,
    n_shards: int = 4,
    schedule: Schedule | None = None,
    rank: int = 0,
    title: str | None = None,
) -> ChartFigure:
    """Draw the layers that are whole on a rank along a step, for one reshard policy or several.

    Each layer has a row. A full box is a whole layer, a low one its shard; ``G`` is a gather, ``R``
    a reduction of gradients, a thick frame the layer at work.

    Args:
        reshard: ``reshard_after_forward``: True, False, the number of ranks to reshard to, or
            several of these.
        n_layers: layers on this rank; there are up to 72 columns.
        n_shards: data-parallel ranks.
        schedule: a pipeline's schedule with one stage a rank. Without it, the step is one forward
            and one backward of the whole model.
    """
    policies = [reshard] if isinstance(reshard, bool | int) else list(reshard)
    refuse_outside(1, _MOST_COLUMNS, n_layers=n_layers)
    refuse_below(2, "fsdp_step", n_shards=n_shards)
    for policy in policies:
        if isinstance(policy, bool):
            continue
        divides = 1 < policy < n_shards and n_shards % policy == 0
        remedy = f"give a number between 1 and {n_shards}, the shards, that divides them"
        refuse_unless(divides, "fsdp_step", "reshard", policy, remedy)
        remedy = "torch reshards to fewer ranks only without a pipeline; give True or False"
        refuse_unless(schedule is None, "fsdp_step", "reshard", policy, remedy)
    actions = [Action(0, "F", 0), Action(0, "B", 0)]
    if schedule is not None:
        refuse_outside(0, schedule.n_ranks - 1, rank=rank)
        actions = [part for action in schedule.actions[rank] for part in action.parts]
        is_one = len({action.stage for action in actions}) == 1
        remedy = "a rank has several stages; take one of a stage each"
        refuse_unless(is_one, "fsdp_step", "schedule", schedule, remedy)

    steps = []
    for policy in policies:
        moments = sharded_step(
            n_layers, policy, n_shards, actions=actions, pipeline=schedule is not None
        )
        steps.append((policy, moments))
    n_columns = len(steps[0][1])
    if n_columns > _MOST_COLUMNS:
        given = f"n_layers={n_layers} make {n_columns} columns"
        raise ValueError(f"{given}: up to {_MOST_COLUMNS} are drawn, take fewer")

    findings: list[str] = []
    for policy, moments in steps:
        often = max(gathers_of(moments, layer) for layer in range(n_layers))
        times = {1: "once", 2: "twice"}.get(often, f"{often} times")
        most = _layers(most_held(moments))
        if not findings:
            findings.append(f"{policy} gathers a layer {times} and holds {most}")
        else:
            findings.append(f"{policy} gathers it {times}, holds {most.partition(' ')[0]}")
    finding = "; ".join(findings)
    if schedule is not None:
        finding = f"In a pipeline {finding}"

    each = min(0.5, (WIDTH - 2 * MARGIN - _LEFT - _RIGHT) / n_columns)
    high = _HEAD + n_layers * _ROW
    width = _LEFT + n_columns * each + _RIGHT
    height = len(policies) * (high + _BETWEEN) - _BETWEEN + 0.05
    note = (
        f"full box: whole layer; low box: 1/{n_shards} of it; G: gathered, R: gradients reduced;"
        " frame: at work"
    )
    sketch = Sketch(width, height, title or finding, note=note)
    told = []
    for i, (policy, moments) in enumerate(steps):
        top = i * (high + _BETWEEN)
        _draw_step(sketch, policy, moments, n_layers=n_layers, top=top, each=each)

        # A few microbatches of moments say how it goes on.
        spelled = []
        for moment in moments[: 4 * n_layers]:
            whole = listed(layer for layer, held in enumerate(moment.held) if held == 1)
            spelled.append(f"{_name(moment.action)} at layer {moment.layer}: {whole} whole")
        if len(spelled) < len(moments):
            spelled.append("…")
        told.append(f"{policy}: {', '.join(spelled)}")
    where = "one forward and one backward"
    if schedule is not None:
        where = f"rank {rank} of a pipeline, {schedule.name}"
    shards = counted(n_shards, "shard")
    return sketch.finish(
        f"Layers of a rank along a step, {where}, {shards}. {finding}. {'; '.join(told)}."
    )


def _name(action: Action) -> str:
    kind = "F" if action.kind == "F" else "B"
    return f"{kind}{action.microbatch}"


def _layers(number: Fraction) -> str:
    if number.denominator == 1:
        return counted(number.numerator, "layer")
    return f"{float(number):.3g} layers"


def _draw_step(
    sketch: Sketch,
    policy: bool | int,
    moments: Sequence[Moment],
    n_layers: int,
    top: float,
    each: float,
) -> None:
    sketch.text((0, top + 0.12), f"reshard_after_forward = {policy}", WORDS, bold=True)
    start = top + _HEAD
    for layer in range(n_layers):
        middle = start + (layer + 0.5) * _ROW
        sketch.text((_LEFT - 0.08, middle), f"layer {layer}", SMALL, align="right")
    _draw_actions(sketch, moments, start - 0.2, each=each)
    for column, moment in enumerate(moments):
        for layer in range(n_layers):
            corner = (_LEFT + column * each, start + layer * _ROW)
            _draw_layer(sketch, moment, layer, corner=corner, each=each)
    often = sorted({gathers_of(moments, layer) for layer in range(n_layers)})
    words = f"gathered: {listed(often)} ×\nmost held:\n{_layers(most_held(moments))}"
    sketch.text((_LEFT + len(moments) * each + 0.12, start + n_layers * _ROW / 2), words, SMALL)


def _draw_actions(sketch: Sketch, moments: Sequence[Moment], y: float, each: float) -> None:
    """Write the name of each action above its columns, with a line as wide as they are."""
    left = _LEFT
    for action, of_action in groupby(moments, key=lambda moment: moment.action):
        right = left + each * len(list(of_action))
        is_forward = action.kind == "F"
        direction = "forward" if is_forward else "backward"
        for text in (f"{direction} {action.microbatch}", _name(action)):
            size = fitting_size(text, right - left + 0.06, 0.3, sizes=(SMALL, LEAST))
            if size:
                sketch.text(((left + right) / 2, y), text, size, align="center")
                break
        ink = chart.BLUE if is_forward else chart.VERMILION
        ends = ((left + 0.03, y + 0.12), (right - 0.03, y + 0.12))
        sketch.line(*ends, ink=ink, line=2.2, dashed=not is_forward)
        left = right


def _draw_layer(sketch: Sketch, moment: Moment, layer: int, corner: Point, each: float) -> None:
    x, y = corner
    held = moment.held[layer]
    wide = each - 0.03
    high = (_ROW - 0.06) * float(held)
    fill = chart.SKY_BLUE if held == 1 else chart.YELLOW
    box = ((x + 0.015, y + _ROW - 0.03 - high), (wide, high))
    sketch.box(*box, fill=fill, edge="none", line=0, zorder=1.5)
    if moment.layer == layer:
        frame = ((x + 0.015, y + 0.03), (wide, _ROW - 0.06))
        sketch.box(*frame, fill="none", line=1.8, edge="black", zorder=3)
    letters = "G" * (layer in moment.gathers) + "R" * (layer in moment.reduces)
    size = fitting_size(letters, each + 0.05, _ROW, sizes=(SMALL, LEAST, 6.0))
    if letters and size:
        sketch.text((x + each / 2, y + _ROW / 2), letters, size, align="center", bold=True)


How = Literal["column", "row"]

# Inches: width and height of each matrix, the space for a sign, an exchange's bar, the heading.
_SIZES: dict[str, Point] = {
    "X": (0.5, 0.55),
    "A": (1.05, 0.55),
    "H": (1.05, 0.5),
    "B": (0.55, 1.05),
    "Z": (0.55, 0.5),
    "sum": (0.55, 0.5),
}
_SIGN = 0.3
_BAR = 0.62
_TOP = 0.62


@checked
def tensor_cut(
    n_ranks: int = 2,
    plan: tuple[How, How] = ("column", "row"),
    tokens: int = 128,
    dim: int = 64,
    hidden: int = 256,
    itemsize: int = 4,
    title: str | None = None,
) -> ChartFigure:
    """Draw gelu(X A) B with both matrices cut over ``n_ranks``, and what the ranks exchange.

    X is ``tokens × dim``, A ``dim × hidden``, B ``hidden × dim``. ``plan`` says how A and B are
    cut. A striped result is a term that has to be summed first. Boxes are not to scale.
    """
    refuse_below(1, "tensor_cut", tokens=tokens, dim=dim, hidden=hidden, itemsize=itemsize)
    refuse_outside(2, 8, n_ranks=n_ranks)
    first, second = plan
    remedy = f"give a multiple of the ranks, {n_ranks}"
    refuse_unless(hidden % n_ranks == 0, "tensor_cut", "hidden", hidden, remedy)
    if first == "row" or second == "column":
        refuse_unless(dim % n_ranks == 0, "tensor_cut", "dim", dim, remedy)

    # The collective after each product moves the product's whole width.
    after_first = ""
    if first == "row":
        after_first = "all-reduce"  # gelu of a sum is not the sum of the gelus
    elif second == "column":
        after_first = "all-gather"
    after_second = "all-reduce" if second == "row" else "all-gather"
    exchanges = []
    for exchange, width in ((after_first, hidden), (after_second, dim)):
        if exchange:
            exchanges.append(f"{exchange} of {format_bytes(itemsize * tokens * width)}")
    number = "one exchange" if len(exchanges) == 1 else "two exchanges"
    cut = f"{first.capitalize()}, then {second}, over {n_ranks} ranks"
    finding = f"{cut}: {number} in forward, {listed(exchanges)}"

    # The left end of each matrix, and of the bar of each exchange.
    scale = {2: 1.0, 3: 0.9, 4: 0.8}.get(n_ranks, 0.62)
    high = _SIZES["B"][1] * scale + 0.2
    xs: dict[str, float] = {}
    x = 0.55
    for name in ("X", "A", "first", "H", "B", "Z", "second", "sum"):
        if name == "first" and not after_first:
            x += 0.35  # where other plans exchange
            continue
        xs[name] = x
        x += _SIGN
        x += _SIZES[name][0] * scale if name in _SIZES else _BAR
    sketch = Sketch(x - _SIGN + 0.05, _TOP + n_ranks * high, title or finding)
    headings = {
        "X": f"X\n{tokens} × {dim}",
        "A": f"A by {first}\n{dim} × {hidden}",
        "H": f"gelu(X A)\n{tokens} × {hidden}",
        "B": f"B by {second}\n{hidden} × {dim}",
        "Z": "a term of Z" if second == "row" else "a part of Z",
        "sum": f"Z\n{tokens} × {dim}",
    }
    for name, words in headings.items():
        middle = xs[name] + _SIZES[name][0] * scale / 2
        sketch.text((middle, _TOP - 0.32), words, SMALL, align="center")
    for rank in range(n_ranks):
        y = _TOP + (rank + 0.5) * high - 0.1
        _draw_row(sketch, plan, rank, n=n_ranks, xs=xs, y=y, scale=scale)
    for name, exchange in (("first", after_first), ("second", after_second)):
        if exchange:
            what = "sum" if exchange == "all-reduce" else "gather"
            text = f"{what}\n\n" + exchange.replace("-", "-\n")
            bar = ((xs[name], _TOP - 0.02), (_BAR, n_ranks * high - 0.16))
            sketch.box(*bar, text, fill=chart.YELLOW, bold=True, sizes=(SMALL, LEAST))
    exchanged = listed(f"an {exchange}" for exchange in exchanges)
    return sketch.finish(
        f"Products of gelu(X A) B, a row a rank, A cut by {first}, B by {second}, over"
        f" {counted(n_ranks, 'rank')}. {finding}. One forward needs {exchanged}."
    )


class _Piece(NamedTuple):
    """A rank's part of a matrix.

    Attributes:
        columns, rows: the index of the part and the number of parts; (0, 1) for all.
        is_term: whether it is a term of a sum.
    """

    columns: tuple[int, int]
    rows: tuple[int, int]
    is_term: bool = False


def _draw_row(
    sketch: Sketch,
    plan: tuple[How, How],
    rank: int,
    n: int,
    xs: dict[str, float],
    y: float,
    scale: float,
) -> None:
    """Draw the matrices of one rank, its part of each filled, and the signs between them."""
    sketch.text((0, y), f"rank {rank}", bold=True)
    whole = (0, 1)
    part = (rank, n)
    first, second = plan
    # X's columns meet A's rows, and H's columns meet B's rows: both are cut, or neither.
    inner = part if first == "row" else whole
    outer = part if second == "row" else whole
    pieces = {
        "X": _Piece(inner, whole),
        "A": _Piece(part if first == "column" else whole, inner),
        "H": _Piece(outer, whole),
        "B": _Piece(part if second == "column" else whole, outer),
        "Z": _Piece(part if second == "column" else whole, whole, is_term=second == "row"),
        "sum": _Piece(whole, whole),
    }
    ends = {}
    for name, (columns, rows, is_term) in pieces.items():
        wide, tall = _SIZES[name]
        x = xs[name]
        width = wide * scale
        height = tall * scale
        top = y - height / 2
        ends[name] = x + width
        sketch.box((x, top), (width, height), edge="#999999", line=0.8, dashed=True, zorder=1.5)

        i, across = columns
        j, down = rows
        place = ((x + width * i / across, top + height * j / down), (width / across, height / down))
        if columns == rows == whole and not is_term:
            words, fill, ink = "all", chart.IDLE_GREY, "black"
        else:
            words = str(rank)
            fill, ink = SERIES[rank % len(SERIES)]
        hatch = "////" if is_term else ""
        sketch.box(*place, words, fill=fill, ink=ink, hatch=hatch, sizes=(SMALL, LEAST, 6.0))

    for left, right, sign in (("X", "A", "×"), ("H", "B", "×"), ("B", "Z", "=")):
        sketch.text(((ends[left] + xs[right]) / 2, y), sign, WORDS + 1, align="center")
    for left, right, bar in (("A", "H", xs.get("first")), ("Z", "sum", xs["second"])):
        if bar is None:
            sketch.arrow((ends[left] + 0.06, y), (xs[right] - 0.06, y))
            continue
        sketch.arrow((ends[left] + 0.05, y), (bar - 0.03, y))
        sketch.arrow((bar + _BAR + 0.03, y), (xs[right] - 0.05, y))
