"""What notebook 02 looks at: a hand-written step beside one process, and real steps cut finer and finer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from course_pp.exercises.gpipe_clinic import PATIENTS
from course_pp.launch import on_ranks
from course_pp.model import CrossEntropy, ModelConfig, Transformer, build_stage_module
from course_pp.runtime import Link, Pipeline, Recorder
from course_pp.schedule import Timeline, build

__all__ = ["PATIENTS", "Findings", "Slots", "examine", "time_cuts"]

_CONFIG = ModelConfig(dim=64, n_layers=8, n_heads=4, vocab_size=256, max_seq_len=64)
_ROWS, _SEQ_LEN = 8, 32
_WIDTH = 512


@dataclass(frozen=True)
class Findings:
    """A step's loss and gradients beside those of one process.

    Attributes:
        loss: of the batch, as the last rank returned it.
        loss_of_one: that of one process.
        sizes: for each rank the norm of its gradients over the right ones' norm.
        cosines: for each rank the cosine of the angle between the two.
        largest: the largest difference of any gradient.
        gradients: every parameter's gradient, by name in the whole model.
    """

    loss: float
    loss_of_one: float
    sizes: tuple[float, ...]
    cosines: tuple[float, ...]
    largest: float
    gradients: Mapping[str, Tensor]

    def __str__(self) -> str:
        ranks = [
            f"rank {rank} × {size:.2f} cos {cosine:.2f}"
            for rank, (size, cosine) in enumerate(zip(self.sizes, self.cosines, strict=True))
        ]
        return f"loss {self.loss:.4f} (one process {self.loss_of_one:.4f}); gradients: {', '.join(ranks)}"


def examine(step: Callable[..., Any], n_microbatches: int, *args: Any, n_ranks: int = 3) -> Findings:
    """Run a step on real ranks, and compare it with one process.

    Args:
        step: ``step(stage, inputs, targets, m, loss_fn, link, *args)``; returns the loss on the last rank.
        n_microbatches: m.
        n_ranks: one stage on each.

    Raises:
        Whatever :func:`course_pp.launch.on_ranks` raises for the step.
    """
    ranks = on_ranks(n_ranks, _stepped, step, n_microbatches, *args)
    loss, expected = _of_one_process()
    found = [_flat(gradients) for _, gradients in ranks]
    right = [_flat({name: expected[name] for name in gradients}) for _, gradients in ranks]
    return Findings(
        loss=float(ranks[-1][0]),
        loss_of_one=loss,
        sizes=tuple(float(f.norm() / r.norm()) for f, r in zip(found, right, strict=True)),
        cosines=tuple(float(cosine_similarity(f, r, dim=0)) for f, r in zip(found, right, strict=True)),
        largest=max(float((f - r).abs().max()) for f, r in zip(found, right, strict=True)),
        gradients={name: gradient for _, gradients in ranks for name, gradient in gradients.items()},
    )


@dataclass(frozen=True)
class Slots:
    """The same rows cut into m microbatches, timed for real.

    Attributes:
        alone: for each m the timeline of the shortest step on one rank.
        shared: likewise on two ranks.
    """

    alone: Mapping[int, Timeline]
    shared: Mapping[int, Timeline]

    def slot_ms(self, m: int) -> float:
        """A forward and a backward of one microbatch on a rank alone."""
        return 1e3 * float(self.alone[m].makespan) / m

    def step_ms(self, m: int) -> float:
        """The step on two ranks."""
        return 1e3 * float(self.shared[m].makespan)

    @property
    def best(self) -> int:
        """The m with the shortest step on two ranks."""
        return min(self.shared, key=self.step_ms)

    def __str__(self) -> str:
        rows = [
            f"m = {m:2}: m + 1 slots of {self.slot_ms(m):5.2f} ms are {(m + 1) * self.slot_ms(m):5.1f} ms; measured "
            f"{self.step_ms(m):5.1f} ms"
            for m in self.shared
        ]
        return "\n".join(rows)


def time_cuts(sizes: Sequence[int], rows: int = 512, repeats: int = 3) -> Slots:
    """Time GPipe steps over the same rows in m microbatches, for each m in ``sizes``, on one rank and on two."""
    alone, shared = (on_ranks(p, _shortest_steps, tuple(sizes), rows, repeats)[0] for p in (1, 2))
    return Slots(alone, shared)


def _stepped(rank: int, step: Callable[..., Any], m: int, *args: Any) -> tuple[Any, dict[str, Tensor]]:
    torch.manual_seed(0)
    inputs, targets = _batch()
    stage = build_stage_module(_CONFIG, rank, dist.get_world_size()).double()
    link = Link((len(inputs) // m, _SEQ_LEN, _CONFIG.dim), torch.float64)
    loss = step(stage, inputs, targets, m, CrossEntropy(), link, *args)
    return loss, {name: p.grad for name, p in stage.named_parameters() if p.grad is not None}


def _of_one_process() -> tuple[float, dict[str, Tensor]]:
    torch.manual_seed(0)
    model, (inputs, targets) = Transformer(_CONFIG).double(), _batch()
    loss = CrossEntropy()(model(inputs), targets)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _batch() -> tuple[Tensor, Tensor]:
    seeded = torch.Generator().manual_seed(0)
    ids = torch.randint(_CONFIG.vocab_size, (_ROWS, _SEQ_LEN + 1), generator=seeded)
    return ids[:, :-1], ids[:, 1:]


def _flat(gradients: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([gradients[name].flatten() for name in sorted(gradients)])


def _shortest_steps(rank: int, sizes: Sequence[int], rows: int, repeats: int) -> dict[int, Timeline]:
    stage = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(4)))
    x, y, best = torch.randn(rows, _WIDTH), torch.randn(rows, _WIDTH), dict[int, Timeline]()
    p, recorder = dist.get_world_size(), Recorder()
    pipelines = {m: Pipeline(build("gpipe", p, m), stage, nn.MSELoss(), recorder=recorder) for m in sizes}
    for m in tuple(sizes) * repeats:
        recorder.clear()
        pipelines[m].step(x, y)
        run = recorder.timeline()
        best[m] = min(run, best.get(m, run), key=lambda timeline: timeline.makespan)
    return best
