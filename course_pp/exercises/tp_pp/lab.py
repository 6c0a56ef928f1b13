"""The runs of notebook 07: plans of cuts, a model cut within its layers, bytes, patients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.functional import gelu, linear, mse_loss, pad

from course_pp.exercises.tp_pp.exercises import enter
from course_pp.launch import on_ranks
from course_pp.model import CrossEntropy, ModelConfig, Transformer, layer_costs
from course_pp.parallel import (
    CollectiveCounter,
    DistributedConfig,
    count_collectives,
    predict_collectives,
    wire_factor,
)
from course_pp.runtime import EmulatedCluster
from course_pp.schedule import Costs, Timeline, build

LLAMA = ModelConfig(4096, 32, 32, 128256, n_kv_heads=8, ffn_dim=14336, max_seq_len=8192)
"""Llama 3 8B's sizes: arXiv:2407.21783, table 3."""

TINY = ModelConfig(dim=64, n_layers=4, n_heads=4, vocab_size=96, max_seq_len=16)
IDS = torch.randint(96, (8, 17), generator=torch.Generator().manual_seed(0))
"""Eight rows of tokens for :data:`TINY`."""

Gradients = Mapping[str, Tensor]

_DIM = 32
_HIDDEN = 64
_N_BLOCKS = 4
_SEQ_LEN = 4096
_N_MICROBATCHES = 8
_CUT_DIMENSION = {"up": 0, "down": 1}  # of `weight`, which PyTorch keeps transposed


class Leave(torch.autograd.Function):
    """The sum of each rank's term over the group. Backward passes the gradient on unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Block(nn.Module):
    """Norm, two products with gelu between them, and a residual; whole until `cut` cuts it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_DIM)
        self.up = nn.Linear(_DIM, _HIDDEN, bias=False)
        self.down = nn.Linear(_HIDDEN, _DIM, bias=False)
        self.group: dist.ProcessGroup | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.group is None:
            return x + self.down(gelu(self.up(self.norm(x))))
        return x + Leave.apply(
            self.down(gelu(self.up(enter(self.norm(x), self.group)))), self.group
        )


def whole_model() -> nn.Sequential:
    """Return four blocks in float64, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(_N_BLOCKS))).double()


def batch() -> Tensor:
    """Return inputs and targets of 8 rows of 16 tokens, 32 wide, stacked."""
    return torch.randn(
        2, 8, 16, _DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )


def cut(blocks: nn.Sequential, group: dist.ProcessGroup | None) -> nn.Sequential:
    """Keep this rank's part of each block: ``up`` by column, ``down`` by row, the norm whole."""
    rank = dist.get_rank(group)
    n = dist.get_world_size(group)
    for name, parameter in blocks.named_parameters():
        parameter.data = _part(name, parameter.data, rank, n).clone()
    for block in blocks.modules():
        if isinstance(block, Block):
            block.group = group
    return blocks


def exchanges_of_plans(n_ranks: int = 2) -> dict[str, int]:
    """Run gelu(X A) B on real ranks for each of four plans of cuts; count a forward's exchanges."""
    return on_ranks(n_ranks, _count_plans)[0]


@dataclass(frozen=True)
class TensorParallelTraffic:
    """The messages of a tensor-parallel step of four blocks, and the error of its gradients.

    Attributes:
        sums: all-reduces that a rank begins.
        n_bytes: bytes of one all-reduce.
        sent: bytes that a rank sends for all of them, in a ring.
        largest: the largest difference of any gradient.
    """

    n_ranks: int
    sums: int
    n_bytes: int
    sent: float
    largest: float

    def __str__(self) -> str:
        return (
            f"tp = {self.n_ranks}: {self.sums} all-reduces of {self.n_bytes:,} bytes, a rank sends"
            f" {self.sent:,.0f}; gradients off by {self.largest:.0e}"
        )


def tensor_parallel_step(n_ranks: int) -> TensorParallelTraffic:
    """Run forward and backward of :func:`whole_model`, cut over real ranks, and count."""
    ranks = on_ranks(n_ranks, _tensor_parallel)
    _, right = _of_one_process()
    tally = ranks[0][0]["world", "all_reduce"]
    differences = [
        largest_difference(found, _parts(right, rank, n_ranks))
        for rank, (_, found) in enumerate(ranks)
    ]
    sent = wire_factor("all_reduce", n_ranks) * tally.n_bytes
    return TensorParallelTraffic(
        n_ranks, tally.number, tally.n_bytes // tally.number, sent, max(differences)
    )


def step_bytes(config: ModelConfig, pp: int, tp: int) -> dict[str, float]:
    """Return the bytes that rank 0 sends in a step, by kind.

    The step has 8 microbatches of one sequence of 4,096 tokens in bfloat16.
    """
    layout = DistributedConfig(pp=pp, tp=tp, dp_shard=1)
    counts = predict_collectives(
        config,
        layout,
        batch_size=1,
        seq_len=_SEQ_LEN,
        n_microbatches=_N_MICROBATCHES,
        dtype=torch.bfloat16,
    )[0]
    sums = wire_factor("all_reduce", tp) * counts["tp", "all_reduce"].n_bytes
    return {"tensor parallel": sums, "pipeline": counts["pp", "send"].n_bytes}


