"""Weights cut over ranks: what FSDP2 gathers, holds and frees along a step, and what tensor parallelism exchanges."""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Literal, NamedTuple

from course_pp.base.arguments import checked, refuse_below, refuse_unless
from course_pp.schedule import Action, Schedule
from course_pp.show import chart
from course_pp.show.chart import WIDTH, ChartFigure, refuse_outside
from course_pp.show.sketch import LEAST, MARGIN, SERIES, SMALL, WORDS, Point, Sketch, fitting_size
from course_pp.show.wording import counted, format_bytes, listed

_MOST_COLUMNS = 72
_LEFT, _RIGHT, _HEAD, _ROW, _BETWEEN = 0.85, 1.25, 0.72, 0.26, 0.5


class Moment(NamedTuple):
    """One layer at work in one action."""

    action: Action
    layer: int
    # for each layer, the fraction of its weights that this rank holds meanwhile
    held: tuple[Fraction, ...]
    # layers that are put together for this moment, or meanwhile for the next
    gathers: frozenset[int]
    reduces: frozenset[int] = frozenset()  # layers whose gradients are reduced after it


def sharded_step(
    n_layers: int, reshard: bool | int, n_shards: int, actions: Sequence[Action], pipeline: bool
) -> tuple[Moment, ...]:
    """Follow the weights of ``n_layers`` layers through the actions of a step, as FSDP2 treats
    them.

    Forward gathers a layer that is not whole, and leaves what the policy says: its shard (True),
    all of it (False), a k-th (k). Backward gathers what is not whole, and meanwhile the layer
    before. Without a pipeline it reduces the gradients at once, and frees. In a pipeline it leaves
    all whole, and reduces and frees after the last action.
    """
    shard = Fraction(1, n_shards)
    after = (
        Fraction(1, reshard) if not isinstance(reshard, bool) else shard if reshard else Fraction(1)
    )
    held = [shard] * n_layers

    def gather(*layers: int) -> frozenset[int]:
        lacking = frozenset(layer for layer in layers if held[layer] != 1)
        for layer in lacking:
            held[layer] = Fraction(1)
        return lacking

    def of(action: Action) -> Iterator[Moment]:
        for layer in range(n_layers) if action.kind == "F" else reversed(range(n_layers)):
            is_forward, ahead = action.kind == "F", (layer - 1,) if layer and not pipeline else ()
            gathers = gather(layer) if is_forward else gather(layer, *ahead)
            reduces = frozenset[int]() if is_forward or pipeline else frozenset((layer,))
            yield Moment(action, layer, tuple(held), gathers, reduces)
            if is_forward or not pipeline:
                held[layer] = after if is_forward else shard

    moments = [moment for action in actions if action.kind in "FBI" for moment in of(action)]
    if pipeline and moments:
        moments[-1] = moments[-1]._replace(reduces=frozenset(range(n_layers)))
    return tuple(moments)


def gathers_of(moments: Sequence[Moment], layer: int) -> int:
    return sum(layer in moment.gathers for moment in moments)


def most_held(moments: Sequence[Moment]) -> Fraction:
    """Return the most that is held at once, in layers, without the shards that are always there."""
    shard = min(min(moment.held) for moment in moments)
    return max(
        sum((held for held in moment.held if held > shard), Fraction(0)) for moment in moments
    )


