"""The measurements of notebook 12: routers on text, exchanges, balance, sick layers."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_pp.exercises.experts.exercises import mixture
from course_pp.exercises.formula import flawed
from course_pp.launch import RanksHung, on_ranks
from course_pp.model import CrossEntropy, ModelConfig, MoE, Transformer, build_stage_module
from course_pp.model.experts import ExpertLoad, expert_loads, update_router_bias
from course_pp.parallel import (
    CollectiveCounter,
    DistributedConfig,
    apply_expert_parallel,
    init_distributed,
)
from course_pp.runtime import Pipeline
from course_pp.schedule import build
from course_pp.step.loss import Attached

Balance = Literal["loss", "bias", "none"]

CONFIG = ModelConfig(
    64, 4, 4, 128, max_seq_len=64, n_experts=8, top_k=2, expert_dim=64, balance="none"
)
"""The small model with experts in each of four layers; its tokens are characters."""
_ROWS = 16
_MICROBATCHES = 4
_LR = 3e-3
_TEXT = torch.tensor([min(byte, 127) for byte in Path(argparse.__file__).read_bytes()])


def rows_of_text(n_rows: int, seed: int = 0) -> Tensor:
    """Return pieces of a Python source file, (n_rows, 65) characters.

    The inputs are all but the last character, the targets all but the first.
    """
    length = CONFIG.max_seq_len + 1
    starts = torch.randint(
        len(_TEXT) - length, (n_rows,), generator=torch.Generator().manual_seed(seed)
    )
    return torch.stack([_TEXT[start : start + length] for start in starts])


def choices_of(text: str, layer: int = 0) -> list[list[int]]:
    """Return the experts that each character chooses in a layer, best first, without training."""
    found: list[Tensor] = []
    model = _untrained()
    _mixtures(model)[layer].router.register_forward_hook(
        lambda router, args, routing: found.append(routing.experts)
    )
    with torch.no_grad():
        model(torch.tensor([[ord(letter) for letter in text]]))
    return found[0].tolist()


def loads_on_text(n_rows: int = _ROWS) -> dict[str, tuple[int, ...]]:
    """Return the number of tokens for each expert of each layer of the untrained model."""
    model = _untrained()
    model(rows_of_text(n_rows)[:, :-1]).sum().backward()
    return {name: load.tokens for name, load in expert_loads([model], None).items()}


def _untrained() -> Transformer:
    torch.manual_seed(0)
    return Transformer(CONFIG)


def _mixtures(model: nn.Module) -> list[MoE]:
    return [part for part in model.modules() if isinstance(part, MoE)]


class Exchange(NamedTuple):
    """The exchanges of data ranks that share out their experts, in one forward and backward.

    Attributes:
        sends: ``sends[i][j]`` is the number of rows from rank i to rank j, on the way to the
            experts of the first layer.
        each_layer: number of all-to-alls in a layer.
    """

    sends: list[list[int]]
    each_layer: float

    @property
    def over_input(self) -> float:
        """Bytes that leave a rank in a layer's exchanges, over the bytes of the layer's input.

        It is the mean over ranks. Rows go there and back, in forward and in backward.
        """
        leave = sum(
            rows for i, row in enumerate(self.sends) for j, rows in enumerate(row) if i != j
        )
        return 4 * leave / sum(map(sum, self.sends)) * CONFIG.top_k


def exchanged(ep: int = 4) -> Exchange:
    """Exchange on ``ep`` real ranks, each with four rows of text."""
    found = on_ranks(ep, _exchanged_on_rank, ep)
    return Exchange([sends for sends, _ in found], found[0][1])


def _exchanged_on_rank(rank: int, ep: int) -> tuple[list[int], float]:
    mesh = init_distributed(DistributedConfig(dp_shard=ep, ep=ep), seed=0)
    model = _untrained()
    apply_expert_parallel(model, mesh)
    with CollectiveCounter() as counter:
        model(rows_of_text(4 * ep)[:, :-1].chunk(ep)[rank]).square().mean().backward()
    load = _mixtures(model)[0].router.load
    assert load is not None
    return (
        load[0].view(ep, -1).sum(1).tolist(),
        counter.counts.total(collective="all_to_all").number / CONFIG.n_layers,
    )


@dataclass(frozen=True)
class ExpertRun:
    """A training run of fifty steps.

    Attributes:
        losses: cross entropy of each step, in nats a character.
        loads: loads of the experts in each step, by layer.
        attached: the sum of the routers' losses in the last step.
    """

    losses: tuple[float, ...]
    loads: tuple[Mapping[str, ExpertLoad], ...]
    attached: float

    @property
    def imbalance(self) -> float:
        """Return the largest load over the mean, averaged over layers and the last ten steps."""
        last = [load.imbalance for loads in self.loads[-10:] for load in loads.values()]
        return sum(last) / len(last)

    def tokens(self, layer: int) -> list[int]:
        """Return the number of tokens that each expert of a layer got in the last ten steps."""
        tokens = [loads[f"layers.{layer}"].tokens for loads in self.loads[-10:]]
        return [sum(of_expert) for of_expert in zip(*tokens, strict=True)]

    @property
    def loss(self) -> float:
        """The mean loss of the last ten steps."""
        return sum(self.losses[-10:]) / 10

    def __str__(self) -> str:
        return f"loss {self.loss:.2f}, largest load {self.imbalance:.1f} times the mean"


def train(balance: Balance, coefficient: float = 0.0, n_steps: int = 50) -> ExpertRun:
    """Train the model in two stages on two ranks, under 1F1B with four microbatches."""
    return on_ranks(
        2, _train_on_rank, replace(CONFIG, balance=balance, balance_coef=coefficient), n_steps
    )[0]


def _train_on_rank(rank: int, config: ModelConfig, n_steps: int) -> ExpertRun:
    torch.manual_seed(0)
    stage = build_stage_module(config, rank, 2)
    pipeline = Pipeline(build("1f1b", 2, _MICROBATCHES), {rank: stage}, CrossEntropy())
    optimizer = torch.optim.AdamW(stage.parameters(), lr=_LR)
    losses, loads = [], []
    for step in range(n_steps):
        rows = rows_of_text(_ROWS, step)
        optimizer.zero_grad()
        losses.append(pipeline.step(rows[:, :-1], target=rows[:, 1:]).item())
        optimizer.step()
        loads.append(expert_loads([stage], None))
        update_router_bias([stage], loads[-1])
    return ExpertRun(tuple(losses), tuple(loads), sum(pipeline.attached.values()))


@dataclass(frozen=True)
class Middle:
    """The losses of routers in a step of 1F1B.

    Attributes:
        attached: sum of each loss in the step.
        difference: the largest difference of a router's gradient on stage 0 from the gradient of
            one process, which adds all losses up.
        more_messages: number of messages of stage 0 beyond those of the same step without the
            losses.
    """

    attached: Mapping[str, float]
    difference: float
    more_messages: int


def loss_in_the_middle() -> Middle:
    """Run a step of 1F1B on two ranks in float64, with and without losses of routers."""
    config = replace(CONFIG, balance="loss")
    (attached, gradient, sent), (_, _, before) = (
        on_ranks(2, _step_with_losses, each)[0]
        for each in (config, replace(config, balance="none"))
    )
    torch.manual_seed(0)
    model = Transformer(config).double()
    rows = rows_of_text(_ROWS)
    for part in rows.chunk(_MICROBATCHES):
        losses = Attached(weight=1 / _MICROBATCHES)
        with losses:
            out = model(part[:, :-1])
        (CrossEntropy()(out, part[:, 1:]) / _MICROBATCHES).backward()
    right = _mixtures(model)[0].router.weight.grad
    return Middle(attached, float((gradient - right).abs().max()), sent - before)


def _step_with_losses(
    rank: int, config: ModelConfig
) -> tuple[dict[str, float], Tensor | None, int]:
    torch.manual_seed(0)
    stage = build_stage_module(config, rank, 2).double()
    rows = rows_of_text(_ROWS)
    pipeline = Pipeline(build("1f1b", 2, _MICROBATCHES), {rank: stage}, CrossEntropy())
    pipeline.step(rows[:, :-1], target=rows[:, 1:])  # shapes are settled in the first
    stage.zero_grad()
    with CollectiveCounter() as counter:
        pipeline.step(rows[:, :-1], target=rows[:, 1:])
    return (
        pipeline.attached,
        _mixtures(stage)[0].router.weight.grad,
        counter.counts.total(collective="send").number,
    )


# A step written out by hand of a layer whose experts lie on two ranks, and the symptoms of the same
# step with one flaw.

_DIM = 8
_TOKENS = 24
_TOP_K = 2
_N_EXPERTS = 4


def step_with_experts(
    x: Tensor, own: Sequence[nn.Module], chosen: Tensor, weights: Tensor
) -> Tensor:
    """Forward and backward of a mixture whose experts lie in blocks on the ranks; the loss is the
    mean square.

    Args:
        x: (tokens, dim) of this rank, with its choices and their weights, (tokens, k).
        own: this rank's experts. They get the gradients of the mean over all ranks' tokens.
    """
    n = dist.get_world_size()
    k = chosen.shape[1]
    order = chosen.flatten().argsort(stable=True)
    counts = chosen.flatten().bincount(minlength=n * len(own)).view(n, -1)
    came = torch.empty_like(counts)
    dist.all_to_all_single(came, counts)
    sends, gets = counts.sum(1).tolist(), came.sum(1).tolist()
    rows = all_to_all(x[order // k], gets, sends)
    into = torch.arange(len(own)).repeat(n).repeat_interleave(came.flatten()).argsort(stable=True)
    parts = rows[into].split(came.sum(0).tolist())
    computed = torch.cat([expert(part) for expert, part in zip(own, parts, strict=True)])
    back = all_to_all(computed[into.argsort()], sends, gets)
    pairs = torch.zeros_like(back).index_copy(0, order, back)
    out = (pairs.view(len(x), k, -1) * weights[..., None]).sum(1)
    out.square().mean().backward()
    for gradient in (p.grad for expert in own for p in expert.parameters() if p.grad is not None):
        gradient /= n
    return out.detach()


def all_to_all(rows: Tensor, gets: list[int], sends: list[int]) -> Tensor:
    """Exchange rows with all ranks: ``sends`` of them to each, ``gets`` from each."""
    return _AllToAll.apply(rows, gets, sends)


class _AllToAll(torch.autograd.Function):
    """An exchange whose gradient is the exchange the other way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, gets: list[int], sends: list[int]) -> Tensor:
        ctx.gets, ctx.sends = gets, sends
        came = rows.new_empty(sum(gets), *rows.shape[1:])
        dist.all_to_all_single(came, rows.contiguous(), gets, sends)
        return came

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _AllToAll.apply(gradient, ctx.sends, ctx.gets), None, None


