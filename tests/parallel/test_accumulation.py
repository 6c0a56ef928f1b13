"""torch's switch for accumulation under HSDP.

A step can leave the reduction over the replicas to a later step.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from course_pp.launch import on_ranks
from course_pp.parallel import (
    DistributedConfig,
    build_pipeline_schedule,
    build_pipeline_stage,
    count_collectives,
    get_pp_rank,
    init_distributed,
)
from course_pp.runtime import Pipeline
from course_pp.schedule import build
from tests.equality import full

WIDTH, M, PP, REPLICAS = 4, 2, 2, 2


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(PP))
    ).double()


def batch(number: int, replica: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(REPLICAS * number + replica)
    x = torch.randn(2 * M, WIDTH, dtype=torch.float64, generator=generator)
    return x, x.flip(1)


def accumulate(rank: int, engine: str) -> dict[str, Any]:
    """Run three steps, of which only the last shall all-reduce.

    Return each step's all-reduces, and the gradients.
    """
    mesh = init_distributed(DistributedConfig(pp=PP, dp_replicate=REPLICAS))
    stage, replica = get_pp_rank(mesh), mesh["dp_replicate"].get_local_rank()
    module = layers()[stage]
    fully_shard(module, mesh=mesh["dp_replicate", "dp_shard"])
    assert isinstance(module, FSDPModule)
    step: Callable[..., Any]
    if engine == "parallel":
        built = build_pipeline_stage(
            module, mesh, "cpu", inputs=torch.empty(2, WIDTH, dtype=torch.float64)
        )
        step = build_pipeline_schedule(built, M, nn.MSELoss()).step
    else:
        step = Pipeline(build("1f1b", PP, M), module, nn.MSELoss(), group=mesh.get_group("pp")).step
    counts = []
    for number in range(3):
        module.set_requires_all_reduce(number == 2)
        x, target = batch(number, replica)
        one_step = partial(step, x, target=target)
        counts.append(count_collectives(one_step, mesh)["dp_replicate", "all_reduce"].number)
    return {f"{stage}.{name}": full(p.grad) for name, p in module.named_parameters()} | {
        "counts": counts
    }


@pytest.mark.parametrize("engine", ["parallel", "runtime"])
def test_a_step_all_reduces_over_replicas_only_if_it_is_to(engine: str) -> None:
    model = layers()
    for number in range(3):
        for replica in range(REPLICAS):
            x, target = batch(number, replica)
            (nn.functional.mse_loss(model(x), target) / REPLICAS).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    for found in on_ranks(PP * REPLICAS, accumulate, engine, timeout_s=90):
        first, second, last = found.pop("counts")
        assert last == first + 1 == second + 1
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-12, atol=1e-12)
