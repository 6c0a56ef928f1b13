"""What a rank keeps in a step: the bytes that the simulator says, with values of edges, and nothing that was sent."""

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course_pp.launch import on_ranks
from course_pp.runtime import Pipeline, Recorder
from course_pp.runtime.batch import loss_shares
from course_pp.runtime.memory import Meter
from course_pp.runtime.messages import RankPlan, plan_messages
from course_pp.runtime.stage import Stage
from course_pp.schedule import Costs, Edge, Schedule, build, simulate
from course_pp.schedule.edges import lanes_of
from tests.runtime.small import for_rank, stages_of

pytestmark = pytest.mark.timeout(60)

M, ROWS = 8, 8
WIDTH = 4
# What is received lies in the buffer of its message, which ends in a trailer.
TRAILER = 512
SCHEDULES = [
    ("gpipe", 4),
    ("1f1b", 4),
    ("interleaved_1f1b", 4),
    ("zb_h1", 4),
    ("1f1b", 2),
    ("zb_h1", 3),
]


def uneven(n: int, width: int = WIDTH) -> list[nn.Module]:
    """Stage s has s % 3 + 1 blocks, each of another size."""
    torch.manual_seed(0)
    return [nn.Sequential(*(block(width, 3 * s + 2 * i + 5) for i in range(s % 3 + 1))).double() for s in range(n)]


def block(width: int, hidden: int) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, width))


def batch(width: int = WIDTH, m: int = M) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, target = torch.randn(2, m * ROWS, width, dtype=torch.float64, generator=generator)
    return x, target


def peaks(rank: int, schedule: Schedule, width: int, recompute: bool) -> list[Mapping[str, int]]:
    """The peaks of every rank, in a step after the first."""
    stages = [stage_with(s, schedule.edges) for s in range(schedule.n_stages)] if schedule.edges else []
    stages = stages or uneven(schedule.n_stages, width)
    mine = {stage: stages[stage] for stage in stages_of(rank, schedule)}
    recorder = Recorder(memory=True)
    pipeline = Pipeline(schedule, mine, F.mse_loss, recorder=recorder, recompute=recompute, timeout_s=20)
    for _ in range(2):
        recorder.clear()
        assert recorder.meter is not None
        assert not any(recorder.meter.kept.values())
        pipeline.step(*for_rank(rank, schedule, *batch(width, schedule.n_microbatches)))
    return [memory.peaks for memory in recorder.memory()]


def as_received(shape: tuple[int, ...]) -> Tensor:
    storage = torch.zeros(torch.Size(shape).numel() * 8 + TRAILER, dtype=torch.uint8)
    return storage[:-TRAILER].view(torch.float64).view(shape)


def measured_alone(stage: int, n_stages: int, split: bool, recompute: bool) -> tuple[int, int, int]:
    """One microbatch in one stage: bytes that ``F`` keeps, those of them that ``I`` releases, those that it queues."""
    module, meter, shape = uneven(n_stages)[stage], Meter(), (ROWS, WIDTH)
    x = torch.zeros(shape, dtype=torch.float64) if stage == 0 else as_received(shape).requires_grad_()
    target = torch.zeros(shape, dtype=torch.float64)
    meter.ignore([*module.parameters(), target, *([x] if stage == 0 else [])])
    worker = Stage(stage, module, torch.device("cpu"), recompute, meter)
    share = loss_shares(F.mse_loss, [target] * M)
    last = stage == n_stages - 1
    worker.forward(0, x, (lambda output: share(0, output)) if last else None, split)
    kept = meter.kept["activation"]
    worker.backward_input(0, None if last else (as_received(shape),))
    after, queued = meter.kept["activation"], meter.kept["queued"]
    worker.backward_weight(0)
    assert not any(meter.kept.values())
    return kept, kept - after, queued


@pytest.mark.sample(3)
@pytest.mark.parametrize(("name", "n"), SCHEDULES)
def test_the_peak_of_activation_bytes_on_every_rank_is_the_simulated_one(name: str, n: int) -> None:
    schedule = build(name, n, M)
    split = any(part.kind == "I" for part in schedule.parts)
    alone = [measured_alone(stage, schedule.n_stages, split, False) for stage in range(schedule.n_stages)]
    kept, released, _ = zip(*alone, strict=True)
    assert len(set(kept)) >= min(3, n)
    costs = Costs(activation=kept, released_by_input_grad=released)
    expected = simulate(schedule, costs).peak_memory(costs)
    found = on_ranks(n, peaks, schedule, WIDTH, False, timeout_s=30.0)
    assert all(one == found[0] for one in found)
    assert tuple(peak["activation"] for peak in found[0]) == expected


def test_what_a_stage_keeps_is_what_one_counts_by_hand() -> None:
    cell = ROWS * 8  # a column of a microbatch
    kept, released, queued = measured_alone(1, 4, True, False)
    # Two blocks, 8 and 10 wide inside. Each keeps its input, its output of the norm with the mean and the reciprocal
    # deviation of each row, and the output of tanh; the first one's input is a message.
    received = WIDTH * cell + TRAILER
    assert kept == received + (WIDTH + 2 + 8) * cell + (WIDTH + WIDTH + 2 + 10) * cell
    # W needs the inputs of the linear layers: the outputs of the norms and of tanh.
    assert kept - released == (WIDTH + 8 + WIDTH + 10) * cell
    # And the gradients of their outputs, of which that of the last one is a message.
    assert queued == (8 + WIDTH + 10) * cell + received


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_recomputing_keeps_the_inputs_alone_until_one_microbatch_is_computed_again(name: str) -> None:
    n = 3
    schedule = build(name, n, M)
    found = on_ranks(n, peaks, schedule, WIDTH, True, timeout_s=30.0)[0]
    in_flight = simulate(schedule, Costs()).peak_activations
    for rank, peak in enumerate(found):
        kept, _, _ = measured_alone(rank, n, False, False)
        message = 0 if rank == 0 else ROWS * WIDTH * 8 + TRAILER
        assert peak["activation"] == (in_flight[rank] - 1) * message + kept


