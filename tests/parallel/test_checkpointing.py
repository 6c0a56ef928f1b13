"""Activation checkpointing keeps less and changes nothing."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from course_pp.model import CrossEntropy, ModelConfig, Transformer
from course_pp.parallel import apply_ac

CONFIG = ModelConfig(dim=32, n_layers=3, n_heads=4, n_kv_heads=2, ffn_dim=48, vocab_size=20, max_seq_len=64)
MODES = ("none", "selective", "full")


def model_with_dropout(mode: str) -> Transformer:
    """Dropout in attention and behind it, so that recomputing in another state would show."""
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
    """Two microbatches forward before either goes backward, as in a pipeline; then where the generator stands."""
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


def kept_bytes(mode: str, n_layers: int) -> int:
    """Bytes of the distinct tensors that forward keeps for backward, parameters left out."""
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
    return sum(tensor.untyped_storage().nbytes() for address, tensor in kept.items() if address not in weights)


def test_full_keeps_the_input_of_each_block_and_selective_less_than_everything() -> None:
    none, selective, full = ((kept_bytes(mode, 5) - kept_bytes(mode, 2)) / 3 for mode in MODES)
    assert full == tokens().numel() * CONFIG.dim * torch.float32.itemsize
    assert full < selective < none


def test_parameters_keep_their_names_and_weights_load() -> None:
    plain, checkpointed = Transformer(CONFIG), Transformer(CONFIG)
    apply_ac(checkpointed, "full")
    assert checkpointed.load_state_dict(plain.state_dict()) is not None
    assert list(checkpointed.state_dict()) == list(plain.state_dict())


@pytest.mark.parametrize("mode", ["block", "", None, True])
def test_an_unknown_mode_is_refused(mode: Any) -> None:
    with pytest.raises(ValueError, match=r"mode=.* must be one of 'none', 'full', 'selective'"):
        apply_ac(Transformer(CONFIG), mode)
