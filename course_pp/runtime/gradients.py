"""What becomes of gradients when a rank's actions are done: they are summed over all places of a
weight.

The places of a weight that is tied between stages, or in the replicas of one stage, exchange their
gradients.

FSDP2 (``fully_shard``) reduces a group's gradients, and frees its parameters, as soon as a backward
has passed it. Under a pipeline that is once a microbatch, and before the weight gradients that were
put off to ``W``, which would be lost without a word. So gradients stay whole on each rank during a
step, and are reduced after its last action.
"""

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeGuard

import torch.distributed as dist
from torch import Tensor, nn

from course_pp.base.torch_private import (
    all_reduces,
    data_groups,
    finalize_by_hand,
    forget_gradients,
    reduce_gradients,
)
from course_pp.step.hooks import call_hooks
from course_pp.step.ties import add_up, copies_in, set_apart

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


@dataclass(frozen=True, order=True)
class WeightPlace:
    """Parameter ``name`` of ``stage`` on ``rank``."""

    rank: int
    stage: int
    name: str


Weight = tuple[WeightPlace, ...]
"""All places of one weight, in order."""


class SharedWeights:
    """This rank's part in summing the gradients of ``weights``, all that are in several places.

    Each rank adds up the same numbers in the same order, so weights that start equal stay equal bit
    by bit.
    """

    def __init__(
        self, rank: int, weights: Sequence[Weight], modules: Mapping[int, nn.Module | None]
    ) -> None:
        self._rank = rank
        self._weights = [
            weight for weight in weights if any(place.rank == rank for place in weight)
        ]
        self._modules = modules
        self._parameters: dict[WeightPlace, nn.Parameter] = {}

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Let gradients start from nothing inside. Earlier ones are sums already, and are added back afterwards."""
        mine = (place for weight in self._weights for place in weight if place.rank == self._rank)
        self._parameters = copies_in(
            self._modules, ((place, place.stage, place.name) for place in mine)
        )
        with set_apart(self._parameters.values()):
            yield

    def for_rank(self, other: int) -> list[Tensor | None]:
        """Return this rank's gradient of each weight that ``other`` holds too."""
        return [
            self._own(weight)
            for weight in self._weights
            if any(place.rank == other for place in weight)
        ]

    def add(self, received: Mapping[int, Sequence[Tensor | None]]) -> None:
        """Set every gradient to the sum over all places, given what the other ranks have sent."""
        rows = {rank: iter(row) for rank, row in received.items()}
        for weight in self._weights:
            ranks = sorted({place.rank for place in weight})
            total = add_up(
                [self._own(weight) if rank == self._rank else next(rows[rank]) for rank in ranks]
            )
            for place in weight:
                if (parameter := self._parameters.get(place)) is not None:
                    parameter.grad = None if total is None else total.clone()
                    # of which nothing may have come from this rank's own backwards
                    if total is not None:
                        call_hooks(parameter)

    def _own(self, weight: Weight) -> Tensor | None:
        return add_up(
            [self._parameters[place].grad for place in weight if place in self._parameters]
        )


class ShardedStages:
    """What FSDP2 has wrapped in this rank's stages, some of which may be None; there need not be any."""

    def __init__(self, modules: Iterable[nn.Module | None]) -> None:
        self._roots = [
            root for module in modules if module is not None for root in _outermost(module)
        ]

    @cached_property
    def data_groups(self) -> Sequence[dist.ProcessGroup]:
        """Those over whose ranks gradients are averaged; the widest, if parts of a stage have others."""
        found = (data_groups(part) for root in self._roots for part in _sharded_parts(root))
        return max(
            found, key=lambda groups: math.prod(group.size() for group in groups), default=[]
        )

    @contextmanager
    def reduced_once(self, trains: bool) -> Iterator[None]:
        """Reduce the gradients that the body computes, if it ``trains``; forget them if it raises.

        Parts whose ``set_requires_all_reduce(False)`` leaves the replicas of HSDP for a later step
        stay so.
        """
        as_set = [
            (part, all_reduces(part)) for root in self._roots for part in _sharded_parts(root)
        ]
        for root in self._roots:
            _sync(root, False)
            finalize_by_hand(root, True)
        try:
            yield
        except BaseException:
            for root in self._roots:
                forget_gradients(root)
                _sync(root, True)
                finalize_by_hand(root, False)
            _restore(as_set)
            raise
        for root in self._roots:
            _sync(root, True)
        _restore(as_set)
        try:
            for root in self._roots:
                if trains:
                    reduce_gradients(root)
                    continue
                # Free what a forward has gathered and no backward will: the next step would compute
                # with it, old or not.
                for part in _sharded_parts(root):
                    part.reshard()
        finally:
            for root in self._roots:
                finalize_by_hand(root, False)


def _outermost(module: nn.Module) -> "Iterator[FSDPModule]":
    if _is_sharded(module):
        yield module
    else:
        for child in module.children():
            yield from _outermost(child)


def _is_sharded(module: nn.Module) -> "TypeGuard[FSDPModule]":
    # Importing it takes a second, and whoever has applied it has done so.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def _sync(root: "FSDPModule", on: bool) -> None:
    root.set_is_last_backward(on)
    root.set_reshard_after_backward(on)
    root.set_requires_gradient_sync(on)


def _restore(as_set: "Iterable[tuple[FSDPModule, bool]]") -> None:
    for part, on in as_set:
        part.set_requires_all_reduce(on, recurse=False)


def _sharded_parts(root: "FSDPModule") -> "Iterator[FSDPModule]":
    assert isinstance(root, nn.Module)
    return (module for module in root.modules() if _is_sharded(module))
