"""What notebook 01 measures: the bytes of a step, of building a stage, and how a naive split keeps ranks busy."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from course_pp.launch import on_ranks
from course_pp.model import CrossEntropy, ModelConfig, Transformer, build_stage_module, compute_layer_assignment
from course_pp.runtime import Recorder
from course_pp.schedule import Timeline

__all__ = [
    "BUDGET",
    "DEEP",
    "SMALL",
    "Splits",
    "compare",
    "loss_fn",
    "measured_bytes",
    "peaks_while_building",
    "predicted_bytes",
    "second_forward",
    "time_splits",
    "train_two_ranks",
]

Step = Callable[[nn.Module, Tensor, Tensor, Recorder], Any]
Bytes = dict[str, int]

SMALL = ModelConfig(dim=384, n_layers=8, n_heads=6, vocab_size=2048, max_seq_len=256)
DEEP = replace(SMALL, n_layers=12)
_TINY = replace(SMALL, dim=96, n_layers=5)
BUDGET = 384 * 2**20
"""Bytes of the device that the notebook pretends to have."""

loss_fn = CrossEntropy()


def predicted_bytes(config: ModelConfig, rows: int = 4, seq_len: int = 64) -> Bytes:
    """Bytes of one AdamW step in float32, by formula: Korthikanti et al. 2022, arXiv:2205.05198, section 4."""
    d, h, n = config.dim, config.hidden_dim, config.n_parameters
    floats_per_token = config.n_layers * (8 * d + 4 * h) + 2 * d + config.vocab_size
    return {
        "weights": 4 * n,
        "gradients": 4 * n,
        "AdamW state": 8 * n,
        "activations": 4 * rows * seq_len * floats_per_token,
    }


def measured_bytes(config: ModelConfig, rows: int = 4, seq_len: int = 64) -> Bytes:
    """The same, measured: tensors that can be walked over, and what autograd hands to ``saved_tensors_hooks``."""
    model, (tokens, targets) = Transformer(config), _batch(rows, seq_len)
    kept: list[Tensor] = []
    optimizer = torch.optim.AdamW(model.parameters())
    with saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        loss = loss_fn(model(tokens), targets)
    loss.backward()
    optimizer.step()
    return {**_state_bytes(model, optimizer), "activations": _storage_bytes(kept, but_not=_own(model))}


def second_forward(config: ModelConfig, budget: int) -> None:
    """Run a step, and a second forward that stops at the first activation over ``budget`` bytes.

    Raises:
        MemoryError: names the layer, as an accelerator's allocator would not.
    """
    model, (tokens, targets) = Transformer(config), _batch()
    optimizer = torch.optim.AdamW(model.parameters())
    loss_fn(model(tokens), targets).backward()
    optimizer.step()
    room = budget - sum(_state_bytes(model, optimizer).values())
    kept: list[Tensor] = []
    reached: list[str] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        if _storage_bytes(kept, but_not=_own(model)) > room:
            raise MemoryError(f"out of memory in layer {reached[-1]}, with {room / 2**20:.1f} MiB for activations")
        return tensor

    for name, layer in model.layers.items():
        layer.register_forward_pre_hook(lambda *_, name=name: reached.append(name))
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss_fn(model(tokens), targets)


def peaks_while_building(n_ranks: int = 2) -> dict[str, Bytes]:
    """Return for three ways to build rank 0's stage of the deep model the bytes it keeps, and its peak above them."""
    ways = {"build all, delete": _build_then_delete, "cut on meta": _cut_on_meta, "only the stage": build_stage_module}
    return {name: on_ranks(n_ranks, _peak_while_building, build, n_ranks)[0] for name, build in ways.items()}


@dataclass(frozen=True)
class Comparison:
    """A step on two ranks beside one process, in float64."""

    loss: float
    loss_of_one: float
    largest: float
    """The largest difference of any gradient."""


def compare(step: Step) -> Comparison:
    """Run ``step(stage, tokens, targets, recorder)`` on two ranks, and compare with one process."""
    first, second = on_ranks(2, _loss_and_gradients, step)
    torch.manual_seed(0)
    model, (tokens, targets) = Transformer(_TINY).double(), _batch()
    loss = loss_fn(model(tokens), targets)
    loss.backward()
    split = first[1] | second[1]
    differences = [float((p.grad - split[name]).abs().max()) for name, p in model.named_parameters()]
    return Comparison(second[0], loss.item(), max(differences))


@dataclass(frozen=True)
class Splits:
    """The deep model cut over 1, 2 and 4 ranks.

    Attributes:
        timelines: for each number of ranks the shortest of three runs.
        memory: for each rank its bytes, by kind.
    """

    timelines: Mapping[int, Timeline]
    memory: Mapping[str, Bytes]

    def speed_up(self, n_ranks: int) -> float:
        """How many times as fast as one process."""
        return float(self.timelines[1].makespan / self.timelines[n_ranks].makespan)

    def __str__(self) -> str:
        rows = []
        for p, run in self.timelines.items():
            nobody = max(0.0, 1 - p * float(run.utilisation))
            rows.append(f"p = {p}: speed-up {self.speed_up(p):.2f}, busy {run.utilisation:.1%}, nobody {nobody:.1%}")
        return "\n".join(rows)