@checked
def fsdp_step(
    reshard: bool | int | Sequence[bool | int] = (True, False),
    n_layers: int = 3,
    n_shards: int = 4,
    schedule: Schedule | None = None,
    rank: int = 0,
    title: str | None = None,
) -> ChartFigure:
    """Draw which layers are whole on a rank along a step, a row a layer, for one reshard policy or
    several.

    A full box is a whole layer, a low one its shard; ``G`` is a gather, ``R`` a reduction of
    gradients, a thick frame the layer at work.

    Args:
        reshard: ``reshard_after_forward``: True, False, the number of ranks to reshard to, or
            several of these.
        n_layers: on this rank; there are up to 72 columns.
        n_shards: data-parallel ranks.
        schedule: of a pipeline, of one stage a rank; unless given, one forward and one backward of
            the whole model.
    """
    policies = [reshard] if isinstance(reshard, bool | int) else list(reshard)
    refuse_outside(1, _MOST_COLUMNS, n_layers=n_layers)
    refuse_below(2, "fsdp_step", n_shards=n_shards)
    for policy in policies:
        divides = isinstance(policy, bool) or (1 < policy < n_shards and n_shards % policy == 0)
        remedy = f"give a number between 1 and {n_shards}, the shards, that divides them"
        refuse_unless(divides, "fsdp_step", "reshard", policy, remedy)
        fits = isinstance(policy, bool) or schedule is None
        remedy = "torch reshards to fewer ranks only without a pipeline; give True or False"
        refuse_unless(fits, "fsdp_step", "reshard", policy, remedy)
    actions = [Action(0, "F", 0), Action(0, "B", 0)]
    if schedule is not None:
        refuse_outside(0, schedule.n_ranks - 1, rank=rank)
        actions = [part for action in schedule.actions[rank] for part in action.parts]
        is_one = len({action.stage for action in actions}) == 1
        refuse_unless(
            is_one,
            "fsdp_step",
            "schedule",
            schedule,
            "a rank has several stages; take one of a stage each",
        )
    steps = [
        sharded_step(n_layers, each, n_shards, actions, schedule is not None) for each in policies
    ]
    n_columns = len(steps[0])
    if n_columns > _MOST_COLUMNS:
        raise ValueError(
            f"n_layers={n_layers} make {n_columns} columns: up to {_MOST_COLUMNS} are drawn, take"
            " fewer"
        )
    findings: list[str] = []
    for policy, moments in zip(policies, steps, strict=True):
        often = max(gathers_of(moments, layer) for layer in range(n_layers))
        times = {1: "once", 2: "twice"}.get(often, f"{often} times")
        most = _layers(most_held(moments))
        first = f"{policy} gathers a layer {times} and holds {most}"
        other = f"{policy} gathers it {times}, holds {most.partition(' ')[0]}"
        findings.append(other if findings else first)
    finding = ("In a pipeline " if schedule is not None else "") + "; ".join(findings)

    each = min(0.5, (WIDTH - 2 * MARGIN - _LEFT - _RIGHT) / n_columns)
    high = _HEAD + n_layers * _ROW
    width = _LEFT + n_columns * each + _RIGHT
    note = (
        f"full box: whole layer; low box: 1/{n_shards} of it; G: gathered, R: gradients reduced;"
        " frame: at work"
    )
    sketch = Sketch(
        width, len(policies) * (high + _BETWEEN) - _BETWEEN + 0.05, title or finding, note
    )
    told = []
    for i, (policy, moments) in enumerate(zip(policies, steps, strict=True)):
        _draw_step(sketch, policy, moments, n_layers, i * (high + _BETWEEN), each)
        spelled = [
            f"{_name(moment.action)} at layer {moment.layer}: "
            f"{listed([str(layer) for layer, held in enumerate(moment.held) if held == 1])} whole"
            for moment in moments[: 4 * n_layers]
        ]
        told.append(f"{policy}: {', '.join(spelled)}{', …' if len(spelled) < len(moments) else ''}")
    where = (
        f"rank {rank} of a pipeline, {schedule.name}"
        if schedule is not None
        else "one forward and one backward"
    )
    shards = counted(n_shards, "shard")
    return sketch.finish(
        f"Layers of a rank along a step, {where}, {shards}. {finding}. {'; '.join(told)}."
    )


def _name(action: Action) -> str:
    return f"{'F' if action.kind == 'F' else 'B'}{action.microbatch}"


def _layers(number: Fraction) -> str:
    return (
        counted(number.numerator, "layer")
        if number.denominator == 1
        else f"{float(number):.3g} layers"
    )


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
        sketch.text(
            (_LEFT - 0.08, start + (layer + 0.5) * _ROW), f"layer {layer}", SMALL, align="right"
        )
    _draw_actions(sketch, moments, start - 0.2, each)
    for column, moment in enumerate(moments):
        for layer in range(n_layers):
            _draw_layer(sketch, moment, layer, (_LEFT + column * each, start + layer * _ROW), each)
    often = listed(
        [
            str(number)
            for number in sorted({gathers_of(moments, layer) for layer in range(n_layers)})
        ]
    )
    words = f"gathered: {often} ×\nmost held:\n{_layers(most_held(moments))}"
    sketch.text((_LEFT + len(moments) * each + 0.12, start + n_layers * _ROW / 2), words, SMALL)


