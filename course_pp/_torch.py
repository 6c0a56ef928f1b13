"""The one place outside the rooms that touches private names of torch, which may move between releases."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.utils._device import DeviceContext


def saved_tensors_hooks_in_force() -> Any:
    """The innermost pair of hooks on what autograd saves; None without any."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def accumulated_hooks(tensor: torch.Tensor) -> dict[Any, Callable[[torch.Tensor], None]]:
    """What ``register_post_accumulate_grad_hook`` has registered, in order; a change of it counts."""
    hooks: dict[Any, Callable[[torch.Tensor], None]] | None = tensor._post_accumulate_grad_hooks
    return {} if hooks is None else hooks


def has_hooks(tensor: torch.Tensor) -> bool:
    """Whether somebody has registered a hook on the gradient of ``tensor``."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def in_functorch() -> bool:
    """Whether a transform of ``torch.func`` is at work."""
    return torch._C._are_functorch_transforms_active()


def version(tensor: torch.Tensor) -> int:
    """How often the tensor, or another that shares its memory as a view, has been changed in place."""
    return tensor._version


def whither(node: Any) -> Literal["into the sum", "out", "nowhere"]:
    """What becomes of the gradient that comes to ``node``, which adds up those of a leaf, in the backward at work.

    A ``backward`` adds it to the sum, ``torch.autograd.grad`` hands it out, and either may not ask for this leaf.
    """
    try:
        return "into the sum" if torch._C._will_engine_execute_node(node) else "nowhere"
    except RuntimeError:  # so torch says that torch.autograd.grad was asked for this leaf
        return "out"


def after_backward(function: Callable[[], None]) -> None:
    """Call ``function`` when the backward at work has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def functions_are_redefined() -> bool:
    """Whether another mode than that of the default device gives torch's functions a meaning of its own."""
    modes = (torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack()))
    return any(not isinstance(mode, DeviceContext) for mode in modes)
