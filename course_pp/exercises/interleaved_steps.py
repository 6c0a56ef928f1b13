"""The bug clinic of notebook 04: steps of interleaved 1F1B on real ranks, ill ones and a healed one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_pp.exercises.answer import Answer
from course_pp.exercises.exercise import Mistake, Stopped
from course_pp.exercises.hangs import explained
from course_pp.exercises.in_process import unchanged
from course_pp.exercises.interleaved_ring import Ring
from course_pp.exercises.lopsided import LopsidedLoss
from course_pp.exercises.traffic import last_message_waited_for
from course_pp.schedule import Action, build

__all__ = ["PATIENTS", "Finding", "Patient", "compared", "grade_healed_step", "healed_chunks_step", "stepped"]

Step = Callable[..., Any]
Finding = Literal["right", "none", "wrong"]
Chunk = tuple[int, int]
"""A rank, and a chunk of it."""


def healed_chunks_step(
    chunks: list[nn.Module],
    order: list[Action],
    microbatches: list[torch.Tensor],
    targets: list[torch.Tensor],
    loss_fn: nn.Module,
    ring: Ring,
) -> None:
    """One step on this rank, in the given order."""
    m, kept, sends = len(microbatches), dict[tuple, tuple](), []
    for action in order:
        stage, i = action.stage, action.microbatch
        if action.kind == "F":
            x = microbatches[i] if stage == 0 else ring.recv_activation()
            y = chunks[stage // ring.n_ranks](x)
            if stage == ring.last_stage:
                y = loss_fn(y, targets[i])
            else:
                sends.append(ring.send_activation(y))
            kept[stage, i] = x, y
        else:
            x, y = kept.pop((stage, i))
            dy = torch.full_like(y, 1 / m) if stage == ring.last_stage else ring.recv_gradient()
            y.backward(dy)
            if stage > 0:
                sends.append(ring.send_gradient(x.grad))
    for send in sends:
        send.wait()


@dataclass(frozen=True)
class Patient:
    """A step that runs and gives wrong gradients; called as the step is.

    Attributes:
        neighbours: rank r holds stages r v to r v + v - 1, which are neighbours in the model.
        by_remainder: stage s goes to chunk ``s % v``.
        by_rank: the last rank begins each backward with 1/m, and rank 0 sends no gradient, whatever the stage is.
    """

    neighbours: bool = False
    by_remainder: bool = False
    by_rank: bool = False

    def __call__(
        self,
        chunks: Sequence[nn.Module],
        order: Sequence[Action],
        microbatches: Sequence[Tensor],
        targets: Sequence[Tensor],
        loss_fn: Callable[[Tensor, Tensor], Tensor],
        ring: Ring,
    ) -> Tensor | None:
        """Run the step; return the loss on the last rank."""
        m, kept = len(microbatches), dict[tuple[int, int], tuple[Tensor, Tensor]]()
        losses, sends = list[Tensor](), list[dist.Work]()
        for action in order:
            stage, i = action.stage, action.microbatch
            ends = ring.rank == ring.n_ranks - 1 if self.by_rank else stage == ring.last_stage
            begins = ring.rank == 0 if self.by_rank else stage == 0
            chunk = chunks[stage % len(chunks) if self.by_remainder else stage // ring.n_ranks]
            if action.kind == "F":
                x = microbatches[i] if stage == 0 else ring.recv_activation()
                y = chunk(x)
                if stage == ring.last_stage:
                    y = loss_fn(y, targets[i])
                    losses.append(y.detach())
                else:
                    sends.append(ring.send_activation(y))
                kept[stage, i] = x, y
            else:
                x, y = kept.pop((stage, i))
                y.backward(torch.full_like(y, 1 / m) if ends else ring.recv_gradient())
                if not begins:
                    sends.append(ring.send_gradient(x.grad))
        for send in sends:
            send.wait()
        return torch.stack(losses).mean() if losses else None


PATIENTS: dict[str, Patient] = {
    "A": Patient(neighbours=True),
    "B": Patient(by_remainder=True),
    "C": Patient(by_rank=True),
}
"""Interleaved steps that run and raise nothing, each with another bug."""

_ROWS, _WIDTH = 2, 4
_TOLERANCE = 1e-9
# By ranks: chunks a rank and microbatches of each step.
_SIZES = {4: ((2, 8), (2, 4)), 3: ((2, 6), (3, 3)), 2: ((2, 4), (4, 2))}

Gradients = dict[Chunk, dict[str, Tensor | None]]


def stepped(
    rank: int, step: Step, n_chunks: int, m: int, loss_fn: nn.Module, width: int = _WIDTH
) -> tuple[Gradients, Any]:
    """Run a step on this rank; return the gradients of its chunks, by name in the whole model, and its result."""
    p = dist.get_world_size()
    n_stages = p * n_chunks
    neighbours = isinstance(step, Patient) and step.neighbours
    stages = [rank * n_chunks + c if neighbours else c * p + rank for c in range(n_chunks)]
    model, (inputs, targets) = _model(n_stages, width), _batch(m, width)
    chunks = [model[stage] for stage in stages]
    order = list(build("interleaved_1f1b", p, m, n_chunks).actions[rank])
    microbatches, parts = inputs.chunk(m), targets.chunk(m)
    ring = Ring((_ROWS, width), torch.float64, n_stages)
    weights = [[p.detach() for p in chunk.parameters()] for chunk in chunks]
    with (
        unchanged(microbatches=microbatches, targets=parts, chunks=weights, order=order),
        last_message_waited_for(rank, rank - 1),
    ):
        result = step(chunks, order, microbatches, parts, loss_fn, ring)
    gradients: Gradients = {}
    for c, (stage, chunk) in enumerate(zip(stages, chunks, strict=True)):
        gradients[rank, c] = {f"{stage}.{name}": p.grad for name, p in chunk.named_parameters()}
    return gradients, result


def compared(
    gradients: Mapping[Chunk, Mapping[str, Tensor | None]], expected: Mapping[str, Tensor]
) -> dict[Chunk, Finding]:
    """What became of each chunk's gradients: all right, none there, or something wrong."""
    found: dict[Chunk, Finding] = {}
    for chunk, named in gradients.items():
        if all(gradient is None for gradient in named.values()):
            found[chunk] = "none"
        else:
            found[chunk] = "right" if all(_same(g, expected[name]) for name, g in named.items()) else "wrong"
    return found


