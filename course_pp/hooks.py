"""Hooks that autograd calls when a parameter's gradient is complete: in a pipeline once a step, as in one process.

There one backward goes over a whole batch, so what ``register_post_accumulate_grad_hook`` calls may update the
parameter at once and drop its gradient. A pipeline has a backward for each microbatch: such a hook would update with a
part of the gradient, between the forward and the backward of other microbatches.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from course_pp._torch import accumulated_hooks

__all__ = ["call_hooks", "called_once", "problem_of_hooks"]


def problem_of_hooks(modules: Mapping[int, "nn.Module | None"]) -> str | None:
    """Return which parameter of a stage is updated by a hook that cannot wait for the end of the step; None if none is.

    A hook on the node that adds up a gradient cannot be seen; this finds the optimizers that torch puts there.
    """
    if "torch.distributed.optim.apply_optimizer_in_backward" not in sys.modules:
        return None  # looking through a large stage in each step takes a millisecond
    for stage, module in modules.items():
        for name, parameter in () if module is None else module.named_parameters():
            if getattr(parameter, "_in_backward_optimizers", None):
                return (
                    f"{name!r} of stage {stage} has an optimizer that steps in the backward "
                    "(_apply_optimizer_in_backward), and a pipeline has a backward for each microbatch: step after the "
                    "step, or in a hook of register_post_accumulate_grad_hook, which is called once a step"
                )
    return None


@contextmanager
def called_once(modules: "Iterable[nn.Module | None]") -> "Iterator[dict[nn.Parameter, None]]":
    """Keep the hooks on complete gradients back inside; afterwards call those whose parameters got one.

    If the body raises, none is called; nor for parameters that it takes out of what it is given. A hook that is removed
    inside is not called; one that is added inside is called at once, for each microbatch.
    """
    parameters = (parameter for module in modules if module is not None for parameter in module.parameters())
    kept = {parameter: dict(hooks) for parameter in parameters if (hooks := accumulated_hooks(parameter))}
    reached: dict[nn.Parameter, None] = {}

    def note(parameter: Any) -> None:
        reached[parameter] = None

    try:
        for parameter, hooks in kept.items():  # in their places, from where their handles can still remove them
            accumulated_hooks(parameter).update(dict.fromkeys(hooks, note))
        yield reached
    finally:
        for parameter, hooks in kept.items():
            now = accumulated_hooks(parameter)
            now.update({key: hook for key, hook in hooks.items() if key in now})
    for parameter in reached:
        call_hooks(parameter)


@torch.no_grad()
def call_hooks(parameter: nn.Parameter) -> None:
    """Call the hooks on the complete gradient of ``parameter`` as autograd does, also where it came from elsewhere."""
    for hook in list(accumulated_hooks(parameter).values()):
        hook(parameter)
