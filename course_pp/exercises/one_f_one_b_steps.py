"""Exercises of notebook 03 that run a step on real ranks: messages that do not block, and the bug clinic."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_pp.exercises.answer import Answer
from course_pp.exercises.exercise import Mistake, Stopped
from course_pp.exercises.hangs import explained_in_line
from course_pp.exercises.in_process import unchanged
from course_pp.exercises.judging_steps import (
    MICROBATCHES,
    InputsWatched,
    Wrong,
    batch,
    judge_gradients,
    layers,
    microbatch_link,
    one_process,
    received_activations,
    same,
)
from course_pp.exercises.lopsided import LopsidedLoss
from course_pp.exercises.traffic import last_message_waited_for
from course_pp.runtime import (
    Link,
    backward_stage,
    forward_stage,
    partition_model,
    recv_activation,
    recv_gradient,
    send_activation,
    send_gradient,
)

__all__ = [
    "PATIENTS",
    "grade_healed_step",
    "grade_step",
    "healed_step",
    "received_activations",
    "step_without_deadlock",
]


def step_without_deadlock(
    stage: nn.Module, microbatches: list[torch.Tensor], targets: list[torch.Tensor], loss_fn: nn.Module, link: Link
) -> None:
    """One 1F1B step on this rank."""
    m, in_flight, sends = len(microbatches), deque[tuple](), []

    def forward(i: int) -> None:
        x = recv_activation(microbatches[i], link)
        y = forward_stage(stage, x, targets[i], loss_fn, link)
        in_flight.append((x, y))
        sends.extend(send_activation(y, link))

    def backward() -> None:
        x, y = in_flight.popleft()
        dx = backward_stage(x, y, recv_gradient(y, m, link))
        sends.extend(send_gradient(dx, link))

    warm_up = min(m, link.n_ranks - 1 - link.rank)
    for i in range(warm_up):
        forward(i)
    for i in range(warm_up, m):
        forward(i)
        backward()
    while in_flight:
        backward()
    for send in sends:
        send.wait()


def healed_step(
    stage: nn.Module, microbatches: list[torch.Tensor], targets: list[torch.Tensor], loss_fn: nn.Module, link: Link
) -> None:
    """One 1F1B step on this rank, with memory for no more than 1F1B holds."""
    m, in_flight, sends = len(microbatches), deque[tuple](), []
    warm_up = min(m, link.n_ranks - 1 - link.rank)
    slots = [torch.empty(link.shape, dtype=link.dtype) for _ in range(warm_up + 1)]

    def forward(i: int) -> None:
        x = microbatches[i]
        if not link.is_first:
            slot = slots[i % len(slots)]
            dist.recv(slot, link.rank - 1)
            x = slot.detach().requires_grad_()
        y = forward_stage(stage, x, targets[i], loss_fn, link)
        in_flight.append((x, y))
        sends.extend(send_activation(y, link))

    def backward() -> None:
        x, y = in_flight.popleft()
        dx = backward_stage(x, y, recv_gradient(y, m, link))
        sends.extend(send_gradient(dx, link))

    for i in range(warm_up):
        forward(i)
    for i in range(warm_up, m):
        forward(i)
        backward()
    while in_flight:
        backward()
    for send in sends:
        send.wait()


_BEFORE = 1.0
"""What each number of each gradient is before the step, which adds to it as a backward does."""


class _Stepped(NamedTuple):
    """What a step left on one rank.

    Attributes:
        gradients: what was added to the gradients that were there before, by name in the whole model; None where
            nothing was.
        order: its forwards and backwards as they began, ``"FFBFBB"``.
        places: the most memory that held inputs received from the previous rank, in inputs.
    """

    gradients: dict[str, Tensor | None]
    order: str
    places: int

    @property
    def peak(self) -> int:
        """The most forwards in flight."""
        return max(accumulate((1 if kind == "F" else -1 for kind in self.order), initial=0))


def grade_healed_step(answer: Answer) -> None:
    """Judge as `grade_step` does, and allow no more memory for what is received than 1F1B needs."""
    grade_step(answer, places_count=True)


def grade_step(answer: Answer, places_count: bool = False) -> None:
    """Ask for gradients equal to one process's, and for no more in flight than 1F1B needs, on 2 to 4 ranks."""
    for p, sizes in MICROBATCHES.items():
        try:
            ranks = answer.on_ranks(p, _step_on_rank, sizes)
        except Stopped as stopped:
            raise explained_in_line(stopped) from None
        for index, m in enumerate(sizes):
            stepped = [rank[index] for rank in ranks]
            where = f"On {p} ranks with {m} microbatch{'es' * (m > 1)}"
            expected, missing = (
                one_process(m),
                "Backward has to run for every microbatch, from the `y` that still has its graph.",
            )
            why = partial(_why_wrong, expected=expected, m=m, p=p)
            judge_gradients(where, [step.gradients for step in stepped], expected, missing, why)
            _judge_orders(where, m, stepped)
            if places_count:
                _judge_places(where, stepped)


