"""Costs of layers on this machine, and the plan that follows from them."""

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from course_pp.runtime import profile_layers, stage
from course_pp.schedule import partition

ROWS = 4


class Slow(nn.Linear):
    """Takes 20 ms for its forward."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.02)
        return super().forward(x)


def test_a_layer_costs_its_time_its_output_and_its_weights() -> None:
    layers = [nn.Embedding(11, 6), Slow(6, 8), nn.Linear(8, 2)]
    layers[2].bias.requires_grad_(False)
    costs = profile_layers(layers, torch.zeros(ROWS, dtype=torch.int64), repeats=2)
    assert [cost.output_bytes for cost in costs] == [4 * ROWS * width for width in (6, 8, 2)]
    assert [cost.weight_bytes for cost in costs] == [4 * 11 * 6, 4 * (6 * 8 + 8), 4 * 8 * 2]
    assert all(cost.time > 0 for cost in costs)
    assert costs[1].time >= 0.02


class Timed(nn.Linear):
    """Takes a chosen time, on a clock that only such layers move."""

    now = 0.0

    def __init__(self, seconds: float) -> None:
        super().__init__(6, 6)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        Timed.now += self.seconds
        return super().forward(x)


def test_the_planner_gives_the_slow_layer_more_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "time", SimpleNamespace(perf_counter=lambda: Timed.now))
    layers = [Timed(seconds) for seconds in (0.001, 0.02, 0.001)]
    found = partition(profile_layers(layers, torch.zeros(ROWS, 6), repeats=2), 3)
    assert max(found.stages, key=lambda stage: stage.replicas).start <= 1
    assert found.slowest == pytest.approx(0.022 / 3)


class Several(nn.Module):
    """Passes on what needs no gradient too."""

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return x * mask, mask


def test_layers_may_return_several_tensors() -> None:
    costs = profile_layers(
        [Several(), Several()], (torch.ones(ROWS, 3, requires_grad=True), torch.ones(ROWS, 3))
    )
    assert [cost.output_bytes for cost in costs] == [2 * 4 * ROWS * 3] * 2


def test_profiling_leaves_gradients_buffers_and_random_numbers_as_they_were() -> None:
    layers = [nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)]
    layers[0].weight.grad = torch.full((3, 3), 7.0)
    before = {name: b.clone() for name, b in layers[1].named_buffers()}
    state = torch.get_rng_state()
    profile_layers(layers, torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(0)))
    assert layers[0].weight.grad.eq(7).all()
    assert layers[0].bias.grad is layers[1].weight.grad is None
    assert all(b.equal(before[name]) for name, b in layers[1].named_buffers())
    assert torch.get_rng_state().equal(state)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: profile_layers([nn.Linear(2, 2)], torch.zeros(1, 2), repeats=0),
            "repeats is 0.*at least 1",
        ),
        (
            lambda: torch.no_grad()(profile_layers)([nn.Linear(2, 2)], torch.zeros(1, 2)),
            "under no_grad",
        ),
    ],
)
def test_what_cannot_be_profiled_is_refused(make: Callable[[], Any], words: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=words):
        make()


def test_a_layer_that_fails_on_what_the_one_before_returned_is_named() -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2") as caught:
        profile_layers([nn.Linear(2, 3), nn.Linear(2, 2)], torch.zeros(1, 2))
    assert caught.value.__notes__ == ["in layer 1 of 2, a Linear"]


def test_a_layer_may_change_its_input_in_place() -> None:
    layers = [nn.Linear(2, 3), nn.ReLU(inplace=True), nn.Linear(3, 1)]
    assert [cost.weight_bytes for cost in profile_layers(layers, torch.ones(4, 2), repeats=1)] == [
        36,
        0,
        16,
    ]
