"""Gradients of one weight that lies in several places, of which each is to be given the sum.

    compute apart from earlier gradients  ─►  exchange with the ranks that hold a copy  ─►  add up in the same order

Copies that start equal then stay equal bit by bit, as every rank adds up the same terms alike. How the terms are
exchanged is the pipeline's own business.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

from torch import Tensor, nn

__all__ = ["add_up", "copies_in", "set_apart"]

Key = TypeVar("Key", bound=Hashable)


def copies_in(
    modules: Mapping[int, "nn.Module | None"], places: Iterable[tuple[Key, int, str]]
) -> "dict[Key, nn.Parameter]":
    """The parameters in ``places``, each a key, a stage and a name, as far as this rank holds the stage.

    Look them up for every step: loading a checkpoint may put another parameter in a place.
    """
    found: dict[Key, nn.Parameter] = {}
    for key, stage, name in places:
        module = modules.get(stage)
        parameter = None if module is None else module.get_parameter(name)
        # Two stages of one rank may share the very tensor: autograd adds up its gradients by itself.
        if parameter is not None and not any(parameter is known for known in found.values()):
            found[key] = parameter
    return found


@contextmanager
def set_apart(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Let gradients start from nothing inside; earlier ones, which are sums already, are added back afterwards."""
    before = [(parameter, parameter.grad) for parameter in parameters]
    for parameter, _ in before:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, earlier in before:
            if earlier is not None:
                parameter.grad = earlier if parameter.grad is None else parameter.grad + earlier


def add_up(terms: Sequence[Tensor | None]) -> Tensor | None:
    """The sum of the terms that are there, in their order; None without any."""
    there = [term for term in terms if term is not None]
    return sum(there[1:], start=there[0]) if there else None
