"""Compiled blocks compute what the blocks compute, under every other step, and keep their names."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from course_pp.launch import on_ranks
from course_pp.model import ModelConfig, Transformer
from course_pp.parallel import (
    DistributedConfig,
    apply_ac,
    apply_compile,
    apply_tensor_parallel,
    replaced_forward,
)
from tests.equality import assert_equals_one_process, snapshot_gradients
from tests.parallel.stack import CONFIG, DATA, EXPERTS, Recipe, reference, train_on_rank
from tests.parallel.whole_models import build, train


@pytest.mark.full
def test_the_compiler_of_this_machine_changes_rounding_alone() -> None:
    torch.manual_seed(0)
    model, inputs = Transformer(replace(CONFIG, n_layers=2)).double(), DATA[0][0]
    expected = model(inputs)
    expected.sum().backward()
    gradients = snapshot_gradients([model])
    names = list(model.state_dict())
    model.zero_grad()
    assert apply_compile(model) == ("layers.0", "layers.1")
    found = model(inputs)
    found.sum().backward()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(snapshot_gradients([model]), gradients, rtol=1e-12, atol=1e-11)
    assert list(model.state_dict()) == names


RECIPES = [
    Recipe(DistributedConfig(pp=2, dp_shard=2), "zb_v", "selective", "aot_eager"),
    Recipe(DistributedConfig(pp=2, dp_shard=1, tp=2), "1f1b", "full", "aot_eager"),
]
WITH_EXPERTS = [
    Recipe(DistributedConfig(dp_shard=4, ep=2), "1f1b", "full", "aot_eager", n_microbatches=2),
    Recipe(DistributedConfig(pp=2, dp_shard=2, ep=2), "zb_v", "selective", "aot_eager"),
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("recipes", "config"), [(RECIPES, CONFIG), (WITH_EXPERTS, EXPERTS)], ids=["dense", "experts"]
)
def test_compiled_stages_train_as_one_process(
    recipes: list[Recipe], config: ModelConfig, subtests: pytest.Subtests
) -> None:
    """Blocks are traced and differentiated for a compiler, which is left out to save time."""
    ranks = on_ranks(4, train_on_rank, recipes, config, timeout_s=110)
    for recipe, found in zip(recipes, zip(*ranks, strict=True), strict=True):
        with subtests.test(str(recipe)):
            assert_equals_one_process(list(found), reference(config), config)


@pytest.mark.long
def test_a_foreign_model_is_compiled_too() -> None:
    plain, compiled = (train(_gpt2(backend), "gpt2") for backend in (None, "aot_eager"))
    torch.testing.assert_close(compiled.losses, plain.losses, rtol=1e-12, atol=0)
    torch.testing.assert_close(compiled.parameters, plain.parameters, rtol=0, atol=1e-11)


def _gpt2(backend: str | None) -> nn.Module:
    model = build("gpt2")
    apply_ac(model, "selective")
    if backend:
        assert apply_compile(model, backend=backend) == (
            "transformer.h.0",
            "transformer.h.1",
            "transformer.h.2",
        )
    return model


def compile_cut_and_recomputed_in_part(rank: int) -> None:
    model = Transformer(CONFIG)
    apply_tensor_parallel(model, init_device_mesh("cpu", (1,), mesh_dim_names=("tp",)))
    apply_ac(model, "selective")
    apply_compile(model, backend="eager")


def test_what_torch_would_compile_into_what_cannot_run_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"block 'layers.0' is cut .* its 'attn' is recomputed.* use apply_ac"
    ):
        on_ranks(1, compile_cut_and_recomputed_in_part)


def test_what_cannot_compile_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"backend='inductr' must be one of 'inductor'"):
        apply_compile(Transformer(CONFIG), backend="inductr")

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("No working C++ compiler found\nlong trace")

    replaced_forward._problem_of.cache_clear()
    monkeypatch.setattr(torch, "compile", broken)
    model = Transformer(CONFIG)
    with pytest.raises(
        RuntimeError, match=r"does not work for cpu here \(RuntimeError: No working C\+\+ compiler"
    ):
        apply_compile(model)
    replaced_forward._problem_of.cache_clear()
    model(DATA[0][0])  # nothing was changed
