"""A stage's backward in two halves where torch cannot split it.

The gradients of linear layers' weights wait for the second half.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from course_pp.launch import on_ranks
from course_pp.model import CrossEntropy, build_stage_module
from course_pp.parallel import (
    DistributedConfig,
    apply_ac,
    build_pipeline_schedule,
    build_pipeline_stage,
    init_distributed,
)
from course_pp.step.late_weights import WeightGradients
from tests.equality import snapshot_gradients
from tests.parallel.stack import CONFIG, DATA, SEQ_LEN
from tests.parallel.stack import ROWS as BATCH

N_MICROBATCHES, ROWS, WIDTH = 4, 8, 6


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh()) for _ in range(4)
    ]
    return nn.Sequential(*layers).double()


def queued_on_rank(
    rank: int, schedule: str, ac: str
) -> tuple[list[int], bool, list[bool], list[Tensor]]:
    """Run a step with split backwards; return facts on its queues, and the gradients.

    The facts are the number of layers in each queue that is computed, whether no queue is left, and
    whether only the second layer had a gradient before.
    """
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
    stages = [
        build_pipeline_stage(p, None, "cpu", stage=i, n_stages=2, inputs=like)
        for i, p in parts.items()
    ]
    x = torch.linspace(-1, 1, ROWS * WIDTH, dtype=torch.float64).view(ROWS, WIDTH)
    pipeline = build_pipeline_schedule(stages, N_MICROBATCHES, mse_loss, schedule)
    pipeline.step(x, target=x.flip(0))
    return (
        queued,
        not any(stage._queues for stage in pipeline.stages),
        lacking,
        [p.grad for p in whole.parameters()],
    )


@pytest.mark.parametrize(
    ("schedule", "ac", "layers"),
    [("zb_v", "none", 2), ("zb_v", "full", 0), ("interleaved_1f1b", "none", None)],
)
def test_linear_layers_of_a_foreign_stage_wait_for_the_second_half(
    schedule: str, ac: str, layers: int | None
) -> None:
    [(queued, all_computed, lacking, gradients)] = on_ranks(1, queued_on_rank, schedule, ac)
    assert queued == ([] if layers is None else [layers] * 2 * N_MICROBATCHES)
    assert all_computed
    assert any(lacking) is (layers == 2)
    reference = model()
    x = torch.linspace(-1, 1, ROWS * WIDTH, dtype=torch.float64).view(ROWS, WIDTH)
    mse_loss(reference(x), x.flip(0)).backward()
    expected = [p.grad for p in reference.parameters()]
    torch.testing.assert_close(gradients, expected, rtol=0, atol=1e-12)


def shares_a_block(stage: nn.Module) -> None:
    first, second, *_ = stage.layers
    stage.layers[second] = stage.layers[first]


def shares_a_layer(stage: nn.Module) -> None:
    first, second, *_ = stage.layers.values()
    second.attn = first.attn


def compiles_blocks_in_place(stage: nn.Module) -> None:
    for block in stage.layers.values():
        block.compile(backend="aot_eager")


def compiles_itself_in_place(stage: nn.Module) -> None:
    stage.compile(backend="aot_eager")


def own_stages(change: Callable[[nn.Module], None]) -> list[nn.Module]:
    torch.manual_seed(0)
    stages = [build_stage_module(CONFIG, i, 2).double() for i in range(2)]
    for stage in stages:
        change(stage)
    return stages


def split_on_rank(rank: int, change: Callable[[nn.Module], None]) -> list[dict[str, Tensor]]:
    """Return the gradients of this package's stages after two steps, added up."""
    modules = own_stages(change)
    stages = [
        build_pipeline_stage(module, None, "cpu", BATCH // N_MICROBATCHES, SEQ_LEN)
        for module in modules
    ]
    pipeline = build_pipeline_schedule(stages, N_MICROBATCHES, CrossEntropy(), "zb_v")
    for inputs, target in DATA:
        pipeline.step(inputs, target=target)
    return [snapshot_gradients([module]) for module in modules]


@pytest.mark.parametrize(
    "change", [shares_a_block, shares_a_layer, compiles_blocks_in_place, compiles_itself_in_place]
)
def test_own_stages_that_torch_cannot_split_have_the_gradients_of_one_process(change: Any) -> None:
    [found] = on_ranks(1, split_on_rank, change, timeout_s=60)
    reference = own_stages(
        change if change in (shares_a_block, shares_a_layer) else lambda stage: None
    )
    for inputs, target in DATA:
        CrossEntropy()(reference[1](reference[0](inputs)), target).backward()
    expected = [snapshot_gradients([module]) for module in reference]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def wrapped_on_rank(rank: int) -> str:
    """Return the refusal of a stage that is compiled on rank 1 alone."""
    mesh = init_distributed(DistributedConfig(pp=2))
    like = torch.empty(2, WIDTH, dtype=torch.float64)
    module = model()[:2] if rank == 0 else torch.compile(model()[2:], backend="aot_eager")
    stage = build_pipeline_stage(module, mesh, "cpu", inputs=like)
    with pytest.raises(ValueError, match="apply_compile") as refusal:
        build_pipeline_schedule(stage, N_MICROBATCHES, mse_loss, "zb_h1")
    return str(refusal.value)


def test_a_stage_wrapped_by_torch_compile_is_refused_on_every_rank() -> None:
    assert len(set(on_ranks(2, wrapped_on_rank, timeout_s=60))) == 1
