"""The stages that a rank trains, and the two ways to take a batch through them, made alike.

`course_pp.parallel` runs torch's schedules on every mesh, `course_pp.runtime` any schedule on
pipeline ranks alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from course_pp.base.ranks import Ranks
from course_pp.model import PipelineStageModule, layer_costs
from course_pp.model.stages import Tie
from course_pp.parallel import (
    build_pipeline_schedule,
    build_pipeline_stage,
    get_dp_rank,
    get_dp_size,
    get_pp_rank,
    get_pp_size,
    get_stage_indices,
    get_tp_mesh,
)
from course_pp.parallel.replaced_forward import compute_dtypes
from course_pp.parallel.split import SplitStage
from course_pp.parallel.stage import ModelStage
from course_pp.runtime import Pipeline
from course_pp.schedule import Schedule, build
from course_pp.step.loss import LossFn, TokenLoss
from course_pp.step.scaler import MeshGradScaler
from course_pp.training.config import SettingError, TrainConfig
from course_pp.training.data import Sequences

Stages = Sequence[nn.Module] | Mapping[int, nn.Module]
"""This rank's stages in a list, with the names of the full model; or by stage, with names that mean something there."""


@dataclass(frozen=True)
class HeldStages:
    """What a rank trains.

    Attributes:
        modules: by stage, in order.
        declared: the ties that the caller or stages of ``auto_split`` named, None if none were.
        full_names: whether the names in a stage are the full model's, so that a checkpoint fits any
            other cut.
    """

    modules: dict[int, nn.Module]
    n_stages: int
    declared: tuple[Tie, ...] | None
    full_names: bool = False

    @property
    def saved(self) -> Sequence[nn.Module] | Mapping[int, nn.Module]:
        """The modules as a checkpoint takes them."""
        return list(self.modules.values()) if self.full_names else self.modules

    @property
    def ours(self) -> list[PipelineStageModule]:
        """The modules, if they are stages of this package's model; else nothing."""
        found = [
            module for module in self.modules.values() if isinstance(module, PipelineStageModule)
        ]
        return found if len(found) == len(self.modules) else []

    @property
    def tied(self) -> tuple[Tie, ...]:
        return self.declared or ()

    @property
    def all_ties(self) -> list[Tie] | None:
        """All ties, those of our own model included; None if nobody knows."""
        if not self.ours:
            return None if self.declared is None else [*self.declared]
        return [*self.tied, *self.ours[0].ties]


def stages_of_rank(config: TrainConfig, pp_rank: int, pp_size: int) -> tuple[list[int], int]:
    """Return the indices of the stages to build on a pipeline rank, and the number of all stages."""
    _check_ranks(config, pp_size)
    if config.engine == "parallel":
        indices = get_stage_indices(config.order or config.schedule, pp_rank, pp_size)
        return indices, pp_size * len(indices) if config.order is None else config.order.n_stages
    schedule = runtime_schedule(config, pp_size)
    return [stage for stage, ranks in enumerate(schedule.placement) if pp_rank in ranks], len(
        schedule.placement
    )


def runtime_schedule(config: TrainConfig, pp_size: int) -> Schedule:
    """Return the schedule of a step with engine ``"runtime"``."""
    _check_ranks(config, pp_size)
    if config.order is not None:
        return config.order
    group = pp_size if config.versions == "2bw" and config.group is None else config.group
    return build(config.schedule, pp_size, config.microbatches, group=group)


def _check_ranks(config: TrainConfig, pp_size: int) -> None:
    """Refuse an order of your own that is for another number of ranks."""
    if config.order is not None and config.order.n_ranks != pp_size:
        sizes = (
            f"is an order of {config.order.n_ranks} ranks, and there are {pp_size} pipeline ranks"
        )
        raise SettingError(
            f"{{schedule}} {sizes}: start as many, or build it for these", schedule=config.schedule
        )


