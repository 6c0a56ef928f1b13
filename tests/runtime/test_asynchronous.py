"""PipeDream on real ranks equals delayed gradients in one process, written without a pipeline, a
schedule or autograd.

Stage s of p works on microbatch i with the weights after so many updates:

    stash     i - (p - 1 - s)       the newest at its forward; its backward takes the same
    vertical  i - (p - 1)           what stage 0 took
    2bw       i // group - 1        one group late
    none      as stash forward, i updates backward

Where r replicas share a stage, its updates take r microbatches, and it counts rounds of them.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from course_pp.launch import on_ranks
from course_pp.runtime import EmulatedCluster, EmulatedTimeline, Pipeline, Recorder, StepFailed
from course_pp.schedule import Costs, Ledger, Schedule, Timeline, Versions, build, ledger
from tests.runtime.small import for_rank, stages_of, take_step

WIDTH, HIDDEN, ROWS = 5, 7, 3
Parameters = dict[str, Tensor]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
}


@dataclass(frozen=True)
class Job:
    """A run; ``shares`` are the replicas of each stage."""

    versions: Versions
    optimizer: Literal["sgd", "adamw"]
    shares: tuple[int, ...]
    n_microbatches: int
    group: int | None = None

    @property
    def schedule(self) -> Schedule:
        return build(
            "pipedream",
            sum(self.shares),
            self.n_microbatches,
            replicas=self.shares,
            group=self.group,
        )

    def updated_by(self, stage: int) -> int:
        """Return the number of microbatches that an update of ``stage`` takes."""
        return self.shares[stage] if self.group is None else self.group


def make_stage(stage: int) -> nn.Sequential:
    torch.manual_seed(stage)
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, WIDTH)).double()


def data(job: Job) -> tuple[Tensor, Tensor]:
    seeded = torch.Generator().manual_seed(7)
    inputs, targets = torch.randn(
        2, job.n_microbatches * ROWS, WIDTH, dtype=torch.float64, generator=seeded
    )
    return inputs, targets


def trained(
    rank: int, jobs: Sequence[Job]
) -> list[tuple[dict[int, Parameters], tuple[float, ...], Ledger]]:
    return [train(rank, job) for job in jobs]


def train(rank: int, job: Job) -> tuple[dict[int, Parameters], tuple[float, ...], Ledger]:
    modules = {stage: make_stage(stage) for stage in stages_of(rank, job.schedule)}
    pipeline = pipeline_of(job, modules)
    losses = step(rank, job, pipeline)
    return {stage: copied(module) for stage, module in modules.items()}, losses, pipeline.ledger


def pipeline_of(job: Job, modules: Mapping[int, nn.Module], **options: Any) -> Pipeline:
    optimizers = {
        stage: OPTIMIZERS[job.optimizer](module.parameters()) for stage, module in modules.items()
    }
    options = {"optimizers": optimizers, "versions": job.versions, "timeout_s": 20, **options}
    return Pipeline(job.schedule, modules, F.mse_loss, **options)


def step(rank: int, job: Job, pipeline: Pipeline) -> tuple[float, ...]:
    loss = take_step(pipeline, *for_rank(rank, job.schedule, *data(job)))
    assert loss.item() == pytest.approx(sum(pipeline.shares) / len(pipeline.shares))
    return pipeline.shares


def forward(w: Parameters, x: Tensor) -> tuple[Tensor, Tensor]:
    """The output, and the hidden activation that backward needs."""
    a = torch.tanh(x @ w["0.weight"].T + w["0.bias"])
    return a @ w["2.weight"].T + w["2.bias"], a


def backward(w: Parameters, x: Tensor, a: Tensor, dy: Tensor) -> tuple[Tensor, Parameters]:
    """The gradient of the input, and those of the weights, by the chain rule with weights ``w``."""
    dh = dy @ w["2.weight"] * (1 - a * a)
    gradients = {
        "0.weight": dh.T @ x,
        "0.bias": dh.sum(0),
        "2.weight": dy.T @ a,
        "2.bias": dy.sum(0),
    }
    return dh @ w["0.weight"], gradients


def versions_of(job: Job, stage: int, i: int) -> tuple[int, int]:
    """After how many updates of ``stage`` microbatch ``i`` goes forward and backward."""

    def newest(stage: int) -> int:
        in_flight = -(-sum(job.shares[stage:]) // job.shares[stage])
        return max(0, i // job.shares[stage] - (in_flight - 1))

    if job.group is not None:
        return (max(0, i // job.group - 1),) * 2
    if job.versions == "vertical":
        return (newest(0) * job.shares[0] // job.shares[stage],) * 2
    return newest(stage), i // job.shares[stage] if job.versions == "none" else newest(stage)


def delayed(job: Job) -> tuple[dict[int, Parameters], list[float]]:
    """The last weights of each stage, and each microbatch's loss."""
    n_stages, (inputs, targets) = len(job.shares), data(job)
    stages = [make_stage(stage) for stage in range(n_stages)]
    optimizers = [OPTIMIZERS[job.optimizer](stage.parameters()) for stage in stages]
    history = [[copied(stage)] for stage in stages]
    waiting: list[list[Parameters]] = [[] for _ in stages]
    losses = []
    for i, (x, target) in enumerate(zip(inputs.split(ROWS), targets.split(ROWS), strict=True)):
        kept = []
        for stage in range(n_stages):
            y, a = forward(history[stage][versions_of(job, stage, i)[0]], x)
            kept.append((x, a))
            x = y
        losses.append(((x - target) ** 2).mean().item())
        dy = 2 * (x - target) / x.numel()
        for stage in reversed(range(n_stages)):
            dy, gradients = backward(
                history[stage][versions_of(job, stage, i)[1]], *kept[stage], dy
            )
            waiting[stage].append(gradients)
            if len(waiting[stage]) == job.updated_by(stage):
                for name, parameter in stages[stage].named_parameters():
                    parameter.grad = torch.stack([each[name] for each in waiting[stage]]).mean(0)
                optimizers[stage].step()
                history[stage].append(copied(stages[stage]))
                waiting[stage].clear()
    return {stage: each[-1] for stage, each in enumerate(history)}, losses


