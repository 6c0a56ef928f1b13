"""Weight gradients of linear layers, added up by the matrix product that makes them.

With several microbatches autograd makes each one's weight gradient as a matrix of its own and then adds it to
``.grad``: the matrix is written, and read again with the sum, which is memory traffic and no arithmetic. At width 1024
that takes a fifth of the product's time. A matrix product can add to what is there as it goes; Megatron-LM calls that
gradient accumulation fusion. The sum is the same but for its rounding.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course_pp._torch import whither
from course_pp.linears import LinearMode, add_product, is_autocast

__all__ = ["Fusing", "is_worth_fusing"]

# Below, the addition is cheap, as the matrix is still in the cache, and a function of autograd in Python costs more.
_LARGE_BYTES = 1 << 20


def is_worth_fusing(module: nn.Module | None) -> bool:
    """Whether ``module`` has a weight large enough."""
    return module is not None and any(_is_large(p) for p in module.parameters() if p.dim() == 2)


class Fusing(LinearMode):
    """While a forward runs inside, its large linear layers will add their weight gradients up as they make them.

    They are ordinary layers under autocast, and for ``torch.autograd.grad``, by which a stage may differentiate itself.
    """

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not _is_large(weight) or is_autocast(input):
            return F.linear(input, weight, bias)
        return _FusedLinear.apply(input, weight, bias)


class _FusedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # As autograd: who needs no gradient of the input may change the weight.
        ctx.save_for_backward(x, weight if ctx.needs_input_grad[0] else None)
        # Hooks on what is saved may give back another tensor than the parameter.
        ctx.parameter = weight
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        of_x, _, of_bias = ctx.needs_input_grad
        of_weight = None
        match whither(ctx.next_functions[1][0]):
            case "into the sum":
                of_weight = add_product(ctx.parameter, grad_output, x)
            case "out":
                of_weight = grad_output.t() @ x
        return grad_output @ weight if of_x else None, of_weight, grad_output.sum(0) if of_bias else None


def _is_large(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() >= _LARGE_BYTES