class MixtureSymptoms(NamedTuple):
    """The symptoms of a step on two ranks.

    Attributes:
        right: share of the tokens with the same output as in one process.
        experts: size of the experts' gradients, divided by their size in one process.
    """

    right: float
    experts: float

    def __str__(self) -> str:
        return (
            f"{self.right:.0%} of the outputs right, experts' gradients {self.experts:.2f} of the"
            " right ones"
        )


def ward_round(name: str) -> str:
    """Return what a patient shows: its symptoms, or who waits for whom if its step never ends."""
    try:
        ranks = on_ranks(2, _stepped, *_PATIENTS[name], timeout_s=_LIMIT_S)
        return str(MixtureSymptoms(*(sum(each) / 2 for each in zip(*ranks, strict=True))))
    except RanksHung as hung:
        return str(hung)


def _stepped(rank: int, step: Callable[..., Tensor], idle: bool) -> MixtureSymptoms:
    """Return the symptoms of a step; if ``idle``, no token asks for an expert of rank 1."""
    drawn = torch.Generator().manual_seed(0)
    scores = torch.rand(
        _TOKENS, _N_EXPERTS // 2 if idle else _N_EXPERTS, generator=drawn, dtype=torch.float64
    )
    weights, chosen = scores.topk(_TOP_K)
    x = torch.randn(_TOKENS, _DIM, generator=drawn, dtype=torch.float64)
    experts, again = _experts(), _experts()
    own, alone = (each[2 * rank : 2 * rank + 2] for each in (experts, again))
    mine = [part.chunk(2)[rank] for part in (x, chosen, weights)]
    out = step(mine[0], own, *mine[1:])
    whole = mixture(x, again, chosen, weights)
    whole.square().mean().backward()
    found = _gradients(own)
    right = _gradients(alone)
    same = torch.isclose(out, whole.chunk(2)[rank]).all(1)
    return MixtureSymptoms(same.double().mean().item(), _size(found) / _size(right))


