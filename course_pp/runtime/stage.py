"""One stage at work: its forwards and backwards, and what it keeps between them."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from course_pp.deferred import Deferring, WeightGradients
from course_pp.runtime.memory import Hold, Meter
from course_pp.runtime.payload import map_tensors, tensors_of
from course_pp.runtime.rng import RandomState, get_random_state, random_state_kept, set_random_state
from course_pp.runtime.versions import VersionedStage

__all__ = ["Gradients", "Loss", "Stage"]

Loss = Callable[[Any], Tensor]
"""From the last stage's output to a microbatch's share of the loss, a scalar."""

Gradients = tuple[Tensor | None, ...]
"""One for each tensor of a value that requires grad, in order; None where nothing depends on it."""


@dataclass(slots=True)
class _Kept:
    """What a stage keeps of one microbatch from its forward to its backward.

    Of the output only the edges of the graph that lead to it: its memory is free as soon as it is sent.
    """

    leaves: list[Tensor] = field(default_factory=list)
    roots: list[Tensor | GradientEdge] = field(default_factory=list)
    weight_gradients: WeightGradients | None = None
    # What there is to compute the forward again from.
    again: tuple[Any, Loss | None, RandomState] | None = None
    holds: list[Hold] = field(default_factory=list)


class Stage:
    """A module as a stage of a pipeline.

    Args:
        index: which stage, counted from 0.
        module: called with what the stage before returned: a tuple or list gives its positional arguments, a dict its
            keyword arguments, anything else is the only one. None passes on what it gets.
        device: where it computes.
        recompute: keep only the input of a microbatch, and compute its forward again when its backward comes
            (activation checkpointing, Chen et al. 2016).
        meter: counts what is kept, if there is one.
        weights: which version of its weights each microbatch uses, if it updates them itself.
    """

    def __init__(
        self,
        index: int,
        module: nn.Module | None,
        device: torch.device,
        recompute: bool,
        meter: Meter | None,
        weights: VersionedStage | None = None,
    ) -> None:
        self.index, self.module, self._device = index, module, device
        self._recompute, self._meter, self._weights = recompute, meter, weights
        self._kept: dict[int, _Kept] = {}

    def clear(self) -> None:
        """Forget what a step that failed has left."""
        self._kept.clear()

    def evaluate(self, value: Any, loss: Loss | None) -> Any:
        """The forward of a microbatch when no backward follows."""
        with torch.no_grad():
            return self._compute(value, loss, self.module)

    def forward(self, microbatch: int, value: Any, loss: Loss | None, split: bool) -> Any:
        """``F``: the output or, in the last stage, the loss.

        Args:
            loss: makes the loss of this microbatch from the output; None except in the last stage.
            split: whether its backward will come in two halves.
        """
        kept = self._kept[microbatch] = _Kept()
        kept.leaves = [tensor for tensor in tensors_of(value) if tensor.requires_grad]
        if split:
            kept.weight_gradients = WeightGradients(self._meter)
        if self._meter is not None:
            kept.holds = [self._meter.hold(tensor, "activation", (self.index, microbatch)) for tensor in kept.leaves]
        if self._recompute:
            kept.again = value, loss, get_random_state(self._device)
            # On a copy, as the stage may change its input in place. With a graph, though of no use, so that the output
            # says what of it can be differentiated.
            with saved_tensors_hooks(_drop, _drop):
                return self._compute(map_tensors(_copy, value), loss, self._module_for(microbatch))
        return self._compute_and_keep(microbatch, value, loss, kept)

    def backward(self, microbatch: int, gradients: Gradients | None) -> Gradients:
        """``B``: add to the gradients of the weights, and return those of the input.

        ``gradients`` are those of the output; None in the last stage.
        """
        input_gradients = self.backward_input(microbatch, gradients)
        self.backward_weight(microbatch)
        return input_gradients

    def backward_input(self, microbatch: int, gradients: Gradients | None) -> Gradients:
        """``I``: return the gradients of the input; those of linear layers' weights wait for ``W``."""
        kept = self._kept[microbatch]
        if self._weights is not None:
            self._weights.begin_backward(microbatch)
        if kept.again is not None:
            value, loss, state = kept.again
            kept.again = None
            with random_state_kept(self._device):
                set_random_state(state, self._device)
                self._compute_and_keep(microbatch, value, loss, kept)
        if gradients is None:
            gradients = tuple(torch.ones_like(root) for root in kept.roots if isinstance(root, Tensor))
        pairs = [(root, grad) for root, grad in zip(kept.roots, gradients, strict=True) if grad is not None]
        kept.roots = []
        if pairs:
            roots: Any = [root for root, _ in pairs]  # the stubs want all edges or all tensors
            queue = kept.weight_gradients
            backward = partial(torch.autograd.backward, roots, [grad for _, grad in pairs])
            with nullcontext() if queue is None else queue.collecting():
                backward() if self._weights is None else self._weights.go_backward(microbatch, backward)
        # Those of the batch may be parts of a larger tensor, which has the gradient.
        input_gradients = tuple(leaf.grad if leaf.is_leaf else None for leaf in kept.leaves)
        kept.leaves = []
        for hold in kept.holds:
            hold.release()
        if self._weights is not None:
            self._weights.take(microbatch)
        return input_gradients

    def backward_weight(self, microbatch: int) -> None:
        """``W``: add the gradients that ``I`` has left out."""
        kept = self._kept.pop(microbatch)
        if kept.weight_gradients is not None:
            kept.weight_gradients.compute()
        if self._weights is not None:
            self._weights.take(microbatch)
            self._weights.finish(microbatch)

    def _module_for(self, microbatch: int) -> Callable[..., Any] | None:
        """What computes the forward of a microbatch."""
        return self.module if self._weights is None else partial(self._weights.call, microbatch)

    def _compute_and_keep(self, microbatch: int, value: Any, loss: Loss | None, kept: _Kept) -> Any:
        queue = kept.weight_gradients
        saving: AbstractContextManager[Any] = nullcontext()
        if self._meter is not None:
            saving = self._meter.saving(self.index, microbatch)
        with saving, nullcontext() if queue is None else Deferring(queue):
            output = self._compute(value, loss, self._module_for(microbatch))
        differentiable = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
        kept.roots = [get_gradient_edge(tensor) for tensor in differentiable] if loss is None else [*differentiable]
        return output

    def _compute(self, value: Any, loss: Loss | None, module: Callable[..., Any] | None) -> Any:
        if module is None:
            output = value
        elif isinstance(value, tuple | list):
            output = module(*value)
        elif isinstance(value, Mapping):
            output = module(**value)
        else:
            output = module(value)
        return output if loss is None else loss(output)


def _drop(_: Any) -> Any:
    return None


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
