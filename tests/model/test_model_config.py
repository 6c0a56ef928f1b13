"""ModelConfig: sizes resolve as documented, and impossible ones are refused with a remedy."""

from dataclasses import replace
from typing import Any

import pytest

from course_pp.model import ModelConfig, Transformer

SIZES: dict[str, Any] = {
    "dim": 48,
    "n_layers": 2,
    "n_heads": 6,
    "vocab_size": 50,
    "max_seq_len": 16,
}


def test_optional_sizes_resolve_to_full_attention_and_a_swiglu_of_8_thirds() -> None:
    config = ModelConfig(**SIZES)
    assert (config.head_dim, config.kv_heads, config.hidden_dim) == (8, 6, 128)
    assert ModelConfig(dim=4096, n_layers=1, n_heads=32, vocab_size=1).hidden_dim == 10944


def test_replacing_a_size_resolves_the_optional_ones_afresh() -> None:
    config = ModelConfig(**SIZES, n_kv_heads=2, ffn_dim=33)
    assert (config.kv_heads, config.hidden_dim) == (2, 33)
    config = replace(ModelConfig(**SIZES), dim=96, n_heads=4)
    assert (config.head_dim, config.kv_heads, config.hidden_dim) == (24, 4, 256)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("more", [{}, {"n_kv_heads": 2, "ffn_dim": 40}])
def test_parameter_counts_are_those_of_the_built_model(more: dict[str, int], tied: bool) -> None:
    config = ModelConfig(**SIZES, **more, tie_embeddings=tied)
    model = Transformer(config)

    def count(*parts: Any) -> int:
        return sum(p.numel() for part in parts for p in part.parameters())

    assert config.n_parameters == count(model)
    assert config.n_embedding_parameters == count(model.embed)
    assert config.n_layer_parameters == count(model.layers["1"])
    assert config.n_head_parameters == count(model.norm, model.head)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dim": 0}, "dim=0 must be at least 1"),
        ({"n_layers": -1}, "n_layers=-1 must be at least 1"),
        ({"ffn_dim": 0}, "ffn_dim=0 must be at least 1"),
        ({"n_kv_heads": 0}, "n_kv_heads=0 must be at least 1"),
        ({"dim": 50}, r"dim=50 must be a multiple of 2 \* n_heads = 12.*dim=48 or 60"),
        ({"dim": 54}, "same even width.*dim=48 or 60"),
        ({"dim": 6}, "nearest that works is dim=12$"),
        ({"n_kv_heads": 4}, "n_kv_heads=4 must divide n_heads=6.*n_kv_heads=3"),
        ({"n_kv_heads": 12}, "n_kv_heads=12 must divide n_heads=6.*n_kv_heads=6"),
        ({"rope_theta": 0.0}, r"rope_theta=0\.0 must be finite and greater than 0"),
        ({"norm_eps": float("nan")}, "norm_eps=nan must be finite and greater than 0"),
        ({"norm_eps": float("inf")}, "norm_eps=inf must be finite"),
        ({"head_width": 7}, "head_width=7 must be even"),
        ({"n_experts": 4, "top_k": 5}, "top_k=5 must be at most n_experts=4"),
        ({"n_experts": 4, "moe_every": 3}, "none of n_layers=2 has them with moe_every=3"),
        (
            {"n_experts": 4, "capacity_factor": 0},
            "capacity_factor=0 must be finite and greater than 0",
        ),
        ({"n_experts": 4, "router": "hash"}, "router is 'hash'.*'softmax', 'sigmoid'"),
        (
            {"n_experts": 4, "balance": "luck"},
            "balance is 'luck'.*'loss', 'sequence', 'bias', 'none'",
        ),
    ],
)
def test_an_impossible_size_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig(**{**SIZES, **change})
