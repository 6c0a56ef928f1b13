"""Tied weights: the gradients of a weight that lies in several places are added up, and each place gets the sum.

    compute apart from earlier gradients  ─►  exchange with the ranks that hold a copy  ─►  add up in the same order

Copies that start equal then stay equal bit by bit, as every rank adds up the same terms alike. How the terms are
exchanged is the pipeline's own business.
"""

import zlib
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from typing import TypeVar

import torch
from torch import Tensor, nn

__all__ = ["Look", "add_up", "copies_in", "looks_of", "problem_of_forgotten_ties", "set_apart"]

Key = TypeVar("Key", bound=Hashable)
_LOOKED_AT = 256  # values of a weight; two that are not one agree in none of them


def copies_in(
    modules: Mapping[int, "nn.Module | None"], places: Iterable[tuple[Key, int, str]]
) -> "dict[Key, nn.Parameter]":
    """Return the parameters in ``places``, each a key, a stage and a name, as far as this rank holds the stage.

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
    """Let gradients start from nothing inside, and add them to earlier ones, which are sums already, afterwards.

    In place, as autograd does: an earlier one may be a part of somebody's buffer.
    """
    before = [(parameter, parameter.grad) for parameter in parameters]
    for parameter, _ in before:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, earlier in before:
            if earlier is not None:
                if parameter.grad is not None:
                    earlier = _added(earlier, parameter.grad)
                parameter.grad = earlier


def _added(earlier: Tensor, new: Tensor) -> Tensor:
    if earlier.layout != torch.strided:
        return new + earlier
    with torch.no_grad():  # dense, as torch adds a sparse tensor to a view in the wrong place
        return earlier.add_(new if new.layout == torch.strided else new.to_dense())


def add_up(terms: Sequence[Tensor | None]) -> Tensor | None:
    """Return the sum of the terms that are there, in their order; None without any."""
    there = [term for term in terms if term is not None]
    return sum(there[1:], start=there[0]) if there else None


@dataclass(frozen=True)
class Look:
    """What identifies a weight on another rank: shape, dtype and some values, and whether it is an embedding."""

    is_embedding: bool
    values: tuple[tuple[int, ...], str, int]


def looks_of(modules: "Mapping[int, nn.Module | None]") -> dict[int, dict[str, Look]]:
    """Return by stage and name the look of each trained matrix; of its shard, if it is sharded.

    Left out are weights on meta, weights of one value only, and tensors met before: autograd itself ties those.
    """
    met: set[int] = set()
    looks: dict[int, dict[str, Look]] = {stage: {} for stage in modules}
    for stage, module in modules.items():
        for path, part in () if module is None else module.named_modules():
            for name, weight in part.named_parameters(recurse=False):
                if weight.dim() > 1 and weight.requires_grad and not weight.is_meta and id(weight) not in met:
                    met.add(id(weight))
                    if values := _some_values(weight):
                        looks[stage][f"{path}.{name}".lstrip(".")] = Look(isinstance(part, nn.Embedding), values)
    return looks


def _some_values(weight: nn.Parameter) -> tuple[tuple[int, ...], str, int] | None:
    """Return shape, dtype and a checksum of values all over ``weight``; None if all are the same, or it is sparse."""
    here: Tensor = weight.to_local() if hasattr(weight, "to_local") else weight
    if here.layout is not torch.strided:
        return None
    some = here.detach().flatten()[:: max(1, here.numel() // _LOOKED_AT)][:_LOOKED_AT].cpu().contiguous()
    if not bool((some != some[:1]).any()):
        return None
    return tuple(weight.shape), str(weight.dtype), zlib.crc32(some.view(torch.uint8).numpy().tobytes())


def problem_of_forgotten_ties(looks: Mapping[int, Mapping[str, Look]]) -> str | None:
    """Say which weights of two stages look like one that was cut in two, if nobody has said what is tied.

    Exactly one of them must be an embedding: layers, or two embeddings, may be seeded or copied alike on purpose.
    """
    for (stage, here), (other, there) in combinations(sorted(looks.items()), 2):
        for name, look in here.items():
            for again, same in there.items():
                if look.values == same.values and (look.is_embedding != same.is_embedding):
                    return (
                        f"{name!r} of stage {stage} and {again!r} of stage {other} have the same shape and values, and "
                        "nothing says whether they are one weight: if so, give "
                        f"tied=[{{{stage}: {name!r}, {other}: {again!r}}}], so that they stay equal; if not, tied=[]"
                    )
    return None
