"""The bug clinic of notebook 05: ZB-H1 by hand on real ranks, healthy and sick, and its grader."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_pp.exercises.answer import Answer
from course_pp.exercises.exercise import Mistake, Stopped
from course_pp.exercises.expect import close, expect_number
from course_pp.exercises.hangs import explained_in_line
from course_pp.exercises.in_process import unchanged
from course_pp.exercises.judging_steps import (
    MICROBATCHES,
    TOLERANCE,
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
from course_pp.runtime import Link, forward_stage, partition_model, recv_gradient, send_activation, send_gradient

__all__ = ["PATIENTS", "grade_healed_split_step", "gradient_norm", "healed_split_step"]


def gradient_norm(stage: nn.Module) -> float:
    """The norm of all gradients there are, of all ranks: what clipping asks for. Call it on every rank at once."""
    squares = sum((p.grad.double().square().sum() for p in stage.parameters() if p.grad is not None), torch.tensor(0.0))
    total = squares.double().clone()
    if dist.is_initialized():
        dist.all_reduce(total)
    return float(total.sqrt())


def healed_split_step(
    stage: nn.Module, microbatches: list[torch.Tensor], targets: list[torch.Tensor], loss_fn: nn.Module, link: Link
) -> float:
    """One step of ZB-H1 on this rank, which receives into slots that it uses again; returns the norm."""
    m, ahead = len(microbatches), link.n_ranks - 1 - link.rank
    free = deque(torch.empty(link.shape, dtype=link.dtype) for _ in range(min(m, link.n_ranks)))
    in_flight, waiting, sends = deque[tuple](), deque[tuple](), []

    def forward(i: int) -> None:
        slot = free.popleft()
        if link.is_first:
            slot.copy_(microbatches[i])
        else:
            dist.recv(slot, link.rank - 1)
        x = slot.detach().requires_grad_()
        y = forward_stage(stage, x, targets[i], loss_fn, link)
        in_flight.append((slot, x, y))
        sends.extend(send_activation(y, link))

    def input_backward() -> None:
        slot, x, y = in_flight.popleft()
        dy = recv_gradient(y, m, link)
        [dx] = torch.autograd.grad(y, x, dy, retain_graph=True)
        sends.extend(send_gradient(dx, link))
        waiting.append((slot, y, dy))

    def weight_backward() -> None:
        slot, y, dy = waiting.popleft()
        torch.autograd.backward(y, dy, inputs=list(stage.parameters()))
        free.append(slot)

    for i in range(m + ahead):
        if i < m:
            forward(i)
        if i >= ahead:
            input_backward()
            if len(waiting) > link.rank:
                weight_backward()
    while waiting:
        weight_backward()
    for send in sends:
        send.wait()
    return gradient_norm(stage)


class _Stepped(NamedTuple):
    """What a step left on one rank.

    Attributes:
        gradients: by name in the whole model; None where there is none.
        norm: what it returned.
        early: whether a weight gradient was there before the forward of microbatch p - 1.
        places: the most memory that inputs of this stage had at once, in inputs.
    """

    gradients: dict[str, Tensor | None]
    norm: Any
    early: bool
    places: int


def grade_healed_split_step(answer: Answer) -> None:
    """Ask for gradients and norm equal to one process's, for W's that wait, and for no more memory than 1F1B's."""
    for p, sizes in MICROBATCHES.items():
        try:
            ranks = answer.on_ranks(p, _step_on_rank, sizes)
        except Stopped as stopped:
            # Python's words for what it finds empty, and not for an index that is too large.
            if stopped.error == "IndexError" and "pop from " in stopped.symptom:
                raise Mistake(stopped.symptom, _OUT_OF_SLOTS, stopped.example) from None
            raise explained_in_line(stopped) from None
        for index, m in enumerate(sizes):
            stepped = [rank[index] for rank in ranks]
            where = f"On {p} ranks with {m} microbatch{'es' * (m > 1)}"
            expected = one_process(m)
            missing = "`torch.autograd.grad` returns gradients and adds none: W has to put them into `.grad`."
            why = partial(_why_wrong, expected=expected, m=m, p=p)
            judge_gradients(where, [step.gradients for step in stepped], expected, missing, why)
            _judge_norm(where, stepped, expected)
            _judge_order(where, m, stepped)


_OUT_OF_SLOTS = (
    "If it is `free` that is empty: a slot is in use from its F until its W, so more are in use at once than before. "
    "1F1B lets every rank hold `min(m, p)`."
)


class _Watched(InputsWatched):
    """A stage that notes the memory of its inputs, and whether weight gradients come early."""

    def __init__(self, stage: nn.Module, n_ranks: int) -> None:
        super().__init__(stage)
        self._size, self.forwards, self.early = n_ranks, 0, False

    def forward(self, x: Tensor) -> Tensor:
        self.note(x)
        self.forwards += 1
        if self.forwards == self._size:
            self.early = any(p.grad is not None for p in self.stage.parameters())
        y: Tensor = self.stage(x)
        return y


def _step_on_rank(rank: int, fn: Callable[..., Any], sizes: Sequence[int]) -> list[_Stepped]:
    results = []
    for m in sizes:
        stage = _Watched(partition_model(layers(), dist.get_world_size(), rank), dist.get_world_size())
        inputs, targets = batch(m)
        microbatches, parts = inputs.chunk(m), targets.chunk(m)
        weights = {name: p.detach() for name, p in stage.stage.named_parameters()}
        with (
            received_activations(rank - 1, stage.note),
            unchanged(microbatches=microbatches, targets=parts, stage=weights),
            last_message_waited_for(rank, rank - 1),
        ):
            norm = fn(stage, microbatches, parts, LopsidedLoss(), microbatch_link())
        gradients = {name: p.grad for name, p in stage.stage.named_parameters()}
        norm = norm.detach() if isinstance(norm, Tensor) else norm
        results.append(_Stepped(gradients, norm, stage.early, stage.places))
    return results


