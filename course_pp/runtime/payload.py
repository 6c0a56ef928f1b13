"""A value between stages as the bytes of a message: tensors, and tuples, lists and dicts of them.

A value is taken apart into its tensors and a skeleton in which each tensor is a :class:`Slot`.
Skeleton, shapes and dtypes make up the :class:`Spec`, which the receiver needs to read the bytes.
The spec is sent only when it changes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Every tensor starts at an address at which any dtype may start and vector instructions are fast.
_ALIGNMENT = 64
_PLAIN = (Tensor, torch.nn.Parameter)


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of tensor number ``index`` in a skeleton."""

    index: int


class Kind(NamedTuple):
    """The properties of a tensor that its bytes do not tell."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    differentiable: bool


@dataclass(frozen=True)
class Spec:
    """The description of a value that a receiver needs to read its bytes.

    Attributes:
        skeleton: the value with a :class:`Slot` in place of each tensor.
        kinds: the tensors' dtypes and shapes, in order.
    """

    skeleton: object
    kinds: tuple[Kind, ...]

    @cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """The start and the end of each tensor's bytes."""
        places = []
        start = 0
        for kind in self.kinds:
            end = start + prod(kind.shape) * kind.dtype.itemsize
            places.append((start, end))
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
        return tuple(places)

    def is_same(self, other: "Spec") -> bool:
        """Return whether values of both are read alike."""
        # By repr, as == does not tell 1, 1.0 and True in a skeleton apart.
        return self.kinds == other.kinds and repr(self.skeleton) == repr(other.skeleton)

    @cached_property
    def form(self) -> type | None:
        """``Tensor`` for a tensor alone, ``tuple`` for a tuple of one tensor, else None."""
        return {"Slot(index=0)": Tensor, "(Slot(index=0),)": tuple}.get(repr(self.skeleton))

    @cached_property
    def nbytes(self) -> int:
        if not self.places:
            return 0
        _, end = self.places[-1]
        return end


NOTHING = Spec(None, ())
"""The spec of None, which a receiver expects before the first message."""


def flatten(value: Any) -> tuple[object, list[Tensor]]:
    """Return the skeleton and the tensors of ``value``; refuse as :func:`map_plain` does."""
    tensors: list[Tensor] = []

    def slot(tensor: Tensor) -> Slot:
        tensors.append(tensor)
        return Slot(len(tensors) - 1)

    return map_plain(slot, value), tensors


def plain_tensors(value: Any) -> list[Tensor]:
    """Return the tensors of ``value``, in order; raise TypeError as :func:`map_plain` does."""
    return [value] if isinstance(value, Tensor) else flatten(value)[1]


def map_plain(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Apply ``function`` to each tensor in a value that crosses a boundary between stages.

    Containers become plain, as a receiver may not have their classes: a mapping becomes a dict, a
    named tuple a tuple. This holds between stages of one rank, too. Any other object is a
    TypeError. :mod:`course_pp.step.values` has the other rules.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: map_plain(function, each) for key, each in value.items()}
    if isinstance(value, tuple | list):
        each_mapped = (map_plain(function, each) for each in value)
        return list(each_mapped) if isinstance(value, list) else tuple(each_mapped)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(
        f"a {type(value).__name__} cannot cross a stage boundary: return tensors, tuples, lists or"
        " dicts of tensors, numbers, strings or None"
    )


def describe(value: Any) -> tuple[Spec, list[Tensor]]:
    """Return the spec of ``value`` and its tensors.

    Raises:
        TypeError: for a subclass of Tensor, of which only the numbers would arrive; and as
            :func:`map_plain` does.
    """
    skeleton, tensors = flatten(value)
    for tensor in tensors:
        if type(tensor) not in _PLAIN:
            raise TypeError(
                f"a {type(tensor).__name__} cannot cross a stage boundary: return a plain tensor,"
                " such as a DTensor's .full_tensor() or .to_local()"
            )
    kinds = tuple([Kind(t.dtype, tuple(t.shape), t.requires_grad) for t in tensors])
    return Spec(skeleton, kinds), tensors


def only_tensor(spec: Spec, value: Any) -> Tensor | None:
    """Return the only tensor of a value that fits ``spec``; None if it does not fit or has more.

    Most values are one tensor, and need no description then.
    """
    if type(value) is not spec.form:
        return None
    tensor = value
    if isinstance(value, tuple) and len(value) == 1:
        tensor = value[0]
    if type(tensor) is not Tensor:
        return None
    if (tensor.dtype, tensor.shape, tensor.requires_grad) != spec.kinds[0]:
        return None
    return tensor


def places_in(spec: Spec, buffer: Tensor) -> list[Tensor]:
    """Return the value's tensors as views of ``buffer``, uint8 and of at least ``spec.nbytes``."""
    views = []
    for kind, (start, end) in zip(spec.kinds, spec.places, strict=True):
        views.append(buffer[start:end].view(kind.dtype).view(kind.shape))
    return views


def pack(spec: Spec, tensors: list[Tensor], buffer: Tensor) -> None:
    """Copy the tensors of a value to their places in ``buffer``."""
    for place, tensor in zip(places_in(spec, buffer), tensors, strict=True):
        place.copy_(tensor.detach())


def unpack(spec: Spec, buffer: Tensor, device: torch.device) -> Any:
    """Return the value in ``buffer``, whose memory its tensors use if it is on ``device``."""
    if spec.form is not None and device == buffer.device:
        # One tensor may be a view, which is the fastest way.
        dtype, shape, differentiable = spec.kinds[0]
        tensor = buffer[: spec.nbytes].view(dtype).view(shape)
        if differentiable:
            tensor.requires_grad_()
        return tensor if spec.form is Tensor else (tensor,)

    def read(kind: Kind, start: int) -> Tensor:
        # No view of the buffer: views share autograd's version counter, and a change in place of
        # one would spoil the others.
        tensor = torch.empty(0, dtype=kind.dtype, device=buffer.device)
        first = start // kind.dtype.itemsize
        # Strides have a default, which the stub does not know.
        tensor.set_(buffer.untyped_storage(), first, kind.shape)  # type: ignore[call-overload]
        tensor = tensor.to(device)
        return tensor.requires_grad_() if kind.differentiable else tensor

    tensors = []
    for kind, (start, _) in zip(spec.kinds, spec.places, strict=True):
        tensors.append(read(kind, start))
    return _fill(spec.skeleton, tensors)


def _fill(skeleton: Any, tensors: list[Tensor]) -> Any:
    if isinstance(skeleton, Slot):
        return tensors[skeleton.index]
    if isinstance(skeleton, dict):
        return {key: _fill(each, tensors) for key, each in skeleton.items()}
    if isinstance(skeleton, list):
        return [_fill(each, tensors) for each in skeleton]
    if isinstance(skeleton, tuple):
        return tuple(_fill(each, tensors) for each in skeleton)
    return skeleton