def copied(module: nn.Module) -> Parameters:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


Layouts = tuple[tuple[tuple[int, ...], Literal["sgd", "adamw"]], ...]
FEW: Layouts = (((1, 1, 1), "adamw"), ((2, 1), "sgd"))
ALL: dict[int, Layouts] = {
    2: tuple(product([(1, 1)], OPTIMIZERS)),
    3: tuple(product([(1, 1, 1), (2, 1)], OPTIMIZERS)),
    4: tuple(product([(1, 1, 1, 1), (3, 1), (2, 1, 1), (1, 2, 1)], OPTIMIZERS)),
}
GRIDS = [pytest.param(FEW, id="few")]
GRIDS += [pytest.param(layouts, id=f"all{n}", marks=pytest.mark.full) for n, layouts in ALL.items()]


def jobs_with(layouts: Layouts) -> list[Job]:
    """Return every rule with each layout and optimizer, for as many updates."""
    jobs = []
    updates = 8 if layouts is FEW else 50
    for shares, optimizer in layouts:
        jobs += [
            Job(versions, optimizer, shares, updates * max(shares))
            for versions in ("stash", "vertical", "none")
        ]
        group = 6 if max(shares) > 1 else len(shares)
        jobs.append(Job("2bw", optimizer, shares, updates * group, group))
    return jobs


@cache
def all_trained(
    layouts: Layouts,
) -> list[list[tuple[dict[int, Parameters], tuple[float, ...], Ledger]]]:
    return on_ranks(sum(layouts[0][0]), trained, jobs_with(layouts), timeout_s=300)


@pytest.mark.parametrize("layouts", GRIDS)
def test_asynchronous_training_equals_delayed_gradients_in_one_process(
    layouts: Layouts, subtests: pytest.Subtests
) -> None:
    by_rank = all_trained(layouts)
    for number, job in enumerate(jobs_with(layouts)):
        with subtests.test(str(job)):
            expected, losses = delayed(job)
            for weights, told, _ in (rank[number] for rank in by_rank):
                assert torch.allclose(torch.tensor(told), torch.tensor(losses), rtol=0, atol=1e-12)
                for stage, found in weights.items():
                    assert max_difference(found, expected[stage]) < 1e-12, stage


def max_difference(found: Parameters, expected: Parameters) -> float:
    return max(float((found[name] - expected[name]).abs().max()) for name in expected)


