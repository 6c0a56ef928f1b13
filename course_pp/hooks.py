"""Hooks that autograd calls when a parameter's gradient is complete: in a pipeline once a step, as in one process.

There one backward goes over a whole batch, so what ``register_post_accumulate_grad_hook`` calls may update the
parameter at once and drop its gradient. A pipeline has a backward for each microbatch: such a hook would update with a
part of the gradient, between the forward and the backward of other microbatches.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from torch import nn

from course_pp._torch import accumulated_hooks

__all__ = ["called_once", "problem_of_hooks"]


def problem_of_hooks(modules: Mapping[int, "nn.Module | None"]) -> str | None:
    """Return which parameter of a stage is updated by a hook that cannot wait for the end of the step; None if none is.

    A hook on the node that adds up a gradient cannot be seen; this finds the optimizers that torch puts there.
    """
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
def called_once(modules: "Iterable[nn.Module | None]") -> Iterator[None]:
    """Keep the hooks on complete gradients back inside; afterwards call those whose parameters got one.

    If the body raises, none is called.
    """
    parameters = dict.fromkeys(p for module in modules if module is not None for p in module.parameters())
    waiting = {p: dict(hooks) for p in parameters if (hooks := accumulated_hooks(p))}
    reached: dict[nn.Parameter, None] = {}
    noting = []
    for parameter in waiting:
        accumulated_hooks(parameter).clear()
        noting.append(parameter.register_post_accumulate_grad_hook(partial(_note, reached)))
    try:
        yield
    finally:
        for handle in noting:
            handle.remove()
        for parameter, hooks in waiting.items():
            accumulated_hooks(parameter).update(hooks)
    for parameter in reached:
        for hook in waiting[parameter].values():
            hook(parameter)


def _note(reached: dict[nn.Parameter, None], parameter: nn.Parameter) -> None:
    reached[parameter] = None
