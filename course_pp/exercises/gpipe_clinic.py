"""The bug clinic of notebook 02: three patients, a step that has what all of them have, and what its symptoms mean."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_pp.exercises.answer import Answer
from course_pp.exercises.exercise import Mistake, Stopped
from course_pp.exercises.expect import close, expect_number
from course_pp.exercises.hangs import explained
from course_pp.exercises.in_process import unchanged
from course_pp.exercises.lopsided import LopsidedLoss
from course_pp.exercises.traffic import last_message_waited_for
from course_pp.runtime import Link, partition_model, recv_activation, recv_gradient, send_activation, send_gradient

__all__ = ["PATIENTS", "grade_mended_step", "mended_step"]


def mended_step(
    stage: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor, m: int, loss_fn: torch.nn.Module, link: Link
) -> torch.Tensor | None:
    """One AFAB step with m microbatches; the mean loss of the batch on the last rank."""
    in_flight, losses, sends = [], [], []
    for microbatch, target in zip(inputs.chunk(m), targets.chunk(m), strict=True):
        x = recv_activation(microbatch, link)
        y = stage(x)
        sends += send_activation(y, link)
        if link.is_last:
            y = loss_fn(y, target) / m
            losses.append(y.detach())
        in_flight.append((x, y))
    for x, y in in_flight:
        if link.is_last:
            y.backward()
        else:
            y.backward(recv_gradient(y, m, link))
        sends += send_gradient(x.grad, link)
    for send in sends:
        send.wait()
    return sum(losses) if link.is_last else None


def _patient_a(
    stage: nn.Module, inputs: Tensor, targets: Tensor, m: int, loss_fn: nn.Module, link: Link
) -> Tensor | None:
    return _sick_step(stage, inputs.chunk(m), targets.chunk(m), loss_fn, link, oldest_first=link.is_last, share=1 / m)


def _patient_b(
    stage: nn.Module, inputs: Tensor, targets: Tensor, m: int, loss_fn: nn.Module, link: Link
) -> Tensor | None:
    strided = [targets[i::m] for i in range(m)]
    return _sick_step(stage, inputs.chunk(m), strided, loss_fn, link, oldest_first=True, share=1 / m)


def _patient_c(
    stage: nn.Module, inputs: Tensor, targets: Tensor, m: int, loss_fn: nn.Module, link: Link
) -> Tensor | None:
    return _sick_step(stage, inputs.chunk(m), targets.chunk(m), loss_fn, link, oldest_first=True, share=1.0)


PATIENTS: dict[str, Callable[..., Tensor | None]] = {"A": _patient_a, "B": _patient_b, "C": _patient_c}
"""Steps that run and give wrong gradients, each for another reason. Called as ``mended_step`` is."""


def _sick_step(
    stage: nn.Module,
    microbatches: Sequence[Tensor],
    targets: Sequence[Tensor],
    loss_fn: nn.Module,
    link: Link,
    oldest_first: bool,
    share: float,
) -> Tensor | None:
    in_flight, losses, sends = [], [], []
    for microbatch, target in zip(microbatches, targets, strict=True):
        x = recv_activation(microbatch, link)
        y = stage(x)
        sends += send_activation(y, link)
        if link.is_last:
            y = loss_fn(y, target)
            losses.append(y.detach())
        in_flight.append((x, y))
    while in_flight:
        x, y = in_flight.pop(0 if oldest_first else -1)
        y.backward(torch.full_like(y, share) if link.is_last else recv_gradient(y, len(microbatches), link))
        sends += send_gradient(x.grad, link)
    for send in sends:
        send.wait()
    return torch.stack(losses).mean() if link.is_last else None


_STEP_ROWS = 12
_STEP_WIDTH = 3


class _Stepped(NamedTuple):
    """What one step, or several, left on one rank."""

    loss: Any
    gradients: dict[str, Tensor | None]


def grade_mended_step(answer: Answer) -> None:
    loss, gradients = _whole_step()
    for p, m in ((2, 1), (1, 3), (3, 3), (2, 4), (3, 2)):
        try:
            ranks = answer.on_ranks(p, _stepped, m, 1)
        except Stopped as e:
            raise explained(e) from None
        _judge_step(f"On {p} rank{'s' * (p > 1)} with {m} microbatch{'es' * (m > 1)}", m, ranks, loss, gradients)
    for r, rank in enumerate(answer.on_ranks(2, _stepped, 2, 2)):
        if any(g is None or _ratio(g, gradients[name]) != 2.0 for name, g in rank.gradients.items()):
            raise Mistake(
                f"On rank {r} of 2 a second step does not add its gradients to the first's.",
                "Add to `.grad`, as `backward` does: do not clear or scale what is there. 1/m belongs to the loss.",
            )


def _judge_step(where: str, m: int, ranks: Sequence[_Stepped], loss: float, gradients: dict[str, Tensor]) -> None:
    found = expect_number(ranks[-1].loss, "what mended_step returns on the last rank")
    if not close(found, loss):
        cause = "The loss is known before any backward: compare how inputs and targets are cut into microbatches."
        if close(found, m * loss):
            cause = "That is the sum of the microbatches' losses: return their mean."
        elif close(m * found, loss):
            cause = "It is divided by m twice."
        elif close(found, m * m * loss):
            cause = "It is multiplied by m; the mean over m microbatches divides by it."
        elif found == 0:
            cause = "No microbatch's loss is in it."
        elif any(close(found, part) or close(m * found, part) for part in _losses_of_microbatches(m)):
            cause = "That is what a single microbatch adds: sum over all of them."
        elif m == 1:
            cause = (
                "With one microbatch nothing is cut: look at what the stage and `loss_fn(output, target)` are given."
            )
        raise Mistake(f"{where} the loss is {found:.8g}; one process has {loss:.8g}.", cause)
    missing = {r: name for r, rank in enumerate(ranks) for name, g in rank.gradients.items() if g is None}
    if missing:
        r = min(missing)
        cause = (
            "Backward has to start from the output that still has its graph, on every rank and for every microbatch."
        )
        raise Mistake(f"{where} parameter {missing[r]} of rank {r} has no gradient.", cause)
    ratios = [{_ratio(g, gradients[name]) for name, g in rank.gradients.items() if g is not None} for rank in ranks]
    if all(ratio == {1.0} for ratio in ratios):
        return
    table = "\n".join(f"rank {r}: {_told(ratio)}" for r, ratio in enumerate(ratios))
    raise Mistake(f"{where} the loss is right and the gradients are not.", _why_wrong(ratios, m), table)


def _why_wrong(ratios: Sequence[set[float | None]], m: int) -> str:
    everywhere = set().union(*ratios)
    if everywhere == {float(m)}:
        return "Exactly m times too large on every rank: each microbatch adds its own mean, and nothing divides by m."
    if everywhere == {round(1 / m, 6)}:
        return "Exactly an m-th on every rank: 1/m enters twice. It belongs in one place, the last rank."
    if everywhere <= {round(m**-k, 6) for k in range(len(ratios) + 1)}:
        return (
            "Smaller by another power of m from rank to rank: 1/m enters on more than one rank; the chain rule already "
            "carries it. It belongs on the last one only."
        )
    if None not in everywhere:
        return "Wrong by a factor: look where gradients are scaled; 1/m enters once, on the last rank."
    if len(ratios) > 1 and ratios[-1] == {1.0}:
        return (
            "The last rank is right, those before it are not: a gradient arrives, but it belongs to another "
            "microbatch. Compare the order in which the ranks do their backwards."
        )
    return "Look at what each backward starts from, and which microbatch it belongs to."


def _stepped(rank: int, fn: Callable[..., Any], m: int, n_steps: int) -> _Stepped:
    stage = partition_model(_layers(), dist.get_world_size(), rank)
    inputs, targets = _step_batch()
    link = Link((_STEP_ROWS // m, _STEP_WIDTH), torch.float64)
    weights = {name: p.detach() for name, p in stage.named_parameters()}
    for _ in range(n_steps):
        with unchanged(inputs=inputs, targets=targets, stage=weights), last_message_waited_for(rank, rank - 1):
            loss = fn(stage, inputs, targets, m, LopsidedLoss(), link)
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in stage.named_parameters()}
    if isinstance(loss, Tensor):
        loss = loss.item() if loss.numel() == 1 else loss.detach()
    return _Stepped(loss, gradients)


def _whole_step() -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one process."""
    model, (inputs, targets) = _layers(), _step_batch()
    loss = LopsidedLoss()(model(inputs), targets)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _losses_of_microbatches(m: int) -> list[float]:
    model, (inputs, targets) = _layers(), _step_batch()
    pairs = zip(inputs.chunk(m), targets.chunk(m), strict=True)
    return [LopsidedLoss()(model(x), target).item() for x, target in pairs]


def _layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(_STEP_WIDTH, _STEP_WIDTH), nn.Tanh()) for _ in range(4))).double()


def _step_batch() -> tuple[Tensor, Tensor]:
    seeded = torch.Generator().manual_seed(1)
    both = torch.randn(2, _STEP_ROWS, _STEP_WIDTH, dtype=torch.float64, generator=seeded)
    return both[0], both[1]


def _ratio(found: Tensor, expected: Tensor) -> float | None:
    """The factor between the two, if it is one factor."""
    factor = float((found * expected).sum() / expected.square().sum())
    return round(factor, 6) if torch.allclose(found, factor * expected, rtol=0, atol=1e-10) else None


def _told(ratios: set[float | None]) -> str:
    ratio, *others = ratios
    if ratio is None or others:
        return "different from those of one process, and by no single factor"
    return "right" if ratio == 1 else f"{ratio:g} times those of one process"
