"""Weight gradients put off from ``I`` to ``W``, without computing anything twice.

The backward of a linear layer is two products: one gives the input's gradient, for which the stage before is waiting,
the other the weight's, for which nobody is (Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section 2). Inside
:class:`Deferring` every ``torch.nn.functional.linear``, and so every ``nn.Linear``, does the first at ``I`` and queues
what the second needs. Everything else (norms, embeddings, convolutions) gets its gradient at ``I``: it is little work.
So does a layer with a hook on its weight or bias.

A queue entry keeps the layer's input, which the forward has kept anyway, and in addition the gradient of its output.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from course_pp._torch import after_backward, has_hooks, version, whither
from course_pp.linears import LinearMode, add_product, is_autocast

__all__ = ["Deferring", "WeightGradients"]


class _Hold(Protocol):
    def release(self) -> None: ...


class _Meter(Protocol):
    """Counts what is kept: see :class:`course_pp.runtime.memory.Meter`."""

    def hold(self, value: Any, kind: Literal["activation", "queued"], /) -> _Hold: ...


@dataclass(frozen=True, slots=True)
class _Entry:
    weight: Tensor
    bias: Tensor | None
    input: Tensor
    grad_output: Tensor
    versions: tuple[int, ...]
    holds: tuple[_Hold, ...]


class WeightGradients:
    """The queue of one microbatch in one stage."""

    def __init__(self, meter: _Meter | None = None) -> None:
        self._meter = meter
        self._entries: list[_Entry] = []
        self._open = False

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """``I`` runs inside. A backward outside, as a stage may run in its forward, adds its gradients at its end."""
        self._open = True
        try:
            yield
        finally:
            self._open = False

    def add(self, weight: Tensor, bias: Tensor | None, x: Tensor, grad_output: Tensor) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a stage runs a backward with create_graph=True in its forward, and a split backward keeps no graph of "
                "the weights' gradients: use a schedule that does not split it, such as 1f1b"
            )
        if not self._open and not self._entries:
            after_backward(self.compute)
        holds: tuple[_Hold, ...] = ()
        if self._meter is not None:
            holds = (self._meter.hold(x, "activation"), self._meter.hold(grad_output, "queued"))
        self._entries.append(_Entry(weight, bias, x, grad_output, _versions(x, grad_output), holds))

    def compute(self) -> None:
        """Compute what is queued and add it to each ``.grad``, as a backward would.

        Raises:
            RuntimeError: if somebody has changed in place what a product is made of.
        """
        leaves: list[Tensor] = []
        gradients: list[Tensor] = []
        with torch.no_grad():
            for entry in self._entries:
                _refuse_changed(entry)
                rows, weight = entry.grad_output, entry.weight
                if weight.requires_grad and (product := add_product(weight, rows, entry.input)) is not None:
                    leaves.append(weight)
                    gradients.append(product.to(weight.dtype))
                if entry.bias is not None and entry.bias.requires_grad:
                    leaves.append(entry.bias)
                    gradients.append(rows.sum(0).to(entry.bias.dtype))
                for hold in entry.holds:
                    hold.release()
        self._entries.clear()
        if leaves:
            torch.autograd.backward(leaves, gradients)


class Deferring(LinearMode):
    """While a forward runs inside, its linear layers will put their weight gradients into ``queue``."""

    def __init__(self, queue: WeightGradients) -> None:
        super().__init__()
        self._queue = queue
        # Makes outputs require grad. The weights must not: autograd would call their hooks at I, without a gradient.
        self._anchor = torch.empty(0, requires_grad=True)

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # A hook is to see the whole gradient at once, of which other uses of the parameter may make a part at I.
        if has_hooks(weight) or (bias is not None and has_hooks(bias)):
            return F.linear(input, weight, bias)
        return _DeferredLinear.apply(_as_autocast_would(input), self._anchor, (weight, bias), self._queue)


class _DeferredLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor, layer: tuple[Tensor, Tensor | None], queue: WeightGradients
    ) -> Tensor:
        weight, bias = layer
        # The weight is saved for autograd's check that nobody changed it; hooks may give back another tensor, so the
        # parameter that is to get the gradient is kept beside it.
        ctx.save_for_backward(x, weight if ctx.needs_input_grad[0] else None)
        ctx.layer, ctx.queue = layer, queue
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, None, None, None]:
        x, _ = ctx.saved_tensors
        weight, _ = ctx.layer
        if whither(ctx.next_functions[1][0]) == "into the sum":  # of the anchor: the weight is no part of the graph
            ctx.queue.add(*ctx.layer, x, grad_output)
        return grad_output @ weight.to(grad_output.dtype) if ctx.needs_input_grad[0] else None, None, None, None


def _versions(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(map(version, tensors))


def _refuse_changed(entry: _Entry) -> None:
    """As autograd refuses what has changed between forward and backward."""
    if _versions(entry.input, entry.grad_output) != entry.versions:
        raise RuntimeError(
            f"the input of a linear layer, {tuple(entry.input.shape)}, or the gradient of its output, has been changed "
            "in place before its weight gradient was computed: give the layer a copy (clone), or use a schedule that "
            "does not split the backward, such as 1f1b"
        )


def _as_autocast_would(x: Tensor) -> Tensor:
    """The input in the dtype of the product, so that the cast is differentiated like any other operation."""
    if is_autocast(x) and x.is_floating_point() and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(x.device.type))
    return x
