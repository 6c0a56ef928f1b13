from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from course_pp.model import CrossEntropy, Transformer
from course_pp.training.data import BOT_ID, EOT_ID, IGNORE_INDEX, PAD_ID, Sequences, packed, padded
from tests.training.small import MODEL


def tensors(*rows: list[int]) -> list[Tensor]:
    return [torch.tensor([BOT_ID, *row, EOT_ID]) for row in rows]


documents = st.lists(st.lists(st.integers(3, 99), max_size=20), min_size=1).map(lambda rows: tensors(*rows))
lengths = st.integers(2, 9)


def test_packed_rows_continue_across_documents() -> None:
    sequences = packed(tensors([10, 11, 12], [20]), seq_len=3)
    assert sequences.inputs.tolist() == [[BOT_ID, 10, 11], [12, EOT_ID, BOT_ID]]
    assert sequences.targets.tolist() == [[10, 11, 12], [EOT_ID, BOT_ID, 20]]
    assert sequences.attention_mask is None
    assert (len(sequences), sequences.seq_len, sequences.n_targets) == (2, 3, 6)


def test_padded_rows_hold_one_document_or_a_part_of_one() -> None:
    sequences = padded(tensors([10, 11, 12], [20]), seq_len=3)
    assert sequences.inputs.tolist() == [[BOT_ID, 10, 11], [12, EOT_ID, PAD_ID], [BOT_ID, 20, EOT_ID]]
    no = IGNORE_INDEX
    assert sequences.targets.tolist() == [[10, 11, 12], [EOT_ID, no, no], [20, EOT_ID, no]]
    assert sequences.attention_mask is not None
    assert sequences.attention_mask.tolist() == [[True] * 3, [True, True, False], [True] * 3]
    assert (len(sequences), sequences.seq_len, sequences.n_targets) == (3, 3, 6)


@given(documents, lengths)
def test_packing_predicts_every_token_once_and_in_order(documents: list[Tensor], seq_len: int) -> None:
    stream = [token for document in documents for token in document.tolist()]
    if len(stream) <= seq_len:
        with pytest.raises(ValueError, match=f"{len(stream)} tokens are too few .* needs {seq_len + 1}"):
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
    inputs, targets, mask = sequences.inputs, sequences.targets, sequences.attention_mask
    assert mask is not None
    assert inputs.shape == targets.shape == mask.shape == (len(sequences), seq_len)
    counted = targets != IGNORE_INDEX
    assert targets[counted].tolist() == [token for d in documents for token in d[1:].tolist()]
    assert inputs[counted].tolist() == [token for d in documents for token in d[:-1].tolist()]
    assert torch.equal(mask, inputs != PAD_ID)
    # Within a row a target is the next input, and nothing follows the end of a text.
    assert torch.equal(targets[:, :-1][counted[:, :-1]], inputs[:, 1:][counted[:, :-1]])
    assert not counted[(inputs == EOT_ID) | (inputs == PAD_ID)].any()


def test_both_kinds_count_the_same_targets_in_one_document() -> None:
    document = tensors(list(range(3, 19)))
    assert padded(document, 17).n_targets == packed(document, 17).n_targets == 17


def test_behind_the_tokens_padding_changes_neither_loss_nor_gradient_mask_or_no_mask() -> None:
    torch.manual_seed(0)
    model, found = Transformer(MODEL).double(), []
    sequences = padded(tensors([10], [20, 3, 4, 5], list(range(3, 20))), MODEL.max_seq_len)
    for mask in (sequences.attention_mask, None):
        loss = CrossEntropy()(model(sequences.inputs, attention_mask=mask), sequences.targets)
        found.append([loss, *torch.autograd.grad(loss, [*model.parameters()])])
    assert all((one - other).abs().max() < 1e-12 for one, other in zip(*found, strict=True))


def test_rows_are_chosen_by_slice_or_by_number() -> None:
    sequences = padded(tensors([10], [20], [30]), seq_len=2)
    chosen = sequences[torch.tensor([2, 0])]
    assert chosen.inputs[:, 1].tolist() == [30, 10]
    assert chosen.attention_mask is not None
    assert chosen.attention_mask.shape == (2, 2)
    assert sequences[1:].inputs[:, 1].tolist() == [20, 30]
    assert packed(tensors([10, 11]), seq_len=3)[:1].attention_mask is None


@pytest.mark.parametrize("cut", [packed, padded])
@pytest.mark.parametrize("seq_len", [1, 0, -3])
def test_a_sequence_of_fewer_than_two_tokens_is_refused(cut: Callable[..., Sequences], seq_len: int) -> None:
    with pytest.raises(ValueError, match=f"seq_len={seq_len}: .*choose 2 or more"):
        cut(tensors([5, 6, 7]), seq_len)


@pytest.mark.parametrize("cut", [packed, padded])
def test_no_documents_make_no_sequence(cut: Callable[..., Sequences]) -> None:
    with pytest.raises(ValueError, match=r"no documents.*give more text"):
        cut([], 4)


def test_too_little_text_for_one_packed_row_is_refused() -> None:
    with pytest.raises(ValueError, match=r"4 tokens are too few .*seq_len=4.*needs 5: give more text"):
        packed(tensors([10, 11]), seq_len=4)
    assert isinstance(packed(tensors([10, 11]), seq_len=3), Sequences)
