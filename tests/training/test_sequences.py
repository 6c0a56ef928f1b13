"""Rows of one length, the rows of each step, and the best loss without context."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from course_pp.model import CrossEntropy, Transformer
from course_pp.training.data import (
    BOT_ID,
    EOT_ID,
    IGNORE_INDEX,
    PAD_ID,
    Batches,
    Sequences,
    packed,
    padded,
    unigram_entropy,
    validation_batches,
)
from tests.training.small import MODEL


def tensors(*rows: list[int]) -> list[Tensor]:
    return [torch.tensor([BOT_ID, *row, EOT_ID]) for row in rows]


documents = st.lists(st.lists(st.integers(3, 99), max_size=20), min_size=1).map(
    lambda rows: tensors(*rows)
)
lengths = st.integers(2, 9)


def test_packed_rows_continue_across_documents() -> None:
    sequences = packed(tensors([10, 11, 12], [20]), seq_len=3)
    assert sequences.inputs.tolist() == [[BOT_ID, 10, 11], [12, EOT_ID, BOT_ID]]
    assert sequences.targets.tolist() == [[10, 11, 12], [EOT_ID, BOT_ID, 20]]
    assert sequences.attention_mask is None
    assert (len(sequences), sequences.seq_len, sequences.n_targets) == (2, 3, 6)


def test_padded_rows_hold_one_document_or_a_part_of_one() -> None:
    sequences = padded(tensors([10, 11, 12], [20]), seq_len=3)
    assert sequences.inputs.tolist() == [
        [BOT_ID, 10, 11],
        [12, EOT_ID, PAD_ID],
        [BOT_ID, 20, EOT_ID],
    ]
    no = IGNORE_INDEX
    assert sequences.targets.tolist() == [[10, 11, 12], [EOT_ID, no, no], [20, EOT_ID, no]]
    assert sequences.attention_mask is not None
    assert sequences.attention_mask.tolist() == [[True] * 3, [True, True, False], [True] * 3]
    assert (len(sequences), sequences.seq_len, sequences.n_targets) == (3, 3, 6)


@given(documents, lengths)
def test_packing_predicts_every_token_once_and_in_order(
    documents: list[Tensor], seq_len: int
) -> None:
    stream = [token for document in documents for token in document.tolist()]
    if len(stream) <= seq_len:
        with pytest.raises(ValueError, match=f"{len(stream)} tokens .* {seq_len + 1}"):
            packed(documents, seq_len)
        return
    sequences = packed(documents, seq_len)
    assert sequences.inputs.shape == sequences.targets.shape == (len(sequences), seq_len)
    assert sequences.inputs.flatten().tolist() == stream[: len(sequences) * seq_len]
    assert sequences.targets.flatten().tolist() == stream[1 : len(sequences) * seq_len + 1]
    assert len(stream) - 1 - sequences.n_targets < seq_len


@given(documents, lengths)
def test_padding_predicts_every_token_of_every_document_once_and_in_order(
    documents: list[Tensor], seq_len: int
) -> None:
    sequences = padded(documents, seq_len)
    inputs = sequences.inputs
    targets = sequences.targets
    mask = sequences.attention_mask
    assert mask is not None
    assert inputs.shape == targets.shape == mask.shape == (len(sequences), seq_len)
    counted = targets != IGNORE_INDEX
    assert targets[counted].tolist() == [token for d in documents for token in d[1:].tolist()]
    assert inputs[counted].tolist() == [token for d in documents for token in d[:-1].tolist()]
    assert torch.equal(mask, inputs != PAD_ID)
    # Within a row a target is the next input, and nothing follows the end of a text.
    assert torch.equal(targets[:, :-1][counted[:, :-1]], inputs[:, 1:][counted[:, :-1]])
    assert not counted[(inputs == EOT_ID) | (inputs == PAD_ID)].any()


def test_behind_the_tokens_padding_changes_neither_loss_nor_gradient_mask_or_no_mask() -> None:
    torch.manual_seed(0)
    model = Transformer(MODEL).double()
    found = []
    sequences = padded(tensors([10], [20, 3, 4, 5], list(range(3, 20))), MODEL.max_seq_len)
    for mask in (sequences.attention_mask, None):
        loss = CrossEntropy()(model(sequences.inputs, attention_mask=mask), sequences.targets)
        found.append([loss, *torch.autograd.grad(loss, [*model.parameters()])])
    assert all((one - other).abs().max() < 1e-12 for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("cut", [packed, padded])
@pytest.mark.parametrize("seq_len", [1, 0])
def test_a_sequence_of_fewer_than_two_tokens_is_refused(
    cut: Callable[..., Sequences], seq_len: int
) -> None:
    with pytest.raises(ValueError, match=f"seq_len={seq_len}"):
        cut(tensors([5, 6, 7]), seq_len)


def numbered(n: int, *, mask: bool = False) -> Sequences:
    """n rows of 2 tokens; inputs[i] = (i, i), targets[i] = (-i, -i)."""
    rows = torch.arange(n)[:, None].expand(n, 2)
    return Sequences(rows, -rows, rows % 2 == 0 if mask else None)


def shown(*batches: Sequences) -> list[int]:
    return [row for batch in batches for row in batch.inputs[:, 0].tolist()]


def test_an_epoch_shows_each_row_at_most_once_and_the_next_in_another_order() -> None:
    batches = Batches(numbered(11), global_batch=4)
    assert batches.steps_per_epoch == 2
    epochs = [shown(batches[2 * e], batches[2 * e + 1]) for e in range(50)]
    assert all(len(set(epoch)) == 8 for epoch in epochs)
    assert epochs[0] != epochs[1]
    # What one epoch leaves out another shows.
    assert set().union(*epochs) == set(range(11))


def test_the_order_follows_from_the_seed_alone() -> None:
    def first_epoch(seed: int) -> list[list[int]]:
        return [shown(Batches(numbered(64), 8, seed)[step]) for step in range(8)]

    torch.manual_seed(1)
    first = first_epoch(0)
    torch.manual_seed(2)
    assert first_epoch(0) == first
    assert first_epoch(1) != first


def test_targets_and_mask_go_with_their_inputs() -> None:
    batch = Batches(numbered(10, mask=True), global_batch=4)[3]
    assert torch.equal(batch.targets, -batch.inputs)
    assert isinstance(batch.attention_mask, Tensor)
    assert torch.equal(batch.attention_mask, batch.inputs % 2 == 0)
    assert Batches(numbered(10), global_batch=4)[3].attention_mask is None


def test_validation_batches_cover_the_data_in_order() -> None:
    assert [shown(batch) for batch in validation_batches(numbered(6), 2)] == [
        [0, 1],
        [2, 3],
        [4, 5],
    ]
    assert len(validation_batches(numbered(7), 2)) == 3


def test_few_validation_batches_are_spread_over_the_data() -> None:
    chosen = shown(*validation_batches(numbered(100), 4, max_batches=2))
    assert chosen == [0, 12, 25, 37, 50, 62, 75, 87]
    assert len(validation_batches(numbered(5), 2, max_batches=9)) == 2


@pytest.mark.parametrize("global_batch", [0, 12])
def test_impossible_sizes_are_refused(global_batch: int) -> None:
    with pytest.raises(ValueError, match=f"global_batch={global_batch}"):
        Batches(numbered(10), global_batch)


V = 5
some_targets = st.lists(st.integers(0, V - 1), min_size=1).map(torch.tensor)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_k_tokens_equally_often_have_entropy_ln_k(k: int) -> None:
    assert unigram_entropy(torch.arange(k).repeat(3)) == pytest.approx(math.log(k), abs=1e-15)


def test_positions_where_nothing_is_predicted_do_not_count() -> None:
    counted = torch.tensor([[1, 2], [2, 2]])
    ignored = torch.full((2, 3), IGNORE_INDEX)
    assert unigram_entropy(torch.cat([counted, ignored], 1)) == unigram_entropy(counted)


@given(some_targets)
def test_it_is_the_loss_of_constant_logits_at_the_log_frequencies(targets: torch.Tensor) -> None:
    frequencies = torch.bincount(targets, minlength=V).double() / len(targets)
    logits = frequencies.log().expand(len(targets), V)
    loss = torch.nn.functional.cross_entropy(logits, targets).item()
    assert unigram_entropy(targets) == pytest.approx(loss, abs=1e-12)
