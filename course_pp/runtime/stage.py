"""One stage at work: its forwards and backwards; and the cost of a layer as a stage."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from course_pp.base.arguments import checked, refuse_below
from course_pp.runtime.clocks import wait_for
from course_pp.runtime.memory import Hold, Meter
from course_pp.runtime.payload import map_plain, plain_tensors
from course_pp.runtime.versions import VersionedStage
from course_pp.schedule import LayerCost
from course_pp.schedule.edges import taken_apart
from course_pp.step.late_weights import Deferring, Fusing, WeightGradients, is_worth_fusing
from course_pp.step.loss import Attached, Share
from course_pp.step.random_streams import (
    RandomState,
    RandomStreams,
    get_random_state,
    random_state_kept,
    set_random_state,
)
from course_pp.step.values import call

Loss = Callable[[Any], Share]
Gradients = tuple[Tensor | None, ...]
"""One for each tensor of a value that requires grad, in order; None where nothing depends on it."""

_NONE: Mapping[str, Any] = {}


@dataclass(slots=True)
class _InFlight:
    """One microbatch in one stage, between its forward and its backward.

    Attributes:
        leaves: the leaves of the input, then those of each value that the stage read.
        roots: the edges of the graph that lead to the output. The output itself is not kept: its
            memory is free as soon as it is sent.
        weight: the weight of the loss, in the last stage.
        again: the arguments and the random state of the forward, if it is computed again.
    """

    leaves: list[list[Tensor]] = field(default_factory=list)
    roots: list[GradientEdge] = field(default_factory=list)
    weight: Tensor | None = None
    weight_gradients: WeightGradients | None = None
    again: tuple[Any, Mapping[str, Any], Mapping[str, Any], Loss | None, RandomState] | None = None
    holds: list[Hold] = field(default_factory=list)


class Stage:
    """A module as a stage of a pipeline.

    Args:
        module: a module called with the output of the stage before: a tuple or list gives its
            positional arguments, a dict its keyword arguments, any other value is its only
            argument. None passes its input on.
        recompute: keep only the input of a microbatch, and compute its forward again when its
            backward comes (activation checkpointing, Chen et al. 2016).
        weights: the versions of its weights, if it updates them itself.
        writes: the names of the values that it returns beside its output, as ``(output, {name:
            value})``.
        wanted: the names of the values that another stage reads, in order.

    Attributes:
        attached: the losses that microbatches of this step attach
            (:func:`course_pp.step.loss.attach_loss`).
        scale: a factor of the gradients of losses.
        streams: the random numbers of its forwards in training; None leaves them to torch's default
            generator.
    """

    def __init__(
        self,
        index: int,
        module: nn.Module | None,
        device: torch.device,
        recompute: bool,
        meter: Meter | None,
        weights: VersionedStage | None = None,
        writes: Sequence[str] = (),
        wanted: Sequence[str] = (),
    ) -> None:
        self.index = index
        self.module = module
        self._device = device
        self._recompute = recompute
        self._meter = meter
        self._weights = weights
        self._writes = writes
        self._wanted = wanted
        # Versions of weights take gradients apart from ``.grad``, to which fused layers add.
        self._fusing = Fusing() if weights is None and is_worth_fusing(module) else None
        self._kept: dict[int, _InFlight] = {}
        self.attached: dict[int, Attached] = {}
        self.scale = 1.0
        self.streams: RandomStreams | None = None

    def clear(self) -> None:
        """Forget the microbatches of a step that failed."""
        self._kept.clear()

    def evaluate(
        self,
        value: Any,
        loss: Loss | None,
        read: Mapping[str, Any] = _NONE,
        given: Mapping[str, Any] = _NONE,
    ) -> tuple[Any, dict[str, Any]]:
        """Run the forward of a microbatch when no backward follows."""
        with torch.no_grad():
            return self._compute(value, read, given=given, loss=loss, module=self.module)

    def forward(
        self,
        microbatch: int,
        value: Any,
        loss: Loss | None,
        split: bool,
        read: Mapping[str, Any] = _NONE,
        given: Mapping[str, Any] = _NONE,
    ) -> tuple[Any, dict[str, Any]]:
        """Run ``F``; return the output, or the share of the loss, and the values that others read.

        Args:
            loss: a function from the output to the share of the loss, in the last stage of a
                pipeline with a loss.
            split: whether the backward will come in two halves.
            read: the values that this stage reads, by name.
            given: the caller's keyword arguments, passed as they are and without gradients.
        """
        if self.streams is not None:
            self.streams.begin(self.index, microbatch)
        # Leaves of a stage's own graph: their gradients are the messages to the stages before.
        kept = self._kept[microbatch] = _InFlight()
        for each in (value, *read.values()):
            kept.leaves.append([leaf for leaf in plain_tensors(each) if leaf.requires_grad])
        if split:
            kept.weight_gradients = WeightGradients(self._meter)
        if self._meter is not None:
            for leaves in kept.leaves:
                kept.holds += [self._meter.hold(leaf) for leaf in leaves]
        if self._recompute:
            kept.again = value, read, given, loss, get_random_state(self._device)
            # On a copy, as the stage may change its input in place. The graph saves no tensors, but
            # it shows which tensors of the output require a gradient.
            with saved_tensors_hooks(lambda _: None, _refuse_dropped):
                module = self._module_for(microbatch)
                copies = map_plain(_copy, read)
                return self._compute(
                    map_plain(_copy, value), copies, given=given, loss=loss, module=module
                )
        return self._compute_and_keep(
            microbatch, value, read=read, given=given, loss=loss, kept=kept
        )

    def backward(self, microbatch: int, gradients: Gradients | None) -> Gradients:
        """Run ``B`` of a stage that reads and writes no values; return the input's gradients."""
        input_gradients = self.backward_input(microbatch, gradients)[0]
        self.backward_weight(microbatch)
        return input_gradients

    def backward_input(
        self,
        microbatch: int,
        gradients: Gradients | None,
        of_values: Sequence[Gradients] = (),
        weight: Callable[[], Tensor | float] = lambda: 1.0,
    ) -> tuple[Gradients, ...]:
        """Run ``I``; return the gradients of the input, and of each value that this stage has read.

        The gradients of linear layers' weights wait for ``W``.

        Args:
            gradients: the gradients of the output; None in the last stage.
            of_values: the gradients of each value that another stage has read, in order.
            weight: a function that returns the microbatch's weight in its batch; called if losses
                are attached.
        """
        kept = self._kept[microbatch]
        if self._weights is not None:
            self._weights.begin_backward(microbatch)
        if kept.again is not None:
            value, read, given, loss, state = kept.again
            kept.again = None
            with random_state_kept(self._device):
                set_random_state(state, self._device)
                self._compute_and_keep(
                    microbatch, value, read=read, given=given, loss=loss, kept=kept
                )
        # The weight is asked for only now: it comes with the gradient, or from the last stage.
        if microbatch in self.attached:
            self.attached[microbatch].weight = weight() * self.scale
        if gradients is None:
            start = kept.weight
            if start is not None and self.scale != 1.0:
                start = start * self.scale
            gradients = tuple(start for _ in kept.roots)

        gradients = sum(of_values, start=gradients)
        roots: list[GradientEdge] = []
        grads: list[Tensor] = []
        for root, grad in zip(kept.roots, gradients, strict=True):
            if grad is not None:
                roots.append(root)
                grads.append(grad)
        # The graph must be free as soon as the backward is through, so no root is kept.
        kept.roots = []
        if roots:
            queue = kept.weight_gradients
            backward = partial(torch.autograd.backward, roots, grads)
            with nullcontext() if queue is None else queue.collecting():
                if self._weights is None:
                    backward()
                else:
                    self._weights.go_backward(microbatch, backward)

        input_gradients = []
        for row in kept.leaves:
            # A tensor of the batch may be a part of a larger tensor, which has the gradient.
            input_gradients.append(tuple(leaf.grad if leaf.is_leaf else None for leaf in row))
        kept.leaves = []
        for hold in kept.holds:
            hold.release()
        if self._weights is not None:
            self._weights.take(microbatch)
        return tuple(input_gradients)

    def backward_weight(self, microbatch: int) -> None:
        """Run ``W``: add the gradients that ``I`` has left out."""
        kept = self._kept.pop(microbatch)
        if kept.weight_gradients is not None:
            kept.weight_gradients.compute()
        if self._weights is not None:
            self._weights.take(microbatch)
            self._weights.finish(microbatch)

    def _module_for(self, microbatch: int) -> Callable[..., Any] | None:
        return self.module if self._weights is None else partial(self._weights.call, microbatch)

    def _compute_and_keep(
        self,
        microbatch: int,
        value: Any,
        read: Mapping[str, Any],
        given: Mapping[str, Any],
        loss: Loss | None,
        kept: _InFlight,
    ) -> tuple[Any, dict[str, Any]]:
        queue = kept.weight_gradients
        saving: AbstractContextManager[Any] = nullcontext()
        if self._meter is not None:
            saving = self._meter.saving(self.index, microbatch)
        linears = self._fusing if queue is None else Deferring(queue)
        attached = Attached()
        module = self._module_for(microbatch)
        with saving, linears or nullcontext(), attached:
            output, values = self._compute(value, read, given=given, loss=loss, module=module)
        if attached.values:
            self.attached[microbatch] = attached

        made = output
        if loss is not None:  # the output is a Share then
            made, kept.weight = output
        for each in (made, *values.values()):
            for tensor in plain_tensors(each):
                if tensor.requires_grad:
                    kept.roots.append(get_gradient_edge(tensor))
        return output, values

    def _compute(
        self,
        value: Any,
        read: Mapping[str, Any],
        given: Mapping[str, Any],
        loss: Loss | None,
        module: Callable[..., Any] | None,
    ) -> tuple[Any, dict[str, Any]]:
        output = value
        if module is not None:
            # dict raises TypeError for a name that is in both.
            output = call(module, value, dict(**read, **given))
        values: dict[str, Any] = {}
        if self._writes:
            output, written = taken_apart(self.index, self._writes, output)
            values = {name: written[name] for name in self._wanted}
        return output if loss is None else loss(output), values


