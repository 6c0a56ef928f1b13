"""A schedule as a value: for each rank, what it does and in which order."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from course_pp.schedule.action import Action, Overlap
from course_pp.schedule.edges import Edge

MOST_FORWARDS = 4_000_000  # of a schedule; some seconds and gigabytes

Work = tuple[int, int]
"""A stage and a microbatch."""


@dataclass(frozen=True, repr=False)
class Schedule:
    """What each rank does, in order. Says nothing about when: that is
    :func:`course_pp.schedule.simulate`.

    Any order of existing actions can be written down; :func:`course_pp.schedule.check` says whether
    it can run.

    Attributes:
        placement: for each stage the ranks that hold it: one, or several replicas that take the
            microbatches in turn, so that microbatch i of stage s runs on ``placement[s][i %
            len(placement[s])]``.
        actions: for each rank its actions in order.
        edges: values that stages read beyond their neighbours' (skip connections).
        feedback: in generation, by how many microbatches the first stage is behind: its microbatch
            i + feedback is the token that the last stage has made of microbatch i. 0 is none.
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
            if strangers := [action for action in row if not isinstance(action, Action | Overlap)]:
                raise ValueError(
                    f"rank {rank} has {strangers[0]!r} among its actions: give Action or Overlap"
                    " values"
                )

    def __repr__(self) -> str:
        return (
            f"Schedule({self.name!r}, {self.n_ranks} ranks, {self.n_stages} stages,"
            f" {self.n_microbatches} microbatches)"
        )

    def forward_only(self) -> "Schedule":
        """Return the schedule with its forwards alone, for evaluation."""
        rows = (
            tuple(part for action in row for part in action.parts if part.kind == "F")
            for row in self.actions
        )
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
        """A short text that tells this order and placement from any other, whatever its name."""
        more = (self.edges, self.feedback) if self.edges or self.feedback else ()
        return hashlib.sha256(repr((self.placement, self.actions, *more)).encode()).hexdigest()[:12]

    def with_edges(self, *edges: Edge) -> "Schedule":
        """Return the schedule with these edges in place of any it had."""
        return replace(self, edges=edges)

    def rank_of(self, stage: int, microbatch: int) -> int:
        ranks = self.placement[stage]
        return ranks[microbatch % len(ranks)]


def looped(n_ranks: int, n_chunks: int = 1) -> tuple[tuple[int, ...], ...]:
    """Stage s on rank ``s % n_ranks``: rank r holds r, r + p, r + 2p, ... (Narayanan et al. 2021, section 2.2)."""
    return tuple((stage % n_ranks,) for stage in range(n_ranks * n_chunks))


def v_shaped(n_ranks: int) -> tuple[tuple[int, ...], ...]:
    """Down the ranks and back up: rank r holds stages r and 2p - 1 - r (Qi et al. 2024, ZB-V)."""
    return in_waves(n_ranks, 2)


def in_waves(n_ranks: int, n_chunks: int) -> tuple[tuple[int, ...], ...]:
    """Down the ranks, back up, down again: neighbouring stages at a turn share a rank (Liu et al. 2023, Hanayo)."""
    ranks = range(n_ranks)
    return tuple(
        (rank,) for chunk in range(n_chunks) for rank in (ranks[::-1] if chunk % 2 else ranks)
    )


def both_ways(name: str, n_ranks: int) -> tuple[tuple[int, ...], ...]:
    """Every stage twice: even microbatches go down the ranks, odd ones up (Li and Hoefler 2021,
    Chimera).

    Of an odd number the middle rank would hold both copies of its stage.
    """
    if n_ranks % 2:
        fewer = f"{n_ranks - 1} or " if n_ranks > 1 else ""
        raise ValueError(
            f"{name} holds every stage on two ranks, mirror images of one another, so {n_ranks}"
            f" ranks leave one alone: give an even number, such as {fewer}{n_ranks + 1}"
        )
    return tuple((rank, n_ranks - 1 - rank) for rank in range(n_ranks))


def implied_placement(rows: Iterable[Sequence[Action | Overlap]]) -> tuple[tuple[int, ...], ...]:
    """The ranks that each stage was found on in the rows of actions, of which at least one is not empty."""
    takes: dict[int, dict[int, int]] = {}
    for rank, row in enumerate(rows):
        for action in row:
            for part in action.parts:
                first = takes.setdefault(part.stage, {})
                first[rank] = min(part.microbatch, first.get(rank, part.microbatch))
    missing = next((stage for stage in range(max(takes)) if stage not in takes), None)
    if missing is not None:
        raise ValueError(
            f"no rank has stage {missing}, yet there is stage {max(takes)}: number the stages from"
            " 0 without gaps, and give all ranks"
        )
    # Replicas take the microbatches in turn, so they are listed by the first that each takes.
    return tuple(
        tuple(sorted(takes[stage], key=takes[stage].__getitem__)) for stage in range(len(takes))
    )


def normalised(placement: Sequence[int | Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """``placement`` with a tuple of ranks for each stage; an integer stands for one rank."""
    return tuple((ranks,) if isinstance(ranks, int) else tuple(ranks) for ranks in placement)


def refuse_impossible_placement(placement: Sequence[Sequence[int]], n_ranks: int) -> None:
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
