"""Tensor parallelism: parts that ranks hold, refusals, and a loss over a vocabulary in parts."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from course_pp.launch import on_ranks
from course_pp.model import CrossEntropy, ModelConfig, Transformer
from course_pp.parallel import (
    DistributedConfig,
    VocabParallelCrossEntropy,
    apply_tensor_parallel,
    get_tp_mesh,
    init_distributed,
)
from course_pp.step.loss import counted, loss_share, share_of
from tests.parallel.layouts import (
    PLAIN,
    SELECTIVE,
    Case,
    assert_runs_equal,
    data_of,
    model_config,
    reference,
    train_on_rank,
)

CONFIG = ModelConfig(
    dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=48, vocab_size=20, max_seq_len=16
)


def local_shapes_on_rank(rank: int, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the local shape of each parameter but the second block's."""
    mesh = init_distributed(DistributedConfig(tp=2))
    model = Transformer(config)
    apply_tensor_parallel(model, mesh)
    return {
        name: tuple((p.to_local() if isinstance(p, DTensor) else p).shape)
        for name, p in model.named_parameters()
        if "layers.1" not in name
    }


def test_matrices_are_cut_by_columns_then_rows_and_the_rest_is_whole() -> None:
    for shapes in on_ranks(2, local_shapes_on_rank, CONFIG):
        assert shapes == {
            "embed.weight": (20, 32),
            "layers.0.attn_norm.weight": (32,),
            "layers.0.attn.q_proj.weight": (16, 32),
            "layers.0.attn.k_proj.weight": (8, 32),
            "layers.0.attn.v_proj.weight": (8, 32),
            "layers.0.attn.o_proj.weight": (32, 16),
            "layers.0.mlp_norm.weight": (32,),
            "layers.0.mlp.gate_proj.weight": (24, 32),
            "layers.0.mlp.up_proj.weight": (24, 32),
            "layers.0.mlp.down_proj.weight": (32, 24),
            "norm.weight": (32,),
            "head.weight": (10, 32),
        }


@pytest.mark.parametrize(
    "config",
    [replace(CONFIG, vocab_size=21), replace(CONFIG, tie_embeddings=True)],
    ids=["odd", "tied"],
)
def test_a_head_that_is_odd_or_tied_stays_whole(config: ModelConfig) -> None:
    for shapes in on_ranks(2, local_shapes_on_rank, config):
        assert shapes.get("head.weight", shapes["embed.weight"]) == (config.vocab_size, 32)


def odd_sequence_on_rank(rank: int) -> str:
    model = Transformer(CONFIG)
    apply_tensor_parallel(model, init_distributed(DistributedConfig(tp=2)))
    with pytest.raises(ValueError, match="seq_len") as refusal:
        model(torch.zeros(1, 7, dtype=torch.int64))
    return str(refusal.value)


def test_a_sequence_that_does_not_divide_is_refused_before_anything_is_sent() -> None:
    message = "seq_len=7 must be a multiple of tp=2 for sequence-parallel norms: pad it to 8"
    assert on_ranks(2, odd_sequence_on_rank) == [message] * 2


def vocab_parallel_losses_on_rank(
    rank: int, logits: torch.Tensor, targets: list[torch.Tensor]
) -> list[tuple]:
    mesh = get_tp_mesh(init_distributed(DistributedConfig(tp=2)))
    loss_fn, found = VocabParallelCrossEntropy(), []
    for target in targets:
        part = logits.chunk(2, -1)[rank].clone().requires_grad_()
        loss = loss_fn(DTensor.from_local(part, mesh, [Shard(2)]), target)
        (3 * loss).backward()
        found.append((loss.detach(), part.grad))
    return found


@pytest.mark.parametrize("scale", [1.0, 1e4], ids=["small", "large"])
def test_a_loss_over_a_vocabulary_in_parts_equals_the_plain_one(scale: float) -> None:
    torch.manual_seed(0)
    logits = scale * torch.randn(2, 5, 12, dtype=torch.float64)
    target = torch.randint(12, (2, 5))
    targets = [
        target,
        target.masked_fill(torch.rand(2, 5) < 0.5, -100),
        torch.full_like(target, -100),
    ]
    ranks = on_ranks(2, vocab_parallel_losses_on_rank, logits, targets)
    for i, target in enumerate(targets):
        whole = logits.clone().requires_grad_()
        expected = CrossEntropy()(whole, target)
        (3 * expected).backward()
        for loss, _ in (rank[i] for rank in ranks):
            torch.testing.assert_close(loss, expected.detach(), rtol=1e-14, atol=0)
        gradient = torch.cat([gradient for _, gradient in (rank[i] for rank in ranks)], -1)
        torch.testing.assert_close(gradient, whole.grad, rtol=0, atol=1e-14)


