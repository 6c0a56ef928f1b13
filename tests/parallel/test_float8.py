"""Products in eight bits equal one process.

One process computes as torchao does by itself, and every layout equals the same conversion on one
process.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from course_pp.launch import on_ranks
from course_pp.model import CrossEntropy, Transformer
from course_pp.parallel import DistributedConfig, apply_ac, apply_float8
from tests.equality import Trained, adamw, assert_same_training, train
from tests.parallel import stack
from tests.parallel.stack import DATA

CONFIG = replace(stack.CONFIG, dim=32, n_layers=4, ffn_dim=64, n_kv_heads=None)
RECIPES: tuple[Literal["tensorwise", "rowwise"], ...] = ("tensorwise", "rowwise")
# Sums in another order differ in the 24th bit, and then a number may be rounded to its other
# neighbour in float8.
TOLERANCES = (1e-5, 1e-3)  # seen: 2e-6 of gradients, 1e-4 of parameters after three AdamW steps


def torchao_conversion(model: nn.Module, recipe: str, emulate: bool = True) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    convert_to_float8_training(
        model, config=config, module_filter_fn=lambda _, name: name != "head"
    )


@pytest.mark.parametrize("recipe", RECIPES)
def test_loss_and_gradients_are_torchaos(recipe: str) -> None:
    ours, theirs, exact = (Transformer(CONFIG) for _ in range(3))
    names = apply_float8(ours, None, recipe)
    assert len(names) == 7 * CONFIG.n_layers
    # so checkpoints know nothing of it
    assert ours.state_dict().keys() == exact.state_dict().keys()
    assert "head" not in names
    torchao_conversion(theirs, recipe)
    for model in (ours, theirs, exact):
        CrossEntropy()(model(DATA[0][0]), DATA[0][1]).backward()
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name
    assert not torch.equal(ours.head.weight.grad, exact.head.weight.grad), "nothing was rounded"


LAYOUTS = {
    DistributedConfig(dp_shard=1, tp=2): "1f1b",
    DistributedConfig(pp=2, dp_shard=2): "zb_v",
    DistributedConfig(pp=2, dp_shard=2, tp=2): "1f1b",
}


def in_one_process(n_data: int, recipe: str) -> Trained:
    """Train the whole model on the same pieces.

    Each microbatch of each data rank has scales of its own.
    """
    torch.manual_seed(0)
    model = Transformer(CONFIG)
    apply_float8(model, None, recipe)
    pieces = n_data * 2

    def step(i: int) -> Tensor:
        total = torch.zeros(())
        for inputs, target in zip(*(part.chunk(pieces) for part in DATA[i]), strict=True):
            loss = CrossEntropy()(model(inputs), target) / pieces
            loss.backward()
            total += loss.detach()
        return total

    return train([model], len(DATA), step, adamw([model]))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layouts_equal_the_same_conversion_on_one_process(
    layout: DistributedConfig, subtests: pytest.Subtests
) -> None:
    plain = stack.Recipe(layout, LAYOUTS[layout], "full", dtype=torch.float32, n_microbatches=2)
    recipes = [replace(plain, float8=recipe) for recipe in RECIPES]
    ranks = on_ranks(
        layout.pp * layout.dp_shard * layout.tp, stack.train_on_rank, recipes, CONFIG, timeout_s=100
    )
    for recipe, found in zip(RECIPES, zip(*ranks, strict=True), strict=True):
        with subtests.test(recipe):
            assert_same_training(
                list(found), in_one_process(layout.dp_shard, recipe), tolerances=TOLERANCES
            )


@pytest.mark.parametrize("skip", [(), ("q_proj",), ("shared_expert_gate",)])
def test_the_head_routers_and_experts_keep_their_bits_whatever_else_is_skipped(
    skip: tuple[str, ...],
) -> None:
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    sizes |= {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 32, "num_experts": 4}
    model = Qwen2MoeForCausalLM(Qwen2MoeConfig(vocab_size=48, num_hidden_layers=1, **sizes))
    linear = {name for name, module in model.named_modules() if type(module) is nn.Linear}
    kept = linear - {*apply_float8(model, None, skip=skip)}
    of_attention = {f"model.layers.0.self_attn.{name}" for name in skip if name == "q_proj"}
    assert kept == {"lm_head", "model.layers.0.mlp.shared_expert_gate"} | of_attention


def a_model(**sizes: int) -> Transformer:
    return Transformer(replace(CONFIG, **sizes))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: a_model().double(), "'layers.0.attn.q_proj' is in torch.float64"),
        (
            lambda: a_model(ffn_dim=40),
            r"'layers.0.mlp.gate_proj' has a weight of \(40, 32\).* add 'gate_proj' to skip=",
        ),
        (lambda: nn.Sequential(nn.Embedding(4, 16)), "finds no nn.Linear in Sequential"),
        (lambda: (m := a_model(), apply_ac(m, "full"))[0], "already has activation checkpointing"),
        (lambda: (m := a_model(), apply_float8(m, None))[0], "already has float8"),
    ],
)
def test_refused(make: Callable[[], nn.Module], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        apply_float8(make(), None)


def test_without_torchao_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(ImportError, match=r"pip install 'course_pp\[fp8\]'"):
        apply_float8(a_model(), None)
