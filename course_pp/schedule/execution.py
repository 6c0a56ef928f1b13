"""Going through a schedule the way its ranks would: the engine under ``simulate`` and ``check``."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from course_pp.schedule.products import Products
from course_pp.schedule.schedule import Schedule
from course_pp.schedule.span import Time


@dataclass(frozen=True)
class Run:
    """How far each rank came, and when it did what.

    Attributes:
        starts: for each rank when each action it did began, in order.
        ends: for each rank when each of these actions was done.
        stuck: for each rank that did not finish, the index of the action it cannot start.
    """

    starts: tuple[list[Time], ...]
    ends: tuple[list[Time], ...]
    stuck: dict[int, int]


def execute(
    schedule: Schedule,
    durations: Sequence[Sequence[Time]],
    transfers: Sequence[Time],
    edge_transfers: Sequence[Time] = (),
    token_transfer: Time = 0,
) -> Run:
    """Do every action as soon as its rank is free and its inputs have arrived, until nothing more can be done.

    Args:
        schedule: one that names only stages that exist.
        durations: of each action, rank by rank.
        transfers: for each boundary between stages, the time of a message between different ranks.
        edge_transfers: the same for each reader of each edge; nothing unless given.
        token_transfer: the same for a token on its way back to the first stage.
    """
    products = Products.of(schedule)
    delays = _delays(schedule, products, transfers, edge_transfers, token_transfer)
    arrival: list[Time | None] = [None] * len(delays)
    starts: tuple[list[Time], ...] = tuple([] for _ in schedule.actions)
    ends: tuple[list[Time], ...] = tuple([] for _ in schedule.actions)
    waiting: defaultdict[int, list[int]] = defaultdict(list)
    able = list(range(schedule.n_ranks))
    while able:
        rank = able.pop()
        done, row, took = ends[rank], schedule.actions[rank], durations[rank]
        clock = done[-1] if done else 0
        for index in range(len(done), len(row)):
            action = row[index]
            start = clock
            for product in products.needed_by(action):
                here_at = arrival[product]
                if here_at is None:
                    waiting[product].append(rank)
                    break
                if here_at > start:
                    start = here_at
            else:
                clock = start + took[index]
                starts[rank].append(start)
                done.append(clock)
                for product in products.made_by(action):
                    arrival[product] = clock + delays[product]
                    if product in waiting:
                        able.extend(waiting.pop(product))
                continue
            break
    stuck = {rank: len(ends[rank]) for rank, row in enumerate(schedule.actions) if len(ends[rank]) < len(row)}
    return Run(starts, ends, stuck)


def _delays(
    schedule: Schedule,
    products: Products,
    transfers: Sequence[Time],
    edge_transfers: Sequence[Time],
    token_transfer: Time,
) -> list[Time]:
    """Return for each product how long it is on its way: only what is sent between different ranks takes time."""
    m = schedule.n_microbatches
    delays: list[Time] = [0] * products.count
    for stage, transfer in enumerate(transfers):
        if transfer:
            activations, gradients = products.per_kind + stage * m, 3 * products.per_kind + (stage + 1) * m
            for microbatch in range(m):
                if schedule.rank_of(stage, microbatch) != schedule.rank_of(stage + 1, microbatch):
                    delays[activations + microbatch] = delays[gradients + microbatch] = transfer
    for number, (lane, transfer) in enumerate(zip(products.lanes, edge_transfers, strict=False)):
        for microbatch in range(m) if transfer else ():
            if schedule.rank_of(lane.writer, microbatch) != schedule.rank_of(lane.reader, microbatch):
                for product in (products.value(number, microbatch), products.value_gradient(number, microbatch)):
                    delays[product] = transfer
    for microbatch in range(m - schedule.feedback) if schedule.feedback and token_transfer else ():
        if schedule.rank_of(schedule.n_stages - 1, microbatch) != schedule.rank_of(0, microbatch + schedule.feedback):
            delays[products.token(microbatch)] = token_transfer
    return delays
