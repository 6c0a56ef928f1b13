"""A run in two halves, each at a layout of its own, and the same run in one piece."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from course_pp.model import CrossEntropy, ModelConfig, expert_loads, update_router_bias
from course_pp.parallel import PipelineSchedule, get_dp_rank, init_distributed
from course_pp.training.checkpoint import AsyncSaver, load, save
from tests.equality import adamw, batches
from tests.parallel.layouts import SEQ_LEN, Case, Data, WholeModel, build_modules, build_pipeline

BATCH = 24  # every layout's data-parallel ranks times its microbatches divides it

Layout = Case


def config_of(tied: bool, **changes: Any) -> ModelConfig:
    """Layers for two stages on each of four ranks, and a vocabulary that nothing divides."""
    sizes = {
        "dim": 32,
        "n_layers": 8,
        "n_heads": 8,
        "n_kv_heads": 4,
        "ffn_dim": 48,
        "vocab_size": 61 if tied else 72,
    }
    return ModelConfig(**{**sizes, "max_seq_len": SEQ_LEN, "tie_embeddings": tied, **changes})


def data_of(config: ModelConfig, n_steps: int) -> Data:
    """The global batches of a run."""
    return batches(config, BATCH, SEQ_LEN, n_steps)


@dataclass
class Part:
    """What some steps of a run leave on one rank."""

    losses: list[float] = field(default_factory=list)
    local: dict[str, Tensor] = field(default_factory=dict)
    rng: list[float] = field(default_factory=list)


class Trainee:
    """All that a training script builds on one rank: modules, optimizer, scheduler, the step."""

    def __init__(
        self, layout: Layout, config: ModelConfig, seed: int = 0, dropout: float = 0.0
    ) -> None:
        self.layout = layout
        self.mesh = init_distributed(layout.distributed, seed)
        self.modules = build_modules(layout, config, self.mesh)
        for module in self.modules:
            for layer in module.layers.values():
                layer.mlp.register_forward_hook(lambda _, __, y: F.dropout(y, dropout))
        self.optimizer = adamw(self.modules)
        self.scheduler = LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        loss_fn = CrossEntropy()
        self.runner: PipelineSchedule | WholeModel = WholeModel(self.modules[0], self.mesh, loss_fn)
        if layout.pp > 1:
            self.runner = build_pipeline(
                layout, self.modules, self.mesh, BATCH // layout.n_data, loss_fn
            )

    @property
    def extra(self) -> dict[str, Any]:
        """What a checkpoint holds of the scheduler."""
        return {"scheduler": self.scheduler.state_dict()}

    def step(self, batch: tuple[Tensor, Tensor]) -> float:
        """One step of AdamW on this rank's part of ``batch``; the loss."""
        inputs, target = (rows.chunk(self.layout.n_data)[get_dp_rank(self.mesh)] for rows in batch)
        self.optimizer.zero_grad()
        loss = self.runner.step(inputs, target=target).item()
        self.optimizer.step()
        self.scheduler.step()
        if self.modules[0].config.n_experts:
            update_router_bias(self.modules, expert_loads(self.modules, self.mesh))
        return loss

    def load(self, path: Path) -> int:
        """Resume; the number of finished steps."""
        loaded = load(path, self.modules, self.optimizer, device_mesh=self.mesh)
        self.scheduler.load_state_dict(loaded.extra["scheduler"])
        return loaded.step

    def local_state(self) -> dict[str, Tensor]:
        """This rank's parts of weights and optimizer."""
        found = {}
        for module in self.modules:
            for name, parameter in module.named_parameters():
                found[name] = local(parameter)
                for slot, value in self.optimizer.state.get(parameter, {}).items():
                    found[f"{name}.{slot}"] = local(value)
        return found


def local(tensor: Tensor) -> Tensor:
    """A copy of this rank's part."""
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach().clone()


def train(
    rank: int,
    layout: Layout,
    config: ModelConfig,
    data: Data,
    root: Path | None = None,
    *,
    resume: bool = False,
    save_at: int | None = None,
    seed: int = 0,
    dropout: float = 0.0,
) -> Part:
    """Steps over ``data``, from the beginning or from the newest checkpoint in ``root``.

    Args:
        save_at: after this step, save to ``root/sync`` and, while training goes on, to
            ``root/async``.

    Returns:
        The losses of the steps taken here, and this rank's state after the last.
    """
    trainee, part = Trainee(layout, config, seed, dropout), Part()
    start = trainee.load(root) if resume and root else 0
    saver = AsyncSaver(root / "async", device_mesh=trainee.mesh) if save_at and root else None
    for step, batch in enumerate(data[start:], start=start + 1):
        part.losses.append(trainee.step(batch))
        part.rng.append(torch.rand(()).item())
        if saver and root and step == save_at:
            arguments = (step, trainee.modules, trainee.optimizer)
            saver.save(*arguments, extra=trainee.extra)
            save(root / "sync", *arguments, device_mesh=trainee.mesh, extra=trainee.extra)
    if saver:
        saver.close()
    part.local = trainee.local_state()
    return part


def train_jobs(rank: int, jobs: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]) -> list[Part]:
    """Run several jobs on one set of ranks.

    Starting the ranks takes longer than the training.
    """
    return [train(rank, *arguments, **options) for arguments, options in jobs]
