"""Every layout trains as one process does: loss, gradients, norm, parameters, evaluation."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from course_pp.launch import on_ranks
from tests.parallel.layouts import (
    PLAIN,
    SELECTIVE,
    TIED,
    Case,
    Variant,
    all_cases,
    assert_runs_equal,
    grid,
    jobs_of,
    reference,
    train_variants_on_rank,
    variants_of,
)

SAMPLE = {
    Case(dp_shard=2, reshard=True): TIED,
    Case(dp_replicate=2, dp_shard=2, reshard=False): SELECTIVE,
    Case(tp=2): SELECTIVE,
    Case(dp_shard=2, tp=2, reshard=True): PLAIN,
    Case(pp=2, schedule="gpipe", dp_shard=2, reshard=True): PLAIN,
    Case(pp=2, schedule="1f1b", dp_shard=2, reshard=False): TIED,
    Case(pp=2, schedule="zb_v", dp_shard=2, reshard=True): PLAIN,
    Case(pp=2, schedule="1f1b", dp_replicate=2): TIED,
}
LONG = {
    Case(pp=2, schedule="zb_v", tp=2): TIED,
    Case(pp=2, schedule="interleaved_1f1b", dp_shard=2, tp=2, reshard=False): TIED,
}

KINDS = ("loss", "gradients", "norm", "parameters", "evaluation")
TABLE = Path(__file__).parents[2] / "runs" / "layouts.md"


@pytest.fixture(scope="module")
def table() -> Iterator[dict[str, str]]:
    """Rows by layout. What ran is written over what earlier runs wrote, so the grid can be run in parts."""
    rows: dict[str, str] = {}
    yield rows
    if not rows:
        return
    known = dict(line.split(" | ", 1) for line in TABLE.read_text().splitlines()[2:]) if TABLE.exists() else {}
    rows = known | rows
    names = map(str, all_cases())
    head = ["layout | " + " | ".join(KINDS), "---" + "|---:" * len(KINDS)]
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text("\n".join([*head, *(f"{name} | {rows[name]}" for name in names if name in rows), ""]))


@pytest.mark.sample(3)
@pytest.mark.parametrize(("case", "variants"), grid(SAMPLE, long=LONG))
def test_a_layout_equals_one_process(case: Case, variants: Sequence[Variant], table: dict[str, str]) -> None:
    jobs = jobs_of(case, variants)
    ranks = on_ranks(case.n_ranks, train_variants_on_rank, case, jobs, timeout_s=110)
    differences = []
    for (variant, config, *_), runs in zip(jobs, zip(*ranks, strict=True), strict=True):
        differences.append(assert_runs_equal(runs, reference(config, case.batch, variant.padded), config))
    if variants == variants_of(case):
        table[str(case)] = " | ".join(f"{max(d[kind] for d in differences):.1e}" for kind in KINDS)
