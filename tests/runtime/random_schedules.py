"""Schedules that nobody would write: legal by construction, or broken on purpose."""

import random
from collections.abc import Callable
from dataclasses import replace

import torch.distributed as dist

from course_pp.schedule import Action, Overlap, Product, Schedule

Rows = list[list[Action | Overlap]]


def random_schedule(seed: int) -> Schedule:
    """A legal schedule of up to 4 ranks, 8 stages and 6 microbatches; the same for the same seed.

    Each rank's actions are those of one order of all actions in which each comes after what it
    needs.
    """
    rng = random.Random(seed)
    n_ranks = rng.randint(1, 4)
    n_stages = rng.randint(1, 8)
    n_microbatches = rng.randint(1, 6)
    schedule = Schedule(f"random {seed}", random_placement(rng, n_ranks, n_stages), ((),) * n_ranks)
    rows: Rows = [[] for _ in range(n_ranks)]
    for action in _random_order(rng, n_stages, n_microbatches):
        rows[schedule.rank_of(action.stage, action.microbatch)].append(action)
    return with_rows(schedule, _overlapped(rng, rows, n_stages) if rng.random() < 0.6 else rows)


def random_placement(
    rng: random.Random, n_ranks: int, n_stages: int
) -> tuple[tuple[int, ...], ...]:
    """A loop, a zigzag of V's, or anything, replicas included; ranks may stay without a stage."""
    there_and_back = (*range(n_ranks), *reversed(range(n_ranks)))
    kind = rng.choice(("loop", "v", "random"))
    if kind == "loop":
        return tuple((stage % n_ranks,) for stage in range(n_stages))
    if kind == "v":
        return tuple((there_and_back[stage % (2 * n_ranks)],) for stage in range(n_stages))
    replicas = [rng.randint(1, n_ranks) if rng.random() < 0.2 else 1 for _ in range(n_stages)]
    return tuple(tuple(rng.sample(range(n_ranks), count)) for count in replicas)


def _random_order(rng: random.Random, n_stages: int, n_microbatches: int) -> list[Action]:
    split = rng.choice((0.0, 0.5, 1.0))
    waiting = [Action(stage, "F", i) for stage in range(n_stages) for i in range(n_microbatches)]
    for forward in tuple(waiting):
        kinds = "IW" if rng.random() < split else "B"
        waiting.extend(replace(forward, kind=kind) for kind in kinds)
    # Which kind goes first when there is a choice decides between something like GPipe and
    # something like 1F1B.
    eagerness = {kind: rng.choice((0.1, 1.0, 10.0)) for kind in "FBIW"}
    made: set[Product] = set()
    order: list[Action] = []
    while waiting:
        ready = [action for action in waiting if made.issuperset(action.needs(n_stages))]
        (action,) = rng.choices(ready, [eagerness[action.kind] for action in ready])
        waiting.remove(action)
        order.append(action)
        made.update(action.provides)
    return order


def _overlapped(rng: random.Random, rows: Rows, n_stages: int) -> Rows:
    """``rows`` with some neighbours made pairs, where that closes no circle of waits."""
    for rank, row in enumerate(rows):
        for index in reversed(range(len(row) - 1)):
            pair = _as_pair(row[index], row[index + 1])
            if pair is not None and rng.random() < 0.5:
                tried = [*row[:index], pair, *row[index + 2 :]]
                if can_end([*rows[:rank], tried, *rows[rank + 1 :]], n_stages):
                    row[index : index + 2] = [pair]
    return rows


def _as_pair(one: Action | Overlap, other: Action | Overlap) -> Overlap | None:
    if isinstance(one, Action) and isinstance(other, Action):
        forward, backward = (one, other) if one.kind == "F" else (other, one)
        if forward.kind == "F" and backward.kind in "BI":
            return Overlap(forward, backward)
    return None


def can_end(rows: Rows, n_stages: int) -> bool:
    """Return whether ranks that do their rows in order come to the end, the slow way."""
    made: set[Product] = set()
    place = [0] * len(rows)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while place[rank] < len(row):
                parts = row[place[rank]].parts
                if not all(made.issuperset(part.needs(n_stages)) for part in parts):
                    break
                made.update(product for part in parts for product in part.provides)
                place[rank] += 1
                moved = True
    return all(place[rank] == len(row) for rank, row in enumerate(rows))


