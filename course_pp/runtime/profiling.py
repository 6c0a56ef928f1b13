"""What the layers of a model cost on this machine: what PipeDream's planner starts from."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from course_pp.arguments import checked, refuse_below
from course_pp.runtime.agreement import device_of
from course_pp.runtime.clocks import wait_for
from course_pp.runtime.payload import map_tensors, tensors_of
from course_pp.runtime.stage import Stage, random_state_kept
from course_pp.schedule import LayerCost


@checked
def profile_layers(
    layers: Sequence[nn.Module], inputs: Any, *, repeats: int = 5, device: torch.device | str | None = None
) -> tuple[LayerCost, ...]:
    """Measure each layer alone, as a stage of a pipeline would run it, for :func:`course_pp.schedule.partition`.

    Each layer takes what the one before returned, forward and backward. The shortest of ``repeats`` times counts: other
    work of the machine can only add to a time. Narayanan et al. 2019, "PipeDream", section 3.1, which profiles 1000
    minibatches on one GPU.

    Args:
        layers: first to last. Their gradients, buffers and the random number generators are left as they were.
        inputs: of the first layer, one microbatch: tensors, alone or in a tuple or dict.
        repeats: how often each is timed, after a first time that does not count.
        device: where the layers compute; None is where their parameters are.

    Returns:
        For each layer the seconds of its forward and backward, the bytes of its output, and of its trained weights.

    Raises:
        ValueError: for a layer that cannot take what the one before returned.
        RuntimeError: under ``no_grad``.
    """
    refuse_below(1, "profile_layers", repeats=repeats)
    if not torch.is_grad_enabled():
        raise RuntimeError("profile_layers under no_grad has no backward to time: call it outside")
    modules: dict[int, nn.Module | None] = dict(enumerate(layers))
    computes_on = device_of(modules) if device is None else torch.device(device)
    costs, value = [], inputs
    with _left_as_they_were(layers), random_state_kept(computes_on):
        for number, layer in enumerate(layers):
            try:
                seconds, value = _timed(layer, value, repeats, computes_on)
            except Exception as error:
                given = "what the one before returned" if number else "the inputs"
                raise ValueError(
                    f"layer {number} of {len(layers)}, a {type(layer).__name__}, fails on {given}: "
                    f"{type(error).__name__}: {error}"
                ) from error
            weights = sum(p.nbytes for p in layer.parameters() if p.requires_grad)
            costs.append(LayerCost(seconds, sum(tensor.nbytes for tensor in tensors_of(value)), weights))
    return tuple(costs)


def _timed(layer: nn.Module, value: Any, repeats: int, device: torch.device) -> tuple[float, Any]:
    """Return the seconds of the layer's forward and backward, and what it returns."""
    stage, shortest, output = Stage(0, layer, device, False, None), float("inf"), None
    for repeat in range(1 + repeats):
        received = map_tensors(_received, value)
        wait_for(device)
        begun = time.perf_counter()
        output, _ = stage.forward(0, received, None, False)
        gradients = tuple(torch.ones_like(tensor) for tensor in tensors_of(output) if tensor.requires_grad)
        stage.backward(0, gradients)
        wait_for(device)
        if repeat:
            shortest = min(shortest, time.perf_counter() - begun)
    return shortest, map_tensors(_received, output)


def _received(tensor: Tensor) -> Tensor:
    """With memory of its own, and no leaf if it requires grad: the layer may change its input in place."""
    return tensor.detach().requires_grad_(tensor.requires_grad).clone()


@contextmanager
def _left_as_they_were(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Gradients, and buffers such as BatchNorm's statistics."""
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
