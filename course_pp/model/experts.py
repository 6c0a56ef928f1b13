"""A mixture of experts in place of the feed-forward block, readable beside `SwiGLU`.

    x ─► router ─► each token's top_k experts ─► sort the (token, choice) pairs by expert ─► experts
    │                                                                                           │
    └──► shared experts, if any ────────────────► + ◄── weighted sum ◄── the tokens' order ◄────┘

An expert is a feed-forward block, and a token passes through few of them (Shazeer et al. 2017,
arXiv:1701.06538). All experts of a layer are packed into one tensor a matrix, (n_experts, in, out),
so that one grouped product does them all. The layer knows of ranks only if its loss counts over
them (:func:`count_over_data_ranks`). Expert parallelism just replaces the call ``self.experts(x,
counts)``.

Without a remedy a few experts get all tokens. ``ModelConfig.balance`` names the remedy:

- ``"loss"``: Switch Transformer's loss (:func:`balance_loss`) over the tokens of a microbatch.
- ``"sequence"``: the same loss for each sequence, averaged, as in DeepSeek-V3.
- ``"bias"``: no loss. A bias is added to the scores that choose the experts, and moves after the
  step.
- ``"none"``: no remedy.

A loss counts the tokens of one microbatch on one data rank, as in other codebases. It arises in the
middle of the model, and :func:`course_pp.step.loss.attach_loss` adds it there, under names such as
``layers.3.balance``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils.rnn import pad_sequence

from course_pp.base.sizes import ModelConfig
from course_pp.base.torch_private import ToldOfChanges
from course_pp.step.grouped import autocasts_as, grouped_product
from course_pp.step.loss import attach_loss


class Routing(NamedTuple):
    """The experts of each token.

    Attributes:
        experts: (tokens, top_k) int64, best first.
        weights: (tokens, top_k), the factors of the experts' outputs, in float32 or wider.
        logits: (tokens, n_experts).
        scores: (tokens, n_experts); the scores of a token add up to 1.
    """

    experts: Tensor
    weights: Tensor
    logits: Tensor
    scores: Tensor


class Router(ToldOfChanges):
    """Choose each token's `top_k` experts by a score for each, in float32 or wider.

    Attributes:
        weight: (n_experts, dim).
        bias: (n_experts,), None unless ``balance="bias"``. It is added to the scores that choose
            the experts, not to the scores that weigh their outputs (Wang et al. 2024,
            arXiv:2408.15664). :func:`update_router_bias` moves it. It stays in float32 or wider if
            the model is converted, because in bfloat16 it could not move by 0.001 beyond 0.5.
        groups: the process groups over which the loss counts the choices (see
            :func:`count_over_data_ranks`).
        load: (2, n_experts) int64, the number of (token, choice) pairs that chose each expert, and
            the number of pairs that the expert dropped. It counts all microbatches that have gone
            backward since :func:`expert_loads` was last called.
    """

    bias: Tensor | None
    load: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        n_experts = config.n_experts
        weight = torch.empty(n_experts, config.dim).normal_(std=config.dim**-0.5)
        self.weight = nn.Parameter(weight)
        bias = torch.zeros(n_experts, dtype=torch.float32) if config.balance == "bias" else None
        self.register_buffer("bias", bias)
        self.groups: list[dist.ProcessGroup] = []
        # A count since the last step says nothing about the model, so checkpoints do not hold it.
        load = torch.zeros(2, n_experts, dtype=torch.int64)
        self.register_buffer("load", load, persistent=False)

    def was_converted(self, before: Mapping[str, Tensor | None]) -> None:
        """Keep the bias in 32 bits, with its values from before the conversion."""
        bias = before["bias"]
        if bias is not None and self.bias is not None and self.bias.dtype.itemsize < 4:
            self.bias = bias.to(self.bias.device)

    def was_loaded(self) -> None:
        """Widen a bias that loading with ``assign=True`` has put here in half precision."""
        if self.bias is not None and self.bias.dtype.itemsize < 4:
            self.bias = self.bias.float()

    def forward(self, x: Tensor) -> Routing:
        """Choose the experts of tokens x (tokens, dim)."""
        config = self.config
        wide = torch.promote_types(x.dtype, torch.float32)
        # Autocast would round the logits to half precision again.
        with torch.autocast(autocasts_as(x), enabled=False):
            logits = F.linear(x.to(wide), self.weight.to(wide))
        scores = logits.softmax(-1) if config.router == "softmax" else logits.sigmoid()
        chosen_by = scores if self.bias is None else scores + self.bias
        experts = chosen_by.topk(config.top_k, dim=-1).indices
        weights = scores.gather(-1, experts)
        if config.normalize_top_k:
            weights = weights / weights.sum(-1, keepdim=True)
        # The balance loss takes scores that add up to 1, as those of a softmax do.
        if config.router == "sigmoid":
            scores = scores / scores.sum(-1, keepdim=True)
        return Routing(experts, weights * config.router_scale, logits, scores)


class Experts(nn.Module):
    """The experts of one layer, each a feed-forward block like `SwiGLU` or `FeedForward`.

    Attributes:
        gate_proj, up_proj: (n_experts, dim, expert_hidden_dim). Ungated experts have no gate_proj.
        down_proj: (n_experts, expert_hidden_dim, dim).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        n_experts, dim, width = config.n_experts, config.dim, config.expert_hidden_dim

        def packed(n_in: int, n_out: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(n_experts, n_in, n_out).normal_(std=n_in**-0.5))

        self.gate_proj = packed(dim, width) if config.gated_ffn else None
        self.up_proj = packed(dim, width)
        self.down_proj = packed(width, dim)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """Run each expert on its rows of x (rows, dim), which are sorted by expert.

        counts is (experts,) int64, the number of rows of each expert. The result is (rows, dim).
        """
        up = grouped_product(x, self.up_proj, counts)
        if self.gate_proj is None:
            return grouped_product(F.gelu(up), self.down_proj, counts)
        gate = F.silu(grouped_product(x, self.gate_proj, counts))
        return grouped_product(gate * up, self.down_proj, counts)


