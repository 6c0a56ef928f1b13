"""Which schedules of the catalogue torch can run: `course_pp.schedule` has their names, sizes and placements."""

from functools import lru_cache
from typing import Any, Literal

from torch.distributed.pipelining import schedules as torch_schedules

from course_pp.arguments import checked
from course_pp.schedule import Entry, build, find, names

__all__ = ["get_stage_indices", "schedule_names"]


def schedule_names() -> tuple[str, ...]:
    """The names :func:`build_pipeline_schedule` takes, and torch's names for them: those torch has a class for."""
    return tuple(name for name in names() if find(name).torch_name)


@checked
def get_stage_indices(schedule: str, pp_rank: int, pp_size: int, stages_per_rank: int | None = None) -> list[int]:
    """Indices of the stages that ``pp_rank`` holds under ``schedule``.

    Args:
        stages_per_rank: model chunks a rank. None means what is usual: 1 or 2, as the catalogue says.

    Raises:
        ValueError: for a schedule that torch cannot run, a rank outside ``pp_size``, or a number of stages a rank that
            the schedule does not allow.
    """
    for name, size in (("pp_size", pp_size), ("stages_per_rank", stages_per_rank)):
        if size is not None and size < 1:
            raise ValueError(f"{name}={size} must be at least 1")
    if not 0 <= pp_rank < pp_size:
        raise ValueError(f"pp_rank={pp_rank} must be at least 0 and below pp_size={pp_size}")
    entry = runnable(schedule)
    try:
        placement = entry.placement(pp_size, stages_per_rank)
    except ValueError as problem:
        raise ValueError(f"pp_size={pp_size}, stages_per_rank={stages_per_rank}: {problem}") from None
    return [stage for stage, ranks in enumerate(placement) if pp_rank in ranks]


def runnable(schedule: str) -> Entry:
    """What the catalogue knows of a schedule that torch can run.

    Raises:
        ValueError: for an unknown schedule, or one that torch has no class for.
    """
    entry = find(schedule)
    if not entry.torch_name:
        raise ValueError(
            f"torch cannot run schedule {schedule!r}: use one of {', '.join(schedule_names())}, or run it with "
            "course_pp.runtime (engine='runtime')"
        )
    return entry


def torch_class(schedule: str) -> Any:
    """torch's class that runs ``schedule``."""
    return getattr(torch_schedules, f"Schedule{runnable(schedule).torch_name}")


def takes_one_stage(schedule: str) -> bool:
    """Whether torch's class takes a stage; else it takes a list of them."""
    return issubclass(torch_class(schedule), torch_schedules.PipelineScheduleSingle)


@lru_cache
def splits_backward(schedule: str) -> Literal["none", "some", "all"]:
    """Which backwards are two actions, the gradients of inputs and those of weights."""
    kinds = {part.kind for part in build(schedule, 2, 8).parts}
    if "I" not in kinds:
        return "none"
    return "some" if "B" in kinds else "all"


def check_microbatches(schedule: str, n_microbatches: int, n_stages: int, pp_size: int) -> None:
    """Refuse a number of microbatches that ``schedule`` does not allow, or torch's class for it.

    Raises:
        ValueError: naming the rule and the nearest numbers that work.
    """
    name = runnable(schedule).name
    build(schedule, pp_size, n_microbatches, n_stages // pp_size)
    if name == "1f1b" and n_microbatches < n_stages:
        raise ValueError(
            f"n_microbatches={n_microbatches}, but torch's 1F1B needs at least as many as its {n_stages} stages: use "
            f"{n_stages} or more, or 'gpipe'"
        )
    if name == "zb_h1":  # torch has rounds of equal size also for a single stage a rank, where they change nothing
        build("interleaved_1f1b", pp_size, n_microbatches, 2)
