"""Weight gradients of linear layers, added up by the matrix product that makes them.

With several microbatches autograd makes each one's weight gradient as a matrix of its own and then adds it to
``.grad``: the matrix is written, and read again with the sum, which is memory traffic and no arithmetic. A matrix
product can add to what is there as it goes; Megatron-LM calls that gradient accumulation fusion. The sum is the same
but for its rounding.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course_pp._torch import will_add_gradient
from course_pp.linears import LinearMode, sum_so_far

__all__ = ["Fusing", "is_worth_fusing"]

# Below, the addition is cheap, as the matrix is still in the cache, and a function of autograd in Python costs more.
_LARGE_BYTES = 1 << 20


def is_worth_fusing(module: nn.Module | None) -> bool:
    """Whether ``module`` has a large weight, and no part that is compiled, which is a graph already."""
    if module is None or any(getattr(part, "_compiled_call_impl", None) for part in module.modules()):
        return False
    return any(_is_large(p) for p in module.parameters() if p.dim() == 2)


class Fusing(LinearMode):
    """While a forward runs inside, its large linear layers will add their weight gradients up as they make them.

    They are ordinary layers under autocast, and for ``torch.autograd.grad``, by which a stage may differentiate itself.
    """

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not _is_large(weight) or torch.is_autocast_enabled(input.device.type):
            return F.linear(input, weight, bias)
        return _Linear.apply(input, weight, bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        # Hooks on what is saved may give back another tensor than the parameter.
        ctx.parameter = weight
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        of_x, _, of_bias = ctx.needs_input_grad
        rows, x = grad_output.flatten(end_dim=-2), x.flatten(end_dim=-2)
        of_weight = grad = None
        if will_add_gradient(ctx.next_functions[1][0]):
            grad = sum_so_far(ctx.parameter, rows, x)
        if grad is None:
            of_weight = rows.t() @ x
        else:
            grad.addmm_(rows.t(), x)
        return grad_output @ weight if of_x else None, of_weight, rows.sum(0) if of_bias else None


def _is_large(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() >= _LARGE_BYTES
