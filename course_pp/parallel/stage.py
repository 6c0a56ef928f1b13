"""Build one stage of a pipeline: its index, and what its caller declares that it takes and returns."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from course_pp.arguments import check_arguments, refuse_unless
from course_pp.collective import on_every_rank
from course_pp.model import ModelConfig, PipelineStageModule, Transformer
from course_pp.module_extras import problem_of_wrappers
from course_pp.parallel._torch import mixed_precision
from course_pp.parallel.boundary import Boundary
from course_pp.parallel.mesh import get_pp_mesh, get_pp_rank, get_pp_size, lone_group
from course_pp.parallel.model_stage import ModelStage, check_declared_dtype
from course_pp.parallel.replaced_forward import compute_dtypes, spelled

__all__ = ["build_pipeline_stage", "check_microbatch"]


def build_pipeline_stage(
    stage_module: nn.Module,
    device_mesh: DeviceMesh | None,
    device: torch.device | str,
    batch_size: int | None = None,
    seq_len: int | None = None,
    param_dtype: torch.dtype | None = None,
    *,
    stage: int | None = None,
    n_stages: int | None = None,
    inputs: Any = None,
    outputs: Any = None,
) -> ModelStage:
    """Wrap a stage module for torch's schedules.

    A stage is called with what the stage before it returned: a tuple or list gives its positional arguments, a dict its
    keyword arguments, anything else is its only one. Tensors may stand in tuples, dicts and dataclasses that torch's
    pytree knows, such as the outputs of transformers. Those of a floating-point dtype carry gradients back. If a
    schedule splits backward in two, a stage of another model leaves only the weights of linear layers to the second
    half; layers that are compiled, recomputed or cut by tensor parallelism do all in the first.

    A stage of this package's model knows what it takes and returns. Of any other module, declare what its first stage
    takes: ``inputs``, or token ids by ``batch_size`` and ``seq_len``. :func:`build_pipeline_schedule` then finds what
    each stage returns: it runs a copy on the meta device, without memory or arithmetic.

    Args:
        stage_module: one stage, already on ``device``; any module.
        device_mesh: the mesh of :func:`init_distributed`; without a ``pp`` dimension this rank holds every stage.
        batch_size: rows in one *microbatch*.
        seq_len: tokens in a sequence.
        param_dtype: dtype of the activations and gradients that cross stage boundaries; None is what the module
            computes in. If given, the module's own dtype must be the same.
        stage, n_stages: index of the stage, and how many there are. By default this package's modules know, and others
            are one stage a rank.
        inputs: what the first stage is called with for one microbatch; other stages ignore it. Only shapes and dtypes
            count, so meta tensors will do.
        outputs: what this stage returns, likewise; needed only if it cannot run on the meta device, without the keyword
            arguments of a step. What the last stage returns concerns the loss function alone: ``outputs=()`` will do
            there.

    Raises:
        ValueError: on every rank of the mesh, if ``stage_module`` is no module, or a whole :class:`Transformer`; if a
            size is not positive, the mesh is only a part of the ranks or cannot share the stages, the module is wrapped
            in DDP or the like, or computes in another dtype than ``param_dtype``. Also on a GPU without NCCL, which
            torch's pipeline needs to send.
        RuntimeError: if there is no process group.
    """
    if not dist.is_initialized():
        raise RuntimeError("no process group: call init_distributed(config) before build_pipeline_stage")
    asked = locals()

    def look() -> tuple[int, int, Boundary | None, Boundary | None]:
        check_arguments(build_pipeline_stage, asked)
        index, n = _place(stage_module, device_mesh, stage, n_stages)
        _check_mesh(index, n, device_mesh)
        _check_transport(torch.device(device), device_mesh)
        wrapped = problem_of_wrappers(stage_module, f"stage {index}")
        if wrapped is not None:
            raise ValueError(wrapped)
        return index, n, *_boundaries(stage_module, index, batch_size, seq_len, param_dtype, inputs, outputs)

    index, n, taken, given = on_every_rank(device_mesh, look)
    built = ModelStage(
        stage_module,
        index,
        n,
        taken,
        given,
        device_mesh,
        param_dtype,
        device=torch.device(device),
        group=_pipeline_group(device_mesh),
    )
    if taken is not None and given is not None:
        built.settle(taken, given)
    return built


def _place(module: object, device_mesh: DeviceMesh | None, stage: int | None, n_stages: int | None) -> tuple[int, int]:
    """Return which stage of how many a module is.

    Raises:
        TypeError: for what is no module, a whole Transformer, or indices that are no whole numbers.
        ValueError: for a stage that is not among them, or if nobody says which one it is.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"stage_module is a {type(module).__name__}: pass the nn.Module of one stage")
    if isinstance(module, Transformer) and not isinstance(module, PipelineStageModule):
        raise TypeError(
            f"a pipeline stage must be a PipelineStageModule, not {type(module).__name__}: "
            "cut the model with build_stage_module(config, stage, n_stages)"
        )
    own = (module.stage_id, module.num_stages) if isinstance(module, PipelineStageModule) else None
    if own is not None and (stage, n_stages) not in ((None, None), own):
        raise ValueError(f"stage={stage}, n_stages={n_stages}, but the module is stage {own[0]} of {own[1]}: drop both")
    if own is not None:
        return own
    pp_size = get_pp_size(device_mesh)
    n_stages = pp_size if n_stages is None else n_stages
    if stage is None and n_stages != pp_size:
        raise ValueError(f"{n_stages} stages on {pp_size} pipeline ranks: say which one this is, stage=...")
    stage = get_pp_rank(device_mesh) if stage is None else stage
    if not 0 <= stage < n_stages:
        raise ValueError(f"stage={stage} must lie between 0 and {n_stages - 1}, the last of n_stages={n_stages}")
    return stage, n_stages


