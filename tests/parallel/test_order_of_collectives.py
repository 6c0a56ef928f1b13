"""Every rank of a group enters the same collectives in the same order.

NCCL has no tags, so ranks that differ would wait for ever.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch.distributed as dist

from course_pp.launch import on_ranks
from course_pp.parallel import DistributedConfig
from course_pp.parallel.watching import CollectiveWatcher
from tests.parallel.stack import CONFIG, Recipe, train

RECIPES = [
    Recipe(DistributedConfig(pp=2, dp_shard=2), "1f1b", "full"),
    Recipe(DistributedConfig(pp=2, dp_shard=2), "zb_v"),
    Recipe(
        DistributedConfig(pp=2, dp_shard=1, tp=2), "interleaved_1f1b", "selective", n_microbatches=2
    ),
]
SHORT = replace(CONFIG, n_layers=4)  # one layer a stage where a rank has two

Entered = tuple[tuple[int, ...], str, int]
"""The ranks of the group, the operator, its bytes."""


def entered_on_rank(rank: int) -> list[list[Entered]]:
    """Return the calls that this rank enters in two clipped steps under each recipe, in order."""
    return [_entered(recipe) for recipe in RECIPES]


def _entered(recipe: Recipe) -> list[Entered]:
    found: list[Entered] = []

    def tell(operator: str, group: dist.ProcessGroup, n_bytes: int) -> None:
        found.append((tuple(dist.get_process_group_ranks(group)), operator, n_bytes))

    with CollectiveWatcher(tell):
        train(recipe, SHORT)
    return found


def _is_message(operator: str) -> bool:
    return operator.strip("_").startswith(("send", "recv"))


def flaws(ranks: list[list[Entered]]) -> Iterator[str]:
    """Yield a sentence for each group or pair whose ranks do not match.

    Ranks of a group may enter different collectives, or one of a pair may send messages that the
    other does not receive in turn.
    """
    for group in {entered[0] for rank in ranks for entered in rank}:
        first, *others = (
            [e[1:] for e in ranks[rank] if e[0] == group and not _is_message(e[1])]
            for rank in group
        )
        if any(other != first for other in others):
            yield f"the ranks {group} enter different collectives"
    for a, b in combinations(range(len(ranks)), 2):
        for source, target in ((a, b), (b, a)):
            sent, received = (
                [
                    n_bytes
                    for group, operator, n_bytes in ranks[rank]
                    if group == (a, b) and kind in operator
                ]
                for rank, kind in ((source, "send"), (target, "recv"))
            )
            if sent != received:
                yield f"rank {source} sends {sent}, and rank {target} receives {received}"


def test_all_ranks_enter_the_same_collectives_in_the_same_order(subtests: pytest.Subtests) -> None:
    everyone: list[Any] = on_ranks(4, entered_on_rank, timeout_s=110)
    for recipe, ranks in zip(RECIPES, zip(*everyone, strict=True), strict=True):
        with subtests.test(str(recipe)):
            assert all(len(rank) > 20 for rank in ranks)
            assert list(flaws(list(ranks))) == []
            late = [[*ranks[0][1:], ranks[0][0]], *ranks[1:]]
            assert list(flaws(late))
