"""The meta device, on which everything has a shape and nothing is allocated or computed.

A copy of a stage there says what the stage returns. It has the shapes of the whole parameters,
whatever shards them, and no hooks. Under FSDP2 it computes in the dtype that mixed precision asks
for. A model without weights is cut there: its units compute shapes and return zeros; what lies
between them, such as masks, is computed from the example.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.utils.weak import WeakIdKeyDictionary

from course_pp.base.torch_private import (
    TorchDispatchMode,
    asks_for_number,
    forget_compiled,
    give_containers,
    is_grouped_product,
    mixed_precision,
    own_buffers,
    own_children,
    own_parameters,
    tree_flatten,
    tree_map,
    uncompiled,
)
from course_pp.parallel.replaced_forward import replaced_forwards
from course_pp.step.values import meta_of

_MOST_QUESTIONS = 1000


@torch.no_grad()
def run_on_meta(run: Callable[[], Any]) -> Any:
    """Return what ``run`` makes of meta tensors, even if it asks yes or no of their values, such as
    ``mask.all()``.

    Where a tensor with values meets one of meta, only its shape counts. A run that asks is answered
    no throughout, another one yes; if one of them fails, the other counts. Refuses a result whose
    shapes depend on the answer.
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
    def __init__(self, yes: bool) -> None:
        super().__init__()
        self.yes, self.asked = yes, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_question = asks_for_number(func) and args[0].is_meta
        if is_question and args[0].dtype == torch.bool:
            self.asked += 1
            if self.asked > _MOST_QUESTIONS:  # a loop that waits for the other answer
                raise RuntimeError("asks for values without end")
            return self.yes
        tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        if len({tensor.is_meta for tensor in tensors}) > 1:
            args, kwargs = to_meta((args, kwargs))
        return run_operation(func, args, kwargs or {})


def run_operation(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run an operation of torch; on the meta device also products of groups in float32.

    torch computes these on CPU and GPU, and takes bfloat16 alone on the meta device. Experts of
    transformers' models are such products.
    """
    if not is_grouped_product(func) or not args[0].is_meta:
        return func(*args, **kwargs)
    one, other = args[0], args[1]
    sizes = [one.shape[-2], other.shape[-1]]
    if one.dim() == other.dim() == 3:
        sizes.insert(0, len(one))
    elif one.dim() == other.dim():
        offsets: Any = args[2] if len(args) > 2 else kwargs.get("offs")
        sizes.insert(0, len(offsets))
    return one.new_empty(sizes, dtype=kwargs.get("out_dtype") or one.dtype)


def to_meta(value: Any) -> Any:
    return tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, value)


def meta_copy(module: nn.Module) -> nn.Module:
    """Return a copy of ``module`` on the meta device, without anything that was applied to it."""
    return _Copier().copy(module, None)


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
        # What torch.compile returns passes on each attribute that is set on it, a copy of it to the
        # original.
        if (inner := uncompiled(module)) is not module:
            return self.copy(inner, dtype)
        kind, kinds = type(module), type(module).__mro__
        # FSDP2 has put a class of its own in front of the module's
        if isinstance(module, FSDPModule):
            kind = kinds[kinds.index(FSDPModule) + 1]
        copied = self._modules[id(module)] = kind.__new__(kind)
        # torch's own containers of hooks stay empty; a module's attribute may have such a name too.
        hooks = {key: value for key, value in vars(nn.Module()).items() if "hooks" in key}
        copied.__dict__ = vars(module) | hooks
        forget_compiled(copied)
        parameters: dict[str, Any] = {}
        for name, parameter in own_parameters(module).items():
            parameters[name] = self._tensor(parameter, dtype)
        buffers = {name: self._tensor(value, None) for name, value in own_buffers(module).items()}
        children: dict[str, nn.Module | None] = {}
        # The copy has its tensors before its children are copied, which may lead back to it.
        give_containers(copied, parameters, buffers, children)
        for name, child in own_children(module).items():
            children[name] = None if child is None else self.copy(child, dtype)
        _rebind(module, copied)
        return copied

    def _tensor(self, tensor: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
        if tensor is None:
            return None
        if id(tensor) not in self._tensors:
            kept = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            meta = torch.empty(tensor.shape, dtype=kept, device="meta")
            is_parameter = isinstance(tensor, nn.Parameter)
            self._tensors[id(tensor)] = (
                nn.Parameter(meta, tensor.requires_grad) if is_parameter else meta
            )
        return self._tensors[id(tensor)]


def _rebind(module: nn.Module, copied: nn.Module) -> None:
    """Bind methods that were set on the module itself, such as a replaced forward, to the copy."""
    for key, value in list(vars(copied).items()):
        around = list(replaced_forwards(value))
        method = around[-1].forward if around else value
        if isinstance(method, MethodType) and method.__self__ is module:
            bound: Callable[..., Any] = MethodType(method.__func__, copied)
            for each in reversed(around):
                bound = each.in_copy(bound)
            vars(copied)[key] = bound


def _cast_like(copied: nn.Module, policy: MixedPrecisionPolicy) -> None:
    def cast(value: Any, dtype: torch.dtype | None) -> Any:
        return tree_map(
            lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, value
        )

    if policy.param_dtype is not None and policy.cast_forward_inputs:
        copied.register_forward_pre_hook(
            lambda _, args, kwargs: (
                cast(args, policy.param_dtype),
                cast(kwargs, policy.param_dtype),
            ),
            with_kwargs=True,
        )
    if policy.output_dtype is not None:
        copied.register_forward_hook(lambda _, args, output: cast(output, policy.output_dtype))


@contextmanager
def weights_on_meta() -> Iterator[None]:
    """Build the models of this block without weights.

    Parameters are on the meta device, buffers stay as they are.

    Give such a model to :func:`auto_split`, and fill the stages you keep with
    :func:`course_pp.training.checkpoint.load_stage`. Under ``torch.device("meta")`` tables such as
    rotary angles would be lost, as no file holds them.
    """
    register = nn.Module.register_parameter
    # one that is tied stays one object
    made: MutableMapping[nn.Parameter, nn.Parameter] = WeakIdKeyDictionary()

    def on_meta(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if isinstance(parameter, nn.Parameter) and not parameter.is_meta:
            if parameter not in made:
                made[parameter] = nn.Parameter(
                    parameter.detach().to("meta"), parameter.requires_grad
                )
            parameter = made[parameter]
        register(self, name, parameter)

    with patch.object(nn.Module, "register_parameter", on_meta):
        yield


def has_no_weights(unit: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in unit.parameters())


@contextmanager
def without_numbers(model: nn.Module, units: Mapping[str, nn.Module]) -> Iterator[None]:
    """Let a model without weights run on a real example.

    The buffers of its units move to the meta device, and the parameters outside the units become
    zeros.
    """
    own: set[int] = set()
    with ExitStack() as puts_back:
        for unit in units.values():
            own.update(map(id, unit.modules()))
            for part in unit.modules() if has_no_weights(unit) else ():
                on_meta = {
                    name: None if b is None else b.to("meta")
                    for name, b in own_buffers(part).items()
                }
                puts_back.enter_context(patch.dict(own_buffers(part), on_meta))
        for part in model.modules():
            if id(part) not in own:
                zeros: dict[str, nn.Parameter] = {}
                for name, parameter in own_parameters(part).items():
                    if parameter is not None and parameter.is_meta:
                        whole = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
                        zeros[name] = nn.Parameter(whole, parameter.requires_grad)
                puts_back.enter_context(patch.dict(own_parameters(part), zeros))
        yield
