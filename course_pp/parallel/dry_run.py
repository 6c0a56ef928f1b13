"""Build one rank of a large run on paper: meta tensors, and a process group of which nobody else is a member.

The stage is cut, tensor-parallelised, checkpointed and sharded by the very functions that a run calls, so what it holds
is what the run's rank would; nothing is allocated and nothing is sent.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from course_pp.arguments import checked
from course_pp.model import ModelConfig, build_stage_module
from course_pp.parallel._torch import fake_store
from course_pp.parallel.activation_checkpointing import apply_ac
from course_pp.parallel.fsdp import apply_fsdp2
from course_pp.parallel.tensor import apply_tensor_parallel
from course_pp.plan.layout import Layout

__all__ = ["DryRun", "dry_run"]

_DTYPES = {"mixed": torch.float32, "float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True)
class DryRun:
    """What one rank of a run holds.

    Attributes:
        rank: which, of the whole mesh.
        modules: its stages, on the meta device, with everything applied.
        shapes: of each parameter's local part, by stage and full name.
        bytes_by_kind: parameters, gradients and optimizer (AdamW), as :class:`course_pp.plan.Prediction` counts them.
    """

    rank: int
    modules: tuple[nn.Module, ...]
    shapes: dict[tuple[int, str], tuple[int, ...]]
    bytes_by_kind: dict[str, int]


@checked
def dry_run(config: ModelConfig, layout: Layout, rank: int) -> DryRun:
    """Build rank ``rank`` of ``layout`` without the others.

    Args:
        layout: as :func:`course_pp.plan.predict` takes it; its precision one that this stack has.
        rank: the global rank.

    Raises:
        ValueError: for a rank that is not in the layout, or Megatron's precision.
        RuntimeError: inside a process group: a rank cannot play another one.
    """
    if not 0 <= rank < layout.n_ranks:
        raise ValueError(f"rank={rank} of {layout.n_ranks}: give 0 to {layout.n_ranks - 1}")
    if layout.precision not in _DTYPES:
        raise ValueError(f"precision={layout.precision!r} is not this stack's: use one of {', '.join(_DTYPES)}")
    if dist.is_initialized():
        raise RuntimeError("dry_run in a process group: call it in a process without one")
    at = layout.place(rank)
    sizes = {"pp": layout.pp, "dp_replicate": layout.dp_replicate, "dp_shard": layout.dp_shard, "tp": layout.tp}
    kept = {name: n for name, n in sizes.items() if n > 1 or (name == "dp_shard" and layout.dp_replicate > 1)}
    here = [stage for stage, ranks in enumerate(layout.placement) if at.pp in ranks]
    modules = []
    with _alone_as(rank, layout.n_ranks):
        mesh = init_device_mesh("cpu", tuple(kept.values()), mesh_dim_names=tuple(kept)) if kept else None
        for stage in here:
            with torch.device("meta"):
                module = build_stage_module(config, stage, layout.n_stages).to(_DTYPES[layout.precision])
            apply_tensor_parallel(module, mesh)
            apply_ac(module, layout.ac)
            apply_fsdp2(module, mesh, reshard_after_forward=layout.reshard)
            modules.append(module)
        shapes = {
            (stage, name): tuple((p.to_local() if isinstance(p, DTensor) else p).shape)
            for stage, module in zip(here, modules, strict=True)
            for name, p in module.named_parameters()
        }
    n_elements = sum(torch.Size(shape).numel() for shape in shapes.values())
    size = layout.bytes_of
    held = {
        "parameters": n_elements * size.kept,
        "gradients": n_elements * size.kept,
        "optimizer": n_elements * size.optimizer + 4 * len(shapes),
    }
    return DryRun(rank, tuple(modules), shapes, held)


@contextmanager
def _alone_as(rank: int, n_ranks: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=n_ranks, store=fake_store())
    try:
        yield
    finally:
        dist.destroy_process_group()
