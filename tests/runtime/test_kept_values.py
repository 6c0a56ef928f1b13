"""What values of edges add to a rank's memory: in bytes what the simulator says, split backward included."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course_pp.launch import on_ranks
from course_pp.runtime import Pipeline, Recorder
from course_pp.runtime.batch import loss_shares
from course_pp.runtime.memory import Meter
from course_pp.runtime.stage import Stage
from course_pp.schedule import Costs, Edge, Schedule, build, simulate
from course_pp.schedule.edges import lanes_of
from tests.runtime.small import for_rank, forward_only, stages_of
from tests.runtime.test_kept_memory import ROWS, TRAILER, WIDTH, M, as_received, batch

pytestmark = pytest.mark.timeout(60)

VALUE = ROWS * WIDTH * 8
DOWN_AND_UP = (Edge("a", 0, (3,)), Edge("b", 1, (2,)))
TO_ALL = (Edge("a", 0, (1, 2, 3)), Edge("b", 1, (3,)))


class Skips(nn.Module):
    """A layer that shares no storage with what comes in or goes out, so that bytes add up."""

    def __init__(self, stage: int, edges: tuple[Edge, ...]) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.writes = [edge.name for edge in edges if edge.writer == stage]
        self.reads = [edge.name for edge in edges if stage in edge.readers]

    def forward(self, x: Tensor, **read: Tensor) -> Any:
        hidden = torch.tanh(self.layer(x))
        output = sum(map(torch.sin, read.values()), start=hidden * 1.5)
        return (output, dict.fromkeys(self.writes, hidden * 2)) if self.writes else output


def stage_of(stage: int, edges: tuple[Edge, ...]) -> Skips:
    torch.manual_seed(0)
    return Skips(stage, edges).double()


def kept_alone(stage: int, schedule: Schedule, split: bool) -> tuple[int, int]:
    """One microbatch in one stage, without the values that it reads: bytes that ``F`` keeps, and ``I`` releases."""
    module, meter = stage_of(stage, schedule.edges), Meter()
    x, target = as_received((ROWS, WIDTH)), torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    if stage and schedule.placement[stage] == schedule.placement[stage - 1]:
        x = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    meter.ignore([*module.parameters(), target, *([] if stage else [x])])
    share, last = loss_shares(F.mse_loss, [target] * M), stage == schedule.n_stages - 1
    read = {name: torch.zeros(ROWS, WIDTH, dtype=torch.float64).requires_grad_() for name in module.reads}
    worker = Stage(stage, module, torch.device("cpu"), False, meter, None, module.writes, module.writes)
    loss = (lambda output: share(0, output)) if last else None
    worker.forward(0, x.requires_grad_(stage > 0), loss, split, read)
    kept = meter.kept["activation"] - len(read) * VALUE
    worker.backward_input(0, None if last else (x,), [(x,)] * len(module.writes))
    return kept, kept - meter.kept["activation"]


def costs_of(schedule: Schedule) -> Costs:
    split = any(part.kind == "I" for part in schedule.parts)
    kept, released = zip(*(kept_alone(s, schedule, split) for s in range(schedule.n_stages)), strict=True)
    places, lanes = schedule.placement, lanes_of(schedule.edges)
    values = [VALUE + (0 if places[lane.reader] == places[lane.writer] else TRAILER) for lane in lanes]
    return Costs(activation=kept, released_by_input_grad=released, edge_activation=values)


def measured(rank: int, schedule: Schedule) -> tuple[int, ...]:
    """The most bytes that each rank keeps as activations, in a step after the first."""
    mine = {stage: stage_of(stage, schedule.edges) for stage in stages_of(rank, schedule)}
    recorder = Recorder(memory=True)
    pipeline = Pipeline(schedule, mine, F.mse_loss, recorder=recorder, timeout_s=20)
    for _ in range(2):
        recorder.clear()
        assert recorder.meter is not None
        assert not any(recorder.meter.kept.values())
        pipeline.step(*for_rank(rank, schedule, *batch(m=schedule.n_microbatches)))
    return tuple(memory.peaks["activation"] for memory in recorder.memory())


CASES = [("1f1b", 4, DOWN_AND_UP), ("zb_h1", 4, TO_ALL), ("zb_v", 2, DOWN_AND_UP), ("interleaved_1f1b", 2, TO_ALL)]


@pytest.mark.parametrize(("name", "n_ranks", "edges"), CASES, ids=[case[0] for case in CASES])
def test_the_peak_of_bytes_on_every_rank_is_the_simulated_one(name: str, n_ranks: int, edges: tuple[Edge, ...]) -> None:
    schedule = build(name, n_ranks, M).with_edges(*edges)
    costs = costs_of(schedule)
    predicted = simulate(schedule, costs)
    for found in on_ranks(n_ranks, measured, schedule, timeout_s=30.0):
        assert found == predicted.peak_memory(costs)
    assert any(predicted.peak_values)


def test_a_value_stays_from_its_first_use_on_a_rank_to_its_last() -> None:
    line = simulate(build("1f1b", 4, M).with_edges(*DOWN_AND_UP))
    assert line.peak_values == (0, 0, line.peak_activations[2], line.peak_activations[3])
    v = simulate(build("zb_v", 2, M).with_edges(Edge("a", 0, (3,))))
    held = most = 0
    for span in v.by_rank[0]:
        held += str(span.action).startswith("0F")
        most = max(most, held)
        held -= str(span.action).startswith(("3I", "3B"))
    assert v.peak_values == (most, 0)
    assert simulate(forward_only(build("1f1b", 4, M)).with_edges(*TO_ALL)).peak_values == (0, 1, 1, 2)
