"""Number formats by name, and the scale of a loss in float16, whose smallest numbers are larger than many gradients."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from course_pp.parallel.replaced_forward import compute_dtypes
from course_pp.training.config import Precision, SettingError

__all__ = ["DTYPES", "LossScale", "check_precision", "precision_of"]

DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def precision_of(dtype: torch.dtype) -> Precision:
    """Return the name for stages that compute in ``dtype``; ``"fp32"`` for more than that."""
    return next((name for name, known in DTYPES.items() if known == dtype), "fp32")


@dataclass(frozen=True)
class LossScale:
    """The factor by which the loss is multiplied before backward, and gradients are divided after it.

    Every rank of the mesh has the same: it follows from the norm of the whole model's gradient, which is one number.
    A gradient that overflows halves the scale, and its step is skipped; after ``growth_steps`` good ones the scale
    doubles. It is a power of two, so that scaling alone rounds nothing (Micikevicius et al. 2018, arXiv:1710.03740,
    section 3.2).

    Attributes:
        value: at least 1; 1 always where nothing is scaled.
        good_steps: taken since it last changed.
        growth_steps: how many it takes to double; None never changes it.
    """

    value: float = 1.0
    good_steps: int = 0
    growth_steps: int | None = None

    @property
    def can_shrink(self) -> bool:
        """Whether the scale itself may have caused an overflow."""
        return self.growth_steps is not None and self.value > 1

    def after(self, norm: float) -> "LossScale":
        """Return the scale of the next step, after one with this norm of the gradient."""
        if self.growth_steps is None:
            return self
        if not math.isfinite(norm):
            return replace(self, value=max(1.0, self.value / 2), good_steps=0)
        if self.good_steps + 1 < self.growth_steps:
            return replace(self, good_steps=self.good_steps + 1)
        return replace(self, value=min(2.0**24, self.value * 2), good_steps=0)

    def state(self) -> dict[str, Any]:
        """Return what changes from step to step, as JSON can hold it."""
        return {"value": self.value, "good_steps": self.good_steps}


def check_precision(precision: Precision, modules: Iterable[nn.Module]) -> None:
    """Refuse stages that compute in another format than ``precision`` names."""
    asked = DTYPES[precision]
    for module in modules:
        found, kept = next(iter(compute_dtypes(module)), asked), {p.dtype for p in module.parameters()}
        # Others may be what the parameters are in, but float16 needs the loss to be scaled.
        if found != asked and (asked != torch.float32 or found == torch.float16 or found not in kept):
            raise SettingError(
                f"{{precision}}, and a stage computes in {found}: call compute_in(stage, dtype), or under FSDP2 give "
                "apply_fsdp2 the policy default_mp_policy(dtype), before Trainer",
                {"precision": precision},
            )
