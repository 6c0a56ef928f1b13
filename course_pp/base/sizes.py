"""The sizes of one Llama-style decoder, and the stages its layers go to.

Sizes are checked when they are written down.

Pure Python: the planner of a run and the builder of its model read the same sizes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from course_pp.base.arguments import checked

FFN_MULTIPLE = 32

LayerRange = tuple[int, int]
"""(start, end) of consecutive layers, end excluded."""


@checked
@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a decoder as in Touvron et al. 2023 (LLaMA), arXiv:2302.13971.

    Optional sizes stay None as given, so `dataclasses.replace(config, dim=...)` resolves them
    afresh; the resolved values are the properties `kv_heads`, `head_dim`, `hidden_dim` and
    `expert_hidden_dim`.

    With `n_experts` some layers have a mixture of experts (Shazeer et al. 2017, arXiv:1701.06538)
    in place of the feed-forward block; `course_pp.model.experts` computes it and says what each
    `balance` does.

    Attributes:
        dim: width of the residual stream.
        n_layers: decoder layers.
        n_heads: query heads; `dim` is divided among them.
        vocab_size: rows of the token embedding.
        n_kv_heads: key/value heads (grouped-query attention, Ainslie et al. 2023,
            arXiv:2305.13245); None: `n_heads`.
        ffn_dim: inner width of the feed-forward block; None: see `hidden_dim`.
        max_seq_len: positions for which rotary tables exist, hence the longest sequence, in tokens.
        rope_theta: base of the rotary positions.
        norm_eps: added to the mean square in each norm.
        tie_embeddings: whether the output head uses the embedding's matrix (Press & Wolf 2017,
            arXiv:1608.05859).
        qkv_bias: whether queries, keys and values have a bias, as Qwen2's (Yang et al. 2024,
            arXiv:2407.10671).
        rope_factor: how many times slower the slow pairs of rotary positions turn, as in Llama 3.1;
            1 changes none.
        rope_low_freq: pairs that turn less often than this in `rope_original_len` positions are
            slow.
        rope_high_freq: pairs that turn more often than this do not change; those in between change
            in part.
        rope_original_len: the longest sequence before scaling, in tokens.
        gated_ffn: SwiGLU; False: two matrices with a GELU between them, as in GPT-2 and GPT-3.
        qk_norm: whether each head's queries and keys are normalised, as Qwen3's (arXiv:2505.09388).
        head_width: channels of one head; None: `dim / n_heads`. Qwen3's heads together are wider
            than `dim`.
        n_experts: experts of a layer that has some; 0: no layer has.
        top_k: experts that each token goes to.
        n_shared_experts: experts that every token goes to besides; computed as one, that many times
            as wide.
        expert_dim: inner width of one expert; None: as `hidden_dim`.
        moe_every: every n-th layer has experts, the n-th first, so that 2 means layers 1, 3, 5, …
        n_dense_layers: the first layers, which have none whatever `moe_every` says, as in
            DeepSeek-V3.
        router: how logits become scores, over all experts (softmax) or each on its own (sigmoid).
        normalize_top_k: whether the weights of a token's experts are divided by their sum.
        router_scale: factor of the weights of a token's experts, applied last.
        capacity_factor: an expert takes at most this many times the mean load of a microbatch, the
            earliest of its tokens; None: all of them.
        balance: means to keep the load even: Switch's loss, the loss of each sequence, a bias
            without a loss, or nothing.
        balance_coef: the factor of that loss; with ``balance="bias"`` how far a step moves a bias.
        z_coef: the factor of the router's z-loss; 0: without it.
    """

    dim: int
    n_layers: int
    n_heads: int
    vocab_size: int
    n_kv_heads: int | None = None
    ffn_dim: int | None = None
    max_seq_len: int = 2048
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    qkv_bias: bool = False
    rope_factor: float = 1.0
    rope_low_freq: float = 1.0
    rope_high_freq: float = 4.0
    rope_original_len: int = 8192
    gated_ffn: bool = True
    qk_norm: bool = False
    head_width: int | None = None
    n_experts: int = 0
    top_k: int = 2
    n_shared_experts: int = 0
    expert_dim: int | None = None
    moe_every: int = 1
    n_dense_layers: int = 0
    router: Literal["softmax", "sigmoid"] = "softmax"
    normalize_top_k: bool = True
    router_scale: float = 1.0
    capacity_factor: float | None = None
    balance: Literal["loss", "sequence", "bias", "none"] = "loss"
    balance_coef: float = 0.01
    z_coef: float = 0.0

    def __post_init__(self) -> None:
        sizes = (
            "dim",
            "n_layers",
            "n_heads",
            "vocab_size",
            "max_seq_len",
            "rope_original_len",
            "n_kv_heads",
            "ffn_dim",
            "head_width",
            "top_k",
            "expert_dim",
            "moe_every",
        )
        for name in sizes:
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("n_experts", "n_shared_experts", "n_dense_layers"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0")
        positive = (
            "rope_theta",
            "norm_eps",
            "rope_factor",
            "rope_low_freq",
            "rope_high_freq",
            "router_scale",
        )
        for name in (*positive, "capacity_factor"):
            if (value := getattr(self, name)) is not None and not (
                math.isfinite(value) and value > 0
            ):
                raise ValueError(f"{name}={value} must be finite and greater than 0")
        for name in ("balance_coef", "z_coef"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ValueError(f"{name}={getattr(self, name)} must be finite and at least 0")
        if self.rope_low_freq >= self.rope_high_freq:
            raise ValueError(
                f"rope_low_freq={self.rope_low_freq} must be below"
                f" rope_high_freq={self.rope_high_freq}"
            )
        # Rotary positions turn pairs of channels, so a head needs an even number of them.
        step = 2 * self.n_heads
        if self.head_width is not None and self.head_width % 2:
            raise ValueError(
                f"head_width={self.head_width} must be even: rotary positions turn pairs of"
                " channels"
            )
        if self.head_width is None and self.dim % step:
            below, above = self.dim // step * step, (self.dim // step + 1) * step
            nearest = f"{below} or {above}" if below else f"{above}"
            raise ValueError(
                f"dim={self.dim} must be a multiple of 2 * n_heads = {step}, so that every head has"
                f" the same even width; the nearest that works is dim={nearest}"
            )
        if self.n_heads % self.kv_heads:
            divisors = [d for d in range(1, self.n_heads + 1) if self.n_heads % d == 0]
            nearest_divisor = min(divisors, key=lambda d: abs(d - self.kv_heads))
            raise ValueError(
                f"n_kv_heads={self.kv_heads} must divide n_heads={self.n_heads}, so that every"
                " key/value head serves as many query heads as the others; the nearest that works"
                f" is n_kv_heads={nearest_divisor}"
            )
        if self.n_experts and self.top_k > self.n_experts:
            raise ValueError(
                f"top_k={self.top_k} must be at most n_experts={self.n_experts}: a token's experts"
                " differ"
            )
        if self.n_experts and not self.expert_layers:
            raise ValueError(
                f"n_experts={self.n_experts}, but none of n_layers={self.n_layers} has them with "
                f"moe_every={self.moe_every} and n_dense_layers={self.n_dense_layers}: lower these"
            )

    @property
    def head_dim(self) -> int:
        """Channels of one attention head, resolved."""
        return self.dim // self.n_heads if self.head_width is None else self.head_width

    @property
    def q_dim(self) -> int:
        """Channels of all query heads."""
        return self.n_heads * self.head_dim

    @property
    def kv_heads(self) -> int:
        """Key/value heads, resolved."""
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def hidden_dim(self) -> int:
        """Inner width of the feed-forward block, resolved.

        Default without a gate: 4 times `dim`. With one: 8/3 of `dim`, rounded up to a multiple of
        32, which keeps the parameter count of the plain block (Shazeer 2020, arXiv:2002.05202,
        section 2; LLaMA, section 2.2).
        """
        if self.ffn_dim is not None:
            return self.ffn_dim
        if not self.gated_ffn:
            return 4 * self.dim
        return math.ceil(8 * self.dim / (3 * FFN_MULTIPLE)) * FFN_MULTIPLE

    @property
    def expert_hidden_dim(self) -> int:
        """Inner width of one expert, resolved."""
        return self.hidden_dim if self.expert_dim is None else self.expert_dim

    def has_experts(self, layer: int) -> bool:
        """Return whether this layer, counted from 0, has experts as its feed-forward block."""
        return (
            self.n_experts > 0
            and layer >= self.n_dense_layers
            and (layer + 1) % self.moe_every == 0
        )

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """The layers that have experts."""
        return tuple(filter(self.has_experts, range(self.n_layers)))

    @property
    def router_losses(self) -> tuple[str, ...]:
        """The names of the losses that each router has: ``"balance"``, ``"z"``, both or none."""
        return ("balance",) * (self.balance in ("loss", "sequence")) + ("z",) * (self.z_coef > 0)

    @property
    def n_ffn_matrices(self) -> int:
        """Matrices of one feed-forward block or expert: three with a gate, two without."""
        return 3 if self.gated_ffn else 2

    @property
    def n_embedding_parameters(self) -> int:
        """Parameters of the token embedding."""
        return self.vocab_size * self.dim

    @property
    def n_attention_matrices(self) -> int:
        """Parameters of one layer's q and o, k and v."""
        return 2 * self.dim * self.q_dim + 2 * self.dim * self.kv_heads * self.head_dim

    @property
    def n_layer_vectors(self) -> int:
        """Parameters of one layer that are no matrices: norms and biases."""
        biases = self.q_dim + 2 * self.kv_heads * self.head_dim
        return 2 * self.dim + self.qkv_bias * biases + self.qk_norm * 2 * self.head_dim

    @property
    def n_layer_parameters(self) -> int:
        """Parameters of one decoder layer without experts.

        These are q and o, k and v, feed-forward, two norms, biases.
        """
        return self.n_layer_matrices + self.n_layer_vectors

    @property
    def n_layer_matrices(self) -> int:
        """Parameters of one decoder layer without experts that are multiplied with."""
        return self.n_attention_matrices + self.n_ffn_matrices * self.dim * self.hidden_dim

    @property
    def n_expert_parameters(self) -> int:
        """Parameters of one expert."""
        return self.n_ffn_matrices * self.dim * self.expert_hidden_dim

    @property
    def layer_parameters(self) -> tuple[int, ...]:
        """Parameters of each layer, all its experts included."""
        idle = (self.n_experts - self.top_k) * self.n_expert_parameters
        return tuple(
            matrices + self.n_layer_vectors + self.has_experts(layer) * idle
            for layer, matrices in enumerate(self.layer_matrices)
        )

    @property
    def layer_matrices(self) -> tuple[int, ...]:
        """Parameters of each layer that one token is multiplied with.

        Of the experts these are `top_k` and the shared ones.
        """
        experts = (self.top_k + self.n_shared_experts) * self.n_expert_parameters
        with_experts = self.n_attention_matrices + self.n_experts * self.dim + experts
        return tuple(
            with_experts if self.has_experts(layer) else self.n_layer_matrices
            for layer in range(self.n_layers)
        )

    @property
    def n_head_parameters(self) -> int:
        """Parameters of the output end: final norm and head, which counts even if it is tied."""
        return self.dim + self.vocab_size * self.dim

    @property
    def n_parameters(self) -> int:
        """Parameters of the whole model; a tied matrix counts once."""
        total = self.n_embedding_parameters + sum(self.layer_parameters) + self.n_head_parameters
        return total - self.n_embedding_parameters if self.tie_embeddings else total

    @property
    def n_active_parameters(self) -> int:
        """Parameters that one token meets: all but those of experts that it does not go to."""
        n_layers = len(self.expert_layers)
        return (
            self.n_parameters - n_layers * (self.n_experts - self.top_k) * self.n_expert_parameters
        )


@checked
def compute_layer_assignment(n_layers: int, pp_size: int) -> list[LayerRange]:
    """Split layers into contiguous stages as evenly as possible; earlier stages take the extras.

    Returns:
        One (start, end) a stage, end excluded: 5 layers on 2 stages are [(0, 3), (3, 5)].
    """
    check_stage_count(n_layers, pp_size, "pp_size")
    share, extras = divmod(n_layers, pp_size)
    ends = list(accumulate(share + (stage < extras) for stage in range(pp_size)))
    return list(zip([0, *ends[:-1]], ends, strict=True))


def check_stage_count(n_layers: int, n_stages: int, count: str) -> None:
    """Refuse fewer stages than one, or more than layers; ``count`` is the argument's name."""
    if n_stages < 1:
        raise ValueError(f"{count} is {n_stages}: {n_stages} stages: a pipeline needs at least 1")
    if n_stages > n_layers:
        raise ValueError(
            f"{count} is {n_stages}: {n_stages} stages need at least {n_stages} layers, and this"
            f" model has n_layers={n_layers}; use at most {n_layers}"
            f" {'stage' if n_layers == 1 else 'stages'}, or a deeper model"
        )
