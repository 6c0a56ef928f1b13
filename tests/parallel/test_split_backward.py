"""A foreign stage's backward in two halves: the weights of linear layers wait for the second."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from course_pp.launch import on_ranks
from course_pp.parallel import apply_ac, build_pipeline_schedule, build_pipeline_stage
from course_pp.weight_gradients import WeightGradients

N_MICROBATCHES, ROWS, WIDTH = 4, 8, 6


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*layers).double()


def queued_on_rank(rank: int, schedule: str, ac: str) -> tuple[list[int], bool, list[bool], list[Tensor]]:
    """Layers in each queue that is computed, whether all were; which weights lack a gradient before; gradients."""
    whole, queued, lacking = model(), [], []
    compute = WeightGradients.compute

    def spy(queue: WeightGradients) -> None:
        queued.append(len(queue._entries))
        lacking.append(whole[0][0].weight.grad is None and whole[0][1].weight.grad is not None)
        compute(queue)

    WeightGradients.compute = spy  # type: ignore[method-assign]
    parts = {0: whole[:2], 1: whole[2:]}
    for part in parts.values():
        apply_ac(part, ac)
    like = torch.empty(ROWS // N_MICROBATCHES, WIDTH, dtype=torch.float64)
    stages = [build_pipeline_stage(p, None, "cpu", stage=i, n_stages=2, inputs=like) for i, p in parts.items()]
    x = torch.linspace(-1, 1, ROWS * WIDTH, dtype=torch.float64).view(ROWS, WIDTH)
    pipeline = build_pipeline_schedule(stages, N_MICROBATCHES, mse_loss, schedule)
    pipeline.step(x, target=x.flip(0))
    return queued, not any(stage._queues for stage in pipeline.stages), lacking, [p.grad for p in whole.parameters()]


@pytest.mark.parametrize(
    ("schedule", "ac", "layers"), [("zb_v", "none", 2), ("zb_v", "full", 0), ("interleaved_1f1b", "none", None)]
)
def test_linear_layers_of_a_foreign_stage_wait_for_the_second_half(schedule: str, ac: str, layers: int | None) -> None:
    [(queued, all_computed, lacking, gradients)] = on_ranks(1, queued_on_rank, schedule, ac)
    assert queued == ([] if layers is None else [layers] * 2 * N_MICROBATCHES)
    assert all_computed
    assert any(lacking) is (layers == 2)
    reference = model()
    x = torch.linspace(-1, 1, ROWS * WIDTH, dtype=torch.float64).view(ROWS, WIDTH)
    mse_loss(reference(x), x.flip(0)).backward()
    expected = [p.grad for p in reference.parameters()]
    torch.testing.assert_close(gradients, expected, rtol=0, atol=1e-12)
