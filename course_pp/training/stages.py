"""The stages that a rank trains: which of how many, what they share, and what arithmetic they need."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from course_pp.arguments import checked
from course_pp.collective import Ranks
from course_pp.model import PipelineStageModule
from course_pp.model.stages import Tie
from course_pp.parallel import get_pp_rank, get_pp_size, get_stage_indices
from course_pp.parallel.replaced_forward import compute_dtypes
from course_pp.parallel.split import SplitStage
from course_pp.schedule import Schedule, build
from course_pp.training.config import SettingError, TrainConfig
from course_pp.training.metrics import training_flops

__all__ = [
    "HeldStages",
    "Stages",
    "device_and_dtype",
    "flops_of_a_sequence",
    "held_stages",
    "runtime_schedule",
    "stages_of_rank",
]

Stages = Sequence[nn.Module] | Mapping[int, nn.Module]
"""This rank's stages in a list, with the names of the full model; or by stage, with names that mean something there."""


@dataclass(frozen=True)
class HeldStages:
    """What a rank trains.

    Attributes:
        modules: by stage, in order.
        n_stages: of the whole pipeline.
        declared: the ties that the caller or stages of ``auto_split`` named, None if none were; the stages of our own
            model know theirs.
        full_names: whether the names in a stage are the full model's, so that a checkpoint fits any other cut.
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
        found = [module for module in self.modules.values() if isinstance(module, PipelineStageModule)]
        return found if len(found) == len(self.modules) else []

    @property
    def tied(self) -> tuple[Tie, ...]:
        """The ties that are declared."""
        return self.declared or ()

    @property
    def all_ties(self) -> list[Tie] | None:
        """All ties, those of our own model included; None if nobody knows."""
        if not self.ours:
            return None if self.declared is None else [*self.declared]
        return [*self.tied, *self.ours[0].ties]

    @property
    def holds_last(self) -> bool:
        """Whether the last stage, which knows the loss, is here."""
        return self.n_stages - 1 in self.modules


@checked
def stages_of_rank(config: TrainConfig, pp_rank: int, pp_size: int) -> tuple[list[int], int]:
    """Return the indices of the stages to build on a pipeline rank, and the number of all stages.

    Raises:
        ValueError: a schedule that the engine does not have, or that cannot run with this many ranks or microbatches.
    """
    _check_ranks(config, pp_size)
    if config.engine == "parallel":
        indices = get_stage_indices(config.order or config.schedule, pp_rank, pp_size)
        return indices, pp_size * len(indices) if config.order is None else config.order.n_stages
    schedule = runtime_schedule(config, pp_size)
    return [stage for stage, ranks in enumerate(schedule.placement) if pp_rank in ranks], len(schedule.placement)


def runtime_schedule(config: TrainConfig, pp_size: int) -> Schedule:
    """Return the schedule of a step with engine ``"runtime"``.

    Raises:
        ValueError: for one that cannot run with this many ranks, microbatches or in these groups.
    """
    _check_ranks(config, pp_size)
    if config.order is not None:
        return config.order
    group = pp_size if config.versions == "2bw" and config.group is None else config.group
    return build(config.schedule, pp_size, config.microbatches, group=group)


def _check_ranks(config: TrainConfig, pp_size: int) -> None:
    """Refuse an order of your own that is for another number of ranks."""
    if config.order is not None and config.order.n_ranks != pp_size:
        raise SettingError(
            f"{{schedule}} is an order of {config.order.n_ranks} ranks, and there are {pp_size} pipeline ranks: start "
            f"{config.order.n_ranks}, or build it for {pp_size}",
            {"schedule": config.schedule},
        )


def held_stages(
    config: TrainConfig, stages: Stages, tied: Sequence[Tie] | None, device_mesh: DeviceMesh | None
) -> HeldStages:
    """Read the stages that a trainer was given.

    Raises:
        TypeError: for anything but stages.
        ValueError: for stages that the schedule does not place on this rank.
    """
    given = list(stages.values() if isinstance(stages, Mapping) else stages)
    if not given or not all(isinstance(module, nn.Module) for module in given):
        raise TypeError(
            f"modules holds {[type(module).__name__ for module in given]}: pass the list of this rank's stages, or "
            "modules by stage, {0: module}"
        )
    if tied is None:
        tied = next((module.ties for module in given if isinstance(module, SplitStage)), None)
    declared = None if tied is None else tuple(tied)
    if not isinstance(stages, Mapping) and all(isinstance(module, PipelineStageModule) for module in given):
        ours = [module for module in given if isinstance(module, PipelineStageModule)]
        return HeldStages({module.stage_id: module for module in ours}, ours[0].num_stages, declared)
    indices, n_stages = stages_of_rank(config, get_pp_rank(device_mesh), get_pp_size(device_mesh))
    here = f"schedule {config.schedule!r} places stages {indices} of {n_stages} here"
    if not isinstance(stages, Mapping):
        if len(given) != len(indices):
            raise ValueError(f"modules lists {len(given)} stages, and {here}: list those, in order")
        return HeldStages(dict(zip(indices, given, strict=True)), n_stages, declared, full_names=True)
    if sorted(stages) != indices:
        raise ValueError(f"modules holds stages {sorted(stages)}, and {here}: build those (stages_of_rank lists them)")
    return HeldStages(dict(sorted(stages.items())), n_stages, declared)


def device_and_dtype(modules: Sequence[nn.Module]) -> tuple[torch.device, torch.dtype]:
    """Return this rank's stages' device and dtype; a collective, as a stage need not have a parameter.

    Raises:
        ValueError: on every rank, if no stage has a parameter that is trained.
    """
    device = next((p.device for module in modules for p in module.parameters()), None)
    dtype = next((dtype for module in modules for dtype in compute_dtypes(module)), None)
    trains = any(p.requires_grad for module in modules for p in module.parameters())
    told = Ranks().gather((device and device.type, dtype, trains))
    if not any(trains for *_, trains in told):
        raise ValueError(
            "no stage has a parameter that is trained: leave requires_grad=True on some of them, or evaluate with "
            "PipelineSchedule.evaluate"
        )
    if device is None:
        kind = next(kind for kind, *_ in told if kind is not None)
        device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    return device, next(dtype for dtype in (dtype, *(one for _, one, _ in told)) if dtype is not None)


def flops_of_a_sequence(held: HeldStages, seq_len: int) -> float:
    """Return the FLOPs of a training step on one sequence; a collective.

    Those of our own model are counted product by product. Other models count 6 for each parameter and token (Kaplan et
    al. 2020, arXiv:2001.08361, section 2.1), without attention's.
    """
    if held.ours:
        return training_flops(held.ours[0].config, seq_len)
    sizes = {stage: sum(p.numel() for p in module.parameters()) for stage, module in held.modules.items()}
    everyone: dict[int, int] = {}
    for theirs in Ranks().gather(sizes):
        everyone |= theirs
    return 6.0 * sum(everyone.values()) * seq_len
