"""The memory that a rank keeps in a step: the simulator's bytes, and nothing sent."""

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course_pp.launch import on_ranks
from course_pp.runtime import Pipeline, Recorder
from course_pp.runtime.batch import count_targets, loss_shares
from course_pp.runtime.memory import Meter
from course_pp.runtime.messages import RankPlan, plan_messages
from course_pp.runtime.stage import Stage
from course_pp.schedule import Costs, Edge, Schedule, build, simulate
from course_pp.schedule.edges import lanes_of
from tests.runtime.small import for_rank, stages_of, take_step

pytestmark = pytest.mark.timeout(60)

M, ROWS = 8, 8
WIDTH = 4
# What is received lies in the buffer of its message, which ends in a trailer.
TRAILER = 512
VALUE = ROWS * WIDTH * 8
SCHEDULES = [
    ("gpipe", 4),
    ("1f1b", 4),
    ("interleaved_1f1b", 4),
    ("zb_h1", 4),
    ("1f1b", 2),
    ("zb_h1", 3),
]


def uneven(n: int, width: int = WIDTH) -> list[nn.Module]:
    """Return stages of s % 3 + 1 blocks, each of another size."""
    torch.manual_seed(0)
    stages = []
    for s in range(n):
        blocks = [block(width, 3 * s + 2 * i + 5) for i in range(s % 3 + 1)]
        stages.append(nn.Sequential(*blocks).double())
    return stages


def block(width: int, hidden: int) -> nn.Module:
    return nn.Sequential(
        nn.LayerNorm(width), nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, width)
    )


def batch(width: int = WIDTH, m: int = M) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, target = torch.randn(2, m * ROWS, width, dtype=torch.float64, generator=generator)
    return x, target


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


def stages_for(schedule: Schedule, width: int = WIDTH) -> list[nn.Module]:
    torch.manual_seed(0)
    if not schedule.edges:
        return uneven(schedule.n_stages, width)
    return [Skips(stage, schedule.edges).double() for stage in range(schedule.n_stages)]


def peaks(rank: int, schedule: Schedule, width: int, recompute: bool) -> list[Mapping[str, int]]:
    """The peaks of every rank, in a step after the first."""
    stages = stages_for(schedule, width)
    mine = {stage: stages[stage] for stage in stages_of(rank, schedule)}
    recorder = Recorder(memory=True)
    pipeline = Pipeline(
        schedule, mine, F.mse_loss, recorder=recorder, recompute=recompute, timeout_s=20
    )
    for _ in range(2):
        recorder.clear()
        assert recorder.meter is not None
        assert not any(recorder.meter.kept.values())
        take_step(pipeline, *for_rank(rank, schedule, *batch(width, schedule.n_microbatches)))
    return [memory.peaks for memory in recorder.memory()]


def zeros(is_message: bool, requires_grad: bool = True) -> Tensor:
    storage = torch.zeros(VALUE + (TRAILER if is_message else 0), dtype=torch.uint8)
    return storage[:VALUE].view(torch.float64).view(ROWS, WIDTH).requires_grad_(requires_grad)


def measured_alone(stage: int, schedule: Schedule) -> tuple[int, int, int]:
    """One microbatch in one stage: bytes that ``F`` keeps but for what it reads beyond its
    neighbours, those of them that ``I`` releases, and those that it queues.
    """
    module = stages_for(schedule)[stage]
    meter = Meter()
    reads = getattr(module, "reads", [])
    writes = getattr(module, "writes", [])
    x = zeros(stage > 0 and schedule.placement[stage] != schedule.placement[stage - 1], stage > 0)
    target = zeros(False, False)
    meter.ignore([*module.parameters(), target, *([] if stage else [x])])
    worker = Stage(stage, module, torch.device("cpu"), False, meter, None, writes, writes)
    (share, _), last = (
        loss_shares(count_targets(F.mse_loss, [target] * M)),
        stage == schedule.n_stages - 1,
    )
    loss = (lambda output: share(0, output)) if last else None
    worker.forward(
        0,
        x,
        loss,
        any(part.kind == "I" for part in schedule.parts),
        {name: zeros(False) for name in reads},
    )
    kept = meter.kept["activation"] - len(reads) * VALUE
    of_output = None if last else (zeros(True, False),)
    worker.backward_input(0, of_output, [(zeros(True, False),)] * len(writes))
    after = meter.kept["activation"]
    queued = meter.kept["queued"]
    worker.backward_weight(0)
    assert not any(meter.kept.values())
    return kept, kept - after, queued


