"""Any legal schedule runs, with right gradients; any other is refused before there is a message."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn

from course_pp.launch import on_ranks
from course_pp.runtime import Pipeline
from course_pp.schedule import (
    Costs,
    Overlap,
    Schedule,
    check,
    from_torch_csv,
    optima,
    search,
    to_torch_csv,
)
from tests.runtime.random_schedules import broken_schedule, first_ranks, random_schedule
from tests.runtime.small import stages_of
from tests.runtime.stepping import Done, Step, assert_equal_steps, in_one_process, stepped

SEEDS = range(200)
FEW_SEEDS = range(40)
# Each channel needs a process group of its own then, which takes time to make.
WITHOUT_TAGS_EVERY = 7
WIDTH = 4


def tiny_stages(n: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double() for _ in range(n)]


def steps_for(schedule: Schedule) -> list[Step]:
    """One sample more than two a microbatch: they cannot all be of one size. The first step agrees
    on shapes, the second finds them settled; their gradients add up.
    """
    generator = torch.Generator().manual_seed(1)
    shape = 2 * schedule.n_microbatches + 1, WIDTH
    inputs, targets = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
    return [Step(inputs, targets), Step(inputs, targets, keep_gradients=True)]


def in_a_pipeline(
    rank: int, schedule: Schedule, group: dist.ProcessGroup | None, transport: str
) -> list[Done]:
    options = {"group": group, "transport": transport, "timeout_s": 30}
    return stepped(
        rank, schedule, partial(tiny_stages, schedule.n_stages), steps_for(schedule), **options
    )


def transport_of(seed: int) -> str:
    return "gloo" if seed % WITHOUT_TAGS_EVERY else "gloo without tags"


def run_all_on_rank(rank: int, seeds: range) -> dict[int, list[Done]]:
    """Every schedule on as many of the ranks as it has; what each leaves on this rank, by seed."""
    groups = first_ranks(rank)
    results = {}
    # The large ones first: without tags each makes groups on its own ranks, and torch's names for
    # groups count how many a rank has made.
    for seed in sorted(seeds, key=lambda seed: -random_schedule(seed).n_ranks):
        schedule = random_schedule(seed)
        if rank < schedule.n_ranks:
            try:
                results[seed] = in_a_pipeline(
                    rank, schedule, groups.get(schedule.n_ranks), transport_of(seed)
                )
            except Exception as error:
                error.add_note(f"in random_schedule({seed})")
                raise
    return results


@pytest.mark.parametrize("seeds", [FEW_SEEDS, pytest.param(SEEDS, marks=pytest.mark.full)], ids=str)
def test_a_random_legal_schedule_runs_with_the_loss_and_gradients_of_one_process(
    seeds: range, subtests: pytest.Subtests
) -> None:
    ranks = on_ranks(4, run_all_on_rank, seeds, timeout_s=110)
    for seed in seeds:
        with subtests.test(seed=seed):
            schedule = random_schedule(seed)
            assert check(schedule) == []
            assert_equal(schedule, [results[seed] for results in ranks[: schedule.n_ranks]])


def assert_equal(schedule: Schedule, ranks: Sequence[list[Done]]) -> None:
    make = partial(tiny_stages, schedule.n_stages)
    assert_equal_steps(ranks, in_one_process(schedule.n_microbatches, make, steps_for(schedule)))


KINDS: dict[str, Callable[[Schedule], bool]] = {
    "overlaps": lambda s: any(isinstance(action, Overlap) for row in s.actions for action in row),
    "splits a backward": lambda s: any(part.kind == "I" for part in s.parts),
    "has both kinds of backward": lambda s: {"B", "I"} <= {part.kind for part in s.parts},
    "has replicas": lambda s: any(len(ranks) > 1 for ranks in s.placement),
    "has an idle rank": lambda s: any(not row for row in s.actions),
    "sends to itself": lambda s: any(one == other for one, other in pairwise(s.placement)),
    "skips ranks": lambda s: any(
        abs(one[0] - other[0]) > 1 for one, other in pairwise(s.placement)
    ),
}


def test_the_random_schedules_are_of_every_kind() -> None:
    for seeds, least in ((FEW_SEEDS, 5), (SEEDS, 10)):
        schedules = [random_schedule(seed) for seed in seeds]
        assert {schedule.n_ranks for schedule in schedules} == {1, 2, 3, 4}
        for what, is_so in KINDS.items():
            assert sum(map(is_so, schedules)) >= least, what


def stages_for(rank: int, schedule: Schedule) -> dict[int, nn.Module | None]:
    return dict.fromkeys(stages_of(rank, schedule))


def test_the_reason_is_what_was_done_to_the_schedule() -> None:
    told = {
        "drop an action": "is missing",
        "repeat an action": "appears 2 times",
        "swap two that depend on each other": "before|as one",
        "move an action to a wrong rank": "belongs to rank",
        "close a circle of waits": "wait in a circle",
    }
    for way, schedule in map(broken_schedule, SEEDS):
        assert re.search(told[way], " ".join(check(schedule))), (way, schedule)


def refuse_on_rank(rank: int) -> tuple[int, list[Done]]:
    """Return how many broken schedules were refused, and the result of a legal one after."""
    refused = 0
    legal = next(schedule for schedule in map(random_schedule, SEEDS) if schedule.n_ranks == 4)
    for seed in SEEDS:
        _, schedule = broken_schedule(seed)
        if schedule.n_ranks == 4:
            given = schedule if rank == seed % 4 else legal
            with pytest.raises(ValueError, match=f"rank {seed % 4}: .* cannot run"):
                Pipeline(given, stages_for(rank, given), nn.functional.mse_loss)
            refused += 1
    return refused, in_a_pipeline(rank, legal, None, "gloo")


@pytest.mark.long
def test_every_rank_refuses_what_one_rank_cannot_run_and_can_go_on_with_another() -> None:
    legal = next(schedule for schedule in map(random_schedule, SEEDS) if schedule.n_ranks == 4)
    ranks = on_ranks(4, refuse_on_rank)
    assert all(refused > 20 for refused, _ in ranks)
    assert_equal(legal, [done for _, done in ranks])


def run_each(rank: int, schedules: list[Schedule]) -> list[list[Done]]:
    return [in_a_pipeline(rank, schedule, None, "gloo") for schedule in schedules]


@pytest.mark.long
def test_found_and_tabled_orders_run_with_the_loss_and_gradients_of_one_process() -> None:
    row = next(r for r in optima() if r.split and (r.n_ranks, r.n_microbatches, r.cap) == (4, 8, 3))
    unequal = Costs((1, 2, 1, 1, 1, 3, 1, 1), 1, (2, 1, 1, 1, 1, 1, 1, 1), latency=0.5)
    found = search(4, 5, unequal, 6, n_chunks=2, placement="v", seconds=1)
    schedules = [row.schedule, found.schedule]
    ranks = on_ranks(4, run_each, schedules, timeout_s=60)
    for i, schedule in enumerate(schedules):
        assert from_torch_csv(to_torch_csv(schedule), name=schedule.name) == schedule
        assert_equal(schedule, [results[i] for results in ranks])
