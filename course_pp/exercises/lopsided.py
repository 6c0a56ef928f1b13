"""A loss for graders that notices when output and target have changed places."""

from __future__ import annotations

from torch import Tensor, nn


class LopsidedLoss(nn.Module):
    """A mean over rows, like `nn.MSELoss`; an error counts more where the target is large."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return ((output - target).square() * target.exp()).mean()
