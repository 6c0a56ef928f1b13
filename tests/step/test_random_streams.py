"""Stages and data ranks draw dropout masks of their own; tensor ranks draw the same."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from course_pp import runtime
from course_pp.launch import on_ranks
from course_pp.parallel import (
    DistributedConfig,
    apply_fsdp2,
    build_pipeline_schedule,
    build_pipeline_stage,
    default_mp_policy,
    get_dp_rank,
    get_pp_mesh,
    get_pp_rank,
    get_pp_size,
    get_stage_indices,
    init_distributed,
)
from course_pp.schedule import build

WIDTH, M, STEPS = 16, 2, 2
# by stage and data rank: those of all microbatches and steps
Masks = dict[tuple[int, int], list[bytes]]


class Noisy(nn.Linear):
    """A layer that remembers the masks of its dropout, also those of recomputation."""

    def __init__(self, recompute: bool = False, drops: bool = True) -> None:
        super().__init__(WIDTH, WIDTH)
        self.recompute = recompute
        self.drops = drops
        self.masks: list[bytes] = []

    def _forward(self, x: Tensor) -> Tensor:
        if not self.drops or x.is_meta:  # building a pipeline asks what a stage returns
            return super().forward(x)
        mask = F.dropout(torch.ones(WIDTH), 0.5)
        self.masks.append(mask.numpy().tobytes())
        return super().forward(x) * mask

    def forward(self, x: Tensor) -> Tensor:
        return (
            checkpoint(self._forward, x, use_reentrant=False)
            if self.recompute
            else self._forward(x)
        )


@dataclass(frozen=True)
class Case:
    """One way to train."""

    engine: str
    schedule: str = "1f1b"
    layout: DistributedConfig = field(default_factory=lambda: DistributedConfig(pp=2))
    recompute: bool = False
    n_noisy: int = 99  # stages that have dropout, from the first on
    n_quiet_steps: int = 0  # steps before the dropout begins, which then is on data rank 0 alone


@dataclass
class Seen:
    """One rank's masks, a weight that torch initialised, and a number drawn after each step."""

    masks: Masks
    weight: bytes
    drawn: list[float]


def steps_on_rank(rank: int, case: Case) -> Seen:
    mesh = init_distributed(case.layout, seed=0)
    pp = get_pp_size(mesh)
    indices = get_stage_indices(case.schedule, get_pp_rank(mesh), pp)
    noisy = {
        i: Noisy(case.recompute and case.engine == "parallel", drops=i < case.n_noisy)
        for i in indices
    }
    weight = noisy[indices[0]].weight.detach().numpy().tobytes()
    for module in noisy.values():
        apply_fsdp2(module, mesh, default_mp_policy(torch.float32), blocks=())
    drawn = []
    pipeline = pipeline_of(case, noisy, mesh, pp)
    for step in range(case.n_quiet_steps + STEPS):
        if case.n_quiet_steps:
            for stage, module in noisy.items():
                is_noisy = stage < case.n_noisy and get_dp_rank(mesh) == 0
                module.drops = is_noisy and step >= case.n_quiet_steps
        pipeline(torch.ones(2 * M, WIDTH))
        drawn.append(torch.rand(()).item())
    masks = {(stage, get_dp_rank(mesh)): module.masks for stage, module in noisy.items()}
    return Seen(masks, weight, drawn)


def pipeline_of(case: Case, modules: dict[int, Any], mesh: Any, pp: int) -> Any:
    """A function that takes a step on a batch, with either engine."""
    if case.engine == "runtime":
        pp_mesh = get_pp_mesh(mesh)
        group = None if pp_mesh is None else pp_mesh.get_group()
        options = {"group": group, "recompute": case.recompute, "timeout_s": 20}
        pipeline = runtime.Pipeline(build(case.schedule, pp, M), modules, F.mse_loss, **options)
        return lambda x: pipeline.step(x, target=x)
    sizes = {"n_stages": pp * len(modules), "inputs": torch.empty(2, WIDTH)}
    stages = [
        build_pipeline_stage(module, mesh, "cpu", stage=i, **sizes) for i, module in modules.items()
    ]
    schedule = build_pipeline_schedule(stages, M, F.mse_loss, case.schedule)
    return lambda x: schedule.step(x, target=x)


