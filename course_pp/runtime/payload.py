"""A value between stages as the bytes of a message: tensors, and tuples, lists and dicts of them.

A value is taken apart into its tensors and a skeleton in which each tensor is a :class:`Slot`.
Skeleton, shapes and dtypes are the :class:`Spec` that the receiver needs to read the bytes; it is
sent only when it changes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Every tensor starts where any dtype may start, and where vector instructions like it.
_ALIGNMENT = 64
_PLAIN = (Tensor, torch.nn.Parameter)


@dataclass(frozen=True, slots=True)
class Slot:
    """Stands for tensor number ``index`` in a skeleton."""

    index: int


class Kind(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    differentiable: bool


@dataclass(frozen=True)
class Spec:
    """How to read a value's bytes."""

    skeleton: object
    kinds: tuple[Kind, ...]

    @cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """For each tensor where its bytes start and end."""
        places, start = [], 0
        for kind in self.kinds:
            end = start + prod(kind.shape) * kind.dtype.itemsize
            places.append((start, end))
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
        return tuple(places)

    def is_same(self, other: "Spec") -> bool:
        """Return whether values of both are read alike. Unlike ``==``, it tells 1, 1.0 and True in a skeleton apart."""
        return self.kinds == other.kinds and repr(self.skeleton) == repr(other.skeleton)

    @cached_property
    def form(self) -> type | None:
        """``Tensor`` if the value is one alone, ``tuple`` if it is one in a tuple, else None."""
        return {"Slot(index=0)": Tensor, "(Slot(index=0),)": tuple}.get(repr(self.skeleton))

    @cached_property
    def nbytes(self) -> int:
        return self.places[-1][1] if self.places else 0


NOTHING = Spec(None, ())
"""The spec of None: what a receiver expects before it has heard anything."""


def flatten(value: Any) -> tuple[object, list[Tensor]]:
    """Return the skeleton and the tensors of ``value``; raise TypeError as :func:`map_plain` does."""
    tensors: list[Tensor] = []

    def slot(tensor: Tensor) -> Slot:
        tensors.append(tensor)
        return Slot(len(tensors) - 1)

    return map_plain(slot, value), tensors


def plain_tensors(value: Any) -> list[Tensor]:
    """Return the tensors of ``value``, in order; raise TypeError as :func:`map_plain` does."""
    return [value] if isinstance(value, Tensor) else flatten(value)[1]


def map_plain(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Apply ``function`` to each tensor in a value that crosses a boundary; refuse what cannot
    cross.

    Containers become plain, as a receiver may not have their classes: a mapping a dict, a named
    tuple a tuple. So it is for a stage of the same rank, too. :mod:`course_pp.step.values` has the
    other rules.
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
    """Return the spec of ``value`` and its tensors; raise TypeError for a subclass: only its numbers would arrive."""
    skeleton, tensors = (Slot(0), [value]) if isinstance(value, Tensor) else flatten(value)
    for tensor in tensors:
        if type(tensor) not in _PLAIN:
            raise TypeError(
                f"a {type(tensor).__name__} cannot cross a stage boundary: return a plain tensor,"
                " such as a DTensor's .full_tensor() or .to_local()"
            )
    kinds = tuple([Kind(t.dtype, tuple(t.shape), t.requires_grad) for t in tensors])
    return Spec(skeleton, kinds), tensors


def only_tensor(spec: Spec, value: Any) -> Tensor | None:
    """Return the tensor of a value that has exactly one by ``spec``, as most have; None for any other."""
    if type(value) is not spec.form:
        return None
    tensor = value[0] if isinstance(value, tuple) and len(value) == 1 else value
    if (
        type(tensor) is not Tensor
        or (tensor.dtype, tensor.shape, tensor.requires_grad) != spec.kinds[0]
    ):
        return None
    return tensor


def places_in(spec: Spec, buffer: Tensor) -> list[Tensor]:
    """Return where the value's tensors go in ``buffer``, a uint8 tensor of at least ``spec.nbytes``."""
    return [
        buffer[start:end].view(kind.dtype).view(kind.shape)
        for kind, (start, end) in zip(spec.kinds, spec.places, strict=True)
    ]


def pack(spec: Spec, tensors: list[Tensor], buffer: Tensor) -> None:
    for place, tensor in zip(places_in(spec, buffer), tensors, strict=True):
        place.copy_(tensor.detach())


def unpack(spec: Spec, buffer: Tensor, device: torch.device) -> Any:
    """Return the value; its tensors lie in ``buffer``, a storage of its own, if that is on ``device``."""
    if spec.form is not None and device == buffer.device:
        (dtype, shape, differentiable), (_, end) = spec.kinds[0], spec.places[0]
        tensor = buffer[:end].view(dtype).view(shape)
        tensor = tensor.requires_grad_() if differentiable else tensor
        return tensor if spec.form is Tensor else (tensor,)

    def read(kind: Kind, start: int) -> Tensor:
        # Not a view of the buffer: views share a version, and one part changed in place would spoil
        # the others.
        tensor = torch.empty(0, dtype=kind.dtype, device=buffer.device)
        first = start // kind.dtype.itemsize
        tensor.set_(buffer.untyped_storage(), first, kind.shape)  # type: ignore[call-overload]  # strides have a default
        tensor = tensor.to(device)
        return tensor.requires_grad_() if kind.differentiable else tensor

    tensors = [read(kind, start) for kind, (start, _) in zip(spec.kinds, spec.places, strict=True)]
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
