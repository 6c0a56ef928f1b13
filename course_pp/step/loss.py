"""The loss of a batch, put together from its microbatches. A loss is divided here and nowhere else.

The mean of the microbatches' means is the mean of the batch only if all of them average over
equally many tokens. So each microbatch adds its sum over the divisor, which is the same for all:
the number of all tokens of the batch.

:func:`attach_loss` is for a loss that arises in the middle of the model, and weighs it in the same
way.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from course_pp.base.arguments import checked
from course_pp.base.torch_private import is_in_backward
from course_pp.step.hooks import is_dtensor
from course_pp.step.values import tensors_of

LossFn = Callable[[Any, Any], Tensor]
"""``loss_fn(output, target)``: a scalar, the mean loss of one microbatch."""


@runtime_checkable
class TokenLoss(Protocol):
    """A loss that averages over tokens and counts them, so that each microbatch gets its weight."""

    def total(self, output: Any, target: Any) -> Tensor:
        """Return the sum of the loss over the tokens of ``target`` that count; a scalar."""

    def count(self, target: Any) -> Tensor:
        """Return the number of tokens of ``target`` that count; a scalar."""


class Share(NamedTuple):
    """A microbatch's share of the mean loss of its batch: ``value`` times ``weight``.

    The product needs no place in autograd's graph: backward begins at ``value``, with ``weight`` as
    its gradient.
    """

    value: Tensor
    weight: Tensor

    def product(self) -> Tensor:
        """Return a scalar without a graph."""
        return self.value.detach() * self.weight


@dataclass(frozen=True)
class _OverSamples:
    """A mean over samples, seen as a :class:`TokenLoss`: each sample is a token."""

    loss_fn: LossFn
    samples: Callable[[Any], int]

    def total(self, output: Any, target: Any) -> Tensor:
        return self.mean(output, target) * self.samples(target)

    def mean(self, output: Any, target: Any) -> Tensor:
        return _scalar(self.loss_fn(output, target))

    def count(self, target: Any) -> Any:
        return self.samples(target)


@checked
def counted(loss_fn: LossFn | TokenLoss, samples: Callable[[Any], int] = len) -> TokenLoss:
    """Return ``loss_fn`` if it counts tokens, else as a :class:`TokenLoss` that counts samples."""
    # A class can be called, but returns a loss function.
    if isinstance(loss_fn, type):
        raise TypeError(
            f"loss_fn is the class {loss_fn.__name__}: pass an instance, such as"
            f" {loss_fn.__name__}()"
        )
    if isinstance(loss_fn, TokenLoss):
        return loss_fn
    if not callable(loss_fn):
        raise TypeError(
            f"loss_fn is {loss_fn!r}: pass a function of (output, target) that returns the mean"
            " loss, or a TokenLoss"
        )
    return _OverSamples(loss_fn, samples)


def divisor_of(
    counts: Iterable[Any],
    given: float | None,
    groups: Sequence[dist.ProcessGroup],
    device: torch.device | None = None,
) -> Tensor | float:
    """Return the divisor of the microbatches' sums; unless ``given``, a collective of ``groups``.

    Data-parallel ranks average their gradients, so the divisor is the number of tokens of the
    global batch divided by the number of these ranks.

    Args:
        counts: the counted tokens of each microbatch, or of all at once.
        given: the tokens of the global batch, if the caller knows them.
        groups: the groups over which gradients are averaged.
    """
    if given is not None:
        return given / math.prod(dist.get_world_size(group) for group in groups)
    count = sum(counts)
    if not groups and not isinstance(count, Tensor):
        return float(max(count, 1))
    # A copy, because the mean over ranks is taken in place, and the caller may keep its counts.
    count = average_over(groups, torch.as_tensor(count, dtype=torch.float64, device=device).clone())
    # A batch without a counted token has loss 0, not 0 / 0.
    return torch.where(count > 0, count, 1.0)


def average_over(groups: Iterable[dist.ProcessGroup], value: Tensor) -> Tensor:
    """Change ``value`` to its mean over the ranks of all ``groups`` and return it; a collective."""
    # Group after group: together the groups span all data-parallel ranks.
    for group in groups:
        dist.all_reduce(value, group=group)
        value /= dist.get_world_size(group)
    return value


def weights_of(
    counts: Iterable[Any], divisor: Tensor | float, device: torch.device | None = None
) -> Tensor:
    """Return each microbatch's weight, its counted tokens over the divisor, (n,) float64."""
    tensors = [torch.as_tensor(count, dtype=torch.float64, device=device) for count in counts]
    numbers = torch.stack(tensors)
    return numbers / divisor


