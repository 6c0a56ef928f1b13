"""Tied weights: the gradients of a weight that lies in several places are added up, and each place gets the sum.

    compute apart from earlier gradients  ─►  exchange with the ranks that hold a copy  ─►  add up in the same order

Copies that start equal then stay equal bit by bit, as every rank adds up the same terms alike. How the terms are
exchanged is the pipeline's own business.
"""

import zlib
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from typing import TypeVar

import torch
from torch import Tensor, nn

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
    """What identifies a weight on another rank: shape, dtype and some values; and what it does there."""

    is_embedding: bool
    is_trained: bool
    values: tuple[tuple[int, ...], str, int]


def looks_of(
    modules: "Mapping[int, nn.Module | None]", shapes: Collection[tuple[int, ...]] | None = None
) -> dict[int, dict[str, Look]]:
    """Return by stage and name the look of each matrix of these ``shapes``; of its shard, if it is sharded.

    Left out are weights on meta, weights of one value only, and tensors met before: autograd itself ties those.
    """
    met: set[int] = set()
    looks: dict[int, dict[str, Look]] = {stage: {} for stage in modules}
    for stage, module in modules.items():
        if module is None:
            continue
        embeddings = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
        # By the names that ties are declared in: wrappers may leave their own part out of them.
        for name, weight in module.named_parameters():
            if weight.dim() > 1 and not weight.is_meta and id(weight) not in met:
                met.add(id(weight))
                if (shapes is None or tuple(weight.shape) in shapes) and (values := _some_values(weight)):
                    looks[stage][name] = Look(id(weight) in embeddings, weight.requires_grad, values)
    return looks


def _some_values(weight: nn.Parameter) -> tuple[tuple[int, ...], str, int] | None:
    """Return shape, dtype and a checksum of values all over ``weight``; None if there are no two, or none to read.

    Those of a frozen weight of a class of its own cannot be read: a quantised one, say.
    """
    here: Tensor = weight.to_local() if hasattr(weight, "to_local") else weight
    if here.layout is not torch.strided or not (weight.requires_grad or type(here) in (Tensor, nn.Parameter)):
        return None
    some = here.detach().flatten()[:: max(1, here.numel() // _LOOKED_AT)][:_LOOKED_AT].cpu().contiguous()
    bits = some.view(torch.uint8).view(len(some), some.element_size())  # small formats cannot be compared
    if not bool((bits != bits[:1]).any()):
        return None
    return tuple(weight.shape), str(weight.dtype), zlib.crc32(bits.numpy().tobytes())


def problem_of_forgotten_ties(looks: Mapping[int, Mapping[str, Look]]) -> str | None:
    """Say which weights of two stages are rather one weight than two, for a caller that was told of no ties.

    They have the same values, one is trained, and one is an embedding. Where both are, as in an encoder and a decoder,
    the other layers of the two stages must differ: stages may be seeded or copied alike on purpose.
    """
    for (stage, here), (other, there) in combinations(sorted(looks.items()), 2):
        for name, look in here.items():
            for again, same in there.items():
                if look.values == same.values and _look_tied(look, same, here, there):
                    before = "" if look.is_trained and same.is_trained else "freeze or train both, and "
                    return (
                        f"{name!r} of stage {stage} and {again!r} of stage {other} have the same shape and values, and "
                        f"nothing says whether they are one weight: if so, {before}give "
                        f"tied=[{{{stage}: {name!r}, {other}: {again!r}}}], so that they stay equal; if not, tied=[]"
                    )
    return None


def problem_of_left_out_copies(
    looks: Mapping[int, Mapping[str, Look]], tied: Sequence[Mapping[int, str]]
) -> str | None:
    """Say which weight has the values of a tie's and is in none, such as a prediction head between the two ends.

    A frozen one is no problem: whoever keeps the weights of yesterday beside those of today means to.
    """
    declared = [end for tie in tied for end in tie.items()]
    for tie in tied:
        values = {looks[stage][name].values for stage, name in tie.items() if name in looks.get(stage, ())}
        for stage, here in looks.items():
            if stage in tie and tie[stage] not in here:  # by another of its names, perhaps
                continue
            for name, look in here.items():
                if look.is_trained and look.values in values and (stage, name) not in declared:
                    remedy = f"make it the parameter {tie[stage]!r}" if stage in tie else f"add {stage}: {name!r} to it"
                    return (
                        f"{name!r} of stage {stage} has the values of the tied weight {dict(tie)} and is not in it, so "
                        f"the two would be trained apart: {remedy}; or, if that is meant, fill it after this call"
                    )
    return None


def _look_tied(one: Look, other: Look, here: Mapping[str, Look], there: Mapping[str, Look]) -> bool:
    if not (one.is_trained or other.is_trained):
        return False
    if not (one.is_embedding and other.is_embedding):
        return one.is_embedding or other.is_embedding
    ours, theirs = ({look.values for look in looks.values() if not look.is_embedding} for looks in (here, there))
    shapes, others = ({values[:2] for values in found} for found in (ours, theirs))
    return bool(shapes & others) and not ours & theirs  # layers of one shape, and none has the values of another
