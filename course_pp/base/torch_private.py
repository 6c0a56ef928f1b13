"""The one file that names something private of torch, which may move between releases.

Every function has a plain name, says what it is for, and names the releases of torch that it tells
apart, if there are any. ``tests/base/test_torch_private.py`` keeps all other files free of private
names.

Parts of torch that ``import torch`` leaves out, such as FSDP2, are imported inside functions: they
take a second, and whoever has something of theirs has imported them.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler, OptState
from torch.distributed import distributed_c10d
from torch.nn.modules.module import _WrappedHook as HookOfModule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
    from torch.distributed.pipelining import PipelineStage

# And all that is defined here.
__all__ = [
    "HookOfModule",
    "TorchDispatchMode",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
]


_StageClass = TypeVar("_StageClass", bound=type)


# Modules.


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the dict in which a module keeps its own parameters, by name; a change of it counts.

    ``named_parameters`` yields a parameter once, leaves out each that is None, and takes no change.
    """
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the dict in which a module keeps its own buffers, by name; a change of it counts."""
    return module._buffers


def own_children(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the dict in which a module keeps its children, by name; a change of it counts."""
    return module._modules


def give_containers(
    module: nn.Module,
    parameters: dict[str, nn.Parameter | None],
    buffers: dict[str, Tensor | None],
    children: dict[str, nn.Module | None],
) -> None:
    """Let a module that was made without ``__init__`` keep its parts in these dicts."""
    module._parameters = parameters
    module._buffers = buffers
    module._modules = children


class ToldOfChanges(nn.Module):
    """A module that is told when its tensors were replaced. torch has no public hook for both."""

    def was_converted(self, before: Mapping[str, Tensor | None]) -> None:
        """Called after ``to``, ``half`` and their kin, with the buffers from before."""

    def was_loaded(self) -> None:
        """Called after ``load_state_dict`` has filled this module's own tensors."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ToldOfChanges":
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        self.was_converted(before)
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self.was_loaded()


def name_uncompiled(name: str) -> str:
    """Return the name of a tensor in a module, without what ``torch.compile`` puts into it."""
    return name.replace("_orig_mod.", "")


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module inside the one that ``torch.compile`` returns, or ``module`` itself."""
    inner = module._modules.get("_orig_mod")
    return module if inner is None else inner


def is_compiled_in_place(module: nn.Module) -> bool:
    """Return whether ``compile()`` of this module was called. torch has no public getter."""
    return getattr(module, "_compiled_call_impl", None) is not None


def forget_compiled(module: nn.Module) -> None:
    """Let a copy of a module that was compiled in place run as it is written."""
    module._compiled_call_impl = None


def kinds_of_dropout() -> tuple[type[nn.Module], ...]:
    """Return the classes of modules that draw random numbers: dropouts and ``RReLU``."""
    return nn.modules.dropout._DropoutNd, nn.RReLU


def is_flat(parameter: nn.Parameter) -> bool:
    """Return whether FSDP1 has marked a parameter as flat, or as a piece of a flat one."""
    return bool(getattr(parameter, "_fsdp_flattened", False))


def ddp_without_wrapper() -> type | None:
    """Return the class that torch's ``replicate`` puts on a module, None if it is not imported."""
    module = sys.modules.get("torch.distributed._composable.replicate")
    return None if module is None else module.DDP


def steps_in_backward(parameter: nn.Parameter) -> bool:
    """Return whether torch lets an optimizer step this parameter in the backward."""
    return bool(getattr(parameter, "_in_backward_optimizers", None))


# Tensors, and the operations on them.


def version_of(tensor: Tensor) -> int:
    """Return how many times a tensor's storage was changed in place."""
    return tensor._version


def storage_key(tensor: Tensor) -> int:
    """Return a number that tensors share if they share a storage, also on the meta device."""
    return tensor.untyped_storage()._cdata


def hooks_after_accumulation(tensor: Tensor) -> dict[Any, Any]:
    """Return the hooks of ``register_post_accumulate_grad_hook`` by key, in order.

    A change of this dict counts, unless it is empty.
    """
    hooks: dict[Any, Any] | None = tensor._post_accumulate_grad_hooks
    return {} if hooks is None else hooks


def has_hooks(tensor: Tensor) -> bool:
    """Return whether somebody has registered a hook on the gradient of ``tensor``."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def asks_for_number(operation: Any) -> bool:
    """Return whether an operation gives Python a tensor's value, as ``item()`` does."""
    return operation is torch.ops.aten._local_scalar_dense.default


def is_grouped_product(operation: Any) -> bool:
    """Return whether an operation multiplies groups of rows, each with a matrix of its own."""
    return operation is torch.ops.aten._grouped_mm.default


