"""Evaluation through the pipeline: forwards alone, for any placement of stages."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from course_pp.parallel.stage import ModelStage
from course_pp.parallel.stage_values import as_value, call

Tensors = tuple[torch.Tensor, ...]


@torch.no_grad()
def forward_only(
    stages: Sequence[ModelStage],
    inputs: Sequence[tuple[Any, ...]] | None,
    kwargs: Sequence[dict[str, Any]],
    consume: Callable[[int, Any], None],
) -> None:
    """Run every microbatch through this rank's stages, stage by stage. (torch's ``eval`` fails for V placements.)

    All ranks order their work by (stage, microbatch), an order in which whatever is needed comes first, so blocking
    receives cannot deadlock. Between two given ranks, sends and receives happen in the same order on both sides, which
    is what NCCL, having no tags, requires. Outputs are kept until all are sent, at most one a microbatch.

    Args:
        stages: what crosses their boundaries is settled.
        inputs: the arguments of each microbatch, where this rank holds the first stage.
        kwargs: keyword arguments of each microbatch, for every stage.
        consume: called on the last stage's rank with each microbatch's index and output.
    """
    local: list[Tensors] = []
    in_flight: list[dist.Work] = []
    for stage in sorted(stages, key=lambda stage: stage.stage_index):
        owner, here = stage.stage_index_to_group_rank, stage.group_rank
        source = None if stage.is_first else owner[stage.stage_index - 1]
        target = None if stage.is_last else owner[stage.stage_index + 1]
        outputs: list[Tensors] = []
        for i, kwarg in enumerate(kwargs):
            if stage.is_first:
                value = None if inputs is None else as_value(inputs[i])
            else:
                value = stage.received(local[i] if source == here else _received(stage, source))
            output = call(stage.submod, value, kwarg)
            if stage.is_last:
                consume(i, output)
            elif target in (here, source):
                outputs.append(stage.message(output))
            else:
                in_flight += _sent(stage, stage.message(output), target)
        if target == here:
            local = outputs
        else:  # two ranks in a loop: all receives from the peer come before the first send to it
            in_flight += [work for tensors in outputs for work in _sent(stage, tensors, target)]
    for work in in_flight:
        work.wait()


def _received(stage: ModelStage, source: int | None) -> Tensors:
    assert stage.takes is not None  # settled
    tensors = stage.takes.empty(stage.device)
    for tensor in tensors:
        dist.recv(tensor, group=stage.group, group_src=source)
    return tensors


def _sent(stage: ModelStage, tensors: Tensors, target: int | None) -> list[dist.Work]:
    works = (dist.isend(tensor, group=stage.group, group_dst=target) for tensor in tensors)
    return [work for work in works if work is not None]
