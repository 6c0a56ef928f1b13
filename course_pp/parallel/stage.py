"""One stage of the model as torch's pipelining wants it, with its shapes declared up front."""

from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from course_pp.model import ModelConfig, PipelineStageModule
from course_pp.parallel._torch import LocalNeighboursStage, mixed_precision
from course_pp.parallel.mesh import get_pp_mesh, get_pp_size

__all__ = ["ModelStage", "build_pipeline_stage", "check_microbatch", "problem_of_dtype"]


class ModelStage(LocalNeighboursStage):
    """torch's stage, with the shapes it was declared for."""

    submod: PipelineStageModule

    def __init__(
        self,
        module: PipelineStageModule,
        device_mesh: DeviceMesh | None,
        tokens: torch.Tensor,
        boundary: torch.Tensor,
        **kwargs: Any,
    ) -> None:
        first, last = module.stage_id == 0, module.stage_id == module.num_stages - 1
        logits = torch.empty(*tokens.shape, module.config.vocab_size, dtype=boundary.dtype, device="meta")
        super().__init__(
            module,
            module.stage_id,
            module.num_stages,
            input_args=tokens if first else boundary,
            output_args=logits if last else boundary,
            **kwargs,
        )
        self.device_mesh = device_mesh
        self.tokens = tokens
        self.boundary = boundary


def build_pipeline_stage(
    stage_module: PipelineStageModule,
    device_mesh: DeviceMesh | None,
    device: torch.device | str,
    batch_size: int,
    seq_len: int,
    param_dtype: torch.dtype = torch.bfloat16,
) -> ModelStage:
    """Wrap a stage module for torch's schedules, with its shapes declared up front.

    Declared shapes need no trial run: torch would otherwise infer them by one extra forward, which changes buffers.

    Args:
        stage_module: one stage of the model, already on ``device``.
        device_mesh: the mesh of :func:`init_distributed`; without a ``pp`` dimension this rank holds every stage.
        batch_size: sequences in one *microbatch*.
        seq_len: tokens in a sequence.
        param_dtype: dtype of the activations and gradients that cross stage boundaries.

    Raises:
        TypeError: if ``stage_module`` is a whole model.
        ValueError: if a size is not positive, the mesh is only a part of the ranks or cannot share the stages, or the
            module computes in another dtype than ``param_dtype``: the neighbour would read the message's bytes as
            something else. Also on a GPU without NCCL, over which torch's pipeline sends nothing.
        RuntimeError: if there is no process group.
    """
    if not isinstance(stage_module, PipelineStageModule):
        raise TypeError(
            f"a pipeline stage must be a PipelineStageModule, not {type(stage_module).__name__}: "
            "cut the model with build_stage_module(config, stage, n_stages)"
        )
    check_microbatch(stage_module.config, batch_size, seq_len)
    if not dist.is_initialized():
        raise RuntimeError("no process group: call init_distributed(config) before build_pipeline_stage")
    _check_mesh(stage_module, device_mesh)
    _check_transport(torch.device(device), device_mesh)
    problem = problem_of_dtype(stage_module, param_dtype)
    if problem is not None:
        raise ValueError(problem)
    return ModelStage(
        stage_module,
        device_mesh,
        tokens=torch.empty(batch_size, seq_len, dtype=torch.int64, device="meta"),
        boundary=torch.empty(
            batch_size, seq_len, stage_module.config.dim, dtype=param_dtype, device="meta", requires_grad=True
        ),
        device=torch.device(device),
        group=_pipeline_group(device_mesh),
    )


def _check_mesh(module: PipelineStageModule, device_mesh: DeviceMesh | None) -> None:
    """Refuse a part of the ranks, and a number of stages that the pipeline's ranks cannot share."""
    n_ranks, pp_size = dist.get_world_size(), get_pp_size(device_mesh)
    if device_mesh is not None and device_mesh.size() != n_ranks:
        raise ValueError(
            f"device_mesh {device_mesh.mesh_dim_names} has {device_mesh.size()} of {n_ranks} ranks: pass the whole "
            "mesh of init_distributed, or losses and refusals would not reach every rank"
        )
    if module.num_stages % pp_size:
        raise ValueError(
            f"stage {module.stage_id} is one of {module.num_stages}, which {pp_size} pipeline ranks cannot share "
            f"equally: cut the model into a multiple of {pp_size} stages"
        )


def _check_transport(device: torch.device, device_mesh: DeviceMesh | None) -> None:
    """Refuse GPUs over gloo, whose sends and receives take a pointer to GPU memory for one to host memory."""
    if device.type == "cuda" and get_pp_size(device_mesh) > 1 and "cuda:gloo" in dist.get_backend_config():
        raise ValueError(
            f"device={str(device)!r} over gloo: torch's pipeline cannot send GPU tensors through host memory, so train "
            "with engine='runtime' (course_pp.runtime) to share GPUs, or take backend='gloo' to compute on the CPU"
        )


def check_microbatch(config: ModelConfig, batch_size: int, seq_len: int) -> None:
    """Refuse sizes of a microbatch that are not positive, or that the model has no positions for.

    Raises:
        ValueError: naming the size and the rule.
    """
    for name, size in (("batch_size", batch_size), ("seq_len", seq_len)):
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"{name}={size!r} must be a whole number of at least 1")
    if seq_len > config.max_seq_len:
        raise ValueError(
            f"seq_len={seq_len} is over the model's max_seq_len={config.max_seq_len}: shorten the sequences, or build "
            "the model for longer ones"
        )


def problem_of_dtype(module: PipelineStageModule, boundary_dtype: torch.dtype) -> str | None:
    """What is wrong if ``module`` computes in another dtype than crosses its boundary; None if nothing is.

    With mixed precision a stage computes in its policy's ``param_dtype``, whatever its parameters are kept in.
    """
    policy = mixed_precision(module)
    dtype = None if policy is None else policy.output_dtype or policy.param_dtype
    dtypes = {p.dtype for p in module.parameters()} if dtype is None else {dtype}
    if dtypes <= {boundary_dtype}:
        return None
    remedy = (
        "pass the module's own dtype, or convert it before building the stage"
        if dtype is None
        else f"pass param_dtype={dtype}, or apply FSDP2 with default_mp_policy({boundary_dtype})"
    )
    return (
        f"stage {module.stage_id} computes in {', '.join(sorted(map(str, dtypes)))}, but param_dtype declares that "
        f"{boundary_dtype} crosses its boundary: {remedy}"
    )


def _pipeline_group(device_mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    pp_mesh = get_pp_mesh(device_mesh)
    if pp_mesh is not None:
        return pp_mesh.get_group()
    return _lone_group(dist.group.WORLD) if dist.get_world_size() > 1 else None


@lru_cache(maxsize=1)
def _lone_group(world: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of this rank alone within ``world``; one serves all stages."""
    return dist.new_group([dist.get_rank()], use_local_synchronization=True)
