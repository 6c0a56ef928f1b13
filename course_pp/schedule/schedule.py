"""A schedule as a value: for each rank its actions, in order."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from course_pp.schedule.action import Action, Overlap
from course_pp.schedule.edges import Edge

# More forwards than this in one schedule take many seconds and gigabytes.
MOST_FORWARDS = 4_000_000

Work = tuple[int, int]
"""A stage and a microbatch."""


@dataclass(frozen=True, repr=False)
class Schedule:
    """The actions of each rank, in order, without times.

    :func:`course_pp.schedule.simulate` adds the times. Any order of actions can be written down;
    :func:`course_pp.schedule.check` says whether it can run.

    Attributes:
        placement: the ranks that hold each stage: one rank, or several replicas that take the
            microbatches in turn. Microbatch i of stage s runs on ``placement[s][i %
            len(placement[s])]``.
        actions: the actions of each rank, in order.
        edges: values that stages read beyond their neighbours' (skip connections).
        feedback: the lag of the first stage in generation, in microbatches: its microbatch
            i + feedback is the token that the last stage has made of microbatch i. 0 if no tokens
            feed back.
    """

    name: str
    placement: tuple[tuple[int, ...], ...]
    actions: tuple[tuple[Action | Overlap, ...], ...]
    edges: tuple[Edge, ...] = ()
    feedback: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "placement", normalised(self.placement))
        object.__setattr__(self, "actions", tuple(map(tuple, self.actions)))
        object.__setattr__(self, "edges", tuple(self.edges))
        if not self.actions or not self.placement:
            raise ValueError(
                f"schedule {self.name!r} has {self.n_ranks} ranks and {self.n_stages} stages: "
                "give at least one of each, in actions and placement"
            )
        refuse_impossible_placement(self.placement, self.n_ranks)
        for rank, row in enumerate(self.actions):
            for action in row:
                if not isinstance(action, (Action, Overlap)):
                    raise ValueError(
                        f"rank {rank} has {action!r} among its actions: give Action or Overlap"
                        " values"
                    )

    def __repr__(self) -> str:
        return (
            f"Schedule({self.name!r}, {self.n_ranks} ranks, {self.n_stages} stages,"
            f" {self.n_microbatches} microbatches)"
        )

    def forward_only(self) -> "Schedule":
        """Return the schedule with its forwards alone, for evaluation."""
        rows = []
        for row in self.actions:
            parts = (part for action in row for part in action.parts)
            rows.append(tuple(part for part in parts if part.kind == "F"))
        return replace(self, name=f"{self.name} forward", actions=tuple(rows))

    @property
    def n_ranks(self) -> int:
        return len(self.actions)

    @property
    def n_stages(self) -> int:
        return len(self.placement)

    @cached_property
    def n_microbatches(self) -> int:
        """One more than the last microbatch that any rank names."""
        return 1 + max((part.microbatch for part in self.parts), default=-1)

    @property
    def parts(self) -> Iterable[Action]:
        """Every action, rank by rank in order, overlapped pairs taken apart."""
        return (part for row in self.actions for action in row for part in action.parts)

    @cached_property
    def fingerprint(self) -> str:
        """A short text that is the same for two schedules only if they differ in name alone."""
        said: tuple[object, ...] = (self.placement, self.actions)
        # Left out where there are none: fingerprints of plain schedules are older than edges.
        if self.edges or self.feedback:
            said += (self.edges, self.feedback)
        return hashlib.sha256(repr(said).encode()).hexdigest()[:12]

    def with_edges(self, *edges: Edge) -> "Schedule":
        """Return the schedule with these edges in place of any it had."""
        return replace(self, edges=edges)

    def rank_of(self, stage: int, microbatch: int) -> int:
        ranks = self.placement[stage]
        return ranks[microbatch % len(ranks)]


def looped(n_ranks: int, n_chunks: int = 1) -> tuple[tuple[int, ...], ...]:
    """Place stage s on rank ``s % n_ranks``: rank r holds stages r, r + p, r + 2p, ...

    Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters using
    Megatron-LM", section 2.2.
    """
    return tuple((stage % n_ranks,) for stage in range(n_ranks * n_chunks))


def v_shaped(n_ranks: int) -> tuple[tuple[int, ...], ...]:
    """Place stages down the ranks and up: rank r holds r and 2p - 1 - r (Qi et al. 2024, ZB-V)."""
    return in_waves(n_ranks, 2)


def in_waves(n_ranks: int, n_chunks: int) -> tuple[tuple[int, ...], ...]:
    """Place stages down the ranks, up, and down again (Liu et al. 2023, Hanayo).

    The two neighbouring stages at a turn share a rank.
    """
    down = [(rank,) for rank in range(n_ranks)]
    placement = []
    for chunk in range(n_chunks):
        placement += down[::-1] if chunk % 2 else down
    return tuple(placement)


def both_ways(name: str, n_ranks: int) -> tuple[tuple[int, ...], ...]:
    """Place every stage twice: even microbatches go down the ranks, odd ones up.

    Li and Hoefler 2021, Chimera. With an odd number of ranks the middle rank would hold both copies
    of its stage.
    """
    if n_ranks % 2:
        fewer = f"{n_ranks - 1} or " if n_ranks > 1 else ""
        raise ValueError(
            f"{name} holds every stage on two ranks, mirror images of one another, so {n_ranks}"
            f" ranks leave one alone: give an even number, such as {fewer}{n_ranks + 1}"
        )
    return tuple((rank, n_ranks - 1 - rank) for rank in range(n_ranks))


def implied_placement(rows: Iterable[Sequence[Action | Overlap]]) -> tuple[tuple[int, ...], ...]:
    """Return the placement that the rows of actions imply. At least one row is not empty."""
    first_taken: dict[int, dict[int, int]] = {}  # by stage and rank, the first microbatch
    for rank, row in enumerate(rows):
        for action in row:
            for part in action.parts:
                first = first_taken.setdefault(part.stage, {})
                first[rank] = min(part.microbatch, first.get(rank, part.microbatch))
    placement = []
    for stage in range(1 + max(first_taken)):
        if stage not in first_taken:
            raise ValueError(
                f"no rank has stage {stage}, yet there is stage {max(first_taken)}: number the"
                " stages from 0 without gaps, and give all ranks"
            )
        # Replicas take the microbatches in turn, so they are listed by the first that each takes.
        first = first_taken[stage]
        placement.append(tuple(sorted(first, key=first.__getitem__)))
    return tuple(placement)


def normalised(placement: Sequence[int | Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Return ``placement`` with a tuple of ranks for each stage; an integer is one rank."""
    return tuple((ranks,) if isinstance(ranks, int) else tuple(ranks) for ranks in placement)


def refuse_impossible_placement(placement: Sequence[Sequence[int]], n_ranks: int) -> None:
    """Refuse a placement that is empty, or whose ranks do not exist or stand twice at a stage."""
    if not placement:
        raise ValueError(f"placement is {placement!r}: give the rank of at least one stage")
    for stage, ranks in enumerate(placement):
        if not ranks or len(set(ranks)) != len(ranks):
            raise ValueError(
                f"stage {stage} is placed on {tuple(ranks)}: give it one rank, or several different"
                " ones"
            )
        for rank in ranks:
            if not 0 <= rank < n_ranks:
                raise ValueError(
                    f"stage {stage} is placed on rank {rank!r}, which does not exist: give a rank"
                    f" from 0 to {n_ranks - 1}, or an order of actions for rank {rank!r}"
                    " (placement)"
                )
