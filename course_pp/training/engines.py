"""The stages that a rank trains, and the pipeline of either engine over them.

`course_pp.parallel` runs torch's schedules on every mesh, `course_pp.runtime` any schedule on
pipeline ranks alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from course_pp.base.ranks import Ranks
from course_pp.model import PipelineStageModule, layer_costs
from course_pp.model.stages import Tie
from course_pp.parallel import (
    PipelineSchedule,
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
from course_pp.runtime import Pipeline
from course_pp.schedule import Schedule, build
from course_pp.step.loss import LossFn, TokenLoss
from course_pp.step.scaler import MeshGradScaler
from course_pp.step.step import AnyPipeline
from course_pp.training.config import SettingError, TrainConfig
from course_pp.training.data import Sequences

Stages = Sequence[nn.Module] | Mapping[int, nn.Module]
"""This rank's stages.

In a list, parameters have the names of the full model; in a mapping by stage, other names.
"""


@dataclass(frozen=True)
class HeldStages:
    """The stages that a rank trains.

    Attributes:
        modules: the modules by stage, in order.
        n_stages: the number of stages on all ranks.
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
        """The modules, if all are stages of this package's model; else nothing."""
        modules = self.modules.values()
        found = [module for module in modules if isinstance(module, PipelineStageModule)]
        return found if len(found) == len(modules) else []

    @property
    def tied(self) -> tuple[Tie, ...]:
        """The declared ties; empty if none were declared."""
        return self.declared or ()

    @property
    def all_ties(self) -> list[Tie] | None:
        """All ties, those of our own model included; None if nobody knows."""
        if self.ours:
            return [*self.tied, *self.ours[0].ties]
        return None if self.declared is None else [*self.declared]


def stages_of_rank(config: TrainConfig, pp_rank: int, pp_size: int) -> tuple[list[int], int]:
    """Return the indices of the stages to build on a pipeline rank, and the number of stages."""
    _check_ranks(config, pp_size)
    if config.engine == "parallel":
        indices = get_stage_indices(config.order or config.schedule, pp_rank, pp_size)
        if config.order is not None:
            return indices, config.order.n_stages
        return indices, pp_size * len(indices)

    placement = runtime_schedule(config, pp_size).placement
    indices = [stage for stage, ranks in enumerate(placement) if pp_rank in ranks]
    return indices, len(placement)


def runtime_schedule(config: TrainConfig, pp_size: int) -> Schedule:
    """Return the schedule of a step with engine ``"runtime"``."""
    _check_ranks(config, pp_size)
    if config.order is not None:
        return config.order
    group = config.group
    if config.versions == "2bw" and group is None:
        group = pp_size
    return build(config.schedule, pp_size, config.microbatches, group=group)


def _check_ranks(config: TrainConfig, pp_size: int) -> None:
    """Refuse an order of your own that is for another number of ranks."""
    if config.order is None or config.order.n_ranks == pp_size:
        return
    raise SettingError(
        f"{{schedule}} is an order of {config.order.n_ranks} ranks, and there are {pp_size} pipeline"
        " ranks: start as many, or build it for these",
        schedule=config.schedule,
    )


def held_stages(
    config: TrainConfig, stages: Stages, tied: Sequence[Tie] | None, device_mesh: DeviceMesh | None
) -> HeldStages:
    """Read the stages that a trainer was given; refuse any that its schedule places elsewhere."""
    given = list(stages.values() if isinstance(stages, Mapping) else stages)
    if not given or not all(isinstance(module, nn.Module) for module in given):
        kinds = [type(module).__name__ for module in given]
        raise TypeError(
            f"modules holds {kinds}: pass the list of this rank's stages, or {{index: module}}"
        )

    if tied is None:
        tied = next((module.ties for module in given if isinstance(module, SplitStage)), None)
    declared = None if tied is None else tuple(tied)

    # Stages of this package's model know their numbers.
    ours = [module for module in given if isinstance(module, PipelineStageModule)]
    if not isinstance(stages, Mapping) and len(ours) == len(given):
        by_stage: dict[int, nn.Module] = {module.stage_id: module for module in ours}
        return HeldStages(by_stage, ours[0].num_stages, declared)

    indices, n_stages = stages_of_rank(config, get_pp_rank(device_mesh), get_pp_size(device_mesh))
    here = f"schedule {config.schedule!r} places stages {indices} of {n_stages} here"
    if isinstance(stages, Mapping):
        if sorted(stages) != indices:
            raise ValueError(
                f"modules holds stages {sorted(stages)}, and {here}: build those (stages_of_rank"
                " lists them)"
            )
        return HeldStages(dict(sorted(stages.items())), n_stages, declared)
    if len(given) != len(indices):
        raise ValueError(f"modules lists {len(given)} stages, and {here}: list those, in order")
    by_stage = dict(zip(indices, given, strict=True))
    return HeldStages(by_stage, n_stages, declared, full_names=True)


def device_and_dtype(modules: Sequence[nn.Module]) -> tuple[torch.device, torch.dtype]:
    """Return the device and the dtype of this rank's stages; a collective.

    A stage without parameters takes those of the other ranks' stages.
    """
    parameters = [parameter for module in modules for parameter in module.parameters()]
    device = parameters[0].device if parameters else None
    dtypes = [dtype for module in modules for dtype in compute_dtypes(module)]
    trains = any(parameter.requires_grad for parameter in parameters)

    told = Ranks().gather((device and device.type, dtypes, trains))
    if not any(trains for *_, trains in told):
        raise ValueError(
            "no stage has a parameter that is trained: leave requires_grad=True on some of them"
        )
    if device is None:
        device = torch.device(next(kind for kind, *_ in told if kind is not None))
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
    for _, theirs, _ in told:
        dtypes += theirs
    return device, dtypes[0]


