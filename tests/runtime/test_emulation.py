"""An emulated cluster keeps its chosen times or names the overruns; gradients are right."""

import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course_pp.launch import on_ranks
from course_pp.runtime import (
    EmulatedCluster,
    EmulatedLink,
    EmulatedTimeline,
    Overrun,
    Pipeline,
    Recorder,
    run_step,
)
from course_pp.schedule import Action, Costs, Product, Schedule, Timeline, build, fit, simulate
from tests.grids import crossed
from tests.processes import no_process_left
from tests.runtime.small import for_rank, parse, stages_of, take_step
from tests.runtime.stepping import Step, assert_equal_steps, in_one_process, run_steps

pytestmark = pytest.mark.timeout(60)

WIDTH, M = 4, 6
FEW_MS = Costs(forward=0.004, input_grad=0.005, weight_grad=0.003)
ONE_NS = 1.5e-9  # times are kept in whole nanoseconds
SLOW = {1: 1.5}
NAMES = ["naive", "gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "dualpipe_v"]


def layers(n: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=torch.float64), nn.Tanh()) for _ in range(n)
    ]


def batch(seed: int = 0) -> Step:
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = (
        torch.randn(2 * M, WIDTH, dtype=torch.float64, generator=generator) for _ in range(2)
    )
    return Step(inputs, targets)


def emulated(rank: int, schedule: Schedule, cluster: EmulatedCluster, steps: int = 2) -> Timeline:
    """The timeline of the last of several steps."""
    stages = layers(schedule.n_stages)
    recorder = Recorder()
    data = batch()
    mine = {stage: stages[stage] for stage in stages_of(rank, schedule)}
    pipeline = Pipeline(
        schedule, mine, F.mse_loss, recorder=recorder, cluster=cluster, timeout_s=20
    )
    for _ in range(steps):
        recorder.clear()
        take_step(pipeline, *for_rank(rank, schedule, data.inputs, data.targets))
    return recorder.timeline(name=schedule.name)


def run(schedule: Schedule, cluster: EmulatedCluster, steps: int = 2) -> EmulatedTimeline:
    with no_process_left():
        found = on_ranks(schedule.n_ranks, emulated, schedule, cluster, steps, timeout_s=40.0)
    assert all(timeline == found[0] for timeline in found)
    assert isinstance(found[0], EmulatedTimeline)
    return found[0]


def assert_as_predicted(
    found: EmulatedTimeline, cluster: EmulatedCluster, schedule: Schedule
) -> None:
    """Assert that every span begins and ends as predicted, given the machine's overruns."""
    over = {(each.rank, each.action): each.seconds for each in found.overruns}
    durations = []
    for rank, actions in enumerate(schedule.actions):
        chosen = cluster.durations(schedule, rank)
        pairs = zip(chosen, actions, strict=True)
        durations.append([seconds + over.get((rank, action), 0.0) for seconds, action in pairs])
    predicted = cluster.predict(schedule)
    expected = simulate(schedule, Costs(latency=predicted.transfers), durations)
    for span, other in zip(found.spans, expected.spans, strict=True):
        assert (span.rank, span.action) == (other.rank, other.action)
        assert span.start == pytest.approx(float(other.start), abs=1e3 * ONE_NS)
        assert span.end == pytest.approx(float(other.end), abs=1e3 * ONE_NS)
    if not found.overruns:
        assert float(found.bubble_fraction) == pytest.approx(
            float(predicted.bubble_fraction), abs=1e-4
        )


def plain() -> EmulatedCluster:
    return EmulatedCluster(FEW_MS)


def with_latency_by_boundary() -> EmulatedCluster:
    return EmulatedCluster(Costs(0.004, 0.004, 0.004, latency=[0.001, 0.006]))


def with_links_a_straggler_and_jitter() -> EmulatedCluster:
    return EmulatedCluster(
        Costs(0.004, 0.005, 0.003, message_bytes=2 * WIDTH * 8),
        links=(EmulatedLink(0.002), EmulatedLink(0.001, 1e5)),
        stragglers=SLOW,
        jitter=0.2,
    )


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("name", "make"),
    [
        *crossed(NAMES, [plain, with_links_a_straggler_and_jitter]),
        ("1f1b", with_latency_by_boundary),
    ],
)
def test_every_action_begins_and_ends_when_the_cluster_says(
    name: str, make: Callable[[], EmulatedCluster]
) -> None:
    cluster = make()
    schedule = build(name, 3, M)
    assert_as_predicted(run(schedule, cluster), cluster, schedule)


@pytest.mark.parametrize(
    ("name", "options"),
    crossed(["1f1b", "zb_v"], [{}, {"recompute": True}, {"transport": "gloo without tags"}]),
)
def test_gradients_under_emulation_are_those_of_one_process(
    name: str, options: dict[str, Any]
) -> None:
    schedule = build(name, 2, M)
    steps = [batch(), batch(1)]
    make = partial(layers, schedule.n_stages)
    cluster = EmulatedCluster(Costs(0.001, 0.001, 0.001), EmulatedLink(1e-3))
    assert_equal_steps(
        run_steps(schedule, make, steps, cluster=cluster, **options), in_one_process(M, make, steps)
    )


