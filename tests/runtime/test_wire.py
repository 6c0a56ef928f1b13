"""The connections behind a pipeline's messages."""

import gc
import time
from typing import Any, NamedTuple

import psutil
import pytest
import torch.distributed as dist

from course_pp.base.torch_private import n_process_groups
from course_pp.launch import on_ranks
from course_pp.schedule import build
from tests.equality import Trained, assert_equals_one_process
from tests.runtime.small import in_one_process, model_config, run, small_batches

CONFIG = model_config(4)


class InUse(NamedTuple):
    """The resources of a process: torch's process groups, and open descriptors."""

    groups: int
    descriptors: int


def in_use(at_most: int | None = None) -> InUse:
    """What is in use now, or as soon as no more than ``at_most`` descriptors are.

    Gloo's threads close, in their own time, sockets by which ranks have found each other.
    """
    gc.collect()
    limit = time.monotonic() + 10
    while at_most is not None and psutil.Process().num_fds() > at_most and time.monotonic() < limit:
        time.sleep(0.01)
    return InUse(n_process_groups(), psutil.Process().num_fds())


def in_halves(rank: int, data: Any) -> tuple[list[Trained], list[InUse]]:
    """Run two pipelines on each half of the ranks; return the resources in use around them."""
    halves = [dist.new_group(ranks, backend="gloo") for ranks in ([0, 2], [1, 3])]

    def train(name: str) -> Trained:
        return run(rank // 2, build(name, 2, 4), CONFIG, data, group=halves[rank % 2])

    before = in_use()
    found = [train("1f1b")]
    between = in_use()
    found.append(train("zb_v"))
    after = in_use(between.descriptors)
    dist.destroy_process_group(halves[rank % 2])
    return found, [before, between, after]


def again_and_again(rank: int, data: Any) -> tuple[list[Trained], list[InUse], list[InUse]]:
    in_halves(rank, data)  # opens what stays open
    before = in_use()
    found, within = in_halves(rank, data)
    return found, within, [before, in_use(before.descriptors)]


def test_pipelines_of_a_group_share_connections_that_end_with_it() -> None:
    data = small_batches(CONFIG)
    ranks = on_ranks(4, again_and_again, data)
    for half in (ranks[::2], ranks[1::2]):
        for trained in zip(*(found for found, *_ in half), strict=True):
            assert_equals_one_process(trained, in_one_process(CONFIG, data), CONFIG)
    for _, within, around in ranks:
        assert within[2].descriptors <= within[1].descriptors
        assert len({use.groups for use in within}) == 1  # torch names groups after their number
        assert around[1].descriptors <= around[0].descriptors
        assert around[1].groups == around[0].groups


def after_a_group_of_its_own(rank: int, data: Any, transport: str) -> Trained:
    if rank == 0:
        dist.new_group([0], backend="gloo", use_local_synchronization=True)
    return run(rank, build("1f1b", 2, 4), CONFIG, data, transport=transport)


def test_ranks_may_be_in_unlike_numbers_of_groups() -> None:
    data = small_batches(CONFIG)
    ranks = on_ranks(2, after_a_group_of_its_own, data, "gloo")
    assert_equals_one_process(ranks, in_one_process(CONFIG, data), CONFIG)


def test_without_tags_they_are_refused() -> None:
    with pytest.raises(ValueError, match="2, 1 process groups"):
        on_ranks(2, after_a_group_of_its_own, small_batches(CONFIG), "gloo without tags")


def where_a_group_has_ended(rank: int, data: Any) -> Trained:
    passing = dist.new_group(backend="gloo")
    run(rank, build("gpipe", 2, 4), CONFIG, data, group=passing)
    dist.destroy_process_group(passing)
    return run(rank, build("1f1b", 2, 4), CONFIG, data)


def test_a_pipeline_after_one_whose_group_has_ended() -> None:
    data = small_batches(CONFIG)
    assert_equals_one_process(
        on_ranks(2, where_a_group_has_ended, data), in_one_process(CONFIG, data), CONFIG
    )
