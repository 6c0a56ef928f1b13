"""Weight gradients of linear layers, made in another way or at another time than autograd's.

:class:`Fusing` adds them up in the matrix product that makes them. Autograd writes each
microbatch's gradient as a matrix of its own and then adds it to ``.grad``; at width 1024 that takes
a fifth of the product's time. A matrix product can add to an earlier result as it goes
(Megatron-LM's gradient accumulation fusion). Only rounding differs.

:class:`Deferring` puts them off from ``I`` to ``W``. The backward of a linear layer is two
products: one gives the input's gradient, for which the stage before is waiting, the other the
weight's, for which no stage is waiting (Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section
2). The first is made at ``I``. The factors of the second are queued: the layer's input, which the
forward has kept anyway, and the gradient of its output. The same holds for packed experts
(:mod:`course_pp.step.grouped`). Other weights (of norms, embeddings, convolutions, a layer with a
hook on its weight or bias) get their gradients at ``I``: that is little work.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.forward_ad import unpack_dual
from torch.overrides import TorchFunctionMode

from course_pp.base.torch_private import (
    after_backward,
    backward_reaches,
    functions_are_redefined,
    has_hooks,
    hooks_on_saved_tensors,
    is_transformed,
    version_of,
)
from course_pp.step.grouped import grouped_product, grouped_weight_gradient

# Below, the addition is cheap, as the matrix is still in the cache, and a function of autograd in
# Python costs more.
_LARGE_BYTES = 1 << 20

_PART_OF = "part_of_parameter"

# Autograd has a lock for each sum; all of ours share one.
_ADDING = Lock()


class LinearMode(TorchFunctionMode):
    """While a forward runs inside, :meth:`linear` computes its linear layers: every
    ``torch.nn.functional.linear``; and :meth:`grouped` every
    :func:`course_pp.step.grouped.grouped_product`.

    It leaves alone layers whose weight is frozen, complex or itself computed (parametrised, say),
    tensor subclasses, sparse and nested tensors, weights of one dimension and biases of two, layers
    under the transforms of ``torch.func`` or under another mode, and layers inside
    ``torch.compile``, whose graph has no place for a Python function. It also leaves alone layers
    inside ``torch.utils.checkpoint``, which computes them again outside this mode, and must then
    save the same tensors.
    """

    def __enter__(self) -> "LinearMode":
        self._hooks = hooks_on_saved_tensors()
        super().__enter__()
        return self

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Any = None,
    ) -> Any:
        if func is F.linear and not torch.compiler.is_compiling():
            return self._linear_or_ordinary(*args, **(kwargs or {}))
        if func is grouped_product and self._may_compute(*args[:2]):
            return self.grouped(*args)
        return func(*args, **(kwargs or {}))

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute a layer whose weight wants a gradient.

        ``input`` is (rows, in), ``weight`` (out, in), ``bias`` (out,).
        """
        raise NotImplementedError

    def grouped(self, x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        """Compute a grouped product whose weights, (groups, in, out), want a gradient."""
        return grouped_product(x, weights, counts)

    def _linear_or_ordinary(
        self, input: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        tensors = (input, weight) if bias is None else (input, weight, bias)
        if (
            self._may_compute(*tensors)
            and input.dim() > 1
            and weight.dim() == 2
            and (bias is None or bias.shape == weight.shape[:1])
        ):
            rows = self.linear(input.reshape(-1, input.shape[-1]), weight, bias)
            if input.dim() == 2:
                return rows
            # The view is taken out here: a view that an autograd function itself returns may not be
            # changed in place.
            return rows.view(*input.shape[:-1], rows.shape[-1])
        return F.linear(input, weight, bias)

    def _may_compute(self, input: Tensor, weight: Tensor, *bias: Tensor) -> bool:
        tensors = (input, weight, *bias)
        return (
            torch.is_grad_enabled()
            and all(map(_is_plain, tensors))
            and all(tensor.is_leaf or hasattr(tensor, _PART_OF) for tensor in tensors[1:])
            and weight.requires_grad
            and not weight.is_complex()
            and hooks_on_saved_tensors() == self._hooks
            and not functions_are_redefined()
            and not is_transformed()
            and all(unpack_dual(tensor).tangent is None for tensor in tensors)
        )


def _whither(node: Any) -> Literal["into the sum", "out", "nowhere"]:
    """Return where the backward at work takes a gradient that comes to ``node``.

    The node adds up the gradients of one leaf. ``backward`` adds the gradient to the sum,
    ``torch.autograd.grad`` hands it out, and either may not ask for this leaf.
    """
    try:
        return "into the sum" if backward_reaches(node) else "nowhere"
    except RuntimeError:  # torch's answer if torch.autograd.grad was asked for this leaf
        return "out"


def part_of(parameter: Tensor, part: Tensor) -> Tensor:
    """Return ``part`` with the mark that it is made of ``parameter`` alone.

    The gradient of a marked tensor may wait for ``W``, as a parameter's.
    """
    setattr(part, _PART_OF, parameter)
    return part


def is_worth_fusing(module: nn.Module | None) -> bool:
    """Return whether ``module`` has a weight for which :class:`Fusing` is faster."""
    return module is not None and any(_is_large(p) for p in module.parameters() if p.dim() == 2)


class Fusing(LinearMode):
    """While a forward runs inside, its large linear layers will add their weight gradients up as
    they make them.

    Under autocast they are ordinary layers. So they are for ``torch.autograd.grad``, by which a
    stage may differentiate itself.
    """

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not _is_large(weight) or _is_autocast(input):
            return F.linear(input, weight, bias)
        return _FusedLinear.apply(input, weight, bias)


class _FusedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # Only the input's gradient needs the weight. If nobody wants it, the weight may be changed
        # in place before the backward, as with torch's own layer.
        ctx.save_for_backward(x, weight if ctx.needs_input_grad[0] else None)
        # Hooks on saved tensors may give back another tensor than the parameter.
        ctx.parameter = weight
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(
        ctx: Any, grad_output: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        of_x, _, of_bias = ctx.needs_input_grad
        of_weight = None
        match _whither(ctx.next_functions[1][0]):
            case "into the sum":
                of_weight = _add_product(ctx.parameter, grad_output, x)
            case "out":
                of_weight = grad_output.t() @ x
        grad_x = grad_output @ weight if of_x else None
        grad_bias = grad_output.sum(0) if of_bias else None
        return grad_x, of_weight, grad_bias


def _is_large(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() >= _LARGE_BYTES


class _Hold(Protocol):
    def release(self) -> None: ...


class _Meter(Protocol):  # of course_pp.runtime.memory
    def hold(self, value: Any, kind: Literal["activation", "queued"], /) -> _Hold: ...


@dataclass(frozen=True, slots=True)
class _Entry:
    weight: Tensor
    bias: Tensor | None
    input: Tensor
    grad_output: Tensor
    counts: Tensor | None
    versions: tuple[int, ...]
    holds: tuple[_Hold, ...]

    def product(self) -> Tensor | None:
        """Return the weight's gradient; None if it is already added to the weight's ``.grad``."""
        if self.counts is None:
            return _add_product(self.weight, self.grad_output, self.input)
        return grouped_weight_gradient(self.input, self.grad_output, self.counts)


class WeightGradients:
    """The queue of one microbatch in one stage."""

    def __init__(self, meter: _Meter | None = None) -> None:
        self._meter = meter
        self._entries: list[_Entry] = []
        self._open = False

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Run ``I`` inside, which fills the queue until :meth:`compute`.

        A backward outside, as a stage may run in its forward, computes its entries at its end.
        """
        self._open = True
        try:
            yield
        finally:
            self._open = False

    def add(
        self,
        weight: Tensor,
        bias: Tensor | None,
        x: Tensor,
        grad_output: Tensor,
        counts: Tensor | None = None,
    ) -> None:
        """Queue the product of a layer, or of groups of rows with their ``counts``."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a stage runs a backward with create_graph=True in its forward, and a split"
                " backward keeps no graph of the weights' gradients: use a schedule that does not"
                " split it, such as 1f1b"
            )
        if not self._open and not self._entries:
            after_backward(self.compute)
        holds: tuple[_Hold, ...] = ()
        if self._meter is not None:
            holds = (self._meter.hold(x, "activation"), self._meter.hold(grad_output, "queued"))
        versions = version_of(x), version_of(grad_output)
        self._entries.append(_Entry(weight, bias, x, grad_output, counts, versions, holds))

    def compute(self) -> None:
        """Compute the queued gradients and add each to its ``.grad``, as a backward would."""
        leaves: list[Tensor] = []
        gradients: list[Tensor] = []
        with torch.no_grad():
            for entry in self._entries:
                weight, rows = entry.weight, entry.grad_output
                # Autograd checks its own saved tensors in the same way.
                versions = version_of(entry.input), version_of(rows)
                if versions != entry.versions:
                    raise RuntimeError(
                        f"the input of a linear layer, {tuple(entry.input.shape)}, or the gradient"
                        " of its output, has been changed in place before its weight gradient was"
                        " computed: give the layer a copy (clone), or use a schedule that does not"
                        " split the backward, such as 1f1b"
                    )
                if weight.requires_grad and (product := entry.product()) is not None:
                    leaves.append(weight)
                    gradients.append(product.to(weight.dtype))
                if entry.bias is not None and entry.bias.requires_grad:
                    leaves.append(entry.bias)
                    gradients.append(rows.sum(0).to(entry.bias.dtype))
                for hold in entry.holds:
                    hold.release()
        self._entries.clear()
        if leaves:
            torch.autograd.backward(leaves, gradients)


class Deferring(LinearMode):
    """While a forward runs inside, its linear layers will queue their weight gradients."""

    def __init__(self, queue: WeightGradients) -> None:
        super().__init__()
        self._queue = queue
        # Makes outputs require a gradient in place of the weights, whose hooks autograd would call
        # at I, without a gradient.
        self._anchor = torch.empty(0, requires_grad=True)

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # A hook wants the whole gradient at once, and another use of the parameter may make a part
        # of it at I.
        if has_hooks(weight) or (bias is not None and has_hooks(bias)):
            return F.linear(input, weight, bias)
        x = _as_autocast_would(input)
        return _DeferredLinear.apply(x, self._anchor, (weight, bias), self._queue)

    def grouped(self, x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        if has_hooks(getattr(weights, _PART_OF, weights)) or _is_autocast(x):
            return grouped_product(x, weights, counts)
        return _DeferredProduct.apply(x, self._anchor, (weights, counts), self._queue)


class _DeferredLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        anchor: Tensor,
        layer: tuple[Tensor, Tensor | None],
        queue: WeightGradients,
    ) -> Tensor:
        weight, bias = layer
        # The weight is saved for autograd's check that nobody changed it. Hooks may give back
        # another tensor, so the parameter itself is kept too.
        ctx.save_for_backward(x, weight if ctx.needs_input_grad[0] else None)
        ctx.layer, ctx.queue = layer, queue
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, None, None, None]:
        x, _ = ctx.saved_tensors
        weight, _ = ctx.layer
        # Input 1 is the anchor; the weight is no part of the graph.
        if _whither(ctx.next_functions[1][0]) == "into the sum":
            ctx.queue.add(*ctx.layer, x, grad_output)
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = grad_output @ weight.to(grad_output.dtype)
        return of_x, None, None, None


class _DeferredProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor, groups: tuple[Tensor, Tensor], queue: WeightGradients
    ) -> Tensor:
        weights, _ = groups
        ctx.save_for_backward(x, weights if ctx.needs_input_grad[0] else None)
        ctx.groups, ctx.queue = groups, queue
        return grouped_product(x, *groups)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, None, None, None]:
        x, saved = ctx.saved_tensors
        weights, counts = ctx.groups
        grad_output = grad_output.contiguous()  # as the kernel needs it
        if _whither(ctx.next_functions[1][0]) == "into the sum":
            ctx.queue.add(weights, None, x, grad_output, counts)
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = grouped_product(grad_output, saved.transpose(1, 2), counts)
        return of_x, None, None, None