class _Counted(InputsWatched):
    """A stage that notes its forwards and backwards, and the memory for what it is given."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__(stage)
        self.order = ""

    def forward(self, x: Tensor) -> Tensor:
        self.note(x)
        y: Tensor = self.stage(x)
        self.order += "F"
        y.register_hook(self._begin_backward)
        return y

    def _begin_backward(self, _: Tensor) -> None:
        self.order += "B"


def _step_on_rank(rank: int, fn: Callable[..., Any], sizes: Sequence[int]) -> list[_Stepped]:
    results = []
    for m in sizes:
        stage = _Counted(partition_model(layers(), dist.get_world_size(), rank))
        inputs, targets = batch(m)
        microbatches, parts = inputs.chunk(m), targets.chunk(m)
        weights = {name: p.detach() for name, p in stage.stage.named_parameters()}
        for parameter in stage.parameters():
            parameter.grad = torch.full_like(parameter, _BEFORE)
        with (
            received_activations(rank - 1, stage.note),
            unchanged(microbatches=microbatches, targets=parts, stage=weights),
            last_message_waited_for(rank, rank - 1),
        ):
            fn(stage, microbatches, parts, LopsidedLoss(), microbatch_link())
        _demand_drain(rank, m, stage.order)
        gradients = {name: _added(p) for name, p in stage.stage.named_parameters()}
        results.append(_Stepped(gradients, stage.order, stage.places))
    return results


def _demand_drain(rank: int, m: int, order: str) -> None:
    """Refuse a step without its last backwards at once: the others wait for the messages, and time is all they tell."""
    warm_up, done = _warm_up(rank, dist.get_world_size(), m), order.count("B")
    if warm_up and 0 < done == m - warm_up:
        raise Mistake(
            f"With {m} microbatches, rank {rank} returned after {done} of {m} backwards.",
            "After the last forward, as many backwards are left as the warm-up had forwards: the drain.",
            f"rank {rank}  {order}",
        )


def _warm_up(rank: int, p: int, m: int) -> int:
    return min(m, p - 1 - rank)


def _order(m: int, warm_up: int) -> str:
    """What a rank does under 1F1B after that many forwards."""
    return "F" * warm_up + "FB" * (m - warm_up) + "B" * warm_up


def _added(parameter: Tensor) -> Tensor | None:
    gradient = parameter.grad
    return None if gradient is None or bool((gradient == _BEFORE).all()) else gradient - _BEFORE


def _why_wrong(wrong: Wrong, expected: dict[str, Tensor], m: int, p: int) -> str:
    if len(wrong) == len(expected):
        if all(same(gradient + _BEFORE, expected[name]) for (_, name), gradient in wrong.items()):
            return "What `.grad` held before the step is gone: add to it, as `backward` does, and clear nothing."
        for factor, how in ((m, "large"), (1 / m, "small")):
            if all(same(gradient, factor * expected[name]) for (_, name), gradient in wrong.items()):
                return f"Each is m times too {how}. `recv_gradient` gives the 1/m on the last rank, once."
    powers = [m**-k for k in range(1, p)] if m > 1 else []
    if all(any(same(gradient, power * expected[name]) for power in powers) for (_, name), gradient in wrong.items()):
        return "1/m enters on more than one rank; the chain rule already carries it from the last one."
    if all(rank > 0 and name.endswith(".0.weight") for rank, name in wrong):
        return (
            "Only weights that multiply what a rank has received: their gradient needs that input once more, in "
            "backward. Who has written to it in between?"
        )
    if all(rank < p - 1 for rank, _ in wrong):
        return (
            "The last rank is right and others are not: the gradient that comes back belongs to the oldest microbatch "
            "in flight. Which one does your backward take?"
        )
    return "Look at which microbatch each backward belongs to, and at what it starts from."


def _judge_orders(where: str, m: int, ranks: Sequence[_Stepped]) -> None:
    p = len(ranks)
    for rank, stepped in enumerate(ranks):
        enough = min(m, p - rank)
        if stepped.peak > enough:
            symptom = f"{where} the gradients are right, but rank {rank} holds {stepped.peak} activations"
            cause = "In the steady state a backward follows each forward."
            if rank and stepped.peak == ranks[rank - 1].peak:
                cause = "The warm-up gets shorter from rank to rank: `p - 1 - rank` forwards."
            elif stepped.peak < m and stepped.order == _order(m, stepped.peak - 1):
                cause = (
                    f"The warm-up of rank {rank} is {stepped.peak - 1} forwards instead of {p - 1 - rank}. The forward "
                    "that comes after it is in flight, too."
                )
            raise Mistake(f"{symptom}; 1F1B holds {enough}.", cause)
    for rank, stepped in enumerate(ranks):
        warm_up, begun = _warm_up(rank, p, m), stepped.order.find("B") - 1
        if stepped.order != (order := _order(m, warm_up)):
            cause = "One backward follows each forward of the steady state, and the drain comes after the last forward."
            if begun < warm_up and stepped.order == _order(m, begun):
                cause = (
                    f"The warm-up of rank {rank} is too short: {begun} forwards instead of {warm_up}, "
                    "`min(m, p - 1 - rank)`."
                )
            raise Mistake(
                f"{where} the gradients are right, but rank {rank} does not work in the order of 1F1B.",
                cause,
                f"rank {rank}  {stepped.order}\n1F1B    {order}",
            )


def _judge_places(where: str, ranks: Sequence[_Stepped]) -> None:
    p = len(ranks)
    for rank in range(1, p):
        # With few microbatches, the slots that more of them need are let pass.
        enough, places = p - rank, ranks[rank].places
        # One more is let pass: a name may keep an input until it names the next one.
        if places > enough + 1:
            symptom = f"{where} the gradients are right, but rank {rank} has memory for {places} received activations"
            cause = (
                "That many are never in flight at once: a slot is free again after the backward of its microbatch. "
                "Count the slots, used or not, and a copy of each input as well."
            )
            raise Mistake(f"{symptom}; 1F1B needs {enough}.", cause)


def _patient_a(
    stage: nn.Module, microbatches: Sequence[Tensor], targets: Sequence[Tensor], loss_fn: nn.Module, link: Link
) -> Tensor | None:
    return _sick_step(stage, microbatches, targets, loss_fn, link, detached=True)


def _patient_b(
    stage: nn.Module, microbatches: Sequence[Tensor], targets: Sequence[Tensor], loss_fn: nn.Module, link: Link
) -> Tensor | None:
    return _sick_step(stage, microbatches, targets, loss_fn, link, n_slots=max(1, link.n_ranks - 1 - link.rank))


def _patient_c(
    stage: nn.Module, microbatches: Sequence[Tensor], targets: Sequence[Tensor], loss_fn: nn.Module, link: Link
) -> Tensor | None:
    return _sick_step(stage, microbatches, targets, loss_fn, link, one_outbox=True)


PATIENTS: dict[str, Callable[..., Tensor | None]] = {"A": _patient_a, "B": _patient_b, "C": _patient_c}
"""1F1B steps that run and give wrong gradients, each for another reason; the last rank returns the loss. With one
microbatch B and C are healthy, and C is so whenever each message is taken before the next one is written."""


def _sick_step(
    stage: nn.Module,
    microbatches: Sequence[Tensor],
    targets: Sequence[Tensor],
    loss_fn: nn.Module,
    link: Link,
    detached: bool = False,
    n_slots: int | None = None,
    one_outbox: bool = False,
) -> Tensor | None:
    m, in_flight = len(microbatches), deque[tuple[Tensor, Tensor]]()
    losses: list[Tensor] = []
    sends: list[dist.Work] = []
    slots = torch.empty(n_slots or m, *link.shape, dtype=link.dtype)
    outbox = torch.empty(link.shape, dtype=link.dtype)

    def forward(i: int) -> None:
        x = microbatches[i]
        if not link.is_first:
            dist.recv(slots[i % len(slots)], link.rank - 1)
            x = slots[i % len(slots)].detach().requires_grad_()
        y = forward_stage(stage, x, targets[i], loss_fn, link)
        if link.is_last:
            losses.append(y.detach())
        elif detached:
            y = y.detach().requires_grad_()
        in_flight.append((x, y))
        message = outbox.copy_(y.detach()) if one_outbox and not link.is_last else y
        sends.extend(send_activation(message, link))

    def backward() -> None:
        x, y = in_flight.popleft()
        dx = backward_stage(x, y, recv_gradient(y, m, link))
        sends.extend(send_gradient(torch.zeros_like(x) if dx is None else dx, link))

    for i in range(m):
        forward(i)
        if i >= link.n_ranks - 1 - link.rank:
            backward()
    while in_flight:
        backward()
    for send in sends:
        send.wait()
    return torch.stack(losses).mean() if link.is_last else None
