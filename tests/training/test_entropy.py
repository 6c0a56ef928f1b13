import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from course_pp.training.data import IGNORE_INDEX, unigram_entropy

V = 5
targets = st.lists(st.integers(0, V - 1), min_size=1).map(torch.tensor)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_k_tokens_equally_often_have_entropy_ln_k(k: int) -> None:
    assert unigram_entropy(torch.arange(k).repeat(3), vocab_size=8) == pytest.approx(math.log(k), abs=1e-15)


def test_positions_where_nothing_is_predicted_do_not_count() -> None:
    counted = torch.tensor([[1, 2], [2, 2]])
    ignored = torch.full((2, 3), IGNORE_INDEX)
    assert unigram_entropy(torch.cat([counted, ignored], 1), 4) == unigram_entropy(counted, 4)


def test_the_cross_entropy_is_that_of_smoothed_reference_frequencies() -> None:
    # Reference counts 3 and 1 of 2 tokens smooth to 4/6 and 2/6.
    value = unigram_entropy(torch.tensor([0, 1]), 2, reference=torch.tensor([0, 0, 0, 1]))
    assert value == pytest.approx(-(math.log(4 / 6) + math.log(2 / 6)) / 2, abs=1e-15)


@given(targets, targets)
def test_no_context_free_prediction_beats_the_entropy(targets: torch.Tensor, reference: torch.Tensor) -> None:
    assert unigram_entropy(targets, V, reference) >= unigram_entropy(targets, V) - 1e-12


@given(targets)
def test_it_is_the_loss_of_constant_logits_at_the_log_frequencies(targets: torch.Tensor) -> None:
    frequencies = torch.bincount(targets, minlength=V).double() / len(targets)
    logits = frequencies.log().expand(len(targets), V)
    loss = torch.nn.functional.cross_entropy(logits, targets).item()
    assert unigram_entropy(targets, V) == pytest.approx(loss, abs=1e-12)


def test_nothing_to_count_and_foreign_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match=r"all 3 are IGNORE_INDEX \(-100\)"):
        unigram_entropy(torch.full((3,), IGNORE_INDEX), 4)
    with pytest.raises(ValueError, match="from 1 to 4, outside 0 … 3"):
        unigram_entropy(torch.tensor([1, 4]), 4)
    with pytest.raises(ValueError, match="from -1 to 2"):
        unigram_entropy(torch.tensor([1]), 4, reference=torch.tensor([-1, 2]))