def _as_autocast_would(x: Tensor) -> Tensor:
    """Return the input in the dtype of the product, by a cast that autograd sees."""
    if _is_autocast(x) and x.is_floating_point() and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(x.device.type))
    return x


def _is_autocast(tensor: Tensor) -> bool:
    """Return whether layers on the device of ``tensor`` compute in a dtype of autocast."""
    device = tensor.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def _add_product(parameter: Tensor, grad_output: Tensor, input: Tensor) -> Tensor | None:
    """Add ``grad_output.T @ input``, (rows, out) and (rows, in), to ``parameter.grad`` in the
    product that makes it.

    Returns:
        None; or the product, if autograd must add it. Autograd must do so for the first gradient,
        with several dtypes, if the gradient will be differentiated or searched for NaN, and if a
        hook needs this microbatch's gradient: a hook on the parameter, or on the node of autograd's
        graph that adds up its gradients.
    """
    with _ADDING:
        grad = parameter.grad
        if (
            grad is not None
            and grad_output.dtype == input.dtype == grad.dtype
            and _can_add(parameter, grad)
        ):
            # Not addmm_, which torch's FlopCounterMode does not know.
            torch.addmm(grad, grad_output.t(), input, out=grad)
            return None
    return grad_output.t() @ input


def _can_add(parameter: Tensor, grad: Tensor) -> bool:
    if (
        torch.is_grad_enabled()
        or torch.is_anomaly_enabled()
        or not parameter.requires_grad
        or has_hooks(parameter)
    ):
        return False
    if grad.is_cuda:
        # On two streams autograd would make one wait for the other.
        device = grad.device
        if torch.cuda.current_stream(device) != torch.cuda.default_stream(device):
            return False
    return _is_plain(grad) and _references(parameter) <= _UNHELD


def _references(parameter: Tensor) -> int:
    """Count Python's references to the node that adds up the gradients of ``parameter``.

    A library that gathers gradients in buckets hooks that node. Nobody can see such a hook, but the
    library holds the node, or the hook would be lost.
    """
    with torch.inference_mode(False), torch.enable_grad():
        node = parameter.view_as(parameter).grad_fn
    assert node is not None
    return sys.getrefcount(node.next_functions[0][0])


def _is_plain(tensor: Tensor) -> bool:
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_nested
    )


with torch.inference_mode(False):
    _UNHELD = _references(torch.empty(0, device="cpu", requires_grad=True))
