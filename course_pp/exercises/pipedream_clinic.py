"""The bug clinic of notebook 06: asynchronous training by hand that goes wrong, update by update beside one process."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import Optimizer

from course_pp.exercises.pipedream_steps import Microbatches, delayed, first_wrong, trained_by
from course_pp.launch import on_ranks
from course_pp.runtime import (
    Link,
    backward_stage,
    forward_stage,
    recv_activation,
    recv_gradient,
    send_activation,
    send_gradient,
)

__all__ = ["PATIENTS", "Findings", "examine"]


@dataclass(frozen=True)
class Findings:
    """The weights of a run beside those of delayed gradients in one process.

    Attributes:
        first_wrong: for each stage the first update after which its weights differ; None where all are right.
    """

    first_wrong: tuple[int | None, ...]

    @property
    def equal(self) -> bool:
        """Whether every stage has the right weights after every update."""
        return all(update is None for update in self.first_wrong)

    def __str__(self) -> str:
        if self.equal:
            return "right"
        told = ["right" if update is None else f"from update {update}" for update in self.first_wrong]
        return "wrong, by stage: " + ", ".join(told)


def examine(
    step: Callable[..., Any], replicas: Sequence[int] = (1, 1, 1, 1), momentum: float = 0.9, n_microbatches: int = 8
) -> Findings:
    """Train with a hand-written step on real ranks, and compare the weights after each update with one process.

    Args:
        step: ``step(stage, optimizer, microbatches, targets, loss_fn, link)``.
        replicas: how many ranks share each stage.
        momentum: of SGD.
        n_microbatches: each has an update of its own; replicas share theirs.

    Raises:
        Whatever :func:`course_pp.launch.on_ranks` raises for the step.
    """
    ranks = on_ranks(sum(replicas), trained_by, step, tuple(replicas), (n_microbatches,), momentum, mse_loss)
    expected = delayed(replicas, n_microbatches, momentum)
    firsts = [sum(replicas[:stage]) for stage in range(len(replicas))]
    found = [first_wrong(ranks[rank][0].after, expected[stage]) for stage, rank in enumerate(firsts)]
    return Findings(tuple(found))


def _patient_a(
    stage: nn.Module, optimizer: Optimizer, microbatches: Microbatches, targets: Microbatches, loss_fn: Any, link: Link
) -> None:
    _sick_step(stage, optimizer, microbatches, targets, loss_fn, link, late=True)


def _patient_b(
    stage: nn.Module, optimizer: Optimizer, microbatches: Microbatches, targets: Microbatches, loss_fn: Any, link: Link
) -> None:
    _sick_step(stage, optimizer, microbatches, targets, loss_fn, link, moments=True)


def _sick_step(
    stage: nn.Module,
    optimizer: Optimizer,
    microbatches: Microbatches,
    targets: Microbatches,
    loss_fn: Any,
    link: Link,
    late: bool = False,
    moments: bool = False,
) -> None:
    m, ahead = len(microbatches), link.n_ranks - 1 - link.rank
    inputs, stash, sends = deque[Tensor](), deque[Any](), list[dist.Work]()

    def put_away() -> None:
        stash.append(copy.deepcopy((stage.state_dict(), optimizer.state_dict())))

    def forward(i: int) -> None:
        x = recv_activation(microbatches[i], link)
        with torch.no_grad():
            y = forward_stage(stage, x, targets[i], loss_fn, link)
        inputs.append(x)
        if not late:
            put_away()
        sends.extend(send_activation(y, link))

    def backward(i: int) -> None:
        newest = copy.deepcopy(stage.state_dict())
        if stash:
            weights, state = stash.popleft()
            stage.load_state_dict(weights)
            if moments:
                optimizer.load_state_dict(state)
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
        if i < m and late:
            put_away()
    for send in sends:
        send.wait()


def _patient_c(
    stage: nn.Module, optimizer: Optimizer, microbatches: Microbatches, targets: Microbatches, loss_fn: Any, link: Link
) -> None:
    """Two replicas of stage 0 on ranks 0 and 1, stage 1 on rank 2, which counts forwards and backwards apart."""
    rank, last, share = dist.get_rank(), 2, 2
    mates, sends = dist.new_group([0, 1]), list[dist.Work | None]()
    if rank == last:
        for backwards, target in enumerate(targets, start=1):
            x = torch.empty(link.shape, dtype=link.dtype)
            dist.recv(x, (backwards - 1) % share)
            x.requires_grad_()
            y = loss_fn(stage(x), target)
            [dx] = torch.autograd.grad(y, x, retain_graph=True)
            y.backward()
            sends.append(dist.isend(dx, backwards % share))
            optimizer.step()
            optimizer.zero_grad()
    mine, in_flight = microbatches[rank::share] if rank < last else (), deque[tuple[nn.Module, Tensor]]()
    for i in range(len(mine) + (rank < last)):
        if i < len(mine):
            kept = copy.deepcopy(stage)
            in_flight.append((kept, kept(mine[i])))
            sends.append(dist.isend(in_flight[-1][1].detach(), last))
        if i >= 1:
            kept, y = in_flight.popleft()
            dy = torch.empty(link.shape, dtype=link.dtype)
            dist.recv(dy, last)
            gradients = torch.autograd.grad(y, list(kept.parameters()), dy)
            for newest, gradient in zip(stage.parameters(), gradients, strict=True):
                dist.all_reduce(gradient, group=mates)
                newest.grad = gradient / share
            optimizer.step()
            optimizer.zero_grad()
    for send in sends:
        if send is not None:
            send.wait()


PATIENTS: dict[str, tuple[Callable[..., None], tuple[int, ...]]] = {
    "A": (_patient_a, (1, 1, 1, 1)),
    "B": (_patient_b, (1, 1, 1, 1)),
    "C": (_patient_c, (2, 1)),
}
"""Steps that run and go wrong, each for another reason, and the replicas of each stage that they are for."""
