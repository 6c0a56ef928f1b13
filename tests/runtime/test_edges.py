"""Stages that read values of distant stages: right gradients, and no value sent twice."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from course_pp.launch import on_ranks
from course_pp.runtime import EmulatedCluster, Pipeline, Recorder, StepFailed
from course_pp.schedule import Costs, Edge, Schedule, Timeline, build
from tests.equality import GRADIENT_TOLERANCE
from tests.runtime.graphs import WIDTH, linked_stages, random_graph, schedule_for, through
from tests.runtime.random_schedules import first_ranks
from tests.runtime.small import for_rank, stages_of, take_step
from tests.runtime.stepping import count_messages, gradients

SEEDS = range(200)
FEW_SEEDS = range(8)
STEPS = 2


@dataclass
class Ran:
    """One rank's losses, gradients by stage and name, values over edges, and sends."""

    losses: list[float]
    gradients: dict[str, Tensor | None]
    crossed: list[tuple[int, str]]
    n_sent: int
    n_planned: int


def batch_for(schedule: Schedule) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (2, 2 * schedule.n_microbatches + 1, WIDTH)
    return torch.randn(shape, generator=generator, dtype=torch.float64).unbind()


def in_a_pipeline(rank: int, seed: int, group: Any) -> Ran:
    schedule = schedule_for(seed)
    stages = linked_stages(random_graph(seed, schedule.n_stages))
    mine = {stage: stages[stage] for stage in stages_of(rank, schedule)}
    recompute = seed % 5 == 3
    pipeline = Pipeline(
        schedule, mine, nn.functional.mse_loss, group=group, timeout_s=30, recompute=recompute
    )
    arguments = for_rank(rank, schedule, *batch_for(schedule))
    losses = [take_step(pipeline, *arguments).item()]
    wire = count_messages(pipeline)
    rows = pipeline._executor.plan.outgoing
    losses.append(take_step(pipeline, *arguments).item())
    named = [
        (target, str(m))
        for target, row in rows.items()
        for m in row
        if getattr(m.content, "name", "")
    ]
    return Ran(losses, gradients(mine), named, len(wire.sent), sum(map(len, rows.values())))


def run_all_on_rank(rank: int, seeds: range) -> dict[int, Ran]:
    groups = first_ranks(rank)
    results = {}
    for seed in seeds:
        n_ranks = schedule_for(seed).n_ranks
        if rank < n_ranks:
            try:
                results[seed] = in_a_pipeline(rank, seed, groups.get(n_ranks))
            except Exception as error:
                error.add_note(f"with seed {seed}")
                raise
    return results


def expected_crossings(seed: int) -> Counter[str]:
    """Return the messages over edges: one to each reading rank, and one gradient back."""
    schedule = schedule_for(seed)
    found = Counter[str]()
    graph = random_graph(seed, schedule.n_stages)
    for writer, names in enumerate(graph.writes):
        for name in names:
            for i in range(schedule.n_microbatches):
                readers = [stage for stage, read in enumerate(graph.reads) if name in read]
                ranks = {schedule.rank_of(reader, i) for reader in readers} - {
                    schedule.rank_of(writer, i)
                }
                found[f"the value {name!r} of microbatch {i} from stage {writer}"] += len(ranks)
                for rank in ranks:
                    first = min(reader for reader in readers if schedule.rank_of(reader, i) == rank)
                    found[f"the gradient of {name!r} of microbatch {i} from stage {first}"] += 1
    return +found


@pytest.mark.parametrize("seeds", [FEW_SEEDS, pytest.param(SEEDS, marks=pytest.mark.full)], ids=str)
def test_random_stage_graphs_have_the_gradients_of_one_process_and_send_nothing_twice(
    seeds: range, subtests: pytest.Subtests
) -> None:
    ranks = on_ranks(4, run_all_on_rank, seeds, timeout_s=110)
    for seed in seeds:
        with subtests.test(seed=seed):
            schedule = schedule_for(seed)
            stages = linked_stages(random_graph(seed, schedule.n_stages))
            inputs, targets = batch_for(schedule)
            loss = nn.functional.mse_loss(through(stages, inputs), targets)
            (STEPS * loss).backward()
            expected = gradients(dict(enumerate(stages)))
            ran = [results[seed] for results in ranks[: schedule.n_ranks]]
            for rank, each in enumerate(ran):
                assert each.losses == pytest.approx(
                    [loss.item()] * STEPS, rel=GRADIENT_TOLERANCE
                ), f"rank {rank}"
                mine = {name: expected[name] for name in each.gradients}
                torch.testing.assert_close(each.gradients, mine, rtol=0, atol=GRADIENT_TOLERANCE)
                assert len({*each.crossed}) == len(each.crossed), f"sent twice by rank {rank}"
                assert each.n_sent == each.n_planned
            assert {name for each in ran for name in each.gradients} == expected.keys()
            assert Counter(what for each in ran for _, what in each.crossed) == expected_crossings(
                seed
            )


class Part(nn.Module):
    """A layer whose reads and writes are as given."""

    def __init__(self, reads: Any = (), writes: Any = (), returns: str = "") -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.reads = reads
        self.writes = writes
        self._returns = returns

    def forward(self, hidden: Tensor, **read: Tensor) -> Any:
        hidden = self.layer(sum(read.values(), start=hidden))
        return (
            (hidden, {self._returns or name: hidden for name in self.writes})
            if self.writes
            else hidden
        )


def refused(rank: int, parts: list[tuple[Any, Any]], edges: tuple[Edge, ...]) -> str:
    schedule = build("1f1b", 3, 4).with_edges(*edges)
    try:
        Pipeline(schedule, Part(*parts[rank]), nn.functional.mse_loss, timeout_s=20)
    except ValueError as error:
        return str(error)
    return "taken"