def declared_arguments(operation: Any) -> Any:
    """Return an operation's arguments as torch declares them: names, and which it writes to."""
    return operation._schema.arguments


def operator_name(operation: Any) -> str:
    """Return the name of an operation without its namespace, such as ``"_allgather_base_"``."""
    name: str = operation._opname
    return name


def is_collective(operation: Any) -> bool:
    """Return whether an operation is of torch.distributed: a collective or a message."""
    return operation.namespace in ("c10d", "_c10d_functional")


def norms_of(
    tensors: Sequence[Tensor], norm_type: float, foreach: bool, device: torch.device
) -> Tensor:
    """Return the norm of each non-empty tensor, float64 (n,), summed in float32 or wider."""
    tensors = [tensor for tensor in tensors if tensor.numel()]
    if not tensors:
        return torch.zeros(0, dtype=torch.float64, device=device)
    if foreach and all(tensor.dtype.itemsize >= 4 for tensor in tensors):
        norms = torch._foreach_norm(tensors, norm_type)
    else:
        dtypes = (t.dtype if t.dtype.itemsize >= 4 else torch.float32 for t in tensors)
        norms = tuple(
            torch.linalg.vector_norm(t, norm_type, dtype=d)
            for t, d in zip(tensors, dtypes, strict=True)
        )
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


# Autograd at work.


def is_in_backward() -> bool:
    """Return whether a backward is running in this thread."""
    return torch._C._current_graph_task_id() >= 0


def after_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the backward that is running ends."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def backward_reaches(node: Any) -> bool:
    """Return whether the backward that is running will execute a node of the graph.

    Raises:
        RuntimeError: if ``torch.autograd.grad`` was asked for the leaf of the node.
    """
    return torch._C._will_engine_execute_node(node)


def hooks_on_saved_tensors() -> Any:
    """Return the innermost ``torch.autograd.graph.saved_tensors_hooks`` in force, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def functions_are_redefined() -> bool:
    """Return whether a mode other than that of the default device redefines torch's functions."""
    n_modes = torch._C._len_torch_function_stack()
    if not n_modes:
        return False
    from torch.utils._device import DeviceContext

    modes = (torch._C._get_function_stack_at(i) for i in range(n_modes))
    return any(not isinstance(mode, DeviceContext) for mode in modes)


def is_transformed() -> bool:
    """Return whether a transform of ``torch.func``, such as ``vmap``, is at work."""
    return torch._C._are_functorch_transforms_active()


# The scaler of gradients, and schedulers.


class OpenGradScaler(GradScaler):
    """torch's ``GradScaler``, with plain names for what a scaler of several ranks needs."""

    def unscale_gradients(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found: Tensor
    ) -> None:
        """Multiply an optimizer's gradients by ``inv_scale``; add 1 to ``found`` for infinities."""
        raise NotImplementedError

    def found_infinity(self, optimizer: torch.optim.Optimizer) -> Tensor:
        """Return ``found`` of :meth:`unscale_gradients`; its value counts in ``step``."""
        [found] = self._found_inf_per_device(optimizer).values()
        return found

    def is_unscaled(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer's gradients of this step were unscaled already."""
        return self._per_optimizer_states[id(optimizer)]["stage"] is not OptState.READY

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        self.unscale_gradients(optimizer, inv_scale, found_inf)
        return {found_inf.device: found_inf}


def unscale(gradients: list[Tensor], not_finite: Tensor, inv_scale: Tensor) -> None:
    """Multiply gradients of one device and dtype by ``inv_scale``.

    Sets ``not_finite`` to 1 if a gradient is not finite.
    """
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, not_finite, inv_scale)


def with_good_steps(scaler_state: Mapping[str, Any], n: int) -> dict[str, Any]:
    """Return a ``GradScaler``'s state in which ``n`` steps in a row were without an infinity."""
    return {**scaler_state, "_growth_tracker": n}


def with_rates(
    scheduler_state: Mapping[str, Any], rates: Sequence[float | Tensor]
) -> dict[str, Any]:
    """Return the state of a learning rate scheduler that last set these rates."""
    return {**scheduler_state, "_last_lr": list(rates)}


# Checkpoints of torch.distributed.checkpoint.


def checkpoint_record() -> Any:
    """Return the class that says which bytes of which file hold a piece of a tensor."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo


def named_by_checkpoints() -> tuple[Any, Any]:
    """Return the private class and function that a description of a tensor may name."""
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
    from torch.serialization import _get_layout

    return _MEM_FORMAT_ENCODING, _get_layout


# Process groups.


def n_process_groups() -> int:
    """Return how many process groups this process is in."""
    return len(distributed_c10d._world.pg_names)


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Limit how long messages of ``group`` may take: a mesh gives its groups torch's half an hour.

    Before torch 2.14 there is no public way.
    """
    if hasattr(dist, "set_timeout"):
        dist.set_timeout(timeout, group)
    else:
        distributed_c10d._set_pg_timeout(timeout, group)


