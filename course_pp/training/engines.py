"""The two ways to take a batch through the pipeline, `course_pp.parallel` and `course_pp.runtime`, made alike."""

from operator import mul
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from course_pp.collective import Ranks
from course_pp.loss import LossFn, TokenLoss, counted
from course_pp.parallel import (
    build_pipeline_schedule,
    build_pipeline_stage,
    get_dp_rank,
    get_dp_size,
    get_pp_size,
    get_tp_mesh,
)
from course_pp.parallel.model_stage import ModelStage
from course_pp.runtime import Pipeline
from course_pp.runtime.batch import split
from course_pp.schedule import Schedule
from course_pp.training.config import SettingError, TrainConfig
from course_pp.training.data import Rows, Sequences, Stream
from course_pp.training.data.batches import rows_of_rank
from course_pp.training.stages import HeldStages, runtime_schedule

__all__ = ["PipelineEngine", "build_pipeline_engine"]


class PipelineEngine(Protocol):
    """Takes batches of one size through the pipeline. Every rank passes the whole batch.

    Attributes:
        copies: ranks that hold each stage, all with the same gradients.
    """

    copies: int

    def step(self, batch: Sequences, divisor: float) -> float:
        """Add the gradient of the batch's summed loss over ``divisor`` to ``.grad``; return that loss on every rank.

        Stages that update their own weights do so within the step. Each update takes a mean of its own, ``divisor`` is
        ignored, and the returned loss is the mean over the batch's tokens, each with the weights of its microbatch.

        Args:
            divisor: the number of tokens in all batches whose gradients add up.

        Raises:
            LossNotFinite: on every rank, with nothing updated.
            PipelineError: on every rank, if a stage failed; where stages update, also for what is not finite.
        """

    def evaluate(self, batch: Sequences) -> float:
        """Return the batch's mean loss, in nats a token, the same on every rank."""


def build_pipeline_engine(
    config: TrainConfig,
    held: HeldStages,
    loss_fn: LossFn | TokenLoss,
    like: Rows | Stream,
    *,
    device_mesh: DeviceMesh | None,
    device: torch.device,
    param_dtype: torch.dtype | None,
    optimizer: torch.optim.Optimizer,
) -> PipelineEngine:
    """Return the engine that ``config`` names, over this rank's stages; call it on every rank.

    Args:
        like: sequences of the run, for their length and whether they are padded.
        param_dtype: of what crosses the stages' boundaries; None is what they compute in.
        optimizer: of all that this rank trains, for a schedule whose stages update their own weights.

    Raises:
        ValueError: on every rank, if the stages are not those the schedule places here, or the engine cannot run them.
    """
    if config.engine == "parallel":
        return _ParallelEngine(config, held, loss_fn, like.seq_len, device_mesh, device, param_dtype)
    return _RuntimeEngine(config, held, loss_fn, like.is_padded, device_mesh, device, optimizer)


class _ParallelEngine:
    """`course_pp.parallel`: each data-parallel rank takes its rows, torch runs the schedule."""

    copies = 1

    def __init__(
        self,
        config: TrainConfig,
        held: HeldStages,
        loss_fn: LossFn | TokenLoss,
        seq_len: int,
        device_mesh: DeviceMesh | None,
        device: torch.device,
        param_dtype: torch.dtype | None,
    ) -> None:
        self._device = device
        self._dp_rank, self._dp_size = get_dp_rank(device_mesh), get_dp_size(device_mesh)
        rows = Ranks().collectively(lambda: config.rows_of_a_microbatch(self._dp_size))

        def stage_of(index: int, module: nn.Module) -> ModelStage:
            sizes = device_mesh, device, rows, seq_len, param_dtype
            return build_pipeline_stage(module, *sizes, stage=index, n_stages=held.n_stages)

        stages = Ranks().collectively(lambda: [stage_of(index, module) for index, module in held.modules.items()])
        tied, schedule = held.tied or None if held.ours else held.declared, config.order or config.schedule
        self._pipeline = build_pipeline_schedule(stages, config.microbatches, loss_fn, schedule, tied=tied)

    def step(self, batch: Sequences, divisor: float) -> float:
        inputs, named = self._arguments(batch)
        return self._pipeline.step(inputs, **named, divisor=divisor).item()

    def evaluate(self, batch: Sequences) -> float:
        inputs, named = self._arguments(batch)
        return self._pipeline.eval(inputs, **named).item()

    def _arguments(self, batch: Sequences) -> tuple[Tensor, dict[str, Tensor]]:
        """Return this rank's rows; every stage gets the mask of padded sequences."""
        named = {"target": batch.targets, "attention_mask": batch.attention_mask}
        return self._rows(batch.inputs), {name: self._rows(value) for name, value in named.items() if value is not None}

    def _rows(self, value: Tensor) -> Tensor:
        return rows_of_rank(value, self._dp_rank, self._dp_size).to(self._device)