@pytest.mark.parametrize("layouts", GRIDS)
@pytest.mark.long
def test_what_a_run_used_is_what_the_ledger_foretold(layouts: Layouts) -> None:
    by_rank = all_trained(layouts)
    for number, job in enumerate(jobs_with(layouts)):
        used = by_rank[0][number][2]
        for rank in by_rank[1:]:
            used |= rank[number][2]
        assert used == ledger(job.schedule, job.versions)


class Checkpointed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return y


def recomputing(rank: int, job: Job) -> list[float]:
    """Return how far the weights are from a stage's without recomputation, for both ways."""
    found = []
    for kind, recompute in ((nn.Sequential, False), (nn.Sequential, True), (Checkpointed, False)):
        module = kind(*make_stage(rank))
        step(rank, job, pipeline_of(job, {rank: module}, recompute=recompute))
        found.append(copied(module))
    return [max_difference(each, found[0]) for each in found[1:]]


def test_a_forward_that_is_computed_again_has_the_version_it_had() -> None:
    for rank in on_ranks(2, recomputing, Job("stash", "adamw", (1, 1), 12), timeout_s=60):
        assert max(rank) < 1e-12  # the copy of an input is aligned otherwise, and may be rounded so


def kept(rank: int, jobs: Sequence[Job]) -> list[int]:
    """Return each job's most bytes of versions besides the newest."""
    found = []
    for job in jobs:
        recorder = Recorder(memory=True)
        step(rank, job, pipeline_of(job, {rank: make_stage(rank)}, recorder=recorder))
        found.append(recorder.memory()[rank].peaks["version"])
    return found


def paced(rank: int, job: Job, cluster: EmulatedCluster) -> EmulatedTimeline:
    """The second of two steps."""
    recorder = Recorder()
    modules = {stage: make_stage(stage) for stage in stages_of(rank, job.schedule)}
    pipeline = pipeline_of(job, modules, recorder=recorder, cluster=cluster)
    for _ in range(2):
        recorder.clear()
        step(rank, job, pipeline)
    timeline = recorder.timeline()
    assert isinstance(timeline, EmulatedTimeline)
    return timeline


def pace(timeline: Timeline) -> float:
    """Seconds a microbatch between the updates of the first rank behind microbatches 0 and 6."""
    ends = {
        part.microbatch: span.end
        for span in timeline.by_rank[0]
        for part in span.action.parts
        if part.kind == "U"
    }
    return float(ends[6] - ends[0]) / 6


@pytest.mark.parametrize("shares", [(2,), (2, 1, 1)])
def test_replicas_keep_the_pace_that_was_predicted(shares: tuple[int, ...]) -> None:
    job = Job("stash", "sgd", shares, 8)
    latency = tuple(0.002 * stage for stage in range(1, len(shares)))
    cluster = EmulatedCluster(Costs(0.01, 0.01, 0.01, update=0.005, latency=latency))
    found = on_ranks(sum(shares), paced, job, cluster, timeout_s=60)[0]
    overrun = sum(each.seconds for each in found.overruns)
    assert pace(found) == pytest.approx(pace(cluster.predict(job.schedule)), abs=1e-6 + overrun)


def test_stage_s_keeps_p_minus_s_versions_with_stashing_and_two_with_2bw() -> None:
    p = 3
    size = sum(parameter.nbytes for parameter in make_stage(0).parameters())
    jobs = [
        Job("stash", "sgd", (1,) * p, 9),
        Job("2bw", "sgd", (1,) * p, 9, p),
        Job("none", "sgd", (1,) * p, 9),
    ]
    for stage, (stashed, buffered, mixed) in enumerate(on_ranks(p, kept, jobs, timeout_s=60)):
        assert stashed == (p - stage - 1) * size
        assert buffered == size
        assert mixed == 0


PLAIN = Job("stash", "sgd", (1, 1), 4)


def refused(rank: int, cases: Sequence[Callable[[int], dict[str, Any]]]) -> list[str]:
    told = []
    for case in cases:
        module = make_stage(rank)
        given: dict[str, Any] = {
            "schedule": PLAIN.schedule,
            "optimizers": {rank: OPTIMIZERS["sgd"](module.parameters())},
            "versions": "stash",
        } | case(rank)
        made = given.pop("make", lambda module: {})(module)
        given |= made
        stages = given.pop("stages", {rank: module})
        try:
            Pipeline(given.pop("schedule"), stages, F.mse_loss, timeout_s=20, **given)
        except ValueError as error:
            told.append(str(error))
    return told