def loss_share(loss: TokenLoss, output: Any, target: Any, divisor: Tensor | float) -> Tensor:
    """Return a microbatch's share of the mean loss of its batch, a scalar.

    Args:
        divisor: the sum of ``loss.count`` over all microbatches whose gradients add up, at least 1.
    """
    with _naming_the_loss_of_cut_logits(loss, output):
        return _scalar(loss.total(output, target)) / divisor


def share_of(loss: TokenLoss, output: Any, target: Any, divisor: Tensor | float) -> Share:
    """Return :func:`loss_share` as a :class:`Share`, whose division is left to the backward."""
    with _naming_the_loss_of_cut_logits(loss, output):
        # A mean over samples is differentiated as the caller wrote it, and its count goes into the
        # weight: the mean times the count could overflow in float16.
        if isinstance(loss, _OverSamples):
            value = loss.mean(output, target)
            counts = loss.count(target)
        else:
            value = _scalar(loss.total(output, target))
            counts = 1
    # A loss may be a whole number, as a count of errors is. Its weight is a fraction.
    dtype = value.dtype if value.is_floating_point() else torch.get_default_dtype()
    if isinstance(divisor, Tensor):
        return Share(value, (counts / divisor.double()).to(value.device, dtype))
    return Share(value, torch.full_like(value, counts / divisor, dtype=dtype))


@contextmanager
def _naming_the_loss_of_cut_logits(loss: TokenLoss, output: Any) -> Iterator[None]:
    """Name the loss for logits that tensor parallelism cut, if another loss fails on them."""
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        # DTensor raises these two classes. A subclass has another cause, as OutOfMemoryError has.
        may_be_dtensor = type(error) in (RuntimeError, NotImplementedError)
        is_cut = any(is_dtensor(part) for part in tensors_of(output))
        if not is_cut or not may_be_dtensor or getattr(loss, "takes_cut_logits", False):
            raise
        raise ValueError(
            "the loss function failed on logits of which each tensor rank holds a part, in a"
            " DTensor (gather_logits=False): take course_pp.parallel.VocabParallelCrossEntropy(),"
            " which is made for them, or leave gather_logits at True; it said"
            f" {type(error).__name__}: {error}"
        ) from error


def _scalar(loss: Any) -> Tensor:
    if isinstance(loss, Tensor) and not loss.dim():
        return loss
    raise ValueError(
        f"loss_fn returned {_shape_or_class(loss)}: return a scalar tensor, the mean over the"
        " microbatch"
    )


def _shape_or_class(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"


_FORWARD: ContextVar["Attached | None"] = ContextVar("the forward at work", default=None)


def attach_loss(tensor: Tensor, loss: Tensor, name: str) -> Tensor:
    """Return ``tensor`` unchanged; where its gradient comes back, the gradient of ``loss`` is added
    to the step.

    For a loss in the middle of a model, such as a router's or an auxiliary head's::

        hidden = attach_loss(hidden, 0.01 * balance, name=f"router {self.layer}")

    Call it in a module's forward, under either engine and any schedule. The gradient is that of
    weight × ``loss``, where the weight is the microbatch's share of its batch: its counted tokens
    over those of the global batch, or samples if the loss at the end does not count tokens
    (``step``'s ``divisor``, if that is given). So ``loss`` should be a mean over the microbatch.
    One process gets the same gradients from

        ``sum over microbatches of weight × (loss at the end + attached losses)``

    With ``versions=`` in ``runtime``, where an update takes a microbatch's own mean, the weight is
    1. Outside the two engines it is 1 too: a plain ``loss.backward()`` of the whole batch adds the
    attached loss once.

    After a step ``pipeline.attached`` is ``{name: sum of weight × loss}``, the same on every rank.
    Without gradients (``eval``, ``evaluate``, ``torch.no_grad``) nothing is attached. A recomputed
    forward counts once. In ``parallel`` the ranks agree in a pipeline's first step whether any
    stage attaches a loss: for a loss that begins later, attach 0 × loss before. A pipeline's
    ``scaler`` scales attached losses too.

    Args:
        tensor: a floating-point tensor on which the module's output depends.
        loss: a scalar with a gradient.
        name: used once in a microbatch, in one stage.

    Raises:
        ValueError: for anything else, on every rank (StepFailed in ``runtime``).
    """
    if not torch.is_grad_enabled():
        return tensor
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "attach_loss in a traced or compiled module: compile or export what is around it"
        )
    attached = _FORWARD.get()
    if attached is None:
        # Without an engine the weight is 1. A forward within a backward belongs to a checkpoint,
        # which throws this graph away: no weight is known there, and none is needed.
        attached = Attached(None if is_in_backward() else 1.0)
    return attached.add(tensor, loss, name)