def flops_of_a_sequence(held: HeldStages, seq_len: int) -> float:
    """Return the FLOPs of a training step on one sequence; a collective.

    For our own model they are three times the forward's, as backward has two matrix products for
    each of the forward. For other models they are 6 for each parameter and token (Kaplan et al.
    2020, arXiv:2001.08361, section 2.1). A tied parameter counts once, and attention does not.
    """
    if held.ours:
        return 3 * layer_costs(held.ours[0].config, seq_len).total

    counted_elsewhere = {(stage, tie[stage]) for tie in held.tied for stage in sorted(tie)[1:]}
    sizes: dict[int, int] = {}
    for stage, module in held.modules.items():
        sizes[stage] = 0
        for name, parameter in module.named_parameters():
            if (stage, name) not in counted_elsewhere:
                sizes[stage] += parameter.numel()
    everyone: dict[int, int] = {}  # by stage, as several ranks may hold the same one
    for theirs in Ranks().gather(sizes):
        everyone |= theirs
    return 6.0 * sum(everyone.values()) * seq_len


class Engine:
    """A pipeline that takes whole batches of one size.

    Every rank passes the same whole batch. Data-parallel ranks take their own rows of it.

    Attributes:
        copies: the number of ranks that hold each stage and have the same gradients. Ranks of
            tensor or data parallelism do not count.
    """

    def __init__(
        self,
        config: TrainConfig,
        held: HeldStages,
        *,
        loss_fn: LossFn | TokenLoss,
        scaler: MeshGradScaler,
        seq_len: int,
        masked: bool,
        device_mesh: DeviceMesh | None,
        device: torch.device,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self._device = device
        self._dp_rank = get_dp_rank(device_mesh)
        self._dp_size = get_dp_size(device_mesh)
        self._updates = config.versions is not None
        self.copies = 1
        self._pipeline: AnyPipeline

        if config.engine == "parallel":
            self._pipeline = _parallel_pipeline(
                config,
                held,
                loss_fn=loss_fn,
                scaler=scaler,
                seq_len=seq_len,
                device_mesh=device_mesh,
                device=device,
            )
            return

        with Ranks().refusing_together():
            _check_runtime(config, loss_fn, masked=masked, device_mesh=device_mesh)
            schedule = runtime_schedule(config, get_pp_size(device_mesh))
        self.copies = len(schedule.placement[0])
        self._pipeline = Pipeline(
            schedule,
            held.modules,
            loss_fn,
            device=device,
            tied=held.all_ties,
            optimizers=dict.fromkeys(held.modules, optimizer) if self._updates else None,
            versions=config.versions,
            scaler=scaler,
        )

    def step(self, batch: Sequences, divisor: float) -> float:
        """Add the gradient of the batch's summed loss over ``divisor`` to ``.grad``.

        Return that loss on every rank.

        The gradient is scaled, the loss is not. The divisor is the number of tokens in all batches
        whose gradients add up. Stages that update their own weights do so within the step: each
        update takes a mean of its own, and the loss is the mean over the batch's tokens.
        """
        over = None if self._updates else divisor
        loss = self._pipeline.step(self._rows(batch.inputs), divisor=over, **self._named(batch))
        return loss.item()

    def evaluate(self, batch: Sequences) -> float:
        """Return the batch's mean loss, in nats a token, the same on every rank."""
        loss = self._pipeline.eval(self._rows(batch.inputs), **self._named(batch))
        return loss.item()

    def _named(self, batch: Sequences) -> dict[str, Any]:
        """Return this rank's rows of the target, and of the mask if sequences are padded."""
        named = {"target": self._rows(batch.targets)}
        if batch.attention_mask is not None:
            named["attention_mask"] = self._rows(batch.attention_mask)
        return named

    def _rows(self, value: Tensor) -> Tensor:
        return value.tensor_split(self._dp_size)[self._dp_rank].to(self._device)


def _parallel_pipeline(
    config: TrainConfig,
    held: HeldStages,
    *,
    loss_fn: LossFn | TokenLoss,
    scaler: MeshGradScaler,
    seq_len: int,
    device_mesh: DeviceMesh | None,
    device: torch.device,
) -> PipelineSchedule:
    stages = []
    with Ranks().refusing_together():
        rows = config.rows_of_a_microbatch(get_dp_size(device_mesh))
        for index, module in held.modules.items():
            stage = build_pipeline_stage(
                module,
                device_mesh,
                device,
                batch_size=rows,
                seq_len=seq_len,
                stage=index,
                n_stages=held.n_stages,
            )
            stages.append(stage)

    tied = held.declared
    if held.ours and not tied:
        tied = None  # our own model then names its ties itself
    return build_pipeline_schedule(
        stages,
        config.microbatches,
        loss_fn,
        schedule=config.order or config.schedule,
        tied=tied,
        scaler=scaler,
    )


def _check_runtime(
    config: TrainConfig,
    loss_fn: LossFn | TokenLoss,
    *,
    masked: bool,
    device_mesh: DeviceMesh | None,
) -> None:
    """Refuse a mesh or a loss that engine ``"runtime"`` cannot train with."""
    if get_dp_size(device_mesh) > 1 or get_tp_mesh(device_mesh) is not None:
        raise SettingError(
            "{engine} with data- or tensor-parallel ranks: it runs pipeline ranks alone; take"
            " engine='parallel', or leave dp and tp at 1",
            engine=config.engine,
        )
    if masked and config.versions == "2bw" and isinstance(loss_fn, TokenLoss):
        raise SettingError(
            "{versions} with padded sequences: an update takes the mean of its microbatches' means,"
            " over unequal numbers of tokens",
            versions=config.versions,
        )