def _draw_actions(sketch: Sketch, moments: Sequence[Moment], y: float, each: float) -> None:
    """The name of each action above its columns, with a line as wide as they are."""
    first = 0
    for column, moment in enumerate(moments):
        if column + 1 < len(moments) and moments[column + 1].action is moment.action:
            continue
        left, right = _LEFT + first * each, _LEFT + (column + 1) * each
        is_forward = moment.action.kind == "F"
        for text in (
            f"{'forward' if is_forward else 'backward'} {moment.action.microbatch}",
            _name(moment.action),
        ):
            if size := fitting_size(text, right - left + 0.06, 0.3, (SMALL, LEAST)):
                sketch.text(((left + right) / 2, y), text, size, align="center")
                break
        ink = chart.BLUE if is_forward else chart.VERMILION
        sketch.line(
            (left + 0.03, y + 0.12),
            (right - 0.03, y + 0.12),
            ink=ink,
            line=2.2,
            dashed=not is_forward,
        )
        first = column + 1


def _draw_layer(sketch: Sketch, moment: Moment, layer: int, corner: Point, each: float) -> None:
    (x, y), held = corner, moment.held[layer]
    high = (_ROW - 0.06) * float(held)
    fill = chart.SKY_BLUE if held == 1 else chart.YELLOW
    sketch.box(
        (x + 0.015, y + _ROW - 0.03 - high),
        (each - 0.03, high),
        fill=fill,
        edge="none",
        line=0,
        zorder=1.5,
    )
    if moment.layer == layer:
        sketch.box(
            (x + 0.015, y + 0.03),
            (each - 0.03, _ROW - 0.06),
            fill="none",
            line=1.8,
            edge="black",
            zorder=3,
        )
    letters = "G" * (layer in moment.gathers) + "R" * (layer in moment.reduces)
    if letters and (size := fitting_size(letters, each + 0.05, _ROW, (SMALL, LEAST, 6.0))):
        sketch.text((x + each / 2, y + _ROW / 2), letters, size, align="center", bold=True)


How = Literal["column", "row"]

# width, height
_X, _A, _H, _B, _Z = (0.5, 0.55), (1.05, 0.55), (1.05, 0.5), (0.55, 1.05), (0.55, 0.5)
_SIGN, _BAR, _TOP = 0.3, 0.62, 0.62


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
    """Draw gelu(X A) B with both matrices cut over ``n_ranks``: what each rank computes, and where
    they must exchange.

    X is ``tokens × dim``, A ``dim × hidden``, B ``hidden × dim``. ``plan`` says how A and B are
    cut. A striped result is a term that has to be summed first. Boxes are not to scale.
    """
    refuse_below(1, "tensor_cut", tokens=tokens, dim=dim, hidden=hidden, itemsize=itemsize)
    refuse_outside(2, 8, n_ranks=n_ranks)
    for name, size, needed in (
        ("hidden", hidden, True),
        ("dim", dim, plan[0] == "row" or plan[1] == "column"),
    ):
        divides = not needed or size % n_ranks == 0
        refuse_unless(divides, "tensor_cut", name, size, f"give a multiple of the ranks, {n_ranks}")
    first, second = plan
    after_second = "all-reduce" if second == "row" else "all-gather"
    after_first = "" if second == "row" else "all-gather"
    if first == "row":
        after_first = "all-reduce"  # gelu of a sum is not the sum of the gelus
    exchanges = [each for each in (after_first, after_second) if each]
    widths = [hidden if i == 0 and after_first else dim for i in range(len(exchanges))]
    moved = [format_bytes(itemsize * tokens * width) for width in widths]
    number = "one exchange" if len(moved) == 1 else "two exchanges"
    kinds = listed([f"{kind} of {size}" for kind, size in zip(exchanges, moved, strict=True)])
    finding = (
        f"{first.capitalize()}, then {second}, over {n_ranks} ranks: {number} in forward, {kinds}"
    )

    scale = {2: 1.0, 3: 0.9, 4: 0.8}.get(n_ranks, 0.62)
    high = _B[1] * scale + 0.2
    xs, x = {}, 0.55
    matrices = {
        "X": _X,
        "A": _A,
        "first": None,
        "H": _H,
        "B": _B,
        "Z": _Z,
        "second": None,
        "sum": _Z,
    }
    for name, of in matrices.items():
        if name == "first" and not after_first:
            x += 0.35  # where other plans exchange
            continue
        xs[name] = x
        x += (of[0] * scale if of else _BAR) + _SIGN
    sketch = Sketch(x - _SIGN + 0.05, _TOP + n_ranks * high, title or finding)
    headings = {
        "X": (_X, f"X\n{tokens} × {dim}"),
        "A": (_A, f"A by {first}\n{dim} × {hidden}"),
        "H": (_H, f"gelu(X A)\n{tokens} × {hidden}"),
        "B": (_B, f"B by {second}\n{hidden} × {dim}"),
        "Z": (_Z, "a term of Z" if second == "row" else "a part of Z"),
        "sum": (_Z, f"Z\n{tokens} × {dim}"),
    }
    for name, ((wide, _), words) in headings.items():
        sketch.text((xs[name] + wide * scale / 2, _TOP - 0.32), words, SMALL, align="center")
    for rank in range(n_ranks):
        _draw_row(sketch, plan, rank, n_ranks, xs, _TOP + (rank + 0.5) * high - 0.1, scale)
    for name, exchange in (("first", after_first), ("second", after_second)):
        if exchange:
            text = f"{'sum' if exchange == 'all-reduce' else 'gather'}\n\n" + exchange.replace(
                "-", "-\n"
            )
            place = ((xs[name], _TOP - 0.02), (_BAR, n_ranks * high - 0.16))
            sketch.box(*place, text, fill=chart.YELLOW, bold=True, sizes=(SMALL, LEAST))
    exchanged = listed(
        [f"an {exchange} of {size}" for exchange, size in zip(exchanges, moved, strict=True)]
    )
    return sketch.finish(
        f"Products of gelu(X A) B, a row a rank, A cut by {first}, B by {second}, over"
        f" {counted(n_ranks, 'rank')}. {finding}. One forward needs {exchanged}."
    )