@dataclass(frozen=True)
class StepOnLinks:
    """A simulated 1F1B step of two stages of eight tensor-parallel ranks.

    Attributes:
        compute_s: seconds of one microbatch's forward on a rank.
        sums_s: seconds of the all-reduces of this forward.
        message_s: seconds of one message between the stages.
        timeline: timeline of the step, a row a stage.
    """

    compute_s: float
    sums_s: float
    message_s: float
    timeline: Timeline

    def __str__(self) -> str:
        forward = f"computes {1e3 * self.compute_s:.1f} ms and sums {1e3 * self.sums_s:.1f} ms"
        return f"a forward {forward}; a message takes {1e3 * self.message_s:.1f} ms"


def step_on_links(config: ModelConfig, tp_link: float, pp_link: float, flops: float) -> StepOnLinks:
    """Simulate 8 microbatches of 4,096 tokens in bfloat16 on 2 stages × 8 ranks.

    Embedding and head are left out.

    Args:
        tp_link: bytes a second that a rank sends to its tensor-parallel neighbour.
        pp_link: bytes a second to the other stage.
        flops: operations of a rank in a second.
    """
    activation = _SEQ_LEN * config.dim * 2
    n_layers = config.n_layers // 2
    compute = sum(layer_costs(config, _SEQ_LEN).layers[:n_layers]) / 8 / flops
    sums = 2 * n_layers * wire_factor("all_reduce", 8) * activation / tp_link
    message = activation / pp_link
    costs = Costs(compute + sums, compute + sums, compute, latency=message)
    timeline = EmulatedCluster(costs).predict(build("1f1b", 2, _N_MICROBATCHES))
    return StepOnLinks(compute, sums, message, timeline)


def compare(step: Callable[[int], tuple[float, Gradients]]) -> str:
    """Run ``step(rank)`` on two stages of two ranks; compare with one process."""
    ranks = on_ranks(4, step)
    loss, right = _of_one_process()
    rows = [f"loss: one process {loss:.12f}, last stage {ranks[-1][0]:.12f}"]
    for rank, (_, found) in enumerate(ranks):
        off = largest_difference(found, _parts(right, rank % 2, 2))
        rows.append(f"rank {rank}: {len(found)} gradients, off by {off:.0e}")
    return "\n".join(rows)


def whole_gradients(module: nn.Module) -> dict[str, Tensor]:
    """Return each gradient of a stage by name, joined from all ranks that hold parts of it."""
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in gradients.items()}


def gradients_of_one() -> dict[str, Tensor]:
    """Return the gradients of `TINY` with the tokens `IDS`, in one process and float64."""
    torch.manual_seed(0)
    decoder = Transformer(TINY).double()
    CrossEntropy()(decoder(IDS[:, :-1]), IDS[:, 1:]).backward()
    return whole_gradients(decoder)


def largest_difference(found: Gradients, right: Gradients) -> float:
    """Return the largest difference of any number in the gradients in ``found``."""
    return max(float((gradient - right[name]).abs().max()) for name, gradient in found.items())


def norm_of(gradients: Gradients) -> float:
    """Return the norm of all gradients, taken as one vector."""
    return float(_flat(gradients).norm())


def cosine(one: Gradients, other: Gradients) -> float:
    """Return the cosine of the angle between two gradients of one model."""
    return float(torch.cosine_similarity(_flat(one), _flat(other), dim=0))


def clip_by_stage(stages: tuple[Gradients, ...], limit: float) -> dict[str, Tensor]:
    """Scale each stage's gradients to ``limit`` by its own norm, which is wrong; merge them."""
    factors = [min(1.0, limit / norm_of(stage)) for stage in stages]
    return {
        name: f * g for f, stage in zip(factors, stages, strict=True) for name, g in stage.items()
    }


def norms_by(norm: Callable[..., Tensor]) -> list[float]:
    """Return ``norm(cut, copied, mesh)`` on each rank of two stages of two.

    The last entry is the norm of one process.
    """
    return [*on_ranks(4, _norm_on_rank, norm), norm_of(_of_one_process()[1])]


def _row_first(block: Block, x: Tensor, group: dist.ProcessGroup) -> Tensor:
    n = dist.get_world_size(group)
    rank = dist.get_rank(group)
    up, down = block.up.weight.chunk(n, dim=1)[rank], block.down.weight.chunk(n, dim=0)[rank]
    part = enter(block.norm(x), group).chunk(n, dim=-1)[rank]
    out = linear(gelu(linear(part, up)), down)
    # The sum of outputs between zeros puts them side by side.
    width = out.shape[-1]
    return x + Leave.apply(pad(out, (rank * width, (n - 1 - rank) * width)), group)


