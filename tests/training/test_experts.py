"""Experts train as in one process: parameters, loads, and the routers' biases."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from course_pp.launch import on_ranks
from course_pp.model import ModelConfig
from course_pp.parallel import DistributedConfig
from course_pp.training import TrainConfig
from course_pp.training.data import Batches
from course_pp.training.logs import METRICS
from tests.training.small import (
    MODEL,
    RUN,
    Trained,
    assert_equals,
    in_one_process,
    rows,
    train,
    trainer,
)

EXPERTS = replace(
    MODEL, n_layers=4, n_experts=4, top_k=2, expert_dim=12, balance="bias", balance_coef=0.1
)
LAYOUTS: dict[str, tuple[TrainConfig, DistributedConfig]] = {
    "pipeline, accumulated": (replace(RUN, accumulation=2), DistributedConfig(pp=2)),
    "runtime, padded": (replace(RUN, engine="runtime", schedule="zb_v"), DistributedConfig(pp=2)),
    "expert, padded": (RUN, DistributedConfig(dp_shard=2, ep=2)),
    "tensor": (RUN, DistributedConfig(tp=2)),
    "pipeline and expert": (RUN, DistributedConfig(pp=2, dp_shard=2, ep=2)),
    "pipeline and expert, padded": (RUN, DistributedConfig(pp=2, dp_shard=2, ep=2)),
}


def every(rank: int, names: list[str], model: ModelConfig) -> dict[str, Trained]:
    return {
        name: train(rank, LAYOUTS[name][0], model, LAYOUTS[name][1], "padded" in name)
        for name in names
    }


@pytest.mark.parametrize("n_ranks", [2, 4])
def test_experts_equal_one_process_with_their_loads_and_biases(n_ranks: int) -> None:
    names = [name for name in LAYOUTS if ("and" in name) == (n_ranks == 4)]
    ranks = on_ranks(n_ranks, every, names, EXPERTS, timeout_s=60)
    references = {padded: in_one_process(RUN, EXPERTS, padded) for padded in (False, True)}
    mask = Batches(rows(24, padded=True), RUN.batch, RUN.seed)[0].attention_mask
    assert mask is not None
    n_tokens = int(mask.sum())
    assert [sum(load.tokens) for load in references[True].loads[0].values()] == [
        EXPERTS.top_k * n_tokens
    ] * 4
    for name in names:
        reference = references["padded" in name]
        assert any(
            bias.any()
            for name, bias in reference.parameters.items()
            if name.endswith("router.bias")
        )
        assert_equals([found[name] for found in ranks], reference)


def skipping(rank: int) -> tuple[bool, list[Any], list[Any]]:
    """A step with NaN on rank 0: if it was skipped, its loads, and the routers' biases here."""
    run = trainer(replace(RUN, on_nan="skip"), EXPERTS)
    if rank == 0:
        next(run.modules[0].parameters()).data.fill_(torch.inf)
    result = run.train_step()
    biases = [
        b.tolist()
        for m in run.modules
        for name, b in m.named_buffers()
        if name.endswith("router.bias")
    ]
    return result.skipped, [sum(each.tokens) for each in result.loads.values()], biases


def test_a_step_that_is_skipped_moves_no_bias() -> None:
    n_pairs = RUN.batch * MODEL.max_seq_len * EXPERTS.top_k
    for skipped, n_tokens, biases in on_ranks(2, skipping, timeout_s=60):
        assert skipped
        assert n_tokens == [n_pairs] * 4
        assert biases == [[0.0] * 4] * 2


def logged(rank: int, folder: Path) -> None:
    model = replace(EXPERTS, capacity_factor=0.5)
    trainer(replace(RUN, log_every=1, log_folder=str(folder)), model, DistributedConfig(pp=2)).fit()


def test_records_tell_the_load_of_experts(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    on_ranks(2, logged, tmp_path, timeout_s=60)
    lines = map(json.loads, (tmp_path / METRICS).read_text().splitlines())
    n_pairs = RUN.batch * MODEL.max_seq_len * EXPERTS.top_k
    for record in [line for line in lines if line["event"] == "train"]:
        tokens = record["tokens_by_expert"]
        assert [sum(each) for each in tokens.values()] == [n_pairs] * 4
        assert record["imbalance"] == max(max(each) * 4 / n_pairs for each in tokens.values())
        assert 4 * n_pairs / 2 <= record["dropped"] < 4 * n_pairs
    assert "× the mean" in capfd.readouterr().out
