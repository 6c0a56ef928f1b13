"""The one place that touches private names of torch, which move between releases."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed._functional_collectives import all_to_all_single_autograd, wait_tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import _utils as _pipelining_utils
from torch.distributed.pipelining import schedules as _schedules
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _WrappedHook as HookOfModule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

# And all that is defined here.
__all__ = ["HookOfModule", "TorchDispatchMode", "tree_flatten", "tree_map", "tree_unflatten"]


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Limit how long messages of ``group`` may take: a mesh gives its groups torch's default of half an hour."""
    if hasattr(dist, "set_timeout"):  # from torch 2.14 on
        dist.set_timeout(timeout, group)
    else:
        distributed_c10d._set_pg_timeout(timeout, group)


def all_to_all(x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Send ``sent[i]`` rows of ``x`` to rank i of the group, in order; return the rows that came, by rank.

    Backward sends the gradients back. Every rank takes part, whatever the numbers.
    """
    return wait_tensor(all_to_all_single_autograd(x.contiguous(), received, sent, group))


class LocalNeighboursStage(PipelineStage):
    """A stage whose neighbours may live on its own rank, as under V placements or on a single rank."""

    # Goes with torch 2.12: later ones call _validate_stage_tensors.
    def _validate_fwd_input(self, args: Any, kwargs: Any) -> None:
        """Compare nothing here: torch before 2.13 knows tuples of tensors alone, and a stage may take more."""

    # Goes with torch 2.12.
    def _validate_fwd_outputs(self, outputs: Any) -> None:
        """As for inputs: :class:`course_pp.parallel.stage.ModelStage` compares, in containers too."""

    def _validate_stage_tensors(self, *_: Any) -> None:
        """As for inputs, from torch 2.13 on, which expects one shape of all microbatches."""

    # Goes with torch 2.12: later ones call it for traced stages alone, which are none of ours.
    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        # torch before 2.12 opens connections by a message to itself too, which gloo refuses.
        torch_stage: Any = super()
        return [op for op in torch_stage._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if not full_backward:
            self._gather_parameters()
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if bwd_chunk_id in self.bwd_cache:  # what is sent back next
            self.bwd_cache[bwd_chunk_id] = self.sent_back(bwd_chunk_id, self.bwd_cache[bwd_chunk_id])

    def sent_back(self, microbatch: int, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Return what the stage before is sent for the gradients of the tensors that it sent: just these, in torch."""
        return tuple(gradients)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        self._gather_parameters()
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def _gather_parameters(self) -> None:
        """Put FSDP2's gathered parameters back in place: a forward may have freed them.

        torch looks for the graph's parameters in the module. If it finds shards there, it silently skips the gradients
        of a split backward.
        """
        for module in self.submod.modules():
            if isinstance(module, FSDPModule):
                module.unshard()


def expect(received: Any, shape: tuple[int, ...]) -> None:
    """Let the next message of a receive (torch's ``_RecvInfo``) have this shape, whatever was declared."""
    if hasattr(received, "allocate_buffer"):  # from torch 2.15 on: it makes a buffer for each message
        declared = received.tensor_meta
        if declared is not None:
            like = torch.empty(shape, device="meta")
            received.tensor_meta = replace(declared, shape=like.shape, stride=like.stride())
        return
    buffer = received.buffer
    if buffer is not None and tuple(buffer.shape) != shape:
        received.buffer = buffer.new_empty(shape).requires_grad_(buffer.requires_grad)


def leave_out_of_backward(stage: Any, microbatch: int, unused: Sequence[bool]) -> None:
    """Let the backward of a microbatch begin without those outputs of its forward that are ``unused``."""
    if hasattr(stage, "fwd_cache"):  # before torch 2.15
        outputs, *rest = stage.fwd_cache[microbatch]
        kept = (tensor.detach() if left else tensor for tensor, left in zip(outputs, unused, strict=True))
        stage.fwd_cache[microbatch] = (tuple(kept), *rest)
        return
    outputs = stage._forward_chunk_states[microbatch].live_outputs
    for i, left in enumerate(unused):
        if left:  # a tensor of no graph, in place of one that torch may have let go of once it was sent
            outputs[i] = torch.empty(0)


def run_step(
    schedule: Any,
    stages: Sequence[PipelineStage],
    arguments: list[tuple[Any, ...]],
    targets: list[Any] | None,
    losses: list[Tensor],
) -> None:
    """Train on microbatches that are cut already."""
    if "arg_mbs" in signature(schedule.step).parameters:  # from torch 2.14 on
        schedule.step(arg_mbs=arguments, target_mbs=targets, losses=losses, return_outputs=False)
        return
    for stage in stages:
        stage.has_backward = True
        stage.clear_runtime_states()
    schedule._step_microbatches(arguments, None, targets, losses, return_outputs=False)


@contextmanager
def all_reducing_as_set(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Keep what ``set_requires_all_reduce`` was set to, through a step in the ``with`` block.

    It is torch's switch for accumulation under HSDP: with False a step leaves the replicas for a later one. torch's
    stages call ``set_requires_gradient_sync``, which sets both switches, so this one is set again after each call.
    """
    parts = [part for module in modules for part in module.modules() if isinstance(part, FSDPModule)]
    groups = {part: _groups_of(part) for part in parts}
    asked = [(part, all(group.all_reduce_grads for group in groups[part])) for part in parts]
    waiting = any(group._partial_reduce_output is not None for part in parts for group in groups[part])
    if not waiting and all(on for _, on in asked):
        yield
        return

    def set_sync(part: FSDPModule, on: bool, *, recurse: bool = True) -> None:
        FSDPModule.set_requires_gradient_sync(part, on, recurse=recurse)
        if on:
            restore()

    def restore() -> None:
        for part, on in asked:
            part.set_requires_all_reduce(on, recurse=False)

    for part in parts:
        vars(part)["set_requires_gradient_sync"] = partial(set_sync, part)
        # From torch 2.15 on a check refuses what is left for later; the reduction itself is right.
        vars(part._get_fsdp_state())["_validate_finalize_backward"] = lambda: None
    try:
        yield
    finally:
        for part in parts:
            del vars(part)["set_requires_gradient_sync"]
            del vars(part._get_fsdp_state())["_validate_finalize_backward"]
        restore()


def _groups_of(part: FSDPModule) -> list[Any]:
    """Return the groups of parameters that FSDP2 reduces for a part itself, if it has any."""
    state: Any = part._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # a list from 2.13 on
    return [group for group in groups if group is not None]


def explicit_order(
    stages: list[PipelineStage], n_microbatches: int, rows: Sequence[Sequence[str]], **options: Any
) -> Any:
    """Return the executor behind torch's own multi-stage schedules; ``rows`` are each rank's actions, as ``"2F0"``."""
    schedule = _schedules._PipelineScheduleRuntime(stages, n_microbatches, **options)
    schedule.pipeline_order = {rank: list(map(_schedules._Action.from_str, row)) for rank, row in enumerate(rows)}
    schedule._prepare_schedule_with_comms(schedule.pipeline_order)
    return schedule


def carries_integers() -> bool:
    """Return whether torch's pipelining sends tensors without gradient between stages: from 2.13 on."""
    return hasattr(_pipelining_utils, "_StageMeta")


def mixed_precision(module: torch.nn.Module) -> MixedPrecisionPolicy | None:
    """Return the mixed-precision policy of a module under FSDP2, None without FSDP2. torch has no public getter."""
    return module._get_fsdp_state()._mp_policy if isinstance(module, FSDPModule) else None


def is_compiled_in_place(module: torch.nn.Module) -> bool:
    """Return whether somebody has called ``module.compile()``, or that of a part. torch has no public getter."""
    return any(part._compiled_call_impl is not None for part in module.modules())


def norms_of(tensors: Sequence[Tensor], norm_type: float, foreach: bool, device: torch.device) -> Tensor:
    """Return the norm of each tensor that is not empty, float64 (n,), accumulated in float32 or wider."""
    tensors = [tensor for tensor in tensors if tensor.numel()]
    if not tensors:
        return torch.zeros(0, dtype=torch.float64, device=device)
    if foreach and all(tensor.dtype.itemsize >= 4 for tensor in tensors):
        norms = torch._foreach_norm(tensors, norm_type)
    else:
        dtypes = (t.dtype if t.dtype.itemsize >= 4 else torch.float32 for t in tensors)
        norms = tuple(torch.linalg.vector_norm(t, norm_type, dtype=d) for t, d in zip(tensors, dtypes, strict=True))
    return torch.stack([norm.double() for norm in norms])


def multiply(tensors: Sequence[Tensor], factor: Tensor, foreach: bool) -> None:
    """Multiply each tensor by a scalar tensor, in place."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for dtype, alike in by_dtype.items():
        if foreach:
            torch._foreach_mul_(alike, factor.to(dtype))
        else:
            for tensor in alike:
                tensor.mul_(factor)


# What follows only watches: for traffic_and_memory.py.


class CollectiveWatcher(TorchDispatchMode):
    """Reports every collective and message that this process begins in the ``with`` block, on any process group.

    All of them pass torch's dispatcher, and autograd carries this mode to the threads that run backward.

    Args:
        tell: called with the operator's name, such as ``"_allgather_base_"``, the group, and the bytes of the larger of
            what goes in and what comes out on this rank.
    """

    def __init__(self, tell: Callable[[str, dist.ProcessGroup, int], None]) -> None:
        super().__init__()
        self._tell = tell

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor comes first; what it calls is seen here in turn
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace in ("c10d", "_c10d_functional"):
            arguments = {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)} | kwargs
            group = arguments.get("process_group", arguments.get("group_name"))
            if group is not None:
                results = result if isinstance(result, tuple) else (result,)
                self._tell(func._opname, _group(group), max(map(_n_bytes, (*arguments.values(), *results))))
        return result


def _group(group: Any) -> dist.ProcessGroup:
    """Return the group that an operator was given as itself, its name, or the dispatcher's box around it."""
    if isinstance(group, dist.ProcessGroup):
        return group
    resolve: Callable[[Any], dist.ProcessGroup] = distributed_c10d._resolve_process_group
    return resolve(group) if isinstance(group, str) else dist.ProcessGroup.unbox(group)


def _n_bytes(value: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


class GatheredWatcher(TorchDispatchMode):
    """Measures after every operation in the ``with`` block how many bytes of gathered parameters FSDP2 holds.

    A gather counts from its start, over all ranks of ``dp_shard`` or some; while it is copied out, once.
    """

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        self.peak = 0
        states = [part._get_fsdp_state() for m in modules for part in m.modules() if isinstance(part, FSDPModule)]
        self._groups = [group for state in states if (group := state._fsdp_param_group) is not None]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        self.peak = max(self.peak, sum(map(_gathered_bytes, self._groups)))
        return result


def _gathered_bytes(group: Any) -> int:
    if group.is_unsharded:
        outputs = [output for parameter in group.fsdp_params for output in parameter.all_gather_outputs]
        return sum(output.untyped_storage().nbytes() for output in outputs)
    if group._all_gather_result is not None:
        return group._all_gather_result.all_gather_output.nbytes
    if group.is_sharded_post_forward:
        return sum(parameter._sharded_post_forward_param_data.nbytes for parameter in group.fsdp_params)
    return 0
