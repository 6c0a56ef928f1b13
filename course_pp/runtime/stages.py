"""The stages that a rank is given: whether the pipeline can be right with them."""

import hashlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from course_pp.runtime.agreement import Fact
from course_pp.schedule import Schedule
from course_pp.wrappers import problem_of_wrappers

__all__ = ["Stages", "by_stage", "device_of", "facts_of_parameters", "is_dtensor", "problem_of_stages"]

Stages = Mapping[int, nn.Module | None] | nn.Module | None


def by_stage(stages: Stages, here: Sequence[int]) -> Mapping[int, nn.Module | None]:
    """Return the modules by stage, in order; a module alone is that of the only stage in ``here``."""
    if isinstance(stages, Mapping):
        return dict(sorted(stages.items()))
    return {here[0]: stages} if len(here) == 1 else {} if stages is None else {-1: stages}


def problem_of_stages(
    modules: Mapping[int, nn.Module | None],
    here: Sequence[int],
    schedule: Schedule,
    tied: Sequence[Mapping[int, str]],
) -> str | None:
    """Return why this rank's stages cannot be used; None if they can.

    Args:
        here: the stages that the schedule places on this rank.
    """
    if list(modules) != list(here):
        given = f"one {type(modules[-1]).__name__}" if list(modules) == [-1] else f"stages {list(modules)}"
        return (
            f"given {given}, but the schedule places stages {list(here)} here: pass {{stage: module}} for each of them"
        )
    for stage, module in modules.items():
        if module is not None and not isinstance(module, nn.Module):
            return f"stage {stage} is a {type(module).__name__}: pass an nn.Module, or None for an empty stage"
    wrapped = (problem_of_wrappers(m, f"stage {stage}") for stage, m in modules.items() if m is not None)
    return next(filter(None, wrapped), None) or _problem_of_shards(modules, schedule, tied)


def facts_of_parameters(module: nn.Module | None, is_copied: bool = False) -> dict[str, Fact]:
    """Return what copies of a stage must have in common: for each parameter shape, dtype and whether it is trained.

    Args:
        is_copied: whether there are several, whose values must be equal too.
    """
    if not isinstance(module, nn.Module):  # None, or what is about to be refused
        return {}
    return {
        name: Fact(
            f"{tuple(p.shape)} {p.dtype} {'trained' if p.requires_grad else 'frozen'}",
            _fingerprint(p) if is_copied and not p.is_meta else "",
        )
        for name, p in module.named_parameters()
    }


def _fingerprint(tensor: torch.Tensor) -> str:
    """Return a fingerprint: equal for equal values, and hardly ever for others."""
    values = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()[:12]


def device_of(modules: Mapping[int, nn.Module | None]) -> torch.device:
    """Return where the parameters are; the CPU if there are none."""
    parameters = (p for module in modules.values() if isinstance(module, nn.Module) for p in module.parameters())
    return next((p.device for p in parameters), torch.device("cpu"))


def _problem_of_shards(
    modules: Mapping[int, nn.Module | None], schedule: Schedule, tied: Sequence[Mapping[int, str]]
) -> str | None:
    """Return why sharded parameters would train wrongly; a DTensor's gradient is summed once, over its own mesh."""
    home: dict[nn.Parameter, int] = {}
    for stage, module in modules.items():
        for name, parameter in () if module is None else module.named_parameters():
            if not is_dtensor(parameter):
                continue
            what = f"{name!r} of stage {stage} is a DTensor (fully_shard, parallelize_module)"
            if len(schedule.placement[stage]) > 1:
                return f"{what}, and the stage is replicated: replicate it with fully_shard on a 2-D mesh instead"
            if any(tie.get(stage) == name for tie in tied):
                return f"{what} and tied: leave it whole, or use course_pp.parallel, which ties sharded weights"
            if home.setdefault(parameter, stage) != stage:
                return f"{what} and is in stage {home[parameter]} too: shard each stage's own parameters"
    return None


def is_dtensor(value: Any) -> bool:
    """Return whether a tensor is distributed; imports nothing for the answer."""
    tensor = sys.modules.get("torch.distributed.tensor")
    return tensor is not None and isinstance(value, tensor.DTensor)
