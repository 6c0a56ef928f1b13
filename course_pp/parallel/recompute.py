"""A module's forward that keeps only its arguments, and is run again in backward."""

from collections.abc import Callable
from typing import Any

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
        return checkpoint(self.forward, *args, use_reentrant=False, **kwargs)


def recompute(module: nn.Module) -> None:
    """Checkpoint ``module``, in place."""
    module.forward = Recomputed(module.forward)


def is_checkpointed(module: nn.Module) -> bool:
    """Whether ``module`` or a part of it is recomputed in backward."""
    return any(isinstance(part.forward, Recomputed) for part in module.modules())
