"""Build one rank of a large run on paper, and let it take a step, in a process group whose other
ranks do not exist.

The functions that a real run calls cut, checkpoint and shard the stage, so it holds what the real
rank would hold, and torch's own schedule takes the step. Its tensors have shapes and no values:
nothing is allocated, computed or sent.
"""

import functools
import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import _utils as pipelining_utils
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from course_pp.model import CrossEntropy, ModelConfig, build_stage_module
from course_pp.parallel import (
    CollectiveCounter,
    Entered,
    apply_ac,
    apply_expert_parallel,
    apply_fsdp2,
    apply_tensor_parallel,
    build_pipeline_stage,
    compute_in,
    default_mp_policy,
)
from course_pp.parallel.mesh import lone_group, mesh_of
from course_pp.parallel.schedules import torch_schedule
from course_pp.plan.layout import Layout
from course_pp.step.loss import loss_share

DTYPES = {
    "mixed": torch.float32,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}


@dataclass(frozen=True)
class DryRun:
    """What one rank of a run holds, and enters in a step.

    Attributes:
        bytes_by_kind: parameters, gradients and optimizer (AdamW), as `course_pp.plan.Prediction`
            counts them.
        entered: the collectives and messages of forward, backward and reduction, in the order in
            which this rank begins them in every step but the first; empty if no step was asked for.
            What `PipelineSchedule` adds is not among them: scalars for the loss, and the sum of the
            gradients of a weight that two stages share.
    """

    bytes_by_kind: dict[str, int]
    entered: tuple[Entered, ...]


def dry_run(
    config: ModelConfig,
    layout: Layout,
    rank: int,
    global_batch: int | None = None,
    seq_len: int | None = None,
) -> DryRun:
    """Build rank `rank` of `layout` alone; with a batch and a length, take a step."""
    at = layout.place(rank)
    here = [stage for stage, ranks in enumerate(layout.placement) if at.pp in ranks]
    with alone_as(rank, layout.n_ranks):
        mesh = mesh_for(layout)
        modules = [built(config, layout, mesh, stage) for stage in here]
        held = []
        for module in modules:
            for p in module.parameters():
                held.append(p.to_local() if isinstance(p, DTensor) else p)
        entered = ()
        if global_batch is not None and seq_len is not None:
            entered = step(layout, mesh, modules, layout.n_microbatches(global_batch), seq_len)
    n_elements, size = sum(each.numel() for each in held), layout.bytes_of
    kept = {"parameters": n_elements * size.kept, "gradients": n_elements * size.kept}
    return DryRun(kept | {"optimizer": n_elements * size.optimizer + 4 * len(held)}, entered)


def mesh_for(layout: Layout) -> DeviceMesh | None:
    sizes = {
        "pp": layout.pp,
        "dp_replicate": layout.dp_replicate,
        "dp_shard": layout.dp_shard,
        "tp": layout.tp,
    }
    kept = {
        name: n
        for name, n in sizes.items()
        if n > 1 or (name == "dp_shard" and layout.dp_replicate > 1)
    }
    return mesh_of("cpu", kept, layout.ep) if kept else None


def built(config: ModelConfig, layout: Layout, mesh: DeviceMesh | None, stage: int) -> nn.Module:
    kept = DTYPES[layout.precision]
    with torch.device("meta"):
        module = build_stage_module(config, stage, layout.n_stages).to(kept)
    without_values(module)
    apply_tensor_parallel(module, mesh)
    if config.n_experts:
        apply_expert_parallel(module, mesh)
    apply_ac(module, layout.ac)
    # of others FSDP2's own is the one
    policy = default_mp_policy(kept) if layout.precision == "float32" else None
    apply_fsdp2(module, mesh, policy, reshard_after_forward=layout.reshard)
    if layout.precision == "mixed":
        compute_in(module, torch.bfloat16)  # where no FSDP2 does
    return module