DOWN_AND_UP = (Edge("a", 0, (3,)), Edge("b", 1, (2,)))
TO_ALL = (Edge("a", 0, (1, 2, 3)), Edge("b", 1, (3,)))
CASES: list[tuple[str, int, tuple[Edge, ...]]] = [
    *((name, n, ()) for name, n in SCHEDULES),
    ("1f1b", 4, DOWN_AND_UP),
    ("zb_h1", 4, TO_ALL),
    ("zb_v", 2, DOWN_AND_UP),
    ("interleaved_1f1b", 2, TO_ALL),
]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("name", "n", "edges"), CASES)
def test_the_peak_of_activation_bytes_on_every_rank_is_the_simulated_one(
    name: str, n: int, edges: tuple[Edge, ...]
) -> None:
    schedule = build(name, n, M).with_edges(*edges)
    kept, released, _ = zip(
        *(measured_alone(s, schedule) for s in range(schedule.n_stages)), strict=True
    )
    places = schedule.placement
    lanes = lanes_of(schedule.edges)
    values = [
        VALUE + (0 if places[lane.reader] == places[lane.writer] else TRAILER) for lane in lanes
    ]
    costs = Costs(activation=kept, released_by_input_grad=released, edge_activation=values)
    predicted = simulate(schedule, costs)
    assert any(predicted.peak_values) == bool(edges)
    for found in on_ranks(n, peaks, schedule, WIDTH, False, timeout_s=30.0):
        assert tuple(peak["activation"] for peak in found) == predicted.peak_memory(costs)


def test_what_a_stage_keeps_is_what_one_counts_by_hand() -> None:
    cell = ROWS * 8  # a column of a microbatch
    kept, released, queued = measured_alone(1, build("zb_h1", 4, M))
    # Two blocks, 8 and 10 wide inside. Each keeps its input, its output of the norm with the mean
    # and the reciprocal deviation of each row, and the output of tanh; the first one's input is a
    # message.
    received = WIDTH * cell + TRAILER
    assert kept == received + (WIDTH + 2 + 8) * cell + (WIDTH + WIDTH + 2 + 10) * cell
    # W needs the inputs of the linear layers: the outputs of the norms and of tanh.
    assert kept - released == (WIDTH + 8 + WIDTH + 10) * cell
    # And the gradients of their outputs, of which that of the last one is a message.
    assert queued == (8 + WIDTH + 10) * cell + received


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_recomputing_keeps_the_inputs_alone_until_one_microbatch_is_computed_again(
    name: str,
) -> None:
    n = 3
    schedule = build(name, n, M)
    found = on_ranks(n, peaks, schedule, WIDTH, True, timeout_s=30.0)[0]
    in_flight = simulate(schedule, Costs()).peak_activations
    for rank, peak in enumerate(found):
        kept, _, _ = measured_alone(rank, schedule)
        message = 0 if rank == 0 else ROWS * WIDTH * 8 + TRAILER
        assert peak["activation"] == (in_flight[rank] - 1) * message + kept


@pytest.mark.parametrize("n", [2, 4])
def test_queued_output_gradients_are_counted_until_w(n: int) -> None:
    schedule = build("zb_h1", n, M)
    found = on_ranks(n, peaks, schedule, WIDTH, False, timeout_s=30.0)[0]
    for rank, peak in enumerate(found):
        _, _, queued = measured_alone(rank, schedule)
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
def test_buffers_are_two_receives_a_channel_and_the_sends_that_may_not_have_been_taken(
    name: str, m: int
) -> None:
    n, width = 3, 1024  # a message of 64 KiB: small ones are received further ahead
    schedule = build(name, n, m)
    message = ROWS * width * 8 + TRAILER
    report = m * 8 + TRAILER
    found = on_ranks(n, peaks, schedule, width, False, timeout_s=50.0)[0]
    for peak, one in zip(found, plan_messages(schedule), strict=True):
        assert (
            peak["buffer"]
            <= (2 * len(one.incoming) + most_in_flight(one)) * message + 2 * n * report
        )
        if name != "gpipe":
            assert peak["buffer"] <= 4 * n * message  # whatever m is


class Watching(nn.Module):
    """A layer that notes whether its last output's memory is alive at the next call."""

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
        take_step(pipeline, *for_rank(rank, schedule, x, target))
    return [
        alive
        for stage, module in modules.items()
        if stage < schedule.n_stages - 1
        for alive in module.alive
    ]


@pytest.mark.sample(3)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("name", "n"), [("gpipe", 3), ("1f1b", 3), ("interleaved_1f1b", 2)])
def test_an_output_is_freed_once_it_is_sent_long_before_its_backward(
    name: str, n: int, recompute: bool
) -> None:
    schedule = build(name, n, M)
    for rank, alive in enumerate(on_ranks(n, outputs_alive, schedule, recompute, timeout_s=30.0)):
        stages = [stage for stage in stages_of(rank, schedule) if stage < schedule.n_stages - 1]
        assert alive == [False] * len(stages) * 2 * M * (2 if recompute else 1)


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
    assert simulate(build("1f1b", 4, M).forward_only().with_edges(*TO_ALL)).peak_values == (
        0,
        1,
        1,
        2,
    )
