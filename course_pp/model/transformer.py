"""A Llama-style decoder, readable in one sitting, and any contiguous part of it.

    tokens ──► embed ──► layers "0" … "n-1" ──► norm ──► head ──► logits
               └ first stage                    └ last stage ┘

One class serves the whole model and every pipeline stage: a part that another stage holds is None
here, and `forward` skips it. A parameter has the same name in a stage as in the full model. Its
initial values depend on its name and the seed alone, so one seed gives the same full model for
every split.

A block has RMSNorm (Zhang & Sennrich 2019), rotary positions (Su et al. 2021) in the half-rotation
layout of Hugging Face weights, grouped-query attention (Ainslie et al. 2023), and SwiGLU (Shazeer
2020) or, in `course_pp.model.experts`, a mixture of such feed-forward blocks.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course_pp.base.arguments import checked
from course_pp.base.sizes import ModelConfig
from course_pp.model.experts import MoE, Router

INIT_STD = 0.02


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn channel pairs (i, i + head_dim/2) of x by the angle of their position.

    x is (batch, heads, seq, head_dim). The tables are rounded to x's dtype first, as in
    transformers. FSDP2's mixed precision casts the inputs of every layer in the same way, so it
    does not change the result.
    """
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def rotary_tables(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, each float32 (max_seq_len, head_dim / 2) on the CPU.

    The angle of position t and pair i is t · theta^(-2i / head_dim) (Su et al. 2021,
    arXiv:2104.09864, section 3.2.2). With `rope_factor` f, a pair turns f times slower if its
    wavelength is above rope_original_len / rope_low_freq. It turns as before if its wavelength is
    below rope_original_len / rope_high_freq. Pairs in between take a mean of both speeds, weighted
    by their frequency (Llama 3.1's `apply_scaling`, github.com/meta-llama/llama-models).
    """
    pairs = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu")
    frequencies = 1.0 / config.rope_theta ** (pairs / config.head_dim)
    if config.rope_factor != 1:
        turns = config.rope_original_len * frequencies / (2 * math.pi)
        between = config.rope_high_freq - config.rope_low_freq
        kept = ((turns - config.rope_low_freq) / between).clamp(0, 1)
        frequencies = kept * frequencies + (1 - kept) * frequencies / config.rope_factor
    positions = torch.arange(config.max_seq_len, dtype=torch.float32, device="cpu")
    angles = positions[:, None] * frequencies
    return angles.cos(), angles.sin()


class LayerCache:
    """The keys and values of earlier positions in one layer, each (batch, kv_heads, seq, head_dim).

    It is empty until the first call of `extend`.
    """

    def __init__(self) -> None:
        self._seen: tuple[Tensor, Tensor] | None = None

    @property
    def length(self) -> int:
        """The number of positions seen."""
        return 0 if self._seen is None else self._seen[0].shape[2]

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add the keys and values of new positions of the same batch, and return all."""
        if self._seen is not None:
            seen_keys, seen_values = self._seen
            keys = torch.cat((seen_keys, keys), dim=2)
            values = torch.cat((seen_values, values), dim=2)
        self._seen = keys, values
        return keys, values


class KVCache:
    """The layers' caches of one batch of sequences.

    One cache serves all stages of a model that a rank holds.

        cache = model.new_cache()
        logits = model(prompt, cache=cache)         # (batch, prompt length, vocab_size)
        logits = model(next_token, cache=cache)     # (batch, 1, vocab_size), given the prompt
    """

    def __init__(self) -> None:
        self._layers: dict[str, LayerCache] = {}

    def layer(self, name: str) -> LayerCache:
        """Return the cache of a layer, an empty one at first."""
        return self._layers.setdefault(name, LayerCache())

    def after(self, name: str, n_new: int, limit: int, alone: bool) -> slice:
        """Return the places of new positions, behind the positions that a layer has seen.

        Args:
            name: the layer.
            limit: the most positions that a sequence may have.
            alone: whether the call passes neither a mask nor positions; it must not.
        """
        if not alone:
            raise ValueError(
                "attention_mask and position_ids beside a cache: leave them out, and give sequences"
                " of one length without padding"
            )
        start = self.layer(name).length
        new = slice(start, start + n_new)
        if new.stop > limit:
            raise ValueError(
                f"with what the cache holds the sequence has {new.stop} tokens, more than"
                f" max_seq_len={limit}: generate fewer, or build the model with a larger"
                " max_seq_len"
            )
        return new

    def mask(self, new: slice, device: torch.device) -> Tensor | None:
        """Return the causal mask's rows for the positions ``new``, bool (1, 1, new, all).

        It is None if no positions come before them, because attention is then causal by itself.
        """
        if new.start == 0:
            return None
        rows = torch.ones(new.stop - new.start, new.stop, dtype=torch.bool, device=device)
        return rows.tril(new.start)[None, None]


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        kv_dim = config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.dim, config.q_dim, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.dim, kv_dim, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.dim, kv_dim, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.q_dim, config.dim, bias=False)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps) if config.qk_norm else None

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Return the attention's output for x (batch, seq, dim), of the same shape.

        The other arguments are those of `DecoderLayer.forward`.
        """
        q = self._split_heads(self.q_proj(x))
        k = self._split_heads(self.k_proj(x))
        v = self._split_heads(self.v_proj(x))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if cache is not None:
            k, v = cache.extend(k, v)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
        )
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _split_heads(self, x: Tensor) -> Tensor:
        # The number of heads is left open: under tensor parallelism a rank holds only some of them.
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class SwiGLU(nn.Module):
    """Gated feed-forward block: down(silu(gate(x)) · up(x)).

    (batch, seq, dim) -> (batch, seq, dim).
    """

    def __init__(self, config: ModelConfig, width: int | None = None) -> None:
        super().__init__()
        width = config.hidden_dim if width is None else width
        self.gate_proj = nn.Linear(config.dim, width, bias=False)
        self.up_proj = nn.Linear(config.dim, width, bias=False)
        self.down_proj = nn.Linear(width, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class FeedForward(nn.Module):
    """Ungated feed-forward block: down(gelu(up(x))), (batch, seq, dim) -> (batch, seq, dim)."""

    def __init__(self, config: ModelConfig, width: int | None = None) -> None:
        super().__init__()
        width = config.hidden_dim if width is None else width
        self.up_proj = nn.Linear(config.dim, width, bias=False)
        self.down_proj = nn.Linear(width, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.up_proj(x)))


class DecoderLayer(nn.Module):
    """Pre-norm block: attention, then the feed-forward block or experts.

    The output of each is added to the residual stream.
    """

    def __init__(self, config: ModelConfig, layer: int = 0) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attn = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        feed_forward = SwiGLU if config.gated_ffn else FeedForward
        self.mlp: nn.Module
        if config.has_experts(layer):
            shared = config.n_shared_experts * config.expert_hidden_dim
            self.mlp = MoE(config, layer, feed_forward(config, shared) if shared else None)
        else:
            self.mlp = feed_forward(config)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None,
        cache: LayerCache | None = None,
        is_token: Tensor | None = None,
    ) -> Tensor:
        """Run one layer on hidden states x (batch, seq, dim).

        Args:
            cos, sin: rotary tables of these positions, broadcastable to (batch, heads, seq,
                head_dim / 2).
            mask: None for plain causal attention, else bool (batch, 1 or heads, seq, seq), True =
                may attend. With a cache the last dimension includes the cached positions.
            cache: keys and values of earlier positions; those of `x` are added.
            is_token: bool (batch, seq), False on padding, which experts leave out; None where
                nothing is padded.
        """
        # Passed only where it exists: tensor parallelism counts the positional arguments.
        cached = {} if cache is None else {"cache": cache}
        x = x + self.attn(self.attn_norm(x), cos, sin, mask, **cached)
        for_experts = {"is_token": is_token} if isinstance(self.mlp, MoE) else {}
        return x + self.mlp(self.mlp_norm(x), **for_experts)


@checked
class Transformer(nn.Module):
    """The decoder, or the contiguous part of it that one pipeline stage holds.

    It is built on the default device in the default dtype. It is initialised from
    `torch.initial_seed()`, without a draw from the global generator. Under `torch.device("meta")`
    nothing is allocated: call `to_empty(device=...)` and `init_weights_and_freqs()` afterwards.

    Args:
        config: sizes of the full model.
        layer_range: (start, end) of the layers held here, end excluded; None for all.
        has_embedding: whether `embed` is here.
        has_head: whether `norm` and `head` are here.
    """

    rope_cos: Tensor
    rope_sin: Tensor

    def __init__(
        self,
        config: ModelConfig,
        layer_range: tuple[int, int] | None = None,
        has_embedding: bool = True,
        has_head: bool = True,
    ) -> None:
        super().__init__()
        start, end = (0, config.n_layers) if layer_range is None else layer_range
        if not 0 <= start < end <= config.n_layers:
            raise ValueError(
                f"layer_range=({start}, {end}) must be non-empty and lie within (0,"
                f" {config.n_layers}), end excluded"
            )
        self.config = config
        self.layer_range = (start, end)
        target = torch.get_default_device()
        # Built on meta, so that the modules' own initialisers allocate nothing and draw nothing.
        with torch.device("meta"):
            self.embed = nn.Embedding(config.vocab_size, config.dim) if has_embedding else None
            self.layers = nn.ModuleDict(
                {str(i): DecoderLayer(config, i) for i in range(start, end)}
            )
            self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps) if has_head else None
            self.head = nn.Linear(config.dim, config.vocab_size, bias=False) if has_head else None
            table = torch.empty(config.max_seq_len, config.head_dim // 2, dtype=torch.float32)
            self.register_buffer("rope_cos", table, persistent=False)
            self.register_buffer("rope_sin", table.clone(), persistent=False)
        self._tie()
        if target.type != "meta":
            self.to_empty(device=target)
            self.init_weights_and_freqs()

    @property
    def tied_weight(self) -> nn.Parameter | None:
        """This part's end of a tie whose other end is on another stage, else None.

        Both ends start from the same values; a training step must add their two gradients up.
        """
        if not self.config.tie_embeddings or (self.embed is None) == (self.head is None):
            return None
        end = self.head if self.embed is None else self.embed
        return None if end is None else cast(nn.Parameter, end.weight)

    def new_cache(self) -> KVCache:
        """Return an empty cache for `forward`; each batch that text is generated for needs one."""
        return KVCache()

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Run this part of the model: tokens or hidden states in, hidden states or logits out.

        Args:
            x: token ids (batch, seq) where the embedding is here, else hidden states (batch, seq,
                dim).
            attention_mask: None; or (batch, seq) of bool or integers, nonzero = real token; or bool
                (batch, 1 or heads, seq, seq), True = may attend. Attention stays causal under every
                mask. Experts leave out the padding of a (batch, seq) mask. A mask of four
                dimensions does not say which positions are padding, so experts take all of them.
            position_ids: integer positions (batch, seq); None for 0, 1, 2, …
            cache: the cache of the earlier positions (`new_cache`). The positions of x follow them
                and are added to it. No mask and no positions may come with a cache.

        Returns:
            Logits (batch, seq, vocab_size) where the head is here, else hidden states (batch, seq,
            dim).

        An error names token ids and positions out of range on the CPU only: on a GPU, the check
        would have to wait for the device.
        """
        self._check_input(x)
        batch, seq_len = x.shape[:2]
        if cache is None:
            cos, sin = self._rotary_tables(position_ids, batch, seq_len)
            mask = None if attention_mask is None else causal_mask(attention_mask, batch, seq_len)
        else:
            alone = attention_mask is None and position_ids is None
            first_layer = next(iter(self.layers))
            new = cache.after(first_layer, seq_len, limit=self.config.max_seq_len, alone=alone)
            cos, sin = self.rope_cos[new], self.rope_sin[new]
            mask = cache.mask(new, x.device)
        is_token = None
        if attention_mask is not None and attention_mask.dim() == 2:
            is_token = attention_mask.bool()

        if self.embed is not None:
            x = self._embed_tokens(self.embed, x)
        for name, layer in self.layers.items():
            cached = {} if cache is None else {"cache": cache.layer(name)}
            x = layer(x, cos, sin, mask, is_token=is_token, **cached)
        if self.norm is not None:
            x = self.norm(x)
        if self.head is not None:
            x = self.head(x)
        return x

    @torch.no_grad()
    def init_weights_and_freqs(self, seed: int | None = None) -> None:
        """Draw every parameter from (seed, its full name) and compute the rotary tables.

        Matrices are normal(0, 0.02). The two projections of a layer that end in the residual stream
        are scaled by 1/sqrt(2 · n_layers), because there are 2 · n_layers additions to it (Radford
        et al. 2019, GPT-2, section 2.3). Norms are one, biases zero.

        Each parameter is drawn whole on the CPU in float32, then cast and, if it is a DTensor,
        sharded. So one seed gives the same model for every dtype, device and layout. Without a
        seed, `torch.manual_seed` decides.
        """
        self.init_freqs_and_ties()
        seed = torch.initial_seed() if seed is None else seed
        for name, parameter in self.named_parameters():
            # Wrappers (activation checkpointing, torch.compile) insert path parts that start with
            # an underscore.
            full_name = ".".join(part for part in name.split(".") if not part.startswith("_"))
            _fill(parameter, self._draw(full_name, parameter.shape, seed))
        for module in self.modules():
            if isinstance(module, Router) and module.bias is not None:
                module.bias.zero_()

    @torch.no_grad()
    def init_freqs_and_ties(self) -> None:
        """Restore the state that `to_empty` loses and no checkpoint holds.

        It consists of the rotary tables, the loads of routers, and the tie of embedding and head.
        """
        for name, tensor in (*self.named_parameters(), *self.named_buffers()):
            if tensor.is_meta:
                raise RuntimeError(
                    f"{name} is on the meta device and has no storage to initialise; call"
                    " .to_empty(device=...) first"
                )
        self._tie()
        cos, sin = rotary_tables(self.config)
        self.rope_cos.copy_(cos)
        self.rope_sin.copy_(sin)
        for module in self.modules():
            if isinstance(module, Router):
                module.load.zero_()

    def _draw(self, name: str, shape: torch.Size, seed: int) -> Tensor:
        if name.endswith(".bias"):
            return torch.zeros(shape, dtype=torch.float32, device="cpu")
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.float32, device="cpu")
        if name == "head.weight" and self.config.tie_embeddings:
            # The embedding may be on another stage, and both must start from the same values.
            name = "embed.weight"
        std = INIT_STD
        if name.removesuffix(".weight").endswith(("o_proj", "down_proj")):
            std /= math.sqrt(2 * self.config.n_layers)
        generator = torch.Generator(device="cpu").manual_seed(parameter_seed(seed, name))
        values = torch.empty(shape, dtype=torch.float32, device="cpu")
        return values.normal_(0.0, std, generator=generator)

    def _tie(self) -> None:
        if self.config.tie_embeddings and self.embed is not None and self.head is not None:
            self.head.weight = self.embed.weight

    def _check_input(self, x: Tensor) -> None:
        if self.embed is not None:
            if x.dim() != 2 or x.dtype not in (torch.int64, torch.int32):
                raise ValueError(
                    f"the embedding takes integer token ids (batch, seq), not {x.dtype} of shape"
                    f" {tuple(x.shape)}"
                )
        elif x.dim() != 3 or not x.is_floating_point() or x.shape[-1] != self.config.dim:
            raise ValueError(
                f"a part without the embedding takes hidden states (batch, seq, {self.config.dim}),"
                f" not {x.dtype} of shape {tuple(x.shape)}; pass it the previous stage's output"
            )
        if x.shape[1] > self.config.max_seq_len:
            raise ValueError(
                f"sequence length {x.shape[1]} exceeds max_seq_len={self.config.max_seq_len}; "
                "shorten the sequence or build the model with a larger max_seq_len"
            )

    def _embed_tokens(self, embed: nn.Embedding, tokens: Tensor) -> Tensor:
        try:
            return embed(tokens)
        except IndexError:
            raise ValueError(
                f"token ids from {int(tokens.min())} to {int(tokens.max())} must lie in [0,"
                f" vocab_size) = [0, {self.config.vocab_size}); use the tokenizer this model was"
                " sized for"
            ) from None

    def _rotary_tables(
        self, position_ids: Tensor | None, batch: int, seq_len: int
    ) -> tuple[Tensor, Tensor]:
        if position_ids is None:
            return self.rope_cos[:seq_len], self.rope_sin[:seq_len]
        is_integer = position_ids.dtype in (torch.int64, torch.int32)
        if position_ids.shape != (batch, seq_len) or not is_integer:
            raise ValueError(
                f"position_ids must be integers of shape (batch, seq) = ({batch}, {seq_len}), "
                f"not {position_ids.dtype} of shape {tuple(position_ids.shape)}"
            )
        try:
            # Unlike indexing, a lookup refuses negative positions instead of counting from the end.
            cos = F.embedding(position_ids, self.rope_cos)
            sin = F.embedding(position_ids, self.rope_sin)
        except IndexError:
            raise ValueError(
                f"positions from {int(position_ids.min())} to {int(position_ids.max())} must lie in"
                f" [0, max_seq_len) = [0, {self.config.max_seq_len})"
            ) from None
        # The new dimension is the heads', which all turn alike.
        return cos.unsqueeze(1), sin.unsqueeze(1)


