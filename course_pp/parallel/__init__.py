"""The stack one ships: pipeline parallelism over a device mesh, on ``torch.distributed``.

Order of use::

    mesh = init_distributed(DistributedConfig(pp=2))
    module = build_stage_module(config, get_pp_rank(mesh), get_pp_size(mesh))
    stage = build_pipeline_stage(module, mesh, get_device(), batch_size=4, seq_len=128, param_dtype=torch.float32)
    schedule = build_pipeline_schedule(stage, n_microbatches=8, loss_fn=CrossEntropy(), schedule="1f1b")
    loss = schedule.step(inputs, target=targets)
    destroy_distributed()
"""

from course_pp.model import (
    ModelConfig,
    PipelineStageModule,
    build_stage_module,
    compute_layer_assignment,
    partition_by_cost,
)
from course_pp.parallel.mesh import (
    DistributedConfig,
    destroy_distributed,
    get_device,
    get_dp_mesh,
    get_pp_mesh,
    get_pp_rank,
    get_pp_size,
    get_tp_mesh,
    has_dp_mesh,
    init_distributed,
)
from course_pp.parallel.pipeline import (
    PipelineSchedule,
    TokenLoss,
    build_pipeline_schedule,
)
from course_pp.parallel.schedules import get_stage_indices, schedule_names
from course_pp.parallel.stage import build_pipeline_stage
from course_pp.parallel.world import get_world_info, is_rank_zero, refusals_said_once

__all__ = [
    "DistributedConfig",
    "ModelConfig",
    "PipelineSchedule",
    "PipelineStageModule",
    "TokenLoss",
    "build_pipeline_schedule",
    "build_pipeline_stage",
    "build_stage_module",
    "compute_layer_assignment",
    "destroy_distributed",
    "get_device",
    "get_dp_mesh",
    "get_pp_mesh",
    "get_pp_rank",
    "get_pp_size",
    "get_stage_indices",
    "get_tp_mesh",
    "get_world_info",
    "has_dp_mesh",
    "init_distributed",
    "is_rank_zero",
    "partition_by_cost",
    "refusals_said_once",
    "schedule_names",
]
