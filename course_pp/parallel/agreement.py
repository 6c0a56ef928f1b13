"""All ranks refuse together: a rank that raises alone leaves its peers waiting for messages that never come."""

from typing import Any, TypeVar

import torch
import torch.distributed as dist

__all__ = ["agree", "agree_on", "gather"]

T = TypeVar("T")


def _control_device(group: dist.ProcessGroup | None) -> torch.device:
    """Where small control messages live: the CPU if the group can carry them there, so that no GPU is waited for."""
    return torch.device("cpu" if "cpu" in dist.get_backend_config(group) else "cuda")


def agree(problem: str | None, group: dist.ProcessGroup | None) -> None:
    """Raise on every rank of ``group`` if any rank has a problem; otherwise one small all-reduce.

    Raises:
        ValueError: with the message of the lowest rank that has one.
    """
    trouble = torch.tensor(problem is not None, dtype=torch.int32, device=_control_device(group))
    dist.all_reduce(trouble, op=dist.ReduceOp.MAX, group=group)
    if not trouble.item():
        return
    raise ValueError(next(found for found in gather(problem, group) if found is not None))


def gather(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """Everyone's ``value``, by rank of ``group``, on every rank."""
    values = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def agree_on(description: dict[str, Any], group: dist.ProcessGroup | None) -> None:
    """Raise on every rank unless all ranks of ``group`` pass equal descriptions.

    Raises:
        ValueError: naming the first entry that differs, and both ranks' values.
    """
    descriptions = gather(description, group)
    for rank, other in enumerate(descriptions):
        for key, value in descriptions[0].items():
            if other[key] != value:
                raise ValueError(
                    f"rank {rank} says {key}={other[key]!r}, rank 0 says {value!r}: "
                    "every rank must build the same pipeline"
                )
