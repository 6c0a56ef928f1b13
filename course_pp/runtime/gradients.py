"""The gradients of stages that FSDP2 (``fully_shard``) shards, reduced once a step.

FSDP2 reduces a group's gradients, and frees its parameters, as soon as a backward has passed it.
Under a pipeline that is once a microbatch, and before the weight gradients that were put off to
``W``, which would be lost without a word. So gradients stay whole on each rank during a step, and
are reduced after its last action.
"""

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, TypeGuard

import torch.distributed as dist
from torch import nn

from course_pp.base.torch_private import (
    all_reduces,
    data_groups,
    finalize_by_hand,
    forget_gradients,
    reduce_gradients,
)

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


class ShardedStages:
    """The parts of this rank's stages that FSDP2 shards, if there are any."""

    def __init__(self, modules: Iterable[nn.Module | None]) -> None:
        self._roots: list[FSDPModule] = []
        for module in modules:
            if module is not None:
                self._roots += _outermost(module)

    @cached_property
    def data_groups(self) -> Sequence[dist.ProcessGroup]:
        """The groups over whose ranks gradients are averaged; if parts differ, the widest."""
        widest: Sequence[dist.ProcessGroup] = []
        size = 0
        for root in self._roots:
            for part in _sharded_parts(root):
                groups = data_groups(part)
                ranks = math.prod(group.size() for group in groups)
                if ranks > size:
                    widest, size = groups, ranks
        return widest

    @contextmanager
    def reduced_once(self, trains: bool) -> Iterator[None]:
        """Reduce the gradients that the body computes, if it ``trains``; forget them if it raises.

        If ``set_requires_all_reduce(False)`` was called on a part, it stays in force: the sum over
        that part's HSDP replicas waits for a later step.
        """
        as_set = []
        for root in self._roots:
            as_set += [(part, all_reduces(part)) for part in _sharded_parts(root)]
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
                # Free the parameters that a forward gathered and no backward frees: the next step
                # would compute with them even if they are old.
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
    # Importing it takes a second, and a module can only be sharded if it is imported.
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
