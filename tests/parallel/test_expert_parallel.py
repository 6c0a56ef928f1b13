"""Experts shared out over ranks train as in one process, in every layout."""

import re
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_module
from torch.distributed.tensor.parallel import ParallelStyle

from course_pp.launch import on_ranks
from course_pp.model import ModelConfig, Transformer
from course_pp.parallel import (
    DistributedConfig,
    apply_ac,
    apply_compile,
    apply_expert_parallel,
    apply_fsdp2,
    apply_tensor_parallel,
    get_ep_mesh,
    init_distributed,
)
from tests.processes import no_process_left
from tests.test_experts_in_pipelines import Case, assert_same, in_parallel, one_process

# Heads, experts and widths for every tp and ep up to 8 but 5 and 7; layers for 8 stages, half of them without experts.
CONFIG = ModelConfig(
    dim=48, n_layers=8, n_heads=24, ffn_dim=24, vocab_size=24, max_seq_len=24, n_experts=24, expert_dim=24, moe_every=2,
    n_shared_experts=1, balance_coef=0.1, z_coef=0.05,
)  # fmt: skip
BIAS = replace(CONFIG, balance="bias", z_coef=0.0, router="sigmoid")
TIGHT = replace(CONFIG, balance="sequence", capacity_factor=0.75)


def layouts() -> list[DistributedConfig]:
    """Every layout of at most 8 ranks in which experts are shared out."""
    sizes = (1, 2, 3, 4, 6, 8)
    found = [
        DistributedConfig(pp, dp_replicate, dp_shard, tp, ep)
        for pp, dp_replicate, dp_shard, tp, ep in product(sizes, repeat=5)
        if pp * dp_replicate * dp_shard * tp <= 8 and ep > 1 and dp_shard % ep == 0
    ]
    return sorted(found, key=n_ranks)


def n_ranks(layout: DistributedConfig) -> int:
    return layout.pp * layout.dp_replicate * layout.dp_shard * layout.tp


SAMPLE = [
    Case("1f1b", CONFIG, layout=DistributedConfig(dp_shard=2, ep=2)),
    Case("1f1b", TIGHT, "full", layout=DistributedConfig(dp_shard=4, ep=2)),
    Case("1f1b", BIAS, layout=DistributedConfig(dp_replicate=2, dp_shard=2, ep=2), accumulated=2),
    Case("1f1b", CONFIG, layout=DistributedConfig(dp_shard=2, ep=2, tp=2)),
    *(
        Case(schedule, config, layout=DistributedConfig(pp=2, dp_shard=2, ep=2))
        for schedule, config in (("1f1b", CONFIG), ("interleaved_1f1b", TIGHT), ("zb_v", BIAS), ("dualpipe_v", CONFIG))
    ),
]


def assert_equal(cases: list[Case], subtests: Any) -> None:
    for n in sorted({n_ranks(case.layout) for case in cases}):
        here = [case for case in cases if n_ranks(case.layout) == n]
        with no_process_left():
            ranks = on_ranks(n, in_parallel, here, timeout_s=60 + 10.0 * len(here))
        for case, found in zip(here, zip(*ranks, strict=True), strict=True):
            with subtests.test(str(case)):
                assert_same(found, one_process(case.config, case.pieces, case.accumulated))


def test_experts_shared_out_equal_one_process(subtests: Any) -> None:
    assert_equal(SAMPLE, subtests)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("n", sorted(set(map(n_ranks, layouts()))))
def test_every_layout_equals_one_process(n: int, subtests: Any) -> None:
    assert_equal([Case("1f1b", CONFIG, layout=layout) for layout in layouts() if n_ranks(layout) == n], subtests)


SMALL = ModelConfig(dim=16, n_layers=2, n_heads=2, vocab_size=20, max_seq_len=8, n_experts=4, expert_dim=8)