class _RuntimeEngine:
    """`course_pp.runtime`: pipeline ranks alone; a second, forward-only schedule evaluates."""

    def __init__(
        self,
        config: TrainConfig,
        held: HeldStages,
        loss_fn: LossFn | TokenLoss,
        masked: bool,
        device_mesh: DeviceMesh | None,
        device: torch.device,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        def schedule_here() -> Schedule:
            if get_dp_size(device_mesh) > 1 or get_tp_mesh(device_mesh) is not None:
                raise SettingError(
                    f"{{engine}} on mesh dimensions {device_mesh and device_mesh.mesh_dim_names}: it runs pipeline "
                    "ranks alone; take engine='parallel', or leave dp and tp at 1",
                    {"engine": config.engine},
                )
            if masked and config.versions == "2bw" and isinstance(loss_fn, TokenLoss):
                raise SettingError(
                    "{versions} with padded sequences: an update takes the mean of its microbatches' means, which "
                    "are then over unequal numbers of tokens. Pack the sequences, or take another of the versions",
                    {"versions": config.versions},
                )
            return runtime_schedule(config, get_pp_size(device_mesh))

        self._device = device
        schedule = Ranks().collectively(schedule_here)
        self.copies = len(schedule.placement[0])
        last, ties = schedule.n_stages - 1, held.all_ties
        stages = dict(held.modules)
        if masked:
            stages = {index: _MaskPassedOn(module, index == last) for index, module in stages.items()}
            ties = ties and [{index: f"module.{name}" for index, name in tie.items()} for tie in ties]
        self._updates, self._loss = config.versions is not None, counted(loss_fn)
        optimizers = dict.fromkeys(stages, optimizer) if self._updates else None
        self._pipeline = Pipeline(
            schedule, stages, loss_fn, device=device, tied=ties, optimizers=optimizers, versions=config.versions
        )
        self._forward = Pipeline(schedule.forward_only(), stages, loss_fn, device=device)

    def step(self, batch: Sequences, divisor: float) -> float:
        if not self._updates:
            return sum(self._pipeline.step(*self._arguments(batch), divisor=divisor))
        losses = self._pipeline.step(*self._arguments(batch))
        counts = [float(self._loss.count(each)) for each in split("targets", batch.targets, len(losses))]
        return sum(map(mul, losses, counts)) / max(1.0, sum(counts))

    def evaluate(self, batch: Sequences) -> float:
        with torch.no_grad():
            return sum(self._forward.step(*self._arguments(batch)))

    def _arguments(self, batch: Sequences) -> tuple[Tensor | tuple[Tensor, Tensor], Tensor]:
        inputs, targets = batch.inputs.to(self._device), batch.targets.to(self._device)
        if batch.attention_mask is None:
            return inputs, targets
        return (inputs, batch.attention_mask.to(self._device)), targets


class _MaskPassedOn(nn.Module):
    """A stage that sends the mask on with its output: under the runtime it gets only what the stage before sent."""

    def __init__(self, module: nn.Module, is_last: bool) -> None:
        super().__init__()
        self.module, self._is_last = module, is_last

    def forward(self, x: Tensor, mask: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        output = self.module(x, attention_mask=mask)
        return output if self._is_last else (output, mask)
