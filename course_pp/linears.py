"""Linear layers of a stage, whose weight gradients are made in another way or at another time than autograd's."""

import sys
from collections.abc import Callable, Iterable
from threading import Lock
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.forward_ad import unpack_dual
from torch.overrides import TorchFunctionMode

from course_pp._torch import functions_are_redefined, has_hooks, in_functorch, saved_tensors_hooks_in_force

__all__ = ["LinearMode", "add_product", "is_autocast"]


class LinearMode(TorchFunctionMode):
    """While a forward runs inside, :meth:`linear` computes its linear layers: every ``torch.nn.functional.linear``.

    Left alone are layers whose weight is frozen, complex or itself computed (parametrised, say), tensor subclasses,
    sparse and nested tensors, weights of one dimension and biases of two, layers under the transforms of ``torch.func``
    or under somebody else's mode, layers inside ``torch.compile``, whose graph has no place for a Python function, and
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
            return self._linear_or_ordinary(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute a layer whose weight, (out, in), is to have a gradient; ``input`` is (rows, in), ``bias`` (out,)."""
        raise NotImplementedError

    def _linear_or_ordinary(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        tensors = (input, weight) if bias is None else (input, weight, bias)
        if (
            torch.is_grad_enabled()
            and all(map(_is_plain, tensors))
            and all(tensor.is_leaf for tensor in tensors[1:])
            and weight.requires_grad
            and not weight.is_complex()
            and input.dim() > 1
            and weight.dim() == 2
            and (bias is None or bias.shape == weight.shape[:1])
            and saved_tensors_hooks_in_force() == self._hooks
            and not functions_are_redefined()
            and not in_functorch()
            and all(unpack_dual(tensor).tangent is None for tensor in tensors)
        ):
            rows = self.linear(_as_rows(input), weight, bias)
            # A view of the output, as torch makes it: it may be changed in place, what a function returns as one not.
            return rows if input.dim() == 2 else rows.view(*input.shape[:-1], rows.shape[-1])
        return F.linear(input, weight, bias)


def _as_rows(tensor: Tensor) -> Tensor:
    """(..., n) as (rows, n)."""
    return tensor if tensor.dim() == 2 else tensor.reshape(tensor.shape[:-1].numel(), tensor.shape[-1])


def is_autocast(tensor: Tensor) -> bool:
    """Whether layers on the device of ``tensor`` compute in a dtype of autocast."""
    device = tensor.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def add_product(parameter: Tensor, grad_output: Tensor, input: Tensor) -> Tensor | None:
    """Add ``grad_output.T @ input`` to ``parameter.grad`` in the product that makes it, if nobody can tell.

    Args:
        parameter: a weight, (out, in).
        grad_output: (rows, out).
        input: (rows, in).

    Returns:
        None; or the product, for autograd to add: for the first gradient, for one that is to be differentiated or
        looked at for NaN, with several dtypes, and where somebody would miss the gradient of this microbatch. That is a
        hook on the parameter, or whoever holds the node of autograd's graph that adds its gradients up.
    """
    with _ADDING:
        grad = parameter.grad
        if grad is not None and grad_output.dtype == input.dtype == grad.dtype and _can_add(parameter, grad):
            # Not addmm_, which torch's FlopCounterMode does not know.
            torch.addmm(grad, grad_output.t(), input, out=grad)
            return None
    return grad_output.t() @ input


# Autograd has a lock for each sum; all of ours share one.
_ADDING = Lock()


def _can_add(parameter: Tensor, grad: Tensor) -> bool:
    if torch.is_grad_enabled() or torch.is_anomaly_enabled() or not parameter.requires_grad or has_hooks(parameter):
        return False
    # Autograd would make streams wait for each other.
    if grad.is_cuda and torch.cuda.current_stream(grad.device) != torch.cuda.default_stream(grad.device):
        return False
    return _is_plain(grad) and _references(parameter) <= _UNHELD


def _references(parameter: Tensor) -> int:
    """How many of Python's there are to the node that adds up the gradients of ``parameter``.

    A hook on that node cannot be seen. It lasts as long as the node, so those who register one hold the node; one that
    is held by a view of the parameter alone, or by C++ as in DistributedDataParallel, is not noticed.
    """
    with torch.inference_mode(False), torch.enable_grad():
        node = parameter.view_as(parameter).grad_fn
    assert node is not None
    return sys.getrefcount(node.next_functions[0][0])


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_nested


_PLAIN = (Tensor, nn.Parameter)

with torch.inference_mode(False):
    _UNHELD = _references(torch.empty(0, device="cpu", requires_grad=True))
