"""The decoder computes what transformers' Llama computes, and weights travel both ways."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from course_pp.model import (
    ModelConfig,
    Transformer,
    build_stage_module,
    config_from_hf,
    config_to_hf,
    from_hf,
    hf_state_dict,
    load_hf_state_dict,
)
from course_pp.model.hf import hf_file_tensors

BATCH, SEQ = 3, 11
SMALL = ModelConfig(dim=32, n_layers=3, n_heads=4, vocab_size=61, n_kv_heads=2, max_seq_len=32)
CONFIGS = {
    "grouped": SMALL,
    "grouped_tied": ModelConfig(32, 3, 4, 61, n_kv_heads=2, max_seq_len=32, tie_embeddings=True),
    "full_attention": ModelConfig(24, 2, 3, 40, max_seq_len=64, norm_eps=1e-3, rope_theta=500.0),
    "one_kv_head_tied": ModelConfig(64, 1, 8, 17, n_kv_heads=1, ffn_dim=56, max_seq_len=16, tie_embeddings=True),
    "wide_heads": replace(SMALL, head_width=12),
    "qwen3": replace(SMALL, head_width=16, qk_norm=True, tie_embeddings=True),
    "mixtral": replace(SMALL, ffn_dim=24, n_experts=4),
    "qwen3_moe": replace(SMALL, head_width=16, qk_norm=True, n_experts=5, top_k=3, expert_dim=12),
    "qwen3_moe_in_part": replace(
        SMALL, n_layers=5, qk_norm=True, n_experts=3, expert_dim=12, moe_every=2, n_dense_layers=2,
        normalize_top_k=False,
    ),
}  # fmt: skip
WITH_EXPERTS = [name for name, config in CONFIGS.items() if config.n_experts]
INPUTS = ["plain", "left_padding", "right_padding", "positions"]


def random_model(config: ModelConfig) -> Transformer:
    """Return a model in float64 with every weight, norms too, far from its initial value.

    So no mix-up of weights cancels out.
    """
    model = Transformer(config).double()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                torch.randn(parameter.shape, generator=generator, dtype=torch.float64), alpha=0.2
            )
    return model


def theirs_with(model: Transformer) -> PreTrainedModel:
    """transformers' model with the same weights, and with norms that stay in float64.

    Their norms compute in float32 whatever their input, which would hide differences below 1e-7.
    """
    llama = AutoModelForCausalLM.from_config(
        config_to_hf(model.config), experts_implementation="eager"
    ).double()
    llama.load_state_dict(hf_state_dict(model))
    for module in list(llama.modules()):
        for name, child in module.named_children():
            if type(child).__name__.endswith("RMSNorm"):
                norm = nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon)
                norm.weight = child.weight
                setattr(module, name, norm)
    return llama


def inputs_for(kind: str, vocab_size: int) -> tuple[Tensor, dict[str, Tensor]]:
    tokens = torch.randint(vocab_size, (BATCH, SEQ), generator=torch.Generator().manual_seed(1))
    lengths = torch.tensor([SEQ, 7, 2])
    index = torch.arange(SEQ).expand(BATCH, SEQ)
    left = (index >= SEQ - lengths[:, None]).long()
    return (
        tokens,
        {
            "plain": {},
            "left_padding": {
                "attention_mask": left,
                "position_ids": (left.cumsum(-1) - 1).clamp(min=0),
            },
            "right_padding": {"attention_mask": (index < lengths[:, None]).long()},
            "positions": {"position_ids": index + torch.tensor([[0], [2], [5]])},
        }[kind],
    )


def real_token_loss(
    logits: Tensor, tokens: Tensor, attention_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the logits and the mean cross-entropy of real tokens.

    The output at padding does not matter.
    """
    real = (
        torch.ones_like(tokens, dtype=torch.bool)
        if attention_mask is None
        else attention_mask.bool()
    )
    return logits[real], F.cross_entropy(logits[real], tokens.roll(-1, 1)[real])


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_logits_and_every_gradient_equal_theirs(config: ModelConfig, kind: str) -> None:
    model = random_model(replace(config, balance="none"))
    llama = theirs_with(model)
    tokens, options = inputs_for(kind, config.vocab_size)
    mask = options.get("attention_mask")

    logits, loss = real_token_loss(model(tokens, **options), tokens, mask)
    expected, expected_loss = real_token_loss(
        llama(tokens, **options, use_cache=False).logits, tokens, mask
    )
    loss.backward()
    expected_loss.backward()

    limit = 1e-6 if config.n_experts else 1e-10  # their routers' softmax is in float32
    torch.testing.assert_close(logits, expected, atol=limit, rtol=0)
    expected_gradients = {name: p.grad for name, p in llama.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    names = expected_gradients.keys()
    gradients = {name: gradient for name, gradient in hf_state_dict(model).items() if name in names}
    torch.testing.assert_close(gradients, expected_gradients, atol=limit, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_a_hugging_face_model_is_copied_in_its_dtype(tied: bool, dtype: torch.dtype) -> None:
    llama = LlamaForCausalLM(config_to_hf(CONFIGS["grouped_tied"] if tied else SMALL)).to(dtype)
    model = from_hf(llama)
    tokens, _ = inputs_for("plain", 61)
    expected = llama(tokens, use_cache=False).logits
    # In bfloat16 the two round at different places, by up to 2^-8 of a value.
    torch.testing.assert_close(
        model(tokens), expected, atol=1e-5 if dtype == torch.float32 else 5e-3, rtol=1e-2
    )
    assert model(tokens).dtype == dtype
    assert model.rope_cos.dtype == torch.float32
    assert (model.head.weight is model.embed.weight) == tied
    assert not {p.data_ptr() for p in model.parameters()} & {
        p.data_ptr() for p in llama.parameters()
    }


def test_a_mistral_without_a_sliding_window_is_the_same_decoder() -> None:
    hf_config = MistralConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=61,
        intermediate_size=48, max_position_embeddings=32, sliding_window=None,
    )  # fmt: skip
    mistral = MistralForCausalLM(hf_config)
    tokens, _ = inputs_for("plain", 61)
    torch.testing.assert_close(from_hf(mistral)(tokens), mistral(tokens, use_cache=False).logits)


@pytest.mark.parametrize("n_stages", [1, 2, 3])
@pytest.mark.parametrize("config", [SMALL, CONFIGS["grouped_tied"]], ids=["untied", "tied"])
def test_each_stage_loads_its_own_part_of_a_checkpoint(config: ModelConfig, n_stages: int) -> None:
    llama = LlamaForCausalLM(config_to_hf(config))
    state = llama.state_dict()
    if config.tie_embeddings:
        del state["lm_head.weight"]  # as in a safetensors file
    tokens, _ = inputs_for("plain", config.vocab_size)
    x = tokens
    for stage_id in range(n_stages):
        stage = build_stage_module(config, stage_id, n_stages)
        load_hf_state_dict(stage, state)
        x = stage(x)
    torch.testing.assert_close(x, llama(tokens, use_cache=False).logits)


@pytest.mark.parametrize("n_stages", [2, 4])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "one matrix an expert"])
@pytest.mark.parametrize("kind", WITH_EXPERTS)
def test_each_stage_loads_its_own_experts_however_they_are_stored(
    kind: str, packed: bool, n_stages: int
) -> None:
    config = replace(CONFIGS[kind], n_layers=5)
    theirs = theirs_with(random_model(config))
    state = theirs.state_dict()
    if not packed:
        model = from_hf(theirs)
        state = hf_file_tensors(model.state_dict(), config)
        assert not any(name.endswith("gate_up_proj") for name in state)
    x = tokens = inputs_for("plain", config.vocab_size)[0]
    for stage_id in range(n_stages):
        stage = build_stage_module(config, stage_id, n_stages).double()
        load_hf_state_dict(stage, state)
        x = stage(x)
    torch.testing.assert_close(x, theirs(tokens, use_cache=False).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_sizes_survive_the_round_trip(config: ModelConfig) -> None:
    there_and_back = config_from_hf(config_to_hf(config))
    assert there_and_back == replace(config, n_kv_heads=config.kv_heads, ffn_dim=config.hidden_dim)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_type='linear'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_dropout": 0.1}, r"attention_dropout=0\.1"),
        ({"attention_bias": True, "mlp_bias": True}, "attention_bias=True; mlp_bias=True"),
    ],
)
def test_what_this_decoder_lacks_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_from_hf(LlamaConfig(hidden_size=64, num_attention_heads=4, **change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"router": "sigmoid", "n_shared_experts": 1}, "router='sigmoid'; n_shared_experts=1"),
        ({"router_scale": 2.5, "capacity_factor": 1.0}, r"router_scale=2\.5; capacity_factor=1\.0"),
        ({"balance": "bias"}, "balance='bias'"),
        (
            {"gated_ffn": False, "qkv_bias": True},
            "gated_ffn=False; qkv_bias=True with qk_norm or n_experts",
        ),
        (
            {"moe_every": 2, "normalize_top_k": False},
            "moe_every=2 without qk_norm; normalize_top_k=False without",
        ),
    ],
)
def test_what_none_of_their_models_has_is_refused_by_name(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        config_to_hf(replace(CONFIGS["mixtral"], **change))


def test_experts_of_another_width_are_refused_though_their_halves_would_fit() -> None:
    state = hf_state_dict(Transformer(replace(CONFIGS["mixtral"], ffn_dim=48)))
    with pytest.raises(
        ValueError, match=r"gate_up_proj has shape \(4, 96, 32\), but .* has \(4, 32, 24\)"
    ):
        load_hf_state_dict(Transformer(CONFIGS["mixtral"]), state)


def test_a_sliding_window_and_another_architecture_are_refused() -> None:
    with pytest.raises(ValueError, match="sliding_window=4096"):
        config_from_hf(MistralConfig())
    with pytest.raises(ValueError, match="model_type='gpt2' is not supported"):
        config_from_hf(GPT2Config())


QWEN2 = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
QWEN2 |= {"vocab_size": 61, "intermediate_size": 48, "max_position_embeddings": 32}
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def test_a_qwen2_has_biases_and_is_the_same_decoder() -> None:
    qwen = Qwen2ForCausalLM(Qwen2Config(**QWEN2, tie_word_embeddings=True))
    for name, parameter in qwen.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    model, (tokens, _) = from_hf(qwen), inputs_for("plain", 61)
    torch.testing.assert_close(model(tokens), qwen(tokens, use_cache=False).logits)
    assert model.config.n_parameters == sum(p.numel() for p in qwen.parameters())
    assert config_to_hf(model.config).model_type == "qwen2"


def test_rotary_positions_are_scaled_as_llama_3_does() -> None:
    sizes = {
        **QWEN2,
        "num_attention_heads": 2,
        "rope_parameters": {**SCALED, "original_max_position_embeddings": 16},
    }
    llama = LlamaForCausalLM(LlamaConfig(**sizes))
    model, (tokens, _) = from_hf(llama), inputs_for("plain", 61)
    torch.testing.assert_close(model(tokens), llama(tokens, use_cache=False).logits)
    cos, sin = llama.model.rotary_emb(torch.zeros(1), torch.arange(32)[None])
    torch.testing.assert_close(model.rope_cos, cos[0, :, :8])
    torch.testing.assert_close(model.rope_sin, sin[0, :, :8])
    assert config_from_hf(config_to_hf(model.config)) == model.config


def test_biases_begin_at_zero_and_layers_count_them() -> None:
    config = replace(SMALL, qkv_bias=True)
    model = Transformer(config)
    assert all(not p.any() for name, p in model.named_parameters() if name.endswith("bias"))
    assert sum(p.numel() for p in model.parameters()) == config.n_parameters


def test_a_missing_or_misshapen_weight_is_named_and_nothing_is_copied() -> None:
    model = Transformer(SMALL)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = {name: torch.zeros_like(tensor) for name, tensor in hf_state_dict(model).items()}
    misshapen = {**state, "model.norm.weight": torch.zeros(5)}
    del state["model.layers.2.mlp.up_proj.weight"]
    with pytest.raises(ValueError, match=r"model\.layers\.2\.mlp\.up_proj\.weight is missing"):
        load_hf_state_dict(model, state)
    with pytest.raises(
        ValueError, match=r"model\.norm\.weight has shape \(5,\), but norm\.weight has \(32,\)"
    ):
        load_hf_state_dict(model, misshapen)
    torch.testing.assert_close(dict(model.state_dict()), before, atol=0, rtol=0)
