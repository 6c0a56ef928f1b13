"""A loss that arises in the middle of the model: gradients, loss and sums of one process, under both engines."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course_pp.launch import on_ranks
from course_pp.loss import TokenLoss, attach_loss
from course_pp.model import CrossEntropy
from course_pp.runtime import Pipeline
from course_pp.schedule import build, names
from tests.grids import crossed
from tests.processes import no_process_left
from tests.runtime.small import for_rank, stages_of
from tests.runtime.stepping import Done, assert_equal_steps, gradients, through

pytestmark = pytest.mark.timeout(60)

WIDTH, SEQ_LEN, VOCABULARY = 4, 3, 7
SYNCHRONOUS = [name for name in names() if name != "pipedream"]

Batch = tuple[list[Tensor], list[Tensor]]


class Part(nn.Module):
    """A stage with two losses of its own: one depends on what comes in, the other on a weight alone."""

    def __init__(self, stage: int, n_stages: int, attach: bool) -> None:
        super().__init__()
        self.stage, self.attach = stage, attach
        self.embed = nn.Embedding(VOCABULARY, WIDTH) if stage == 0 else None
        self.linear, self.router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False) if stage == n_stages - 1 else None
        self.losses: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embed is None else self.embed(x)
        router = self.router(x).softmax(-1).square().mean()
        x = self.with_loss(x + F.gelu(self.linear(x)), 0.7 * router, f"router {self.stage}")
        x = self.with_loss(x, 0.3 * self.linear.weight.square().sum(), f"decay {self.stage}")
        return x if self.head is None else self.head(x)

    def with_loss(self, x: Tensor, loss: Tensor, name: str) -> Tensor:
        if self.attach:
            return attach_loss(x, loss, name)
        self.losses[name] = loss
        return x


def parts(n_stages: int, attach: bool = True) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Part(stage, n_stages, attach).double() for stage in range(n_stages)]


def batch(n_microbatches: int, seed: int = 0) -> Batch:
    """Microbatches of one to three rows, of which unequally many tokens count: none in the third."""
    generator = torch.Generator().manual_seed(seed)
    rows = [1 + i % 3 for i in range(n_microbatches)]
    inputs, targets = ([torch.randint(VOCABULARY, (n, SEQ_LEN), generator=generator) for n in rows] for _ in range(2))
    for i, target in enumerate(targets):
        target[:, : i % 3] = -100
    targets[2][:] = -100
    return inputs, targets


def mean_square(logits: Tensor, target: Tensor) -> Tensor:
    """A loss that averages over samples and counts no tokens."""
    return (logits.square() * (target + 1)[..., None]).mean()


def in_one_process(
    stages: Sequence[nn.Module], steps: Sequence[Batch], loss_fn: Any, collect: Callable[[], dict[str, Tensor]]
) -> tuple[list[Done], list[dict[str, float]]]:
    """Each step's losses, gradients and sums of attached losses; ``collect`` returns those of the last forward."""
    done, sums = [], []
    for inputs, targets in steps:
        counts = [loss_fn.count(t) if isinstance(loss_fn, TokenLoss) else len(t) for t in targets]
        losses, total = [], {}
        for x, target, count in zip(inputs, targets, counts, strict=True):
            weight = float(count) / float(sum(counts))
            loss = weight * loss_fn(through(stages, x), target)
            attached = {name: weight * each for name, each in collect().items()}
            (loss + sum(attached.values())).backward()
            losses.append(loss.item())
            total = {name: total.get(name, 0.0) + each.item() for name, each in attached.items()}
        done.append(Done(losses, gradients(dict(enumerate(stages)))))
        sums.append(total)
        for stage in stages:
            stage.zero_grad()
    return done, sums


def parts_in_one_process(
    n_stages: int, steps: Sequence[Batch], loss_fn: Any
) -> tuple[list[Done], list[dict[str, float]]]:
    stages = parts(n_stages, attach=False)
    return in_one_process(stages, steps, loss_fn, lambda: {n: x for s in stages for n, x in s.losses.items()})


def runtime_steps(
    rank: int, name: str, n_ranks: int, steps: Sequence[Batch], loss_fn: Any, recompute: bool
) -> tuple[list[Done], list[dict[str, float]]]:
    schedule = build(name, n_ranks, len(steps[0][0]))
    stages = parts(schedule.n_stages)
    mine = {stage: stages[stage] for stage in stages_of(rank, schedule)}
    pipeline = Pipeline(schedule, mine, loss_fn, recompute=recompute, timeout_s=20)
    done, sums = [], []
    for inputs, targets in steps:
        losses = pipeline.step(*for_rank(rank, schedule, inputs, targets))
        done.append(Done(list(losses), gradients(mine)))
        sums.append(pipeline.attached)
        for module in mine.values():
            module.zero_grad()
    return done, sums


def assert_equal_sums(found: Sequence[Sequence[dict[str, float]]], expected: Sequence[dict[str, float]]) -> None:
    for rank, sums in enumerate(found):
        torch.testing.assert_close(sums, expected, rtol=1e-12, atol=0, msg=lambda m, r=rank: f"rank {r}: {m}")


def test_there_are_fifteen_synchronous_schedules() -> None:
    assert len(SYNCHRONOUS) == 15


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("name", "recompute", "loss_fn"),
    crossed(
        SYNCHRONOUS,
        [False, True],
        [pytest.param(mean_square, id="samples"), pytest.param(CrossEntropy(), id="tokens")],
    ),
)
def test_the_runtime_adds_an_attached_loss_under_every_schedule(name: str, recompute: bool, loss_fn: Any) -> None:
    steps, n_stages = [batch(4), batch(4, 1)], build(name, 2, 4).n_stages
    with no_process_left():
        found = on_ranks(2, runtime_steps, name, 2, steps, loss_fn, recompute, timeout_s=30.0)
    expected, sums = parts_in_one_process(n_stages, steps, loss_fn)
    assert_equal_steps([done for done, _ in found], expected)
    assert_equal_sums([each for _, each in found], sums)


@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "zb_v", "chimera"])
def test_an_attached_loss_on_four_ranks(name: str) -> None:
    steps, n_stages = [batch(8)], build(name, 4, 8).n_stages
    found = on_ranks(4, runtime_steps, name, 4, steps, CrossEntropy(), False, timeout_s=30.0)
    expected, sums = parts_in_one_process(n_stages, steps, CrossEntropy())
    assert_equal_steps([done for done, _ in found], expected)
    assert_equal_sums([each for _, each in found], sums)
