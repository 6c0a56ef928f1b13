"""What notebook 08 shows: bytes kept, gathered and sent, and gradients beside those of one process."""

import pytest

from course_pp.exercises import fsdp_lab as lab
from course_pp.launch import on_ranks
from course_pp.model import build_stage_module
from course_pp.parallel import CollectiveCounts, DistributedConfig, apply_fsdp2, init_distributed

FOUR = DistributedConfig(dp_shard=4)
TWO_BY_TWO = DistributedConfig(pp=2, dp_shard=2)


@pytest.mark.long
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("layout", "often"),
    [
        (TWO_BY_TWO, {True: (9, 1), False: (1, 1)}),
        pytest.param(FOUR, {True: (2, 1), False: (1, 1)}, marks=pytest.mark.full),
    ],
)
def test_gathers_and_reductions_of_a_group_and_the_gathered_bytes(
    layout: DistributedConfig, often: dict[bool, tuple[int, int]]
) -> None:
    counts, n_bytes = lab.count(layout), lab.step_bytes(layout)
    assert {reshard: lab.per_group(counts[reshard], layout) for reshard in counts} == often
    assert (n_bytes[True]["whole parameters"] == n_bytes[False]["whole parameters"]) == (layout.pp > 1)
    if layout.pp > 1:
        assert all(counts[reshard] == lab.predicted(layout, reshard) for reshard in counts)
        assert n_bytes[True]["whole gradients"] == n_bytes[True]["whole parameters"]
    else:
        assert lab.sent(counts[False][0], layout) == {"dp_shard all_gather": 0.75, "dp_shard reduce_scatter": 0.75}


def test_ranks_that_do_not_agree_have_no_number_of_gathers_a_group() -> None:
    once, twice = (CollectiveCounts.of("dp_shard", "all_gather", 7 * number, 1) for number in (1, 2))
    with pytest.raises(ValueError, match="differ between ranks"):
        lab.per_group([once, twice], FOUR)


def test_a_rank_keeps_its_share_between_steps() -> None:
    kept = lab.kept_between_steps(FOUR)
    assert kept.shares == (0.25,) * 4
    assert "attn.q_proj.weight whole (64, 64), on each rank (16, 64)" in str(kept)


def off_by_a_little(rank: int) -> tuple[float, float]:
    mesh = init_distributed(DistributedConfig(), seed=0)
    module = build_stage_module(lab.CONFIG, 0, 1).double()
    apply_fsdp2(module, mesh)
    lab.step_of(module, mesh)()
    right = lab.one_process().gradients
    wrong = {name: gradient + 0.5 * (name == "norm.weight") for name, gradient in right.items()}
    return lab.largest_difference(module, right), lab.largest_difference(module, wrong)


def test_gradients_of_shards_are_compared_with_one_process() -> None:
    for right, wrong in on_ranks(2, off_by_a_little):
        assert right < 1e-12
        assert wrong == pytest.approx(0.5)


def test_fsdp_before_tensor_parallelism_is_refused_by_name() -> None:
    assert "already has FSDP2" in lab.refused_orders()["this package"]


def test_the_curve_says_where_the_policies_meet() -> None:
    figure = lab.draw_shares(lambda tokens, reshard: min(1, tokens / (400 if reshard else 200)), crossing=400)
    assert "from 400 tokens on" in figure.alt_text
    assert "up to 2 times" in figure.alt_text