class Attached:
    """The losses that one forward of a microbatch attaches: enter it around the forward.

    Args:
        refusal: the reason to refuse every attached loss, if there is one.
        keeps_problem: keep the first problem for :meth:`sums` instead of raising it.

    Attributes:
        weight: the microbatch's weight in its batch, set before the backward.
        values: the losses by name, without graphs.
        problem: the first problem, if ``keeps_problem``.
    """

    def __init__(
        self, weight: Tensor | float | None = None, refusal: str = "", keeps_problem: bool = False
    ) -> None:
        self.weight = weight
        self.values: dict[str, Tensor] = {}
        self.problem = ""
        self._lacking: set[str] = set()  # names whose gradient has not come yet
        self._refusal = refusal
        self._keeps_problem = keeps_problem

    def __enter__(self) -> None:
        self._token = _FORWARD.set(self)

    def __exit__(self, *_: object) -> None:
        _FORWARD.reset(self._token)

    def add(self, tensor: Tensor, loss: Tensor, name: str) -> Tensor:
        """Attach ``loss`` to ``tensor``, as :func:`attach_loss`."""
        if problem := self._refusal or self._problem_of(tensor, loss, name):
            problem = f"attach_loss(name={name!r}): {problem}"
            if not self._keeps_problem:
                raise ValueError(problem)
            self.problem = self.problem or problem
            return tensor
        self.values[name] = loss.detach()
        self._lacking.add(name)
        attached: Tensor = _Attach.apply(tensor, loss, self, name)
        return attached

    def gradient(self, name: str) -> Tensor | float:
        """Return the gradient of the loss ``name``, in its backward."""
        if self.weight is None:
            raise RuntimeError(
                f"attach_loss(name={name!r}) in a reentrant checkpoint, or in a forward that goes"
                " backward itself: its weight is not known there; use checkpoint(...,"
                " use_reentrant=False), or attach it outside"
            )
        self._lacking.discard(name)
        return self.weight

    def sums(self) -> tuple[dict[str, Tensor], str]:
        """Return weight × value by name, and the problem or "", when the backward is done."""
        problem = self.problem
        for name in sorted(self._lacking):
            problem = problem or (
                f"attach_loss(name={name!r}): no gradient came back through its tensor, so it did"
                " not count: attach it to what the loss at the end depends on"
            )
        # None after a forward without a backward, whose losses do not count.
        weight = 0.0 if self.weight is None else self.weight
        products = {name: value.double() * weight for name, value in self.values.items()}
        return products, problem

    def _problem_of(self, tensor: Tensor, loss: Tensor, name: str) -> str:
        if not isinstance(name, str):
            return "the name is a string"
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            given = str(tensor.dtype) if isinstance(tensor, Tensor) else type(tensor).__name__
            return (
                f"tensor is {given}: attach to a tensor of floating point, which carries gradients"
            )
        if not isinstance(loss, Tensor) or loss.dim():
            given = _shape_or_class(loss)
            return f"loss is {given}: give a scalar tensor, a mean over the microbatch"
        if not loss.requires_grad:
            return (
                "loss has no gradient: compute it of trained weights or what they made, not"
                " detached"
            )
        if name in self.values:
            return "the name is used twice in this microbatch: give each loss its own"
        return ""


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, loss: Tensor, attached: Attached, name: str) -> Tensor:
        ctx.attached = attached
        ctx.name = name
        ctx.dtype, ctx.device = loss.dtype, loss.device
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        weight = ctx.attached.gradient(ctx.name)
        weight = torch.as_tensor(weight, dtype=ctx.dtype, device=ctx.device)
        # A copy, as autograd may add other gradients to it in place.
        return gradient, weight.clone(), None, None


Sums = dict[str, tuple[int, Any]]
"""For each name of an attached loss, the stage that attaches it and the sum so far."""


def attached_sums(stages: Mapping[int, Iterable[Attached]]) -> Sums:
    """Return the sums of this rank's attached losses; raise ValueError for the first problem."""
    found: Sums = {}
    for stage, microbatches in stages.items():
        for attached in microbatches:
            sums, problem = attached.sums()
            if problem:
                raise ValueError(f"stage {stage}: {problem}")
            found = added_sums(found, {name: (stage, value) for name, value in sums.items()})
    return found


def added_sums(one: Sums, other: Sums) -> Sums:
    """Add the sums of two ranks or microbatches; refuse a name that two stages use."""
    total = dict(one)
    for name, (stage, value) in other.items():
        where, earlier = total.get(name, (stage, 0))
        if where != stage:
            raise ValueError(
                f"attach_loss(name={name!r}) in stages {where} and {stage}: give each loss its own"
                " name"
            )
        total[name] = (stage, earlier + value)
    return total
