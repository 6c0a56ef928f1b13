"""Next-token cross-entropy that knows how many tokens it averages over."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from course_pp.arguments import checked

__all__ = ["CrossEntropy"]


@checked
@dataclass(frozen=True)
class CrossEntropy:
    """Cross-entropy of logits (batch, seq, vocab) with target token ids (batch, seq), in nats a token.

    Attributes:
        ignore_index: target value of positions where nothing is to be predicted, such as padding.

    A batch cut into microbatches with unequal numbers of counted tokens has a mean that is not the mean of the
    microbatches' means: divide the sum of :meth:`total` by the sum of :meth:`count` instead.
    """

    ignore_index: int = -100

    def __call__(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the mean over the counted tokens; 0 where none count."""
        return self.total(logits, target) / self.count(target).clamp(min=1)

    def total(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the sum over the counted tokens; a scalar in float32 at least: long sums overflow half precision."""
        if logits.dtype.itemsize < 4:
            logits = logits.float()
        return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=self.ignore_index, reduction="sum")

    def count(self, target: torch.Tensor) -> torch.Tensor:
        """Return the number of tokens that count; a scalar int64."""
        return (target != self.ignore_index).sum()
