"""Logits whose vocabulary is cut over the ranks of ``tp``: put together, or their cross-entropy without doing so.

    loss of a token = log Σ exp(logit) − logit of the target

A rank knows its part of the sum, and perhaps the target's logit. Three numbers a token are exchanged, largest logit,
sum and target's logit, where gathering would exchange the whole vocabulary. Backward exchanges nothing.

Shoeybi et al. 2019, "Megatron-LM", arXiv:1909.08053, section 3.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from course_pp.arguments import checked
from course_pp.model import CrossEntropy

__all__ = ["VocabParallelCrossEntropy", "gather_vocabulary"]


@checked
@dataclass(frozen=True)
class VocabParallelCrossEntropy(CrossEntropy):
    """:class:`CrossEntropy` of the logits that a head cut with ``gather_logits=False`` gives; the same on every rank.

    Attributes:
        ignore_index: target value of positions where nothing is to be predicted, such as padding.
    """

    def total(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the sum over the counted tokens; a scalar, in float32 at least.

        Args:
            logits: DTensor (batch, seq, vocab), cut in its last dimension.
            target: token ids (batch, seq), the same on every rank of ``tp``.

        Raises:
            TypeError: if the logits are not cut over the vocabulary.
            ValueError: on the CPU, for a target outside the vocabulary; a GPU would have to be waited for.
        """
        if not isinstance(logits, DTensor) or logits.placements != (Shard(logits.dim() - 1),):
            raise TypeError(
                f"logits are a {type(logits).__name__} that is not cut over the vocabulary: call "
                "apply_tensor_parallel(..., gather_logits=False), or use CrossEntropy()"
            )
        counted = target != self.ignore_index
        if target.device.type == "cpu" and not ((target >= 0) & (target < logits.shape[-1]) | ~counted).all():
            raise ValueError(
                f"target holds token ids from {int(target[counted].min())} to {int(target[counted].max())}, which must "
                f"lie in [0, vocab_size) = [0, {logits.shape[-1]}): use the tokenizer this model was sized for"
            )
        part = logits.to_local()
        if part.dtype.itemsize < 4:
            part = part.float()
        mesh = logits.device_mesh
        first = mesh.get_local_rank() * part.shape[-1]
        total: Tensor = _TotalLoss.apply(part, target - first, counted, mesh.get_group())
        return total


class _TotalLoss(torch.autograd.Function):
    """logits (batch, seq, vocab / tp), target (batch, seq) counted from this rank's first id -> scalar."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, counted: Tensor, group: dist.ProcessGroup) -> Tensor:
        largest = logits.amax(-1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        logits = logits - largest[..., None]
        here = counted & (target >= 0) & (target < logits.shape[-1])
        target = target.where(here, 0)[..., None]
        of_target = logits.gather(-1, target)[..., 0].where(here, 0)
        weights = logits.exp()
        sums = torch.stack([weights.sum(-1), of_target])
        dist.all_reduce(sums, group=group)
        ctx.save_for_backward(weights / sums[0, ..., None], target, here, counted)
        return (sums[0].log() - sums[1]).where(counted, 0).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, target, here, counted = ctx.saved_tensors
        of_logits = probabilities.scatter_add(-1, target, -here[..., None].to(probabilities.dtype))
        return of_logits * counted[..., None] * gradient, None, None, None


def gather_vocabulary(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather each rank's logits (batch, seq, vocab / tp) into (batch, seq, vocab), the same on every rank.

    Every rank computes the same loss from them, so backward takes its part of the gradient and exchanges nothing.
    """
    whole: Tensor = _GatherVocabulary.apply(part, group)
    return whole


class _GatherVocabulary(torch.autograd.Function):
    """As ``DTensor.full_tensor``, which however returns a view: FSDP2 warns that its hooks can be lost on one."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.chunk(dist.get_world_size(ctx.group), -1)[dist.get_rank(ctx.group)], None