class MoE(nn.Module):
    """Mixture of experts, (batch, seq, dim) -> (batch, seq, dim).

    Padding is taken out before the router and comes back as zeros, so it changes neither results
    nor counts nor which tokens are dropped.

    Args:
        config: sizes of the full model.
        layer: the number of the layer; the names of the losses begin with it.
        shared: a module that every token passes through as well.
    """

    def __init__(
        self, config: ModelConfig, layer: int = 0, shared: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.layer = layer
        self.router = Router(config)
        self.experts = Experts(config)
        self.shared = shared

    def forward(self, x: Tensor, is_token: Tensor | None = None) -> Tensor:
        """Run the layer.

        Args:
            x: (batch, seq, dim).
            is_token: bool (batch, seq), False on padding; None where nothing is padded.
        """
        config = self.config
        tokens = x.flatten(0, 1)
        if is_token is not None:
            places = is_token.flatten().nonzero()[:, 0]
            tokens = tokens[places]
        routing = self.router(tokens)
        chosen = pairs_by_expert(routing.experts, config.n_experts)
        # Stable, so that each expert gets its tokens in their order and drops the last ones.
        by_expert, order = routing.experts.flatten().sort(stable=True)
        counts = chosen
        if config.capacity_factor is not None:
            capacity = math.ceil(config.capacity_factor * order.numel() / config.n_experts)
            first_of_expert = chosen.cumsum(0) - chosen
            place = torch.arange(order.numel(), device=x.device) - first_of_expert[by_expert]
            order = order[place < capacity]
            counts = chosen.clamp(max=capacity)

        # A pair's number is token · top_k + choice.
        computed = self.experts(tokens[order // config.top_k], counts)

        # In the tokens' order again. A pair that was dropped stays zero.
        pairs = computed.new_zeros(routing.experts.numel(), x.shape[-1])
        pairs = pairs.index_copy(0, order, computed)
        weighted = pairs.unflatten(0, routing.experts.shape) * routing.weights[..., None]
        out = weighted.sum(1).to(x.dtype)
        if self.shared is not None:
            out = out + self.shared(tokens)
        if is_token is not None:
            out = out.new_zeros(is_token.numel(), x.shape[-1]).index_copy(0, places, out)
        out = out.view_as(x)

        if torch.is_grad_enabled():
            out = _Tally.apply(out, self.router, torch.stack((chosen, chosen - counts)))
            group_sizes = [len(tokens)]
            if config.balance == "sequence":
                batch, seq = x.shape[:2]
                group_sizes = [seq] * batch if is_token is None else is_token.sum(1).tolist()
            for name, loss in self._losses(routing, group_sizes).items():
                out = attach_loss(out, loss, f"layers.{self.layer}.{name}")
        return out

    def _losses(self, routing: Routing, group_sizes: list[int]) -> dict[str, Tensor]:
        """Return {name: loss} of a microbatch; empty if the scores need no gradient."""
        losses = {}
        if "balance" in self.config.router_losses:
            loss = balance_loss(
                routing.scores, routing.experts, group_sizes, ranks=self.router.groups
            )
            losses["balance"] = self.config.balance_coef * loss
        if "z" in self.config.router_losses:
            losses["z"] = self.config.z_coef * z_loss(routing.logits)
        return losses if routing.scores.requires_grad else {}


class _Tally(torch.autograd.Function):
    """Add a microbatch to the router's load when it goes backward.

    Activation checkpointing computes a forward several times, so a count there would be too high.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, router: Router, load: Tensor) -> Tensor:
        ctx.router, ctx.load = router, load
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.router.load += ctx.load
        return gradient, None, None


@dataclass(frozen=True)
class ExpertLoad:
    """The use of one layer's experts in a step.

    Attributes:
        tokens: the number of tokens that chose each expert.
        dropped: the number of choices, over all experts, that exceeded an expert's capacity.
    """

    tokens: tuple[int, ...]
    dropped: int

    @property
    def imbalance(self) -> float:
        """The largest load divided by the mean load; 1 if all experts have equally many tokens."""
        return max(self.tokens) * len(self.tokens) / max(1, sum(self.tokens))


def expert_loads(
    modules: Iterable[nn.Module], device_mesh: DeviceMesh | None
) -> dict[str, ExpertLoad]:
    """Return the loads of all layers with experts since the last call; a collective.

    The keys are names such as ``layers.3``. The loads count all microbatches that went backward, on
    all ranks, and are the same on every rank. Call it once a step (under accumulation, after the
    last backward) and give the loads to :func:`update_router_bias`.

    Args:
        modules: this rank's stages of a `Transformer` with experts, or the whole model.
        device_mesh: the result of :func:`course_pp.parallel.init_distributed`.
    """
    modules = list(modules)
    config = cast(ModelConfig, modules[0].config)
    device = next(modules[0].parameters()).device
    layers = config.expert_layers
    loads = torch.zeros(len(layers), 2, config.n_experts, dtype=torch.int64, device=device)
    for mixture in _mixtures(modules):
        loads[layers.index(mixture.layer)] += mixture.router.load
        mixture.router.load.zero_()
    if dist.is_initialized():
        dist.all_reduce(loads)
    # The ranks of a tensor-parallel group see the same tokens, so each token was counted on all.
    if device_mesh is not None and "tp" in _names_of(device_mesh):
        loads //= device_mesh["tp"].size()
    found = {}
    for layer, (tokens, dropped) in zip(layers, loads.tolist(), strict=True):
        found[f"layers.{layer}"] = ExpertLoad(tuple(tokens), sum(dropped))
    return found


@torch.no_grad()
def update_router_bias(modules: Iterable[nn.Module], loads: Mapping[str, ExpertLoad]) -> None:
    """Move each router's bias by ``balance_coef``: up if an expert had fewer tokens than the mean.

    The bias of an expert with more tokens moves down. Call this after a step. It takes the place of
    a loss (Wang et al. 2024, arXiv:2408.15664, algorithm 1; DeepSeek-V3, arXiv:2412.19437, section
    2.1.2, with 0.001). It does nothing unless ``balance="bias"``.
    """
    for mixture in _mixtures(modules):
        bias = mixture.router.bias
        if bias is not None:
            counts = loads[f"layers.{mixture.layer}"].tokens
            tokens = torch.tensor(counts, dtype=torch.float64, device=bias.device)
            bias += mixture.config.balance_coef * (tokens.mean() - tokens).sign().to(bias.dtype)


def _mixtures(modules: Iterable[nn.Module]) -> list[MoE]:
    return [part for module in modules for part in module.modules() if isinstance(part, MoE)]


def pairs_by_expert(experts: Tensor, n_experts: int) -> Tensor:
    """Return how often each expert is chosen, (..., n_experts) int64.

    experts is (..., tokens, top_k).
    """
    flat = experts.flatten(-2)
    return flat.new_zeros(*flat.shape[:-1], n_experts).scatter_add(-1, flat, torch.ones_like(flat))


def balance_loss(
    scores: Tensor, experts: Tensor, group_sizes: list[int], ranks: Iterable[dist.ProcessGroup] = ()
) -> Tensor:
    """Return Switch Transformer's loss of each group of tokens, averaged over groups.

    The loss is n_experts · Σ f·P, where f is the fraction of the choices that fall on an expert,
    which has no gradient, and P is the expert's mean score (Fedus et al. 2021, arXiv:2101.03961,
    equations 4 to 6). It is 1 if all experts get equally many tokens. If each group is one
    sequence, it is DeepSeek-V3's sequence-wise loss (arXiv:2412.19437, equations 17 to 20). Groups
    without tokens do not count.

    Args:
        scores: (tokens, n_experts); the scores of a token add up to 1.
        experts: (tokens, top_k).
        group_sizes: the number of tokens in each group, in order.
        ranks: process groups whose choices count, too. The call is then a collective of them.
    """
    n_experts, top_k = scores.shape[-1], experts.shape[-1]
    # Shorter groups are filled up with scores of 0 and with choices of an expert behind the last.
    scores = pad_sequence(scores.split(group_sizes), batch_first=True)
    experts = pad_sequence(experts.split(group_sizes), batch_first=True, padding_value=n_experts)
    pairs = pairs_by_expert(experts, n_experts + 1)[:, :-1].contiguous()
    # Counted before the sum over ranks, because the mean scores are of this rank's tokens alone.
    sizes = pairs.sum(-1, keepdim=True) // top_k
    for ranks_of_a_group in ranks:
        dist.all_reduce(pairs, group=ranks_of_a_group)
    fractions = pairs.to(scores.dtype) / pairs.sum(-1, keepdim=True).clamp(min=1)
    mean_scores = scores.sum(1) / sizes.clamp(min=1)
    n_groups = sum(size > 0 for size in group_sizes)
    return n_experts * (fractions * mean_scores).sum() / max(1, n_groups)


def count_over_data_ranks(modules: Iterable[nn.Module], device_mesh: DeviceMesh | None) -> None:
    """Let Switch's loss count the choices of a microbatch on all data ranks, not on one alone.

    Microbatches with the same number on all data ranks count together, and the loss asks for an
    even load of all of them. One microbatch may then send its tokens to few experts if others send
    theirs elsewhere, so that experts can specialise in topics of the data (Qiu et al. 2025,
    arXiv:2501.11873). The usual count asks for an even load in each microbatch on each rank.

    One process that joins the data ranks' microbatches gets the same gradients, if the loss at the
    end counts the same share of the tokens of each.

    Each layer sums n_experts integers over the data ranks, at every microbatch and once more where
    it is recomputed.

    Raises:
        ValueError: ``balance`` is not ``"loss"``.
    """
    groups = []
    if device_mesh is not None:
        data_dims = [name for name in _names_of(device_mesh) if name.startswith("dp_")]
        groups = [device_mesh.get_group(name) for name in data_dims]
    for mixture in _mixtures(modules):
        if mixture.config.balance != "loss":
            raise ValueError(
                f"balance={mixture.config.balance!r} counts no choices of a microbatch: only 'loss'"
                " does"
            )
        mixture.router.groups = groups


def z_loss(logits: Tensor) -> Tensor:
    """Return the mean of logsumexp(logits)², which keeps logits (tokens, n_experts) small.

    Without tokens it is 0. Zoph et al. 2022 (ST-MoE), arXiv:2202.08906, equation 5.
    """
    return logits.logsumexp(-1).square().sum() / max(1, len(logits))


def _names_of(device_mesh: DeviceMesh) -> tuple[str, ...]:
    return device_mesh.mesh_dim_names or ()
