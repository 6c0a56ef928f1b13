"""Schedules that hold every stage on two ranks: the copies must start equal."""

import pytest
import torch
from torch import nn

from course_pp.launch import on_ranks
from course_pp.runtime import Pipeline
from course_pp.schedule import build


def refused_on_rank(rank: int) -> str:
    torch.manual_seed(0)
    stages = {stage: nn.Linear(2, 2) for stage in (0, 1)}
    if rank == 1:
        with torch.no_grad():
            stages[0].weight[0, 0] += 1e-6
    with pytest.raises(ValueError, match="stage 0") as refusal:
        Pipeline(build("chimera", 2, 4), stages, nn.functional.mse_loss, timeout_s=20)
    return str(refusal.value)


def test_copies_of_a_stage_that_start_unequal_are_refused_on_every_rank_by_name() -> None:
    for refusal in on_ranks(2, refused_on_rank, timeout_s=40):
        assert "'weight' of stage 0" in refusal
        assert "give all replicas of a stage the same parameters, with equal values" in refusal
