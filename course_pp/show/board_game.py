"""What a board is played with: stages on ranks, what actions cost, memory caps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from course_pp.schedule import Action, Costs

Why = Literal["unknown", "placed", "missing", "busy", "room", "memory", "nothing"]
KINDS_IN_ORDER = "FBIW"


class Refused(ValueError):
    """An action that cannot be placed.

    Attributes:
        why: the rule that forbids it.
    """

    def __init__(self, why: Why, message: str) -> None:
        super().__init__(message)
        self.why = why


@dataclass(frozen=True)
class Game:
    """What a board is played with.

    Attributes:
        placement: the rank of each stage.
        n_microbatches: m.
        durations: for each kind of action its time in each stage.
        transfers: the time of a message between two ranks, for each boundary between stages.
        limits: for each rank the most activations it may hold; None for no limit.
        split: whether the backward comes in halves, ``I`` and ``W``; a whole ``B`` is then allowed too.
    """

    placement: tuple[int, ...]
    n_microbatches: int
    durations: Mapping[str, tuple[float, ...]]
    transfers: tuple[float, ...]
    limits: tuple[int | None, ...]
    split: bool = False

    @property
    def n_ranks(self) -> int:
        return len(self.limits)

    @property
    def n_stages(self) -> int:
        return len(self.placement)

    @property
    def kinds(self) -> str:
        """The letters that can be placed."""
        return "FBIW" if self.split else "FB"

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """For each rank its stages."""
        return tuple(
            tuple(stage for stage, home in enumerate(self.placement) if home == rank) for rank in range(self.n_ranks)
        )

    def as_json(self) -> dict[str, Any]:
        """As the browser takes it."""
        return {
            "placement": list(self.placement),
            "microbatches": self.n_microbatches,
            "durations": {kind: list(times) for kind, times in self.durations.items()},
            "transfers": list(self.transfers),
            "limits": list(self.limits),
            "split": self.split,
        }


def game_of(
    placement: Sequence[int],
    n_microbatches: int,
    costs: Costs,
    memory_limit: int | Sequence[int | None] | None = None,
    split: bool = False,
) -> Game:
    """Return a game on ``placement``.

    Raises:
        ValueError: for fewer than one microbatch, an action that takes no time, and a limit under which no microbatch
            could pass; names the least that would do.
    """
    if n_microbatches < 1:
        raise ValueError(f"n_microbatches is {n_microbatches}: give an integer of at least 1")
    n_stages, n_ranks = len(placement), 1 + max(placement)
    times = costs.durations(n_stages)
    for name, kind in (("forward", "F"), ("input_grad", "I"), ("weight_grad", "W")):
        if min(times[kind]) <= 0:
            raise ValueError(f"{name} is {min(times[kind])}: on the board every action takes time, give more than 0")
    several = isinstance(memory_limit, Sequence)
    limits = tuple(memory_limit) if isinstance(memory_limit, Sequence) else (memory_limit,) * n_ranks
    if len(limits) != n_ranks:
        raise ValueError(f"memory_limit has {len(limits)} values for {n_ranks} ranks: give one number, or one for each")
    for rank, limit in enumerate(limits):
        least = placement.count(rank)
        if limit is not None and limit < least:
            where = f" on rank {rank}" if several else ""
            raise ValueError(
                f"memory_limit is {limit}{where}: one microbatch is held by each of rank {rank}'s stages, so give at "
                f"least {least}"
            )
    return Game(
        tuple(placement),
        n_microbatches,
        {kind: tuple(map(float, times[kind])) for kind in KINDS_IN_ORDER},
        tuple(map(float, costs.transfers(n_stages))),
        limits,
        split,
    )


def spelled(time: float) -> str:
    """Return a time for people: ``3``, ``2.5``."""
    return f"{round(time, 3):.12g}"


@dataclass(frozen=True, slots=True)
class Placed:
    """An action on the board, and when it is done."""

    rank: int
    action: Action
    start: float
    end: float


def held_after(row: Iterable[Placed]) -> list[int]:
    """Return how many activations a rank holds once each of its actions has started (``F``) or ended (the others)."""
    held, found = 0, []
    for span in row:
        held += {"F": 1, "I": 0}.get(span.action.kind, -1)
        found.append(held)
    return found
