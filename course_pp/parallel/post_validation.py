"""Post-validation: step before the global norm is known, and take a wrong step back.

If a stage waits for the norm of the whole gradient, it waits for the slowest stage, and the bubble
is back. So each stage steps at once, as if nothing had to be clipped, and learns afterwards what
the others found (Qi et al. 2024, "Zero bubble pipeline parallelism", section 4). Where that was
wrong, the step is undone and taken again.

The paper undoes AdamW by arithmetic, which rounds. Here the parameters and the optimizer's state
are kept until the answer is there, so both cases end exactly as the plain step does, at the price
of that memory.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from course_pp.base.arguments import checked, refuse_unless


@checked
class OptimisticStep:
    """An optimizer whose step does not wait for the other stages.

        optimistic.step()      # at once; begins to tell the others this stage's part of the norm
        ...                    # whatever needs no gradient: load the next batch
        norm = optimistic.settle()    # before gradients are zeroed, and before the next forward

    Args:
        optimizer: the optimizer of this rank's stages. Its gradients are whole, no shards of
            DTensors, and no weight is on two ranks.
        max_norm: the largest norm of the whole model's gradient; where it is larger, gradients are
            scaled as by :func:`clip_grad_norm_`.
        group: the pipeline's ranks; None is all of them, or this process alone if there is no
            process group.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        max_norm: float,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        refuse_unless(max_norm > 0, "OptimisticStep", "max_norm", max_norm, "give a norm above 0")
        self._optimizer, self._max_norm, self._group = optimizer, max_norm, group
        sharded = any(isinstance(parameter, DTensor) for parameter in self._parameters)
        refuse_unless(
            not sharded, "OptimisticStep", "optimizer", optimizer, "pass one of whole parameters"
        )
        self._before: tuple[list[Tensor], dict[Tensor, Any]] | None = None
        self._squares: list[Tensor] = []
        self._arrival: dist.Work | None = None

    def step(self) -> None:
        """Begin to add up the norm, and take the step as if it were finite and below the limit."""
        if self._before is not None:
            raise RuntimeError("the last step is not settled: call settle() before the next step()")
        square = self._square()
        several = (
            dist.is_available() and dist.is_initialized() and dist.get_world_size(self._group) > 1
        )
        self._squares = (
            [torch.empty_like(square) for _ in range(dist.get_world_size(self._group))]
            if several
            else []
        )
        self._arrival = (
            dist.all_gather(self._squares, square, group=self._group, async_op=True)
            if several
            else None
        )
        self._squares = self._squares or [square]
        state = {parameter: _copied(kept) for parameter, kept in self._optimizer.state.items()}
        self._before = [parameter.detach().clone() for parameter in self._parameters], state
        # If this rank's own part is infinite, the step would only be taken back.
        if math.isfinite(square.item()):
            self._optimizer.step()

    def settle(self) -> float:
        """Wait for the other stages; afterwards everything is as after the plain step.

        That is: gradients scaled and the step taken with them, or, for a norm that is not finite,
        no step at all.

        Returns:
            The norm of the whole model's gradient before scaling, the same on every rank.
        """
        if self._before is None:
            raise RuntimeError("there is no step to settle: call step() first")
        if self._arrival is not None:
            self._arrival.wait()
        # Added up in the same order on every rank, so that all of them get the same norm.
        norm = torch.stack(self._squares).sum().sqrt()
        # torch's clip_grad_norm_ adds the same 1e-6.
        factor = (self._max_norm / (norm + 1e-6)).clamp(max=1.0)
        if not torch.isfinite(norm):
            self._roll_back()
        elif factor < 1:
            self._roll_back()
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor.to(parameter.grad.dtype))
            self._optimizer.step()
        self._before = None
        return norm.item()

    @property
    def _parameters(self) -> Sequence[Tensor]:
        return [
            parameter for group in self._optimizer.param_groups for parameter in group["params"]
        ]

    def _square(self) -> Tensor:
        """Return this rank's part of the squared norm, in float64."""
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        parts = [
            torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
            for gradient in gradients
        ]
        device = next((parameter.device for parameter in self._parameters), torch.device("cpu"))
        return (
            torch.stack(parts).sum()
            if parts
            else torch.zeros((), dtype=torch.float64, device=device)
        )

    def _roll_back(self) -> None:
        assert self._before is not None
        values, state = self._before
        with torch.no_grad():
            for parameter, value in zip(self._parameters, values, strict=True):
                parameter.copy_(value)
        self._optimizer.state.clear()
        self._optimizer.state.update(state)


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()
    }
