"""The measurements of notebook 06: gradients beside true ones, and runs under each rule."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import mse_loss

from course_pp.launch import on_ranks
from course_pp.runtime import Pipeline, StepFailed
from course_pp.schedule import Schedule, Timeline, Versions, build, ledger

_WIDTH = 16
_HIDDEN = 32
_ROWS = 16
Weights = Mapping[str, Tensor]
_Updates = tuple[list[Weights], list[Tensor]]
Rule = Versions | Literal["flush"]


class _Block(nn.Module):
    """Two linear layers whose result is added to the input, so that a row of them learns fast."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Linear(_WIDTH, _HIDDEN), nn.Tanh(), nn.Linear(_HIDDEN, _WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.inner(x)
        return y


def residual_blocks(p: int = 4, seed: int = 0) -> nn.Sequential:
    """Return a model of ``p`` equal blocks in float64, one for each stage."""
    torch.manual_seed(seed)
    return nn.Sequential(*(_Block() for _ in range(p))).double()


def task(m: int, p: int = 4) -> tuple[Tensor, Tensor]:
    """Return ``m`` microbatches of random rows, and the outputs of another model as targets."""
    seeded = torch.Generator().manual_seed(1)
    inputs = torch.randn(m * _ROWS, _WIDTH, dtype=torch.float64, generator=seeded)
    with torch.no_grad():
        return inputs, residual_blocks(p, seed=1)(inputs)


def steady(run: Timeline) -> float:
    """Return the time of one microbatch in a full pipeline.

    It is measured over the second half of the last stage's backwards.
    """
    done = (run.n_stages - 1, "B")
    ends = sorted(
        s.end for s in run.spans for part in s.action.parts if (part.stage, part.kind) == done
    )
    middle = len(ends) // 2
    return float(ends[-1] - ends[middle - 1]) / (len(ends) - middle)


@dataclass(frozen=True)
class Angles:
    """Degrees between the gradients of each stage and true ones, means over microbatches.

    Attributes:
        own: angle to the gradient of the forward's own computation, in which each stage has the
            weights that its forward used.
        now: angle to the gradient at the newest weights of every stage, which the update changes.
    """

    own: tuple[float, ...]
    now: tuple[float, ...]


def angles(rules: Sequence[Versions], lr: float, p: int = 4, m: int = 24) -> dict[Versions, Angles]:
    """Train on real ranks under each rule; compare each gradient with autograd in one process.

    Args:
        rules: some of ``"none"``, ``"stash"`` and ``"vertical"``.
        lr: learning rate of plain SGD.
        p: ranks, a stage on each.
        m: microbatches, each with an update. The first 2 p are not counted.
    """
    schedule = build("pipedream", p, m)
    by_rank = on_ranks(p, lambda rank: [_updates(rank, schedule, rule, lr) for rule in rules])
    angles = {}
    for k, rule in enumerate(rules):
        angles[rule] = _angles(schedule, rule, [updates[k] for updates in by_rank])
    return angles


def _angles(schedule: Schedule, rule: Versions, kept: Sequence[_Updates]) -> Angles:
    p = schedule.n_stages
    m = schedule.n_microbatches
    used = ledger(schedule, rule)
    inputs, targets = task(m, p)
    own: list[list[float]] = [[] for _ in range(p)]
    now: list[list[float]] = [[] for _ in range(p)]
    for i in range(2 * p, m):
        x, target = inputs[i * _ROWS : (i + 1) * _ROWS], targets[i * _ROWS : (i + 1) * _ROWS]
        at_forward = _gradients([kept[s][0][used.of(s, i).forward] for s in range(p)], x, target)
        newest = _gradients([kept[s][0][used.of(s, i).update] for s in range(p)], x, target)
        for s in range(p):
            found = kept[s][1][used.of(s, i).update]
            own[s].append(_degrees(found, at_forward[s]))
            now[s].append(_degrees(found, newest[s]))
    return Angles(tuple(map(_mean, own)), tuple(map(_mean, now)))


