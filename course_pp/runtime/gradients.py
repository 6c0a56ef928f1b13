"""What becomes of gradients when a rank's actions are done: they are summed over all places of a weight.

The places of a weight that is tied between stages, or in the replicas of one stage, exchange their gradients.

FSDP2 (``fully_shard``) reduces a group's gradients, and frees its parameters, as soon as a backward has passed it.
Under a pipeline that is once a microbatch, and before the weight gradients that were put off to ``W``, which would be
lost without a word. So gradients stay whole on each rank during a step, and are reduced after its last action.
"""

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeGuard

import torch.distributed as dist
from torch import Tensor, nn

from course_pp.step.hooks import call_hooks
from course_pp.step.ties import add_up, copies_in, set_apart

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


@dataclass(frozen=True, order=True)
class Place:
    """Parameter ``name`` of ``stage`` on ``rank``."""

    rank: int
    stage: int
    name: str


Weight = tuple[Place, ...]
"""All places of one weight, in order."""


class SharedWeights:
    """This rank's part in summing the gradients of ``weights``, all that are in several places.

    Each rank adds up the same numbers in the same order, so weights that start equal stay equal bit by bit.
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
        """Return this rank's gradient of each weight that ``other`` holds too."""
        return [self._own(weight) for weight in self._weights if any(place.rank == other for place in weight)]

    def add(self, received: Mapping[int, Sequence[Tensor | None]]) -> None:
        """Set every gradient to the sum over all places, given what the other ranks have sent."""
        rows = {rank: iter(row) for rank, row in received.items()}
        for weight in self._weights:
            ranks = sorted({place.rank for place in weight})
            total = add_up([self._own(weight) if rank == self._rank else next(rows[rank]) for rank in ranks])
            for place in weight:
                if (parameter := self._parameters.get(place)) is not None:
                    parameter.grad = None if total is None else total.clone()
                    if total is not None:  # of which nothing may have come from this rank's own backwards
                        call_hooks(parameter)

    def _own(self, weight: Weight) -> Tensor | None:
        return add_up([self._parameters[place].grad for place in weight if place in self._parameters])


class ShardedStages:
    """What FSDP2 has wrapped in this rank's stages, some of which may be None; there need not be any."""

    def __init__(self, modules: Iterable[nn.Module | None]) -> None:
        self._roots = [root for module in modules if module is not None for root in _outermost(module)]

    @cached_property
    def data_groups(self) -> Sequence[dist.ProcessGroup]:
        """Those over whose ranks gradients are averaged; the widest, if parts of a stage have others."""
        found = (_data_groups(part) for root in self._roots for part in _sharded_parts(root))
        return max(found, key=lambda groups: math.prod(group.size() for group in groups), default=[])

    @contextmanager
    def reduced_once(self, trains: bool) -> Iterator[None]:
        """Reduce the gradients that the body computes, if it ``trains``; forget them if it raises.

        Parts whose ``set_requires_all_reduce(False)`` leaves the replicas of HSDP for a later step stay so.
        """
        all_reduces = [(part, _all_reduces(part)) for root in self._roots for part in _sharded_parts(root)]
        for root in self._roots:
            _sync(root, False)
            _finalize_by_hand(root, True)
        try:
            yield
        except BaseException:
            for root in self._roots:
                _forget_gradients(root)
                _sync(root, True)
                _finalize_by_hand(root, False)
            _restore(all_reduces)
            raise
        for root in self._roots:
            _sync(root, True)
        _restore(all_reduces)
        for root in self._roots:
            if trains:
                _reduce_gradients(root)
            else:
                # Free what a forward has gathered and no backward will: the next step would compute
                # with it, old or not.
                for part in _sharded_parts(root):
                    part.reshard()
            _finalize_by_hand(root, False)


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


def _restore(all_reduces: "Iterable[tuple[FSDPModule, bool]]") -> None:
    for part, on in all_reduces:
        part.set_requires_all_reduce(on, recurse=False)


def _sharded_parts(root: "FSDPModule") -> "Iterator[FSDPModule]":
    assert isinstance(root, nn.Module)
    return (module for module in root.modules() if _is_sharded(module))


# FSDP2's private names, which may move between releases. Torch's own pipelines call them too:
# before torch 2.15 there is no public way.


def _finalize_by_hand(root: "FSDPModule", on: bool) -> None:
    """Leave the end of a backward to :func:`_reduce_gradients`, or to FSDP2 again."""
    if hasattr(root, "set_manual_backward_finalization"):  # from torch 2.15 on
        root.set_manual_backward_finalization(on)


def _reduce_gradients(root: "FSDPModule") -> None:
    """Reduce the gradients of all groups below ``root`` and wait for them, as FSDP2 does at the end of a backward."""
    state: Any = root._get_fsdp_state()
    groups = _groups_of(state._state_ctx.all_states)
    of_some_replicas = [not group.all_reduce_grads or group._partial_reduce_output is not None for group in groups]
    if not hasattr(root, "finalize_backward"):  # before torch 2.15
        for group in groups:
            group.post_backward()
        state._root_post_backward_final_callback()
    elif any(of_some_replicas):  # which finalize_backward refuses
        for group in groups:
            group.post_backward()
            group._training_state = type(group._training_state).IDLE
        state.wait_for_gradient_reduction()
    else:
        root.finalize_backward()


def _all_reduces(part: "FSDPModule") -> bool:
    """Return whether ``part`` itself all-reduces its gradients; True also if it has none of its own."""
    return all(group.all_reduce_grads for group in _groups_of([part._get_fsdp_state()]))


def _data_groups(module: "FSDPModule") -> list[dist.ProcessGroup]:
    """Return the groups over whose ranks FSDP2 averages the gradients of ``module`` itself."""
    infos = [group.mesh_info for group in _groups_of([module._get_fsdp_state()])]
    found = (getattr(infos[0], f"{kind}_process_group", None) for kind in ("shard", "replicate")) if infos else ()
    return [group for group in found if group is not None]


def _forget_gradients(root: "FSDPModule") -> None:
    """Drop the gradients below ``root`` that are not reduced yet, after a forward or backward was cut short."""
    state: Any = root._get_fsdp_state()
    if state._is_root is None:  # there was no forward yet: no gradients, and nothing that a reset could find
        return
    groups = _groups_of(state._state_ctx.all_states)
    parameters = [parameter for group in groups for parameter in group.fsdp_params]
    of_earlier_steps = [parameter.sharded_param.grad for parameter in parameters]
    if not hasattr(root, "finalize_backward"):  # before torch 2.15 a reset forgets no gradients
        for parameter in parameters:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None
        for group in groups:
            group._training_state = type(group._training_state).IDLE
            group.reshard()
    if hasattr(root, "reset_iter_state"):  # not in every release
        root.reset_iter_state()
    for parameter, gradient in zip(parameters, of_earlier_steps, strict=True):
        parameter.sharded_param.grad = gradient  # from torch 2.15 on a reset forgets these too


def _groups_of(states: Iterable[Any]) -> list[Any]:
    """Return the groups of parameters that FSDP2 gathers and reduces together; a list for each state from 2.13 on."""
    groups = [getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group] for state in states]
    return [group for row in groups for group in row if group is not None]