def half_precision_loss_on_rank(
    rank: int, logits: torch.Tensor, target: torch.Tensor
) -> torch.Tensor:
    mesh = get_tp_mesh(init_distributed(DistributedConfig(tp=2)))
    return VocabParallelCrossEntropy()(
        DTensor.from_local(logits.chunk(2, -1)[rank], mesh, [Shard(2)]), target
    )


def test_the_loss_of_half_precision_logits_is_computed_in_float32() -> None:
    logits, target = torch.randn(8, 64, 12).bfloat16(), torch.randint(12, (8, 64))
    for loss in on_ranks(2, half_precision_loss_on_rank, logits, target):
        torch.testing.assert_close(loss, CrossEntropy()(logits, target))


@pytest.mark.parametrize(
    "case",
    [Case(tp=2), pytest.param(Case(pp=2, tp=2, schedule="zb_v"), marks=pytest.mark.long)],
    ids=str,
)
def test_training_with_logits_left_in_parts_equals_one_process(case: Case) -> None:
    config = model_config(case, tied=False)
    data, kwargs = data_of(config, case.batch, padded=True)
    runs = on_ranks(case.n_ranks, train_in_parts_on_rank, case, config, data, kwargs)
    assert_runs_equal(runs, reference(config, case.batch, True), config)


@pytest.mark.parametrize(
    "case",
    [Case(tp=2), pytest.param(Case(pp=2, tp=2, schedule="zb_v"), marks=pytest.mark.long)],
    ids=str,
)
def test_norms_of_queries_and_keys_get_the_gradients_of_all_heads(case: Case) -> None:
    config = replace(model_config(case, tied=False), qk_norm=True, head_width=6)
    data, kwargs = data_of(config, case.batch, padded=False)
    runs = on_ranks(case.n_ranks, train_on_rank, case, PLAIN, config, data, kwargs)
    assert_runs_equal(runs, reference(config, case.batch, False), config)


def train_in_parts_on_rank(rank, case, config, data, kwargs):
    return train_on_rank(
        rank,
        case,
        SELECTIVE,
        config,
        data,
        kwargs,
        VocabParallelCrossEntropy(),
        gather_logits=False,
    )


def test_logits_that_are_not_cut_are_refused() -> None:
    with pytest.raises(
        TypeError,
        match=r"not cut over the vocabulary: call apply_tensor_parallel\(\.\.\., gather_lo",
    ):
        VocabParallelCrossEntropy()(torch.zeros(1, 2, 3), torch.zeros(1, 2, dtype=torch.int64))


def strange_target_on_rank(rank: int) -> str:
    mesh = get_tp_mesh(init_distributed(DistributedConfig(tp=2)))
    logits = DTensor.from_local(torch.zeros(1, 2, 6), mesh, [Shard(2)])
    with pytest.raises(ValueError, match="target") as refusal:
        VocabParallelCrossEntropy()(logits, torch.tensor([[3, 12]]))
    return str(refusal.value)


def test_a_target_outside_the_vocabulary_is_refused() -> None:
    message = "target holds token ids from 3 to 12, which must lie in [0, vocab_size) = [0, 12)"
    assert all(refusal.startswith(message) for refusal in on_ranks(2, strange_target_on_rank))


def ordinary_loss_on_rank(rank: int) -> None:
    mesh = get_tp_mesh(init_distributed(DistributedConfig(tp=2)))
    logits = DTensor.from_local(torch.zeros(4, 6, requires_grad=True), mesh, [Shard(1)])
    target = torch.tensor([0, 1, 2, 11])
    mean: Any = nn.CrossEntropyLoss()
    of_dict: Any = lambda output, target: mean(output["logits"], target)  # noqa: E731
    of_tuple: Any = lambda output, target: mean(output[0], target)  # noqa: E731
    given = (
        (mean, logits),
        (CrossEntropy(), logits),
        (of_dict, {"logits": logits}),
        (of_tuple, (logits, 1)),
    )
    for loss, output in given:
        for share in (loss_share, share_of):
            with pytest.raises(ValueError, match="VocabParallelCrossEntropy"):
                share(counted(loss), output, target, 1.0)
    for share in (loss_share, share_of):
        share(counted(VocabParallelCrossEntropy()), logits, target, 1.0)
        for loss, kind in ((_OutOfMemory(), torch.OutOfMemoryError), (_Parts(), RuntimeError)):
            with pytest.raises(kind, match="its own words") as own:
                share(counted(loss), logits, target, 1.0)
            assert type(own.value) is kind


class _OutOfMemory(CrossEntropy):
    def total(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("its own words")


class _Parts(VocabParallelCrossEntropy):
    def total(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("its own words")


def test_an_ordinary_loss_on_logits_left_in_parts_is_told_which_loss_takes_them() -> None:
    on_ranks(2, ordinary_loss_on_rank)
