"""Stages that go wrong at a chosen action, and what each rank catches then.

``on_ranks`` reports one rank's exception, so the ranks catch theirs and return them.
"""

import itertools
import os
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course_pp.launch import on_ranks
from course_pp.runtime import Pipeline, StepFailed
from course_pp.schedule import Action, Schedule
from tests.runtime.small import for_rank, stages_of, take_step, watch_the_node

WIDTH, M, SAMPLES = 4, 4, 8
LIMIT_S = 20.0
# Where it began: rank, stage, microbatch and action.
NAMED = re.compile(r"rank \d, stage \d, microbatch \d, action \d[FBIW]\d: ")


class Trouble(Exception):
    """An exception of a user's code."""


@dataclass(frozen=True)
class Where:
    """The action that goes wrong, in which step."""

    action: str
    step: int = 0

    @property
    def parsed(self) -> Action:
        return Action.parse(self.action)

    def text(self, schedule: Schedule) -> str:
        action = self.parsed
        rank = schedule.rank_of(action.stage, action.microbatch)
        return (
            f"rank {rank}, stage {action.stage}, microbatch {action.microbatch}, action"
            f" {self.action}: "
        )


class Tripwire(torch.autograd.Function):
    """The identity, which does something in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, then: Callable[[], None]) -> Tensor:
        ctx.then = then
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.then()
        return grad, None


class Fragile(nn.Module):
    """A layer with mischief at one microbatch, forward or backward.

    Microbatches are told apart by counting calls, so the schedule must have forwards in order.
    """

    def __init__(self, stage: int, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.stage = stage
        self.calls = 0
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.mischief: dict[tuple[str, int], Callable[[], None]] = {}

    def forward(self, x: Tensor) -> Tensor:
        number = self.calls
        self.calls += 1
        self.mischief.get(("F", number), lambda: None)()
        y = self.layer(x)
        if then := self.mischief.get(("B", number)):
            y = Tripwire.apply(y, then)
        return y


def trouble() -> None:
    raise Trouble("the cable is loose")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def oversleep() -> None:
    time.sleep(2)


def fragile(stage: int, wheres: Sequence[Where], then: Callable[[], None]) -> Fragile:
    module = Fragile(stage)
    for where in wheres:
        action = where.parsed
        if action.stage == stage and action.kind == "W":
            at_the_due_time(module.layer.weight, where.step * M + action.microbatch, then)
        elif action.stage == stage:
            kind = "F" if action.kind == "F" else "B"
            module.mischief[kind, where.step * M + action.microbatch] = then
    return module


def at_the_due_time(weight: Tensor, due: int, then: Callable[[], None]) -> None:
    """Fail when the gradient of ``weight`` is accumulated for time number ``due``, from 0."""
    count = itertools.count()

    def hook(*_: object) -> None:
        if next(count) == due:
            then()

    # A hook on the weight itself would bring its gradient forward to I.
    weight.watched = watch_the_node(weight, hook)  # type: ignore[attr-defined]


def batch(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(SAMPLES, WIDTH, dtype=dtype), torch.randn(SAMPLES, WIDTH, dtype=dtype)


@dataclass
class Caught:
    """How a rank's steps ended: those that went well, the class of the exception and of its cause,
    and a StepFailed's rank, stage, microbatch, action and began_elsewhere; ``seconds`` are those of
    the last step.
    """

    steps: int
    kind: str | None = None
    text: str = ""
    origin: str = ""
    seconds: float = 0.0
    cause: str | None = None
    fields: tuple[Any, ...] = ()


def caught(pipeline: Pipeline, steps: int, inputs: Any, targets: Any, **options: Any) -> Caught:
    for step in range(steps):
        started = time.monotonic()
        try:
            take_step(pipeline, inputs, targets, **options)
        except Exception as error:
            took = time.monotonic() - started
            cause = type(error.__cause__).__name__ if error.__cause__ is not None else None
            fields: tuple[Any, ...] = ()
            origin = ""
            if isinstance(error, StepFailed):
                fields = (
                    error.rank,
                    error.stage,
                    error.microbatch,
                    str(error.action),
                    error.began_elsewhere,
                )
                origin = str(error).rpartition("\n")[0] if error.began_elsewhere else str(error)
            return Caught(step, type(error).__name__, str(error), origin, took, cause, fields)
    return Caught(steps)


def going_wrong(
    rank: int,
    schedule: Schedule,
    wheres: Sequence[Where],
    then: Callable[[], None],
    options: Mapping[str, Any],
) -> Caught:
    modules = {stage: fragile(stage, wheres, then) for stage in stages_of(rank, schedule)}
    pipeline = Pipeline(
        schedule, modules, F.mse_loss, **{"timeout_s": 20, **updating(schedule, modules), **options}
    )
    return caught(pipeline, 3, *for_rank(rank, schedule, *batch()))


def updating(schedule: Schedule, modules: Mapping[int, nn.Module]) -> dict[str, Any]:
    """The options of stages that update their own weights."""
    if all(part.kind != "U" for part in schedule.parts):
        return {}
    optimizers = {
        stage: torch.optim.SGD(module.parameters(), lr=0.01) for stage, module in modules.items()
    }
    return {"optimizers": optimizers, "versions": "stash"}


def run(
    schedule: Schedule, wheres: Sequence[Where], then: Callable[[], None] = trouble, **options: Any
) -> list[Caught]:
    return on_ranks(
        schedule.n_ranks, going_wrong, schedule, wheres, then, options, timeout_s=LIMIT_S
    )


def assert_all_say(found: Sequence[Caught], schedule: Schedule, where: Where, what: str) -> None:
    """Assert that every rank raised StepFailed in that step, with one account of its origin."""
    origin = where.text(schedule) + what
    guilty = schedule.rank_of(where.parsed.stage, where.parsed.microbatch)
    for rank, one in enumerate(found):
        assert one.kind == "StepFailed", f"rank {rank}: {one}"
        assert one.steps == where.step
        assert one.origin == origin, f"rank {rank}"
        assert one.text.startswith(origin)
        assert one.fields == (
            guilty,
            where.parsed.stage,
            where.parsed.microbatch,
            where.action,
            rank != guilty,
        )
        if rank == guilty:
            assert one.text == origin
            assert one.cause is not None
        else:
            assert one.text != origin
            assert one.cause is None
        assert one.seconds < 10
