"""Before the first message: every rank has been given the same pipeline, or all of them refuse it together."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.distributed as dist

from course_pp.collective import Ranks, difference
from course_pp.schedule.declared import Declared
from course_pp.tied import Look, problem_of_forgotten_ties

__all__ = ["Agreed", "Fact", "agree_on_pipeline"]

_LIMIT_S = 300.0  # one rank may take minutes longer than another to build its stages


class Fact(NamedTuple):
    """What copies of a parameter must have in common.

    Attributes:
        kind: shape, dtype and whether it is trained; its other places must have the same.
        value: a fingerprint, of copies alone, which must start equal.
    """

    kind: str
    value: str = ""

    def __str__(self) -> str:
        return f"{self.kind} of value {self.value}" if self.value else self.kind


@dataclass(frozen=True)
class Agreed:
    """What the ranks have settled.

    Attributes:
        series: a number below 2**15 that keeps this pipeline's messages apart from others'.
        parameters: for each stage its parameters, by name.
        declared: for each stage the values that it reads and writes beyond its neighbours'.
        looks: of each stage, how its weights look, unless nothing is tied.
        n_data: ranks over which FSDP2 averages gradients, the most of any stage.
    """

    series: int
    parameters: Mapping[int, Mapping[str, Fact]]
    declared: Mapping[int, Declared]
    looks: Mapping[int, Mapping[str, Look]]
    n_data: int


@dataclass(frozen=True)
class _Told:
    """What a rank tells the others; ``series`` is its proposal."""

    problem: str | None
    facts: Mapping[str, Any]
    parameters: Mapping[int, Mapping[str, Fact]]
    declared: Mapping[int, Declared]
    looks: Mapping[int, Mapping[str, Look]]
    n_data: int
    series: int


def agree_on_pipeline(
    problem: str | None,
    facts: Mapping[str, Any],
    parameters: Mapping[int, Mapping[str, Fact]],
    group: dist.ProcessGroup | None,
    declared: Mapping[int, Declared],
    looks: Mapping[int, Mapping[str, Look]],
    n_data: int,
) -> Agreed:
    """Compare what the ranks were given.

    Args:
        problem: what is wrong with this rank's arguments, None if nothing is.
        facts: what must be the same everywhere, by name.
        parameters: of this rank's stages, by name.
        declared: what this rank's stages read and write beyond their neighbours'.
        looks: how its weights look, unless nothing is tied.
        n_data: ranks over which FSDP2 averages gradients of its stages.

    Raises:
        RankMissing: if a rank has ended or does not come.
        ValueError: on every rank, with the first rank's problem or the first fact that differs.
    """
    mine = _Told(problem, facts, parameters, declared, looks, n_data, 1 + secrets.randbelow(2**15 - 1))
    everyone = Ranks(group, limit_s=_LIMIT_S).gather(mine)
    for rank, told in enumerate(everyone):
        if told.problem is not None:
            raise ValueError(f"rank {rank}: {told.problem}")
    problem = difference([told.facts for told in everyone])
    found = {stage: look for told in everyone for stage, look in told.looks.items()}
    if facts["tied"] is None:
        problem = problem or problem_of_forgotten_ties(found)
    if problem is not None:
        raise ValueError(problem)
    held = _same_on_replicas([told.parameters for told in everyone])
    values: dict[int, Declared] = {}
    for rank, told in enumerate(everyone):
        for stage, ours in told.declared.items():
            if values.setdefault(stage, ours) != ours:
                raise ValueError(
                    f"rank {rank} has stage {stage} as {ours}, another replica as {values[stage]}: "
                    "give all replicas of a stage the same reads and writes"
                )
    return Agreed(everyone[0].series, held, values, found, max(told.n_data for told in everyone))


def _same_on_replicas(by_rank: Sequence[Mapping[int, Mapping[str, Fact]]]) -> Mapping[int, Mapping[str, Fact]]:
    held: dict[int, Mapping[str, Fact]] = {}
    for rank, stages in enumerate(by_rank):
        for stage, ours in stages.items():
            theirs = held.setdefault(stage, ours)
            name = next((name for name in (*ours, *theirs) if ours.get(name) != theirs.get(name)), None)
            if name is not None:
                raise ValueError(
                    f"rank {rank} has {name!r} of stage {stage} as {ours.get(name)}, another replica as "
                    f"{theirs.get(name)}: give all replicas of a stage the same parameters, with equal values"
                )
    return held