def _refuse_dropped(_: Any) -> Any:
    raise RuntimeError(
        "a stage differentiates in its forward, and recompute=True keeps nothing to do so with:"
        " leave recompute out, or checkpoint other parts of the stage (torch.utils.checkpoint)"
    )


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def device_of(modules: Iterable[nn.Module | None]) -> torch.device:
    """Return the device of the first parameter; the CPU if there are none."""
    for module in modules:
        for parameter in () if module is None else module.parameters():
            return parameter.device
    return torch.device("cpu")


@checked
def profile_layers(
    layers: Sequence[nn.Module],
    inputs: Any,
    *,
    repeats: int = 5,
    device: torch.device | str | None = None,
) -> tuple[LayerCost, ...]:
    """Measure each layer alone, run as a stage, for :func:`course_pp.schedule.partition`.

    Each layer takes the output of the layer before, forward and backward. The shortest time counts,
    as other work of the machine can only add to it (Narayanan et al. 2019, "PipeDream", section
    3.1, profile 1000 minibatches on a GPU).

    Args:
        layers: the layers, first to last. Their gradients and buffers, and the random number
            generators, are restored afterwards.
        inputs: one microbatch of the first layer: tensors, alone or in a tuple or dict.
        repeats: number of timed runs of each layer, after a first run that does not count.
        device: device of the computation; None is the device of the parameters.

    Returns:
        For each layer the seconds of its forward and backward, the bytes of its output, and the
        bytes of its trained weights.

    Raises:
        RuntimeError: under ``no_grad``, where there is no backward to time.
    """
    refuse_below(1, "profile_layers", repeats=repeats)
    if not torch.is_grad_enabled():
        raise RuntimeError("profile_layers under no_grad has no backward to time: call it outside")
    computes_on = device_of(layers) if device is None else torch.device(device)
    costs = []
    value = inputs
    with _left_as_they_were(layers), random_state_kept(computes_on):
        for number, layer in enumerate(layers):
            try:
                seconds, value = _timed(layer, value, repeats, computes_on)
            except Exception as error:
                error.add_note(f"in layer {number} of {len(layers)}, a {type(layer).__name__}")
                raise
            weights = sum(p.nbytes for p in layer.parameters() if p.requires_grad)
            made = sum(tensor.nbytes for tensor in plain_tensors(value))
            costs.append(LayerCost(seconds, made, weights))
    return tuple(costs)


def _timed(layer: nn.Module, value: Any, repeats: int, device: torch.device) -> tuple[float, Any]:
    stage = Stage(0, layer, device=device, recompute=False, meter=None)
    shortest = float("inf")
    output = None
    for repeat in range(1 + repeats):
        received = map_plain(_received, value)
        wait_for(device)
        begun = time.perf_counter()
        output, _ = stage.forward(0, received, loss=None, split=False)
        trained = [tensor for tensor in plain_tensors(output) if tensor.requires_grad]
        stage.backward(0, tuple(map(torch.ones_like, trained)))
        wait_for(device)
        if repeat:  # the first run warms up
            shortest = min(shortest, time.perf_counter() - begun)
    return shortest, map_plain(_received, output)


def _received(tensor: Tensor) -> Tensor:
    """Return a copy that the layer may change in place, which autograd forbids for a leaf."""
    return tensor.detach().requires_grad_(tensor.requires_grad).clone()


@contextmanager
def _left_as_they_were(layers: Sequence[nn.Module]) -> Iterator[None]:
    gradients = [(p, p.grad) for layer in layers for p in layer.parameters()]
    buffers = [(buffer, buffer.detach().clone()) for layer in layers for buffer in layer.buffers()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
