"""Stages sharded by FSDP2 (``fully_shard``): one reduction of each gradient a step, when all of it is there.

FSDP2 reduces a group's gradients, and frees its parameters, as soon as a backward has passed it. Under a pipeline that
would be once a microbatch, and before the weight gradients that were put off to ``W``: those would be lost without a
word. So during a step gradients stay whole on each rank and are summed over the microbatches, as torch's own pipelines
do; after the rank's last action they are reduced.
"""

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, TypeGuard

from torch import nn

from course_pp.runtime._torch import data_groups, forget_gradients, reduce_gradients

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.fsdp import FSDPModule

__all__ = ["ShardedStages"]


class ShardedStages:
    """What FSDP2 has wrapped in this rank's stages; there need not be any.

    Args:
        modules: of the stages, None for an empty one.
        trains: whether a step has backwards.
    """

    def __init__(self, modules: Iterable[nn.Module | None], trains: bool) -> None:
        self._roots = [root for module in modules if module is not None for root in _outermost(module)]
        self._trains = trains

    @cached_property
    def data_groups(self) -> "Sequence[dist.ProcessGroup]":
        """Those over whose ranks gradients are averaged; the widest, if parts of a stage have others."""
        found = (data_groups(part) for root in self._roots for part in _sharded_parts(root))
        return max(found, key=lambda groups: math.prod(group.size() for group in groups), default=[])

    @contextmanager
    def reduced_once(self) -> Iterator[None]:
        """The body computes the gradients of a step; afterwards they are reduced. If it raises, they are forgotten."""
        for root in self._roots:
            _sync(root, False)
        try:
            yield
        except BaseException:
            for root in self._roots:
                forget_gradients(root)
                _sync(root, True)
            raise
        for root in self._roots:
            _sync(root, True)
            if self._trains:
                reduce_gradients(root)
            else:
                _reshard(root)


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


def _reshard(root: "FSDPModule") -> None:
    """Free what a forward has gathered and no backward will: the next step would compute with it, old or not."""
    for module in _sharded_parts(root):
        module.reshard()


def _sharded_parts(root: "FSDPModule") -> "Iterator[FSDPModule]":
    assert isinstance(root, nn.Module)
    return (module for module in root.modules() if _is_sharded(module))
