"""Weights and sizes to and from Hugging Face's Llama, and what has its layers: Mistral, Qwen2.

The two models compute the same function; only names differ. Names are the full model's on both sides, so weights go
to and from one pipeline stage as well as the whole model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from course_pp.model.transformer import Transformer
from course_pp.sizes import ModelConfig

if TYPE_CHECKING:
    from transformers import LlamaConfig, PreTrainedModel, Qwen2Config

# Ours -> theirs. Whole dotted parts, so that "norm" does not match inside "attn_norm".
_ENDS = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_IN_LAYER = {"attn_norm": "input_layernorm", "attn": "self_attn", "mlp_norm": "post_attention_layernorm"}

_SCALING = {
    "rope_factor": "factor",
    "rope_low_freq": "low_freq_factor",
    "rope_high_freq": "high_freq_factor",
    "rope_original_len": "original_max_position_embeddings",
}
_KINDS = ("llama", "mistral", "qwen2")

EMBEDDING, HEAD = "embed.weight", "head.weight"


def name_to_hf(name: str) -> str:
    """`layers.3.attn.q_proj.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    first, _, rest = name.partition(".")
    if first != "layers":
        return f"{_ENDS[first]}.{rest}"
    index, part, *tail = rest.split(".")
    return ".".join(["model.layers", index, _IN_LAYER.get(part, part), *tail])


def config_from_hf(hf_config: Any) -> ModelConfig:
    """Return the sizes of a Hugging Face Llama, Mistral or Qwen2 as ours; refuse what this decoder does not have."""
    _refuse_unsupported(hf_config)
    rope = hf_config.rope_parameters
    scaled = {ours: rope[theirs] for ours, theirs in _SCALING.items()} if rope.get("rope_type") == "llama3" else {}
    return ModelConfig(
        dim=hf_config.hidden_size,
        n_layers=hf_config.num_hidden_layers,
        n_heads=hf_config.num_attention_heads,
        vocab_size=hf_config.vocab_size,
        n_kv_heads=hf_config.num_key_value_heads,
        ffn_dim=hf_config.intermediate_size,
        max_seq_len=hf_config.max_position_embeddings,
        rope_theta=rope["rope_theta"],
        norm_eps=hf_config.rms_norm_eps,
        tie_embeddings=hf_config.tie_word_embeddings,
        qkv_bias=hf_config.model_type == "qwen2",
        **scaled,
    )


def config_to_hf(config: ModelConfig) -> LlamaConfig | Qwen2Config:
    """Return the `transformers.LlamaConfig` of the same model, or the `Qwen2Config` if it has biases."""
    if not config.gated_ffn:
        raise ValueError("gated_ffn=False: every Llama's feed-forward has a gate; export a model with gated_ffn=True")
    from transformers import LlamaConfig, Qwen2Config

    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_factor != 1:
        rope |= {"rope_type": "llama3", **{theirs: getattr(config, ours) for ours, theirs in _SCALING.items()}}
    return (Qwen2Config if config.qkv_bias else LlamaConfig)(
        hidden_size=config.dim,
        num_hidden_layers=config.n_layers,
        num_attention_heads=config.n_heads,
        vocab_size=config.vocab_size,
        num_key_value_heads=config.kv_heads,
        intermediate_size=config.hidden_dim,
        max_position_embeddings=config.max_seq_len,
        rope_parameters=rope,
        rms_norm_eps=config.norm_eps,
        tie_word_embeddings=config.tie_embeddings,
    )


def hf_state_dict(module: Transformer) -> dict[str, Tensor]:
    """Return the weights of a model or stage under Hugging Face's names, sharing storage with `module`."""
    return {name_to_hf(name): tensor for name, tensor in module.state_dict().items()}


@torch.no_grad()
def load_hf_state_dict(module: Transformer, state: Mapping[str, Tensor]) -> None:
    """Copy into a model or stage the weights it holds from tensors under Hugging Face's names.

    A tied head may be missing, as it is in safetensors files. If any other weight is, or has another shape, none is
    copied.
    """
    found = {}
    for name, own in module.state_dict().items():
        source = name_to_hf(name)
        if name == HEAD and module.config.tie_embeddings and source not in state:
            source = name_to_hf(EMBEDDING)
        if source not in state:
            raise ValueError(f"{source} is missing from the weights in state; this part needs it as {name}")
        if state[source].shape != own.shape:
            raise ValueError(
                f"{source} has shape {tuple(state[source].shape)}, but {name} has {tuple(own.shape)}; "
                "build the model with config_from_hf"
            )
        found[name] = state[source]
    module.load_state_dict(found)


def from_hf(hf_model: PreTrainedModel) -> Transformer:
    """Return a copy of a Hugging Face causal Llama, on its device and in its dtype."""
    some_weight = next(hf_model.parameters())
    with torch.device("meta"):
        model = Transformer(config_from_hf(hf_model.config))
    for parameter in model.parameters():
        # Not `model.to(dtype)`, which would round the rotary tables too.
        parameter.data = parameter.data.to(some_weight.dtype)
    model.to_empty(device=some_weight.device)
    model.init_freqs_and_ties()
    load_hf_state_dict(model, hf_model.state_dict())
    return model


def refuse_other_kinds(kind: object) -> None:
    """Raise ValueError for a ``model_type`` whose layers this decoder does not have."""
    if kind not in _KINDS:
        raise ValueError(f"model_type={kind!r} is not supported; use a model of type {', '.join(map(repr, _KINDS))}")


def _refuse_unsupported(hf_config: Any) -> None:
    kind = hf_config.model_type
    refuse_other_kinds(kind)
    width = getattr(hf_config, "head_dim", None)  # Qwen2 has none of its own
    head_dim = hf_config.hidden_size // hf_config.num_attention_heads
    rope_type = hf_config.rope_parameters.get("rope_type", "default")
    window = getattr(hf_config, "sliding_window", None)
    unsupported = {
        f"rope_type={rope_type!r} (scaled rotary positions)": rope_type not in ("default", "llama3"),
        f"head_dim={width}, not hidden_size / heads = {head_dim}": width not in (None, head_dim),
        f"hidden_act={hf_config.hidden_act!r}, not 'silu'": hf_config.hidden_act != "silu",
        f"attention_dropout={hf_config.attention_dropout}": hf_config.attention_dropout != 0,
        "attention_bias=True": getattr(hf_config, "attention_bias", False),
        "mlp_bias=True": getattr(hf_config, "mlp_bias", False),
        f"sliding_window={window}": window is not None,
    }
    found = [what for what, present in unsupported.items() if present]
    if found:
        raise ValueError(f"this decoder does not implement {'; '.join(found)}; use a checkpoint without")
