"""Going through a schedule the way its ranks would: the engine under ``simulate`` and ``check``.

What actions hand to one another is numbered, so that a hundred thousand of them take a fraction of a second. There are
five kinds of these tokens, one of each for every stage s and microbatch:

* the activation that ``F`` leaves on its own rank, and the one it sends to stage s + 1;
* the gradient that ``I`` or ``B`` leaves on its own rank, and the one it sends to stage s - 1;
* the weight gradient that ``W`` or ``B`` leaves for ``U``.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from course_pp.schedule.action import Action, Overlap
from course_pp.schedule.schedule import Schedule
from course_pp.schedule.span import Time


@dataclass(frozen=True)
class Tokens:
    """The numbers of the tokens of a schedule of ``n_stages`` and ``n_microbatches``."""

    n_stages: int
    n_microbatches: int

    @property
    def per_kind(self) -> int:
        return self.n_stages * self.n_microbatches

    def needed_by(self, action: Action | Overlap) -> tuple[int, ...]:
        """What must be there before ``action`` can start."""
        if isinstance(action, Overlap):
            return self.needed_by(action.forward) + self.needed_by(action.backward)
        n, kind, stage = self.n_stages * self.n_microbatches, action.kind, action.stage
        here = stage * self.n_microbatches + action.microbatch
        if kind == "F":
            return (n + here - self.n_microbatches,) if stage else ()
        if kind == "W":
            return (2 * n + here,)
        if kind == "U":
            return (4 * n + here,)
        return (here, 3 * n + here + self.n_microbatches) if stage + 1 < self.n_stages else (here,)

    def made_by(self, action: Action | Overlap) -> tuple[int, ...]:
        """What is there once ``action`` is done."""
        if isinstance(action, Overlap):
            return self.made_by(action.forward) + self.made_by(action.backward)
        n, kind = self.n_stages * self.n_microbatches, action.kind
        here = action.stage * self.n_microbatches + action.microbatch
        if kind == "F":
            return (here, n + here)
        if kind == "I":
            return (2 * n + here, 3 * n + here)
        if kind == "B":
            return (2 * n + here, 3 * n + here, 4 * n + here)
        return (4 * n + here,) if kind == "W" else ()


@dataclass(frozen=True)
class Run:
    """How far each rank came, and when it did what.

    Attributes:
        times: for each rank the start and end of each action it did, in order.
        stuck: for each rank that did not finish, the index of the action it cannot start.
    """

    times: tuple[list[tuple[Time, Time]], ...]
    stuck: dict[int, int]


def execute(schedule: Schedule, durations: Sequence[Sequence[Time]], transfers: Sequence[Time]) -> Run:
    """Do every action as soon as its rank is free and its inputs have arrived, until nothing more can be done.

    Args:
        schedule: without stages that do not exist.
        durations: of each action, rank by rank.
        transfers: for each boundary between stages, the time of a message between different ranks.
    """
    tokens = Tokens(schedule.n_stages, schedule.n_microbatches)
    delays = _delays(schedule, tokens, transfers)
    arrival: list[Time | None] = [None] * len(delays)
    times: tuple[list[tuple[Time, Time]], ...] = tuple([] for _ in schedule.actions)
    waiting: defaultdict[int, list[int]] = defaultdict(list)
    able = list(range(schedule.n_ranks))
    while able:
        rank = able.pop()
        done = times[rank]
        clock = done[-1][1] if done else 0
        for index in range(len(done), len(durations[rank])):
            action = schedule.actions[rank][index]
            start = clock
            for token in tokens.needed_by(action):
                here_at = arrival[token]
                if here_at is None:
                    waiting[token].append(rank)
                    break
                if here_at > start:
                    start = here_at
            else:
                clock = start + durations[rank][index]
                done.append((start, clock))
                for token in tokens.made_by(action):
                    arrival[token] = clock + delays[token]
                    if token in waiting:
                        able.extend(waiting.pop(token))
                continue
            break
    stuck = {rank: len(times[rank]) for rank, row in enumerate(schedule.actions) if len(times[rank]) < len(row)}
    return Run(times, stuck)


def _delays(schedule: Schedule, tokens: Tokens, transfers: Sequence[Time]) -> list[Time]:
    """For each token how long it is on its way: only what is sent between different ranks takes time."""
    m = schedule.n_microbatches
    delays: list[Time] = [0] * (5 * tokens.per_kind)
    for stage, transfer in enumerate(transfers):
        if transfer:
            activations, gradients = tokens.per_kind + stage * m, 3 * tokens.per_kind + (stage + 1) * m
            for microbatch in range(m):
                if schedule.rank_of(stage, microbatch) != schedule.rank_of(stage + 1, microbatch):
                    delays[activations + microbatch] = delays[gradients + microbatch] = transfer
    return delays
