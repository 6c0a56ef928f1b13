"""Plans of PipeDream's planner, run: replicas on an emulated cluster, and the throughput that was foretold."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from course_pp.launch import on_ranks
from course_pp.runtime import EmulatedCluster, EmulatedLink, EmulatedTimeline, Pipeline, Recorder
from course_pp.schedule import ClusterLevel, Costs, LayerCost, Partition, Schedule, Timeline, build, partition
from tests.runtime.small import for_rank, stages_of

ROWS = 2


def emulated(
    rank: int, schedules: Sequence[Schedule], widths: Sequence[Sequence[int]], cluster: EmulatedCluster
) -> list[EmulatedTimeline]:
    """For each schedule the second of two steps; ``widths`` are those of the layers of each stage, ends included."""
    found = []
    for schedule in schedules:
        torch.manual_seed(0)
        stages = [nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(w))) for w in widths]
        mine = {stage: stages[stage] for stage in stages_of(rank, schedule)}
        optimizers = {stage: torch.optim.SGD(module.parameters(), lr=0.01) for stage, module in mine.items()}
        recorder = Recorder()
        pipeline = Pipeline(
            schedule, mine, F.mse_loss, recorder=recorder, cluster=cluster, optimizers=optimizers, versions="stash"
        )
        inputs = torch.randn(ROWS * schedule.n_microbatches, widths[0][0])
        targets = torch.randn(ROWS * schedule.n_microbatches, widths[-1][-1])
        for _ in range(2):
            recorder.clear()
            pipeline.step(*for_rank(rank, schedule, inputs, targets))
        timeline = recorder.timeline()
        assert isinstance(timeline, EmulatedTimeline)
        found.append(timeline)
    return found


def pace(timeline: Timeline, first: int, last: int) -> float:
    """Seconds a microbatch between the updates of the first rank behind two microbatches."""
    ends = {part.microbatch: span.end for span in timeline.by_rank[0] for part in span.action.parts if part.kind == "U"}
    return float(ends[last] - ends[first]) / (last - first)


@pytest.mark.parametrize("shares", [(2,), (2, 1, 1)])
def test_replicas_keep_the_pace_that_was_predicted(shares: tuple[int, ...]) -> None:
    schedule = build("pipedream", sum(shares), 8, replicas=shares)
    latency = tuple(0.002 * (stage + 1) for stage in range(len(shares) - 1))
    cluster = EmulatedCluster(Costs(0.01, 0.01, 0.01, update=0.005, latency=latency))
    [found] = on_ranks(sum(shares), emulated, [schedule], [[2, 2]] * len(shares), cluster, timeout_s=60)[0]
    overrun = sum(each.seconds for each in found.overruns)
    assert pace(found, 0, 6) == pytest.approx(pace(cluster.predict(schedule), 0, 6), abs=1e-6 + overrun)


@pytest.mark.full
@pytest.mark.parametrize(
    ("shares", "work", "tolerance"),
    [((1, 1, 1, 1), (1, 1, 2, 1), 0.03), ((2, 1), (2, 1), 0.05)],
    ids=["the slowest of four stages", "twice the pace of a stage that two share"],
)
def test_the_steady_state_is_a_microbatch_in_a_forward_and_backward_of_the_slowest_stage(
    shares: tuple[int, ...], work: tuple[int, ...], tolerance: float
) -> None:
    schedule = build("pipedream", sum(shares), 24, replicas=shares)
    for unit in (0.01, 0.02, 0.04):
        forward = [unit * each for each in work]
        cluster = EmulatedCluster(Costs(forward, forward, forward, update=0.002))
        [found] = on_ranks(sum(shares), emulated, [schedule], [[2, 2]] * len(shares), cluster, timeout_s=60)[0]
        if not found.trouble:
            break
    assert not found.trouble
    slowest = max(3 * unit * each / share for each, share in zip(work, shares, strict=True))
    # No real update takes nothing, and one of 0 would be an overrun.
    assert pace(found, 8, 16) - 0.002 == pytest.approx(slowest, rel=tolerance)


@dataclass(frozen=True)
class Case:
    """A model whose layers are linear, with chosen times, and links."""

    widths: tuple[int, ...]
    times: tuple[float, ...]
    n_ranks: int
    bandwidth: float

    @property
    def plan(self) -> Partition:
        sizes = zip(self.widths, self.widths[1:], self.times, strict=False)
        layers = [LayerCost(time, 4 * ROWS * b, 4 * (a + 1) * b) for a, b, time in sizes]
        return partition(layers, [ClusterLevel(self.n_ranks, self.bandwidth)])


WIDE = 256


def random_case(rng: random.Random, unit: float) -> Case:
    """Layers of 1 to 6 units. To exchange the gradients of a wide one takes 17: it is worth no replicas."""
    widths = tuple(rng.choice([2, WIDE]) for _ in range(6))
    times = tuple(unit * rng.randint(1, 6) for _ in widths[1:])
    return Case(widths, times, rng.randint(2, 4), 4 * WIDE * WIDE / (17 * unit))


def measured(case: Case) -> tuple[float, str]:
    """Seconds a microbatch in the steady state of the plan, emulated; and why they do not count, if they do not."""
    stages = case.plan.stages
    work = [sum(case.times[stage.start : stage.end]) for stage in stages]
    fifths = [time / 5 for time in work]
    half = [1.5 * time for time in fifths]
    cluster = EmulatedCluster(Costs(fifths, half, half, update=fifths), EmulatedLink(bandwidth=case.bandwidth))
    schedule = build("pipedream", case.n_ranks, 48, replicas=case.plan.replicas)
    widths = [case.widths[stage.start : stage.end + 1] for stage in stages]
    [found] = on_ranks(case.n_ranks, emulated, [schedule], widths, cluster, timeout_s=120)[0]
    return pace(found, 12, 36), found.trouble


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", range(10))
def test_a_plan_runs_within_five_percent_of_what_it_foretells(number: int) -> None:
    for unit in (0.004, 0.008, 0.016, 0.032):  # longer where the machine is too busy to keep the shorter
        case = random_case(random.Random(number), unit)
        seconds, trouble = measured(case)
        if not trouble:
            break
    assert not trouble
    assert seconds == pytest.approx(case.plan.pace(forward=0.2, update=0.2), rel=0.05)
