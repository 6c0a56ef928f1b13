"""The measurements of notebook 08: bytes that FSDP2 keeps, gathers and sends; sick steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, parallelize_module

from course_pp.exercises.formula import flawed
from course_pp.exercises.fsdp_reshard_policy.exercises import accumulate_sharded
from course_pp.launch import on_ranks
from course_pp.model import (
    CrossEntropy,
    ModelConfig,
    PipelineStageModule,
    Transformer,
    build_stage_module,
)
from course_pp.parallel import (
    CollectiveCounts,
    DistributedConfig,
    apply_ac,
    apply_fsdp2,
    apply_tensor_parallel,
    build_pipeline_schedule,
    build_pipeline_stage,
    count_collectives,
    default_mp_policy,
    get_dp_rank,
    get_dp_size,
    get_pp_rank,
    get_pp_size,
    init_distributed,
    measure_unsharded_bytes,
    predict_collectives,
    wire_factor,
)

if TYPE_CHECKING:
    from course_pp.show import ChartFigure

CONFIG = ModelConfig(dim=64, n_layers=6, n_heads=4, vocab_size=128, max_seq_len=32)
_POLICIES = (True, False)
_KINDS = ("all_gather", "reduce_scatter")
_ROWS, _SEQ_LEN, _MICROBATCHES, _ITEMSIZE = 16, 32, 8, 8

Step = Callable[[], Any]
Recomputation = Literal["none", "full", "selective"]


@dataclass(frozen=True)
class KeptShare:
    """The memory of ranks between two steps: shapes of some parameters, and shares of bytes."""

    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
    shares: tuple[float, ...]

    def __str__(self) -> str:
        return "\n".join(
            f"{name:18} whole {whole}, on each rank {part}"
            for name, (whole, part) in self.shapes.items()
        )


class Right(NamedTuple):
    """One process: the loss of the batch, the norm of the gradient, and every gradient by name."""

    loss: float
    norm: float
    gradients: Mapping[str, Tensor]


def step_of(
    module: PipelineStageModule, mesh: DeviceMesh | None, n_microbatches: int = _MICROBATCHES
) -> Step:
    """Return a step on this rank's part of the batch: plain, or 1F1B if the mesh has ``pp``."""
    inputs, targets = (rows.chunk(get_dp_size(mesh))[get_dp_rank(mesh)] for rows in _batch())
    loss_fn = CrossEntropy()
    if get_pp_size(mesh) == 1:
        return lambda: loss_fn(module(inputs), targets).backward()
    assert mesh is not None
    sizes = len(inputs) // n_microbatches, _SEQ_LEN
    stage = build_pipeline_stage(module, mesh, "cpu", *sizes, param_dtype=torch.float64)
    pipeline = build_pipeline_schedule(stage, n_microbatches, loss_fn, schedule="1f1b")
    return lambda: pipeline.step(inputs, target=targets)


def kept_between_steps(layout: DistributedConfig, n_ranks: int = 4) -> KeptShare:
    """Take a step with AdamW, and measure the memory that each rank then keeps."""
    ranks = on_ranks(n_ranks, _kept, layout)
    names = ("attn_norm.weight", "attn.q_proj.weight", "mlp.up_proj.weight")
    whole = dict(Transformer(CONFIG).layers["0"].named_parameters())
    shapes = {name: (tuple(whole[name].shape), ranks[0][0][name]) for name in names}
    everything = 4 * _ITEMSIZE * CONFIG.n_parameters
    return KeptShare(shapes, tuple(n_bytes / everything for _, n_bytes in ranks))


def count(
    layout: DistributedConfig, ac: Recomputation = "none"
) -> dict[bool, list[CollectiveCounts]]:
    """Count the collectives of four ranks in a step, for both ``reshard_after_forward``."""
    return {reshard: on_ranks(4, _counted, layout, reshard, ac) for reshard in _POLICIES}


def predicted(layout: DistributedConfig, reshard: bool) -> list[CollectiveCounts]:
    """Predict the same counts by formula."""
    sizes: dict[str, Any] = {"batch_size": 1, "seq_len": _SEQ_LEN, "n_microbatches": _MICROBATCHES}
    return list(
        predict_collectives(
            CONFIG, layout, reshard_after_forward=reshard, dtype=torch.float64, clip=False, **sizes
        )
    )


