"""Stages in wrappers of other libraries: right gradients, or a refusal on every rank."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

from course_pp.launch import on_ranks
from course_pp.runtime import Pipeline
from course_pp.schedule import Schedule, build
from tests.processes import no_process_left
from tests.runtime.small import for_rank, parse, stages_of, take_step

WIDTH, M = 4, 4
Stages = dict[int, nn.Module]


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double()


def alone(rank: int) -> Any:
    """A group of this rank alone, so that a wrapper has somebody to talk to who answers."""
    return [dist.new_group([each]) for each in range(2)][rank]


def mesh_alone(rank: int) -> Any:
    return init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "shard"))["shard"]


def in_ddp(rank: int, stage: nn.Module) -> nn.Module:
    wrapped = nn.parallel.DistributedDataParallel(stage, process_group=alone(rank))
    return nn.Sequential(nn.Tanh(), wrapped) if rank == 1 else stage


def in_data_parallel(rank: int, stage: nn.Module) -> nn.Module:
    return nn.DataParallel(stage) if rank == 0 else stage


def in_fsdp1(rank: int, stage: nn.Module) -> nn.Module:
    wrapped = FullyShardedDataParallel(
        stage, process_group=alone(rank), device_id=torch.device("cpu")
    )
    return wrapped if rank == 1 else stage


def replicated(rank: int, stage: nn.Module) -> nn.Module:
    return replicate(stage, process_group=alone(rank))


def sharded(rank: int, stage: nn.Module) -> nn.Module:
    return fully_shard(stage, mesh=mesh_alone(rank))


V = build("zb_v", 2, M)
LINE = build("1f1b", 2, M)
COPIES = parse("0F0 0B0", "0F1 0B1", placement=[(0, 1)])
TIED = {"tied": [{0: "0.weight", 1: "2.weight"}]}
Change = Callable[[int, nn.Module], nn.Module]
REFUSED: dict[str, tuple[Schedule, Change, Mapping[str, Any], str]] = {
    "DDP inside a stage of rank 1": (
        LINE,
        in_ddp,
        {},
        "rank 1: '1' of stage 1 is wrapped in DistributedDataParallel",
    ),
    "DataParallel": (LINE, in_data_parallel, {}, "rank 0: stage 0 is wrapped in DataParallel"),
    "FSDP1": (
        LINE,
        in_fsdp1,
        {},
        "rank 1: stage 1 is wrapped in FullyShardedDataParallel",
    ),
    "replicate": (LINE, replicated, {}, "rank 0: stage 0 is wrapped in DDP"),
    "a tie of FSDP2": (LINE, sharded, TIED, "rank 0: '0.weight' of stage 0 .* and tied"),
    "replicas of FSDP2": (COPIES, sharded, {}, "rank 0: '0.weight' of stage 0 .* replicated"),
}


def said_to(schedule: Schedule, modules: Stages, options: Mapping[str, Any]) -> str:
    try:
        Pipeline(schedule, modules, F.mse_loss, timeout_s=20, **options)
    except ValueError as error:
        return str(error)
    return "nothing"


class Crossing(nn.Module):
    """A layer whose output is a DTensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH).double()
        self.mesh = mesh_alone(0)

    def forward(self, x: Tensor) -> Tensor:
        return DTensor.from_local(self.layer(x), self.mesh)


def dtensor_across(rank: int) -> str:
    pipeline = Pipeline(LINE, Crossing(), F.mse_loss, timeout_s=20)
    try:
        take_step(pipeline, *batch())
    except RuntimeError as error:
        return str(error)
    return "nothing"


def batch() -> tuple[Tensor, Tensor]:
    x = torch.randn(2 * M, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return x, x.flip(0)


def compiled(blocks: list[nn.Module]) -> list[nn.Module]:
    return [torch.compile(each, backend="eager") for each in blocks]  # type: ignore[misc]


def one_module_twice(blocks: list[nn.Module]) -> list[nn.Module]:
    return [*blocks[:2], *blocks[1::-1]]


def one_parameter_twice(blocks: list[nn.Module]) -> list[nn.Module]:
    for early, late in zip(blocks, blocks[::-1], strict=True):
        late[0].weight = early[2].weight  # type: ignore[index, union-attr, assignment]
    return blocks


RIGHT: dict[str, tuple[Schedule, Callable[[list[nn.Module]], list[nn.Module]], bool]] = {
    "compiled, split backward": (build("zb_h1", 2, M), compiled, False),
    "one module in two stages of a rank": (V, one_module_twice, False),
    "one module in two stages, recomputed": (V, one_module_twice, True),
    "one parameter in two stages of a rank": (V, one_parameter_twice, False),
}


def gradients_of(rank: int, name: str) -> dict[str, Tensor | None]:
    schedule, wrap, recompute = RIGHT[name]
    torch.manual_seed(0)
    stages = wrap([block() for _ in range(schedule.n_stages)])
    here = {stage: stages[stage] for stage in stages_of(rank, schedule)}
    pipeline = Pipeline(schedule, here, F.mse_loss, recompute=recompute, timeout_s=40)
    for _ in range(2):
        take_step(pipeline, *for_rank(rank, schedule, *batch()))
    return gradients(here)


def gradients(stages: Mapping[int, nn.Module]) -> dict[str, Tensor | None]:
    return {
        f"{stage}.{name.removeprefix('_orig_mod.')}": parameter.grad
        for stage, module in stages.items()
        for name, parameter in module.named_parameters()
    }


def in_one_process(name: str) -> dict[str, Tensor | None]:
    schedule, wrap, _ = RIGHT[name]
    torch.manual_seed(0)
    blocks: list[nn.Module] = [block() for _ in range(schedule.n_stages)]
    stages = blocks if wrap is compiled else wrap(blocks)
    for _ in range(2):
        x, y = batch()
        F.mse_loss(nn.Sequential(*stages)(x), y).backward()
    return gradients(dict(enumerate(stages)))


def all_cases(rank: int) -> tuple[dict[str, str], dict[str, dict[str, Tensor | None]]]:
    """Return the refusal of each wrong case, and the gradients of the others."""
    said = {}
    for name, (schedule, wrap, options, _) in REFUSED.items():
        stages = {stage: wrap(rank, block()) for stage in stages_of(rank, schedule)}
        said[name] = said_to(schedule, stages, options)
    twice = dict.fromkeys(stages_of(rank, V), sharded(rank, block()))
    said["a sharded module in two stages"] = said_to(V, twice, {})
    found = {name: gradients_of(rank, name) for name in RIGHT}
    return {**said, "a DTensor across a boundary": dtensor_across(rank)}, found


@pytest.mark.timeout(120)
def test_what_others_have_wrapped_is_right_or_refused_by_name_on_every_rank() -> None:
    with no_process_left():
        ranks = on_ranks(2, all_cases, timeout_s=100.0)
    says = {name: pattern for name, (*_, pattern) in REFUSED.items()}
    says["a sharded module in two stages"] = (
        "rank 0: '0.weight' of stage 3 is a DTensor .* is in stage 0 too"
    )
    says["a DTensor across a boundary"] = (
        "rank 0, stage 0, microbatch 0, action 0F0: TypeError: a DTensor cannot cross"
    )
    for name, pattern in says.items():
        for said, _ in ranks:
            assert re.match(pattern, said[name]), f"{name}: {said[name]}"
    for name in RIGHT:
        expected = in_one_process(name)
        for _, found in ranks:
            for parameter, gradient in found[name].items():
                assert gradient is not None, f"{name}: {parameter} has no gradient"
                torch.testing.assert_close(gradient, expected[parameter], rtol=1e-12, atol=1e-15)