def of_one_process(n_stages: int, m: int, loss_fn: nn.Module, width: int = _WIDTH) -> tuple[float, dict[str, Tensor]]:
    """The loss and every gradient of one process, by name."""
    model, (inputs, targets) = _model(n_stages, width), _batch(m, width)
    loss = loss_fn(model(inputs), targets)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def grade_healed_step(answer: Answer) -> None:
    """Ask for gradients equal to one process's in every chunk of every rank, on 2 to 4 ranks."""
    for p, sizes in _SIZES.items():
        try:
            ranks = answer.on_ranks(p, _all_stepped, sizes)
        except Stopped as stopped:
            raise explained(stopped) from None
        for index, (v, m) in enumerate(sizes):
            merged: Gradients = {}
            for rank in ranks:
                merged |= rank[index]
            _judge(merged, p, v, m)


def _all_stepped(rank: int, fn: Step, sizes: Sequence[tuple[int, int]]) -> list[Gradients]:
    return [stepped(rank, fn, v, m, LopsidedLoss())[0] for v, m in sizes]


def _judge(gradients: Gradients, p: int, v: int, m: int) -> None:
    _, expected = of_one_process(p * v, m, LopsidedLoss())
    found = compared(gradients, expected)
    if all(finding == "right" for finding in found.values()):
        return
    table = "\n".join(
        f"rank {rank}: " + ", ".join(f"chunk {c} {found[rank, c]}" for c in range(v)) for rank in range(p)
    )
    ill = sum(finding != "right" for finding in found.values())
    symptom = (
        f"On {p} ranks with {v} chunks each and {m} microbatches, {ill} of {len(found)} chunks do not have the "
        "gradients of one process."
    )
    raise Mistake(symptom, _why_ill(found, gradients, expected, m, v), table)


def _why_ill(
    found: Mapping[Chunk, Finding], gradients: Gradients, expected: Mapping[str, Tensor], m: int, v: int
) -> str:
    if all(finding == "none" for finding in found.values()):
        return "No backward has run: it begins from `y`, with `y.backward(dy)`."
    if "none" in found.values():
        return (
            "Some chunk was never used, so another was used in its place. Which of its chunks does a rank need for "
            "stage s, if it holds stages r, r + p, r + 2p and so on?"
        )
    flat = {name: g for named in gradients.values() for name, g in named.items()}
    for factor, how in ((m, "large"), (1 / m, "small")):
        if all(g is not None and _same(g, factor * expected[name]) for name, g in flat.items()):
            return f"Each is m times too {how}: the last stage begins its backward with 1/m, once a microbatch."
    last = {chunk: finding for chunk, finding in found.items() if chunk[1] == v - 1}
    if all(finding == "right" for finding in last.values()):
        return (
            "Every last chunk is right, the earlier ones are not: the gradient is lost where it goes from rank 0 round "
            "to the last rank. Ends are stages, not ranks: the last rank receives a gradient for its earlier chunks, "
            "and rank 0 sends one for its later ones."
        )
    return (
        "Follow one microbatch: does each stage get what the stage before it sent, and does each backward take the x "
        "and y of its own stage and microbatch?"
    )


def _same(found: Tensor | None, expected: Tensor) -> bool:
    return found is not None and float((found - expected).abs().max()) <= _TOLERANCE * float(expected.abs().max())


def _model(n_stages: int, width: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)) for _ in range(n_stages))
    return nn.Sequential(*layers).double()


def _batch(m: int, width: int) -> tuple[Tensor, Tensor]:
    seeded = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(2, _ROWS * m, width, dtype=torch.float64, generator=seeded)
    return inputs, targets
