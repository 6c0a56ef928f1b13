"""The schedules torch can run, and how it runs them.

`course_pp.schedule` has their names, sizes and placements.

Where torch ships a class that takes the sizes, that class runs. Any other order of synchronous
actions goes through torch's executor of explicit orders, the one behind its own multi-stage
schedules.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal

from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

from course_pp.base.arguments import checked, refuse_below
from course_pp.base.torch_private import explicit_order
from course_pp.schedule import Entry, Schedule, build, check, find, names


def schedule_names() -> tuple[str, ...]:
    """Return the names of the schedules torch can run, torch's own names included.

    :func:`build_pipeline_schedule` takes each of them.
    """
    return tuple(name for name in names() if _foreign_to_torch(_example(name)) is None)


@checked
def get_stage_indices(
    schedule: str | Schedule, pp_rank: int, pp_size: int, stages_per_rank: int | None = None
) -> list[int]:
    """Return the indices of the stages that ``pp_rank`` holds under ``schedule``.

    Args:
        schedule: one of :func:`schedule_names`, or an order of your own.
        stages_per_rank: model chunks a rank. None takes the catalogue's usual number; an order of
            your own has its own.
    """
    refuse_below(1, "get_stage_indices", pp_size=pp_size, stages_per_rank=stages_per_rank)
    if not 0 <= pp_rank < pp_size:
        raise ValueError(f"pp_rank={pp_rank} must be at least 0 and below pp_size={pp_size}")
    if isinstance(schedule, Schedule):
        _refuse(problem_of_order(schedule) or _problem_of_ranks(schedule, pp_size))
        placement = schedule.placement
    else:
        entry = runnable(schedule)
        _refuse(_problem_of_stages_a_rank(entry, stages_per_rank))
        placement = entry.placement(pp_size, stages_per_rank)
    return [stage for stage, ranks in enumerate(placement) if pp_rank in ranks]


def _problem_of_stages_a_rank(schedule: Entry, number: int | None) -> str | None:
    """Return why a schedule does not take so many; the catalogue would speak of ``n_chunks``."""

    def takes(entry: Entry) -> bool:
        if number is None or number == entry.n_chunks:
            return True
        return entry.any_chunks and number % entry.chunks_in == 0

    if takes(schedule):
        return None
    usual = f"a multiple of {schedule.chunks_in}" if schedule.any_chunks else str(schedule.n_chunks)
    able = dict.fromkeys(find(name).name for name in schedule_names() if takes(find(name)))
    return (
        f"{number} stages a rank, and schedule {schedule.name!r} takes {usual}: cut the model into"
        f" as many, or take one of {', '.join(able)}"
    )


def runnable(schedule: str) -> Entry:
    """Return the catalogue's entry of a schedule.

    Raise a ValueError if the catalogue does not know it or torch cannot run it.
    """
    entry = find(schedule, offered=schedule_names)
    _refuse(problem_of_order(_example(entry.name)))
    return entry


def name_of(schedule: str | Schedule) -> str:
    """Return its name: the same for every alias, another for every order."""
    if isinstance(schedule, Schedule):
        return f"{schedule!r} {schedule.fingerprint}"
    return runnable(schedule).name


def problem_of_order(schedule: Schedule) -> str | None:
    """Return why torch's executor cannot run an order, whatever the model; None if it can."""
    reason = _foreign_to_torch(schedule)
    if reason is not None:
        return (
            f"torch cannot run schedule {schedule.name!r}, {reason}: use one of"
            f" {', '.join(schedule_names())}, or run it with course_pp.runtime (engine='runtime')"
        )
    if all(part.kind == "F" for part in schedule.parts):
        return (
            f"schedule {schedule.name!r} has forwards alone, and torch trains: pass one with"
            " backwards, and use eval"
        )
    idle = [rank for rank, row in enumerate(schedule.actions) if not row]
    if idle:
        return (
            f"schedule {schedule.name!r} gives rank {idle[0]} nothing to do: torch needs a stage on"
            " every rank"
        )
    if problems := check(schedule):
        more = f" (and {len(problems) - 1} more problems)" if len(problems) > 1 else ""
        return f"{schedule!r} cannot run: {problems[0]}{more}"
    return None


def _foreign_to_torch(schedule: Schedule) -> str | None:
    if any(part.kind == "U" for part in schedule.parts):
        return "whose stages update their weights within the step (U)"
    shared = [stage for stage, ranks in enumerate(schedule.placement) if len(ranks) > 1]
    return (
        f"which holds stage {shared[0]} on {len(schedule.placement[shared[0]])} ranks"
        if shared
        else None
    )


def order_of(
    schedule: str | Schedule, n_microbatches: int, n_stages: int, pp_size: int
) -> Schedule:
    """Return the order in which torch will run; refuse sizes that ``schedule`` does not allow."""
    if isinstance(schedule, Schedule):
        sizes = (schedule.n_stages, schedule.n_microbatches)
        if sizes != (n_stages, n_microbatches):
            raise ValueError(
                f"{schedule!r} for {n_stages} stages and n_microbatches={n_microbatches}: give it"
                f" {sizes[0]} stages in all and n_microbatches={sizes[1]}, or build it for these"
            )
        _refuse(problem_of_order(schedule) or _problem_of_ranks(schedule, pp_size))
        return schedule
    return build(runnable(schedule).name, pp_size, n_microbatches, n_stages // pp_size)


def torch_schedule(
    schedule: str | Schedule,
    stages: Sequence[PipelineStage],
    n_microbatches: int,
    loss_fn: Callable[..., Any],
) -> Any:
    # The loss is divided instead of the gradients: torch would divide those of earlier steps again.
    options = {"loss_fn": loss_fn, "scale_grads": False}
    n_stages, pp_size = stages[0].num_stages, stages[0].group_size
    torch_name = "" if isinstance(schedule, Schedule) else runnable(schedule).torch_name
    # torch's 1F1B wants its stages filled, and its interleaved ones want rounds of equal size,
    # which change nothing for a single stage a rank.
    takes = {
        "1F1B": n_microbatches >= n_stages,
        "InterleavedZeroBubble": n_microbatches % max(1, n_microbatches // pp_size) == 0,
    }
    if not torch_name or not takes.get(torch_name, True):
        order = order_of(schedule, n_microbatches, n_stages, pp_size)
        return explicit_order(
            list(stages), n_microbatches, [list(map(str, row)) for row in order.actions], **options
        )
    torch_class = getattr(torch_schedules, f"Schedule{torch_name}")
    takes_one = issubclass(torch_class, torch_schedules.PipelineScheduleSingle)
    return torch_class(stages[0] if takes_one else list(stages), n_microbatches, **options)


def splits_backward(schedule: str | Schedule) -> Literal["none", "some", "all"]:
    """Return how many of a schedule's backwards are split in two actions.

    One action computes the gradients of inputs, the other those of weights.
    """
    kinds = {
        part.kind
        for part in (schedule if isinstance(schedule, Schedule) else _example(schedule)).parts
    }
    if "I" not in kinds:
        return "none"
    return "some" if "B" in kinds else "all"


@cache
def _example(name: str) -> Schedule:
    return build(name, 2, 8)  # all of them allow that


def _problem_of_ranks(schedule: Schedule, pp_size: int) -> str | None:
    if schedule.n_ranks == pp_size:
        return None
    return (
        f"{schedule!r} on {pp_size} pipeline ranks: build it for {pp_size}, or start"
        f" {schedule.n_ranks}"
    )


def _refuse(problem: str | None) -> None:
    if problem is not None:
        raise ValueError(problem)
