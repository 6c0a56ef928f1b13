"""One Llama-style decoder, and its cut into pipeline stages."""

from course_pp.base.sizes import ModelConfig, compute_layer_assignment
from course_pp.model.experts import (
    ExpertLoad,
    MoE,
    Router,
    count_over_data_ranks,
    expert_loads,
    update_router_bias,
)
from course_pp.model.hf import (
    config_from_hf,
    config_to_hf,
    from_hf,
    hf_state_dict,
    load_hf_state_dict,
)
from course_pp.model.stages import (
    ForwardFlops,
    PipelineStageModule,
    build_stage_module,
    drop_other_stages,
    layer_costs,
    partition_by_cost,
)
from course_pp.model.transformer import CrossEntropy, DecoderLayer, KVCache, Transformer

__all__ = [
    "CrossEntropy",
    "DecoderLayer",
    "ExpertLoad",
    "ForwardFlops",
    "KVCache",
    "MoE",
    "ModelConfig",
    "PipelineStageModule",
    "Router",
    "Transformer",
    "build_stage_module",
    "compute_layer_assignment",
    "config_from_hf",
    "config_to_hf",
    "count_over_data_ranks",
    "drop_other_stages",
    "expert_loads",
    "from_hf",
    "hf_state_dict",
    "layer_costs",
    "load_hf_state_dict",
    "partition_by_cost",
    "update_router_bias",
]