@pytest.mark.parametrize("n", [2, 4])
def test_queued_output_gradients_are_counted_until_w(n: int) -> None:
    schedule = build("zb_h1", n, M)
    found = on_ranks(n, peaks, schedule, WIDTH, False, timeout_s=30.0)[0]
    for rank, peak in enumerate(found):
        _, _, queued = measured_alone(rank, n, True, False)
        waiting, most = 0, 0
        for action in schedule.actions[rank]:
            for part in action.parts:
                waiting += {"I": 1, "W": -1}.get(part.kind, 0)
                most = max(most, waiting)
        assert most > 0
        assert peak["queued"] == most * queued


def most_in_flight(of: RankPlan) -> int:
    """Messages of this rank that the schedule does not yet show to be taken, at most."""
    in_flight, most = 0, 0
    for step in of.steps:
        in_flight -= len(step.arrived)
        in_flight += len(step.sends)
        most = max(most, in_flight)
    return most


@pytest.mark.sample(3)
@pytest.mark.parametrize("m", [8, 16])
@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "gpipe"])
def test_buffers_are_two_receives_a_channel_and_the_sends_that_may_not_have_been_taken(name: str, m: int) -> None:
    n, width = 3, 1024  # a message of 64 KiB: small ones are received further ahead
    schedule = build(name, n, m)
    message, report = ROWS * width * 8 + TRAILER, m * 8 + TRAILER
    found = on_ranks(n, peaks, schedule, width, False, timeout_s=50.0)[0]
    for peak, one in zip(found, plan_messages(schedule), strict=True):
        assert peak["buffer"] <= (2 * len(one.incoming) + most_in_flight(one)) * message + 2 * n * report
        if name != "gpipe":
            assert peak["buffer"] <= 4 * n * message  # whatever m is


class Watching(nn.Module):
    """A layer that notes whether the memory of its last output is still there when it is called again."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.alive: list[bool] = []
        self._last: Callable[[], Any] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        self.alive.append(self._last() is not None)
        y = self.layer(x)
        self._last = weakref.ref(y.untyped_storage())
        return y


def outputs_alive(rank: int, schedule: Schedule, recompute: bool) -> list[bool]:
    modules = {stage: Watching() for stage in stages_of(rank, schedule)}
    pipeline = Pipeline(schedule, modules, F.mse_loss, recompute=recompute, timeout_s=20)
    x, target = torch.randn(2, 2 * M, 3, WIDTH)
    for _ in range(2):
        pipeline.step(*for_rank(rank, schedule, x, target))
    return [alive for stage, module in modules.items() if stage < schedule.n_stages - 1 for alive in module.alive]


@pytest.mark.sample(3)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("name", "n"), [("gpipe", 3), ("1f1b", 3), ("interleaved_1f1b", 2)])
def test_an_output_is_freed_once_it_is_sent_long_before_its_backward(name: str, n: int, recompute: bool) -> None:
    schedule = build(name, n, M)
    for rank, alive in enumerate(on_ranks(n, outputs_alive, schedule, recompute, timeout_s=30.0)):
        stages = [stage for stage in stages_of(rank, schedule) if stage < schedule.n_stages - 1]
        assert alive == [False] * len(stages) * 2 * M * (2 if recompute else 1)


# What values of edges add.

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


def stage_with(stage: int, edges: tuple[Edge, ...]) -> Skips:
    torch.manual_seed(0)
    return Skips(stage, edges).double()


def kept_alone(stage: int, schedule: Schedule, split: bool) -> tuple[int, int]:
    """One microbatch in one stage, without the values that it reads: bytes that ``F`` keeps, and ``I`` releases."""
    module, meter = stage_with(stage, schedule.edges), Meter()
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


CASES = [("1f1b", 4, DOWN_AND_UP), ("zb_h1", 4, TO_ALL), ("zb_v", 2, DOWN_AND_UP), ("interleaved_1f1b", 2, TO_ALL)]


@pytest.mark.parametrize(("name", "n_ranks", "edges"), CASES, ids=[case[0] for case in CASES])
def test_with_edges_the_peak_is_the_simulated_one_too(name: str, n_ranks: int, edges: tuple[Edge, ...]) -> None:
    schedule = build(name, n_ranks, M).with_edges(*edges)
    costs = costs_of(schedule)
    predicted = simulate(schedule, costs)
    for found in on_ranks(n_ranks, peaks, schedule, WIDTH, False, timeout_s=30.0):
        assert tuple(peak["activation"] for peak in found) == predicted.peak_memory(costs)
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
    assert simulate(build("1f1b", 4, M).forward_only().with_edges(*TO_ALL)).peak_values == (0, 1, 1, 2)
