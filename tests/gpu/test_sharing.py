"""Ranks of the runtime that share one GPU and send through host memory equal one process."""

import pytest
import torch

from course_pp.launch import on_ranks
from course_pp.model import CrossEntropy, build_stage_module
from course_pp.parallel import DistributedConfig, get_device, init_distributed
from course_pp.runtime import Pipeline
from course_pp.schedule import build
from tests.equality import Trained, adamw, assert_equals_one_process, full
from tests.parallel.stack import CONFIG, DATA, N_MICROBATCHES, reference

SCHEDULES = ("1f1b", "zb_h1", "zb_v")


def train_on_rank(rank: int, n_ranks: int) -> list[Trained]:
    init_distributed(DistributedConfig(pp=n_ranks, dp_shard=1, share_gpus=True), seed=0)
    return [_train(rank, n_ranks, schedule) for schedule in SCHEDULES]


def _train(rank: int, n_ranks: int, name: str) -> Trained:
    torch.manual_seed(0)
    schedule, device = build(name, n_ranks, N_MICROBATCHES), get_device(share=True)
    held = [stage for stage, ranks in enumerate(schedule.placement) if rank in ranks]
    modules = {
        i: build_stage_module(CONFIG, i, schedule.n_stages).to(device, torch.float64) for i in held
    }
    pipeline, optimizer = (
        Pipeline(schedule, modules, CrossEntropy(), device=device),
        adamw(modules.values()),
    )
    trained = Trained([], {}, {})
    for inputs, target in DATA:
        optimizer.zero_grad()
        trained.losses.append(pipeline.step(inputs.to(device), target=target.to(device)).item())
        named = [pair for module in modules.values() for pair in module.named_parameters()]
        trained.gradients = trained.gradients or {name: full(p.grad).cpu() for name, p in named}
        optimizer.step()
    trained.parameters = {name: full(p).cpu() for name, p in named}
    return trained


@pytest.mark.ranks
@pytest.mark.parametrize("n_ranks", [2, 4])
def test_ranks_that_share_a_gpu_equal_one_process(n_ranks: int, subtests: pytest.Subtests) -> None:
    ranks = on_ranks(n_ranks, train_on_rank, n_ranks, backend=None, timeout_s=110)
    for schedule, found in zip(SCHEDULES, zip(*ranks, strict=True), strict=True):
        with subtests.test(schedule):
            assert_equals_one_process(list(found), reference(), CONFIG)
