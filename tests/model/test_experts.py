"""A mixture of experts equals a loop over tokens: outputs, gradients, losses, loads."""

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course_pp.model import (
    ExpertLoad,
    ModelConfig,
    MoE,
    Transformer,
    count_over_data_ranks,
    update_router_bias,
)
from course_pp.runtime import profile_layers
from course_pp.step.grouped import grouped_product

BATCH, SEQ = 3, 8
SMALL = ModelConfig(
    dim=16,
    n_layers=2,
    n_heads=2,
    vocab_size=23,
    max_seq_len=SEQ,
    n_experts=4,
    expert_dim=8,
    balance_coef=0.3,
)
CONFIGS: dict[str, ModelConfig] = {
    "top 2": SMALL,
    "top 1, weights as scored": replace(SMALL, top_k=1, normalize_top_k=False),
    "sigmoid, scaled, shared": replace(
        SMALL, top_k=3, router="sigmoid", router_scale=2.5, n_shared_experts=2
    ),
    "no gate": replace(SMALL, gated_ffn=False, n_shared_experts=1),
    "z-loss": replace(SMALL, z_coef=0.2),
    "by sequence": replace(SMALL, balance="sequence", router="sigmoid"),
    "by sequence, softmax": replace(SMALL, balance="sequence"),
    "bias": replace(SMALL, balance="bias"),
    "no balance": replace(SMALL, balance="none"),
    "tight": replace(SMALL, capacity_factor=0.75),
    "one token an expert": replace(SMALL, capacity_factor=1e-9, n_shared_experts=1),
    "roomy": replace(SMALL, capacity_factor=4.0),
    "all experts": replace(SMALL, top_k=4),
}


def layer_of(config: ModelConfig) -> MoE:
    torch.manual_seed(0)
    layer = Transformer(config).double().layers["1"].mlp
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    if layer.router.bias is not None:
        layer.router.bias.copy_(torch.linspace(-0.3, 0.3, config.n_experts))
    return layer


def feed_forward(x: Tensor, gate: Tensor | None, up: Tensor, down: Tensor) -> Tensor:
    return (F.gelu(x @ up) if gate is None else F.silu(x @ gate) * (x @ up)) @ down


