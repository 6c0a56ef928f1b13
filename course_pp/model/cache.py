"""Keys and values of the tokens seen so far, so that a new token costs one position and not the whole text."""

import torch
from torch import Tensor

__all__ = ["KVCache", "LayerCache"]


class LayerCache:
    """What the attention of one layer has seen: keys and values, (batch, kv_heads, seq, head_dim) each."""

    def __init__(self) -> None:
        self._seen: tuple[Tensor, Tensor] | None = None

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add those of new positions, and return all.

        Raises:
            ValueError: for another batch than before.
        """
        if self._seen is not None:
            if self._seen[0].shape[0] != keys.shape[0]:
                raise ValueError(
                    f"the cache holds {self._seen[0].shape[0]} sequences, and {keys.shape[0]} come: "
                    "make a cache for each batch"
                )
            keys, values = (torch.cat(pair, dim=2) for pair in zip(self._seen, (keys, values), strict=True))
        self._seen = keys, values
        return keys, values


class KVCache:
    """The layers' caches of one batch of sequences, in the layers of one model or of one stage.

        cache = model.new_cache()
        logits = model(prompt, cache=cache)             # (batch, prompt length, vocab_size)
        logits = model(next_token, cache=cache)         # (batch, 1, vocab_size): as if the prompt came with it

    Attributes:
        length: how many positions it holds.
    """

    def __init__(self) -> None:
        self.length = 0
        self._layers: dict[str, LayerCache] = {}

    def layer(self, name: str) -> LayerCache:
        """The cache of the layer ``name``."""
        return self._layers.setdefault(name, LayerCache())

    def advance(self, n_new: int, limit: int, alone: bool) -> slice:
        """Make room for new positions, and return where they lie.

        Args:
            limit: how many positions there can be.
            alone: whether the call has neither a mask nor positions of its own.

        Raises:
            ValueError: if it has, and for more positions than ``limit``.
        """
        if not alone:
            raise ValueError(
                "attention_mask and position_ids beside a cache: leave them out, and give sequences of one length "
                "without padding"
            )
        new = slice(self.length, self.length + n_new)
        if new.stop > limit:
            raise ValueError(
                f"with what the cache holds the sequence has {new.stop} tokens, more than max_seq_len={limit}: "
                "generate fewer, or build the model with a larger max_seq_len"
            )
        self.length = new.stop
        return new

    def mask(self, new: slice, device: torch.device) -> Tensor | None:
        """The causal mask's rows of positions ``new``, bool (1, 1, new, all); None where these are all there are."""
        if new.start == 0:
            return None
        rows = torch.ones(new.stop - new.start, new.stop, dtype=torch.bool, device=device)
        return rows.tril(new.start)[None, None]
