"""What takes the place of ``forward`` on one module, one around the other: recomputed, compiled, in half precision.

Unlike a wrapper module it leaves parameters their names and the module its class, and hooks of the module, such as
FSDP2's, run around it: once, and not again in a recomputation.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

__all__ = ["Compiled", "Recomputed", "Replaced", "has_replaced", "replaced_forwards"]


class Replaced:
    """What takes the place of ``forward``.

    Attributes:
        forward: what the module had before.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """What the module is to compute."""
        raise NotImplementedError

    def put_on(self, module: nn.Module) -> None:
        """Make it the module's forward: a method, since torch.compile would compile anew for each callable object."""
        module.forward = self.run


class Recomputed(Replaced):
    """Keeps only its arguments, and is run again in backward."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The forward, checkpointed."""
        if torch.is_grad_enabled():
            _refuse_cache(kwargs)
        return checkpoint(self.forward, *args, use_reentrant=False, **kwargs)


class Compiled(Replaced):
    """Runs what ``torch.compile`` makes of it."""

    def __init__(self, forward: Callable[..., Any], backend: str) -> None:
        super().__init__(forward)
        self._compiled = torch.compile(forward, backend=backend)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The forward, compiled when it first runs."""
        return self._compiled(*args, **kwargs)


def _refuse_cache(kwargs: dict[str, Any]) -> None:
    """What a forward appends to is appended to a second time by its recomputation."""
    name = next((name for name in ("past_key_values", "layer_past") if kwargs.get(name) is not None), None)
    if name is not None:
        raise ValueError(
            f"{name} is a {type(kwargs[name]).__name__}, which recomputing a checkpointed block would fill again: "
            "train with use_cache=False (model.config.use_cache = False)"
        )


def replaced_forwards(forward: Any) -> Iterator[Replaced]:
    """What a forward is wrapped in, from the outside in; nothing for a module's own."""
    while isinstance(replaced := getattr(forward, "__self__", None), Replaced):
        yield replaced
        forward = replaced.forward


def has_replaced(module: nn.Module, kind: type[Replaced]) -> bool:
    """Whether the forward of ``module``, or of a part of it, is of this kind."""
    return any(isinstance(each, kind) for part in module.modules() for each in replaced_forwards(part.forward))
