"""Linear layers of a stage, whose weight gradients are made in another way or at another time than autograd's."""

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.forward_ad import unpack_dual
from torch.overrides import TorchFunctionMode

from course_pp._torch import has_hooks, in_functorch, saved_tensors_hooks_in_force

__all__ = ["LinearMode", "sum_so_far"]


class LinearMode(TorchFunctionMode):
    """While a forward runs inside, :meth:`linear` computes its linear layers: every ``torch.nn.functional.linear``.

    Left alone are layers whose weight is frozen, complex or itself computed (parametrised, say), tensor subclasses,
    layers under the transforms of ``torch.func``, layers inside ``torch.compile``, whose graph has no place for us, and
    layers inside ``torch.utils.checkpoint``: it computes them again outside, and must find saved what it then saves.
    """

    def __enter__(self) -> "LinearMode":
        self._hooks = saved_tensors_hooks_in_force()
        super().__enter__()
        return self

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is F.linear and not torch.compiler.is_compiling():
            return self._linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute a layer whose weight, (out, in), is to have a gradient; ``input`` is (..., in)."""
        raise NotImplementedError

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        trained = torch.is_grad_enabled() and input.dim() > 1 and weight.requires_grad and not weight.is_complex()
        plain = _is_plain_leaf(weight) and (bias is None or _is_plain_leaf(bias))
        if not (trained and plain) or saved_tensors_hooks_in_force() != self._hooks:
            return F.linear(input, weight, bias)
        if in_functorch() or any(unpack_dual(tensor).tangent is not None for tensor in (input, weight)):
            return F.linear(input, weight, bias)
        return self.linear(input, weight, bias)


def sum_so_far(parameter: Tensor, *terms: Tensor) -> Tensor | None:
    """``parameter.grad``, if a gradient made of ``terms`` may be added to it directly and nobody could tell; else None.

    None before the first gradient is there, with several dtypes, and where somebody would miss the gradient of this
    microbatch: a hook on the parameter, or whoever holds the node of autograd's graph that adds it up.
    """
    grad = parameter.grad
    if type(grad) is not Tensor or grad.layout is not torch.strided or grad.requires_grad or has_hooks(parameter):
        return None
    if any(term.dtype != grad.dtype for term in terms):
        return None
    return grad if _references(parameter) <= _UNHELD else None


def _references(parameter: Tensor) -> int:
    """How many there are to the node that adds its gradients up.

    A hook on that node cannot be seen, but lasts only as long as somebody holds the node.
    """
    with torch.enable_grad():
        node = parameter.view_as(parameter).grad_fn
    assert node is not None
    return sys.getrefcount(node.next_functions[0][0])


def _is_plain_leaf(tensor: Tensor) -> bool:
    return tensor.is_leaf and type(tensor) in (Tensor, nn.Parameter)


_UNHELD = _references(torch.empty(0, requires_grad=True))
