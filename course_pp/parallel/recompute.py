"""A module's forward that keeps only its arguments, and is run again in backward."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

__all__ = ["is_checkpointed", "recompute"]


class Recomputed:
    """Takes the place of ``forward`` on one module.

    Unlike a wrapper module it leaves parameters their names, and hooks of the module, such as FSDP2's, run once and not
    again in the recomputation.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            _refuse_cache(kwargs)
        return checkpoint(self.forward, *args, use_reentrant=False, **kwargs)


def _refuse_cache(kwargs: dict[str, Any]) -> None:
    """What a forward appends to is appended to a second time by its recomputation."""
    name = next((name for name in ("past_key_values", "layer_past") if kwargs.get(name) is not None), None)
    if name is not None:
        raise ValueError(
            f"{name} is a {type(kwargs[name]).__name__}, which recomputing a checkpointed block would fill again: "
            "train with use_cache=False (model.config.use_cache = False)"
        )


def recompute(module: nn.Module) -> None:
    """Checkpoint ``module``, in place."""
    module.forward = Recomputed(module.forward)


def is_checkpointed(module: nn.Module) -> bool:
    """Whether ``module`` or a part of it is recomputed in backward."""
    forwards = [(part.forward, getattr(part.forward, "forward", None)) for part in module.modules()]
    return any(isinstance(forward, Recomputed) for pair in forwards for forward in pair)