def _boundaries(
    module: nn.Module,
    stage: int,
    batch_size: int | None,
    seq_len: int | None,
    param_dtype: torch.dtype | None,
    inputs: Any,
    outputs: Any,
) -> tuple[Boundary | None, Boundary | None]:
    """Return what a stage takes and returns, as far as that is known before it runs."""
    if isinstance(module, PipelineStageModule):
        for name, value in (("inputs", inputs), ("outputs", outputs)):
            own = "leave it out, this module knows what it takes and returns"
            refuse_unless(value is None, "build_pipeline_stage", name, value, own)
        return _boundaries_of_transformer(module, batch_size, seq_len, param_dtype)
    taken = _declared("inputs", inputs) or _tokens(batch_size, seq_len)  # looked at by all, so that all refuse
    given = _declared("outputs", outputs)
    check_declared_dtype(stage, given, param_dtype)
    return taken if stage == 0 else None, given


def _boundaries_of_transformer(
    module: PipelineStageModule, batch_size: int | None, seq_len: int | None, param_dtype: torch.dtype | None
) -> tuple[Boundary, Boundary]:
    """Return what a stage of this package's model takes and returns."""
    rows, positions = check_microbatch(module.config, batch_size, seq_len)
    dtypes = compute_dtypes(module)
    if param_dtype is None:
        param_dtype = dtypes[0]
    if dtypes != (param_dtype,):
        raise ValueError(_mismatch(module, dtypes, param_dtype))
    first, last = module.stage_id == 0, module.stage_id == module.num_stages - 1
    tokens = torch.empty(rows, positions, dtype=torch.int64, device="meta")
    hidden = torch.empty(rows, positions, module.config.dim, dtype=param_dtype, device="meta")
    logits = torch.empty(rows, positions, module.config.vocab_size, dtype=param_dtype, device="meta")
    return Boundary.of(tokens if first else hidden), Boundary.of(logits if last else hidden)


