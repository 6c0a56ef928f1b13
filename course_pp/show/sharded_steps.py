"""What FSDP2 gathers, holds and frees along a step, by its reshard policy."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from course_pp.arguments import checked, refuse_below
from course_pp.schedule import Action, Schedule
from course_pp.show import chart
from course_pp.show.chart import WIDTH, ChartFigure
from course_pp.show.sketch import LEAST, MARGIN, SMALL, WORDS, Sketch, fitting_size
from course_pp.show.wording import counted, listed

_MOST_COLUMNS = 72
_LEFT, _RIGHT, _HEAD, _ROW, _BETWEEN = 0.85, 1.25, 0.72, 0.26, 0.5


@dataclass(frozen=True)
class Moment:
    """One layer at work in one action.

    Attributes:
        action: forward or backward of a microbatch.
        layer: which of the rank's layers is at work.
        held: for each layer, the fraction of its weights that this rank holds meanwhile.
        gathers: layers that are put together for this moment, or meanwhile for the next.
        reduces: layers whose gradients are reduced after it.
    """

    action: Action
    layer: int
    held: tuple[Fraction, ...]
    gathers: frozenset[int]
    reduces: frozenset[int] = frozenset()


@dataclass
class _Layers:
    """The layers of a rank while a step goes on; ``after`` is what forward leaves of a layer."""

    held: list[Fraction]
    shard: Fraction
    after: Fraction

    def gather(self, layer: int) -> frozenset[int]:
        if self.held[layer] == 1:
            return frozenset()
        self.held[layer] = Fraction(1)
        return frozenset((layer,))


def sharded_step(
    n_layers: int, reshard: bool | int, n_shards: int, actions: Sequence[Action], pipeline: bool
) -> tuple[Moment, ...]:
    """Follow the weights of ``n_layers`` layers through the actions of a step, as FSDP2 treats them.

    Forward gathers a layer that is not whole, and leaves what the policy says: its shard (True), all of it (False), a
    k-th (k). Backward gathers what is not whole, and meanwhile the layer before. Without a pipeline it reduces the
    gradients at once, and frees. In a pipeline it leaves all whole, and reduces and frees after the last action.
    """
    shard = Fraction(1, n_shards)
    after = Fraction(1, reshard) if not isinstance(reshard, bool) else shard if reshard else Fraction(1)
    layers = _Layers([shard] * n_layers, shard, after)
    work = [action for action in actions if action.kind in "FBI"]
    moments = [moment for action in work for moment in _moments(layers, action, pipeline)]
    if pipeline and moments:
        last = moments[-1]
        moments[-1] = Moment(last.action, last.layer, last.held, last.gathers, frozenset(range(n_layers)))
    return tuple(moments)


def _moments(layers: _Layers, action: Action, pipeline: bool) -> Iterator[Moment]:
    n_layers = len(layers.held)
    if action.kind == "F":
        for layer in range(n_layers):
            gathers = layers.gather(layer)
            yield Moment(action, layer, tuple(layers.held), gathers)
            layers.held[layer] = layers.after
        return
    for layer in reversed(range(n_layers)):
        gathers = layers.gather(layer)
        if layer and not pipeline:
            gathers |= layers.gather(layer - 1)
        yield Moment(action, layer, tuple(layers.held), gathers, frozenset() if pipeline else frozenset((layer,)))
        if not pipeline:
            layers.held[layer] = layers.shard


@checked
def fsdp_step(
    reshard: bool | int | Sequence[bool | int] = (True, False),
    n_layers: int = 3,
    n_shards: int = 4,
    schedule: Schedule | None = None,
    rank: int = 0,
    title: str | None = None,
) -> ChartFigure:
    """Draw which layers are whole on a rank along a step, a row a layer, for one reshard policy or several.

    A full box is a whole layer, a low one its shard; ``G`` is a gather, ``R`` a reduction of gradients, a thick frame
    the layer at work.

    Args:
        reshard: ``reshard_after_forward``: True, False, the number of ranks to reshard to, or several of these.
        n_layers: on this rank.
        n_shards: data-parallel ranks.
        schedule: of a pipeline, of one stage a rank; unless given, one forward and one backward of the whole model.
        rank: of the pipeline.
        title: instead of the finding.

    Raises:
        ValueError: for no policy, fewer than 1 layer or 2 shards, a number to reshard to that does not divide the
            shards properly or is given for a pipeline, a rank with several stages, and for more than 72 columns.
    """
    policies = [reshard] if isinstance(reshard, bool | int) else list(reshard)
    _refuse(policies, n_layers, n_shards, schedule is not None)
    refuse_below(0, "fsdp_step", rank=rank)
    actions = _actions(schedule, rank)
    steps = [sharded_step(n_layers, each, n_shards, actions, schedule is not None) for each in policies]
    n_columns = len(steps[0])
    if n_columns > _MOST_COLUMNS:
        raise ValueError(
            f"{n_columns} columns of a layer at work: up to {_MOST_COLUMNS} are drawn; "
            "take fewer layers or microbatches"
        )
    finding = _finding(policies, steps, schedule)
    each = min(0.5, (WIDTH - 2 * MARGIN - _LEFT - _RIGHT) / n_columns)
    high = _HEAD + n_layers * _ROW
    width = _LEFT + n_columns * each + _RIGHT
    note = f"full box: whole layer; low box: 1/{n_shards} of it; G: gathered, R: gradients reduced; frame: at work"
    sketch = Sketch(width, len(policies) * (high + _BETWEEN) - _BETWEEN + 0.05, title or finding, note)
    for i, (policy, moments) in enumerate(zip(policies, steps, strict=True)):
        _draw_step(sketch, policy, moments, n_layers, i * (high + _BETWEEN), each)
    where = f"rank {rank} of a pipeline, {schedule.name}" if schedule is not None else "one forward and one backward"
    told = "; ".join(_told(policy, moments) for policy, moments in zip(policies, steps, strict=True))
    return sketch.finish(f"Layers of a rank along a step, {where}, {counted(n_shards, 'shard')}. {finding}. {told}.")


def _refuse(policies: Sequence[bool | int], n_layers: int, n_shards: int, pipeline: bool) -> None:
    if not policies:
        raise ValueError("no reshard policy: give True, False, or a number of ranks")
    if not 1 <= n_layers <= _MOST_COLUMNS or n_shards < 2:
        raise ValueError(
            f"n_layers={n_layers}, n_shards={n_shards}: give from 1 to {_MOST_COLUMNS} layers, and at least 2 shards"
        )
    for policy in policies:
        if not isinstance(policy, bool) and (not 1 < policy < n_shards or n_shards % policy):
            raise ValueError(f"reshard={policy} with {n_shards} shards: give a number between that divides it")
        if not isinstance(policy, bool) and pipeline:
            raise ValueError(f"reshard={policy} in a pipeline: torch reshards to fewer ranks only without one")


def _actions(schedule: Schedule | None, rank: int) -> list[Action]:
    if schedule is None:
        return [Action(0, "F", 0), Action(0, "B", 0)]
    if not 0 <= rank < schedule.n_ranks:
        raise ValueError(f"rank {rank}: {schedule.name} has ranks 0 to {schedule.n_ranks - 1}")
    actions = [part for action in schedule.actions[rank] for part in action.parts]
    if len({action.stage for action in actions}) > 1:
        raise ValueError(f"rank {rank} of {schedule.name} has several stages: take a schedule of one stage a rank")
    return actions


def gathers_of(moments: Sequence[Moment], layer: int) -> int:
    """Return how often a layer is gathered."""
    return sum(layer in moment.gathers for moment in moments)


def most_held(moments: Sequence[Moment]) -> Fraction:
    """Return the most that is held at once, in layers, without the shards that are always there."""
    shard = min(min(moment.held) for moment in moments)
    return max(sum((held for held in moment.held if held > shard), Fraction(0)) for moment in moments)


def _draw_step(
    sketch: Sketch, policy: bool | int, moments: Sequence[Moment], n_layers: int, top: float, each: float
) -> None:
    sketch.text((0, top + 0.12), f"reshard_after_forward = {policy}", WORDS, bold=True)
    start = top + _HEAD
    for layer in range(n_layers):
        sketch.text((_LEFT - 0.08, start + (layer + 0.5) * _ROW), f"layer {layer}", SMALL, align="right")
    _draw_actions(sketch, moments, start - 0.2, each)
    for column, moment in enumerate(moments):
        for layer in range(n_layers):
            _draw_layer(sketch, moment, layer, (_LEFT + column * each, start + layer * _ROW), each)
    right = _LEFT + len(moments) * each + 0.12
    gathered = {gathers_of(moments, layer) for layer in range(n_layers)}
    often = listed([str(number) for number in sorted(gathered)])
    words = f"gathered: {often} ×\nmost held:\n{_layers(most_held(moments))}"
    sketch.text((right, start + n_layers * _ROW / 2), words, SMALL)


def _draw_actions(sketch: Sketch, moments: Sequence[Moment], y: float, each: float) -> None:
    """The name of each action above its columns, with a line as wide as they are."""
    first = 0
    for column, moment in enumerate(moments):
        if column + 1 < len(moments) and moments[column + 1].action is moment.action:
            continue
        left, right = _LEFT + first * each, _LEFT + (column + 1) * each
        kind = "F" if moment.action.kind == "F" else "B"
        long = {"F": "forward", "B": "backward"}[kind]
        name = f"{kind}{moment.action.microbatch}"
        words = f"{long} {moment.action.microbatch}"
        for text in (words, name):
            if size := fitting_size(text, right - left + 0.06, 0.3, (SMALL, LEAST)):
                sketch.text(((left + right) / 2, y), text, size, align="center")
                break
        ink = chart.BLUE if kind == "F" else chart.VERMILION
        sketch.line((left + 0.03, y + 0.12), (right - 0.03, y + 0.12), ink=ink, line=2.2, dashed=kind == "B")
        first = column + 1


def _draw_layer(sketch: Sketch, moment: Moment, layer: int, corner: tuple[float, float], each: float) -> None:
    (x, y), held = corner, moment.held[layer]
    high = (_ROW - 0.06) * float(held)
    at_work = moment.layer == layer
    fill = chart.SKY_BLUE if held == 1 else chart.YELLOW
    sketch.box((x + 0.015, y + _ROW - 0.03 - high), (each - 0.03, high), fill=fill, edge="none", line=0, zorder=1.5)
    if at_work:
        sketch.box((x + 0.015, y + 0.03), (each - 0.03, _ROW - 0.06), fill="none", line=1.8, edge="black", zorder=3)
    letters = "G" * (layer in moment.gathers) + "R" * (layer in moment.reduces)
    if letters and (size := fitting_size(letters, each + 0.05, _ROW, (SMALL, LEAST, 6.0))):
        sketch.text((x + each / 2, y + _ROW / 2), letters, size, align="center", bold=True)


def _layers(number: Fraction) -> str:
    return counted(number.numerator, "layer") if number.denominator == 1 else f"{float(number):.3g} layers"


def _finding(policies: Sequence[bool | int], steps: Sequence[Sequence[Moment]], schedule: Schedule | None) -> str:
    told: list[str] = []
    for policy, moments in zip(policies, steps, strict=True):
        often = max(gathers_of(moments, layer) for layer in range(len(moments[0].held)))
        times = {1: "once", 2: "twice"}.get(often, f"{often} times")
        most = _layers(most_held(moments))
        told.append(
            f"{policy} gathers it {times}, holds {most.partition(' ')[0]}"
            if told
            else f"{policy} gathers a layer {times} and holds {most}"
        )
    where = "In a pipeline " if schedule is not None else ""
    return where + "; ".join(told)


def _told(policy: bool | int, moments: Sequence[Moment]) -> str:
    each = [
        f"{'F' if moment.action.kind == 'F' else 'B'}{moment.action.microbatch} at layer {moment.layer}: "
        f"{listed([str(layer) for layer, held in enumerate(moment.held) if held == 1])} whole"
        for moment in moments[: 4 * len(moments[0].held)]
    ]
    return f"{policy}: {', '.join(each)}{', …' if len(each) < len(moments) else ''}"
