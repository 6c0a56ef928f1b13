"""Exercises of notebook 06 that train on real ranks: weight stashing by hand, and the clinic's healed step."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import mse_loss
from torch.optim import Optimizer

from course_pp.exercises.answer import Answer
from course_pp.exercises.exercise import Mistake, Stopped
from course_pp.exercises.hangs import explained
from course_pp.exercises.in_process import unchanged
from course_pp.exercises.judging_steps import TOLERANCE, batch, layers, microbatch_link
from course_pp.exercises.lopsided import LopsidedLoss
from course_pp.exercises.traffic import last_message_waited_for
from course_pp.runtime import (
    Link,
    backward_stage,
    forward_stage,
    recv_activation,
    recv_gradient,
    send_activation,
    send_gradient,
)
from course_pp.schedule import build, ledger

__all__ = [
    "delayed",
    "first_wrong",
    "grade_healed_step",
    "grade_stashed_step",
    "healed_versions_step",
    "stashed_step",
    "trained_by",
]

Microbatches = Sequence[Tensor]


def stashed_step(
    stage: nn.Module, optimizer: Optimizer, microbatches: Microbatches, targets: Microbatches, loss_fn: Any, link: Link
) -> None:
    """Asynchronous 1F1B on this rank; a backward uses the weights of its forward."""
    m, ahead = len(microbatches), link.n_ranks - 1 - link.rank
    in_flight: deque[tuple] = deque()
    sends: list[dist.Work] = []

    def forward(i: int) -> None:
        kept = copy.deepcopy(stage)
        x = recv_activation(microbatches[i], link)
        y = forward_stage(kept, x, targets[i], loss_fn, link)
        in_flight.append((kept, x, y))
        sends.extend(send_activation(y, link))

    def backward() -> None:
        kept, x, y = in_flight.popleft()
        dx = backward_stage(x, y, recv_gradient(y, 1, link))
        sends.extend(send_gradient(dx, link))
        for newest, used in zip(stage.parameters(), kept.parameters(), strict=True):
            newest.grad = used.grad
        optimizer.step()

    for i in range(m + ahead):
        if i < m:
            forward(i)
        if i >= ahead:
            backward()
    for send in sends:
        send.wait()


def healed_versions_step(
    stage: nn.Module, optimizer: Optimizer, microbatches: Microbatches, targets: Microbatches, loss_fn: Any, link: Link
) -> None:
    """Asynchronous 1F1B on this rank, which computes each forward again in its backward."""
    m, ahead = len(microbatches), link.n_ranks - 1 - link.rank
    inputs: deque[Tensor] = deque()
    stash: deque[dict] = deque()
    sends: list[dist.Work] = []

    def forward(i: int) -> None:
        x = recv_activation(microbatches[i], link)
        with torch.no_grad():
            y = forward_stage(stage, x, targets[i], loss_fn, link)
        inputs.append(x)
        stash.append(copy.deepcopy(stage.state_dict()))
        sends.extend(send_activation(y, link))

    def backward(i: int) -> None:
        newest = copy.deepcopy(stage.state_dict())
        stage.load_state_dict(stash.popleft())
        x = inputs.popleft()
        y = forward_stage(stage, x, targets[i], loss_fn, link)
        dx = backward_stage(x, y, recv_gradient(y, 1, link))
        sends.extend(send_gradient(dx, link))
        stage.load_state_dict(newest)
        optimizer.step()
        optimizer.zero_grad()

    for i in range(m + ahead):
        if i < m:
            forward(i)
        if i >= ahead:
            backward(i - ahead)
    for send in sends:
        send.wait()


# What a step is judged by: the weights after each update, beside those of one process.


def _microbatches(m: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    inputs, targets = batch(m)
    return inputs.chunk(m), targets.chunk(m)


def _optimizer(stage: nn.Module, momentum: float) -> Optimizer:
    return torch.optim.SGD(stage.parameters(), lr=0.1, momentum=momentum)


def _flat(stage: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in stage.parameters()])


def delayed(replicas: Sequence[int], m: int, momentum: float, loss_fn: Any = mse_loss) -> list[list[Tensor]]:
    """For each stage its weights after each update, trained in one process with the versions of weight stashing."""
    schedule = build("pipedream", sum(replicas), m, replicas=replicas)
    used, p = ledger(schedule, "stash"), len(replicas)
    stages = list(layers())[:p]
    optimizers = [_optimizer(stage, momentum) for stage in stages]
    history = [[copy.deepcopy(stage.state_dict())] for stage in stages]
    waiting: list[list[list[Tensor]]] = [[] for _ in stages]
    after: list[list[Tensor]] = [[] for _ in stages]
    for i, (x, target) in enumerate(zip(*_microbatches(m), strict=True)):
        leaves = [
            {name: value.clone().requires_grad_() for name, value in history[s][used.of(s, i).forward].items()}
            for s in range(p)
        ]
        for stage, weights in zip(stages, leaves, strict=True):
            x = functional_call(stage, weights, (x,))
        loss_fn(x, target).backward()
        for s, stage in enumerate(stages):
            waiting[s].append([leaf.grad for leaf in leaves[s].values() if leaf.grad is not None])
            if len(waiting[s]) < replicas[s]:
                continue
            for parameter, gradients in zip(stage.parameters(), zip(*waiting[s], strict=True), strict=True):
                parameter.grad = torch.stack(gradients).mean(0)
            waiting[s].clear()
            optimizers[s].step()
            history[s].append(copy.deepcopy(stage.state_dict()))
            after[s].append(_flat(stage))
    return after


class Ran(NamedTuple):
    """What a step did on one rank: its weights after each update, and the most versions that forwards had at once."""

    after: list[Tensor]
    versions: int


class _Storages:
    """The memory of the weights that forwards have used and that is still there; shared by all copies of a stage."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes, self.most = nbytes, 0
        self._alive: WeakSet[torch.UntypedStorage] = WeakSet()

    def __deepcopy__(self, _: object) -> _Storages:
        return self

    def note(self, stage: nn.Module) -> None:
        for parameter in stage.parameters():
            self._alive.add(parameter.untyped_storage())
        self.most = max(self.most, sum(storage.nbytes() for storage in self._alive) // self._nbytes)


class _Watched(nn.Module):
    """A stage that notes which weights its forwards use."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage
        self.seen = _Storages(sum(p.nbytes for p in stage.parameters()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.note(self.stage)
        y: Tensor = self.stage(x)
        return y


def trained_by(
    rank: int, fn: Callable[..., Any], replicas: Sequence[int], sizes: Sequence[int], momentum: float, loss_fn: Any
) -> list[Ran]:
    """Run a step on this rank, once for each number of microbatches."""
    number = next(s for s in range(len(replicas)) if rank < sum(replicas[: s + 1]))
    results = []
    for m in sizes:
        stage = _Watched(layers()[number])
        optimizer, after = _optimizer(stage, momentum), list[Tensor]()
        optimizer.register_step_post_hook(lambda *_: after.append(_flat(stage)))  # noqa: B023
        inputs, targets = _microbatches(m)
        with unchanged(microbatches=inputs, targets=targets), last_message_waited_for(rank, rank - 1):
            fn(stage, optimizer, inputs, targets, loss_fn, microbatch_link())
        results.append(Ran(after, stage.seen.most))
    return results


def first_wrong(found: Sequence[Tensor], expected: Sequence[Tensor]) -> int | None:
    """The first update after which weights differ; None if all are right."""
    for update, wanted in enumerate(expected):
        if update >= len(found) or not torch.allclose(found[update], wanted, rtol=TOLERANCE, atol=TOLERANCE):
            return update
    return None


_SIZES = {4: (8, 2), 3: (5,), 2: (1, 4)}
"""For each number of ranks, with how many microbatches a step is tried."""


def grade_stashed_step(answer: Answer) -> None:
    """Ask for the weights of delayed gradients after each update, and for no more versions than are in flight."""
    for p, sizes in _SIZES.items():
        try:
            ranks = answer.on_ranks(p, trained_by, (1,) * p, sizes, 0.9, LopsidedLoss())
        except Stopped as stopped:
            raise _why_stopped(stopped) from None
        for index, m in enumerate(sizes):
            ran = [rank[index] for rank in ranks]
            where = f"On {p} ranks with {m} microbatch{'es' * (m > 1)}"
            _judge_weights(where, ran, p, m)
            _judge_versions(where, ran, p, m)


def grade_healed_step(answer: Answer) -> None:
    """Judge as `grade_stashed_step` does."""
    grade_stashed_step(answer)


def _why_stopped(stopped: Stopped) -> Mistake:
    if "inplace operation" in stopped.symptom:
        cause = (
            "An update has written over the weights that a backward still needs: forwards have to use copies that no "
            "update changes."
        )
        return Stopped(stopped.how, stopped.symptom, cause, stopped.example)
    return explained(stopped)


def _judge_weights(where: str, ran: Sequence[Ran], p: int, m: int) -> None:
    for rank, each in enumerate(ran):
        if len(each.after) != m:
            cause = "Each backward is followed by an update, with the gradient of its own microbatch."
            raise Mistake(f"{where}, rank {rank} updates {_times(len(each.after))}, not {m}.", cause)
    expected = delayed((1,) * p, m, 0.9, LopsidedLoss())
    wrong = [first_wrong(each.after, want) for each, want in zip(ran, expected, strict=True)]
    if all(update is None for update in wrong):
        return
    shown = "\n".join(
        f"stage {s}: {'right' if update is None else f'wrong from update {update} on'}"
        for s, update in enumerate(wrong)
    )
    symptom = f"{where}, weights differ from those of delayed gradients in one process."
    raise Mistake(symptom, _why_wrong(ran, wrong, p, m), shown)


def _why_wrong(ran: Sequence[Ran], wrong: Sequence[int | None], p: int, m: int) -> str:
    if wrong[-1] == 0:
        if torch.equal(ran[-1].after[0], _flat(layers()[p - 1])):
            return (
                "The update changes nothing: the optimizer's own weights have no gradient by then. A backward through "
                "a copy leaves its gradients on the copy; or was it cleared too early?"
            )
        return "Already the first update differs: it takes the gradient of one microbatch's own mean loss, without 1/m."
    plain = delayed((1,) * p, m, 0.0, LopsidedLoss())
    last = ran[-1].after
    if first_wrong(last, plain[-1]) is None:
        return "The last stage trains as if it had no momentum: is the optimizer's state set back?"
    if wrong[-1] == 1:
        return (
            "The second update differs on the last stage, too. Is a gradient left over from the update before, are old "
            "weights put back after it, or does a second forward come before the first backward?"
        )
    return (
        "The last stage has nothing in flight when it updates, so there no version can be the wrong one. Elsewhere: "
        "does each backward use exactly what its forward used, and does the optimizer go on from its newest state?"
    )


def _times(n: int) -> str:
    return f"{n} time{'s' * (n != 1)}"


def _judge_versions(where: str, ran: Sequence[Ran], p: int, m: int) -> None:
    for rank, each in enumerate(ran):
        enough = min(m, p - rank)
        # One more is let pass: a name may keep a version until it names the next one.
        if each.versions > enough + 1:
            symptom = f"{where} the weights are right, but rank {rank} keeps {each.versions} versions of them"
            raise Mistake(f"{symptom}; {enough} are in flight.", "A version can go when its backward is done.")
