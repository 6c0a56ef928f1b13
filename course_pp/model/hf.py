"""Weights and sizes to and from Hugging Face's Llama and models with the same layers.

These are Mistral, Qwen2, Qwen3 and, with experts, Mixtral and Qwen3-MoE. Their model and ours
compute the same function. They differ only in names, and in the way in which experts are stored.
Both sides use the names of the full model, so weights can also go to and from one pipeline stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from course_pp.base.imports import imports_of_extra
from course_pp.base.sizes import ModelConfig
from course_pp.model.transformer import Transformer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# Our name -> their name, for whole dotted parts, so that "norm" does not match in "attn_norm".
_ENDS = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn": "self_attn",
    "mlp_norm": "post_attention_layernorm",
}

_SCALING = {
    "rope_factor": "factor",
    "rope_low_freq": "low_freq_factor",
    "rope_high_freq": "high_freq_factor",
    "rope_original_len": "original_max_position_embeddings",
}
_KINDS = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")
_WITH_EXPERTS = ("mixtral", "qwen3_moe")
_QK_NORM = ("qwen3", "qwen3_moe")

Form = Literal["packed", "mixtral", "qwen3_moe"]
"""The way in which experts are stored: packed as in transformers, or one matrix an expert."""
_IN_MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_PACKED: dict[str, tuple[tuple[str, Literal[0, 1] | None], ...]] = {
    "gate_up_proj": (("gate_proj", 0), ("up_proj", 1)),
    "down_proj": (("down_proj", None),),
}
"""{packed weight of transformers: its matrices in files, each with its half of the rows}."""

EMBEDDING, HEAD = "embed.weight", "head.weight"


def name_to_hf(name: str) -> str:
    """Return their name of a parameter of ours.

    For example `layers.3.attn.q_proj.weight` -> `model.layers.3.self_attn.q_proj.weight`.
    """
    first, _, rest = name.partition(".")
    if first != "layers":
        return f"{_ENDS[first]}.{rest}"
    index, part, *tail = rest.split(".")
    tail = ["gate" if each == "router" else each for each in tail]
    return ".".join(["model.layers", index, _IN_LAYER.get(part, part), *tail])


@dataclass(frozen=True)
class Source:
    """A tensor of theirs that holds a tensor of ours, or a part of it.

    The views ``place(ours)`` and ``take(theirs)`` have the same values.

    Attributes:
        name: the name of their tensor.
        expert: the number of the expert among our packed ones; None if it holds all of them.
        half: the half of their tensor's second dimension that counts; None if all of it does.
        transposed: whether our tensor is (in, out), and theirs (out, in).
        rows: the half of the rows of our expert that it holds; None if it holds all of them.
    """

    name: str
    expert: int | None = None
    half: Literal[0, 1] | None = None
    transposed: bool = False
    rows: Literal[0, 1] | None = None

    def place(self, ours: Tensor) -> Tensor:
        """Return the part of our tensor that their tensor holds, as a view."""
        view = ours if self.expert is None else ours[self.expert]
        if self.rows is not None:
            view = view.chunk(2)[self.rows]
        return view.transpose(-2, -1) if self.transposed else view

    def take(self, theirs: Tensor) -> Tensor:
        """Return the part of their tensor that holds our values, as a view."""
        return theirs if self.half is None else theirs.chunk(2, dim=1)[self.half]


def form_of(names: Iterable[str]) -> Form:
    """Return the form of weights that have these names."""
    names = list(names)
    if any(name.endswith(".experts.gate_up_proj") for name in names):
        return "packed"
    return "mixtral" if any(".block_sparse_moe." in name for name in names) else "qwen3_moe"


def sources_in_hf(name: str, config: ModelConfig, form: Form) -> list[Source]:
    """Return the tensors of theirs that make up our tensor ``name``."""
    whole = name_to_hf(name)
    if form == "mixtral":
        whole = whole.replace(".mlp.", ".block_sparse_moe.")
    part, _, matrix = whole.rpartition(".")
    if not part.endswith(".experts"):
        return [Source(whole)]
    if form == "packed" and matrix == "down_proj":
        return [Source(whole, transposed=True)]
    if form == "packed":
        return [
            Source(f"{part}.gate_up_proj", half=0 if matrix == "gate_proj" else 1, transposed=True)
        ]
    if form == "mixtral":
        matrix = _IN_MIXTRAL[matrix]
    return [
        Source(f"{part}.{e}.{matrix}.weight", expert=e, transposed=True)
        for e in range(config.n_experts)
    ]


def sources_in_files(name: str, n_experts: int, form: Form) -> list[Source]:
    """Return the tensors of published files that make up a weight of transformers' own model.

    Its experts are packed: ``gate_up_proj`` is (experts, gate and up, in), and ``down_proj``
    (experts, out, in).

    Args:
        n_experts: the number of experts in the weight, if it holds packed experts.
    """
    part, _, matrix = name.rpartition(".")
    if form == "packed" or not part.endswith(".experts") or matrix not in _PACKED:
        return [Source(name)]
    if form == "mixtral":
        part = part.replace(".mlp.", ".block_sparse_moe.")
    found: list[Source] = []
    for expert in range(n_experts):
        for each, rows in _PACKED[matrix]:
            theirs = _IN_MIXTRAL[each] if form == "mixtral" else each
            found.append(Source(f"{part}.{expert}.{theirs}.weight", expert=expert, rows=rows))
    return found


def config_from_hf(hf_config: Any) -> ModelConfig:
    """Return our sizes of a Hugging Face model; refuse features that this decoder does not have.

    The settings that balance experts in training are not taken over, because their loss is weighed
    and scaled in another way.
    """
    _refuse_unsupported(hf_config)
    kind, rope = hf_config.model_type, hf_config.rope_parameters
    scaled = (
        {ours: rope[theirs] for ours, theirs in _SCALING.items()}
        if rope.get("rope_type") == "llama3"
        else {}
    )
    width = getattr(hf_config, "head_dim", None)  # Qwen2 has none of its own
    experts: dict[str, Any] = {}
    if kind in _WITH_EXPERTS:
        experts = {"n_experts": hf_config.num_local_experts, "top_k": hf_config.num_experts_per_tok}
    if kind == "qwen3_moe":
        experts |= {
            "expert_dim": hf_config.moe_intermediate_size,
            "moe_every": hf_config.decoder_sparse_step,
            "n_dense_layers": len(hf_config.mlp_only_layers),
            "normalize_top_k": hf_config.norm_topk_prob,
        }
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
        qkv_bias=kind == "qwen2",
        qk_norm=kind in _QK_NORM,
        head_width=(
            None if width == hf_config.hidden_size // hf_config.num_attention_heads else width
        ),
        **experts,
        **scaled,
    )


def config_to_hf(config: ModelConfig) -> PreTrainedConfig:
    """Return the configuration of the same model in transformers.

    Its class is the simplest one that has all the model's features.
    """
    kind = _kind_of(config)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_factor != 1:
        rope |= {
            "rope_type": "llama3",
            **{theirs: getattr(config, ours) for ours, theirs in _SCALING.items()},
        }
    more: dict[str, Any] = (
        {"head_dim": config.head_dim} if config.head_width or kind in _QK_NORM else {}
    )
    if kind in _WITH_EXPERTS:
        more |= {"num_local_experts": config.n_experts, "num_experts_per_tok": config.top_k}
    if kind == "qwen3_moe":
        more |= {
            "moe_intermediate_size": config.expert_hidden_dim,
            "decoder_sparse_step": config.moe_every,
            "mlp_only_layers": list(range(config.n_dense_layers)),
            "norm_topk_prob": config.normalize_top_k,
        }
    return config_class(kind)(
        hidden_size=config.dim,
        num_hidden_layers=config.n_layers,
        num_attention_heads=config.n_heads,
        vocab_size=config.vocab_size,
        num_key_value_heads=config.kv_heads,
        intermediate_size=config.expert_hidden_dim if kind == "mixtral" else config.hidden_dim,
        max_position_embeddings=config.max_seq_len,
        rope_parameters=rope,
        rms_norm_eps=config.norm_eps,
        tie_word_embeddings=config.tie_embeddings,
        **more,
    )


def config_class(kind: str) -> Any:
    """Return transformers' class for a ``model_type`` that this decoder computes."""
    with imports_of_extra("hf"):
        import transformers

    return {
        "llama": transformers.LlamaConfig,
        "mistral": transformers.MistralConfig,
        "qwen2": transformers.Qwen2Config,
        "qwen3": transformers.Qwen3Config,
        "mixtral": transformers.MixtralConfig,
        "qwen3_moe": transformers.Qwen3MoeConfig,
    }[kind]


