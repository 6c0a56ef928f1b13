"""The process groups behind a pipeline's messages."""

from typing import Any

import pytest
import torch.distributed as dist

from course_pp.launch import on_ranks
from course_pp.runtime._torch import n_groups
from course_pp.schedule import build
from tests.equality import Trained, assert_equals_one_process
from tests.runtime.small import in_one_process, model_config, run, small_batches

CONFIG = model_config(4)


def twice_in_halves(rank: int, data: Any) -> tuple[list[Trained], list[int]]:
    """On each half of the ranks two pipelines; what they trained, and how many groups there were after each."""
    halves = [dist.new_group(ranks, backend="gloo") for ranks in ([0, 2], [1, 3])]
    found, groups = [], [n_groups()]
    for name in ("1f1b", "zb_v"):
        found.append(run(rank // 2, build(name, 2, 4), CONFIG, data, group=halves[rank % 2]))
        groups.append(n_groups())
    return found, groups


def test_pipelines_of_a_group_share_one_more_for_the_way_back() -> None:
    data = small_batches(CONFIG)
    ranks = on_ranks(4, twice_in_halves, data)
    for half in (ranks[::2], ranks[1::2]):
        for trained in zip(*(found for found, _ in half), strict=True):
            assert_equals_one_process(trained, in_one_process(CONFIG, data), CONFIG)
    for _, (before, *after) in ranks:
        assert after == [before + 1, before + 1]


def where_the_name_is_taken(rank: int, data: Any) -> Trained:
    passing = dist.new_group(backend="gloo")
    run(rank, build("gpipe", 2, 4), CONFIG, data, group=passing)  # its way back is named after two groups
    dist.destroy_process_group(passing)
    return run(rank, build("1f1b", 2, 4), CONFIG, data)


def test_a_name_that_is_taken_does_without_a_way_back() -> None:
    data = small_batches(CONFIG)
    assert_equals_one_process(on_ranks(2, where_the_name_is_taken, data), in_one_process(CONFIG, data), CONFIG)


def after_a_group_of_its_own(rank: int, data: Any, transport: str) -> Trained:
    if rank == 0:
        dist.new_group([0], backend="gloo", use_local_synchronization=True)
    return run(rank, build("1f1b", 2, 4), CONFIG, data, transport=transport)


def test_ranks_in_unlike_numbers_of_groups_share_one_for_both_ways() -> None:
    data = small_batches(CONFIG)
    ranks = on_ranks(2, after_a_group_of_its_own, data, "gloo")
    assert_equals_one_process(ranks, in_one_process(CONFIG, data), CONFIG)


def test_without_tags_they_are_refused() -> None:
    with pytest.raises(ValueError, match=r"are in 2, 1 process groups.*put all of them into as many groups"):
        on_ranks(2, after_a_group_of_its_own, small_batches(CONFIG), "gloo without tags")
