"""The one place outside the rooms that touches private names of torch, which may move between releases."""

from typing import Any

import torch

__all__ = ["has_hooks", "in_functorch", "saved_tensors_hooks_in_force", "will_add_gradient"]


def saved_tensors_hooks_in_force() -> Any:
    """The innermost pair of hooks on what autograd saves; None without any."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def has_hooks(tensor: torch.Tensor) -> bool:
    """Whether somebody has registered a hook on the gradient of ``tensor``."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def in_functorch() -> bool:
    """Whether a transform of ``torch.func`` is at work."""
    return torch._C._are_functorch_transforms_active()


def will_add_gradient(node: Any) -> bool:
    """Whether the backward at work will come to ``node``, which adds up the gradients of a leaf.

    False in ``torch.autograd.grad``, which hands gradients out, and where only other leaves are asked for.
    """
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch.autograd.grad was asked for this leaf
        return False