def _kind_of(config: ModelConfig) -> str:
    """Return the ``model_type`` that computes the same; refuse features that no type has."""
    kind = "qwen2" if config.qkv_bias else "llama"
    if config.qk_norm:
        kind = "qwen3_moe" if config.n_experts else "qwen3"
    elif config.n_experts:
        kind = "mixtral"
    odd = {
        "gated_ffn=False": not config.gated_ffn,
        "qkv_bias=True with qk_norm or n_experts": config.qkv_bias and kind != "qwen2",
    }
    if config.n_experts:
        odd |= {
            f"router={config.router!r}": config.router != "softmax",
            f"router_scale={config.router_scale}": config.router_scale != 1,
            f"n_shared_experts={config.n_shared_experts}": config.n_shared_experts > 0,
            f"capacity_factor={config.capacity_factor}": config.capacity_factor is not None,
            "balance='bias'": config.balance == "bias",
        }
    if kind == "mixtral":
        odd |= {
            f"moe_every={config.moe_every} without qk_norm": config.moe_every > 1,
            f"n_dense_layers={config.n_dense_layers} without qk_norm": config.n_dense_layers > 0,
            "normalize_top_k=False without qk_norm": not config.normalize_top_k,
        }
    found = [what for what, present in odd.items() if present]
    if found:
        raise ValueError(
            f"no model of type {', '.join(_KINDS)} has {'; '.join(found)}: export a model without"
        )
    return kind


