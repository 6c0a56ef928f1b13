"""The stack one ships: pipeline parallelism over a device mesh, on ``torch.distributed``.

Order of use::

    mesh = init_distributed(DistributedConfig(pp=2, tp=2))  # dp_shard takes the ranks that are left
    module = build_stage_module(config, get_pp_rank(mesh), get_pp_size(mesh))
    apply_tensor_parallel(module, mesh)
    apply_expert_parallel(module, mesh)
    apply_ac(module, "selective")
    apply_compile(module)
    # computes in bfloat16; parameters and gradients stay float32
    apply_fsdp2(module, mesh, default_mp_policy())
    optimizer = torch.optim.AdamW(module.parameters())
    stage = build_pipeline_stage(module, mesh, get_device(), batch_size=4, seq_len=128)
    schedule = build_pipeline_schedule(
        stage, n_microbatches=8, loss_fn=CrossEntropy(), schedule="1f1b"
    )
    loss = schedule.step(inputs, target=targets)
    norm = clip_grad_norm_(stage, 1.0, device_mesh=mesh)
    optimizer.step()
    destroy_distributed()

Steps whose dimension the mesh does not have do nothing, so the same lines run on one process and on
a thousand.
"""

from course_pp.model import (
    ModelConfig,
    PipelineStageModule,
    build_stage_module,
    compute_layer_assignment,
    partition_by_cost,
)
from course_pp.parallel.blocks import Blocks, find_blocks
from course_pp.parallel.carrying import carry_along
from course_pp.parallel.clipping import clip_grad_norm_
from course_pp.parallel.experts import apply_expert_parallel
from course_pp.parallel.float8 import apply_float8
from course_pp.parallel.fsdp import (
    ReshardPolicy,
    apply_fsdp2,
    default_mp_policy,
    resolve_reshard_after_forward,
)
from course_pp.parallel.mesh import (
    DistributedConfig,
    destroy_distributed,
    get_dp_mesh,
    get_dp_rank,
    get_dp_size,
    get_ep_mesh,
    get_pp_mesh,
    get_pp_rank,
    get_pp_size,
    get_tp_mesh,
    has_dp_mesh,
    init_distributed,
)
from course_pp.parallel.pipeline import PipelineSchedule, build_pipeline_schedule
from course_pp.parallel.post_validation import OptimisticStep
from course_pp.parallel.replaced_forward import apply_ac, apply_compile, compute_in
from course_pp.parallel.schedules import get_stage_indices, schedule_names
from course_pp.parallel.split import auto_split, explain, weights_on_meta
from course_pp.parallel.stage import build_pipeline_stage
from course_pp.parallel.tensor import (
    Plan,
    VocabParallelCrossEntropy,
    apply_tensor_parallel,
    llama_plan,
    transformer_plan,
)
from course_pp.parallel.traffic_and_memory import (
    CollectiveCounter,
    CollectiveCounts,
    Entered,
    Tally,
    count_collectives,
    measure_unsharded_bytes,
    predict_collectives,
    predict_unsharded_bytes,
    wire_factor,
)
from course_pp.parallel.world import get_device, get_world_info, is_rank_zero, refusals_said_once
from course_pp.step.failure import StepFailed
from course_pp.step.loss import TokenLoss, attach_loss
from course_pp.step.scaler import MeshGradScaler
from course_pp.step.step import AnyPipeline
from course_pp.step.ties import find_ties

__all__ = [
    "AnyPipeline",
    "Blocks",
    "CollectiveCounter",
    "CollectiveCounts",
    "DistributedConfig",
    "Entered",
    "MeshGradScaler",
    "ModelConfig",
    "OptimisticStep",
    "PipelineSchedule",
    "PipelineStageModule",
    "Plan",
    "ReshardPolicy",
    "StepFailed",
    "Tally",
    "TokenLoss",
    "VocabParallelCrossEntropy",
    "apply_ac",
    "apply_compile",
    "apply_expert_parallel",
    "apply_float8",
    "apply_fsdp2",
    "apply_tensor_parallel",
    "attach_loss",
    "auto_split",
    "build_pipeline_schedule",
    "build_pipeline_stage",
    "build_stage_module",
    "carry_along",
    "clip_grad_norm_",
    "compute_in",
    "compute_layer_assignment",
    "count_collectives",
    "default_mp_policy",
    "destroy_distributed",
    "explain",
    "find_blocks",
    "find_ties",
    "get_device",
    "get_dp_mesh",
    "get_dp_rank",
    "get_dp_size",
    "get_ep_mesh",
    "get_pp_mesh",
    "get_pp_rank",
    "get_pp_size",
    "get_stage_indices",
    "get_tp_mesh",
    "get_world_info",
    "has_dp_mesh",
    "init_distributed",
    "is_rank_zero",
    "llama_plan",
    "measure_unsharded_bytes",
    "partition_by_cost",
    "predict_collectives",
    "predict_unsharded_bytes",
    "refusals_said_once",
    "resolve_reshard_after_forward",
    "schedule_names",
    "transformer_plan",
    "weights_on_meta",
    "wire_factor",
]
