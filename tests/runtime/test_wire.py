"""The connections behind a pipeline's messages."""

import gc
from collections.abc import Sequence
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from course_pp.launch import on_ranks
from course_pp.runtime._torch import n_groups
from course_pp.schedule import build
from tests.equality import Trained, assert_equals_one_process
from tests.runtime.small import in_one_process, model_config, run, small_batches

CONFIG = model_config(4)


def in_halves(rank: int, names: Sequence[str], data: Any) -> tuple[list[Trained], list[tuple[int, int]]]:
    """On each half of the ranks a pipeline after another; what they trained, and what is open before and after each."""
    halves = [dist.new_group(ranks, backend="gloo") for ranks in ([0, 2], [1, 3])]
    found, opened = [], [in_use()]
    for name in names:
        found.append(run(rank // 2, build(name, 2, 4), CONFIG, data, group=halves[rank % 2]))
        opened.append(in_use())
    dist.destroy_process_group(halves[rank % 2])
    return found, opened


def in_use() -> tuple[int, int]:
    """Torch's process groups, and open descriptors."""
    gc.collect()
    return n_groups(), psutil.Process().num_fds()


def again_and_again(rank: int, data: Any) -> tuple[list[Trained], list[tuple[int, int]], list[tuple[int, int]]]:
    in_halves(rank, ["gpipe"], data)  # opens what stays open
    before = in_use()
    found, opened = in_halves(rank, ["1f1b", "zb_v"], data)
    return found, opened, [before, in_use()]


def test_pipelines_of_a_group_share_connections_that_end_with_it() -> None:
    data = small_batches(CONFIG)
    ranks = on_ranks(4, again_and_again, data)
    for half in (ranks[::2], ranks[1::2]):
        for trained in zip(*(found for found, *_ in half), strict=True):
            assert_equals_one_process(trained, in_one_process(CONFIG, data), CONFIG)
    for _, ((groups, _), first, second), (before, after) in ranks:
        assert first == second
        assert first[0] == groups  # torch names groups after their number
        assert after == before


def after_a_group_of_its_own(rank: int, data: Any, transport: str) -> Trained:
    if rank == 0:
        dist.new_group([0], backend="gloo", use_local_synchronization=True)
    return run(rank, build("1f1b", 2, 4), CONFIG, data, transport=transport)


def test_ranks_may_be_in_unlike_numbers_of_groups() -> None:
    data = small_batches(CONFIG)
    ranks = on_ranks(2, after_a_group_of_its_own, data, "gloo")
    assert_equals_one_process(ranks, in_one_process(CONFIG, data), CONFIG)


def test_without_tags_they_are_refused() -> None:
    with pytest.raises(ValueError, match=r"are in 2, 1 process groups.*put all of them into as many groups"):
        on_ranks(2, after_a_group_of_its_own, small_batches(CONFIG), "gloo without tags")


def where_a_group_has_ended(rank: int, data: Any) -> Trained:
    passing = dist.new_group(backend="gloo")
    run(rank, build("gpipe", 2, 4), CONFIG, data, group=passing)
    dist.destroy_process_group(passing)
    return run(rank, build("1f1b", 2, 4), CONFIG, data)


def test_a_pipeline_after_one_whose_group_has_ended() -> None:
    data = small_batches(CONFIG)
    assert_equals_one_process(on_ranks(2, where_a_group_has_ended, data), in_one_process(CONFIG, data), CONFIG)