def process_group(group: Any) -> dist.ProcessGroup:
    """Return the group that an operator was given: itself, its name, or the dispatcher's box."""
    if isinstance(group, dist.ProcessGroup):
        return group
    resolve: Callable[[Any], dist.ProcessGroup] = distributed_c10d._resolve_process_group
    return resolve(group) if isinstance(group, str) else dist.ProcessGroup.unbox(group)


def all_to_all(x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Send ``sent[i]`` rows of ``x`` to rank i of the group, in order.

    Return the rows that came, by rank.

    Backward sends the gradients back. Every rank takes part, whatever the numbers.
    """
    from torch.distributed._functional_collectives import all_to_all_single_autograd, wait_tensor

    return wait_tensor(all_to_all_single_autograd(x.contiguous(), received, sent, group))


# torch's pipelines.


def compares_nothing(stage_class: _StageClass) -> _StageClass:
    """Decorate a ``PipelineStage`` that compares its messages itself, and may be its own neighbour.

    torch before 2.13 knows tuples of tensors alone, in ``_validate_fwd_input`` and
    ``_validate_fwd_outputs``; from 2.13 on ``_validate_stage_tensors`` expects one shape of all
    microbatches. torch before 2.12 opens connections by a message, to itself too, which gloo
    refuses; from 2.12 on it does so for traced stages alone, which are none of ours.
    """

    def compare_nothing(self: Any, *_: Any) -> None: ...

    stage: Any = stage_class
    connections: Any = getattr(stage, "_get_init_p2p_neighbors_ops", None)

    def connections_to_others(self: Any) -> list[dist.P2POp]:
        return [each for each in connections(self) if each.group_peer != self.group_rank]

    stage._validate_fwd_input = compare_nothing
    stage._validate_fwd_outputs = compare_nothing
    stage._validate_stage_tensors = compare_nothing
    if connections is not None:
        stage._get_init_p2p_neighbors_ops = connections_to_others
    return stage_class


def carries_integers() -> bool:
    """Return whether torch's stages send tensors without gradient to each other: from 2.13 on."""
    from torch.distributed.pipelining import _utils

    return hasattr(_utils, "_StageMeta")


def leave_out_of_backward(stage: Any, microbatch: int, unused: Sequence[bool]) -> None:
    """Let the backward of a microbatch begin without the outputs that are ``unused``.

    A stage keeps them elsewhere from torch 2.15 on.
    """
    if hasattr(stage, "fwd_cache"):
        outputs, *rest = stage.fwd_cache[microbatch]
        pairs = zip(outputs, unused, strict=True)
        kept = (tensor.detach() if left else tensor for tensor, left in pairs)
        stage.fwd_cache[microbatch] = (tuple(kept), *rest)
        return
    outputs = stage._forward_chunk_states[microbatch].live_outputs
    for i, left in enumerate(unused):
        if left:  # torch may have let go of the output once it was sent: this one has no graph
            outputs[i] = torch.empty(0)


def run_step(
    schedule: Any,
    stages: "Sequence[PipelineStage]",
    arguments: list[tuple[Any, ...]],
    targets: list[Any] | None,
    losses: list[Tensor],
) -> None:
    """Train on microbatches that are cut already. Before torch 2.14 there is no public way."""
    if "arg_mbs" in signature(schedule.step).parameters:
        schedule.step(arg_mbs=arguments, target_mbs=targets, losses=losses, return_outputs=False)
        return
    for stage in stages:
        stage.has_backward = True
        stage.clear_runtime_states()
    schedule._step_microbatches(arguments, None, targets, losses, return_outputs=False)


def explicit_order(
    stages: "list[PipelineStage]",
    n_microbatches: int,
    rows: Sequence[Sequence[str]],
    **options: Any,
) -> Any:
    """Return the executor behind torch's own schedules of several stages a rank.

    ``rows`` are each rank's actions, as ``"2F0"``.
    """
    from torch.distributed.pipelining import schedules

    schedule = schedules._PipelineScheduleRuntime(stages, n_microbatches, **options)
    parse = schedules._Action.from_str
    schedule.pipeline_order = {rank: list(map(parse, row)) for rank, row in enumerate(rows)}
    schedule._prepare_schedule_with_comms(schedule.pipeline_order)
    return schedule


# FSDP2.


def mixed_precision(module: nn.Module) -> "MixedPrecisionPolicy | None":
    """Return the mixed-precision policy of a module under FSDP2, None without FSDP2.

    torch has no public getter.
    """
    from torch.distributed.fsdp import FSDPModule

    return module._get_fsdp_state()._mp_policy if isinstance(module, FSDPModule) else None


def all_reduces(part: "FSDPModule") -> bool:
    """Return whether ``part`` itself all-reduces its gradients; True also if it has none."""
    return all(group.all_reduce_grads for group in groups_of(part))


def data_groups(part: "FSDPModule") -> list[dist.ProcessGroup]:
    """Return the groups over whose ranks FSDP2 averages the gradients of ``part`` itself."""
    infos = [group.mesh_info for group in groups_of(part)]
    if not infos:
        return []
    found = [getattr(infos[0], f"{kind}_process_group", None) for kind in ("shard", "replicate")]
    return [group for group in found if group is not None]


def finalize_by_hand(root: "FSDPModule", on: bool) -> None:
    """Leave the end of a backward to :func:`reduce_gradients`, or to FSDP2 again.

    Before torch 2.15 there is nothing to switch off.
    """
    if hasattr(root, "set_manual_backward_finalization"):
        root.set_manual_backward_finalization(on)


def reduce_gradients(root: "FSDPModule") -> None:
    """Reduce the gradients of all groups below ``root``, as FSDP2 does at the end of a backward.

    Before torch 2.15 there is no public way.
    """
    state: Any = root._get_fsdp_state()
    groups = _groups_of_all(state._state_ctx.all_states)
    of_some_replicas = [not group.all_reduce_grads or _waits(group) for group in groups]
    if not hasattr(root, "finalize_backward"):
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


def forget_gradients(root: "FSDPModule") -> None:
    """Drop gradients below ``root`` that are not reduced yet: a forward or backward was cut short.

    Before torch 2.15 a reset forgets no gradients; from then on those of earlier steps, too.
    """
    state: Any = root._get_fsdp_state()
    if state._is_root is None:  # before the first forward a reset would find nothing
        return
    groups = _groups_of_all(state._state_ctx.all_states)
    parameters = [parameter for group in groups for parameter in group.fsdp_params]
    of_earlier_steps = [parameter.sharded_param.grad for parameter in parameters]
    if not hasattr(root, "finalize_backward"):
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
        parameter.sharded_param.grad = gradient


@contextmanager
def all_reducing_as_set(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Keep what ``set_requires_all_reduce`` was set to, through a step in the ``with`` block.

    It is torch's switch for accumulation under HSDP: with False a step leaves the replicas for a
    later step. torch's stages call ``set_requires_gradient_sync``, which sets both switches, so
    this one is set again after each call. From torch 2.15 on a check refuses what is left for
    later; the reduction itself is right, so the check is left out.
    """
    from torch.distributed.fsdp import FSDPModule

    all_parts = [part for module in modules for part in module.modules()]
    parts = [part for part in all_parts if isinstance(part, FSDPModule)]
    asked = [(part, all_reduces(part)) for part in parts]
    waiting = any(_waits(group) for part in parts for group in groups_of(part))
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
        vars(part._get_fsdp_state())["_validate_finalize_backward"] = lambda: None
    try:
        yield
    finally:
        for part in parts:
            del vars(part)["set_requires_gradient_sync"]
            del vars(part._get_fsdp_state())["_validate_finalize_backward"]
        restore()


def groups_of(part: "FSDPModule") -> list[Any]:
    """Return the groups of parameters that FSDP2 gathers and reduces for a part itself."""
    return _groups_of_all([part._get_fsdp_state()])


def _groups_of_all(states: Iterable[Any]) -> list[Any]:
    """Return the groups of some states: each has a list from torch 2.13 on, before at most one."""
    found = []
    for state in states:
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        found += [group for group in groups if group is not None]
    return found


def _waits(group: Any) -> bool:
    """Return whether a group keeps gradients that are not yet summed over the replicas of HSDP."""
    return group._partial_reduce_output is not None


def gathered_bytes(group: Any) -> int:
    """Return how many bytes of gathered parameters a group holds, from the gather's start."""
    if group.is_unsharded:
        outputs = [
            output for parameter in group.fsdp_params for output in parameter.all_gather_outputs
        ]
        return sum(output.untyped_storage().nbytes() for output in outputs)
    if group._all_gather_result is not None:
        n_bytes: int = group._all_gather_result.all_gather_output.nbytes
        return n_bytes
    if group.is_sharded_post_forward:
        return sum(each._sharded_post_forward_param_data.nbytes for each in group.fsdp_params)
    return 0
