"""What takes the place of ``forward`` on one module, one around the other: recomputed, compiled, in half precision.

Unlike a wrapper module it leaves parameters their names and the module its class, and hooks of the module, such as
FSDP2's, run around it: once, and not again in a recomputation.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
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

    def put_on(self, module: nn.Module) -> None:
        """Make it the module's forward."""
        super().put_on(module)
        self._module = module

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The forward, checkpointed."""
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        _refuse_cache(kwargs)
        options: dict[str, Any] = {}
        if not torch.compiler.is_compiling() and next(self._module.buffers(), None) is not None:
            options["context_fn"] = _Buffers(self._module).contexts
        return checkpoint(self.forward, *args, use_reentrant=False, **options, **kwargs)


class _Buffers:
    """The buffers of a module as one forward found them, for its recomputation, which leaves the module's as they are.

    Otherwise the running statistics of a BatchNorm would take in each microbatch twice, and what depends on a buffer
    that every forward changes, such as a spectral norm, would be recomputed from another one's.
    """

    def __init__(self, module: nn.Module) -> None:
        self._parts = [part for part in module.modules() if part._buffers]
        self._before: list[tuple[nn.Module, dict[str, Tensor]]] = []

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """What torch's checkpoint runs the forward in, and what its recomputations."""
        return self._noted(), self._put_back()

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Keep a copy of what the forward inside changes."""
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
