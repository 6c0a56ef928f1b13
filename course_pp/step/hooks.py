"""Wrappers and hooks of users' modules: which of them a pipeline supports.

Wrappers that gather or reduce by themselves count on one forward and one backward a step. A
pipeline has several forwards in flight and may put weight gradients off, so gradients would be
wrong without a word: they are refused.

Hooks that autograd calls when a parameter's gradient is complete are kept for the end of the step.
Such a hook may update the parameter at once. A pipeline has a backward for each microbatch, and the
hook would see a part of the gradient.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from course_pp.base.torch_private import (
    ddp_without_wrapper,
    hooks_after_accumulation,
    is_flat,
    steps_in_backward,
)


def problem_of_wrappers(module: nn.Module, what: str) -> str | None:
    """Return which wrapper in or around ``module``, called ``what``, no stage may have, or None."""
    for path, part in module.named_modules():
        for wrapper in _wrappers():
            if isinstance(part, wrapper):
                where = f"{path!r} of {what}" if path else what
                return (
                    f"{where} is wrapped in {wrapper.__name__}, which counts on one forward and"
                    " one backward a step: give the module inside it, and for data-parallel ranks"
                    " shard that with fully_shard (FSDP2)"
                )
    return None


def is_dtensor(value: Any) -> bool:
    """Return whether a tensor is distributed, without importing DTensor for the answer."""
    tensor = sys.modules.get("torch.distributed.tensor")
    return tensor is not None and isinstance(value, tensor.DTensor)


def is_flattened(parameter: nn.Parameter) -> bool:
    """Return whether FullyShardedDataParallel (FSDP1) has flattened a parameter."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and (isinstance(parameter, fsdp.FlatParameter) or is_flat(parameter))


def _wrappers() -> Iterator[type]:
    """Yield the refused wrappers. A module that nobody imported cannot have been applied."""
    # Both of these are part of torch.nn, which is imported already.
    yield nn.DataParallel
    yield nn.parallel.DistributedDataParallel
    if (fsdp := sys.modules.get("torch.distributed.fsdp")) is not None:
        yield fsdp.FullyShardedDataParallel
    if (without_wrapper := ddp_without_wrapper()) is not None:
        yield without_wrapper


def problem_of_hooks(modules: Mapping[int, "nn.Module | None"]) -> str | None:
    """Return which parameter has an optimizer that steps in the backward, or None."""
    if "torch.distributed.optim.apply_optimizer_in_backward" not in sys.modules:
        return None  # looking through a large stage in each step takes a millisecond
    for stage, module in modules.items():
        for name, parameter in () if module is None else module.named_parameters():
            if steps_in_backward(parameter):
                return (
                    f"{name!r} of stage {stage} has an optimizer that steps in the backward"
                    " (_apply_optimizer_in_backward), and a pipeline has a backward for each"
                    " microbatch: step after the step, or in a hook of"
                    " register_post_accumulate_grad_hook, which is called once a step"
                )
    return None


@contextmanager
def called_once(modules: "Iterable[nn.Module | None]") -> "Iterator[dict[nn.Parameter, None]]":
    """Call the hooks on complete gradients after the body, once for each parameter that got a
    gradient inside.

    Yield the parameters that have got a gradient so far. The body may take some out and call their
    hooks itself. If the body raises, no hook is called. A hook that is removed inside is not
    called; a hook that is added inside is called at once.
    """
    kept: dict[nn.Parameter, dict[int, Any]] = {}
    for module in modules:
        for parameter in () if module is None else module.parameters():
            if hooks := hooks_after_accumulation(parameter):
                kept[parameter] = dict(hooks)
    reached: dict[nn.Parameter, None] = {}

    def note(parameter: Any) -> None:
        reached[parameter] = None

    try:
        # Under their own keys, so that their handles can still remove them.
        for parameter, hooks in kept.items():
            hooks_after_accumulation(parameter).update(dict.fromkeys(hooks, note))
        yield reached
    finally:
        for parameter, hooks in kept.items():
            now = hooks_after_accumulation(parameter)
            now.update({key: hook for key, hook in hooks.items() if key in now})
    for parameter in reached:
        call_hooks(parameter)


@torch.no_grad()
def call_hooks(parameter: nn.Parameter) -> None:
    """Call the hooks on the complete gradient of ``parameter``, as autograd does."""
    for hook in list(hooks_after_accumulation(parameter).values()):
        hook(parameter)
