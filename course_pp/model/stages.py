"""The decoder cut into pipeline stages: the layers that each stage holds, and the stage itself.

`build_stage_module` builds one stage alone, and `drop_other_stages` carves it out of a whole model.
Both give the same parameters under the same names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from course_pp.base.arguments import checked
from course_pp.base.sizes import (
    LayerRange,
    ModelConfig,
    check_stage_count,
    compute_layer_assignment,
)
from course_pp.model.transformer import Transformer

Tie = Mapping[int, str]
"""A weight that several stages share: {stage: the name of the weight there}."""


@checked
class PipelineStageModule(Transformer):
    """Stage `stage_id` of `num_stages`: the embedding on the first, norm and head on the last.

    Args:
        config: sizes of the full model.
        layer_range: (start, end) of the stage's layers, end excluded.
    """

    def __init__(
        self, config: ModelConfig, stage_id: int, num_stages: int, layer_range: LayerRange
    ) -> None:
        _check_stage_id(stage_id, num_stages)
        super().__init__(
            config, layer_range, has_embedding=stage_id == 0, has_head=stage_id == num_stages - 1
        )
        self.stage_id = stage_id
        self.num_stages = num_stages

    @property
    def ties(self) -> tuple[Tie, ...]:
        """The shared weights: embedding and head, if they are tied and on different stages."""
        apart = self.config.tie_embeddings and self.num_stages > 1
        return ({0: "embed.weight", self.num_stages - 1: "head.weight"},) if apart else ()

    def extra_repr(self) -> str:
        start, end = self.layer_range
        return f"stage {self.stage_id} of {self.num_stages}, layers {start} to {end - 1}"


@checked
def build_stage_module(
    config: ModelConfig,
    pp_rank: int,
    pp_size: int,
    layer_ranges: Sequence[LayerRange] | None = None,
) -> PipelineStageModule:
    """Build one stage of a pipeline, allocating only its own parameters.

    Args:
        config: sizes of the full model.
        pp_rank: the stage index, counted from 0; equal to the pipeline rank when each rank holds
            one stage.
        pp_size: number of stages.
        layer_ranges: every stage's (start, end), as from `partition_by_cost`; None splits evenly.
    """
    if layer_ranges is None:
        layer_ranges = compute_layer_assignment(config.n_layers, pp_size)
    _check_stage_id(pp_rank, pp_size, "pp_rank", "pp_size")
    _check_layer_ranges(layer_ranges, config.n_layers, pp_size)
    start, end = layer_ranges[pp_rank]
    return PipelineStageModule(config, pp_rank, pp_size, (start, end))


@checked
def drop_other_stages(
    model: Transformer, stage_id: int, num_stages: int, layer_range: LayerRange
) -> Transformer:
    """Turn a whole model into one stage, in place.

    Layers of other stages are deleted, and an embedding or head of another stage becomes None. On a
    meta model nothing was ever allocated, so this costs no more memory than building the stage
    alone.
    """
    _check_stage_id(stage_id, num_stages)
    start, end = layer_range
    held_start, held_end = model.layer_range
    if not held_start <= start < end <= held_end:
        raise ValueError(
            f"layer_range=({start}, {end}) must lie within the layers this model holds, "
            f"({held_start}, {held_end}); start from the whole model"
        )
    for part, holder in (("embed", 0), ("head", num_stages - 1)):
        if stage_id == holder and getattr(model, part) is None:
            raise ValueError(
                f"stage {stage_id} needs the {part}, which this model no longer has; start from the"
                " whole model"
            )
    for index in range(held_start, held_end):
        if not start <= index < end:
            del model.layers[str(index)]
    model.layer_range = (start, end)
    if stage_id != 0:
        model.embed = None
    if stage_id != num_stages - 1:
        model.norm = None
        model.head = None
    return model


@checked
def partition_by_cost(
    costs: Sequence[float], n_stages: int, first: float = 0.0, last: float = 0.0
) -> list[LayerRange]:
    """Split the layers into contiguous stages so that the slowest stage is as fast as it can be.

    In a steady pipeline every stage waits for the slowest one, which sets the pace. Several splits
    may be equally good for it. The most even one of them is taken (the least sum of squared stage
    costs), and among equally even ones the split whose earlier stages hold more layers. So equal
    costs above 0 give the result of `compute_layer_assignment`.

    The result is exact. It takes O(n_stages · n_layers²) steps of dynamic programming over (stage,
    first layer).

    Args:
        costs: one cost a layer, in any unit.
        first: extra cost of the first stage (the embedding).
        last: extra cost of the last stage (final norm and head).

    Returns:
        One (start, end) a stage, end excluded.
    """
    n_layers = len(costs)
    check_stage_count(n_layers, n_stages, "n_stages")
    first_cost, *layer_costs_, last_cost = _as_whole_numbers([first, *costs, last])
    up_to = list(accumulate(layer_costs_, initial=0))

    def stage_cost(stage: int, start: int, end: int) -> int:
        ends = first_cost * (stage == 0) + last_cost * (stage == n_stages - 1)
        return up_to[end] - up_to[start] + ends

    return split_by_cost(n_layers, n_stages, stage_cost)


def split_by_cost(
    n_layers: int, n_stages: int, stage_cost: Callable[[int, int, int], int]
) -> list[LayerRange]:
    """Split as :func:`partition_by_cost` does, with costs of whole stages.

    ``stage_cost(stage, first layer, end)`` returns a whole number.
    """

    def squared_if_optimal(stage: int, start: int, end: int) -> int | None:
        cost = stage_cost(stage, start, end)
        return cost * cost if cost <= slowest else None

    # First find the least time of the slowest stage, then the most even split that reaches it.
    slowest, _ = _best_split(n_layers, n_stages, stage_cost, max)
    _, ranges = _best_split(
        n_layers, n_stages, squared_if_optimal, lambda stage, rest: stage + rest
    )
    return ranges


@dataclass(frozen=True)
class ForwardFlops:
    """Floating-point operations of one forward pass, part by part, for `partition_by_cost`."""

    embed: float
    layers: tuple[float, ...]
    head: float

    @property
    def total(self) -> float:
        return self.embed + sum(self.layers) + self.head


@checked
def layer_costs(config: ModelConfig, seq_len: int) -> ForwardFlops:
    """Return the forward FLOPs of each part for one sequence of `seq_len` tokens.

    A multiply-add is two operations, so a matrix costs 2 · parameters a token (Kaplan et al. 2020,
    arXiv:2001.08361, section 2.1). Only the experts that a token goes to count. Attention scores
    and their weighted sum cost 2 · head_dim each, for every head and (query, key) pair. That is
    4 · dim a pair if the heads together are as wide as the model. Causal attention needs
    seq_len · (seq_len + 1) / 2 pairs. An embedding only looks its rows up and costs nothing. Norms,
    biases, rotations and softmax are small and left out.

    To balance a pipeline, head included:

        flops = layer_costs(config, seq_len)
        partition_by_cost(flops.layers, n_stages, first=flops.embed, last=flops.head)
    """
    if not 1 <= seq_len <= config.max_seq_len:
        raise ValueError(
            f"seq_len={seq_len} must lie between 1 and max_seq_len={config.max_seq_len}"
        )
    attention = 2.0 * config.q_dim * seq_len * (seq_len + 1)
    layers = tuple(2.0 * matrices * seq_len + attention for matrices in config.layer_matrices)
    head = 2.0 * config.vocab_size * config.dim * seq_len
    return ForwardFlops(embed=0.0, layers=layers, head=head)


def _best_split(
    n_layers: int,
    n_stages: int,
    cost: Callable[[int, int, int], int | None],
    combine: Callable[[int, int], int],
) -> tuple[int, list[LayerRange]]:
    """Return the least combined cost of a split, and the split.

    `cost(stage, start, end)` is None where it is forbidden.
    """
    # For each start, the least combined cost of the stages from here on.
    rest: dict[int, int] = {n_layers: 0}
    choices: list[dict[int, int]] = []
    for stage in reversed(range(n_stages)):
        here: dict[int, tuple[int, int]] = {}
        for start in range(stage, n_layers):
            options = [
                # The negated end prefers, among equals, the split whose earlier stage is longer.
                (combine(own, after), -end)
                for end, after in rest.items()
                if end > start and (own := cost(stage, start, end)) is not None
            ]
            if options:
                here[start] = min(options)
        rest = {start: value for start, (value, _) in here.items()}
        choices.append({start: -negated_end for start, (_, negated_end) in here.items()})
    ranges, start = [], 0
    for ends in reversed(choices):
        ranges.append((start, ends[start]))
        start = ends[start]
    return rest[0], ranges


def _as_whole_numbers(costs: Sequence[float]) -> list[int]:
    """Return the costs as numerators over a common denominator.

    Sums of floats depend on their order, so two splits of equal cost might seem to differ.
    """
    for cost in costs:
        if not (math.isfinite(cost) and cost >= 0):
            raise ValueError(
                f"cost {cost} is not allowed in costs, first or last: give finite numbers of at"
                " least 0"
            )
    ratios = [float(cost).as_integer_ratio() for cost in costs]
    denominator = max(below for _, below in ratios)  # all are powers of two
    return [above * (denominator // below) for above, below in ratios]


def _check_stage_id(
    stage_id: int, num_stages: int, index: str = "stage_id", count: str = "num_stages"
) -> None:
    if num_stages < 1:
        raise ValueError(f"{num_stages} stages: a pipeline needs at least 1; raise {count}")
    if not 0 <= stage_id < num_stages:
        raise ValueError(
            f"stage {stage_id} must lie between 0 and {num_stages - 1}, the last of {num_stages}"
            f" stages ({index})"
        )


def _check_layer_ranges(layer_ranges: Sequence[LayerRange], n_layers: int, n_stages: int) -> None:
    if len(layer_ranges) != n_stages:
        raise ValueError(
            f"{len(layer_ranges)} layer ranges for {n_stages} stages; give one for each stage"
            " in layer_ranges"
        )
    expected = 0
    for stage, (start, end) in enumerate(layer_ranges):
        if start != expected or end <= start:
            raise ValueError(
                f"stage {stage} holds layers ({start}, {end}), but must start at layer {expected}"
                " and hold at least one: the ranges cover every layer once, in order"
            )
        expected = end
    if expected != n_layers:
        raise ValueError(f"the layer ranges end at {expected}, but must end at n_layers={n_layers}")