def _why_wrong(wrong: Wrong, expected: dict[str, Tensor], m: int, p: int) -> str:
    for factor, how in (
        (m, "m times too large: `recv_gradient` gives the 1/m on the last rank"),
        (2, "twice too large: I and W both add to them"),
    ):
        if m > 1 and all(same(gradient, factor * expected[name]) for (_, name), gradient in wrong.items()):
            return f"Each that differs is {how}."
    if all(rank > 0 and name.endswith(".0.weight") for rank, name in wrong):
        return (
            "Only weights that multiply what a rank has received: W needs that input once more. Who has written to its "
            "slot in between?"
        )
    if all(0 < rank < p - 1 for rank, _ in wrong):
        return (
            "Rank 0 puts nothing off, and on the last rank every `dy` is 1/m: there it does not matter which `y` meets "
            "which `dy`. Elsewhere both have to be of one microbatch."
        )
    return "Does every microbatch have its W, once, from its own `y` and `dy`?"


def _judge_norm(where: str, ranks: Sequence[_Stepped], expected: dict[str, Tensor]) -> None:
    norm = float(sum(gradient.square().sum() for gradient in expected.values()) ** 0.5)
    for rank, stepped in enumerate(ranks):
        found = expect_number(stepped.norm, f"healed_split_step(…) on rank {rank}")
        if not close(found, norm, TOLERANCE):
            symptom = f"{where} the gradients are right, but the norm on rank {rank} is {found:.6g} and not {norm:.6g}."
            raise Mistake(symptom, "It is of all gradients: take it after the last W.")


def _judge_order(where: str, m: int, ranks: Sequence[_Stepped]) -> None:
    p = len(ranks)
    for rank, stepped in enumerate(ranks):
        if stepped.early and p <= m:
            symptom = f"{where} the gradients are right, but rank {rank} has done a W before its forward {p - 1}."
            cause = f"That W delays an I that rank {rank - 1} waits for. Let `rank` of them wait, as before."
            raise Mistake(symptom, cause)
        # One more is let pass: a name may keep an input until it names the next one.
        # And with few microbatches, the p slots that more of them need.
        if rank and p <= m and stepped.places > p + 1:
            symptom = f"{where} the gradients are right, but rank {rank} has memory for {stepped.places} inputs"
            cause = (
                "A slot is free again after the W of its microbatch: give it back, and p slots are enough. Count the "
                "slots, used or not, and copies of inputs as well."
            )
            raise Mistake(f"{symptom}; 1F1B lets a rank hold {p}.", cause)


def _patient_a(stage: nn.Module, microbatches: Any, targets: Any, loss_fn: Any, link: Link) -> float:
    return _sick_step(stage, microbatches, targets, loss_fn, link, freed_early=True)


def _patient_b(stage: nn.Module, microbatches: Any, targets: Any, loss_fn: Any, link: Link) -> float:
    return _sick_step(stage, microbatches, targets, loss_fn, link, mixed_up=True)


def _patient_c(stage: nn.Module, microbatches: Any, targets: Any, loss_fn: Any, link: Link) -> float:
    return _sick_step(stage, microbatches, targets, loss_fn, link, norm_early=True)


PATIENTS: dict[str, Callable[..., float]] = {"A": _patient_a, "B": _patient_b, "C": _patient_c}
"""Steps of ZB-H1 that run and go wrong, each for another reason; each returns the norm that it would clip by."""


def _sick_step(
    stage: nn.Module,
    microbatches: Sequence[Tensor],
    targets: Sequence[Tensor],
    loss_fn: nn.Module,
    link: Link,
    freed_early: bool = False,
    mixed_up: bool = False,
    norm_early: bool = False,
) -> float:
    m, ahead = len(microbatches), link.n_ranks - 1 - link.rank
    n_slots = ahead + 1 if freed_early else link.n_ranks
    free = deque(torch.empty(link.shape, dtype=link.dtype) for _ in range(n_slots))
    in_flight = deque[tuple[Tensor, Tensor, Tensor]]()
    outputs, gradients, slots, sends = deque[Tensor](), deque[Tensor](), deque[Tensor](), list[dist.Work]()

    def forward(i: int) -> None:
        slot = free.popleft()
        if link.is_first:
            slot.copy_(microbatches[i])
        else:
            dist.recv(slot, link.rank - 1)
        x = slot.detach().requires_grad_()
        y = forward_stage(stage, x, targets[i], loss_fn, link)
        in_flight.append((slot, x, y))
        sends.extend(send_activation(y, link))

    def input_backward() -> None:
        slot, x, y = in_flight.popleft()
        dy = recv_gradient(y, m, link)
        [dx] = torch.autograd.grad(y, x, dy, retain_graph=True)
        sends.extend(send_gradient(dx, link))
        outputs.append(y)
        gradients.append(dy)
        (free if freed_early else slots).append(slot)

    def weight_backward() -> None:
        dy = gradients.pop() if mixed_up else gradients.popleft()
        torch.autograd.backward(outputs.popleft(), dy, inputs=list(stage.parameters()))
        if slots:
            free.append(slots.popleft())

    for i in range(m + ahead):
        if i < m:
            forward(i)
        if i >= ahead:
            input_backward()
            if len(outputs) > link.rank:
                weight_backward()
    norm = gradient_norm(stage) if norm_early else 0.0
    while outputs:
        weight_backward()
    for send in sends:
        send.wait()
    return norm if norm_early else gradient_norm(stage)