def held_stages(
    config: TrainConfig, stages: Stages, tied: Sequence[Tie] | None, device_mesh: DeviceMesh | None
) -> HeldStages:
    """Read the stages that a trainer was given; refuse those that the schedule does not place on this rank."""
    given = list(stages.values() if isinstance(stages, Mapping) else stages)
    if not given or not all(isinstance(module, nn.Module) for module in given):
        kinds = [type(module).__name__ for module in given]
        raise TypeError(
            f"modules holds {kinds}: pass the list of this rank's stages, or {{index: module}}"
        )
    if tied is None:
        tied = next((module.ties for module in given if isinstance(module, SplitStage)), None)
    declared = None if tied is None else tuple(tied)
    if not isinstance(stages, Mapping) and all(
        isinstance(module, PipelineStageModule) for module in given
    ):
        ours = [module for module in given if isinstance(module, PipelineStageModule)]
        return HeldStages(
            {module.stage_id: module for module in ours}, ours[0].num_stages, declared
        )
    indices, n_stages = stages_of_rank(config, get_pp_rank(device_mesh), get_pp_size(device_mesh))
    here = f"schedule {config.schedule!r} places stages {indices} of {n_stages} here"
    if not isinstance(stages, Mapping):
        if len(given) != len(indices):
            raise ValueError(f"modules lists {len(given)} stages, and {here}: list those, in order")
        return HeldStages(
            dict(zip(indices, given, strict=True)), n_stages, declared, full_names=True
        )
    if sorted(stages) != indices:
        raise ValueError(
            f"modules holds stages {sorted(stages)}, and {here}: build those (stages_of_rank lists"
            " them)"
        )
    return HeldStages(dict(sorted(stages.items())), n_stages, declared)


def device_and_dtype(modules: Sequence[nn.Module]) -> tuple[torch.device, torch.dtype]:
    """Return this rank's stages' device and dtype; a collective, as a stage need not have a parameter."""
    device = next((p.device for module in modules for p in module.parameters()), None)
    dtype = next((dtype for module in modules for dtype in compute_dtypes(module)), None)
    trains = any(p.requires_grad for module in modules for p in module.parameters())
    told = Ranks().gather((device and device.type, dtype, trains))
    if not any(trains for *_, trains in told):
        raise ValueError(
            "no stage has a parameter that is trained: leave requires_grad=True on some of them"
        )
    if device is None:
        kind = next(kind for kind, *_ in told if kind is not None)
        device = (
            torch.device(kind, torch.cuda.current_device())
            if kind == "cuda"
            else torch.device(kind)
        )
    return device, next(
        dtype for dtype in (dtype, *(one for _, one, _ in told)) if dtype is not None
    )


def flops_of_a_sequence(held: HeldStages, seq_len: int) -> float:
    """Return the FLOPs of a training step on one sequence; a collective.

    Those of our own model are three times the forward's: for each matrix product backward has two.
    Other models count 6 for each parameter and token, a tied one once, without attention's (Kaplan
    et al. 2020, arXiv:2001.08361, section 2.1).
    """
    if held.ours:
        return 3 * layer_costs(held.ours[0].config, seq_len).total
    counted_elsewhere = {(stage, tie[stage]) for tie in held.tied for stage in sorted(tie)[1:]}
    sizes = {}
    for stage, module in held.modules.items():
        named = module.named_parameters()
        sizes[stage] = sum(p.numel() for name, p in named if (stage, name) not in counted_elsewhere)
    everyone: dict[int, int] = {}
    for theirs in Ranks().gather(sizes):
        everyone |= theirs
    return 6.0 * sum(everyone.values()) * seq_len


class PipelineEngine(Protocol):
    """Takes batches of one size through the pipeline. Every rank makes one, and passes the whole batch."""

    copies: int
    """Ranks that hold each stage, all with the same gradients."""

    def step(self, batch: Sequences, divisor: float) -> float:
        """Add the gradient of the batch's summed loss over ``divisor`` to ``.grad``; return that
        loss on every rank.

        The gradient is scaled, the loss is not. The divisor is the number of tokens in all batches
        whose gradients add up. Stages that update their own weights do so within the step: each
        update takes a mean of its own, and the loss is the mean over the batch's tokens.
        """

    def evaluate(self, batch: Sequences) -> float:
        """Return the batch's mean loss, in nats a token, the same on every rank."""


