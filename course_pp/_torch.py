"""The one place outside the rooms that touches private names of torch, which may move between releases."""

from typing import Any

import torch

__all__ = ["saved_tensors_hooks_in_force"]


def saved_tensors_hooks_in_force() -> Any:
    """The innermost pair of hooks on what autograd saves; None without any."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)