def test_what_is_emulated_also_happens() -> None:
    found = run(build("1f1b", 2, M), EmulatedCluster(FEW_MS))
    assert found.wall.makespan <= found.makespan
    assert found.wall.makespan > found.makespan - 0.012
    for chosen, real in zip(found.spans, found.wall.spans, strict=True):
        assert chosen.action == real.action
        assert real.start >= chosen.start - ONE_NS
        assert real.end <= chosen.end + ONE_NS
    late = []
    for planned, begun in zip(found.by_rank, found.wall.by_rank, strict=True):
        pairs = zip(planned, begun, strict=True)
        late.append(max(real.start - chosen.start for chosen, real in pairs))
    assert found.lateness == tuple(late)


class Slow(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.01)
        return x


def too_short(rank: int, schedule: Schedule) -> Timeline:
    stage = nn.Sequential(nn.Linear(WIDTH, WIDTH), *([Slow()] if rank == 1 else []))
    data = torch.ones(schedule.n_microbatches, WIDTH)
    return run_step(
        schedule, stage, data, data, F.mse_loss, cluster=EmulatedCluster(Costs(0.005, 0.02, 0.02))
    )[1]


def test_a_run_with_too_short_actions_says_so() -> None:
    schedule = build("gpipe", 2, M)
    found = on_ranks(2, too_short, schedule, timeout_s=30.0)[0]
    over = {each.action: each.seconds for each in found.overruns if each.rank == 1}
    assert {Action(1, "F", microbatch) for microbatch in range(M)} <= over.keys()
    assert all(over[Action(1, "F", microbatch)] >= 0.005 for microbatch in range(M))
    assert f"of {4 * M} actions outlasted their chosen time, by " in found.trouble
    assert "choose times of twice that" in found.trouble
    assert found.trouble in repr(found)
    for span in found.by_rank[1][:M]:
        assert span.duration == pytest.approx(0.005 + over[span.action])


def test_overruns_of_more_than_half_a_percent_in_all_are_trouble() -> None:
    ideal = simulate(build("gpipe", 4, 1))
    part = 0.004 * float(ideal.makespan)
    for n_overruns, trouble in ((1, False), (4, True)):
        overruns = tuple(Overrun(rank, Action(rank, "F", 0), part) for rank in range(n_overruns))
        found = EmulatedTimeline(4, ideal.spans, wall=ideal, overruns=overruns)
        assert bool(found.trouble) is trouble
        assert repr(found).startswith("EmulatedTimeline(4 ranks, 8 spans, ")
        assert ("4 of 8 actions outlasted their chosen time" in repr(found)) is trouble


def test_jitter_has_the_mean_and_the_deviation_that_were_asked_for() -> None:
    schedule = build("gpipe", 1, 4000)
    seconds = EmulatedCluster(Costs(1.0, 0.5, 0.5), jitter=0.3).durations(schedule, 0)
    assert statistics.fmean(seconds) == pytest.approx(1.0, rel=0.02)
    assert statistics.stdev(seconds) == pytest.approx(0.3, rel=0.05)
    assert min(seconds) > 0
    assert seconds == EmulatedCluster(Costs(1.0, 0.5, 0.5), jitter=0.3).durations(schedule, 0)
    assert seconds != EmulatedCluster(Costs(1.0, 0.5, 0.5), jitter=0.3, seed=1).durations(
        schedule, 0
    )
    cluster = EmulatedCluster(FEW_MS, jitter=0.1)
    schedule = build("gpipe", 2, M)
    assert cluster.durations(schedule, 0) != cluster.durations(schedule, 1)


@pytest.mark.parametrize(
    ("links", "source", "target", "seconds"),
    [
        (EmulatedLink(2.0, 10.0), 0, 3, 2 + 5),
        # as the narrowest
        ([EmulatedLink(1.0, 10.0), EmulatedLink(2.0, 5.0), EmulatedLink(4.0)], 0, 3, 7 + 10),
        ([EmulatedLink(1.0), EmulatedLink(2.0, 10.0), EmulatedLink(4.0)], 0, 1, 1),
        ([EmulatedLink(1.0), EmulatedLink(2.0, 10.0), EmulatedLink(4.0)], 3, 0, 7 + 5),
        (
            [EmulatedLink(1.0), EmulatedLink(2.0), EmulatedLink(4.0), EmulatedLink(8.0, 25.0)],
            3,
            0,
            8 + 2,
        ),
        ([EmulatedLink(1.0), EmulatedLink(2.0), EmulatedLink(4.0), EmulatedLink(8.0)], 0, 2, 3),
        ([EmulatedLink(1.0), EmulatedLink(2.0), EmulatedLink(4.0), EmulatedLink(8.0)], 1, 3, 6),
    ],
)
def test_a_message_takes_the_links_between_two_ranks(
    links: Any, source: int, target: int, seconds: float
) -> None:
    schedule = build("gpipe", 4, M)
    activation = Product("activation", 0, 0)
    assert (
        EmulatedCluster(FEW_MS, links).transfer(activation, source, target, 50, schedule) == seconds
    )


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "a negative latency": (
        lambda: EmulatedLink(-1e-3),
        "latency is -0.001: give a finite number of at least 0",
    ),
    "no bandwidth": (lambda: EmulatedLink(0.0, 0), "bandwidth is 0: give bytes a second above 0"),
    "an odd straggler": (
        lambda: EmulatedCluster(FEW_MS, stragglers={0: -1}),
        "the straggler factor of rank 0 is -1",
    ),
    "jitter that is none": (
        lambda: EmulatedCluster(FEW_MS, jitter=math.nan),
        "jitter is nan: give a finite number",
    ),
    "two latencies": (
        lambda: EmulatedCluster(Costs(latency=1.0), EmulatedLink(1.0)),
        "both costs and links say how long messages take: leave one of them out",
    ),
}