def _draw_row(
    sketch: Sketch,
    plan: tuple[How, How],
    rank: int,
    n: int,
    xs: dict[str, float],
    y: float,
    scale: float,
) -> None:
    sketch.text((0, y), f"rank {rank}", bold=True)
    whole, part = (0, 1), (rank, n)
    first_by_row, second_by_row = (how == "row" for how in plan)
    # Of each matrix: which part of the columns and of the rows is this rank's, and whether it is a
    # term of a sum.
    pieces: dict[str, tuple[Point, tuple[int, int], tuple[int, int], bool]] = {
        "X": (_X, part if first_by_row else whole, whole, False),
        "A": (_A, whole if first_by_row else part, part if first_by_row else whole, False),
        "H": (_H, part if second_by_row else whole, whole, False),
        "B": (_B, whole if second_by_row else part, part if second_by_row else whole, False),
        "Z": (_Z, whole if second_by_row else part, whole, second_by_row),
        "sum": (_Z, whole, whole, False),
    }
    for name, ((wide, tall), columns, rows, is_term) in pieces.items():
        x, width, height = xs[name], wide * scale, tall * scale
        top = y - height / 2
        sketch.box((x, top), (width, height), edge="#999999", line=0.8, dashed=True, zorder=1.5)
        is_shared = columns == rows == whole and not is_term
        fill, ink = (chart.IDLE_GREY, "black") if is_shared else SERIES[rank % len(SERIES)]
        (i, across), (j, down) = columns, rows
        place = ((x + width * i / across, top + height * j / down), (width / across, height / down))
        words, hatch = "all" if is_shared else str(rank), "////" if is_term else ""
        sketch.box(*place, words, fill=fill, ink=ink, hatch=hatch, sizes=(SMALL, LEAST, 6.0))
    ends = {name: xs[name] + piece[0][0] * scale for name, piece in pieces.items()}
    for left, right, sign in (("X", "A", "×"), ("H", "B", "×"), ("B", "Z", "=")):
        sketch.text(((ends[left] + xs[right]) / 2, y), sign, WORDS + 1, align="center")
    for left, right, bar in (("A", "H", xs.get("first")), ("Z", "sum", xs["second"])):
        if bar is None:
            sketch.arrow((ends[left] + 0.06, y), (xs[right] - 0.06, y))
            continue
        sketch.arrow((ends[left] + 0.05, y), (bar - 0.03, y))
        sketch.arrow((bar + _BAR + 0.03, y), (xs[right] - 0.05, y))
