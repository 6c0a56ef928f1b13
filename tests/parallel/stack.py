"""Training under every step of the stack at once, on whatever device the ranks have."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from course_pp.model import CrossEntropy, ModelConfig, PipelineStageModule, build_stage_module
from course_pp.parallel import (
    DistributedConfig,
    apply_ac,
    apply_compile,
    apply_expert_parallel,
    apply_float8,
    apply_fsdp2,
    apply_tensor_parallel,
    build_pipeline_schedule,
    build_pipeline_stage,
    clip_grad_norm_,
    compute_in,
    default_mp_policy,
    get_device,
    get_dp_rank,
    get_dp_size,
    get_pp_rank,
    get_pp_size,
    get_stage_indices,
    init_distributed,
)
from tests import equality
from tests.equality import Trained, batches, sharded_adamw, train_in_one_process

CONFIG = ModelConfig(
    dim=16, n_layers=8, n_heads=4, n_kv_heads=2, ffn_dim=24, vocab_size=20, max_seq_len=8
)
# Routers have no loss, because it would depend on the pieces into which a batch is cut.
EXPERTS = replace(
    CONFIG, n_experts=8, expert_dim=16, moe_every=2, n_shared_experts=1, balance="none"
)
ROWS, SEQ_LEN, N_MICROBATCHES = 8, 8, 4
DATA = batches(CONFIG, ROWS, SEQ_LEN, 2)


@dataclass(frozen=True)
class Recipe:
    """The changes that are made to the model, in order.

    Attributes:
        compiler: a backend of torch.compile; None compiles nothing.
        dtype: the dtype of computation. Parameters are float64 for float64, else float32.
        float8: a recipe of products in eight bits.
    """

    layout: DistributedConfig
    schedule: str = "1f1b"
    ac: Literal["none", "full", "selective"] = "none"
    compiler: str | None = None
    dtype: torch.dtype = torch.float64
    n_microbatches: int = N_MICROBATCHES
    float8: Literal["tensorwise", "rowwise"] | None = None


def train_on_rank(
    rank: int, recipes: Sequence[Recipe], config: ModelConfig = CONFIG
) -> list[Trained]:
    """Return the result of each recipe on this rank, in float64 on the CPU."""
    return [train(recipe, config) for recipe in recipes]


def train(recipe: Recipe, config: ModelConfig = CONFIG) -> Trained:
    mesh = _mesh(recipe.layout)
    modules = build_modules(recipe, mesh, config)
    n_data = get_dp_size(mesh)
    sizes: tuple[Any, ...] = (
        mesh,
        get_device(recipe.layout.backend),
        ROWS // n_data // recipe.n_microbatches,
        SEQ_LEN,
    )
    stages = [build_pipeline_stage(module, *sizes) for module in modules]
    pipeline = build_pipeline_schedule(
        stages, recipe.n_microbatches, CrossEntropy(), recipe.schedule
    )

    def step(i: int) -> torch.Tensor:
        mine, theirs = (part.chunk(n_data)[get_dp_rank(mesh)].to(sizes[1]) for part in DATA[i])
        loss = pipeline.step(mine, target=theirs)
        clip_grad_norm_(stages, float("inf"), device_mesh=mesh)
        return loss

    trained = equality.train(modules, len(DATA), step, sharded_adamw(modules))
    for told in (trained.gradients, trained.parameters):
        told.update({name: tensor.double().cpu() for name, tensor in told.items()})
    return trained


def _mesh(layout: DistributedConfig) -> DeviceMesh:
    """Return the mesh. A lone rank shards, cuts and sends, too, over groups of one."""
    mesh = init_distributed(layout, seed=0)
    kind = get_device(layout.backend).type
    return mesh or init_device_mesh(kind, (1, 1, 1), mesh_dim_names=("pp", "dp_shard", "tp"))


def build_modules(
    recipe: Recipe, mesh: DeviceMesh, config: ModelConfig = CONFIG
) -> list[PipelineStageModule]:
    """Return this rank's stages. A lone rank has two, so that tensors cross a boundary."""
    indices = get_stage_indices(recipe.schedule, get_pp_rank(mesh), get_pp_size(mesh))
    kept = torch.float64 if recipe.dtype == torch.float64 else torch.float32
    device = get_device(recipe.layout.backend)
    modules = [
        build_stage_module(config, i, get_pp_size(mesh) * len(indices)).to(device, kept)
        for i in indices
    ]
    for module in modules:
        apply_tensor_parallel(module, mesh)
        if config.n_experts:
            apply_expert_parallel(module, mesh)
        if recipe.float8 is not None:
            apply_float8(module, mesh, recipe.float8)
        apply_ac(module, recipe.ac)
        if recipe.compiler is not None:
            apply_compile(module, backend=recipe.compiler)
        apply_fsdp2(
            module, mesh, None if recipe.dtype == torch.float64 else default_mp_policy(recipe.dtype)
        )
        compute_in(module, recipe.dtype)
    return modules


def reference(config: ModelConfig = CONFIG) -> Trained:
    """Train in one process, in float64 on the CPU."""
    return train_in_one_process(config, DATA, CrossEntropy())
