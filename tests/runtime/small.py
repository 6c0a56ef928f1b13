"""A model small enough to train hundreds of times, cut into any number of stages, and its training
by the runtime.

config = model_config(4)
data = small_batches(config)
ranks = on_ranks(2, run, build("1f1b", 2, 8), config, data)
assert_equals_one_process(ranks, in_one_process(config, data), config)
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from course_pp.model import (
    ModelConfig,
    PipelineStageModule,
    build_stage_module,
    compute_layer_assignment,
)
from course_pp.runtime import Pipeline
from course_pp.schedule import Action, Overlap, Schedule
from tests.equality import Trained, batches, train, train_in_one_process

BATCH, SEQ_LEN, STEPS = 16, 4, 2

Batches = list[tuple[Tensor, Tensor]]
LayerRanges = Sequence[tuple[int, int]]


def model_config(n_layers: int) -> ModelConfig:
    """A decoder with ``n_layers`` of 1,440 parameters."""
    sizes = {
        "dim": 16,
        "n_heads": 2,
        "n_kv_heads": 1,
        "ffn_dim": 13,
        "vocab_size": 23,
        "max_seq_len": 8,
    }
    return ModelConfig(n_layers=n_layers, **sizes)


def mean_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy; a loss that does not say over how many tokens."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def even_layers(n_layers: int, n_stages: int) -> LayerRanges:
    """(start, end) of each stage's layers, as many in each stage as can be."""
    return compute_layer_assignment(n_layers, n_stages)


def uneven_layers(n_layers: int, n_stages: int) -> LayerRanges:
    """Return (start, end) of each stage's layers: one a stage, and all others in the middle."""
    sizes = [1] * n_stages
    sizes[n_stages // 2] += n_layers - n_stages
    ends = [sum(sizes[: stage + 1]) for stage in range(n_stages)]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def small_batches(config: ModelConfig, steps: int = STEPS, batch: int = BATCH) -> Batches:
    """One (inputs, target) a step, each (batch, SEQ_LEN)."""
    return batches(config, batch, SEQ_LEN, steps)


def watch_the_node(parameter: Tensor, tell: Callable[..., None]) -> Any:
    """Call ``tell`` whenever the gradient of ``parameter`` is added to, as those do who gather
    gradients in buckets.

    Keep what is returned as long as it is to be heard.
    """
    node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    node.register_hook(tell)
    return node


def stages_of(rank: int, schedule: Schedule) -> list[int]:
    """The stages that ``schedule`` places on ``rank``."""
    return [stage for stage, ranks in enumerate(schedule.placement) if rank in ranks]


def stage_modules(
    rank: int, schedule: Schedule, config: ModelConfig, layer_ranges: LayerRanges | None = None
) -> dict[int, PipelineStageModule]:
    """Return the stages of ``rank`` in float64, with the weights of :func:`in_one_process`."""
    torch.manual_seed(0)
    n_stages = schedule.n_stages
    return {
        stage: build_stage_module(config, stage, n_stages, layer_ranges).double()
        for stage in stages_of(rank, schedule)
    }


def run(
    rank: int,
    schedule: Schedule,
    config: ModelConfig,
    data: Batches,
    layer_ranges: LayerRanges | None = None,
    loss_fn: Callable[[Any, Any], Tensor] = mean_loss,
    **options: Any,
) -> Trained:
    """Train with AdamW, one step a batch; to be called on every rank.

    Args:
        layer_ranges: of every stage; None cuts evenly.
        options: for :class:`course_pp.runtime.Pipeline`.

    Returns:
        Losses, the first step's gradients and the last parameters of this rank.
    """
    modules = stage_modules(rank, schedule, config, layer_ranges)
    pipeline = Pipeline(schedule, modules, loss_fn, timeout_s=20, **options)
    return train(
        modules.values(),
        len(data),
        lambda i: take_step(pipeline, *for_rank(rank, schedule, *data[i])),
    )


def for_rank(rank: int, schedule: Schedule, inputs: Any, targets: Any) -> tuple[Any, Any]:
    """``inputs`` and ``targets`` where ``rank`` needs them, else None."""
    mine = stages_of(rank, schedule)
    return inputs if 0 in mine else None, targets if schedule.n_stages - 1 in mine else None


def take_step(pipeline: Pipeline, inputs: Any, target: Any, **options: Any) -> Tensor:
    """A step with what this rank has of a batch, None if nothing: a tuple gives several arguments
    of the first stage, a list ready-made microbatches.
    """
    if isinstance(target, list):
        options["target_mbs"] = target
    else:
        options["target"] = target
    if isinstance(inputs, list):
        options["arg_mbs"] = [each if isinstance(each, tuple) else (each,) for each in inputs]
        return pipeline.step(**options)
    return pipeline.step(*(inputs if isinstance(inputs, tuple) else (inputs,)), **options)


def in_one_process(config: ModelConfig, data: Batches, loss_fn: Any = mean_loss) -> Trained:
    """The same training without a pipeline, each batch in one piece."""
    return train_in_one_process(config, data, loss_fn)


def parse(*rows: str, placement: Sequence[Sequence[int]] | None = None) -> Schedule:
    """Return a schedule from a row a rank, ``"0F0 0B0"``; stage r on rank r unless placed."""

    def action(text: str) -> Action | Overlap:
        return Overlap.parse(text) if text.startswith("(") else Action.parse(text)

    actions = [tuple(map(action, row.split())) for row in rows]
    if placement is None:
        placement = [(rank,) for rank in range(len(rows))]
    return Schedule("mine", tuple(map(tuple, placement)), tuple(actions))
