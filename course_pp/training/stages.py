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
from course_pp.parallel.precision import compute_dtypes
from course_pp.schedule import Schedule, build
from course_pp.training.config import TrainConfig
from course_pp.training.metrics import training_flops

__all__ = [
    "Held",
    "Stages",
    "device_and_dtype",
    "flops_of_a_sequence",
    "held_stages",
    "runtime_schedule",
    "stages_of_rank",
]

Stages = Sequence[PipelineStageModule] | Mapping[int, nn.Module]


@dataclass(frozen=True)
class Held:
    """What a rank trains.

    Attributes:
        modules: by stage, in order.
        n_stages: of the whole pipeline.
        tied: what the caller said is one weight; the stages of our own model know.
    """

    modules: dict[int, nn.Module]
    n_stages: int
    tied: tuple[Tie, ...]

    @property
    def ours(self) -> list[PipelineStageModule]:
        """The modules, if they are stages of this package's model; else nothing."""
        found = [module for module in self.modules.values() if isinstance(module, PipelineStageModule)]
        return found if len(found) == len(self.modules) else []

    @property
    def all_ties(self) -> list[Tie]:
        """Those of our own model as well."""
        return [*self.tied, *(self.ours[0].ties if self.ours else ())]

    @property
    def holds_last(self) -> bool:
        """Whether the last stage, which knows the loss, is here."""
        return self.n_stages - 1 in self.modules


@checked
def stages_of_rank(config: TrainConfig, pp_rank: int, pp_size: int) -> tuple[list[int], int]:
    """The indices of the stages to build on a pipeline rank, and the number of all stages.

    Raises:
        ValueError: a schedule that the engine does not have, or that cannot run with this many ranks or microbatches.
    """
    if config.engine == "parallel":
        indices = get_stage_indices(config.schedule, pp_rank, pp_size)
        return indices, pp_size * len(indices)
    schedule = runtime_schedule(config, pp_size)
    return [stage for stage, ranks in enumerate(schedule.placement) if pp_rank in ranks], len(schedule.placement)


def runtime_schedule(config: TrainConfig, pp_size: int) -> Schedule:
    """The schedule of a step with engine ``"runtime"``.

    Raises:
        ValueError: for one that cannot run with this many ranks, microbatches or in these groups.
    """
    group = pp_size if config.versions == "2bw" and config.group is None else config.group
    return build(config.schedule, pp_size, config.microbatches, group=group)


def held_stages(config: TrainConfig, stages: Stages, tied: Sequence[Tie], device_mesh: DeviceMesh | None) -> Held:
    """Read the stages that a trainer was given.

    Raises:
        TypeError: for what are no stages.
        ValueError: for other stages than the schedule places on this rank.
    """
    if not isinstance(stages, Mapping):
        stages = list(stages)
        if not stages or not all(isinstance(module, PipelineStageModule) for module in stages):
            raise TypeError(
                f"modules holds {[type(module).__name__ for module in stages]}: pass the list of this rank's stages, "
                "built with build_stage_module (the whole model is stage 0 of 1), or other modules by stage, "
                "{0: module}"
            )
        return Held({module.stage_id: module for module in stages}, stages[0].num_stages, tuple(tied))
    if not all(isinstance(module, nn.Module) for module in stages.values()):
        raise TypeError(f"modules holds {[type(m).__name__ for m in stages.values()]}: pass an nn.Module by stage")
    indices, n_stages = stages_of_rank(config, get_pp_rank(device_mesh), get_pp_size(device_mesh))
    if sorted(stages) != indices:
        raise ValueError(
            f"modules holds stages {sorted(stages)}, and schedule {config.schedule!r} places stages {indices} of "
            f"{n_stages} here: build those (stages_of_rank lists them)"
        )
    return Held(dict(sorted(stages.items())), n_stages, tuple(tied))


def device_and_dtype(modules: Sequence[nn.Module]) -> tuple[torch.device, torch.dtype]:
    """Where this rank's stages are, and what they compute in; a collective, as a stage need not have a parameter.

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


def flops_of_a_sequence(held: Held, seq_len: int) -> float:
    """FLOPs of a training step on one sequence; a collective.

    Of our own model counted product by product, of others 6 for each parameter and token (Kaplan et al. 2020,
    arXiv:2001.08361, section 2.1), without attention's.
    """
    if held.ours:
        return training_flops(held.ours[0].config, seq_len)
    sizes = {stage: sum(p.numel() for p in module.parameters()) for stage, module in held.modules.items()}
    everyone: dict[int, int] = {}
    for theirs in Ranks().gather(sizes):
        everyone |= theirs
    return 6.0 * sum(everyone.values()) * seq_len
