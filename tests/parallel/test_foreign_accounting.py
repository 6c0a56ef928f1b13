"""Predictions for a Llama of transformers, which communicates as this package's model does."""

from functools import cache

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from course_pp.launch import on_ranks
from course_pp.model.hf import config_from_hf
from course_pp.parallel import (
    CollectiveCounts,
    DistributedConfig,
    apply_fsdp2,
    apply_tensor_parallel,
    count_collectives,
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
    """Return layouts, models, and whether parameters are freed after forward.

    The last matters only if parameters are sharded.
    """
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
            sizes = {"batch_size": ROWS, "seq_len": SEQ_LEN, "clip": False}
            expected = predict_collectives(config, layout, **sizes, **known)[rank]
            assert counts == expected, (layout, name, policy)
            assert peak == predict_unsharded_bytes(config, layout, **known)[rank], (
                layout,
                name,
                policy,
            )
