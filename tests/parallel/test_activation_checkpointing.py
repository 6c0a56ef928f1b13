"""Activation checkpointing keeps less and changes nothing."""

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from course_pp.launch import on_ranks
from course_pp.model import CrossEntropy, ModelConfig, Transformer
from course_pp.parallel import (
    DistributedConfig,
    apply_ac,
    build_pipeline_schedule,
    build_pipeline_stage,
    build_stage_module,
    get_stage_indices,
    init_distributed,
)

CONFIG = ModelConfig(
    dim=32, n_layers=3, n_heads=4, n_kv_heads=2, ffn_dim=48, vocab_size=20, max_seq_len=64
)
MODES = ("none", "selective", "full")


def model_with_dropout(mode: str) -> Transformer:
    """Return a model with dropout in attention and behind it.

    A recomputation with another state of the generator would show.
    """
    torch.manual_seed(0)
    model = Transformer(CONFIG).double()
    for layer in model.layers.values():
        layer.attn.o_proj = nn.Sequential(layer.attn.o_proj, nn.Dropout(0.3))
        layer.mlp = nn.Sequential(layer.mlp, nn.Dropout(0.3))
    apply_ac(model, mode)
    return model


def tokens(batch: int = 4, seq_len: int = 16) -> Tensor:
    return torch.arange(batch * seq_len).view(batch, seq_len) % CONFIG.vocab_size


def train(mode: str) -> tuple[list[float], list[Tensor], Tensor]:
    """Run two microbatches forward before either goes backward, as in a pipeline.

    Return the losses, the gradients and the next random number.
    """
    model, loss_fn = model_with_dropout(mode), CrossEntropy()
    losses = [loss_fn(model(part), part) for part in tokens().chunk(2)]
    for loss in losses:
        loss.backward()
    return [loss.item() for loss in losses], [p.grad for p in model.parameters()], torch.rand(1)


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_losses_gradients_and_random_numbers_are_those_without_checkpointing(mode: str) -> None:
    losses, gradients, drawn = train(mode)
    expected_losses, expected_gradients, expected_drawn = train("none")
    assert losses == expected_losses
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected_gradients, strict=True))
    assert torch.equal(drawn, expected_drawn)


def buffers_and_gradients(mode: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Return buffers and gradients after two microbatches.

    Every forward changes the statistics, and divides a weight by one of them.
    """
    torch.manual_seed(0)
    norm = nn.utils.parametrizations.spectral_norm
    model = nn.Sequential(
        *(nn.Sequential(norm(nn.Linear(4, 4)), nn.BatchNorm1d(4), nn.ReLU()) for _ in range(2))
    )
    apply_ac(model.double(), mode)
    losses = [
        model(part).pow(3).sum()
        for part in torch.linspace(-1, 1, 24, dtype=torch.float64).view(2, 3, 4)
    ]
    for loss in losses:
        loss.backward()
    return list(model.buffers()), [p.grad for p in model.parameters() if p.grad is not None]


def test_buffers_that_a_forward_changes_are_changed_once() -> None:
    (expected, gradients), (buffers, found) = (
        buffers_and_gradients("none"),
        buffers_and_gradients("full"),
    )
    assert all(torch.equal(a, b) for a, b in zip(buffers, expected, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(found, gradients, strict=True))


def kept_bytes(mode: str, n_layers: int) -> int:
    """Return the bytes of distinct tensors, without parameters, that forward keeps for backward."""
    model = Transformer(replace(CONFIG, n_layers=n_layers))
    apply_ac(model, mode)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, Tensor] = {}  # alive until counted, or another tensor could take the address

    def keep(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(tokens())
    assert output.requires_grad
    return sum(
        tensor.untyped_storage().nbytes()
        for address, tensor in kept.items()
        if address not in weights
    )


def test_full_keeps_the_input_of_each_block_and_selective_less_than_everything() -> None:
    none, selective, full = ((kept_bytes(mode, 5) - kept_bytes(mode, 2)) / 3 for mode in MODES)
    assert full == tokens().numel() * CONFIG.dim * torch.float32.itemsize
    assert full < selective < none


def warnings_on_rank(rank: int, schedule: str, mode: str) -> tuple[list[str], dict[int, float]]:
    """Return the warnings of building the pipeline, and counts of forwards.

    These are forwards of each stage's first attention for one microbatch.
    """
    mesh, calls = init_distributed(DistributedConfig(pp=2)), {}
    indices = get_stage_indices(schedule, rank, 2)
    stages = []
    for i in indices:
        module = build_stage_module(replace(CONFIG, n_layers=4), i, 2 * len(indices))
        calls[i] = 0.0

        def note(*_: Any, i: int = i) -> None:
            calls[i] += 1 / 4

        next(iter(module.layers.values())).attn.q_proj.register_forward_hook(note)
        apply_ac(module, mode)
        stages.append(build_pipeline_stage(module, mesh, "cpu", 1, 16, torch.float32))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipeline = build_pipeline_schedule(stages, 4, CrossEntropy(), schedule)
    pipeline.step(tokens(), target=tokens())
    return [str(warning.message) for warning in caught], calls


SPLIT = [
    (name, *mode) for name in ("zb_v", "interleaved_zb") for mode in (("full", 9), ("selective", 4))
]
WHOLE = [("interleaved_1f1b", "full", 0), ("zb_v", "none", -1), ("dualpipe_v", "none", -1)]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("schedule", "mode", "n_parameters"), [*SPLIT, *WHOLE])
def test_a_schedule_that_splits_backward_recomputes_once_a_parameter_and_says_so_once(
    schedule: str, mode: str, n_parameters: int
) -> None:
    (said, calls), (others, more) = on_ranks(2, warnings_on_rank, schedule, mode)
    assert others == []
    if n_parameters <= 0:  # once for the whole backward, or never
        assert said == []
        assert {*calls.values(), *more.values()} == {2 + n_parameters}
        return
    [message] = said
    assert message.startswith(f"schedule='{schedule}' splits backward in two")
    assert message.endswith("or apply_ac(..., 'none')")
    # Once in forward and once in each half of backward, of which the first stage's is whole.
    assert calls | more == {0: 2, 1: 2 + n_parameters, 2: 2 + n_parameters, 3: 2 + n_parameters}