def per_group(counts: list[CollectiveCounts], layout: DistributedConfig) -> tuple[int, ...]:
    """Return how often each FSDP group is gathered and reduced in the step.

    Every rank must have the same numbers.
    """
    groups = CONFIG.n_layers // layout.pp + 1
    [often] = {tuple(each["dp_shard", kind].number // groups for kind in _KINDS) for each in counts}
    return often


def sent(counts: CollectiveCounts, layout: DistributedConfig) -> dict[str, float]:
    """Return the bytes that a rank sends in rings, by mesh dimension and collective.

    The unit is the model's bytes.
    """
    whole = _ITEMSIZE * CONFIG.n_parameters
    return {
        f"{dimension} {kind}": tally.n_bytes * wire_factor(kind, getattr(layout, dimension)) / whole
        for (dimension, kind), tally in counts.tallies.items()
    }


def step_bytes(layout: DistributedConfig) -> dict[bool, dict[str, int]]:
    """Return the bytes on rank 0 of four by kind, for both policies.

    The kinds are shards, whole gradients and whole parameters. Each kind is counted at its own peak
    in the step. At the peak of the gradients, their shards and whole ones count together.
    """
    return {reshard: on_ranks(4, _bytes_in_step, layout, reshard)[0] for reshard in _POLICIES}


def one_process(n_rows: int = _ROWS) -> Right:
    """Forward and backward of the whole batch, in this process."""
    torch.manual_seed(0)
    model = Transformer(CONFIG).double()
    inputs, targets = _batch(n_rows)
    loss = CrossEntropy()(model(inputs), targets)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return Right(loss.item(), nn.utils.clip_grad_norm_(model.parameters(), 1.0).item(), gradients)


def largest_difference(module: nn.Module, right: Mapping[str, Tensor]) -> float:
    """Return the largest difference of a gradient on this rank.

    The right gradient is cut as this rank's is, so nothing is sent.
    """
    largest = 0.0
    for name, p in module.named_parameters():
        gradient = p.grad
        assert isinstance(gradient, DTensor)
        part = distribute_tensor(
            right[name], gradient.device_mesh, gradient.placements, src_data_rank=None
        )
        largest = max(largest, (gradient.to_local() - part.to_local()).abs().max().item())
    return largest


def refused_orders() -> dict[str, str]:
    """Return the messages of this package and of torch if FSDP comes before tensor parallelism."""
    return on_ranks(4, _fsdp_first)[0]


def draw_shares(share: Callable[[float, bool], float], crossing: float) -> ChartFigure:
    """Draw ``share(tokens, reshard)``, a rank's share of time with work, for both policies."""
    # Imported here: ranks import this module, and matplotlib takes longer than their steps.
    from course_pp.show import ChartFigure
    from course_pp.show.chart import BLUE, VERMILION

    tokens = [100 * 2 ** (i / 8) for i in range(73)]
    figure = ChartFigure(8, 3.4)
    axes = figure.axes_with_margins(left=0.7, right=0.2, bottom=0.55, top=0.4)
    for reshard, color, style in ((False, BLUE, "-"), (True, VERMILION, "--")):
        shares = [share(each, reshard) for each in tokens]
        axes.plot(
            tokens, shares, lw=2, color=color, ls=style, label=f"reshard_after_forward={reshard}"
        )
    axes.set(
        xscale="log", xlabel="tokens on a rank in a step", ylabel="share of the time computing"
    )
    title = f"With perfect overlap, both policies are equally fast from {crossing:,.0f} tokens on"
    axes.set_title(title, loc="left")
    axes.axvline(crossing, color="black", ls=":", label=f"T* = {crossing:,.0f} tokens")
    axes.legend(frameon=False)
    last = [share(tokens[-1], reshard) for reshard in (False, True)]
    most = max(share(each, False) / share(each, True) for each in tokens)
    figure.alt_text = (
        f"Share of a step spent computing against tokens a rank, by formula. {title}. Below, False"
        f" is up to {most:.2g} times as high as True; at {tokens[-1]:,.0f} tokens both are at"
        f" {min(last):.0%}."
    )
    return figure


def _build(
    mesh: DeviceMesh | None, reshard: bool, ac: Recomputation = "none"
) -> PipelineStageModule:
    module = build_stage_module(CONFIG, get_pp_rank(mesh), get_pp_size(mesh)).double()
    apply_tensor_parallel(module, mesh)
    apply_ac(module, ac)
    apply_fsdp2(module, mesh, reshard_after_forward=reshard)
    return module


def _batch(n_rows: int = _ROWS) -> tuple[Tensor, Tensor]:
    seeded = torch.Generator().manual_seed(0)
    ids = torch.randint(CONFIG.vocab_size, (n_rows, _SEQ_LEN + 1), generator=seeded)
    return ids[:, :-1], ids[:, 1:]


def _counted(
    rank: int, layout: DistributedConfig, reshard: bool, ac: Recomputation
) -> CollectiveCounts:
    mesh = init_distributed(layout, seed=0)
    module = _build(mesh, reshard, ac)
    step = step_of(module, mesh)
    if get_pp_size(mesh) > 1:
        step()  # the first opens connections between stages
        module.zero_grad()
    return count_collectives(step, mesh)


def _kept(rank: int, layout: DistributedConfig) -> tuple[dict[str, tuple[int, ...]], int]:
    mesh = init_distributed(layout, seed=0)
    module = _build(mesh, reshard=True)
    optimizer = torch.optim.AdamW(module.parameters())
    step_of(module, mesh)()
    optimizer.step()
    parameters: dict[str, Any] = dict(module.named_parameters())
    n_bytes = 0
    for p in parameters.values():
        state = optimizer.state[p]
        n_bytes += sum(
            each.to_local().nbytes for each in (p, p.grad, state["exp_avg"], state["exp_avg_sq"])
        )
    layer = "layers.0."
    return {
        name.removeprefix(layer): tuple(p.to_local().shape)
        for name, p in parameters.items()
        if name.startswith(layer)
    }, n_bytes


def _bytes_in_step(rank: int, layout: DistributedConfig, reshard: bool) -> dict[str, int]:
    mesh = init_distributed(layout, seed=0)
    module = _build(mesh, reshard)
    parameters: list[Any] = list(module.parameters())
    shards = sum(p.to_local().nbytes for p in parameters)
    seen: list[tuple[int, int, int]] = []

    def look(*_: object) -> None:
        """Look at the gradients when a backward reaches the first layer here."""
        found = [p.grad for p in module.parameters() if p.grad is not None]
        whole = sum(g.nbytes for g in found if not isinstance(g, DTensor))
        cut = sum(g.to_local().nbytes for g in found if isinstance(g, DTensor))
        seen.append((cut + whole, cut, whole))

    layers: Any = module.layers
    next(iter(layers.values())).attn.q_proj.register_full_backward_pre_hook(look)
    gathered = measure_unsharded_bytes(step_of(module, mesh, n_microbatches=4), module)
    _, cut, whole = max(seen)
    kept = {"parameters": shards, "moments": 2 * shards, "gradients": cut}
    return kept | {"whole gradients": whole, "whole parameters": gathered}


def _fsdp_first(rank: int) -> dict[str, str]:
    mesh = init_distributed(DistributedConfig(dp_shard=2, tp=2), seed=0)
    assert mesh is not None
    with_package, by_hand = Transformer(CONFIG), Transformer(CONFIG)
    apply_fsdp2(with_package, mesh, default_mp_policy())
    fully_shard(by_hand, mesh=mesh["dp_shard"])
    plan: dict[str, ParallelStyle] = {"layers.0.mlp.up_proj": ColwiseParallel()}
    orders: dict[str, Callable[[], object]] = {
        "this package": lambda: apply_tensor_parallel(with_package, mesh),
        "torch alone": lambda: parallelize_module(by_hand, mesh["tp"], plan),
    }
    said = dict.fromkeys(orders, "not refused")
    for who, order in orders.items():
        try:
            order()
        except ValueError as error:
            said[who] = str(error)
    return said


class ReshardSymptoms(NamedTuple):
    """The symptoms of a step.

    Attributes:
        gathers, reductions: number of gathers and of reductions of each FSDP group.
        ratio: norm of the gradients, divided by the right norm.
    """

    gathers: float
    reductions: float
    ratio: float

    def __str__(self) -> str:
        often = f"a group is gathered {self.gathers:.0f} ×, reduced {self.reductions:.0f} ×"
        return f"{often}; gradients {self.ratio:.2f} of the right ones"


def _pipelined(rank: int) -> ReshardSymptoms:
    """A pipeline whose ranks free parameters after forward."""
    mesh = init_distributed(DistributedConfig(pp=2, dp_shard=2), seed=0)
    module = _build(mesh, reshard=True)
    return _symptoms(mesh, module, step_of(module, mesh), _ROWS)


def _looped(step: Callable[..., None], rank: int) -> ReshardSymptoms:
    """A loop over microbatches of one row, without a pipeline."""
    mesh = init_distributed(DistributedConfig(), seed=0)
    n_rows = 4 * _MICROBATCHES
    module = _build(mesh, reshard=False)
    inputs, targets = (
        rows.chunk(4)[get_dp_rank(mesh)].chunk(_MICROBATCHES) for rows in _batch(n_rows)
    )
    return _symptoms(mesh, module, lambda: step(module, inputs, targets, CrossEntropy()), n_rows)


def _symptoms(
    mesh: DeviceMesh | None, module: PipelineStageModule, step: Step, n_rows: int
) -> ReshardSymptoms:
    counts = count_collectives(step, mesh)
    right = one_process(n_rows).gradients
    gathered, reduced = (
        counts.total("dp_shard", kind).number / (len(module.layers) + 1) for kind in _KINDS
    )
    gradients = {
        name: p.grad.full_tensor()
        for name, p in module.named_parameters()
        if isinstance(p.grad, DTensor)
    }
    ratios = [float(gradient.norm() / right[name].norm()) for name, gradient in gradients.items()]
    return ReshardSymptoms(gathered, reduced, sum(ratios) / len(ratios))


PATIENTS: dict[str, Callable[[int], ReshardSymptoms]] = {
    "A": _pipelined,
    "B": partial(_looped, flawed(accumulate_sharded, ("i == m - 1", "True"))),
    "C": partial(
        _looped, flawed(accumulate_sharded, ("/ m)", "/ m / torch.distributed.get_world_size())"))
    ),
}
"""Steps of eight microbatches on four ranks, each ill in another way; called with the rank."""
