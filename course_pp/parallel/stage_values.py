"""What a stage takes and returns for one microbatch: which tensors, of which shapes and dtypes, in which containers.

torch's pipelining sends tuples of tensors, so containers that torch's pytree knows are taken apart before the message
and put together again behind it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from course_pp.parallel._torch import tree_flatten, tree_map, tree_unflatten


@dataclass(frozen=True)
class TensorMeta:
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __repr__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {self.shape}"

    def empty(self, device: torch.device | str, requires_grad: bool = False) -> Tensor:
        differentiable = self.dtype.is_floating_point or self.dtype.is_complex
        return torch.empty(self.shape, dtype=self.dtype, device=device, requires_grad=requires_grad and differentiable)


@dataclass(frozen=True)
class ValueMeta:
    """What is passed between stages: ``tree`` is its containers, with a :class:`TensorMeta` in place of each tensor."""

    tree: Any

    @classmethod
    def of(cls, value: Any) -> "ValueMeta":
        """Describe ``value``; a TypeError for anything but tensors and None in containers, or a DTensor."""
        return cls(tree_map(_meta, _normalized(value)))

    @property
    def metas(self) -> tuple[TensorMeta, ...]:
        """The tensors' shapes and dtypes, in the order in which they are sent."""
        return tuple(leaf for leaf in tree_flatten(self.tree)[0] if leaf is not None)

    def __str__(self) -> str:
        return repr(self.tree)

    @property
    def kinds(self) -> Any:
        """The containers, with the dtype in place of each tensor: what all microbatches have in common."""
        return tree_map(lambda leaf: None if leaf is None else leaf.dtype, self.tree)

    def flatten(self, value: Any) -> tuple[Tensor, ...]:
        """Return the tensors of ``value``, in order; refuse one that does not fit."""
        given = ValueMeta.of(value)
        if given != self:
            raise ValueError(f"{given} where {self} was declared")
        return tuple(leaf for leaf in tree_flatten(_normalized(value))[0] if leaf is not None)

    def unflatten(self, tensors: Iterable[Tensor]) -> Any:
        """Return the value that :meth:`flatten` took apart."""
        rest = iter(tensors)
        return tree_map(lambda leaf: None if leaf is None else next(rest), self.tree)

    def empty(self, device: torch.device | str, requires_grad: bool = False) -> tuple[Tensor, ...]:
        """Return empty tensors of these shapes; those that can require a gradient, if asked."""
        return tuple(meta.empty(device, requires_grad) for meta in self.metas)


def call(module: nn.Module, value: Any, keywords: Mapping[str, Any] | None = None) -> Any:
    """Call a stage with what the stage before it returned, and with keywords of the step."""
    value, keywords = _normalized(value), keywords or {}
    if type(value) is tuple:
        return module(*value, **keywords)
    return module(**value, **keywords) if isinstance(value, Mapping) else module(value, **keywords)


def as_value(arguments: tuple[Any, ...]) -> Any:
    """Return the output of a stage by which the next one is called with these arguments."""
    return arguments[0] if len(arguments) == 1 else arguments


def rows_of(value: ValueMeta) -> int | None:
    """Return the first dimension that all tensors share; None if they differ."""
    rows = {meta.shape[:1] for meta in value.metas}
    return rows.pop()[0] if len(rows) == 1 and () not in rows else None


def merge(microbatches: list[Any]) -> Any:
    """Merge the outputs of microbatches: concatenate tensors along their first dimension, stack scalars.

    Other values become a list with one entry a microbatch, or stay as they are if all are equal. If the tensors differ
    in more than their first dimension, so does the whole.
    """

    def merged(values: tuple[Any, ...]) -> Any:
        if isinstance(values[0], Tensor):
            return torch.cat(values) if values[0].dim() else torch.stack(values)
        return values[0] if all(value is None or value == values[0] for value in values) else list(values)

    leaves, specs = zip(*map(tree_flatten, microbatches), strict=True)
    shapes = {tuple(leaf.shape[1:] for leaf in each if isinstance(leaf, Tensor)) for each in leaves}
    if len(shapes) > 1:
        return microbatches
    return tree_unflatten([merged(values) for values in zip(*leaves, strict=True)], specs[0])


def meta_of(leaf: Any) -> Any:
    return TensorMeta(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf


def _normalized(value: Any) -> Any:
    """Turn a list into a tuple, as torch.export does, and a tuple of one value into that value."""
    value = tuple(value) if type(value) is list else value
    return value[0] if type(value) is tuple and len(value) == 1 else value


def _meta(leaf: object) -> TensorMeta | None:
    if isinstance(leaf, DTensor):
        raise TypeError(
            f"a DTensor {tuple(leaf.shape)} placed {leaf.placements}, which its neighbour could not read: give back an "
            "ordinary tensor (output_layouts=Replicate(), use_local_output=True in the plan)"
        )
    if leaf is not None and not isinstance(leaf, Tensor):
        raise TypeError(
            f"a {type(leaf).__name__}: only tensors, and None, can be sent to another stage, in tuples, lists, dicts "
            "and classes that torch's pytree knows"
        )
    meta: TensorMeta | None = meta_of(leaf)
    return meta
