"""Experts on GPUs: all products of a layer at once in bfloat16, and the exchange over NCCL."""

from contextlib import nullcontext

import pytest
import torch

from course_pp.launch import on_ranks
from course_pp.model.experts import Experts
from course_pp.parallel import DistributedConfig
from course_pp.step.late_weights import Deferring, WeightGradients
from tests.equality import assert_equals_one_process
from tests.parallel.stack import EXPERTS, Recipe, reference, train_on_rank

LAYOUTS = [
    DistributedConfig(dp_shard=2, ep=2),
    DistributedConfig(dp_shard=4, ep=2),
    DistributedConfig(dp_replicate=2, dp_shard=2, ep=2),
    DistributedConfig(pp=2, dp_shard=2, ep=2),
    DistributedConfig(dp_shard=2, tp=2, ep=2),
    DistributedConfig(pp=2, dp_shard=4, ep=2),
]


@pytest.mark.parametrize("halves", [False, True], ids=["one backward", "in two halves"])
def test_grouped_products_in_bfloat16_differ_by_rounding(halves: bool) -> None:
    """Three products in a row, forward and back, each round by half a unit in the last place."""
    torch.manual_seed(0)
    exact, counts = Experts(EXPERTS).double(), torch.tensor([5, 0, 17, 1, 0, 8, 33, 0])
    x = torch.randn(int(counts.sum()), EXPERTS.dim, dtype=torch.float64).bfloat16()
    rounded = Experts(EXPERTS).to("cuda", torch.bfloat16)
    for mine, theirs in zip(rounded.parameters(), exact.parameters(), strict=True):
        theirs.data.copy_(theirs.data.bfloat16())
        mine.data.copy_(theirs.data)
    found = []
    for experts, rows in ((exact, x.double()), (rounded, x.cuda())):
        rows.requires_grad_()
        queue = WeightGradients()
        with Deferring(queue) if halves else nullcontext():
            output = experts(rows, counts.to(rows.device))
        with queue.collecting():
            output.square().sum().backward()
        assert all((p.grad is None) == halves for p in experts.parameters())
        queue.compute()
        found.append([output, rows.grad, *(p.grad for p in experts.parameters())])
    for expected, one in zip(*found, strict=True):
        difference = (one.double().cpu() - expected).norm() / expected.norm()
        assert difference <= 16 * torch.finfo(torch.bfloat16).eps / 2
    assert not rounded.up_proj.grad[counts == 0].any()  # type: ignore[index]


@pytest.mark.ranks
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_experts_shared_out_over_gpus_equal_one_process(
    layout: DistributedConfig, subtests: pytest.Subtests
) -> None:
    n_ranks = layout.pp * layout.dp_replicate * layout.dp_shard * layout.tp
    if n_ranks > torch.cuda.device_count():
        pytest.skip("fewer GPUs than ranks")
    recipes = [
        Recipe(layout, s, "full", n_microbatches=2)
        for s in (["1f1b", "zb_v"] if layout.pp > 1 else ["1f1b"])
    ]
    ranks = on_ranks(n_ranks, train_on_rank, recipes, EXPERTS, backend=None, timeout_s=110)
    for recipe, found in zip(recipes, zip(*ranks, strict=True), strict=True):
        with subtests.test(str(recipe)):
            assert_equals_one_process(list(found), reference(EXPERTS), EXPERTS)
