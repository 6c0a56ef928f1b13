"""A cache of keys and values changes the cost of a token, not the output."""

import pytest
import torch

from course_pp.model import ModelConfig, Transformer

CONFIG = ModelConfig(dim=16, n_layers=2, n_heads=2, n_kv_heads=1, vocab_size=23, max_seq_len=12)


@pytest.mark.parametrize("pieces", [(12,), (5, 1, 1, 1, 1, 1, 1, 1), (1,) * 12, (4, 3, 5)], ids=str)
def test_logits_are_those_of_the_whole_sequence_however_it_comes(pieces: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = Transformer(CONFIG).double()
    tokens = torch.randint(23, (3, 12))
    cache, found = model.new_cache(), []
    with torch.no_grad():
        for piece in tokens.split(pieces, dim=1):
            found.append(model(piece, cache=cache))
        torch.testing.assert_close(torch.cat(found, dim=1), model(tokens), rtol=1e-12, atol=1e-12)
    assert cache.layer("1").length == 12


def test_what_does_not_go_with_a_cache_is_refused() -> None:
    model, tokens = Transformer(CONFIG), torch.ones(2, 8, dtype=torch.int64)
    cache = model.new_cache()
    with pytest.raises(
        ValueError, match="attention_mask and position_ids beside a cache: leave them out"
    ):
        model(tokens, attention_mask=torch.ones(2, 8, dtype=torch.bool), cache=cache)
    model(tokens, cache=cache)
    with pytest.raises(
        ValueError, match="the sequence has 16 tokens, more than max_seq_len=12: generate fewer"
    ):
        model(tokens, cache=cache)