def _updates(rank: int, schedule: Schedule, versions: Versions, lr: float) -> _Updates:
    """Return the weights before each update of this rank's stage, and the update's gradient."""
    stage = residual_blocks(schedule.n_stages)[rank]
    optimizer = torch.optim.SGD(stage.parameters(), lr=lr)
    weights: list[Weights] = []
    gradients: list[Tensor] = []

    def note(*_: object) -> None:
        weights.append({name: p.detach().clone() for name, p in stage.named_parameters()})
        gradients.append(_flat([p.grad for p in stage.parameters()]))

    optimizer.register_step_pre_hook(note)
    pipeline = Pipeline(schedule, stage, mse_loss, optimizers={rank: optimizer}, versions=versions)
    inputs, target = task(schedule.n_microbatches, schedule.n_stages)
    pipeline.step(inputs, target=target)
    return weights, gradients


def _gradients(weights: Sequence[Weights], x: Tensor, target: Tensor) -> list[Tensor]:
    """Return the gradient of each stage, by autograd through all stages."""
    leaves = []
    for each in weights:
        leaves.append({name: value.clone().requires_grad_() for name, value in each.items()})
    for block, each in zip(residual_blocks(len(weights)), leaves, strict=True):
        x = functional_call(block, each, (x,))
    mse_loss(x, target).backward()
    return [_flat([value.grad for value in each.values()]) for each in leaves]


def _flat(gradients: Sequence[Tensor | None]) -> Tensor:
    return torch.cat([g.detach().flatten() for g in gradients if g is not None])


def _degrees(a: Tensor, b: Tensor) -> float:
    # By the difference of unit vectors: acos of a cosine near 1 would turn rounding into a
    # millionth of a degree.
    a, b = a / a.norm(), b / b.norm()
    return math.degrees(2 * math.atan2(float((a - b).norm()), float((a + b).norm())))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


@dataclass(frozen=True)
class LossCurve:
    """A small training run.

    Attributes:
        losses: one loss a microbatch. After the first that is not finite, all are infinite.
    """

    losses: tuple[float, ...]

    @property
    def final(self) -> float:
        """The mean loss of the last 16 microbatches."""
        return _mean(self.losses[-16:])


def train(
    rules: Sequence[Rule], lr: float, m: int = 48, p: int = 4, per_flush: int = 4
) -> dict[Rule, LossCurve]:
    """Train the small model on real ranks, once for each rule.

    Args:
        rules: rules for versions, or ``"flush"``: 1F1B, which updates after each step of
            ``per_flush`` microbatches.
        lr: learning rate of plain SGD.
        m: microbatches.
        p: ranks, a stage on each.
        per_flush: microbatches of an update under ``"flush"`` and ``"2bw"``.
    """

    def on_rank(rank: int) -> list[tuple[float, ...]]:
        return [_losses(rank, rule, lr, m, p, per_flush) for rule in rules]

    curves = {}
    for rule, losses in zip(rules, on_ranks(p, on_rank)[0], strict=True):
        # A run that diverges stops early.
        curves[rule] = LossCurve(losses + (math.inf,) * (m - len(losses)))
    return curves


def _losses(rank: int, rule: Rule, lr: float, m: int, p: int, per_flush: int) -> tuple[float, ...]:
    flushes = rule == "flush"
    schedule = build("1f1b", p, per_flush)
    if not flushes:
        schedule = build("pipedream", p, m, group=per_flush if rule == "2bw" else None)
    stage = residual_blocks(p)[rank]
    optimizer = torch.optim.SGD(stage.parameters(), lr=lr)
    optimizers, versions = (None, None) if rule == "flush" else ({rank: optimizer}, rule)
    pipeline = Pipeline(schedule, stage, mse_loss, optimizers=optimizers, versions=versions)
    inputs, targets = task(m, p)
    losses: tuple[float, ...] = ()
    step = schedule.n_microbatches * _ROWS
    try:
        for at in range(0, len(inputs), step):
            pipeline.step(inputs[at : at + step], target=targets[at : at + step])
            # of equal shares, else they are means
            scale = schedule.n_microbatches if flushes else 1
            losses += tuple(scale * share for share in pipeline.shares)
            if flushes:
                optimizer.step()
                optimizer.zero_grad()
    except StepFailed:
        return losses
    return losses
