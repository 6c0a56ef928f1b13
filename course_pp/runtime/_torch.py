"""The one place of the runtime that touches private names of torch, which may move between releases."""

from typing import Any

import torch

__all__ = ["saved_tensors_hooks_in_force", "version"]


def saved_tensors_hooks_in_force() -> Any:
    """The innermost pair of hooks on what autograd saves; None without any."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def version(tensor: torch.Tensor) -> int:
    """How often the tensor, or another that shares its memory as a view, has been changed in place."""
    return tensor._version
