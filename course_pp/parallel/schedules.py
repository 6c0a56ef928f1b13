"""The schedules torch ships, under the course's names: their class, where their stages live, what they allow."""

from dataclasses import dataclass
from typing import Any, Literal

from torch.distributed.pipelining import schedules as torch_schedules

__all__ = ["get_stage_indices", "schedule_names"]


@dataclass(frozen=True)
class ScheduleKind:
    """What a schedule name stands for.

    Args:
        torch_class: name of the class in ``torch.distributed.pipelining.schedules``.
        placement: ``"single"``: stage r on rank r; ``"loop"``: stages r, r + pp, r + 2·pp, …; ``"v"``: stages r and
            2·pp − 1 − r, so that the first and the last stage share a rank.
        at_least_stages: microbatches must be at least as many as stages.
        in_rounds: microbatches must split evenly into rounds of about one a rank.
        splits_backward: which backwards are two actions, the gradients of inputs and those of weights.
    """

    torch_class: str
    placement: Literal["single", "loop", "v"]
    at_least_stages: bool = False
    in_rounds: bool = False
    splits_backward: Literal["none", "some", "all"] = "none"

    @property
    def build(self) -> Any:
        """torch's schedule class."""
        return getattr(torch_schedules, self.torch_class)

    @property
    def multi_stage(self) -> bool:
        """True if a rank holds a list of stages."""
        return self.placement != "single"


_KINDS = {
    "gpipe": ScheduleKind("ScheduleGPipe", "single"),
    "1f1b": ScheduleKind("Schedule1F1B", "single", at_least_stages=True),
    "interleaved_1f1b": ScheduleKind("ScheduleInterleaved1F1B", "loop", in_rounds=True),
    "looped_bfs": ScheduleKind("ScheduleLoopedBFS", "loop"),
    "interleaved_zb": ScheduleKind("ScheduleInterleavedZeroBubble", "loop", in_rounds=True, splits_backward="all"),
    "zb_v": ScheduleKind("ScheduleZBVZeroBubble", "v", splits_backward="all"),
    "dualpipe_v": ScheduleKind("ScheduleDualPipeV", "v", at_least_stages=True, splits_backward="some"),
}


def schedule_names() -> tuple[str, ...]:
    """The names :func:`build_pipeline_schedule` takes; torch's class names are accepted as well."""
    return tuple(_KINDS)


def find_schedule(name: str) -> ScheduleKind:
    """Look a schedule up by our name or torch's (``"Interleaved1F1B"``, ``"ScheduleGPipe"``), in any case.

    Raises:
        ValueError: for an unknown name.
    """
    wanted = str(name).lower()
    for ours, kind in _KINDS.items():
        if wanted in (ours, kind.torch_class.lower(), kind.torch_class.removeprefix("Schedule").lower()):
            return kind
    raise ValueError(f"unknown schedule {name!r}: choose one of {', '.join(_KINDS)}")


def get_stage_indices(schedule: str, pp_rank: int, pp_size: int, stages_per_rank: int | None = None) -> list[int]:
    """Indices of the stages that ``pp_rank`` holds under ``schedule``.

    Args:
        stages_per_rank: model chunks a rank. None means what is usual: 1 for single-stage schedules, else 2.

    Raises:
        ValueError: for an unknown schedule, a rank outside ``pp_size``, or a number of stages a rank that the schedule
            does not allow.
    """
    kind = find_schedule(schedule)
    if not 0 <= pp_rank < pp_size:
        raise ValueError(f"pp_rank={pp_rank} must be at least 0 and below pp_size={pp_size}")
    chunks = stages_per_rank if stages_per_rank is not None else (2 if kind.multi_stage else 1)
    allowed = {"single": chunks == 1, "v": chunks == 2, "loop": chunks >= 1}[kind.placement]
    if not allowed:
        rule = {"single": "exactly 1", "v": "exactly 2", "loop": "at least 1"}[kind.placement]
        raise ValueError(f"stages_per_rank={chunks}, but schedule {schedule!r} takes {rule}")
    if kind.placement == "v":
        return [pp_rank, 2 * pp_size - 1 - pp_rank]
    return [pp_rank + chunk * pp_size for chunk in range(chunks)]


def check_microbatches(schedule: str, n_microbatches: int, n_stages: int, pp_size: int) -> None:
    """Refuse a number of microbatches that ``schedule`` cannot run.

    Raises:
        ValueError: naming the rule and the nearest numbers that work.
    """
    kind = find_schedule(schedule)
    if not isinstance(n_microbatches, int) or n_microbatches < 1:
        raise ValueError(f"n_microbatches={n_microbatches!r} must be a whole number of at least 1")
    if kind.at_least_stages and n_microbatches < n_stages:
        raise ValueError(
            f"n_microbatches={n_microbatches}, but schedule {schedule!r} needs at least as many as its {n_stages} "
            f"stages: use {n_stages} or more, or 'gpipe'"
        )
    rounds = max(1, n_microbatches // pp_size)
    if kind.in_rounds and n_microbatches % rounds:
        below, above = n_microbatches // pp_size * pp_size, -(-n_microbatches // pp_size) * pp_size
        raise ValueError(
            f"n_microbatches={n_microbatches} does not split into {rounds} equal rounds, as schedule {schedule!r} "
            f"needs on {pp_size} ranks: use {below} or {above}"
        )