class ParallelEngine:
    """`course_pp.parallel`: each data-parallel rank takes its rows, torch runs the schedule."""

    copies = 1

    def __init__(
        self,
        config: TrainConfig,
        held: HeldStages,
        loss_fn: LossFn | TokenLoss,
        scaler: MeshGradScaler,
        seq_len: int,
        device_mesh: DeviceMesh | None,
        device: torch.device,
    ) -> None:
        self._device = device
        self._dp_rank, self._dp_size = get_dp_rank(device_mesh), get_dp_size(device_mesh)
        rows = Ranks().collectively(lambda: config.rows_of_a_microbatch(self._dp_size))

        def stage_of(index: int, module: nn.Module) -> ModelStage:
            sizes = device_mesh, device, rows, seq_len
            return build_pipeline_stage(module, *sizes, stage=index, n_stages=held.n_stages)

        stages = Ranks().collectively(
            lambda: [stage_of(index, module) for index, module in held.modules.items()]
        )
        tied, schedule = (
            held.tied or None if held.ours else held.declared,
            config.order or config.schedule,
        )
        self._pipeline = build_pipeline_schedule(
            stages, config.microbatches, loss_fn, schedule, tied=tied, scaler=scaler
        )

    def step(self, batch: Sequences, divisor: float) -> float:
        inputs, named = self._arguments(batch)
        return self._pipeline.step(inputs, **named, divisor=divisor).item()

    def evaluate(self, batch: Sequences) -> float:
        inputs, named = self._arguments(batch)
        return self._pipeline.eval(inputs, **named).item()

    def _arguments(self, batch: Sequences) -> tuple[Tensor, dict[str, Any]]:
        """Return this rank's rows; every stage gets the mask of padded sequences."""
        named = {"target": batch.targets, "attention_mask": batch.attention_mask}
        return self._rows(batch.inputs), {
            name: self._rows(value) for name, value in named.items() if value is not None
        }

    def _rows(self, value: Tensor) -> Tensor:
        return value.tensor_split(self._dp_size)[self._dp_rank].to(self._device)


class RuntimeEngine:
    """`course_pp.runtime`: pipeline ranks alone."""

    def __init__(
        self,
        config: TrainConfig,
        held: HeldStages,
        loss_fn: LossFn | TokenLoss,
        scaler: MeshGradScaler,
        masked: bool,
        device_mesh: DeviceMesh | None,
        device: torch.device,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        def schedule_here() -> Schedule:
            if get_dp_size(device_mesh) > 1 or get_tp_mesh(device_mesh) is not None:
                why = (
                    "it runs pipeline ranks alone; take engine='parallel', or leave dp and tp at 1"
                )
                raise SettingError(
                    f"{{engine}} with data- or tensor-parallel ranks: {why}", engine=config.engine
                )
            if masked and config.versions == "2bw" and isinstance(loss_fn, TokenLoss):
                why = (
                    "an update takes the mean of its microbatches' means, over unequal numbers of"
                    " tokens"
                )
                raise SettingError(
                    f"{{versions}} with padded sequences: {why}", versions=config.versions
                )
            return runtime_schedule(config, get_pp_size(device_mesh))

        self._device = device
        schedule = Ranks().collectively(schedule_here)
        self.copies = len(schedule.placement[0])
        self._updates = config.versions is not None
        optimizers = dict.fromkeys(held.modules, optimizer) if self._updates else None
        self._pipeline = Pipeline(
            schedule,
            held.modules,
            loss_fn,
            device=device,
            tied=held.all_ties,
            optimizers=optimizers,
            versions=config.versions,
            scaler=scaler,
        )

    def step(self, batch: Sequences, divisor: float) -> float:
        over = None if self._updates else divisor
        return self._pipeline.step(
            batch.inputs.to(self._device), **self._named(batch), divisor=over
        ).item()

    def evaluate(self, batch: Sequences) -> float:
        return self._pipeline.eval(batch.inputs.to(self._device), **self._named(batch)).item()

    def _named(self, batch: Sequences) -> dict[str, Any]:
        """Return the whole batch's target; every stage gets the mask of padded sequences."""
        named = {"target": batch.targets, "attention_mask": batch.attention_mask}
        return {name: value.to(self._device) for name, value in named.items() if value is not None}