def causal_mask(attention_mask: Tensor, batch: int, seq_len: int) -> Tensor:
    """Return the mask of attention, bool (batch, 1 or heads, query, key), True = may attend.

    A position always sees itself. Before the first real token of a left-padded row it would
    otherwise see no position, and a softmax over none is NaN in some attention kernels and zero in
    others.
    """
    dtype, shape = attention_mask.dtype, attention_mask.shape
    is_full = len(shape) == 4 and shape[0] == batch and shape[2:] == (seq_len, seq_len)
    if shape == (batch, seq_len) and not dtype.is_floating_point:
        allowed = attention_mask.bool()[:, None, None, :]
    elif is_full and dtype == torch.bool:
        allowed = attention_mask
    else:
        raise ValueError(
            f"attention_mask is {dtype} of shape {tuple(shape)}; it must be bool or integer (batch,"
            f" seq) = ({batch}, {seq_len}), or bool (batch, 1 or heads, seq, seq) = ({batch}, 1 or"
            f" heads, {seq_len}, {seq_len})"
        )
    query = torch.arange(seq_len, device=attention_mask.device)[:, None]
    key = query.T
    return (key < query) & allowed | (key == query)


def parameter_seed(seed: int, name: str) -> int:
    """Return the seed of one parameter: a hash of (seed, name).

    It is the same in every process and Python version. It has 32 bits, because torch's CPU
    generator ignores any more. Among 1,000 names, two share a seed for about one model seed in
    10,000, and that breaks nothing.
    """
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def _fill(parameter: Tensor, full: Tensor) -> None:
    """Copy ``full`` into a parameter; if it is a DTensor, only this rank's shard."""
    # The import takes half a second, which a process without DTensors need not spend.
    if hasattr(parameter, "device_mesh"):
        from torch.distributed.tensor import DTensor, distribute_tensor

        sharded = cast(DTensor, parameter)
        # src_data_rank=None sends nothing: every rank has drawn the same values and keeps its
        # shard.
        full = distribute_tensor(
            full.to(sharded.device), sharded.device_mesh, sharded.placements, src_data_rank=None
        )
    parameter.copy_(full)


@dataclass(frozen=True)
class CrossEntropy:
    """Cross-entropy of logits (batch, seq, vocab) with target ids (batch, seq), in nats a token.

    If microbatches count unequal numbers of tokens, the mean of their means is not the mean of the
    batch. Divide the sum of :meth:`total` by the sum of :meth:`count` instead.
    """

    # The target at positions without a prediction, such as padding.
    ignore_index: int = -100

    def __call__(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the mean; 0 where no token counts."""
        return self.total(logits, target) / self.count(target).clamp(min=1)

    def total(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the sum, a scalar in float32 or wider, as long sums overflow half precision."""
        if logits.dtype.itemsize < 4:
            logits = logits.float()
        rows = logits.flatten(0, 1)
        return F.cross_entropy(
            rows, target.flatten(), ignore_index=self.ignore_index, reduction="sum"
        )

    def count(self, target: Tensor) -> Tensor:
        """Return the number of tokens that count; a scalar int64."""
        return (target != self.ignore_index).sum()
