"""All ranks refuse a call that is wrong on one rank alone.

This holds for every function that all ranks call together.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from course_pp.launch import on_ranks
from course_pp.parallel import (
    DistributedConfig,
    apply_ac,
    apply_fsdp2,
    apply_tensor_parallel,
    auto_split,
    build_pipeline_schedule,
    build_pipeline_stage,
    clip_grad_norm_,
    init_distributed,
)
from course_pp.runtime import Pipeline
from course_pp.schedule import build


def stage_module() -> nn.Sequential:
    return nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4)))


def doors(rank: int, mesh: Any, odd: Any) -> dict[str, Callable[[], Any]]:
    """Return calls of every function that all ranks call together. Rank 1 alone has ``odd``."""

    def here(right: Any) -> Any:
        return odd if rank == 1 else right

    stage = build_pipeline_stage(stage_module(), mesh, "cpu", inputs=torch.zeros(1, 4))
    ready = build_pipeline_schedule(stage, 2, nn.functional.mse_loss)
    schedule = build("1f1b", 2, 2)
    return {
        "fsdp": lambda: apply_fsdp2(here(stage_module()), mesh),
        "fsdp blocks": lambda: apply_fsdp2(stage_module(), mesh, blocks=here(None)),
        "fsdp mesh": lambda: apply_fsdp2(stage_module(), here(mesh)),
        "ac": lambda: apply_ac(here(stage_module()), "full", device_mesh=mesh),
        "ac blocks": lambda: apply_ac(stage_module(), "full", blocks=here(None), device_mesh=mesh),
        "tp": lambda: apply_tensor_parallel(here(stage_module()), mesh, plan={}),
        "tp plan": lambda: apply_tensor_parallel(stage_module(), mesh, plan=here({})),
        "stage": lambda: build_pipeline_stage(
            here(stage_module()), mesh, "cpu", inputs=torch.zeros(1, 4)
        ),
        "stage size": lambda: build_pipeline_stage(stage_module(), mesh, "cpu", here(1), 4),
        "schedule": lambda: build_pipeline_schedule(here(stage), 2, nn.functional.mse_loss),
        "schedule loss": lambda: build_pipeline_schedule(
            stage, 2, nn.MSELoss if rank == 1 else nn.functional.mse_loss
        ),
        "schedule name": lambda: build_pipeline_schedule(
            stage, 2, nn.functional.mse_loss, here("1f1b")
        ),
        "evaluate": lambda: ready.evaluate(torch.zeros(2, 4), on=here("all")),
        "split": lambda: auto_split(here(stage_module()), torch.zeros(1, 4), 2, "time"),
        "split size": lambda: auto_split(
            stage_module(), torch.zeros(1, 5 if rank == 1 else 4), 2, "time"
        ),
        "split count": lambda: auto_split(
            stage_module(), torch.zeros(1, 4), 99 if rank == 0 else 2, "time"
        ),
        "clip": lambda: clip_grad_norm_(here({rank: stage_module()}), 1.0, device_mesh=mesh),
        "clip norm": lambda: clip_grad_norm_({rank: stage_module()}, here(1.0), device_mesh=mesh),
        "runtime": lambda: Pipeline(schedule, here(stage_module()), nn.functional.mse_loss),
        "runtime schedule": lambda: Pipeline(
            here(schedule), stage_module(), nn.functional.mse_loss
        ),
    }


def refusals(rank: int) -> dict[str, str]:
    mesh = init_distributed(DistributedConfig(pp=2, timeout_s=60))
    said = {}
    for odd in (["odd"], "no.such.*"):
        for name, call in doors(rank, mesh, odd).items():
            try:
                call()
            except (ValueError, TypeError) as refusal:
                said[f"{name} {odd}"] = f"{type(refusal).__name__}: {refusal}"
            else:
                pytest.fail(f"{name} takes {odd!r}")
    stage = build_pipeline_stage(stage_module(), mesh, "cpu", inputs=torch.zeros(1, 4))
    ready = build_pipeline_schedule(stage, 2, nn.functional.mse_loss)
    with pytest.raises(ValueError, match="on=") as differs:
        ready.evaluate(torch.zeros(2, 4), on=("last", "all")[rank])
    said["other places"] = str(differs.value)
    apply_fsdp2(stage_module(), mesh)  # nobody is left waiting for an earlier message
    return said


def test_what_is_wrong_on_one_rank_is_refused_on_all_in_the_same_words() -> None:
    first, second = on_ranks(2, refusals, timeout_s=100)
    assert first == second
    assert (
        first["other places"]
        == "rank 1 was given on='all', rank 0 'last': give every rank the same"
    )


def refusals_over_data(rank: int) -> str:
    """Return the refusals of four ranks, of which two hold one stage."""
    mesh = init_distributed(DistributedConfig(pp=2, dp_shard=2, timeout_s=60))
    assert mesh is not None
    with pytest.raises(ValueError, match="blocks") as refused:
        apply_fsdp2(stage_module(), mesh, blocks="no.such.*" if rank == 2 else None)
    return str(refused.value)


def test_a_rank_that_shares_neither_stage_nor_data_is_told_too() -> None:
    assert len(set(on_ranks(4, refusals_over_data, timeout_s=60))) == 1
