"""Every layout trains like one process: loss, gradients, norm, parameters, evaluation."""

from collections.abc import Sequence

import pytest

from course_pp.launch import on_ranks
from tests.parallel.layouts import (
    PLAIN,
    SELECTIVE,
    TIED,
    Case,
    Variant,
    assert_runs_equal,
    grid,
    jobs_of,
    reference,
    train_variants_on_rank,
)

SAMPLE = {
    Case(dp_shard=2, reshard=True): TIED,
    Case(dp_replicate=2, dp_shard=2, reshard=False): SELECTIVE,
    Case(tp=2): SELECTIVE,
    Case(dp_shard=2, tp=2, reshard=True): PLAIN,
    Case(pp=2, schedule="gpipe", dp_shard=2, reshard=True): PLAIN,
    Case(pp=2, schedule="zb_v", dp_shard=2, reshard=True): PLAIN,
    Case(pp=2, schedule="1f1b", dp_shard=2, reshard=False): TIED,
    Case(pp=2, schedule="1f1b", dp_replicate=2): TIED,
}
LONG = {
    Case(pp=2, schedule="zb_v", tp=2): TIED,
    Case(pp=2, schedule="interleaved_1f1b", dp_shard=2, tp=2, reshard=False): TIED,
}


@pytest.mark.sample(3)
@pytest.mark.parametrize(("case", "variants"), grid(SAMPLE, long=LONG))
def test_a_layout_equals_one_process(case: Case, variants: Sequence[Variant]) -> None:
    jobs = jobs_of(case, variants)
    ranks = on_ranks(case.n_ranks, train_variants_on_rank, case, jobs, timeout_s=110)
    for (variant, config, *_), runs in zip(jobs, zip(*ranks, strict=True), strict=True):
        assert_runs_equal(runs, reference(config, case.batch, variant.padded), config)
