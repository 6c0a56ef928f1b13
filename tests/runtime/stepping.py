"""Any stages, stepped by the runtime and by one process, microbatch by microbatch.

found = run_steps(build("1f1b", 3, 4), make_stages, steps)
assert_equal_steps(found, in_one_process(4, make_stages, steps))
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from course_pp.launch import on_ranks
from course_pp.runtime import Pipeline, Recorder
from course_pp.runtime.batch import split
from course_pp.runtime.wire import Wire
from course_pp.schedule import Schedule
from course_pp.step.loss import TokenLoss
from tests.processes import no_process_left
from tests.runtime.small import for_rank, stages_of, take_step

TOLERANCE = 1e-12  # float64

Stages = Sequence[nn.Module | None]


@dataclass
class Step:
    """A batch and the circumstances of its step.

    Attributes:
        prepare: called with the stages before the step.
        around: what the step runs inside.
        divisor: over how many tokens the mean is, if not over those of ``targets``.
    """

    inputs: Any
    targets: Any
    prepare: Callable[[Stages], None] = lambda stages: None
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    keep_gradients: bool = False
    divisor: float | None = None


@dataclass
class Done:
    """One step of a rank: losses by microbatch, gradients by name, and bytes of each message."""

    losses: list[float]
    gradients: dict[str, Tensor | None]
    sent: list[int] = field(default_factory=list)


class CountingWire:
    """Notes the size of everything sent on ``wire``."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self.device = wire.device
        self.window = wire.window
        self.sent: list[int] = []

    def isend(self, buffer: Tensor, target: int, number: int) -> dist.Work:
        self.sent.append(buffer.nbytes)
        return self._wire.isend(buffer, target, number)

    def irecv(self, buffer: Tensor, source: int, number: int) -> dist.Work:
        return self._wire.irecv(buffer, source, number)


def count_messages(pipeline: Pipeline) -> CountingWire:
    """From now on what ``pipeline`` sends from here is counted."""
    wire = CountingWire(pipeline._executor.mailbox._wire)
    pipeline._executor.mailbox._wire = wire
    return wire


def run_steps(
    schedule: Schedule,
    make_stages: Callable[[], Stages],
    steps: Sequence[Step],
    loss_fn: Any = F.mse_loss,
    **options: Any,
) -> list[list[Done]]:
    """Return the result of each step on each rank; ``options`` are the pipeline's."""
    with no_process_left():
        return on_ranks(
            schedule.n_ranks,
            partial(stepped, **options),
            schedule,
            make_stages,
            steps,
            loss_fn,
            timeout_s=30.0,
        )


def stepped(
    rank: int,
    schedule: Schedule,
    make_stages: Callable[[], Stages],
    steps: Sequence[Step],
    loss_fn: Any = F.mse_loss,
    record_memory: bool = False,
    **options: Any,
) -> list[Done]:
    """Return the result of each step on ``rank``, with gradients by ``"stage.parameter"``."""
    stages = make_stages()
    if record_memory:
        options["recorder"] = Recorder(memory=True)
    mine = {stage: stages[stage] for stage in stages_of(rank, schedule)}
    pipeline = Pipeline(schedule, mine, loss_fn, **{"timeout_s": 20, **options})
    wire = count_messages(pipeline)
    done = []
    for step in steps:
        _begin(step, stages)
        wire.sent.clear()
        with step.around():
            given = for_rank(rank, schedule, step.inputs, step.targets)
            take_step(pipeline, *given, divisor=step.divisor)
        done.append(Done(list(pipeline.shares), gradients(mine), [*wire.sent]))
    return done


def in_one_process(
    n: int, make_stages: Callable[[], Stages], steps: Sequence[Step], loss_fn: Any = F.mse_loss
) -> list[Done]:
    """Run the same steps without a pipeline: ``n`` microbatches, one after another."""
    stages = make_stages()
    done = []
    for step in steps:
        _begin(step, stages)
        inputs = microbatches("inputs", step.inputs, n)
        targets = microbatches("targets", step.targets, n)
        weights = _weights(loss_fn, targets)
        losses = []
        with step.around():
            for i in range(n):
                output = through(stages, inputs[i])
                loss = loss_fn(output, targets[i]) * weights[i]
                if loss.requires_grad:
                    loss.backward()
                losses.append(loss.item())
        done.append(Done(losses, gradients(dict(enumerate(stages)))))
    return done


def microbatches(name: str, batch: Any, n: int) -> Sequence[Any]:
    return batch if isinstance(batch, list) else split(name, batch, n)


def through(stages: Stages, value: Any) -> Any:
    """``value`` through all the stages."""
    for stage in stages:
        if stage is None:
            continue
        if isinstance(value, tuple | list):
            value = stage(*value)
        elif isinstance(value, Mapping):
            value = stage(**value)
        else:
            value = stage(value)
    return value


def gradients(stages: Mapping[int, nn.Module | None]) -> dict[str, Tensor | None]:
    """A copy of each, by ``"stage.parameter"``; None where there is none."""
    return {
        f"{stage}.{name}": None if p.grad is None else p.grad.clone()
        for stage, module in stages.items()
        if module is not None
        for name, p in module.named_parameters()
    }


def assert_equal_steps(
    found: Sequence[Sequence[Done]], reference: Sequence[Done], tolerance: float = TOLERANCE
) -> None:
    """Each rank's losses and all their gradients together equal the reference's, step by step.

    Args:
        tolerance: relative to the largest entry of a gradient; 0 for the same bits.
    """
    for number, expected in enumerate(reference):
        seen = set()
        for rank, steps in enumerate(found):
            step = steps[number]
            where = f"step {number}, rank {rank}"
            losses, others = torch.tensor([step.losses, expected.losses], dtype=torch.float64)
            _assert_close(losses, others, tolerance, f"{where}: losses")
            for name, gradient in step.gradients.items():
                _assert_close(
                    gradient, expected.gradients[name], tolerance, f"{where}: gradient of {name}"
                )
                seen.add(name)
        assert seen == set(expected.gradients), (
            f"step {number}: held by no rank: {set(expected.gradients) - seen}"
        )


def _assert_close(
    value: Tensor | None, expected: Tensor | None, tolerance: float, what: str
) -> None:
    assert (value is None) == (expected is None), f"{what} is {value}, expected {expected}"
    if value is None or expected is None:
        return
    assert (value.dtype, value.shape) == (expected.dtype, expected.shape), what
    difference = (value - expected).abs().max().item()
    limit = tolerance * expected.abs().max().item()
    assert difference <= limit, f"{what} differs by {difference:.1e}, more than {limit:.0e}"


def _begin(step: Step, stages: Stages) -> None:
    if not step.keep_gradients:
        for stage in stages:
            if stage is not None:
                stage.zero_grad()
    step.prepare(stages)


def _weights(loss_fn: Any, targets: Sequence[Tensor]) -> list[float | Tensor]:
    """Return the factor with which the microbatches' means add up to the batch's."""
    if isinstance(loss_fn, TokenLoss):
        counts = [loss_fn.count(target) for target in targets]
        return [count / sum(counts) for count in counts]
    return [len(target) / sum(map(len, targets)) for target in targets]
