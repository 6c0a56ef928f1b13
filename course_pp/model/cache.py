"""Keys and values of the tokens seen so far, so that a new token costs one position and not the whole text."""

import torch
from torch import Tensor

__all__ = ["KVCache", "LayerCache"]


class LayerCache:
    """What the attention of one layer has seen: keys and values, (batch, kv_heads, seq, head_dim) each."""

    def __init__(self) -> None:
        self._seen: tuple[Tensor, Tensor] | None = None

    @property
    def length(self) -> int:
        """How many positions it holds."""
        return 0 if self._seen is None else self._seen[0].shape[2]

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
    """The layers' caches of one batch of sequences; one will do for all stages of a model that a rank holds.

    cache = model.new_cache()
    logits = model(prompt, cache=cache)             # (batch, prompt length, vocab_size)
    logits = model(next_token, cache=cache)         # (batch, 1, vocab_size): as if the prompt came with it
    """

    def __init__(self) -> None:
        self._layers: dict[str, LayerCache] = {}

    def layer(self, name: str) -> LayerCache:
        """Return the cache of the layer ``name``."""
        return self._layers.setdefault(name, LayerCache())

    def after(self, name: str, n_new: int, limit: int, alone: bool) -> slice:
        """Return where new positions lie, behind those that the layer ``name`` has seen.

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
        start = self.layer(name).length
        new = slice(start, start + n_new)
        if new.stop > limit:
            raise ValueError(
                f"with what the cache holds the sequence has {new.stop} tokens, more than max_seq_len={limit}: "
                "generate fewer, or build the model with a larger max_seq_len"
            )
        return new

    def mask(self, new: slice, device: torch.device) -> Tensor | None:
        """Return the causal mask's rows of positions ``new``, bool (1, 1, new, all); None if there are no others."""
        if new.start == 0:
            return None
        rows = torch.ones(new.stop - new.start, new.stop, dtype=torch.bool, device=device)
        return rows.tril(new.start)[None, None]
