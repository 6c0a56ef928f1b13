"""A run that was interrupted ends as one that was not."""

from pathlib import Path
from typing import Any

import pytest
import torch

from course_pp.launch import on_ranks
from tests.training.checkpoint.resuming import Case, config_of, data_of, train_jobs

BEFORE, AFTER = 1, 1

SAME = [
    Case(),
    Case(pp=2, schedule="interleaved_1f1b", dp_shard=2),
    pytest.param(Case(pp=2, schedule="zb_v", tp=2), marks=pytest.mark.long),
    pytest.param(Case(dp_replicate=2, dp_shard=2), marks=pytest.mark.full),
]


@pytest.mark.parametrize("layout", SAME, ids=lambda layout: str(layout) or "one process")
def test_at_the_same_layout_a_resumed_run_is_bit_identical(layout: Case, tmp_path: Path) -> None:
    config = config_of(tied=layout.pp > 1, n_layers=4)
    data = data_of(config, BEFORE + AFTER)
    jobs: list[Any] = [((layout, config, data, tmp_path), {"save_at": BEFORE})]
    jobs += [((layout, config, data, tmp_path / how), {"resume": True, "seed": 1}) for how in ("sync", "async")]
    for one, *others in on_ranks(layout.n_ranks, train_jobs, jobs, timeout_s=100):
        for other in others:
            assert other.losses == one.losses[BEFORE:]
            assert other.rng == one.rng[BEFORE:]
            assert other.local.keys() == one.local.keys()
            assert not [name for name, tensor in one.local.items() if not torch.equal(tensor, other.local[name])]
