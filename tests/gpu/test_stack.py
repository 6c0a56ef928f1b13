"""The whole stack on GPUs over NCCL: equal to one process on the CPU."""

from itertools import product
from math import prod

import pytest
import torch

from course_pp.launch import on_ranks
from course_pp.parallel import DistributedConfig
from tests.equality import Trained, assert_equals_one_process
from tests.parallel.stack import CONFIG, Recipe, reference, train_on_rank

ALONE = DistributedConfig(dp_shard=1)
LAYOUTS = [
    DistributedConfig(pp=2, dp_shard=1),
    DistributedConfig(dp_shard=2),
    DistributedConfig(dp_shard=1, tp=2),
    DistributedConfig(pp=2, dp_shard=2),
    DistributedConfig(pp=4, dp_shard=1),
    DistributedConfig(pp=2, dp_shard=1, tp=2),
    DistributedConfig(dp_replicate=2, dp_shard=2),
    DistributedConfig(pp=2, dp_shard=2, tp=2),
]
SCHEDULES = ("1f1b", "interleaved_1f1b", "zb_v")
COMPILING_S = 600  # without a cache of what was compiled before
# torch compiles no block that is cut by tensor parallelism and recomputed in part.
CHECKPOINTING = {None: ("none", "full", "selective"), "inductor": ("none", "full")}
HALVES = (torch.bfloat16, torch.float16)


@pytest.mark.ranks
@pytest.mark.timeout(COMPILING_S + 30)
@pytest.mark.parametrize("compiler", [None, "inductor"])
def test_one_gpu_equals_one_process(compiler: str | None, subtests: pytest.Subtests) -> None:
    recipes = [
        Recipe(ALONE, s, ac, compiler) for s, ac in product(SCHEDULES, CHECKPOINTING[compiler])
    ]
    [found] = on_ranks(1, train_on_rank, recipes, backend=None, timeout_s=COMPILING_S)
    for recipe, trained in zip(recipes, found, strict=True):
        with subtests.test(str(recipe)):
            assert_equals_one_process([trained], reference(), CONFIG)


@pytest.mark.ranks
@pytest.mark.timeout(COMPILING_S + 30)
@pytest.mark.parametrize("compiler", [None, "inductor"])
def test_one_gpu_in_half_precision_differs_by_rounding(
    compiler: str | None, subtests: pytest.Subtests
) -> None:
    ac = CHECKPOINTING[compiler][-1]
    recipes = [
        Recipe(ALONE, schedule, ac, compiler, dtype)
        for schedule, dtype in product(SCHEDULES, HALVES)
    ]
    [found] = on_ranks(1, train_on_rank, recipes, backend=None, timeout_s=COMPILING_S)
    for recipe, trained in zip(recipes, found, strict=True):
        with subtests.test(str(recipe)):
            assert_rounded([trained], recipe.dtype)


@pytest.mark.ranks
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_gpu_a_rank_equals_one_process(
    layout: DistributedConfig, subtests: pytest.Subtests
) -> None:
    n_ranks = prod(
        layout.sizes(layout.pp * layout.dp_replicate * layout.dp_shard * layout.tp).values()
    )
    if n_ranks > torch.cuda.device_count():
        pytest.skip("fewer GPUs than ranks")
    schedules = SCHEDULES if layout.pp > 1 else SCHEDULES[:1]
    recipes = [
        Recipe(layout, s, "selective", None, d)
        for s in schedules
        for d in (torch.float64, torch.bfloat16)
    ]
    ranks = on_ranks(n_ranks, train_on_rank, recipes, backend=None, timeout_s=110)
    for recipe, found in zip(recipes, zip(*ranks, strict=True), strict=True):
        with subtests.test(str(recipe)):
            if recipe.dtype == torch.float64:
                assert_equals_one_process(list(found), reference(), CONFIG)
            else:
                assert_rounded(list(found), recipe.dtype)


def assert_rounded(ranks: list[Trained], dtype: torch.dtype) -> None:
    """The first loss, and every gradient as a vector, differ from the exact ones by what rounding
    can do at most.

    A product in half precision is off by u = eps / 2 of its result, and its inputs are by as much.
    On the way from the tokens to a gradient lie at most 2 · 8 products a layer, forward and back,
    so relative errors of at most 16 · L · u add up, if no layer magnifies them.
    """
    exact, bound = reference(), 16 * CONFIG.n_layers * torch.finfo(dtype).eps / 2
    for trained in ranks:
        assert abs(trained.losses[0] / exact.losses[0] - 1) <= bound
        for name, gradient in trained.gradients.items():
            expected = exact.gradients[name]
            assert (gradient - expected).norm() <= bound * expected.norm(), name