BAD: list[tuple[Callable[[int], dict[str, Any]], str]] = [
    (lambda rank: {"schedule": build("1f1b", 2, 4)}, "versions='stash' with .*flushes"),
    (lambda rank: {"versions": None}, r"updates weights within the step \(U\): pass optimizers="),
    (lambda rank: {"versions": "vertical" if rank else "stash"}, "versions"),
    (
        lambda rank: {"optimizers": {}} if rank else {},
        r"optimizers for stages \[\], but stages \[1\] are trained",
    ),
    (
        lambda rank: {
            "make": lambda m: {"optimizers": {rank: torch.optim.SGD([m[0].weight], lr=0.1)}}
        },
        "parameter '0.bias' of stage 0 is in no optimizer",
    ),
    (
        lambda rank: {
            "make": lambda m: {
                "optimizers": {rank: torch.optim.SGD([*m.parameters(), stranger()], lr=0.1)}
            }
        },
        "holds a parameter that is not stage 0's",
    ),
    (lambda rank: {"tied": [{0: "0.weight", 1: "0.weight"}]}, "each end would update by itself"),
    (lambda rank: {"versions": "none", "recompute": True}, "recompute=True with versions='none'"),
    (
        lambda rank: {
            "schedule": build("pipedream", 2, 5, replicas=(2,)),
            "stages": {0: make_stage(0)},
        },
        (
            r"the 2 replicas of stage 0 update \[3, 2\] times.*give a number of microbatches that 2"
            r" divides"
        ),
    ),
]


def stranger() -> nn.Parameter:
    return nn.Parameter(torch.zeros(1, dtype=torch.float64))


def test_what_cannot_update_by_itself_is_refused_on_every_rank(subtests: pytest.Subtests) -> None:
    cases = [case for case, _ in BAD]
    for rank in on_ranks(2, refused, cases, timeout_s=60):
        for (_, words), told in zip(BAD, rank, strict=True):
            with subtests.test(words):
                assert re.search(words, told), told


def diverging(rank: int) -> str:
    module = make_stage(rank)
    pipeline = pipeline_of(
        PLAIN, {rank: module}, optimizers={rank: torch.optim.SGD(module.parameters(), lr=1e200)}
    )
    with pytest.raises(StepFailed) as caught:
        step(rank, PLAIN, pipeline)
    return str(caught.value)


def test_weights_that_diverge_are_named_with_update_and_stage() -> None:
    words = (
        r"the loss of microbatch \d is (inf|nan), after update \d of stage 1: lower the learning"
        r" rate"
    )
    for told in on_ranks(2, diverging, timeout_s=60):
        assert re.search(words, told), told


class Overflows(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        y.register_hook(lambda gradient: gradient * torch.inf)
        return y


def overflowing(rank: int) -> tuple[str, bool]:
    """Return the refusal, and whether the weights of this rank are finite."""
    module = make_stage(rank) if rank else Overflows(*make_stage(rank))
    pipeline = pipeline_of(PLAIN, {rank: module})
    with pytest.raises(StepFailed) as caught:
        step(rank, PLAIN, pipeline)
    return str(caught.value), all(bool(p.isfinite().all()) for p in module.parameters())


def test_an_overflowing_gradient_is_named_with_update_and_stage_and_changes_no_weight() -> None:
    for told, finite in on_ranks(2, overflowing, timeout_s=60):
        assert (
            "action 0U0: ArithmeticError: the gradient of '0.weight' in update 0 of stage 0 is not"
            " finite" in told
        )
        assert finite


@pytest.mark.parametrize(
    ("schedule", "versions", "words"),
    [
        (
            build("pipedream", 3, 5, replicas=(2, 1)),
            "stash",
            r"replicas of stage 0 update \[3, 2\] times.*that 2 divides",
        ),
        (
            build("pipedream", 4, 12, group=2),
            "2bw",
            "0F4 needs version 1 of its stage, which has had 0 updates by then",
        ),
        (
            build("pipedream", 3, 4, replicas=(2, 1)),
            "2bw",
            "microbatch 1 is in update 0 of stage 0, but in 1 of stage 1",
        ),
        (
            build("1f1b", 2, 4),
            "stash",
            "no update of stage 0 on rank 0 takes the gradient of microbatch 0",
        ),
    ],
)
def test_a_schedule_without_the_versions_it_needs_is_refused(
    schedule: Schedule, versions: Versions, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        ledger(schedule, versions)