@pytest.mark.parametrize(("make", "says"), BAD.values(), ids=BAD)
def test_impossible_clusters_are_refused(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()


UNFIT: dict[str, tuple[EmulatedCluster, str]] = {
    "more links than ranks": (
        EmulatedCluster(FEW_MS, [EmulatedLink()] * 3),
        "3 links for 2 ranks: give one for all of them, or 1 for a line of ranks",
    ),
    "a straggler elsewhere": (
        EmulatedCluster(FEW_MS, stragglers={2: 2.0}),
        "rank 2 is a straggler of 2 ranks: name ranks from 0 to 1",
    ),
    "stages of another number": (
        EmulatedCluster(Costs(forward=[1.0] * 3)),
        "forward has 3 values for 2 stages",
    ),
}


def refused(rank: int, clusters: list[EmulatedCluster]) -> str:
    try:
        Pipeline(
            build("gpipe", 2, 2),
            nn.Linear(WIDTH, WIDTH),
            F.mse_loss,
            cluster=clusters[rank],
            timeout_s=20,
        )
    except ValueError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(("cluster", "says"), UNFIT.values(), ids=UNFIT)
def test_clusters_that_do_not_fit_the_schedule_are_refused_on_every_rank(
    cluster: EmulatedCluster, says: str
) -> None:
    assert all(says in text for text in on_ranks(2, refused, [cluster, cluster], timeout_s=20.0))
    with pytest.raises(ValueError, match=says[:40]):
        cluster.predict(build("gpipe", 2, 2))


def test_ranks_with_different_clusters_are_refused() -> None:
    clusters = [EmulatedCluster(FEW_MS), EmulatedCluster(FEW_MS, jitter=0.1)]
    assert all(
        "rank 1 was given cluster=" in text
        for text in on_ranks(2, refused, clusters, timeout_s=20.0)
    )


def test_replicas_with_different_links_cannot_be_predicted() -> None:
    schedule = parse("0F0 0F1 0B0 0B1", "1F0 1B0", "1F1 1B1", placement=[(0,), (1, 2)])
    cluster = EmulatedCluster(FEW_MS, [EmulatedLink(1.0), EmulatedLink(2.0)])
    with pytest.raises(ValueError, match=r"stages 0 and 1 take 1\.0 s or 3\.0 s"):
        cluster.predict(schedule)


# What was planted in a cluster is found again in what its ranks measured.


def planted(unit: float, straggler: bool = True, slow_link: bool = True) -> EmulatedCluster:
    """Return four ranks of ``unit`` seconds an action, with a slow third rank and first link."""
    usual = EmulatedLink(latency=unit / 40)
    return EmulatedCluster(
        Costs(forward=unit, input_grad=unit, weight_grad=unit),
        links=(EmulatedLink(latency=unit) if slow_link else usual, usual, usual),
        stragglers={2: 1.5} if straggler else {},
        jitter=0.02,
    )


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
def test_a_straggler_and_a_slow_link_are_found_in_a_run_of_real_ranks(name: str) -> None:
    schedule = build(name, 4, M)
    for unit in (0.02, 0.06, 0.18):  # longer where the machine is too busy to keep the shorter
        timeline = run(schedule, planted(unit))
        if not timeline.trouble:
            break
    assert not timeline.trouble
    found = fit(timeline)

    def makespan(straggler: bool, slow_link: bool) -> float:
        return float(planted(unit, straggler, slow_link).predict(schedule).makespan)

    neither, straggler, link, both = (makespan(*each) for each in ((0, 0), (1, 0), (0, 1), (1, 1)))
    due_to_straggler = (straggler - neither + both - link) / 2
    due_to_link = (link - neither + both - straggler) / 2
    misplaced = abs(found.lost_to("straggler").time - due_to_straggler)
    misplaced += abs(found.lost_to("transfer").per_link[0, 1] - due_to_link)
    assert misplaced <= 0.1 * (both - neither)
    assert "Rank 2 is a straggler" in " ".join(found.findings[:2])
    assert "link 0–1" in " ".join(found.findings[:2])
    expected = {(0, 1): unit, (1, 2): unit / 40, (2, 3): unit / 40}
    assert found.links == pytest.approx(expected, abs=unit / 200)
    assert found.slowdown == pytest.approx([1, 1, 1.5, 1], rel=0.05)