def _no_sum_in_backward(block: Block, x: Tensor, group: dist.ProcessGroup) -> Tensor:
    n = dist.get_world_size(group)
    rank = dist.get_rank(group)
    up, down = block.up.weight.chunk(n, dim=0)[rank], block.down.weight.chunk(n, dim=1)[rank]
    return x + Leave.apply(linear(gelu(linear(block.norm(x), up)), down), group)


PATIENTS: dict[str, Callable[[Any, Tensor, Any], Tensor]] = {
    "A": _row_first,
    "B": _no_sum_in_backward,
}
"""Forwards ``(block, x, group)`` of a whole block, each ill in another way.

A forward uses its rank's parts of the weights.
"""


def examine(forward: Callable[..., Tensor]) -> str:
    """Run ``forward(block, x, group)`` on two ranks; compare with one process."""
    (here, zero), (_, one) = on_ranks(2, _patient_on_rank, forward)
    loss, right = _of_one_process()
    rows = [f"loss {here:.4f}, one process {loss:.4f}"]
    for kind in ("norm", "up", "down"):
        names = [name for name in right if f".{kind}.w" in name]
        found = dict(zero)
        if kind != "norm":
            found = {name: zero[name] + one[name] for name in names}
        verdicts = [
            "right" if torch.allclose(found[name], right[name]) else "wrong" for name in names
        ]
        equal = all(zero[name].equal(one[name]) for name in names)
        alike = "" if equal else "; the two ranks differ"
        rows.append(
            f"  {kind:4} of blocks 0 to 3: {', '.join(verdicts)}{alike if kind == 'norm' else ''}"
        )
    return "\n".join(rows)


def _part(name: str, tensor: Tensor, rank: int, n: int) -> Tensor:
    dimension = _CUT_DIMENSION.get(name.split(".")[-2])
    return tensor if dimension is None else tensor.chunk(n, dimension)[rank]


def _parts(gradients: Gradients, rank: int, n: int) -> dict[str, Tensor]:
    return {name: _part(name, gradient, rank, n) for name, gradient in gradients.items()}


def _of_one_process() -> tuple[float, dict[str, Tensor]]:
    model = whole_model()
    x, y = batch()
    loss = mse_loss(model(x), y)
    loss.backward()
    return loss.item(), whole_gradients(model)


def _count_plans(rank: int) -> dict[str, int]:
    seeded = torch.Generator().manual_seed(0)
    x, a, b = (torch.randn(16, 16, dtype=torch.float64, generator=seeded) for _ in range(3))
    n = dist.get_world_size()
    whole = gelu(x @ a) @ b
    numbers = {}

    def product_of(
        left: Tensor, matrix: Tensor, how: str, left_is_cut: bool, stays_cut: bool
    ) -> Tensor:
        if how == "column":
            part = left @ matrix.chunk(n, dim=1)[rank]
            if stays_cut:
                return part
            parts = [torch.empty_like(part) for _ in range(n)]
            dist.all_gather(parts, part)
            return torch.cat(parts, dim=1)
        mine = left if left_is_cut else left.chunk(n, dim=1)[rank]
        return Leave.apply(mine @ matrix.chunk(n, dim=0)[rank], dist.group.WORLD)

    def forward(first: str, second: str) -> Tensor:
        stays_cut = (first, second) == ("column", "row")
        hidden = gelu(product_of(x, a, first, False, stays_cut))
        return product_of(hidden, b, second, stays_cut, False)

    for first, second in product(("column", "row"), repeat=2):
        with CollectiveCounter() as counter:
            result = forward(first, second)
        assert torch.allclose(result, whole)
        numbers[f"{first}, then {second}"] = counter.counts.total().number
    return numbers


def _tensor_parallel(rank: int) -> tuple[Any, dict[str, Tensor]]:
    model = cut(whole_model(), dist.group.WORLD)
    x, y = batch()
    counts = count_collectives(lambda: mse_loss(model(x), y).backward())
    return counts, whole_gradients(model)


def _patient_on_rank(rank: int, forward: Callable[..., Tensor]) -> tuple[float, dict[str, Tensor]]:
    model = whole_model()
    x, y = batch()
    for block in model:
        x = forward(block, x, dist.group.WORLD)
    loss = mse_loss(x, y)
    loss.backward()
    return loss.item(), whole_gradients(model)


def _norm_on_rank(rank: int, norm: Callable[..., Tensor]) -> float:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    stage, place = divmod(rank, 2)
    mine = {
        name: g for name, g in _of_one_process()[1].items() if int(name.split(".")[0]) // 2 == stage
    }
    parts = _parts(mine, place, 2)
    cut_ones = [g for name, g in parts.items() if ".norm." not in name]
    copied = [g for name, g in parts.items() if ".norm." in name]
    return norm(cut_ones, copied, mesh).item()


def _flat(gradients: Gradients) -> Tensor:
    return torch.cat([gradients[name].flatten() for name in sorted(gradients)])
