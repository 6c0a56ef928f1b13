"""Before the first message: every rank has been given the same pipeline, or all of them refuse it together."""

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

__all__ = ["Agreed", "agree_on_pipeline", "digest"]


@dataclass(frozen=True)
class Agreed:
    """What the ranks have settled.

    Attributes:
        series: a number below 2**15 that keeps this pipeline's messages apart from others'.
        trainable: for each stage the names of its trainable parameters.
    """

    series: int
    trainable: Mapping[int, Sequence[str]]


def agree_on_pipeline(
    problem: str | None,
    facts: Mapping[str, Any],
    trainable: Mapping[int, Sequence[str]],
    group: dist.ProcessGroup | None,
) -> Agreed:
    """Compare what the ranks were given.

    Args:
        problem: what is wrong with this rank's arguments, None if nothing is.
        facts: what must be the same everywhere, by name.
        trainable: parameter names of this rank's stages.

    Raises:
        ValueError: on every rank, with the first rank's problem or the first fact that differs.
    """
    mine = (problem, dict(facts), dict(trainable), secrets.randbelow(2**15))
    everyone = [mine]
    if dist.is_initialized():
        everyone = [mine] * dist.get_world_size(group)
        dist.all_gather_object(everyone, mine, group=group)
    for rank, (trouble, _, _, _) in enumerate(everyone):
        if trouble is not None:
            raise ValueError(f"rank {rank}: {trouble}")
    for rank, (_, theirs, _, _) in enumerate(everyone):
        for name, value in everyone[0][1].items():
            if theirs[name] != value:
                raise ValueError(
                    f"rank {rank} was given {name}={theirs[name]!r}, rank 0 {value!r}: give all ranks the same pipeline"
                )
    return Agreed(everyone[0][3], {stage: names for _, _, part, _ in everyone for stage, names in part.items()})


def digest(value: object) -> str:
    """A short name for a value that prints all of itself; equal values have equal names."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:12]
