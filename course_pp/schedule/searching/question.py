"""What is asked of a search, checked once for all who search: sizes, costs, memory, placement."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Literal

from course_pp.schedule.bounds import bound
from course_pp.schedule.catalogue import build, find, names
from course_pp.schedule.costs import Costs
from course_pp.schedule.schedule import Schedule, looped, v_shaped
from course_pp.schedule.searching.problem import Problem
from course_pp.schedule.span import Time

Layout = Literal["loop", "v"]
MemoryLimit = int | Sequence[int | None] | None

_MOST_ACTIONS = 20_000


@dataclass(frozen=True)
class Question:
    """Which order of one placement is best?

    Attributes:
        placement: for each stage its rank.
        problem: in numbers.
        costs: as given, an activation weighing 1.
        bound: what no answer can beat.
    """

    placement: tuple[tuple[int, ...], ...]
    problem: Problem
    costs: Costs
    bound: Time

    def named(self) -> list[Schedule]:
        """Return the catalogue's schedules that answer it: same placement, same kinds of backward, within the caps."""
        problem, found = self.problem, []
        for name in names():
            entry = find(name)
            if entry.updates or not (entry.any_chunks or entry.n_chunks == problem.n_chunks):
                continue
            try:
                schedule = build(name, problem.n_ranks, problem.n_microbatches, problem.n_chunks)
            except ValueError:  # a size that this one does not allow
                continue
            halves = any(part.kind in "IW" for part in schedule.parts)
            answers = schedule.placement == self.placement and (problem.split or not halves)
            if answers and problem.fits(problem.words_of(schedule)):
                found.append(schedule)
        return found


def questions(
    n_ranks: int,
    n_microbatches: int,
    costs: Costs,
    memory_limit: MemoryLimit,
    n_chunks: int,
    placement: Layout | None,
    split: bool,
) -> list[Question]:
    """Return one question for each placement to try.

    Raises:
        ValueError: for what cannot be asked; says what can.
    """
    _refuse_impossible_sizes(n_ranks, n_microbatches, n_chunks, placement)
    _refuse_zero_times(costs, n_ranks * n_chunks)
    caps = _caps(memory_limit, n_ranks, n_microbatches, n_chunks)
    layouts = [placement] if placement else ["loop", "v"][:n_chunks]
    counted = replace(costs, activation=1, released_by_input_grad=0, weights=0)
    # A whole backward is one that leaves nothing for later.
    halves = [costs.each(name, n_ranks * n_chunks) for name in ("input_grad", "weight_grad")]
    whole = tuple(map(sum, zip(*halves, strict=True)))
    timed = counted if split else replace(counted, input_grad=whole, weight_grad=0)
    asked = []
    for layout in layouts:
        ranks_of = v_shaped(n_ranks) if layout == "v" else looped(n_ranks, n_chunks)
        problem = Problem.of(ranks_of, n_microbatches, counted, caps, split)
        asked.append(
            Question(ranks_of, problem, counted, bound(n_ranks, n_microbatches, timed, caps, placement=ranks_of))
        )
    return asked


def refuse_no_time(function: str, seconds: float) -> None:
    """Raise ValueError unless ``seconds`` is a finite time above 0."""
    if not 0 < seconds < inf:
        raise ValueError(f"{function}: seconds is {seconds}: give a time limit above 0, and a finite one")


def _refuse_impossible_sizes(n_ranks: int, n_microbatches: int, n_chunks: int, placement: Layout | None) -> None:
    for name, value in (("n_ranks", n_ranks), ("n_microbatches", n_microbatches)):
        if value < 1:
            raise ValueError(f"{name} is {value}: give an integer of at least 1")
    if n_chunks not in (1, 2):
        raise ValueError(f"n_chunks is {n_chunks}: a search takes 1 or 2 stages a rank")
    if placement == "v" and n_chunks == 1:
        raise ValueError("placement is 'v' with n_chunks 1: a V has two stages a rank; give n_chunks=2, or 'loop'")
    actions = 3 * n_ranks * n_chunks * n_microbatches
    if actions > _MOST_ACTIONS:
        raise ValueError(
            f"3 × n_ranks × n_chunks × n_microbatches is {actions:,}: a search goes through every action many times, "
            f"so keep it at {_MOST_ACTIONS:,} or below"
        )


def _refuse_zero_times(costs: Costs, n_stages: int) -> None:
    """A weight gradient may take no time, as that of a frozen stage does."""
    times = costs.durations(n_stages)
    for name, kind in (("forward", "F"), ("input_grad", "I")):
        for stage, time in enumerate(times[kind]):
            if time == 0:
                raise ValueError(f"{name} is 0 in stage {stage}: give a time above 0 for a search")


def _caps(limit: MemoryLimit, n_ranks: int, n_microbatches: int, n_chunks: int) -> tuple[int, ...]:
    limits = tuple(limit) if isinstance(limit, Sequence) else (limit,) * n_ranks
    if len(limits) != n_ranks:
        raise ValueError(f"memory_limit has {len(limits)} values for {n_ranks} ranks: give one number, or one for each")
    for rank, cap in enumerate(limits):
        if cap is not None and cap < n_chunks:
            kept = "one activation" if n_chunks == 1 else f"one activation in each of its {n_chunks} stages"
            raise ValueError(
                f"memory_limit is {cap} on rank {rank}: a microbatch keeps {kept} until its backward comes, "
                f"so give at least {n_chunks}"
            )
    most = n_chunks * n_microbatches
    return tuple(most if cap is None else min(cap, most) for cap in limits)