def hf_state_dict(module: Transformer) -> dict[str, Tensor]:
    """Return the weights of a model or stage for ``load_state_dict`` of a Hugging Face model.

    The tensors share storage with ``module``, except experts, which transformers packs in another
    way.
    """
    theirs: dict[str, Tensor] = {}
    halves: dict[str, list[Tensor]] = {}
    for name, tensor in module.state_dict().items():
        [source] = sources_in_hf(name, module.config, "packed")
        if source.half is None:
            theirs[source.name] = source.place(tensor)
        else:
            halves.setdefault(source.name, []).append(source.place(tensor))  # the gate comes first
    return theirs | {name: torch.cat(pair, dim=1) for name, pair in halves.items()}


def hf_file_tensors(weights: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return weights under the names of published files, which hold one matrix an expert."""
    form: Form = "mixtral" if _kind_of(config) == "mixtral" else "qwen3_moe"
    sources = (
        (source, tensor)
        for name, tensor in weights.items()
        for source in sources_in_hf(name, config, form)
    )
    return {source.name: source.place(tensor).contiguous() for source, tensor in sources}


@torch.no_grad()
def load_hf_state_dict(module: Transformer, state: Mapping[str, Tensor]) -> None:
    """Copy tensors under Hugging Face's names into the weights of a model or stage.

    Experts may be packed, as in transformers' memory, or have one matrix each, as in published
    files. A tied head may be missing, as it is in safetensors files. If any other weight is missing
    or has another shape, no weight is copied.
    """
    found: list[tuple[Tensor, Tensor]] = []
    form = form_of(state)
    for name, own in module.state_dict().items():
        for source in sources_in_hf(name, module.config, form):
            theirs = source.name
            if name == HEAD and module.config.tie_embeddings and theirs not in state:
                theirs = name_to_hf(EMBEDDING)
            if theirs not in state:
                raise ValueError(
                    f"{theirs} is missing from the weights in state; this part needs it as {name}"
                )
            to, given = source.place(own), source.take(state[theirs])
            if to.shape != given.shape:
                raise ValueError(
                    f"{theirs} has shape {tuple(state[theirs].shape)}, but {name} has"
                    f" {tuple(own.shape)}; build the model with config_from_hf"
                )
            found.append((to, given))
    for to, given in found:
        to.copy_(given)


def from_hf(hf_model: PreTrainedModel) -> Transformer:
    """Return a copy of a Hugging Face causal model, on its device and in its dtype."""
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
        raise ValueError(
            f"model_type={kind!r} is not supported; use a model of type"
            f" {', '.join(map(repr, _KINDS))}"
        )


def _refuse_unsupported(hf_config: Any) -> None:
    kind = hf_config.model_type
    refuse_other_kinds(kind)
    rope_type = hf_config.rope_parameters.get("rope_type", "default")
    window = getattr(hf_config, "sliding_window", None)
    dense = getattr(hf_config, "mlp_only_layers", [])
    noise = getattr(hf_config, "router_jitter_noise", 0)
    unsupported = {
        f"rope_type={rope_type!r} (scaled rotary positions)": (
            rope_type not in ("default", "llama3")
        ),
        f"hidden_act={hf_config.hidden_act!r}, not 'silu'": hf_config.hidden_act != "silu",
        f"attention_dropout={hf_config.attention_dropout}": hf_config.attention_dropout != 0,
        "attention_bias=True": getattr(hf_config, "attention_bias", False),
        "mlp_bias=True": getattr(hf_config, "mlp_bias", False),
        f"sliding_window={window}": window is not None,
        f"mlp_only_layers={dense}, not the first ones": dense != list(range(len(dense))),
        f"router_jitter_noise={noise}": noise != 0,
    }
    found = [what for what, present in unsupported.items() if present]
    if found:
        raise ValueError(
            f"this decoder does not implement {'; '.join(found)}; use a checkpoint without"
        )