def with_rows(schedule: Schedule, rows: Rows) -> Schedule:
    """``schedule`` with other actions."""
    return replace(schedule, actions=tuple(map(tuple, rows)))


def broken_schedule(seed: int) -> tuple[str, Schedule]:
    """A schedule that cannot run, and how it was broken; each of :data:`WAYS_TO_BREAK` in turn."""
    way = list(WAYS_TO_BREAK)[seed % len(WAYS_TO_BREAK)]
    rng = random.Random(seed)
    while True:
        legal = random_schedule(rng.randrange(10**9))
        # The only backward of all leaves a legal schedule behind: forward only.
        if legal.n_stages * legal.n_microbatches > 1:
            broken = WAYS_TO_BREAK[way](rng, legal)
            if broken is not None:
                return way, with_rows(legal, broken)


def _drop(rng: random.Random, legal: Schedule) -> Rows:
    rows = _rows(legal)
    row = rng.choice([row for row in rows if row])
    row.pop(rng.randrange(len(row)))
    return rows


def _repeat(rng: random.Random, legal: Schedule) -> Rows:
    rows = _rows(legal)
    row = rng.choice([row for row in rows if row])
    row.insert(rng.randrange(len(row) + 1), rng.choice(row))
    return rows


def _swap(rng: random.Random, legal: Schedule) -> Rows:
    """Two actions of a rank, of which the later needs the earlier."""
    rows = _rows(legal)
    makers = {
        product: (rank, index)
        for rank, row in enumerate(rows)
        for index, action in enumerate(row)
        for part in action.parts
        for product in part.provides
    }
    pairs = [
        (row, makers[product][1], index)
        for rank, row in enumerate(rows)
        for index, action in enumerate(row)
        for part in action.parts
        for product in part.needs(legal.n_stages)
        if makers[product][0] == rank
    ]
    row, earlier, later = rng.choice(pairs)
    row[earlier], row[later] = row[later], row[earlier]
    return rows


def _move(rng: random.Random, legal: Schedule) -> Rows | None:
    """An action to a rank that is not its own."""
    rows = _rows(legal)
    if len(rows) < 2:
        return None
    origin = rng.choice([rank for rank, row in enumerate(rows) if row])
    action = rows[origin].pop(rng.randrange(len(rows[origin])))
    target = rng.choice([rank for rank in range(len(rows)) if rank != origin])
    rows[target].insert(rng.randrange(len(rows[target]) + 1), action)
    return rows


def _close_a_circle(rng: random.Random, legal: Schedule) -> Rows | None:
    """The rank of one stage is to do microbatch i before j, that of the next stage j before i.

    Neither can begin its second microbatch, though no rank has an action before another of its own
    that it needs.
    """
    circles = [
        (stage, i, j)
        for stage in range(legal.n_stages - 1)
        for i in range(legal.n_microbatches)
        for j in range(legal.n_microbatches)
        if i != j
        and legal.rank_of(stage, i) == legal.rank_of(stage, j)
        and legal.rank_of(stage + 1, i) == legal.rank_of(stage + 1, j)
        and legal.rank_of(stage, i) != legal.rank_of(stage + 1, i)
    ]
    if not circles:
        return None
    stage, i, j = rng.choice(circles)
    rows: Rows = [[part for action in row for part in action.parts] for row in legal.actions]
    for rank, last in ((legal.rank_of(stage, i), j), (legal.rank_of(stage + 1, i), i)):
        rows[rank].sort(key=lambda action, last=last: action.parts[0].microbatch == last)
    return rows


def _rows(schedule: Schedule) -> Rows:
    return [list(row) for row in schedule.actions]


WAYS_TO_BREAK: dict[str, Callable[[random.Random, Schedule], Rows | None]] = {
    "drop an action": _drop,
    "repeat an action": _repeat,
    "swap two that depend on each other": _swap,
    "move an action to a wrong rank": _move,
    "close a circle of waits": _close_a_circle,
}


def first_ranks(rank: int) -> dict[int, dist.ProcessGroup]:
    """Return the groups of the first 1, 2 and 3 of four ranks that this rank is in, by size."""
    groups: dict[int, dist.ProcessGroup] = {}
    for size in (1, 2, 3):
        # The others get a group too: torch's names for groups need every rank to be in equally
        # many.
        for members in (range(size), range(size, 4)):
            group = dist.new_group(list(members))
            if rank in members and rank < size:
                groups[size] = group
    return groups