def _gradients(experts: Sequence[nn.Module]) -> list[Tensor]:
    parameters = [p for expert in experts for p in expert.parameters()]
    return [p.grad for p in parameters if p.grad is not None]


def _size(gradients: list[Tensor]) -> float:
    return float(sum(gradient.square().sum() for gradient in gradients)) ** 0.5 or 1.0


def _experts() -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(_DIM, 16), nn.Tanh(), nn.Linear(16, _DIM)).double()
        for _ in range(_N_EXPERTS)
    ]


_LIMIT_S = 3.0
_GETS = "sends, gets = counts.sum(1).tolist(), came.sum(1).tolist()\n"
_PATIENTS: dict[str, tuple[Callable[..., Tensor], bool]] = {
    "A": (
        flawed(step_with_experts, (_GETS, f"{_GETS}    if not sum(gets):\n        return x\n")),
        True,
    ),
    "B": (flawed(step_with_experts, ("gradient /= n", "pass")), False),
    "C": (flawed(step_with_experts, ("computed[into.argsort()]", "computed")), False),
    "D": (
        flawed(
            step_with_experts, ("expert(part)", "torch.cat([expert(part[:10]), part[10:] * 0])")
        ),
        False,
    ),
}
PATIENTS = tuple(_PATIENTS)
"""The sick steps by name; each is :func:`step_with_experts` with one flaw."""
