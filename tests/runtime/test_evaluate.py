"""A pipeline that returns outputs: those of one process, wherever they are wanted."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course_pp.launch import on_ranks
from course_pp.runtime import Pipeline, StepFailed
from course_pp.schedule import build
from tests.grids import crossed
from tests.processes import no_process_left
from tests.runtime.graphs import WIDTH, linked_stages, random_graph, through
from tests.runtime.small import for_rank, stages_of

M = 4
NAMES = ["1f1b", "interleaved_1f1b", "zb_v", "dualpipe_v", "chimera", "gpipe"]


def batch() -> Tensor:
    # microbatches of 3, 2, 2 and 2
    return torch.linspace(-1, 1, 9 * WIDTH, dtype=torch.float64).view(9, WIDTH)


def evaluated(rank: int, name: str, trains: bool) -> list[Any]:
    """The outputs on the last rank, then on all; between two training steps if it ``trains``."""
    schedule = build(name, 2, M)
    schedule = schedule if trains else schedule.forward_only()
    stages = linked_stages(random_graph(1, schedule.n_stages))
    mine = {stage: stages[stage] for stage in stages_of(rank, schedule)}
    pipeline = Pipeline(schedule, mine, F.mse_loss if trains else None, timeout_s=20)
    inputs, targets = for_rank(rank, schedule, batch(), batch())
    found = []
    for on in ("last", "all"):
        if trains:
            pipeline.step(inputs, target=targets)
        found.append(pipeline.evaluate(inputs, on=on))
    assert all(p.grad is None for m in mine.values() for p in m.parameters()) != trains
    return found


@pytest.mark.parametrize(("name", "trains"), crossed(NAMES, [True, False]))
def test_the_outputs_are_those_of_one_process(name: str, trains: bool) -> None:
    schedule = build(name, 2, M)
    with torch.no_grad():
        expected = through(linked_stages(random_graph(1, schedule.n_stages)), batch())
    with no_process_left():
        ranks = on_ranks(2, evaluated, name, trains, timeout_s=30)
    for rank, (last, everywhere) in enumerate(ranks):
        assert (last is not None) == (rank in schedule.placement[-1])
        for found in (last, everywhere):
            if found is not None:
                torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


class Keeps(nn.Module):
    """Writes what it returns."""

    writes = ("kept",)

    def forward(self, x: Tensor) -> Any:
        x = x + 1
        return x, {"kept": x}


class Overwrites(nn.Module):
    """Adds what it reads, and changes all that it was given."""

    reads = ("kept",)

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        return x.mul_(2).add_(kept.add_(5))


@pytest.mark.parametrize("kind", [torch.float64, torch.int64])
def test_a_stage_that_changes_its_input_leaves_the_values_of_others_as_they_were(
    kind: torch.dtype,
) -> None:
    """As on ranks of their own, where each has received a copy."""
    pipeline = Pipeline(
        build("interleaved_1f1b", 1, 2, n_chunks=4), dict(enumerate([Keeps(), *[Overwrites()] * 3]))
    )
    x = torch.arange(4).to(kind)
    assert torch.equal(pipeline.evaluate(x), 15 * (x + 1) + 5 * 7)


class Several(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"mean": x.mean(), "each": (x, x > 0), "name": "x"}


def in_containers(rank: int, *inputs: Tensor, **given: Any) -> Any:
    return Pipeline(build("gpipe", 2, 2).forward_only(), [None, Several()][rank]).evaluate(
        *inputs, **given, on="all"
    )


def test_containers_stay_and_shapes_that_do_not_fit_together_stay_apart() -> None:
    x = torch.arange(6.0).view(3, 2)
    for found in on_ranks(2, in_containers, x):
        assert found["name"] == "x"
        torch.testing.assert_close(found["mean"], torch.stack([x[:2].mean(), x[2:].mean()]))
        torch.testing.assert_close(found["each"], (x, x > 0))
    for found in on_ranks(2, partial(in_containers, arg_mbs=[(x,), (torch.ones(1, 3),)])):
        assert [each["each"][0].shape for each in found] == [(3, 2), (1, 3)]


def misused(rank: int) -> list[str]:
    layer = nn.Linear(WIDTH, WIDTH)
    said = []
    for call in (
        lambda p: p.step(torch.ones(M, WIDTH), target=torch.ones(M, WIDTH)),
        lambda p: p.evaluate(torch.ones(M, WIDTH), on="first"),
        lambda p: p.evaluate(torch.ones(M, WIDTH), on=("first", "last")[rank]),
        lambda p: p.evaluate(torch.ones(M, WIDTH), on=("last", "all")[rank]),
        lambda p: p.evaluate(torch.ones(M, WIDTH + 1)),
        lambda p: p.evaluate(None),
    ):
        pipeline = Pipeline(build("1f1b", 2, M), layer, timeout_s=20)
        with pytest.raises((ValueError, StepFailed)) as caught:
            call(pipeline)
        said.append(str(caught.value))
    return said


def test_misuse_is_refused_by_name_on_every_rank() -> None:
    for no_loss, odd_place, odd_on_one, differs, wrong_shape, no_inputs in on_ranks(
        2, misused, timeout_s=30
    ):
        assert (
            no_loss
            == "this pipeline has no loss_fn: build it with one, or call evaluate for outputs"
        )
        assert "on='first'" in odd_place
        assert "on='first'" in odd_on_one
        assert "on is 'last' on a rank and 'all' on another: give every rank the same" in differs
        assert wrong_shape.startswith("rank 0, stage 0, microbatch 0, action 0F0: RuntimeError: ")
        assert "mat1 and mat2" in wrong_shape
        assert "inputs is None on a rank that needs it" in no_inputs
