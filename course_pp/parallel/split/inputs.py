"""How the model's own arguments travel: every stage calls the model's forward with them.

Their tensors go from stage to stage. If no later stage looks into a floating-point one, such as an image, only its
shape goes, as a tensor without elements: the engines send nothing but tensors. Arguments that are no tensors stay as in
the example.
"""

from typing import Any

import torch
from torch import Tensor

from course_pp.arguments import described
from course_pp.parallel._torch import tree_flatten, tree_unflatten

__all__ = ["Inputs"]


class Inputs:
    """The arguments at the two boundaries of a stage.

    Args:
        example: the positional and the keyword arguments.
        read_here: which of their tensors this stage or a later one looks into.
        read_later: which a later stage looks into.
    """

    def __init__(self, example: Any, read_here: set[int], read_later: set[int]) -> None:
        self._leaves, self._tree = tree_flatten(example)
        self._read_here, self._read_later = read_here, read_later

    def tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
        """Return the tensors of a call of the first stage.

        Raises:
            ValueError: if its arguments are not those of the example.
        """
        leaves, tree = tree_flatten((args, dict(sorted(kwargs.items()))))
        if tree != self._tree:
            raise ValueError(
                f"called with {_spelled(args, kwargs)}, but the example was {self}: give auto_split "
                "an example of these arguments"
            )
        for given, known in zip(leaves, self._leaves, strict=True):
            if isinstance(given, Tensor) != isinstance(known, Tensor) or not _is_as(given, known):
                raise ValueError(
                    f"called with {_told(given)} where the example had {_told(known)}: every stage counts on it, so "
                    "cut the model with an example that is like the batches"
                )
        return tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))

    def call(self, tensors: tuple[Tensor, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the example's arguments with these tensors in place of its own."""
        rest = iter(tensors)
        leaves = [next(rest) if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
        args, kwargs = tree_unflatten(leaves, self._tree)
        return args, kwargs

    def of_example(self) -> tuple[Tensor, ...]:
        """Return the tensors of the example, as meta tensors."""
        return tuple(leaf.to("meta") for leaf in self._leaves if isinstance(leaf, Tensor))

    def send(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return what goes to the next stage."""
        return tuple(self._packed(i, tensor, self._read_later) for i, tensor in enumerate(tensors))

    def packed_before(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return these tensors as the stage before sent them."""
        return tuple(self._packed(i, tensor, self._read_here) for i, tensor in enumerate(tensors))

    def receive(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the tensors from the stage before, with zeros for those that nobody looks into."""
        kinds = [leaf.dtype for leaf in self._leaves if isinstance(leaf, Tensor)]
        return tuple(
            torch.zeros((), dtype=kinds[i], device=tensor.device).expand(tensor.shape[1:])
            if self._is_shape(i, self._read_here, kinds[i])
            else tensor
            for i, tensor in enumerate(tensors)
        )

    def __str__(self) -> str:
        args, kwargs = tree_unflatten(self._leaves, self._tree)
        return _spelled(args, kwargs)

    def _packed(self, index: int, tensor: Tensor, read: set[int]) -> Tensor:
        if not self._is_shape(index, read, tensor.dtype):
            return tensor
        return torch.empty((0, *tensor.shape), dtype=torch.int8, device=tensor.device)

    def _is_shape(self, index: int, read: set[int], dtype: torch.dtype) -> bool:
        return index not in read and (dtype.is_floating_point or dtype.is_complex)


def _is_as(given: Any, known: Any) -> bool:
    if isinstance(known, Tensor):
        return given.dim() == known.dim() and given.dtype.is_floating_point == known.dtype.is_floating_point
    return type(given) is type(known) and (given is known or bool(given == known))


def _told(value: Any) -> str:
    if not isinstance(value, Tensor):
        return described(value)
    return f"a tensor of {str(value.dtype).removeprefix('torch.')} and {value.dim()} dimensions"


def _spelled(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    words = [*map(described, args), *(f"{name}={described(value)}" for name, value in kwargs.items())]
    return f"({', '.join(words)})"
