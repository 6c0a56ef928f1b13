"""Checkpoints of earlier days still load."""

import tarfile
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from course_pp.launch import on_ranks
from course_pp.model import ModelConfig, Transformer, build_stage_module
from course_pp.training.checkpoint import contents, find_latest, load, verify

# Two pipeline ranks of this model, after a step of AdamW: written by the code of commit 0e5b8a4.
VERSION_1 = Path(__file__).with_name("version_1.tar.gz")
CONFIG = ModelConfig(
    dim=4, n_layers=2, n_heads=1, vocab_size=5, ffn_dim=4, max_seq_len=8, tie_embeddings=True
)


@pytest.fixture
def version_1(tmp_path: Path) -> Path:
    with tarfile.open(VERSION_1) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def expected(name: str, shape: torch.Size) -> Tensor:
    """The parameter before its step: numbers that follow from its name."""
    start = sum(map(ord, "embed.weight" if name == "head.weight" else name)) % 97
    return (torch.arange(shape.numel()).reshape(shape) + start) / 128


def stepped(module: nn.Module) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Each parameter and its two moments as they were saved, by name."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(expected(name, parameter.shape))
            parameter.grad = parameter.detach() / 2
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.5)
    optimizer.step()
    return {name: with_moments(p, optimizer) for name, p in module.named_parameters()}


def with_moments(
    parameter: nn.Parameter, optimizer: torch.optim.Optimizer
) -> tuple[Tensor, Tensor, Tensor]:
    state = optimizer.state[parameter]
    return parameter.detach(), state["exp_avg"], state["exp_avg_sq"]


def same(found: tuple[Tensor, ...], saved: tuple[Tensor, ...]) -> bool:
    """Whether they differ by a few roundings only: another processor's vector units computed the
    step that was saved.

    Parameters, numbers below 2, were rounded as such; where they come near 0, a relative bound
    would be too strict.
    """
    return torch.allclose(found[0], saved[0], rtol=0, atol=1e-6) and all(
        torch.allclose(moment, there, rtol=1e-6, atol=0)
        for moment, there in zip(found[1:], saved[1:], strict=True)
    )


def _differing(rank: int, root: Path, n_stages: int) -> list[str]:
    """What a stage loads otherwise than it was saved."""
    saved = stepped(build_stage_module(CONFIG, rank, n_stages))
    stage = build_stage_module(CONFIG, rank, n_stages)
    optimizer = torch.optim.AdamW(stage.parameters())
    loaded = load(root, stage, optimizer, device_mesh=None)
    assert (loaded.step, loaded.extra, optimizer.param_groups[0]["lr"]) == (7, {"at": 7}, 0.5)
    return [
        name
        for name, p in stage.named_parameters()
        if not same(with_moments(p, optimizer), saved[name])
    ]


@pytest.mark.parametrize("n_stages", [1, 2])
def test_version_1_loads_at_any_layout(n_stages: int, version_1: Path) -> None:
    assert verify(version_1 / "step_00000007") == []
    assert find_latest(version_1) == version_1 / "step_00000007"
    assert len(contents(version_1)) == 4 * len(list(Transformer(CONFIG).parameters())) + 2 * 2
    assert on_ranks(n_stages, _differing, version_1, n_stages) == [[]] * n_stages
