"""Evaluation through the pipeline: forwards alone, for any placement of stages."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

__all__ = ["forward_only"]


@torch.no_grad()
def forward_only(
    stages: Sequence[PipelineStage],
    inputs: Sequence[torch.Tensor] | None,
    kwargs: Sequence[dict[str, Any]],
    boundary: torch.Tensor,
    consume: Callable[[int, torch.Tensor], None],
) -> None:
    """Run every microbatch through this rank's stages, stage by stage.

    All ranks order their work by (stage, microbatch), an order in which whatever is needed comes first, so blocking
    receives cannot deadlock. Between two given ranks, sends and receives happen in the same order on both sides, which
    is what NCCL, having no tags, requires. Outputs are kept until all are sent, at most one a microbatch. (torch's own
    ``schedule.eval`` fails for V placements.)

    Args:
        stages: this rank's stages.
        inputs: tokens (batch, seq) of each microbatch, where this rank holds the first stage.
        kwargs: keyword arguments of each microbatch, for every stage; its length is the number of microbatches.
        boundary: a meta tensor of the shape (batch, seq, dim) and dtype that crosses stage boundaries.
        consume: called on the last stage's rank with each microbatch's index and output.
    """
    local: list[torch.Tensor] = []
    in_flight: list[tuple[torch.Tensor, dist.Work | None]] = []
    for stage in sorted(stages, key=lambda stage: stage.stage_index):
        owner, here = stage.stage_index_to_group_rank, stage.group_rank
        source = None if stage.is_first else owner[stage.stage_index - 1]
        target = None if stage.is_last else owner[stage.stage_index + 1]
        outputs: list[torch.Tensor] = []
        for i, kwarg in enumerate(kwargs):
            if stage.is_first and inputs is not None:
                x = inputs[i]
            elif source == here:
                x = local[i]
            else:
                x = torch.empty_like(boundary, device=stage.device)
                dist.recv(x, group=stage.group, group_src=source)
            output = stage.submod(x, **kwarg).contiguous()
            if not stage.is_last and (output.dtype, output.shape) != (boundary.dtype, boundary.shape):
                raise ValueError(
                    f"stage {stage.stage_index} gave {output.dtype} of shape {tuple(output.shape)}, but declared "
                    f"{boundary.dtype} of shape {tuple(boundary.shape)}: its neighbour would misread the message"
                )
            if stage.is_last:
                consume(i, output)
            elif target in (here, source):
                outputs.append(output)
            else:
                in_flight.append((output, dist.isend(output, group=stage.group, group_dst=target)))
        if target == here:
            local = outputs
        else:  # two ranks in a loop: all receives from the peer come before the first send to it
            in_flight += [(x, dist.isend(x, group=stage.group, group_dst=target)) for x in outputs]
    for _, work in in_flight:
        if work is not None:
            work.wait()