def token_by_token(
    layer: MoE, sequences: list[Tensor]
) -> tuple[list[Tensor], Tensor, list[list[int]]]:
    """Compute sequences (seq, dim) of any lengths in the plain way.

    Returns:
        The output of each, the sum of losses, and how often each expert was chosen and dropped.
    """
    config = layer.config
    n, k = config.n_experts, config.top_k
    lengths = [len(sequence) for sequence in sequences]
    room = (
        None
        if config.capacity_factor is None
        else -int(-config.capacity_factor * sum(lengths) * k // n)
    )
    chosen, dropped, out, rows = [0] * n, [0] * n, [], []
    for token in torch.cat(sequences):
        logits = layer.router.weight @ token
        scores = logits.softmax(0) if config.router == "softmax" else logits.sigmoid()
        chosen_by = scores.detach() + (0 if layer.router.bias is None else layer.router.bias)
        mine = sorted(range(n), key=lambda e: -float(chosen_by[e]))[:k]
        total = sum(scores[e] for e in mine) if config.normalize_top_k else 1.0
        result = torch.zeros_like(token)
        for e in mine:
            chosen[e] += 1
            if room is not None and chosen[e] > room:
                dropped[e] += 1
                continue
            gate = None if layer.experts.gate_proj is None else layer.experts.gate_proj[e]
            computed = feed_forward(
                token, gate, layer.experts.up_proj[e], layer.experts.down_proj[e]
            )
            result = result + config.router_scale * scores[e] / total * computed
        if layer.shared is not None:
            gate = layer.shared.gate_proj.weight.T if config.gated_ffn else None
            result = result + feed_forward(
                token, gate, layer.shared.up_proj.weight.T, layer.shared.down_proj.weight.T
            )
        out.append(result)
        rows.append((scores / scores.sum(), mine, logits))
    groups = [rows]
    if config.balance == "sequence":
        ends = list(accumulate(lengths))
        groups = [
            rows[end - length : end] for end, length in zip(ends, lengths, strict=True) if length
        ]
    loss = torch.zeros((), dtype=torch.float64)
    if config.balance in ("loss", "sequence"):
        for group in groups:
            for e in range(n):
                fraction = sum(e in mine for _, mine, _ in group) / (k * len(group))
                mean = sum(scores[e] for scores, _, _ in group) / len(group)
                loss = loss + config.balance_coef * n * fraction * mean / len(groups)
    z = sum(logits.exp().sum().log() ** 2 for *_, logits in rows) / len(rows)
    return list(torch.stack(out).split(lengths)), loss + config.z_coef * z, [chosen, dropped]


# Where padding stands in a sequence does not matter; one sequence has nothing else.
PADDED = torch.tensor(
    [[True] * SEQ, [False, True, True, False, True, False, False, True], [False] * SEQ]
)


@pytest.mark.parametrize("is_token", [None, PADDED], ids=["whole", "padded"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_layer_is_what_a_loop_over_tokens_says(
    config: ModelConfig, is_token: Tensor | None
) -> None:
    layer = layer_of(config)
    # Unevenly spread, so that the third sequence prefers one expert.
    x = torch.randn(BATCH, SEQ, config.dim, dtype=torch.float64, requires_grad=True)
    x.data[2] += layer.router.weight[1].detach()
    towards = torch.randn_like(x)
    mask = torch.ones(BATCH, SEQ, dtype=torch.bool) if is_token is None else is_token

    def backward(output: Tensor, loss: Tensor | float) -> dict[str, Tensor]:
        ((output * towards).sum() + loss).backward()
        found = {name: p.grad for name, p in [*layer.named_parameters(), ("x", x)]}
        for parameter in (*layer.parameters(), x):
            parameter.grad = None
        return found

    outputs, loss, load = token_by_token(layer, [x[i][mask[i]] for i in range(BATCH)])
    expected = torch.zeros_like(x).masked_scatter(mask[..., None], torch.cat(outputs))
    gradients = backward(expected, loss)
    output = layer(x) if is_token is None else layer(x, is_token=is_token)
    found = backward(output, 0.0)  # the losses are attached
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(found, gradients, rtol=0, atol=1e-12)
    assert layer.router.load.tolist() == load
    assert (sum(load[1]) > 0) == (config.capacity_factor is not None and config.capacity_factor < 4)


def test_a_microbatch_of_padding_alone_adds_nothing() -> None:
    layer = layer_of(replace(SMALL, z_coef=0.2, n_shared_experts=1))
    x = torch.full((BATCH, SEQ, SMALL.dim), torch.nan, dtype=torch.float64)
    output = layer(x, is_token=torch.zeros(BATCH, SEQ, dtype=torch.bool))
    output.sum().backward()
    assert not output.any()
    assert not any(parameter.grad.any() for parameter in layer.parameters())
    assert not layer.router.load.any()


def test_in_half_precision_experts_compute_so_and_the_router_does_not() -> None:
    layer = layer_of(replace(SMALL, z_coef=0.1)).float()
    dtypes: set[tuple[torch.dtype, int]] = set()

    def keep(saved: Tensor) -> Tensor:
        dtypes.add((saved.dtype, saved.shape[-1]))
        return saved

    with (
        torch.autocast("cpu", torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved),
    ):
        layer(torch.randn(BATCH, SEQ, SMALL.dim))
    assert {(torch.float32, SMALL.n_experts), (torch.bfloat16, SMALL.expert_hidden_dim)} <= dtypes
    assert (
        not {(torch.bfloat16, SMALL.n_experts), (torch.float32, SMALL.expert_hidden_dim)} & dtypes
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [[5, 0, 7, 4], [0, 0, 16, 0], [0, 0, 0, 0]], ids=str)
def test_the_grouped_product_equals_a_loop(counts: list[int], dtype: torch.dtype) -> None:
    """One kernel takes rows of whole 16 bytes only.

    Rows of 24 + 1 columns are computed one expert after the other.
    """
    torch.manual_seed(0)
    x, wide, towards = (
        torch.randn(sum(counts), 16),
        torch.randn(4, 16, 25),
        torch.randn(sum(counts), 25),
    )
    towards[:, 24] = 0
    results = []
    for columns in (24, 25):
        rows = x.to(dtype).requires_grad_()
        weights = wide[..., :columns].to(dtype).contiguous().requires_grad_()
        product = grouped_product(rows, weights, torch.tensor(counts))
        product.backward(towards[:, :columns].to(dtype).contiguous())
        assert ("GroupedMm" in type(product.grad_fn).__name__) == (
            columns == 24 and sum(counts) > 0
        )
        results.append((product[:, :24], rows.grad, weights.grad[..., :24]))
    limit = 1e-5 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=limit)


@pytest.mark.parametrize(
    "more", [{}, {"n_shared_experts": 1, "moe_every": 2}, {"n_dense_layers": 1, "qk_norm": True}]
)
@pytest.mark.parametrize("gated", [True, False])
def test_parameter_counts_are_those_of_the_built_model(more: dict[str, Any], gated: bool) -> None:
    config = replace(SMALL, n_layers=4, gated_ffn=gated, head_width=6, **more)
    model = Transformer(config)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    assert config.n_parameters == sum(sizes.values())
    assert config.layer_parameters == tuple(
        sum(p.numel() for p in layer.parameters()) for layer in model.layers.values()
    )
    idle = (config.n_experts - config.top_k) / config.n_experts
    idle_parameters = idle * sum(size for name, size in sizes.items() if ".experts." in name)
    assert config.n_active_parameters == config.n_parameters - idle_parameters
    is_mixture = [isinstance(layer.mlp, MoE) for layer in model.layers.values()]
    assert is_mixture == list(map(config.has_experts, range(4)))


def test_a_seed_means_the_same_experts_whatever_the_cut_and_those_that_end_in_the_residual_are_small() -> (
    None
):
    torch.manual_seed(3)
    whole, part = Transformer(SMALL), Transformer(SMALL, (1, 2), has_embedding=False)
    for name, parameter in part.named_parameters():
        assert torch.equal(parameter, whole.get_parameter(name))
    experts = Transformer(replace(SMALL, n_experts=64)).layers["0"].mlp.experts
    assert experts.up_proj.std().item() == pytest.approx(0.02, rel=0.05)
    assert experts.down_proj.std().item() == pytest.approx(0.01, rel=0.05)


@pytest.mark.parametrize("balance", ["sequence", "bias", "none"])
def test_only_switch_s_loss_counts_over_data_ranks(balance: Any) -> None:
    model = Transformer(replace(SMALL, balance=balance))
    with pytest.raises(
        ValueError, match=f"balance='{balance}' counts no choices of a microbatch: only 'loss' does"
    ):
        count_over_data_ranks([model], None)


def test_a_load_says_how_uneven_it_is_and_a_bias_moves_against_it() -> None:
    loads = {"layers.0": ExpertLoad((4, 4, 4, 4), 0), "layers.1": ExpertLoad((10, 2, 4, 0), 3)}
    assert [load.imbalance for load in loads.values()] == [1.0, 2.5]
    model = Transformer(replace(SMALL, balance="bias", balance_coef=0.25))
    update_router_bias([model], loads)
    assert [layer.mlp.router.bias.tolist() for layer in model.layers.values()] == [
        [0.0] * 4,
        [-0.25, 0.25, 0.0, 0.25],
    ]


CONVERSIONS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "to": lambda model: model.to(torch.bfloat16),
    "to, with a device": lambda model: model.to("cpu", torch.float16),
    "bfloat16": lambda model: model.bfloat16(),
    "half": lambda model: model.half(),
    "double, then half": lambda model: model.double().half(),
    "a file in bfloat16, assigned": lambda model: assigned(model.bfloat16()),
}


def assigned(model: nn.Module) -> nn.Module:
    state = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    return model


@pytest.mark.parametrize("how", CONVERSIONS)
def test_a_bias_adds_its_small_steps_up_in_a_model_of_half_precision(how: str) -> None:
    model = Transformer(replace(SMALL, balance="bias", balance_coef=0.001))
    first = torch.zeros(4)
    if "assigned" not in how:  # whose file has rounded it
        first = torch.tensor([0.7001, -0.3, 0.0, 0.0])
    for layer in model.layers.values():
        layer.mlp.router.get_buffer("bias").copy_(first)
    model = CONVERSIONS[how](model)
    loads = {f"layers.{i}": ExpertLoad((0, 8, 4, 4), 0) for i in range(2)}
    for _ in range(1000):
        update_router_bias([model], loads)
    for layer in model.layers.values():
        assert layer.mlp.router.weight.dtype.itemsize == 2
        found = layer.mlp.router.get_buffer("bias")
        moved = torch.tensor([1.0, -1.0, 0.0, 0.0])
        torch.testing.assert_close(found, first + moved, rtol=0, atol=1e-4, check_dtype=False)


def test_what_is_profiled_or_built_on_meta_has_no_load_yet() -> None:
    layer = Transformer(SMALL, (0, 1), has_head=False)
    profile_layers([layer], torch.randint(23, (2, SEQ)))
    with torch.device("meta"):
        other = Transformer(replace(SMALL, balance="bias"))
    other.to_empty(device="cpu")
    for buffer in other.buffers():
        buffer.fill_(7)
    other.init_weights_and_freqs()
    for router in (layer.layers["0"].mlp.router, other.layers["1"].mlp.router):
        assert not router.load.any()
        assert router.bias is None or not router.bias.any()