@pytest.mark.sample(3)
@pytest.mark.parametrize("engine", ["parallel", "runtime"])
@pytest.mark.parametrize(
    ("schedule", "n_ranks", "layout"),
    [
        ("1f1b", 4, DistributedConfig(pp=2, dp_shard=2)),
        ("1f1b", 4, DistributedConfig(pp=2, dp_shard=1, tp=2)),
        ("interleaved_1f1b", 2, DistributedConfig(pp=2)),
        ("zb_v", 1, DistributedConfig()),
    ],
    ids=["data", "tensor", "two stages a rank", "one rank"],
)
def test_stages_and_data_ranks_draw_their_own_masks_and_tensor_ranks_the_same(
    schedule: str, n_ranks: int, layout: DistributedConfig, engine: str
) -> None:
    ranks = on_ranks(n_ranks, steps_on_rank, Case(engine, schedule, layout), timeout_s=60)
    masks: Masks = {}
    for rank in ranks:
        for place, drawn in rank.masks.items():
            assert masks.setdefault(place, drawn) == drawn  # another tensor rank's
    everything = [mask for drawn in masks.values() for mask in drawn]
    assert len(everything) == len(masks) * M * STEPS
    assert len(set(everything)) == len(everything), (
        "no two stages, data ranks, microbatches or steps draw alike"
    )
    assert len({rank.weight for rank in ranks}) == 1, "every rank makes the same model"
    assert len({tuple(rank.drawn) for rank in ranks}) == 1, "every rank draws the same batches"


@pytest.mark.parametrize("engine", ["parallel", "runtime"])
def test_recomputation_draws_the_masks_again(engine: str) -> None:
    kept, again = (
        on_ranks(2, steps_on_rank, Case(engine, recompute=each), timeout_s=60)
        for each in (False, True)
    )
    for one, other in zip(kept, again, strict=True):
        for place, masks in one.masks.items():
            assert sorted(other.masks[place]) == sorted(2 * masks)


@pytest.mark.parametrize("engine", ["parallel", "runtime"])
def test_ranks_draw_the_same_batches_though_one_stage_alone_drops(engine: str) -> None:
    one, other = on_ranks(2, steps_on_rank, Case(engine, n_noisy=1), timeout_s=60)
    assert one.drawn == other.drawn
    assert len(set(one.masks[0, 0])) == M * STEPS
    silent, _ = on_ranks(2, steps_on_rank, Case(engine, n_noisy=0), timeout_s=60)
    torch.manual_seed(0)
    Noisy()
    assert silent.drawn == [torch.rand(()).item() for _ in range(STEPS)], (
        "who draws nothing changes nothing"
    )


@pytest.mark.parametrize("engine", ["parallel", "runtime"])
@pytest.mark.parametrize(
    ("n_ranks", "layout"),
    [(2, DistributedConfig(pp=2)), (4, DistributedConfig(pp=2, dp_shard=2))],
    ids=["pipeline", "data"],
)
def test_ranks_draw_the_same_batches_though_a_stage_begins_to_drop_late(
    n_ranks: int, layout: DistributedConfig, engine: str
) -> None:
    case = Case(engine, layout=layout, n_noisy=1, n_quiet_steps=1)
    ranks = on_ranks(n_ranks, steps_on_rank, case, timeout_s=60)
    assert len({tuple(rank.drawn) for rank in ranks}) == 1
    masks = [mask for rank in ranks for drawn in rank.masks.values() for mask in drawn]
    assert len(set(masks)) == len(masks) == M * STEPS
