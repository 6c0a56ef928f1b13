"""Replacements of a module's ``forward``, one around the other: recomputed, compiled, in half precision.

Unlike a wrapper module, a replacement changes neither the parameters' names nor the module's class. Hooks of the
module, such as FSDP2's, run around it: once, and not again in a recomputation.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["Compiled", "Recomputed", "Replaced", "has_replaced", "replaced_forwards"]


class Replaced:
    """A replacement of a module's ``forward``.

    Attributes:
        forward: what the module had before.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Compute what the module returns."""
        raise NotImplementedError

    def put_on(self, module: nn.Module) -> None:
        """Make it the module's forward: a method, since torch.compile would compile anew for each callable object."""
        module.forward = self.run


class Recomputed(Replaced):
    """Keeps only its arguments, and is run again in backward."""

    def put_on(self, module: nn.Module) -> None:
        """Make it the module's forward."""
        super().put_on(module)
        self._module = module

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward, checkpointed."""
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        _refuse_cache(kwargs)
        options: dict[str, Any] = {}
        if not torch.compiler.is_compiling() and next(self._module.buffers(), None) is not None:
            options["context_fn"] = _Buffers(self._module).contexts
        return checkpoint(self.forward, *args, use_reentrant=False, **options, **kwargs)


class _Buffers:
    """The buffers of a module as one forward found them; its recomputation uses these and leaves the module's own.

    Otherwise BatchNorm's running statistics would count each microbatch twice. And if a result depends on a buffer that
    every forward changes, as with a spectral norm, it would be recomputed from a later value.
    """

    def __init__(self, module: nn.Module) -> None:
        self._parts = [part for part in module.modules() if part._buffers]
        self._before: list[tuple[nn.Module, dict[str, Tensor]]] = []

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return the contexts in which torch's checkpoint runs the forward and its recomputations."""
        return self._noted(), self._put_back()

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Keep copies of the buffers that the forward inside changes."""
        there = [(part, {n: b for n, b in part._buffers.items() if b is not None}) for part in self._parts]
        versions = [[buffer._version for buffer in buffers.values()] for _, buffers in there]
        copies = [(part, {name: buffer.clone() for name, buffer in buffers.items()}) for part, buffers in there]
        yield
        for copied, (part, buffers), before in zip(copies, there, versions, strict=True):
            # BatchNorm counts its batches in the open, but changes its statistics behind autograd's back.
            changed = any(part._buffers.get(name) is not buffer for name, buffer in buffers.items())
            if changed or [buffer._version for buffer in buffers.values()] != before:
                self._before.append(copied)

    @contextmanager
    def _put_back(self) -> Iterator[None]:
        """Let the forward inside find those buffers, and change copies of them."""
        now = [(part, dict(part._buffers)) for part, _ in self._before]
        for part, buffers in self._before:
            part._buffers.update({name: buffer.clone() for name, buffer in buffers.items()})
        try:
            yield
        finally:
            for part, held in now:
                part._buffers.update(held)


class Compiled(Replaced):
    """Runs what ``torch.compile`` makes of it."""

    def __init__(self, forward: Callable[..., Any], backend: str) -> None:
        super().__init__(forward)
        self._compiled = torch.compile(forward, backend=backend)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward, compiled when it first runs."""
        return self._compiled(*args, **kwargs)


def _refuse_cache(kwargs: dict[str, Any]) -> None:
    """Refuse a cache: the recomputation of a forward would append to it a second time."""
    name = next((name for name in ("past_key_values", "layer_past") if kwargs.get(name) is not None), None)
    if name is not None:
        raise ValueError(
            f"{name} is a {type(kwargs[name]).__name__}, which recomputing a checkpointed block would fill again: "
            "train with use_cache=False (model.config.use_cache = False)"
        )


def replaced_forwards(forward: Any) -> Iterator[Replaced]:
    """Return the replacements around a module's forward, outermost first; none if it is the module's own."""
    while isinstance(replaced := getattr(forward, "__self__", None), Replaced):
        yield replaced
        forward = replaced.forward


def has_replaced(module: nn.Module, kind: type[Replaced]) -> bool:
    """Return whether the forward of ``module``, or of a part of it, is of this kind."""
    return any(isinstance(each, kind) for part in module.modules() for each in replaced_forwards(part.forward))
