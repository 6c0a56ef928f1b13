"""Tied weights: each place of a weight gets the sum of the gradients of all its places.

    compute apart from earlier gradients
        ─►  exchange with the ranks that hold a copy
        ─►  add up in the same order

Every rank adds up the same terms in the same order, so copies that start equal stay equal bit by
bit. Each engine exchanges the terms in its own way.
"""

import zlib
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from typing import TypeVar

import torch
from torch import Tensor, nn

from course_pp.step.hooks import call_hooks

Key = TypeVar("Key", bound=Hashable)
_FILLED_LATER = "if that is meant, fill it after this call"
_LOOKED_AT = 256  # values compared of a weight; more would not tell two weights apart any better


def find_ties(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Return the parameters that ``model`` holds under several names.

    Ask before the model is cut: its stages no longer know.

    Returns:
        The names of each shared parameter, as ``build_pipeline_schedule(..., tied=...)`` takes
        them.
    """
    return tuple(tuple(names) for _, names in _named(model) if len(names) > 1)


def ties_of_cut(modules: "Mapping[int, nn.Module | None]") -> Sequence[Mapping[int, str]] | None:
    """Return the ties that ``auto_split`` found in the model; None for other stages."""
    for module in modules.values():
        if module is not None and "names_of_one" in vars(module):
            ties: Sequence[Mapping[int, str]] = vars(module)["ties"]
            return ties
    return None


def copies_in(
    modules: Mapping[int, "nn.Module | None"], places: Iterable[tuple[Key, int, str]]
) -> "dict[Key, nn.Parameter]":
    """Return this rank's parameters in ``places``, by key.

    Call it in every step: loading a checkpoint may put another parameter in a place.

    Args:
        places: key, stage and parameter's name of each place, also of other ranks' stages.
    """
    found: dict[Key, nn.Parameter] = {}
    for key, stage, name in places:
        module = modules.get(stage)
        parameter = None if module is None else module.get_parameter(name)
        # Two stages of one rank may share the very tensor: autograd adds up its gradients by
        # itself.
        if parameter is not None and not any(parameter is known for known in found.values()):
            found[key] = parameter
    return found


@contextmanager
def set_apart(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Let gradients start from nothing inside; afterwards add them to the earlier gradients.

    The earlier gradients are sums already, and must not be exchanged again. The addition is in
    place, as autograd's is: an earlier gradient may be a view of a buffer.
    """
    before = [(parameter, parameter.grad) for parameter in parameters]
    # Autograd accumulates into .grad, so the earlier gradient must be out of the way.
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
    if new.layout != torch.strided:
        # torch adds a sparse tensor to a view in the wrong place.
        new = new.to_dense()
    with torch.no_grad():
        return earlier.add_(new)


def add_up(terms: Sequence[Tensor | None]) -> Tensor | None:
    """Return the sum of the terms that are not None, in their order; None if there are none."""
    there = [term for term in terms if term is not None]
    if not there:
        return None
    return sum(there[1:], start=there[0])


@dataclass(frozen=True, order=True)
class WeightPlace:
    """Parameter ``name`` of ``stage`` on ``rank``."""

    rank: int
    stage: int
    name: str


Weight = tuple[WeightPlace, ...]
"""All places of one weight, in order."""


class SharedWeights:
    """This rank's part in summing the gradients of ``weights``, each of which has several places.

        with shared.apart():
            ...                                               # forwards and backwards
            received = {rank: the list that rank's shared.for_rank(this rank) returned}
            shared.add(received)

    Each rank adds up the same numbers in the same order, so weights that start equal stay equal bit
    by bit. The engine exchanges the lists, because only the engine knows how its ranks fail. In
    ``runtime`` they are messages of the plan: they have a time limit, and a rank that fails tells
    its peers. ``parallel`` has torch's point-to-point calls, which need to know every shape before
    they begin.
    """

    def __init__(
        self, rank: int, weights: Sequence[Weight], modules: "Mapping[int, nn.Module | None]"
    ) -> None:
        self._rank = rank
        self._weights = [w for w in weights if any(place.rank == rank for place in w)]
        self._modules = modules
        self._parameters: dict[WeightPlace, nn.Parameter] = {}

    @property
    def peers(self) -> list[int]:
        """The other ranks that have a place of one of these weights."""
        ranks = {place.rank for weight in self._weights for place in weight}
        return sorted(ranks - {self._rank})

    def copies(self) -> "dict[WeightPlace, nn.Parameter]":
        """Return the parameters in this rank's places."""
        mine = [place for w in self._weights for place in w if place.rank == self._rank]
        return copies_in(self._modules, ((place, place.stage, place.name) for place in mine))

    @contextmanager
    def apart(self) -> "Iterator[Mapping[WeightPlace, nn.Parameter]]":
        """Let gradients start from nothing inside, and add the earlier ones back afterwards.

        The block gets the parameters in this rank's places.

        Earlier gradients are sums already: to exchange them again would count the peers' parts
        twice.
        """
        self._parameters = self.copies()
        with set_apart(self._parameters.values()):
            yield self._parameters

    def for_rank(self, other: int) -> list[Tensor | None]:
        """Return this rank's gradient of each weight that ``other`` holds too."""
        shared = [w for w in self._weights if any(place.rank == other for place in w)]
        return [self._own(weight) for weight in shared]

    def add(self, received: Mapping[int, Sequence[Tensor | None]]) -> None:
        """Set every gradient to the sum over all places.

        Args:
            received: the lists of the other ranks, by rank.
        """
        rows = {rank: iter(row) for rank, row in received.items()}
        for weight in self._weights:
            ranks = sorted({place.rank for place in weight})
            terms = []
            for rank in ranks:
                terms.append(self._own(weight) if rank == self._rank else next(rows[rank]))
            total = add_up(terms)
            for place in weight:
                parameter = self._parameters.get(place)
                if parameter is None:
                    continue
                parameter.grad = None if total is None else total.clone()
                if total is not None:
                    # This rank's own backwards may not have reached the parameter.
                    call_hooks(parameter)

    def _own(self, weight: Weight) -> Tensor | None:
        here = [self._parameters[place] for place in weight if place in self._parameters]
        return add_up([parameter.grad for parameter in here])


Values = tuple[tuple[int, ...], str, int]
"""Shape, dtype, and a checksum of some values: equal for two ends of one weight."""


@dataclass(frozen=True)
class Look:
    """The properties by which other ranks recognise a weight.

    Attributes:
        is_embedding: whether it is the table of an ``nn.Embedding``.
        is_trained: whether it requires a gradient.
        values: shape, dtype and a checksum.
        also: the further names that the same parameter has in its stage.
    """

    is_embedding: bool
    is_trained: bool
    values: Values
    also: tuple[str, ...] = ()


Looks = Mapping[int, Mapping[str, Look]]
"""The looks of weights by stage and name, in the order in which a stage registers its weights."""


def looks_of(
    modules: "Mapping[int, nn.Module | None]", shapes: Collection[tuple[int, ...]] | None = None
) -> dict[int, dict[str, Look]]:
    """Return the look of each weight of these ``shapes``, or of its shard, by stage and name.

    Weights on meta and weights of one value are left out. A tensor that an earlier stage of this
    rank holds too is left out as well: autograd itself ties it.
    """
    met: set[int] = set()
    looks: dict[int, dict[str, Look]] = {stage: {} for stage in modules}
    for stage, module in modules.items():
        if module is None:
            continue
        tables = [part.weight for part in module.modules() if isinstance(part, nn.Embedding)]
        embeddings = {id(table) for table in tables}
        for weight, (name, *also) in _named(module):
            if weight.is_meta or id(weight) in met:
                continue
            met.add(id(weight))
            if shapes is not None and tuple(weight.shape) not in shapes:
                continue
            values = _some_values(weight)
            if values is not None:
                is_embedding = id(weight) in embeddings
                looks[stage][name] = Look(is_embedding, weight.requires_grad, values, tuple(also))
    return looks


def _named(module: nn.Module) -> list[tuple[nn.Parameter, list[str]]]:
    """Return each parameter with all its names.

    The names are those by which ties are declared: a wrapper may leave out its own part.
    """
    found: dict[int, tuple[nn.Parameter, list[str]]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        _, names = found.setdefault(id(parameter), (parameter, []))
        names.append(name)
    return list(found.values())


def _some_values(weight: nn.Parameter) -> Values | None:
    """Return shape, dtype and a checksum of values all over ``weight``.

    None if all values are equal, as in a bias of zeros, or cannot be read.
    """
    here: Tensor = weight.to_local() if hasattr(weight, "to_local") else weight
    # A frozen weight of another class may be quantised, and have no values that a view can read.
    is_readable = weight.requires_grad or type(here) in (Tensor, nn.Parameter)
    if here.layout is not torch.strided or not is_readable:
        return None
    stride = max(1, here.numel() // _LOOKED_AT)
    some = here.detach().flatten()[::stride][:_LOOKED_AT].cpu().contiguous()
    # As bytes, because torch cannot compare numbers of small formats.
    bits = some.view(torch.uint8).view(len(some), some.element_size())
    if not bool((bits != bits[:1]).any()):
        return None
    return tuple(weight.shape), str(weight.dtype), zlib.crc32(bits.numpy().tobytes())


def problem_of_forgotten_ties(
    looks: Looks, known: Sequence[Mapping[int, str]] | None = None
) -> str | None:
    """Return which weights look like one weight, if the caller declared no ties; None if none do.

    The sentence lists all of them.

    Args:
        known: the ties that ``auto_split`` found, if it made the stages; with None the values are
            the evidence.
    """
    suspects = _look_tied(looks) if known is None else list(known)
    if not suspects:
        return _problem_inside(looks, "if they are two, tied=[]") if known is None else None
    before = ""
    if not all(look.is_trained for tie in suspects for look in _ends(tie, looks)):
        before = "freeze or train both, and "
    if known is None and (layers := _problem_of_copied_layers(suspects, looks, before)):
        return layers
    # A matrix is a better name for a tie than a bias is.
    matrices = [tie for tie in suspects if _dimensions(tie, looks) > 1]
    (stage, name), (other, again), *_ = sorted((matrices or suspects)[0].items())
    return (
        f"{name!r} of stage {stage} and {again!r} of stage {other} have the same shape and values,"
        f" and nothing says whether they are one weight: if so, {before}give"
        f" tied={_spelled(suspects)}, so that they stay equal; if not, tied=[]"
    )


def _problem_of_copied_layers(
    suspects: Sequence[Mapping[int, str]], looks: Looks, before: str
) -> str | None:
    """Return which whole layers hold equal values; None if no two do.

    Such layers are probably copies. The caller learns it first, because a tie made by mistake shows
    nowhere.

    Args:
        before: the words for a step that must come before the tie, or "".
    """
    layer = None
    single = []  # suspects outside such layers
    for tie in suspects:
        around = _same_layer(tie, looks)
        layer = layer or around
        if around is None:
            single.append(tie)
    if layer is None:
        return None
    copies = "give tied=[]"
    if single:
        copies = f"give them other values until this call is done, and tied={_spelled(single)}"
    (stage, name), (other, again) = layer
    return (
        f"layer {name!r} of stage {stage} and layer {again!r} of stage {other} hold the same"
        " values, and nothing says whether they are one layer: if they are copies of one another,"
        f" {copies}; if they are one, {before}give tied={_spelled(suspects)}, so that they stay"
        " equal"
    )


def _same_layer(
    tie: Mapping[int, str], looks: Looks
) -> tuple[tuple[int, str], tuple[int, str]] | None:
    """Return the largest layers around a weight that agree in all their weights, two or more.

    A layer is given by its stage and its name, which is "" for a whole stage.
    """
    (stage, name), (other, again), *_ = sorted(tie.items())
    here, there = name.split("."), again.split(".")
    found = None
    while here and there and here.pop() == there.pop():
        one, two = ".".join(here), ".".join(there)
        ours = _values_within(one, looks[stage])
        if len(ours) > 1 and ours == _values_within(two, looks[other]):
            found = (stage, one), (other, two)
    return found


def _values_within(layer: str, looks: Mapping[str, Look]) -> dict[str, Values]:
    """Return the values of a layer's weights by their names within it."""
    start = f"{layer}." if layer else ""
    within = {name: look for name, look in looks.items() if name.startswith(start)}
    return {name.removeprefix(start): look.values for name, look in within.items()}


def _dimensions(tie: Mapping[int, str], looks: Looks) -> int:
    """Return the number of dimensions of a weight; 0 if it has no look."""
    for look in _ends(tie, looks):
        shape, *_ = look.values
        return len(shape)
    return 0


def _ends(tie: Mapping[int, str], looks: Looks) -> list[Look]:
    """Return the looks of a tie's places, as far as they have one."""
    return [looks[stage][name] for stage, name in tie.items() if name in looks.get(stage, ())]


def problem_of_left_out_copies(
    looks: Looks,
    tied: Sequence[Mapping[int, str]],
    known: Sequence[Mapping[int, str]] | None = None,
) -> str | None:
    """Return which weights look like one, or like a tie, and are in no declared tie; or None.

    A frozen copy of a tied weight is no problem: a copy of earlier weights is kept on purpose.

    Args:
        tied: the declared ties; if there are none, nothing is tied.
        known: as for :func:`problem_of_forgotten_ties`.
    """
    declared = [_first_names(tie, looks) for tie in tied]
    for tie in declared:
        values = {look.values for look in _ends(tie, looks)}
        for stage, here in looks.items():
            for name, look in here.items():
                is_told = any(name == other.get(stage) for other in declared)
                if look.is_trained and look.values in values and not is_told:
                    remedy = f"add {stage}: {name!r} to it"
                    if stage in tie:
                        remedy = f"make it the parameter {tie[stage]!r}"
                    return (
                        f"{name!r} of stage {stage} has the values of the tied weight {dict(tie)}"
                        f" and is not in it, so the two would be trained apart: {remedy}; or,"
                        f" {_FILLED_LATER}"
                    )
    if not declared:
        return None
    suspects = [_first_names(tie, looks) for tie in known or ()]
    if known is None:
        suspects = _look_tied(looks)
    lost = [tie for tie in suspects if not _is_declared(tie, declared, in_part=known is None)]
    if not lost:
        return _problem_inside(looks, f"or, {_FILLED_LATER}") if known is None else None

    ends = " and ".join(f"{name!r} of stage {stage}" for stage, name in sorted(lost[0].items()))
    kept = [tie for tie in tied if not _is_declared(_first_names(tie, looks), lost, in_part=True)]
    are_one = "have the same shape and values"
    otherwise = _FILLED_LATER
    if known is not None:
        are_one = "are one weight of the model"
        otherwise = "to part them, untie the model before the cut"
    return (
        f"{ends} {are_one}, and are in no tie, so they would be trained apart: give "
        f"tied={_spelled([*kept, *lost])}; or, {otherwise}"
    )


def _is_declared(
    tie: Mapping[int, str], declared: Iterable[Mapping[int, str]], in_part: bool
) -> bool:
    """Return whether a ``declared`` tie has all places of ``tie``; with ``in_part`` one of them."""
    places = tie.items()
    for other in declared:
        shared = places & other.items()
        if shared == places or (in_part and shared):
            return True
    return False


def problem_of_two_ties(
    modules: "Mapping[int, nn.Module | None]", tied: Iterable[Mapping[int, str]]
) -> str | None:
    """Return which parameter of this rank's stages is in two ties, or None.

    Each tie would add up its own copies, and neither would see the gradients of the other's. The
    parameter itself is compared: it may have several names, and be in several stages of this rank.
    """
    tie_of: dict[int, int] = {}
    for number, tie in enumerate(tied):
        for stage, name in tie.items():
            module = modules.get(stage)
            held = {} if module is None else dict(module.named_parameters(remove_duplicate=False))
            # Another check refuses a name that the stage does not have.
            if name in held and tie_of.setdefault(id(held[name]), number) != number:
                return (
                    f"{name!r} of stage {stage} is in two ties: write one tie with all stages that"
                    " share it"
                )
    return None


def problem_of_broken_ties(
    stage: int, module: nn.Module, shared: Iterable[Sequence[str]] = ()
) -> str | None:
    """Return which names of one parameter became two parameters, as after ``to_empty``, or None.

    Args:
        shared: the names that each shared parameter should have, in this stage or in others; a
            stage of ``auto_split`` knows further ones itself.
    """
    held = dict(module.named_parameters(remove_duplicate=False))
    known: Iterable[Sequence[str]] = getattr(module, "names_of_one", ())
    for names in (*shared, *known):
        first, *others = [name for name in names if name in held] or [""]
        for name in others:
            if held[name] is not held[first]:
                return (
                    f"{name!r} of stage {stage} was the parameter {first!r} and"
                    f" {_BROKEN.format(name, first)}"
                )
    return None


_BROKEN = (
    "is another one now, as after to_empty(), so each would get a part of the gradient: make it one"
    " parameter again, the module's {0} = {1}, before it is sharded and an optimizer made"
)


def _problem_inside(looks: Looks, otherwise: str) -> str | None:
    """Return which weight has its own stage's embedding's values as a second parameter, or None."""
    for stage, here in looks.items():
        tables = {look.values: name for name, look in here.items() if look.is_embedding}
        for name, look in here.items():
            first = tables.get(look.values)
            if first is None or look.is_embedding:
                continue
            if look.is_trained or here[first].is_trained:
                return (
                    f"{name!r} of stage {stage} has the values of {first!r} and"
                    f" {_BROKEN.format(name, first)}; {otherwise}"
                )
    return None


def _first_names(tie: Mapping[int, str], looks: Looks) -> dict[int, str]:
    """Return the tie with each parameter's first name, by which :data:`Looks` has it."""
    named = {}
    for stage, given in tie.items():
        named[stage] = given
        for name, look in looks.get(stage, {}).items():
            if given in look.also:
                named[stage] = name
    return named


def _spelled(ties: Iterable[Mapping[int, str]]) -> str:
    return str([dict(sorted(tie.items())) for tie in ties])


def _look_tied(looks: Looks) -> list[dict[int, str]]:
    """Return the ties that the values suggest, each as a name by stage.

    An embedding's values in another layer suggest a tie. Elsewhere equal values may have another
    cause: layers were copied, or seeded alike. A copied layer appears more than once in a stage,
    and stages that are seeded alike begin alike. Equal weights without such a cause are one weight.
    """
    ties: dict[Values, dict[int, str]] = {}
    for (stage, here), (other, there) in combinations(sorted(looks.items()), 2):
        ours, theirs = _by_values(here), _by_values(there)
        start = _same_start(here, there)
        for values in ours.keys() & theirs.keys():
            found = [here[name] for name in ours[values]]
            found += [there[name] for name in theirs[values]]
            if not any(look.is_trained for look in found):
                continue
            is_embedding = {look.is_embedding for look in found}
            if len(is_embedding) == 2 or (len(found) == 2 and values not in start):
                tie = ties.setdefault(values, {})
                tie.setdefault(stage, ours[values][0])
                tie.setdefault(other, theirs[values][0])
    return sorted(ties.values(), key=lambda tie: sorted(tie.items()))


def _by_values(looks: Mapping[str, Look]) -> dict[Values, list[str]]:
    names: dict[Values, list[str]] = {}
    for name, look in looks.items():
        names.setdefault(look.values, []).append(name)
    return names


def _same_start(here: Mapping[str, Look], there: Mapping[str, Look]) -> set[Values]:
    """Return the values with which two stages begin alike, if one seed explains them.

    Weights drawn from one seed are equal until shapes or dtypes differ. If values differ before
    that, the stages had two seeds.
    """
    equal: set[Values] = set()
    for one, other in zip(here.values(), there.values(), strict=False):
        if one.values != other.values:
            had_two_seeds = one.values[:2] == other.values[:2]
            return set() if had_two_seeds else equal
        equal.add(one.values)
    return equal