def _declared(name: str, value: Any) -> Boundary | None:
    if value is None:
        return None
    try:
        return Boundary.of(value)
    except TypeError as error:
        raise TypeError(f"{name} holds {error}") from None


def _tokens(batch_size: int | None, seq_len: int | None) -> Boundary | None:
    """Return the token ids that the first stage takes unless ``inputs`` says otherwise; None if sizes are missing.

    Raises:
        ValueError: for a size that is not positive, or one without the other.
    """
    if batch_size is None and seq_len is None:
        return None
    if batch_size is None or seq_len is None:
        raise ValueError(
            f"batch_size={batch_size} and seq_len={seq_len}: give both if the first stage takes token ids, else "
            "inputs=, what it is called with for one microbatch"
        )
    shape = (_check_size("batch_size", batch_size), _check_size("seq_len", seq_len))
    return Boundary.of(torch.empty(shape, dtype=torch.int64, device="meta"))


def _check_mesh(stage: int, n_stages: int, device_mesh: DeviceMesh | None) -> None:
    """Refuse a part of the ranks, and a number of stages that the pipeline's ranks cannot share."""
    n_ranks, pp_size = dist.get_world_size(), get_pp_size(device_mesh)
    if device_mesh is not None and device_mesh.size() != n_ranks:
        raise ValueError(
            f"device_mesh {device_mesh.mesh_dim_names} has {device_mesh.size()} of {n_ranks} ranks: pass the whole "
            "mesh of init_distributed, or losses and refusals would not reach every rank"
        )
    if n_stages % pp_size:
        raise ValueError(
            f"stage {stage} is one of {n_stages}, which {pp_size} pipeline ranks cannot share "
            f"equally: cut the model into a multiple of {pp_size} stages"
        )


def _check_transport(device: torch.device, device_mesh: DeviceMesh | None) -> None:
    """Refuse GPUs over gloo, whose sends and receives take a pointer to GPU memory for one to host memory."""
    if device.type == "cuda" and get_pp_size(device_mesh) > 1 and "cuda:gloo" in dist.get_backend_config():
        raise ValueError(
            f"device={str(device)!r} over gloo: torch's pipeline cannot send GPU tensors through host memory, so train "
            "with engine='runtime' (course_pp.runtime) to share GPUs, or take backend='gloo' to compute on the CPU"
        )


def check_microbatch(config: ModelConfig, batch_size: object, seq_len: object) -> tuple[int, int]:
    """Refuse sizes of a microbatch that are not positive, or that the model has no positions for; return them.

    Raises:
        ValueError: naming the size and the rule.
    """
    rows, positions = _check_size("batch_size", batch_size), _check_size("seq_len", seq_len)
    if positions > config.max_seq_len:
        raise ValueError(
            f"seq_len={seq_len} is over the model's max_seq_len={config.max_seq_len}: shorten the sequences, or build "
            "the model for longer ones"
        )
    return rows, positions


def _check_size(name: str, size: object) -> int:
    if type(size) is not int or size < 1:
        raise ValueError(f"{name}={size!r} must be a whole number of at least 1")
    return size


def _mismatch(module: PipelineStageModule, dtypes: tuple[torch.dtype, ...], boundary_dtype: torch.dtype) -> str:
    """Refuse a stage that computes in another dtype: its neighbour would misread the message's bytes."""
    remedy = (
        "pass the module's own dtype, or convert it before building the stage"
        if mixed_precision(module) is None
        else f"pass param_dtype={spelled(dtypes)}, or apply FSDP2 with default_mp_policy({boundary_dtype})"
    )
    return (
        f"stage {module.stage_id} computes in {spelled(dtypes)}, but param_dtype declares that {boundary_dtype} "
        f"crosses its boundary: {remedy}"
    )


def _pipeline_group(device_mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    pp_mesh = get_pp_mesh(device_mesh)
    if pp_mesh is not None:
        return pp_mesh.get_group()
    return lone_group(dist.group.WORLD) if dist.get_world_size() > 1 else None
