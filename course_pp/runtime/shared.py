"""Gradients of weights that are in several places: tied between stages, or in the replicas of one stage."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn

from course_pp.hooks import call_hooks
from course_pp.runtime.agreement import Fact
from course_pp.schedule import Schedule
from course_pp.tied import add_up, copies_in, set_apart

__all__ = ["SharedWeights", "Weight", "shared_weights"]


@dataclass(frozen=True, order=True)
class Place:
    """Parameter ``name`` of ``stage`` on ``rank``."""

    rank: int
    stage: int
    name: str


Weight = tuple[Place, ...]
"""All places of one weight, in order."""


def shared_weights(
    schedule: Schedule, parameters: Mapping[int, Mapping[str, Fact]], tied: Sequence[Mapping[int, str]]
) -> tuple[Weight, ...]:
    """Return every weight that is in more than one place.

    Args:
        parameters: of each stage, by name.
        tied: for each tie the parameter's name by stage.

    Raises:
        ValueError: for a tie of fewer than two stages, with a stage or parameter that does not exist, or with one that
            is in another tie too, or of parameters that cannot be one weight.
    """
    seen: set[tuple[int, str]] = set()
    for tie in tied:
        _refuse_bad_tie(tie, parameters)
        if again := seen & tie.items():
            stage, name = min(again)
            raise ValueError(f"{name!r} of stage {stage} is in two ties: write one tie with all stages that share it")
        seen |= tie.items()
    keys: list[Mapping[int, str]] = list(tied)
    keys += [
        {stage: name}
        for stage, ranks in enumerate(schedule.placement)
        if len(ranks) > 1
        for name in parameters[stage]
        if not any(tie.get(stage) == name for tie in tied)
    ]
    return tuple(
        tuple(sorted(Place(rank, stage, name) for stage, name in key.items() for rank in schedule.placement[stage]))
        for key in keys
    )


def _refuse_bad_tie(tie: Mapping[int, str], parameters: Mapping[int, Mapping[str, Fact]]) -> None:
    if len(tie) < 2:
        raise ValueError(f"tied weight {dict(tie)} is in {len(tie)} stage: give a name for each of at least two stages")
    for stage, name in tie.items():
        if name not in parameters.get(stage, ()):
            raise ValueError(
                f"tied weight {dict(tie)}: stage {stage} has no parameter {name!r}; it has "
                f"{', '.join(parameters.get(stage, ())) or 'none'}"
            )
    (first, kind), *others = ((stage, parameters[stage][name].kind) for stage, name in sorted(tie.items()))
    for stage, other in others:
        if other != kind:
            raise ValueError(
                f"tied weight {dict(tie)} is {kind} in stage {first}, but {other} in stage {stage}: give it one shape "
                "and dtype, and train or freeze it in all its stages"
            )


class SharedWeights:
    """This rank's part in summing the gradients of shared weights.

    Each rank adds up the same numbers in the same order, so weights that start equal stay equal bit by bit.

    Args:
        rank: this rank.
        weights: all shared weights, the same on all ranks.
        modules: this rank's stages.
    """

    def __init__(self, rank: int, weights: Sequence[Weight], modules: Mapping[int, nn.Module | None]) -> None:
        self._rank = rank
        self._weights = [weight for weight in weights if any(place.rank == rank for place in weight)]
        self._modules = modules
        self._parameters: dict[Place, nn.Parameter] = {}

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Let gradients start from nothing inside. Earlier ones are sums already, and are added back afterwards."""
        mine = (place for weight in self._weights for place in weight if place.rank == self._rank)
        self._parameters = copies_in(self._modules, ((place, place.stage, place.name) for place in mine))
        with set_apart(self._parameters.values()):
            yield

    def for_rank(self, other: int) -> list[Tensor | None]:
        """Return what ``other`` needs from here: this rank's gradient of each weight that both hold."""
        return [self._own(weight) for weight in self._weights if any(place.rank == other for place in weight)]

    def add(self, received: Mapping[int, Sequence[Tensor | None]]) -> None:
        """Set every gradient to the sum over all places, given what the other ranks have sent."""
        rows = {rank: iter(row) for rank, row in received.items()}
        for weight in self._weights:
            ranks = sorted({place.rank for place in weight})
            parts = [self._own(weight) if rank == self._rank else next(rows[rank]) for rank in ranks]
            total = add_up(parts)
            for place in weight:
                if (parameter := self._parameters.get(place)) is not None:
                    parameter.grad = None if total is None else total.clone()
                    if total is not None:  # of which nothing may have come from this rank's own backwards
                        call_hooks(parameter)

    def _own(self, weight: Weight) -> Tensor | None:
        return add_up([self._parameters[place].grad for place in weight if place in self._parameters])
