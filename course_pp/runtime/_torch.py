"""The one place of the runtime that touches private names of torch, which may move between releases."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

__all__ = ["data_groups", "forget_gradients", "n_groups", "reduce_gradients"]


def n_groups() -> int:
    """Return how many process groups this process is in: torch names one after it that only its own members make."""
    return len(dist.distributed_c10d._world.pg_names)


def reduce_gradients(root: "FSDPModule") -> None:
    """Do what FSDP2 does at the end of a backward: reduce the gradients of all groups below ``root`` and wait for them.

    The pipelines of torch call the same two functions; there is no public way.
    """
    state = root._get_fsdp_state()
    for group in _groups(root):
        group.post_backward()
    state._root_post_backward_final_callback()


def data_groups(module: "FSDPModule") -> list[dist.ProcessGroup]:
    """Return the groups over whose ranks FSDP2 averages the gradients of ``module`` itself."""
    states = [module._get_fsdp_state()]
    infos = [group.mesh_info for group in _groups_of(states)]
    found = (getattr(infos[0], f"{kind}_process_group", None) for kind in ("shard", "replicate")) if infos else ()
    return [group for group in found if group is not None]


def forget_gradients(root: "FSDPModule") -> None:
    """Drop the gradients below ``root`` that are not reduced yet, after a forward or backward was cut short."""
    for group in _groups(root):
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None
        group._training_state = type(group._training_state).IDLE
        group.reshard()
    if hasattr(root, "reset_iter_state"):  # not in every release, and it forgets no gradients
        root.reset_iter_state()


def _groups(root: "FSDPModule") -> list[Any]:
    """Return the groups of parameters that FSDP2 gathers and reduces together; a list for each state from 2.13 on."""
    return _groups_of(root._get_fsdp_state()._state_ctx.all_states)


def _groups_of(states: Iterable[Any]) -> list[Any]:
    groups = [getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group] for state in states]
    return [group for row in groups for group in row if group is not None]
