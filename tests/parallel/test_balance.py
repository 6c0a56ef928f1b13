"""Cuts are as even as contiguous cuts can be, in parameters, in time or in memory."""

from itertools import chain, combinations, pairwise

import pytest
import torch
from torch import nn

from course_pp.parallel import auto_split
from course_pp.parallel.split import cutting
from source_code.hf_pp.families import build, example, sequential

PARTS = 6  # modules of the sequential model


def cuts(stages: list[nn.Module]) -> list[list[int]]:
    """Return the numbers of a Sequential's modules that each stage holds."""
    return [
        [
            int(name)
            for name, part in stage.named_children()
            if next(part.parameters(), None) is not None
        ]
        for stage in stages
    ]


def least_largest(costs: list[int], n_stages: int) -> int:
    """Return the cost of the slowest stage in the best contiguous cut, by trying all cuts."""
    every = (
        (0, *chosen, len(costs)) for chosen in combinations(range(1, len(costs)), n_stages - 1)
    )
    return min(max(sum(costs[a:b]) for a, b in pairwise(each)) for each in every)


@pytest.mark.parametrize(
    "times",
    [[1] * 6, [0, 1, 1, 1, 1, 3], [5, 1, 1, 1, 1, 5], [0, 9, 1, 1, 1, 1], [2, 7, 1, 8, 2, 8]],
)
@pytest.mark.parametrize("n_stages", [2, 3, 4])
def test_the_slowest_stage_is_as_fast_as_can_be(
    times: list[int], n_stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cutting, "_measured", lambda *_: [cutting._Cost(time, 0) for time in times])
    held = cuts(auto_split(build("Sequential"), example("Sequential"), n_stages, by="time"))
    assert list(chain.from_iterable(held)) == list(range(PARTS))
    assert max(sum(times[i] for i in each) for each in held) == least_largest(times, n_stages)


def test_a_weight_counts_once_in_each_stage_that_holds_it() -> None:
    stages = auto_split(build("one block, repeated"), example("one block, repeated"), 2)
    assert stages[0].ties
    assert (
        max(sum(p.numel() for p in stage.parameters()) for stage in stages)
        < 2 * 3 * 32 * 48 + 2 * 96 * 32
    )


def test_early_stages_get_less_where_memory_is_what_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stage 0 of 1F1B keeps as many microbatches as there are stages."""
    monkeypatch.setattr(cutting, "_measured", lambda *_: [cutting._Cost(0, 10**6)] * PARTS)
    held = cuts(auto_split(build("Sequential"), example("Sequential"), 3, by="memory"))
    assert [len(each) for each in held] == [1, 2, 3]


def test_a_call_is_measured_forward_and_backward() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), nn.Tanh())
    recording = cutting.Recording(dict(model.named_children()), example=((torch.ones(5, 8),), {}))
    costs = cutting._measured(model, recording)
    assert [cost.n_bytes for cost in costs] == [5 * 8 * 4] * 3  # what went in, and tanh's result
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("by", ["time", "memory"])
def test_nothing_can_be_measured_on_the_meta_device(by: str) -> None:
    with torch.device("meta"):
        model = sequential()
    assert len(auto_split(model, example("Sequential").to("meta"), 2)) == 2
    with pytest.raises(
        ValueError,
        match=f"by is '{by}'.*meta device: give by='parameters', or a model with weights",
    ):
        auto_split(model, example("Sequential").to("meta"), 2, by=by)
