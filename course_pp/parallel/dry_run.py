"""Build one rank of a large run on paper, and let it take a step, in a process group whose other ranks do not exist.

The functions that a real run calls cut, checkpoint and shard the stage, so it holds what the real rank would hold, and
torch's own schedule takes the step. Its tensors have shapes and no values: nothing is allocated, computed or sent.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from course_pp.arguments import checked
from course_pp.loss import loss_share
from course_pp.model import CrossEntropy, ModelConfig, build_stage_module
from course_pp.parallel._torch import begin_without_messages, fake_store, fake_tensors, forget_meshes
from course_pp.parallel.activation_checkpointing import apply_ac
from course_pp.parallel.counting import CollectiveCounter, Entered
from course_pp.parallel.fsdp import apply_fsdp2, default_mp_policy
from course_pp.parallel.mesh import lone_group
from course_pp.parallel.precision import compute_in
from course_pp.parallel.schedules import check_microbatches, torch_schedule
from course_pp.parallel.stage import build_pipeline_stage
from course_pp.parallel.tensor import apply_tensor_parallel
from course_pp.plan.layout import Layout

__all__ = ["DryRun", "dry_run"]

_DTYPES = {"mixed": torch.float32, "float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True)
class DryRun:
    """What one rank of a run holds, and enters in a step.

    Attributes:
        rank: which, of the whole mesh.
        modules: its stages, with everything applied, of tensors without values.
        shapes: of each parameter's local part, by stage and full name.
        bytes_by_kind: parameters, gradients and optimizer (AdamW), as :class:`course_pp.plan.Prediction` counts them.
        entered: the collectives and messages of forward, backward and reduction, in the order in which this rank begins
            them in every step but the first; empty if no step was asked for. What :class:`PipelineSchedule` adds is not
            among them: scalars for the loss, and the sum of the gradients of a weight that two stages share.
    """

    rank: int
    modules: tuple[nn.Module, ...]
    shapes: dict[tuple[int, str], tuple[int, ...]]
    bytes_by_kind: dict[str, int]
    entered: tuple[Entered, ...] = ()


@checked
def dry_run(
    config: ModelConfig,
    layout: Layout,
    rank: int,
    *,
    global_batch: int | None = None,
    seq_len: int | None = None,
) -> DryRun:
    """Build rank ``rank`` of ``layout`` without the others.

    Args:
        layout: as :func:`course_pp.plan.predict` takes it; its precision must be one that this stack has. Logits are
            gathered, whatever ``splits_head`` says.
        rank: the global rank.
        global_batch, seq_len: sequences of all ranks together and tokens in each, for a step; None for none. A step
            takes time for each layer and microbatch, 30 to 200 ms: give few microbatches.

    Raises:
        ValueError: for a rank that is not in the layout, Megatron's precision, one of ``global_batch`` and ``seq_len``
            without the other, or a batch that the layout does not cut, or into microbatches that torch cannot run.
        RuntimeError: inside a process group: a rank cannot play another one.
    """
    if not 0 <= rank < layout.n_ranks:
        raise ValueError(f"rank={rank} of {layout.n_ranks}: give 0 to {layout.n_ranks - 1}")
    if layout.precision not in _DTYPES:
        raise ValueError(f"precision={layout.precision!r} is not this stack's: use one of {', '.join(_DTYPES)}")
    if (global_batch is None) != (seq_len is None):
        raise ValueError(f"global_batch={global_batch} and seq_len={seq_len}: give both for a step, or none")
    if seq_len is not None and not 1 <= seq_len <= config.max_seq_len:
        raise ValueError(f"seq_len={seq_len}: this model takes 1 to max_seq_len={config.max_seq_len}")
    n_microbatches = 0 if global_batch is None else layout.n_microbatches(global_batch)
    if n_microbatches and layout.pp > 1:
        check_microbatches(layout.schedule, n_microbatches, layout.n_stages, layout.pp)
    if dist.is_initialized():
        raise RuntimeError("dry_run in a process group: call it in a process without one")
    at = layout.place(rank)
    here = [stage for stage, ranks in enumerate(layout.placement) if at.pp in ranks]
    with _alone_as(rank, layout.n_ranks):
        mesh = _mesh(layout)
        modules = [_built(config, layout, mesh, stage) for stage in here]
        shapes = {
            (stage, name): tuple((p.to_local() if isinstance(p, DTensor) else p).shape)
            for stage, module in zip(here, modules, strict=True)
            for name, p in module.named_parameters()
        }
        entered = _step(layout, mesh, modules, n_microbatches, seq_len) if seq_len is not None else ()
    n_elements = sum(torch.Size(shape).numel() for shape in shapes.values())
    size = layout.bytes_of
    held = {
        "parameters": n_elements * size.kept,
        "gradients": n_elements * size.kept,
        "optimizer": n_elements * size.optimizer + 4 * len(shapes),
    }
    return DryRun(rank, tuple(modules), shapes, held, entered)


def _mesh(layout: Layout) -> DeviceMesh | None:
    sizes = {"pp": layout.pp, "dp_replicate": layout.dp_replicate, "dp_shard": layout.dp_shard, "tp": layout.tp}
    kept = {name: n for name, n in sizes.items() if n > 1 or (name == "dp_shard" and layout.dp_replicate > 1)}
    return init_device_mesh("cpu", tuple(kept.values()), mesh_dim_names=tuple(kept)) if kept else None


def _built(config: ModelConfig, layout: Layout, mesh: DeviceMesh | None, stage: int) -> nn.Module:
    kept = _DTYPES[layout.precision]
    with torch.device("meta"):
        module = build_stage_module(config, stage, layout.n_stages).to(kept)
    _without_values(module)
    apply_tensor_parallel(module, mesh)
    apply_ac(module, layout.ac)
    policy = default_mp_policy(kept) if layout.precision == "float32" else None  # of others FSDP2's own is the one
    apply_fsdp2(module, mesh, policy, reshard_after_forward=layout.reshard)
    if layout.precision == "mixed":
        compute_in(module, torch.bfloat16)  # where no FSDP2 does
    return module


def _without_values(module: nn.Module) -> None:
    """Replace meta tensors, which FSDP2 refuses, by tensors without values that say they are on the CPU."""
    made: dict[int, torch.Tensor] = {}  # a tied weight stays one
    with fake_tensors():
        for part in module.modules():
            for name, weight in part.named_parameters(recurse=False, remove_duplicate=False):
                new = made.setdefault(id(weight), nn.Parameter(torch.empty(weight.shape, dtype=weight.dtype)))
                part.register_parameter(name, cast(nn.Parameter, new))
            for name, buffer in part.named_buffers(recurse=False):
                setattr(part, name, made.setdefault(id(buffer), torch.empty(buffer.shape, dtype=buffer.dtype)))


def _step(
    layout: Layout, mesh: DeviceMesh | None, modules: Sequence[nn.Module], n_microbatches: int, seq_len: int
) -> tuple[Entered, ...]:
    """Return what the rank enters in a step, without what torch prepares in the first step of a run."""
    loss, rows = CrossEntropy(), layout.microbatch_size

    def share_of_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return loss_share(loss, output, target, float(n_microbatches * rows * seq_len))

    with fake_tensors():
        ids = torch.zeros(n_microbatches * rows, seq_len, dtype=torch.int64)
        stages = [build_pipeline_stage(module, mesh, "cpu", rows, seq_len) for module in modules]
        for stage in stages:
            assert stage.takes is not None  # this package's model knows them
            assert stage.returns is not None
            stage.settle(stage.takes, stage.returns)
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


@contextmanager
def _alone_as(rank: int, n_ranks: int) -> Iterator[None]:
    excepthook = sys.excepthook
    dist.init_process_group("fake", rank=rank, world_size=n_ranks, store=fake_store())
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = excepthook  # torch's labels errors with the rank
        lone_group.cache_clear()
        forget_meshes()  # the next one's groups have other names
