"""What users hang on their modules, wrappers and hooks, and which of them a pipeline can live with.

Wrappers that gather or reduce by themselves count on one forward and one backward a step. A
pipeline has several forwards in flight and may put weight gradients off, so gradients would be
wrong without a word: they are refused.

Hooks that autograd calls when a parameter's gradient is complete are kept for the end of the step.
They may update the parameter at once; in a pipeline, which has a backward for each microbatch, with
a part of its gradient.
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
    """Return why ``module``, called ``what``, cannot be a stage because of a wrapper in or around it, or None."""
    for path, part in module.named_modules():
        wrapper = next((kind for kind in _wrappers() if isinstance(part, kind)), None)
        if wrapper is not None:
            return (
                f"{f'{path!r} of {what}' if path else what} is wrapped in {wrapper.__name__}, which"
                " counts on one forward and one backward a step: give the module inside it, and"
                " for data-parallel ranks shard that with fully_shard (FSDP2)"
            )
    return None


def is_dtensor(value: Any) -> bool:
    """Return whether a tensor is distributed; imports nothing for the answer."""
    tensor = sys.modules.get("torch.distributed.tensor")
    return tensor is not None and isinstance(value, tensor.DTensor)


def is_flattened(parameter: nn.Parameter) -> bool:
    """Return whether a parameter is a flat one of FullyShardedDataParallel (FSDP1), or a piece of one."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and (isinstance(parameter, fsdp.FlatParameter) or is_flat(parameter))


def _wrappers() -> Iterator[type]:
    """Yield what is refused. Most is looked for and not imported: whoever has applied it has done so."""
    yield nn.DataParallel
    yield nn.parallel.DistributedDataParallel
    if (fsdp := sys.modules.get("torch.distributed.fsdp")) is not None:
        yield fsdp.FullyShardedDataParallel
    if (without_wrapper := ddp_without_wrapper()) is not None:
        yield without_wrapper


def problem_of_hooks(modules: Mapping[int, "nn.Module | None"]) -> str | None:
    """Return which parameter has an optimizer that torch lets step in the backward; None if none has."""
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

    Yields the parameters that have got one so far; the body may take some out, whose hooks it calls
    itself. If the body raises, no hook is called. One that is removed inside is not called; one
    that is added inside is called at once.
    """
    parameters = (
        parameter for module in modules if module is not None for parameter in module.parameters()
    )
    kept = {
        parameter: dict(hooks)
        for parameter in parameters
        if (hooks := hooks_after_accumulation(parameter))
    }
    reached: dict[nn.Parameter, None] = {}

    def note(parameter: Any) -> None:
        reached[parameter] = None

    try:
        # under their own keys, by which their handles can still remove them
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
    """Call the hooks on the complete gradient of ``parameter`` as autograd does, also where it came from elsewhere."""
    for hook in list(hooks_after_accumulation(parameter).values()):
        hook(parameter)