NONE = ((), ())
BAD_GRAPHS: dict[str, tuple[list[tuple[Any, Any]], tuple[Edge, ...], str]] = {
    "backwards": (
        [(("late",), ()), NONE, ((), ("late",))],
        (),
        (
            "value 'late' goes backwards, from stage 2 to stage 0, which makes the cycle 0 → 1 → 2"
            " → 0: make it in a stage before 0, or read it after 2"
        ),
    ),
    "made by nobody": (
        [((), ("mask",)), NONE, (("msak",), ())],
        (),
        (
            "stage 2 reads 'msak', which no stage writes (written: 'mask'): give the stage that"
            " makes it writes = "
        ),
    ),
    "no names": (
        [NONE, (3, ()), NONE],
        (),
        "rank 1: reads of stage 1 is 3 (an int): give a tuple of names",
    ),
    "other edges": (
        [NONE] * 3,
        (Edge("x", 0, (2,)),),
        "has edges (Edge(name='x', writer=0, readers=(2,)),), but the",
    ),
}


@pytest.mark.parametrize(("parts", "edges", "says"), BAD_GRAPHS.values(), ids=BAD_GRAPHS)
def test_a_graph_that_cannot_be_is_refused_by_name_on_every_rank(
    parts: list[tuple[Any, Any]], edges: tuple[Edge, ...], says: str
) -> None:
    found = on_ranks(3, refused, parts, edges, timeout_s=30)
    assert len({*found}) == 1
    assert says in found[0]


def misnamed(rank: int) -> str:
    part = [Part((), ("x",), "y"), Part(), Part(("x",), ())][rank]
    pipeline = Pipeline(build("1f1b", 3, 2), part, nn.functional.mse_loss, timeout_s=20)
    batch = torch.ones(2, WIDTH, dtype=torch.float64)
    with pytest.raises(StepFailed) as caught:
        pipeline.step(batch, target=batch)
    return str(caught.value)


def test_a_forward_that_returns_other_values_than_it_writes_ends_the_step_on_every_rank() -> None:
    for text in on_ranks(3, misnamed, timeout_s=30):
        assert (
            "rank 0, stage 0, microbatch 0, action 0F0: TypeError: stage 0 writes 'x', but its"
            " forward returns" in text
        )
        assert (
            "Tensor beside ['y']: return (output, {name: value}) with exactly these names" in text
        )


def emulated(rank: int, schedule: Schedule, cluster: EmulatedCluster) -> Timeline:
    parts = {0: Part((), ("x",)), schedule.n_stages - 1: Part(("x",), ())}
    mine = {stage: parts.get(stage, Part()) for stage in stages_of(rank, schedule)}
    recorder = Recorder()
    pipeline = Pipeline(
        schedule, mine, nn.functional.mse_loss, recorder=recorder, cluster=cluster, timeout_s=20
    )
    batch = torch.ones(2 * schedule.n_microbatches, WIDTH, dtype=torch.float64)
    for _ in range(2):
        recorder.clear()
        take_step(pipeline, *for_rank(rank, schedule, batch, batch))
    return recorder.timeline()


@pytest.mark.parametrize("name", ["1f1b", "zb_v"])
def test_an_emulated_cluster_charges_for_edges_as_the_simulation_does(name: str) -> None:
    bare = build(name, 2, 3)
    schedule = bare.with_edges(Edge("x", 0, (bare.n_stages - 1,)))
    costs = Costs(
        forward=0.006, input_grad=0.006, weight_grad=0.006, latency=0.004, edge_latency=0.05
    )
    cluster = EmulatedCluster(costs)
    found = on_ranks(2, emulated, bare, cluster, timeout_s=40)[0]
    assert found.edges == schedule.edges
    predicted = cluster.predict(schedule)
    assert (
        float(found.makespan) == pytest.approx(float(predicted.makespan), abs=1e-6)
        or found.overruns
    )
    if name == "1f1b":
        assert predicted.makespan > cluster.predict(bare).makespan + 0.04


def updated(rank: int, seed: int) -> tuple[tuple[Edge, ...], list[Tensor]]:
    stage = linked_stages(random_graph(seed, 3))[rank]
    optimizer = {rank: torch.optim.SGD(stage.parameters(), lr=0.1)}
    schedule = build("pipedream", 3, 6, group=6)
    options: Any = {"optimizers": optimizer, "versions": "stash", "timeout_s": 20}
    pipeline = Pipeline(schedule, {rank: stage}, nn.functional.mse_loss, **options)
    take_step(pipeline, *for_rank(rank, schedule, *equal_batch()))
    return pipeline.schedule.edges, [p.detach().clone() for p in stage.parameters()]


def equal_batch() -> tuple[Tensor, Tensor]:
    return torch.linspace(-1, 1, 2 * 12 * WIDTH, dtype=torch.float64).view(2, 12, WIDTH).unbind()


def test_stages_that_update_themselves_have_edges_too() -> None:
    """All microbatches make one update, so it is that of one process."""
    stages = linked_stages(random_graph(1, 3))
    inputs, targets = equal_batch()
    nn.functional.mse_loss(through(stages, inputs), targets).backward()
    for stage, (edges, parameters) in zip(
        stages, on_ranks(3, updated, 1, timeout_s=40), strict=True
    ):
        assert edges
        for found, start in zip(parameters, stage.parameters(), strict=True):
            assert start.grad is not None
            torch.testing.assert_close(
                found, start.detach() - 0.1 * start.grad, rtol=1e-12, atol=1e-12
            )
