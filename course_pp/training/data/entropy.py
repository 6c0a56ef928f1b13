"""The best loss of a model that ignores all context: a trained one must beat it."""

import torch
from torch import Tensor

from course_pp.arguments import checked
from course_pp.training.data.sequences import IGNORE_INDEX

_MOST_TOKENS = 10**8


@checked
def unigram_entropy(targets: Tensor, vocab_size: int, reference: Tensor | None = None) -> float:
    """Return the entropy of the token frequencies of `targets`, or their cross-entropy under those of `reference`.

    With p the relative frequencies in `targets` and n(v) the counts in `reference`, N in all:

        H(p)    = -Σ_v p(v) ln p(v)
        H(p, q) = -Σ_v p(v) ln q(v),    q(v) = (n(v) + 1) / (N + vocab_size)

    No distribution that ignores context has a smaller mean loss on `targets` than H(p), since H(p, q) ≥ H(p)
    for any q (Cover & Thomas, Elements of Information Theory, theorem 2.6.3). So a validation loss under
    `unigram_entropy(validation.targets, vocab_size)` proves that the model uses context. H(p, q) with the
    training targets as `reference` is what a model knowing only their frequencies would reach; Laplace's +1
    keeps it finite for tokens that training never saw.

    Args:
        targets, reference: int64 of any shape; `IGNORE_INDEX` is left out.

    Returns:
        Nats per token, the unit of `torch.nn.functional.cross_entropy`.

    Raises:
        ValueError: nothing to count, or a token outside 0 … vocab_size - 1.
    """
    counts = _counts(targets, vocab_size)
    p = counts / counts.sum()
    if reference is None:
        return float(torch.special.entr(p).sum())
    n = _counts(reference, vocab_size)
    q = (n + 1) / (n.sum() + vocab_size)
    return float(-(p * q.log()).sum())


def _counts(targets: Tensor, vocab_size: int) -> Tensor:
    """float64 (vocab_size,): how often each token occurs."""
    if targets.dtype != torch.int64 or not 0 < vocab_size <= _MOST_TOKENS:
        raise ValueError(
            f"targets or reference of {targets.dtype} and vocab_size={vocab_size}: give torch.int64, and from 1 to "
            f"{_MOST_TOKENS:,} tokens"
        )
    tokens = targets[targets != IGNORE_INDEX]
    if not len(tokens):
        raise ValueError(f"no targets: all {targets.numel()} are IGNORE_INDEX ({IGNORE_INDEX}); give some tokens")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"targets reach from {low} to {high}, outside 0 … {vocab_size - 1}: give the vocab_size of the tokenizer"
        )
    return torch.bincount(tokens, minlength=vocab_size).double()
