"""Predictions for models that are not this package's: a Llama of transformers counts as ours; others are refused."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from course_pp.launch import on_ranks
from course_pp.model import CrossEntropy, ModelConfig, build_stage_module
from course_pp.model.hf import config_from_hf
from course_pp.parallel import (
    CollectiveCounts,
    DistributedConfig,
    apply_fsdp2,
    apply_tensor_parallel,
    build_pipeline_schedule,
    build_pipeline_stage,
    clip_grad_norm_,
    count_collectives,
    get_pp_rank,
    init_distributed,
    llama_plan,
    measure_unsharded_bytes,
    predict_collectives,
    predict_unsharded_bytes,
)
from tests.parallel.whole_models import SEQ_LEN, build

RANKS_IMPORT = ("transformers.models.llama.modeling_llama",)

ROWS = 2
LAYOUTS = {
    2: [
        DistributedConfig(dp_shard=2),
        DistributedConfig(dp_replicate=2, dp_shard=1),
        DistributedConfig(dp_shard=1, tp=2),
    ],
    4: [DistributedConfig(dp_shard=2, tp=2)],
}


def cases_of(n_ranks: int) -> list[tuple[DistributedConfig, str, bool]]:
    """Layout, model and whether its parameters are freed after forward, which matters where they are sharded."""
    return [
        (layout, name, reshard)
        for layout in LAYOUTS[n_ranks]
        for name, freed in (("llama", True), ("llama, tied", False))
        for reshard in ((True, False) if layout.dp_shard > 1 else (freed,))
    ]


def counted_on_rank(rank: int, n_ranks: int) -> list[tuple[CollectiveCounts, int]]:
    mesh_of = cache(init_distributed)  # DTensor takes groups of equal, older meshes for the same
    return [_counted(name, mesh_of(layout), reshard) for layout, name, reshard in cases_of(n_ranks)]


def _counted(name: str, mesh: DeviceMesh | None, reshard: bool) -> tuple[CollectiveCounts, int]:
    model = build(name)
    apply_tensor_parallel(model, mesh, llama_plan)
    apply_fsdp2(model, mesh, reshard_after_forward=reshard)
    tokens = torch.zeros(ROWS, SEQ_LEN, dtype=torch.int64)

    def step() -> None:
        model.zero_grad()
        model(tokens).logits.sum().backward()
        clip_grad_norm_(model, 1.0, device_mesh=mesh)

    step()
    counts: list[CollectiveCounts] = []
    peak = measure_unsharded_bytes(lambda: counts.append(count_collectives(step, mesh)), model)
    return counts[0], peak


@pytest.mark.parametrize("n_ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_a_llama_of_transformers_communicates_and_holds_what_is_predicted(n_ranks: int) -> None:
    for rank, found in enumerate(on_ranks(n_ranks, counted_on_rank, n_ranks, timeout_s=60)):
        for (layout, name, policy), (counts, peak) in zip(cases_of(n_ranks), found, strict=True):
            config = config_from_hf(build(name).config)
            known = {"reshard_after_forward": policy, "dtype": torch.float64}
            sizes = {"batch_size": ROWS, "seq_len": SEQ_LEN, "foreign": True}
            expected = predict_collectives(config, layout, **sizes, **known)[rank]
            assert counts == expected, (layout, name, policy)
            assert peak == predict_unsharded_bytes(config, layout, **known)[rank], (layout, name, policy)


class Wrapped(nn.Module):
    """A stage whose class says nothing."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


OURS = ModelConfig(dim=16, n_layers=4, n_heads=2, vocab_size=20, max_seq_len=SEQ_LEN)
PIPELINES = [DistributedConfig(pp=2, dp_shard=2), DistributedConfig(pp=2, dp_shard=1, tp=2)]


def pipelines_on_rank(rank: int) -> list[CollectiveCounts]:
    return [_piped(layout) for layout in PIPELINES]


def _piped(layout: DistributedConfig) -> CollectiveCounts:
    mesh = init_distributed(layout)
    inner = build_stage_module(OURS, get_pp_rank(mesh), 2).double()
    apply_tensor_parallel(inner, mesh)
    module = Wrapped(inner)
    apply_fsdp2(module, mesh)
    stage = build_pipeline_stage(module, mesh, "cpu", ROWS, SEQ_LEN)
    pipeline = build_pipeline_schedule(stage, 2, CrossEntropy(), "1f1b")
    tokens = torch.zeros(2 * ROWS, SEQ_LEN, dtype=torch.int64)

    def step() -> None:
        module.zero_grad()
        pipeline.step(tokens, target=tokens)
        clip_grad_norm_(pipeline.stages, 1.0, device_mesh=mesh)

    step()
    return count_collectives(step, mesh)


@pytest.mark.long
def test_the_stages_of_a_foreign_pipeline_tell_one_another_what_is_predicted() -> None:
    sizes = {"batch_size": ROWS, "seq_len": SEQ_LEN, "n_microbatches": 2, "dtype": torch.float64, "foreign": True}
    for rank, found in enumerate(on_ranks(4, pipelines_on_rank, timeout_s=60)):
        for layout, counts in zip(PIPELINES, found, strict=True):
            assert counts == predict_collectives(OURS, layout, **sizes)[rank], layout
    with pytest.raises(ValueError, match="foreign=True with tie_embeddings=True on pp=2"):
        predict_collectives(replace(OURS, tie_embeddings=True), PIPELINES[0], **sizes)