def fake_tensors() -> AbstractContextManager[Any]:
    """Tensors made inside, and all results of them, have only a device and a shape."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def without_values(module: nn.Module) -> None:
    """Replace meta tensors, which FSDP2 refuses.

    The new tensors have no values, but say that they are on the CPU.
    """
    made: dict[int, torch.Tensor] = {}  # a tied weight stays one
    with fake_tensors():
        for part in module.modules():
            for name, weight in part.named_parameters(recurse=False, remove_duplicate=False):
                new = made.setdefault(
                    id(weight), nn.Parameter(torch.empty(weight.shape, dtype=weight.dtype))
                )
                part.register_parameter(name, cast(nn.Parameter, new))
            for name, buffer in part.named_buffers(recurse=False):
                setattr(
                    part,
                    name,
                    made.setdefault(id(buffer), torch.empty(buffer.shape, dtype=buffer.dtype)),
                )


def step(
    layout: Layout,
    mesh: DeviceMesh | None,
    modules: Sequence[nn.Module],
    n_microbatches: int,
    seq_len: int,
) -> tuple[Entered, ...]:
    """What the rank enters in a step, without what torch prepares in the first step of a run."""
    loss, rows = CrossEntropy(), layout.microbatch_size

    def share_of_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return loss_share(loss, output, target, float(n_microbatches * rows * seq_len))

    with fake_tensors():
        ids = torch.zeros(n_microbatches * rows, seq_len, dtype=torch.int64)
        stages = [build_pipeline_stage(module, mesh, "cpu", rows, seq_len) for module in modules]
        for stage in stages:
            stage.keywords = [{}] * n_microbatches
        name = layout.schedule if layout.pp > 1 else "gpipe"
        schedule = torch_schedule(name, stages, n_microbatches, share_of_loss)
        begin_without_messages(schedule, stages)
        with CollectiveCounter(mesh) as counter:
            schedule.step(
                *([ids] if stages[0].is_first else []),
                target=ids if stages[-1].is_last else None,
                return_outputs=False,
            )
        for parameter in (p for module in modules for p in module.parameters()):
            parameter.grad = None
    return tuple(counter.entered)


def begin_without_messages(schedule: Any, stages: Sequence[Any]) -> None:
    """Begin a torch schedule without the messages that open connections to neighbours.

    From torch 2.13 on, ranks also use these messages to agree that their shapes are declared. From
    2.15 on torch sends none in a group whose other ranks do not exist, and calls neither of these.
    """

    def settled(stages: Sequence[Any], *_: Any, **__: Any) -> None:
        for stage in stages:
            stage._inference_mode = pipelining_utils.InferenceMode.STATIC

    if hasattr(pipelining_utils, "InferenceMode"):  # from 2.13 on
        schedule._warmup_p2p = settled
    for stage in stages:
        stage._get_init_p2p_neighbors_ops = list  # before 2.13


@contextmanager
def alone_as(rank: int, n_ranks: int) -> Iterator[None]:
    excepthook = sys.excepthook
    dist.init_process_group("fake", rank=rank, world_size=n_ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = excepthook  # torch's labels errors with the rank
        lone_group.cache_clear()
        forget_meshes()  # the next one's groups have other names


def forget_meshes() -> None:
    """Empty the caches in which DTensor keeps meshes and process groups.

    The next run has other ones.
    """
    for cache in _caches_of("torch.distributed.tensor"):
        cache.cache_clear()
    for module, name in (
        ("torch.distributed.tensor._redistribute", "clear_redistribute_planner_cache"),
        ("torch._C", "_clear_DTensor_sharding_propagator_cache"),
    ):
        clear = getattr(sys.modules.get(module), name, None)  # not in every release
        if clear is not None:
            clear()
    gc.collect()


def _caches_of(package: str) -> list[Any]:
    """Return the functions of a package, and of its classes, that remember their results."""
    modules = [module for name, module in sys.modules.items() if name.startswith(package)]
    found = [value for module in modules for value in vars(module).values()]
    found += [value for each in found if isinstance(each, type) for value in vars(each).values()]
    found = [getattr(value, "__func__", value) for value in found]  # of a static method
    return [value for value in found if isinstance(value, functools._lru_cache_wrapper)]
