"""A stage without weights and wrappers, to find what it returns without computing it.

The copy lives on the meta device: running it allocates and computes nothing. It has the shapes of the whole parameters,
whatever shards them, and no hooks, so what it returns does not depend on the layout. Under FSDP2 it computes in the
dtype that mixed precision asks for.
"""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from course_pp.parallel._torch import TorchDispatchMode, mixed_precision, tree_map
from course_pp.parallel.boundary import meta_of
from course_pp.parallel.forwards import replaced_forwards
from course_pp.parallel.precision import Lowered
from course_pp.wrappers import uncompiled

__all__ = ["bare_copy", "run_on_meta"]

_MOST_QUESTIONS = 1000


def bare_copy(module: nn.Module) -> nn.Module:
    """Return a copy of ``module`` on the meta device, as it was before anything was applied to it."""
    return _Copier().copy(module, None)


@torch.no_grad()
def run_on_meta(run: Callable[[], Any]) -> Any:
    """Return what ``run`` makes of meta tensors, even if it asks yes or no of their values, such as ``mask.all()``.

    A run that asks is answered no throughout, another one yes. If one of them fails, the other counts.

    Raises:
        ValueError: if the shapes of the result depend on the answer.
    """
    results, failures = [], []
    for yes in (False, True):
        with _Answering(yes) as answering:
            try:
                results.append(run())
            except Exception as error:  # whatever a foreign forward raises
                failures.append(error)
        if not answering.asked:
            break
    if not results:
        raise failures[0]
    shapes = [tree_map(meta_of, result) for result in results]
    if shapes[0] != shapes[-1]:
        raise ValueError(f"{shapes[0]} or {shapes[-1]}, as it depends on values")
    return results[0]


class _Answering(TorchDispatchMode):
    """Answers what is asked of a truth value on the meta device."""

    def __init__(self, yes: bool) -> None:
        super().__init__()
        self.yes, self.asked = yes, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_question = func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta
        if is_question and args[0].dtype == torch.bool:
            self.asked += 1
            if self.asked > _MOST_QUESTIONS:  # a loop that waits for the other answer
                raise RuntimeError("asks for values without end")
            return self.yes
        return func(*args, **(kwargs or {}))


class _Copier:
    """Copies each module and each tensor once, so that what was shared stays shared."""

    def __init__(self) -> None:
        self._modules: dict[int, nn.Module] = {}
        self._tensors: dict[int, Tensor] = {}

    def copy(self, module: nn.Module, dtype: torch.dtype | None) -> nn.Module:
        """Copy ``module``, whose parameters are gathered in ``dtype``; None is their own."""
        if id(module) in self._modules:
            return self._modules[id(module)]
        policy = mixed_precision(module)
        if policy is not None:
            dtype = policy.param_dtype or dtype
        copied = self._modules[id(module)] = self._copy(module, dtype)
        if policy is not None:
            _cast_like(copied, policy)
        return copied

    def _copy(self, module: nn.Module, dtype: torch.dtype | None) -> nn.Module:
        # What torch.compile returns passes on each attribute that is set on it, a copy of it to the original.
        if (inner := uncompiled(module)) is not module:
            return self.copy(inner, dtype)
        kind = _kind_of(module)
        copied = self._modules[id(module)] = kind.__new__(kind)
        copied.__dict__ = {key: {} if key.endswith("_hooks") else value for key, value in vars(module).items()}
        copied.__dict__ |= _without_hooks(module)
        parameters: dict[str, Any] = {name: self._tensor(value, dtype) for name, value in module._parameters.items()}
        copied._parameters = parameters
        copied._buffers = {name: self._tensor(value, None) for name, value in module._buffers.items()}
        copied._modules = {
            name: None if child is None else self.copy(child, dtype) for name, child in module._modules.items()
        }
        _rebind(module, copied)
        return copied

    def _tensor(self, tensor: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
        if tensor is None:
            return None
        if id(tensor) not in self._tensors:
            kept = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            meta = torch.empty(tensor.shape, dtype=kept, device="meta")
            is_parameter = isinstance(tensor, nn.Parameter)
            self._tensors[id(tensor)] = nn.Parameter(meta, tensor.requires_grad) if is_parameter else meta
        return self._tensors[id(tensor)]


def _kind_of(module: nn.Module) -> type[nn.Module]:
    """Return the class the module had before FSDP2 put a class of its own in front of it."""
    kinds = type(module).__mro__
    return kinds[kinds.index(FSDPModule) + 1] if isinstance(module, FSDPModule) else type(module)


def _without_hooks(module: nn.Module) -> dict[str, Any]:
    fresh = nn.Module()
    return {key: value for key, value in vars(fresh).items() if "hooks" in key} | {"_compiled_call_impl": None}


def _rebind(module: nn.Module, copied: nn.Module) -> None:
    """Bind methods that were set on the module itself, such as a replaced forward, to the copy."""
    for key, value in list(vars(copied).items()):
        around = list(replaced_forwards(value))
        method = around[-1].forward if around else value
        if isinstance(method, MethodType) and method.__self__ is module:
            bound: Callable[..., Any] = MethodType(method.__func__, copied)
            for lowered in (each for each in reversed(around) if isinstance(each, Lowered)):  # nothing is computed
                bound = Lowered(bound, lowered.dtype).run
            vars(copied)[key] = bound


def _cast_like(copied: nn.Module, policy: MixedPrecisionPolicy) -> None:
    """Cast inputs and outputs as FSDP2 does."""
    if policy.param_dtype is not None and policy.cast_forward_inputs:
        copied.register_forward_pre_hook(
            lambda _, args, kwargs: (_cast(args, policy.param_dtype), _cast(kwargs, policy.param_dtype)),
            with_kwargs=True,
        )
    if policy.output_dtype is not None:
        copied.register_forward_hook(lambda _, args, output: _cast(output, policy.output_dtype))


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return tree_map(cast, value)