class Foreign(nn.Module):
    """A layer of somebody else's, with one expert a row, or not."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        raise NotImplementedError


class CutsExperts(ParallelStyle):
    """A style of a plan that makes DTensors over ``tp`` of experts."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh)


def applied(rank: int, mesh: DeviceMesh, what: str) -> None:
    model: Any = Transformer(SMALL if rank == 1 or what != "one rank" else replace(SMALL, n_experts=3))
    match what:
        case "dense":
            model = Transformer(replace(SMALL, n_experts=0))
        case "foreign":
            model = nn.Sequential(nn.Linear(4, 4))
        case "indivisible":
            model = Transformer(replace(SMALL, n_experts=3))
        case "recomputed":
            apply_ac(model, "full")
        case "compiled":
            apply_compile(model, backend="eager")
        case "sharded":
            apply_fsdp2(model, mesh)
        case "twice":
            apply_expert_parallel(model, mesh)
        case "DDP":
            model = nn.parallel.DistributedDataParallel(model)
        case "rows":
            model = nn.Sequential(Foreign(2, 4), Foreign())
    named: dict[str, Any] = {"called": "*.*.attn", "nearest": "layers.*.expert", "rows": Foreign}
    apply_expert_parallel(model, mesh, named.get(what))


REFUSED = {
    "dense": "finds no experts on any stage: name them with experts=.* or leave ep at 1",
    "foreign": "finds no experts on any stage",
    "indivisible": r"ep=2 must divide the 3 experts of 'layers.0.mlp.experts' \(Experts\).*: use ep=1 or 3",
    "one rank": "ep=2 must divide the 3 experts",
    "recomputed": "apply_expert_parallel was called on a model that already has activation checkpointing",
    "compiled": "already has compile",
    "sharded": "already has FSDP2",
    "twice": "already has expert parallel",
    "DDP": "the model is wrapped in DistributedDataParallel",
    "called": r"'layers.0.attn' \(Attention\) is called with \(x, cos, .*\): experts are called with \(x, counts\) or",
    "nearest": "experts='layers.*.expert' matches no module of Transformer: the nearest names are",
    "rows": r"'1' \(Foreign\) holds weight \(\): each must have one expert in each row",
}


def refusals(rank: int) -> dict[str, str]:
    mesh = init_distributed(DistributedConfig(ep=2), seed=0)
    assert mesh is not None
    told = {}
    for what in REFUSED:
        try:
            applied(rank, mesh, what)
            told[what] = "nothing"
        except ValueError as refusal:
            told[what] = str(refusal)
    return told


def test_what_cannot_be_shared_out_is_refused_on_every_rank() -> None:
    ranks = on_ranks(2, refusals, timeout_s=60)
    assert ranks[0] == ranks[1]
    for what, expected in REFUSED.items():
        assert re.search(expected, ranks[0][what]), ranks[0][what]


def cut_by_plan(rank: int) -> str:
    mesh = init_distributed(DistributedConfig(dp_shard=2, ep=2, tp=2), seed=0)
    model = Transformer(SMALL)
    apply_tensor_parallel(model, mesh, {"layers.0.mlp.experts": CutsExperts()})
    with pytest.raises(ValueError, match="which tensor parallelism has cut") as refusal:
        apply_expert_parallel(model, mesh)
    return str(refusal.value)


def test_experts_that_a_plan_has_cut_are_refused_on_every_rank() -> None:
    ranks = on_ranks(4, cut_by_plan, timeout_s=60)
    assert len(set(ranks)) == 1
    assert ranks[0].startswith("'layers.0.mlp.experts' (Experts) holds 'gate_proj', which")


def without_ep(rank: int) -> tuple[Any, ...]:
    mesh = init_distributed(DistributedConfig(), seed=0)
    return get_ep_mesh(mesh), apply_expert_parallel(Transformer(replace(SMALL, n_experts=0)), mesh)


def test_without_ep_nothing_is_done() -> None:
    assert on_ranks(2, without_ep, timeout_s=60) == [(None, ())] * 2