def time_splits(step: Step, sizes: Sequence[int] = (1, 2, 4), rounds: int = 3) -> Splits:
    """Time a step of the deep model over each number of ranks in ``sizes``; they take turns, ``rounds`` times."""
    runs = [{p: on_ranks(p, _timed, step) for p in sizes} for _ in range(rounds)]
    timelines = {p: min((each[p][0][1] for each in runs), key=lambda tl: tl.makespan) for p in sizes}
    memory = {f"rank {r} of {p}": kept for p, ranks in runs[0].items() for r, (kept, _) in enumerate(ranks)}
    return Splits(timelines, memory)


def train_two_ranks(step: Step, n_steps: int = 16) -> str:
    """Train a small model for some steps; says how the loss went, and how many parameters have a gradient."""
    ranks = on_ranks(2, _train, step, n_steps)
    curve = " ".join(f"{loss:.2f}" for loss in ranks[1][0][::5])
    counts = ", ".join(f"rank {r} {n} of {total}" for r, (_, n, total) in enumerate(ranks))
    return f"loss {curve}; parameters with a gradient: {counts}"


def _batch(rows: int = 4, seq_len: int = 64) -> tuple[Tensor, Tensor]:
    seeded = torch.Generator().manual_seed(0)
    ids = torch.randint(SMALL.vocab_size, (rows, seq_len + 1), generator=seeded)
    return ids[:, :-1], ids[:, 1:]


def _own(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _storage_bytes(tensors: Iterable[Tensor], but_not: Sequence[Tensor] = ()) -> int:
    """Each storage once: several tensors may be views of one."""
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    own = {tensor.untyped_storage().data_ptr() for tensor in but_not}
    return sum(size for address, size in sizes.items() if address not in own)


def _state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> Bytes:
    parameters = list(model.parameters())
    moments = [tensor for state in optimizer.state.values() for tensor in state.values()]
    return {
        "weights": _storage_bytes(parameters),
        "gradients": _storage_bytes(p.grad for p in parameters if p.grad is not None),
        "AdamW state": _storage_bytes(moments),
    }


def _build_then_delete(config: ModelConfig, stage: int, n_stages: int) -> nn.Module:
    return _keep_only(Transformer(config), stage, n_stages)


def _cut_on_meta(config: ModelConfig, stage: int, n_stages: int) -> nn.Module:
    with torch.device("meta"):
        model = _keep_only(Transformer(config), stage, n_stages)
    model.to_empty(device="cpu")
    model.init_weights_and_freqs()
    return model


def _keep_only(model: Transformer, stage: int, n_stages: int) -> Transformer:
    start, end = compute_layer_assignment(model.config.n_layers, n_stages)[stage]
    for i in range(model.config.n_layers):
        if not start <= i < end:
            del model.layers[str(i)]
    if stage > 0:
        model.embed = None
    if stage < n_stages - 1:
        model.norm = model.head = None
    return model


def _peak_memory() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _peak_while_building(rank: int, build: Callable[[ModelConfig, int, int], nn.Module], n_stages: int) -> Bytes:
    build(replace(DEEP, dim=12, vocab_size=16), rank, n_stages)  # first-time costs
    before = _peak_memory()
    kept = _storage_bytes(build(DEEP, rank, n_stages).parameters())
    return {"kept": kept, "only while building": max(0, _peak_memory() - before - kept)}


def _loss_and_gradients(rank: int, step: Step) -> tuple[Any, dict[str, Tensor | None]]:
    torch.manual_seed(0)
    stage = build_stage_module(_TINY, rank, dist.get_world_size()).double()
    loss = step(stage, *_batch(), Recorder())
    return loss, {name: parameter.grad for name, parameter in stage.named_parameters()}


def _timed(rank: int, step: Step) -> tuple[Bytes, Timeline]:
    stage = build_stage_module(DEEP, rank, dist.get_world_size())
    optimizer, recorder = torch.optim.AdamW(stage.parameters()), Recorder()
    kept: list[Tensor] = []
    step(stage, *_batch(1, 8), recorder)  # a short one, to warm up
    recorder.clear()
    with saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        step(stage, *_batch(), recorder)
    optimizer.step()
    activations = _storage_bytes(kept, but_not=_own(stage))
    return {**_state_bytes(stage, optimizer), "activations": activations}, recorder.timeline()


def _train(rank: int, step: Step, n_steps: int) -> tuple[list[Any], int, int]:
    torch.manual_seed(0)
    stage = build_stage_module(_TINY, rank, 2)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-3)
    losses = []
    for _ in range(n_steps):
        optimizer.zero_grad()
        losses.append(step(stage, *_batch(), Recorder()))
        optimizer.step()
    has_gradient = [p.grad is not None for p in stage.parameters()]
    return losses, sum(has_gradient), len(has_gradient)
