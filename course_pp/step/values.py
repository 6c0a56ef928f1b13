"""A value between stages: what a stage takes and returns for one microbatch, whichever engine runs
it.

Three rules say which containers may hold a value's tensors. They differ for a reason:

- :class:`ValueMeta`, for a value that ``parallel`` sends: all containers that torch's pytree knows,
  such as tuples, named tuples, lists, dicts and the outputs of ``transformers``. Each keeps its
  class, as both ends know the containers before the first message. Only tensors travel, so any
  other object but None is refused.
- :func:`course_pp.runtime.payload.map_plain`, for a value that ``runtime`` sends: tuples, lists and
  mappings, with numbers, strings and None. Containers arrive as plain ones, as a message describes
  itself to a receiver that may not have the sender's classes. Any other object is refused.
- :func:`map_tensors`, for a caller's argument: tuples, lists and dicts; a named tuple keeps its
  class. Any other object stays untouched, even one that pytree knows: the tensors of a
  ``BlockMask`` are no rows of the batch.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from course_pp.base.torch_private import tree_flatten, tree_map, tree_unflatten
from course_pp.step.hooks import is_dtensor


@dataclass(frozen=True)
class TensorMeta:
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __repr__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {self.shape}"

    def empty(self, device: torch.device | str, requires_grad: bool = False) -> Tensor:
        differentiable = self.dtype.is_floating_point or self.dtype.is_complex
        return torch.empty(
            self.shape,
            dtype=self.dtype,
            device=device,
            requires_grad=requires_grad and differentiable,
        )


@dataclass(frozen=True)
class ValueMeta:
    """A description of a value that one stage passes to the next.

    Attributes:
        tree: the value's containers, with a :class:`TensorMeta` in place of each tensor.
    """

    tree: Any

    @classmethod
    def of(cls, value: Any) -> "ValueMeta":
        """Describe ``value``; raise TypeError unless it holds ordinary tensors and None alone."""
        return cls(tree_map(_meta, _normalized(value)))

    @property
    def metas(self) -> tuple[TensorMeta, ...]:
        """The tensors' shapes and dtypes, in the order in which they are sent."""
        return tuple(leaf for leaf in tree_flatten(self.tree)[0] if leaf is not None)

    def __str__(self) -> str:
        return repr(self.tree)

    @property
    def kinds(self) -> Any:
        """The containers with the dtype in place of each tensor, which all microbatches share."""
        return tree_map(lambda leaf: None if leaf is None else leaf.dtype, self.tree)

    def flatten(self, value: Any) -> tuple[Tensor, ...]:
        """Return the tensors of ``value``, in order; raise ValueError if it does not fit."""
        given = ValueMeta.of(value)
        if given != self:
            raise ValueError(f"{given} where {self} was declared")
        return tuple(leaf for leaf in tree_flatten(_normalized(value))[0] if leaf is not None)

    def unflatten(self, tensors: Iterable[Tensor]) -> Any:
        """Return the value that :meth:`flatten` took apart."""
        rest = iter(tensors)
        return tree_map(lambda leaf: None if leaf is None else next(rest), self.tree)

    def empty(self, device: torch.device | str, requires_grad: bool = False) -> tuple[Tensor, ...]:
        """Return empty tensors of these shapes."""
        return tuple(meta.empty(device, requires_grad) for meta in self.metas)


def call(module: Callable[..., Any], value: Any, keywords: Mapping[str, Any] | None = None) -> Any:
    """Call a stage with the output of the stage before it, and with keyword arguments of the step.

    A tuple or list gives the positional arguments, a mapping gives keyword arguments, and anything
    else is the only argument. A tuple or list of one value is that value. A named tuple is one
    argument.
    """
    value = _normalized(value)
    keywords = keywords or {}
    if type(value) is tuple:
        return module(*value, **keywords)
    if isinstance(value, Mapping):
        return module(**value, **keywords)
    return module(value, **keywords)


def as_value(arguments: tuple[Any, ...]) -> Any:
    """Return the value with which :func:`call` gives a stage these arguments."""
    return arguments[0] if len(arguments) == 1 else arguments


def rows_of(value: ValueMeta) -> int | None:
    """Return the first dimension that all tensors share, or None."""
    rows = {meta.shape[:1] for meta in value.metas}
    if len(rows) != 1 or () in rows:
        return None
    return rows.pop()[0]


def merge(outputs: Sequence[Any]) -> Any:
    """Merge the outputs of microbatches: concatenate tensors along their first dimension, stack
    scalars.

    A value other than a tensor stays as it is if all microbatches have it, and else becomes a list
    with one entry a microbatch. Outputs do not fit together if their containers differ, or their
    tensors differ in dtype or in more than the first dimension: they stay a list of outputs.
    """
    # Containers and tensors must be alike in all microbatches before anything is concatenated.
    rows = []
    forms = []
    for output in outputs:
        leaves, containers = tree_flatten(output)
        rows.append(leaves)
        forms.append((containers, list(map(_form, leaves))))
    if any(form != forms[0] for form in forms):
        return list(outputs)
    containers, _ = forms[0]
    return tree_unflatten([_merged(leaves) for leaves in zip(*rows, strict=True)], containers)


def map_tensors(change: Callable[[Tensor], Any], value: Any) -> Any:
    """Apply ``change`` to each tensor in a caller's tuples, lists and dicts; keep the rest."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: map_tensors(change, each) for key, each in value.items()}
    if isinstance(value, tuple | list):
        changed = [map_tensors(change, each) for each in value]
        if hasattr(value, "_fields"):  # a named tuple
            return type(value)(*changed)
        return type(value)(changed)
    return value


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors to which :func:`map_tensors` applies a change, in its order."""
    found: list[Tensor] = []
    map_tensors(found.append, value)
    return found


def meta_of(leaf: Any) -> Any:
    return TensorMeta(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf


def _normalized(value: Any) -> Any:
    """Turn a list into a tuple, as torch.export does, and a tuple of one value into that value."""
    if type(value) is list:
        value = tuple(value)
    if type(value) is tuple and len(value) == 1:
        return value[0]
    return value


def _meta(leaf: Any) -> TensorMeta | None:
    if is_dtensor(leaf):
        raise TypeError(
            f"a DTensor {tuple(leaf.shape)} placed {leaf.placements}, which its neighbour could not"
            " read: give back an ordinary tensor (output_layouts=Replicate(),"
            " use_local_output=True in the plan)"
        )
    if leaf is not None and not isinstance(leaf, Tensor):
        raise TypeError(
            f"a {type(leaf).__name__}: only tensors, and None, can be sent to another stage, in"
            " tuples, lists, dicts and classes that torch's pytree knows"
        )
    meta: TensorMeta | None = meta_of(leaf)
    return meta


def _form(leaf: Any) -> Any:
    """Return the properties that leaves must share to be merged; None for anything but a tensor."""
    if not isinstance(leaf, Tensor):
        return None
    return leaf.dtype, leaf.dim(), leaf.shape[1:]


def _merged(leaves: tuple[Any, ...]) -> Any:
    first = leaves[0]
    if isinstance(first, Tensor):
        return torch.cat(leaves) if first.dim() else torch.stack(leaves)
    if all(_is_same(leaf, first) for leaf in leaves):
        return first
    return list(leaves)


def _is_same(one: Any, other: Any) -> bool:
    """Return whether two objects are one, or of one class and equal."""
    if one is other:
        return True
    # By class too, as 1 == True; an array compares to an array, which is no answer.
    return type(one) is type(other) and (one == other) is True
