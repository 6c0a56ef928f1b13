"""Models that are not this package's train under every mesh as in one process: loss, gradients, parameters."""

from collections.abc import Sequence
from typing import Any

import pytest

from course_pp.launch import on_ranks
from course_pp.parallel import DistributedConfig, init_distributed
from tests.parallel.whole_models import MODELS, Recipe, assert_equals, train_on_rank

SHARDED = DistributedConfig(dp_shard=2)
HYBRID = DistributedConfig(dp_replicate=2, dp_shard=2)
EVERY = [Recipe(name) for name in MODELS]
CHECKPOINTED = [
    Recipe("llama", ac="full"),
    Recipe("gpt2", ac="selective"),
    Recipe("sequential", ac="full", blocks="[12]"),
    Recipe("llama, tied", ac="full", blocks=()),
]
# By number of ranks: they cost more to start than to train on.
JOBS: dict[int, list[tuple[DistributedConfig, Recipe]]] = {
    2: [(SHARDED, recipe) for recipe in [*EVERY, *CHECKPOINTED]],
    4: [(HYBRID, recipe) for recipe in [Recipe("gpt2", ac="full"), Recipe("convolutional", reshard=False)]],
}


def train_jobs_on_rank(rank: int, jobs: Sequence[tuple[DistributedConfig, Recipe]]) -> list[Any]:
    return [train_on_rank(init_distributed(layout), recipe) for layout, recipe in jobs]


@pytest.mark.parametrize("n_ranks", JOBS)
def test_a_foreign_model_trains_as_in_one_process(n_ranks: int, subtests: pytest.Subtests) -> None:
    ranks = on_ranks(n_ranks, train_jobs_on_rank, JOBS[n_ranks], timeout_s=110)
    for (layout, recipe), found in zip(JOBS[n_ranks], zip(*ranks, strict=True), strict=True):
        with subtests.test(f"{recipe} on {layout}"):
            assert_equals([trained for trained, _ in found], recipe.model, layout)
