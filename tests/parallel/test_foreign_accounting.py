"""Predictions for models that are not this package's: a Llama of transformers counts as ours; others are refused."""

from functools import partial

import pytest
import torch
from torch import nn

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

ROWS = 2
LAYOUTS = {
    2: [
        DistributedConfig(dp_shard=2),
        DistributedConfig(dp_replicate=2, dp_shard=1),
        DistributedConfig(dp_shard=1, tp=2),
    ],
    4: [DistributedConfig(dp_shard=2, tp=2)],
}
MODELS = ("llama", "llama, tied")


def counted_on_rank(rank: int, n_ranks: int) -> list[tuple[CollectiveCounts, int]]:
    layouts = LAYOUTS[n_ranks]
    return [_counted(name, layout, policy) for layout in layouts for name in MODELS for policy in (True, False)]


def _counted(name: str, layout: DistributedConfig, reshard: bool) -> tuple[CollectiveCounts, int]:
    mesh = init_distributed(layout)
    model = build(name)
    apply_tensor_parallel(model, mesh, llama_plan)
    apply_fsdp2(model, mesh, reshard_after_forward=reshard)
    tokens = torch.zeros(ROWS, SEQ_LEN, dtype=torch.int64)

    def step() -> None:
        model.zero_grad()
        model(tokens).logits.sum().backward()

    step()
    peak = measure_unsharded_bytes(step, model)
    return count_collectives(step, mesh), peak


@pytest.mark.parametrize("n_ranks", LAYOUTS)
def test_a_llama_of_transformers_communicates_and_holds_what_is_predicted(n_ranks: int) -> None:
    cases = [(layout, name, policy) for layout in LAYOUTS[n_ranks] for name in MODELS for policy in (True, False)]
    for rank, found in enumerate(on_ranks(n_ranks, counted_on_rank, n_ranks, timeout_s=60)):
        for (layout, name, policy), (counts, peak) in zip(cases, found, strict=True):
            config = config_from_hf(build(name).config)
            known = {"reshard_after_forward": policy, "dtype": torch.float64}
            sizes = {"batch_size": ROWS, "seq_len": SEQ_LEN, "clip": False}
            expected = predict_collectives(config, layout, **sizes, **known)[rank]
            assert counts == expected, (layout, name, policy)
            assert peak == predict_unsharded_bytes(config, layout, **known)[rank], (layout, name, policy)


def test_what_has_no_such_config_is_refused_by_name() -> None:
    model, layout = nn.Conv2d(1, 1, 1), DistributedConfig(dp_shard=2)
    for predict in (partial(predict_collectives, batch_size=1, seq_len=1), predict_unsharded_bytes):
        with pytest.raises(TypeError, match=r"config .*pass a ModelConfig"):
            predict(model, layout)
