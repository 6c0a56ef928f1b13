from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from course_pp.training.data import Batches, Sequences, validation_batches


def numbered(n: int, *, mask: bool = False) -> Sequences:
    """n rows of 2 tokens; inputs[i] = (i, i), targets[i] = (-i, -i)."""
    rows = torch.arange(n)[:, None].expand(n, 2)
    return Sequences(rows, -rows, rows % 2 == 0 if mask else None)


def rows(*batches: Sequences) -> list[int]:
    return [row for batch in batches for row in batch.inputs[:, 0].tolist()]


@pytest.mark.parametrize("dp_size", [1, 2, 3, 6])
def test_data_parallel_ranks_share_the_same_global_batch_whatever_their_number(dp_size: int) -> None:
    sequences = numbered(20)
    for step in (0, 1, 2, 3, 50):
        parts = [Batches(sequences, 6, 7, rank, dp_size)[step] for rank in range(dp_size)]
        assert {len(part) for part in parts} == {6 // dp_size}
        assert rows(*parts) == rows(Batches(sequences, 6, seed=7)[step])


def test_a_run_resumed_with_other_data_parallel_ranks_sees_the_steps_it_would_have_seen() -> None:
    sequences = numbered(16)
    straight = [rows(Batches(sequences, 4)[step]) for step in range(10)]
    before = [rows(Batches(sequences, 4)[step]) for step in range(5)]
    after = [
        rows(*(Batches(sequences, 4, dp_rank=rank, dp_size=4)[step] for rank in range(4))) for step in range(5, 10)
    ]
    assert before + after == straight


def test_an_epoch_shows_each_row_at_most_once_and_the_next_in_another_order() -> None:
    batches = Batches(numbered(11), global_batch=4)
    assert batches.steps_per_epoch == 2
    epochs = [rows(batches[2 * e], batches[2 * e + 1]) for e in range(50)]
    assert all(len(set(epoch)) == 8 for epoch in epochs)
    assert epochs[0] != epochs[1]
    # What one epoch leaves out another shows.
    assert set().union(*epochs) == set(range(11))


def test_the_order_follows_from_the_seed_alone() -> None:
    def first_epoch(seed: int) -> list[list[int]]:
        return [rows(Batches(numbered(64), 8, seed)[step]) for step in range(8)]

    torch.manual_seed(1)
    first = first_epoch(0)
    torch.manual_seed(2)
    assert first_epoch(0) == first
    assert first_epoch(1) != first


def test_targets_and_mask_go_with_their_inputs() -> None:
    batch = Batches(numbered(10, mask=True), global_batch=4, dp_rank=1, dp_size=2)[3]
    assert torch.equal(batch.targets, -batch.inputs)
    assert isinstance(batch.attention_mask, Tensor)
    assert torch.equal(batch.attention_mask, batch.inputs % 2 == 0)
    assert Batches(numbered(10), global_batch=4)[3].attention_mask is None


def test_validation_batches_cover_the_data_in_order() -> None:
    assert [rows(batch) for batch in validation_batches(numbered(6), 2)] == [[0, 1], [2, 3], [4, 5]]
    assert len(validation_batches(numbered(7), 2)) == 3


def test_few_validation_batches_are_spread_over_the_data() -> None:
    chosen = rows(*validation_batches(numbered(100), 4, max_batches=2))
    assert chosen == [0, 12, 25, 37, 50, 62, 75, 87]
    assert len(validation_batches(numbered(5), 2, max_batches=9)) == 2


@pytest.mark.parametrize("dp_size", [2, 4])
def test_validation_is_divided_over_data_parallel_ranks(dp_size: int) -> None:
    whole = validation_batches(numbered(30), 8, max_batches=3)
    parts = [validation_batches(numbered(30), 8, 3, rank, dp_size) for rank in range(dp_size)]
    for batch, of_ranks in zip(whole, zip(*parts, strict=True), strict=True):
        assert rows(*of_ranks) == rows(batch)


@pytest.mark.parametrize(
    ("global_batch", "dp_rank", "dp_size", "message"),
    [
        (6, 0, 4, "global_batch=6 does not divide by dp_size=4: .*choose 4 or 8"),
        (3, 0, 4, "global_batch=3 does not divide by dp_size=4: .*choose 4$"),
        (12, 0, 1, "global_batch=12 is larger than the data, 10 sequences: choose 10 or less"),
        (0, 0, 1, "global_batch=0: must be at least 1"),
        (4, 2, 2, "dp_rank=2, dp_size=2: need 0 <= dp_rank < dp_size"),
        (4, -1, 2, "dp_rank=-1"),
        (4, 0, 0, "dp_size=0"),
    ],
)
@pytest.mark.parametrize("take", [Batches, validation_batches])
def test_impossible_sizes_are_refused(
    take: Callable[..., object], global_batch: int, dp_rank: int, dp_size: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        take(numbered(10), global_batch, dp_rank=dp_rank, dp_size=dp_size)


def test_negative_steps_and_seeds_and_no_batches_are_refused() -> None:
    with pytest.raises(ValueError, match="step=-1: steps count from 0"):
        Batches(numbered(4), 2)[-1]
    with pytest.raises(ValueError, match="seed=-1"):
        Batches(numbered(4), 2, seed=-1)
    with pytest.raises(ValueError, match="max_batches=0"):
        validation_batches(numbered(4), 2, max_batches=0)
