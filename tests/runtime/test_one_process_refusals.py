"""Failures in one process, without other ranks to tell."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course_pp.runtime import Pipeline
from course_pp.schedule import build

M, WIDTH = 4, 3


def pipeline(stage: nn.Module | None = None, **options: object) -> Pipeline:
    stage = stage or nn.Linear(WIDTH, WIDTH)
    return Pipeline(build("1f1b", 1, M), stage, F.mse_loss, **options)


def test_a_training_step_under_no_grad_is_refused_and_evaluation_is_not() -> None:
    batch = torch.ones(M, WIDTH)
    with torch.no_grad(), pytest.raises(RuntimeError, match="no_grad"):
        pipeline().step(batch, target=batch)
    evaluation = Pipeline(build("gpipe", 1, M).forward_only(), nn.Linear(WIDTH, WIDTH), F.mse_loss)
    with torch.no_grad():
        loss = evaluation.step(batch, target=batch)
    assert (loss.dtype, loss.requires_grad, len(evaluation.shares)) == (torch.float64, False, M)


def test_a_weight_in_two_ties_is_refused() -> None:
    schedule = build("interleaved_1f1b", 1, M, n_chunks=3)
    stages = {stage: nn.Linear(WIDTH, WIDTH) for stage in range(3)}
    ties = [{0: "weight", 1: "weight"}, {1: "weight", 2: "weight"}]
    with pytest.raises(ValueError, match="'weight' of stage 1 is in two ties"):
        Pipeline(schedule, stages, F.mse_loss, tied=ties)
    Pipeline(schedule, stages, F.mse_loss, tied=[{0: "weight", 1: "weight", 2: "weight"}])


@pytest.mark.parametrize(
    ("other", "kind"),
    [
        (nn.Linear(WIDTH, WIDTH).requires_grad_(False), r"\(3, 3\) torch.float32 frozen"),
        (nn.Linear(WIDTH, 1), r"\(1, 3\) torch.float32 trained"),
        (nn.Linear(WIDTH, WIDTH).double(), r"\(3, 3\) torch.float64 trained"),
    ],
    ids=["frozen", "shape", "dtype"],
)
def test_a_tie_of_what_cannot_be_one_weight_is_refused(other: nn.Module, kind: str) -> None:
    stages = {0: nn.Linear(WIDTH, WIDTH), 1: other}
    pattern = (
        rf"\(3, 3\) torch.float32 trained in stage 0, but {kind} in stage 1: .*train or freeze it"
        r" in all"
    )
    with pytest.raises(ValueError, match=pattern):
        Pipeline(
            build("interleaved_1f1b", 1, M), stages, F.mse_loss, tied=[{0: "weight", 1: "weight"}]
        )


class ChangesItsInput(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x.add_(1), self.weight)

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH))


def test_a_stage_that_changes_its_input_in_place_is_recomputed_right() -> None:
    gradients = []
    for recompute in (False, True):
        stage = ChangesItsInput()
        batch = torch.ones(M, WIDTH)
        pipeline(stage, recompute=recompute).step(batch, target=torch.zeros(M, WIDTH))
        gradients.append(stage.weight.grad)
        assert torch.equal(batch, torch.full((M, WIDTH), 2.0))
    assert torch.equal(*gradients)


def test_a_stage_that_changes_what_it_received_in_place_is_named() -> None:
    stages = {
        0: nn.Linear(WIDTH, WIDTH),
        1: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)),
    }
    run = Pipeline(build("interleaved_1f1b", 1, M, n_chunks=2), stages, F.mse_loss)
    batch = torch.ones(M, WIDTH)
    with pytest.raises(
        RuntimeError, match=r"stage 1, microbatch 0, action 1F0: .*in-place operation"
    ):
        run.step(batch, target=batch)


def test_an_interrupted_pipeline_cannot_go_on() -> None:
    class Interrupted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyboardInterrupt

    batch = torch.ones(M, WIDTH)
    stopped = pipeline(Interrupted())
    with pytest.raises(KeyboardInterrupt):
        stopped.step(batch, target=batch)
    with pytest.raises(
        RuntimeError,
        match="microbatch 0, action 0F0: interrupted",
    ):
        stopped.step(batch, target=batch)
