"""One way to replace a module's ``forward``, whether it is recomputed, compiled, in half precision, or carries values.

A replacement keeps what it replaced, so several lie one around the other. Unlike a wrapper module, it changes neither
the parameters' names nor the module's class. Hooks of the module, such as FSDP2's, run around it: once, and not again
in a recomputation. (``nn.Module.compile`` would put hooks into the graph.)

Half precision is for ranks without FSDP2, while parameters stay in float32:

    what arrives ─► float32 ─► forward, products in half precision ─► half precision ─► what is sent

FSDP2 gathers parameters in half precision (:func:`default_mp_policy`). Without it each product casts its operands
(``torch.autocast``), and norms, softmax and the residual stream inside a stage stay in float32. Both send half
precision, and add the gradients of microbatches up in float32, so they differ by rounding alone. Memory differs:
autocast keeps copies of the weights for each microbatch in flight, FSDP2 one copy for all.

Micikevicius et al. 2018, "Mixed Precision Training", arXiv:1710.03740.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from course_pp.arguments import checked
from course_pp.parallel._torch import mixed_precision, tree_flatten, tree_map


class Replaced:
    """A replacement of a module's ``forward``; ``forward`` is what it had before."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Compute what the module returns."""
        raise NotImplementedError

    def put_on(self, module: nn.Module) -> None:
        """Make it the module's forward. (torch.compile would compile anew for each callable object.)"""
        module.forward = self.run

    def in_copy(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return what takes its place in a copy on the meta device: there, how a result is computed does not matter."""
        return forward


def replaced_forwards(forward: Any) -> Iterator[Replaced]:
    """Return the replacements around a module's forward, outermost first; none if it is the module's own."""
    while isinstance(replaced := getattr(forward, "__self__", None), Replaced):
        yield replaced
        forward = replaced.forward


def has_replaced(module: nn.Module, kind: type[Replaced]) -> bool:
    """Return whether the forward of ``module``, or of a part of it, is of this kind."""
    return any(isinstance(each, kind) for part in module.modules() for each in replaced_forwards(part.forward))


class Compiled(Replaced):
    """Runs what ``torch.compile`` makes of it, when it first runs."""

    def __init__(self, forward: Callable[..., Any], backend: str) -> None:
        super().__init__(forward)
        self._compiled = torch.compile(forward, backend=backend)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        return self._compiled(*args, **kwargs)


class Recomputed(Replaced):
    """Keeps only its arguments, and is run again in backward."""

    def put_on(self, module: nn.Module) -> None:
        super().put_on(module)
        self._module = module

    def run(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        for name in ("past_key_values", "layer_past"):
            if kwargs.get(name) is not None:
                raise ValueError(
                    f"{name} is a {type(kwargs[name]).__name__}, which recomputing a checkpointed block would fill "
                    "again: train with use_cache=False (model.config.use_cache = False)"
                )
        options: dict[str, Any] = {}
        if not torch.compiler.is_compiling() and next(self._module.buffers(), None) is not None:
            options["context_fn"] = _Buffers(self._module).contexts
        return checkpoint(self.forward, *args, use_reentrant=False, **options, **kwargs)


class _Buffers:
    """The buffers of a module as one forward found them; its recomputation uses these and leaves the module's own.

    Otherwise BatchNorm would count each microbatch twice, and a spectral norm be recomputed from a later value.
    """

    def __init__(self, module: nn.Module) -> None:
        self._parts = [part for part in module.modules() if part._buffers]
        self._before: list[tuple[nn.Module, dict[str, Tensor]]] = []

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return self._noted(), self._put_back()

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Keep copies of the buffers that the forward inside changes."""
        there = [(part, {n: b for n, b in part._buffers.items() if b is not None}) for part in self._parts]
        versions = [[buffer._version for buffer in buffers.values()] for _, buffers in there]
        copies = [(part, {name: buffer.clone() for name, buffer in buffers.items()}) for part, buffers in there]
        yield
        for copied, (part, buffers), before in zip(copies, there, versions, strict=True):
            # BatchNorm counts its batches in the open, but changes its statistics behind autograd's back.
            changed = any(part._buffers.get(name) is not buffer for name, buffer in buffers.items())
            if changed or [buffer._version for buffer in buffers.values()] != before:
                self._before.append(copied)

    @contextmanager
    def _put_back(self) -> Iterator[None]:
        """Let the forward inside find those buffers, and change copies of them."""
        now = [(part, dict(part._buffers)) for part, _ in self._before]
        for part, buffers in self._before:
            part._buffers.update({name: buffer.clone() for name, buffer in buffers.items()})
        try:
            yield
        finally:
            for part, held in now:
                part._buffers.update(held)


class HalfPrecision(Replaced):
    """Computes in bfloat16 or float16, under autocast, on float32 and to half precision."""

    def __init__(self, forward: Callable[..., Any], dtype: torch.dtype) -> None:
        super().__init__(forward)
        self.dtype = dtype

    def in_copy(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        return HalfPrecision(forward, self.dtype).run

    def run(self, *args: Any, **kwargs: Any) -> Any:
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

    Args:
        module: any, with parameters in float32.
        dtype: bfloat16 or float16. A no-op for what the parameters are in, or FSDP2 computes in already.
    """
    now = compute_dtype(module)
    if now == dtype:
        return
    if dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"compute_in(..., {dtype}): compute in torch.bfloat16 or torch.float16, or in {now} as it is")
    if now != torch.float32:
        raise ValueError(
            f"a {type(module).__name__} that computes in {now} cannot compute in {dtype}: keep its parameters in "
            "float32, or under FSDP2 give apply_fsdp2 the policy default_mp_policy(dtype)"
        )
    HalfPrecision(module.forward, dtype).put_on(module)


def compute_dtype(module: nn.Module) -> torch.dtype:
    """Return what a module computes in and sends: that of mixed precision, else its parameters'."""
    return next(iter(compute_dtypes(module)), torch.get_default_dtype())


def compute_dtypes(module: nn.Module) -> tuple[torch.dtype, ...]:
    """Return what a module computes in: that of mixed precision, else its parameters' dtypes, each once, in order."""
    policy = mixed_precision(module)
    mixed = _half_precision(module) if policy is None else policy.output_dtype or policy.param_dtype
    if mixed is not None:
        return (mixed,)
    return tuple(dict.fromkeys(p.dtype for p in module.parameters() if p.is_floating_point()))


def casts_inputs(module: nn.Module) -> bool:
    """Return whether mixed precision casts what a module is called with."""
    policy = mixed_precision(module)
    if policy is None:
        return _half_precision(module) is not None
    return policy.param_dtype is not None and policy.cast_forward_inputs


def _half_precision(module: nn.Module) -> torch.dtype | None:
    around = replaced_forwards(module.forward)
    return next((each.dtype for each in around if isinstance(each, HalfPrecision)), None)


def spelled(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(sorted(map(str, dtypes))) or "no dtype, as it has no parameters"
