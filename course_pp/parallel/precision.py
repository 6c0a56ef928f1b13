"""Compute in half precision while parameters stay in float32, on ranks without FSDP2.

    what arrives ─► float32 ─► forward, products in half precision ─► half precision ─► what is sent

FSDP2 gathers parameters in half precision (:func:`default_mp_policy`). Without it each product casts its operands
(``torch.autocast``): norms, softmax and the residual stream inside a stage stay in float32, and the gradients of
parameters are float32. Both send half precision across a boundary, and both add the gradients of microbatches up in
float32, so they differ by rounding alone. Memory differs: autocast keeps, for each microbatch in flight, the copies of
the weights that its backward will need, and FSDP2 one copy for all.

Micikevicius et al. 2018, "Mixed Precision Training", arXiv:1710.03740.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from course_pp.arguments import checked
from course_pp.parallel._torch import mixed_precision, tree_flatten, tree_map
from course_pp.parallel.forwards import Replaced, replaced_forwards

__all__ = ["Lowered", "casts_inputs", "compute_dtype", "compute_dtypes", "compute_in", "spelled"]

_HALVES = (torch.bfloat16, torch.float16)


class Lowered(Replaced):
    """Computes in half precision.

    Attributes:
        dtype: bfloat16 or float16.
    """

    def __init__(self, forward: Callable[..., Any], dtype: torch.dtype) -> None:
        super().__init__(forward)
        self.dtype = dtype

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward, under autocast."""
        args, kwargs = (tree_map(self._widened, value) for value in (args, kwargs))
        device = next((leaf.device for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)), None)
        kind = "cpu" if device is None or device.type == "meta" else device.type
        with torch.autocast(kind, dtype=self.dtype):
            output = self.forward(*args, **kwargs)
        return tree_map(self._narrowed, output)

    def _widened(self, leaf: Any) -> Any:
        return leaf.float() if isinstance(leaf, Tensor) and leaf.dtype == self.dtype else leaf

    def _narrowed(self, leaf: Any) -> Any:
        return leaf.to(self.dtype) if isinstance(leaf, Tensor) and leaf.dtype == torch.float32 else leaf


@checked
def compute_in(module: nn.Module, dtype: torch.dtype) -> None:
    """Let ``module`` compute in ``dtype``, in place; after activation checkpointing.

    A no-op where ``dtype`` is that of the parameters, or FSDP2 computes in it already.

    Args:
        module: any, with parameters in float32.
        dtype: bfloat16 or float16, or what the parameters are in.

    Raises:
        TypeError: for what is no module.
        ValueError: if it computes in another dtype already, or if the parameters or ``dtype`` are none of the above.
    """
    now = compute_dtype(module)
    if now == dtype:
        return
    if dtype not in _HALVES:
        raise ValueError(f"compute_in(..., {dtype}): compute in torch.bfloat16 or torch.float16, or in {now} as it is")
    if now != torch.float32:
        raise ValueError(
            f"a {type(module).__name__} that computes in {now} cannot compute in {dtype}: keep its parameters in "
            "float32, or under FSDP2 give apply_fsdp2 the policy default_mp_policy(dtype)"
        )
    Lowered(module.forward, dtype).put_on(module)


@checked
def compute_dtype(module: nn.Module) -> torch.dtype:
    """Return what a module computes in and sends: that of mixed precision, else its parameters'."""
    return next(iter(compute_dtypes(module)), torch.get_default_dtype())


def compute_dtypes(module: nn.Module) -> tuple[torch.dtype, ...]:
    """Return what a module computes in: that of mixed precision, else its parameters' dtypes, each once, in order."""
    policy = mixed_precision(module)
    mixed = None if policy is None else policy.output_dtype or policy.param_dtype
    if policy is None:
        mixed = next((each.dtype for each in _lowered(module)), None)
    if mixed is not None:
        return (mixed,)
    return tuple(dict.fromkeys(p.dtype for p in module.parameters() if p.is_floating_point()))


def casts_inputs(module: nn.Module) -> bool:
    """Return whether mixed precision casts what a module is called with."""
    policy = mixed_precision(module)
    if policy is not None:
        return policy.param_dtype is not None and policy.cast_forward_inputs
    return any(_lowered(module))


def _lowered(module: nn.Module) -> Iterator[Lowered]:
    return (each for each in replaced_forwards(module.forward) if isinstance(each, Lowered))


def spelled(dtypes: Iterable[torch.dtype]) -> str:
    """Dtypes as a message lists them."""
    return ", ".join(sorted(map(str, dtypes))) or "no dtype, as it has no parameters"
