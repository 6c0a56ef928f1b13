"""Next-token sequences of one length, packed or padded, and the batch of each step."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from course_pp.base.arguments import checked
from course_pp.training.data.tokenizer import PAD_ID

IGNORE_INDEX = -100
"""Target where nothing is to be predicted, as in `torch.nn.functional.cross_entropy`."""


class Rows(Protocol):
    """Sequences of one length, in memory (:class:`Sequences`) or on disk.

    Equal data have equal ``digest``.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice | Tensor) -> "Sequences":
        """Return the chosen rows: a slice, or an int64 tensor of row numbers."""

    @property
    def seq_len(self) -> int: ...

    @property
    def is_padded(self) -> bool: ...

    @property
    def digest(self) -> str: ...


@dataclass(frozen=True, eq=False)
class Sequences:
    """Inputs and the tokens to be predicted from them: `targets[i, t]` follows `inputs[i, t]`.

    Attributes:
        inputs: int64 (n, seq_len).
        targets: int64 (n, seq_len); `IGNORE_INDEX` where nothing is to be predicted.
        attention_mask: bool (n, seq_len), True on tokens and False on padding; None if nothing is
            padded.
    """

    inputs: Tensor
    targets: Tensor
    attention_mask: Tensor | None = None

    def __post_init__(self) -> None:
        for name, tensor, dtype in (
            ("inputs", self.inputs, torch.int64),
            ("targets", self.targets, torch.int64),
            ("attention_mask", self.attention_mask, torch.bool),
        ):
            if tensor is None:
                continue
            has_shape = tensor.dim() == 2 and tensor.shape == self.inputs.shape
            if tensor.dtype != dtype or not has_shape:
                raise ValueError(
                    f"{name} are {tensor.dtype} of shape {tuple(tensor.shape)}: give {dtype} (n,"
                    " seq_len), of one shape with the inputs"
                )

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, rows: slice | Tensor) -> "Sequences":
        mask = None if self.attention_mask is None else self.attention_mask[rows]
        return Sequences(self.inputs[rows], self.targets[rows], mask)

    @property
    def seq_len(self) -> int:
        return self.inputs.shape[1]

    @property
    def is_padded(self) -> bool:
        return self.attention_mask is not None

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all rows. Equal data have equal digests."""
        hasher = hashlib.sha256(str(tuple(self.inputs.shape)).encode())
        for tensor in (self.inputs, self.targets, self.attention_mask):
            if tensor is not None:
                hasher.update(tensor.cpu().numpy().tobytes())
        return hasher.hexdigest()

    @property
    def n_targets(self) -> int:
        """Number of predicted tokens, the divisor of a mean loss."""
        return int((self.targets != IGNORE_INDEX).sum())


@checked
def packed(documents: Sequence[Tensor], seq_len: int) -> Sequences:
    """Join documents and cut them into rows. A row may begin and end within a document.

    Each token after the first is predicted exactly once, in order. At the end, fewer than `seq_len`
    tokens are left out.

    Args:
        documents: `[BOT] … [EOT]`, int64 (length,) each, as from `encode`.
        seq_len: tokens in a row, at least 2.
    """
    _check(documents, seq_len)
    stream = torch.cat(list(documents))
    n = (len(stream) - 1) // seq_len
    if n == 0:
        raise ValueError(
            f"{len(stream)} tokens are too few for one sequence of seq_len={seq_len}, which needs"
            f" {seq_len + 1}: give more text, or choose a smaller seq_len"
        )
    inputs = stream[: n * seq_len].view(n, seq_len)
    targets = stream[1 : n * seq_len + 1].view(n, seq_len)
    return Sequences(inputs, targets)


@checked
def padded(documents: Sequence[Tensor], seq_len: int, pad_id: int = PAD_ID) -> Sequences:
    """Give each document a row `[BOT] … [EOT] [PAD] …` of its own, or several if it is long.

    A continuing row begins with the last token that its predecessor predicted. So each token of a
    document after its `[BOT]` is predicted exactly once. Nothing is predicted from `[EOT]` or
    `[PAD]`.
    """
    _check(documents, seq_len)
    pieces = []
    for document in documents:
        for start in range(0, len(document) - 1, seq_len):
            pieces.append(document[start : start + seq_len + 1])
    return padded_rows(pieces, seq_len, pad_id)


def padded_rows(pieces: Sequence[Tensor], seq_len: int, pad_id: int) -> Sequences:
    """Return a row for each piece of 2 to seq_len + 1 tokens.

    The last token of a piece is no input, and the first no target.
    """
    rows = torch.full((len(pieces), seq_len + 1), pad_id)
    for row, piece in zip(rows, pieces, strict=True):
        row[: len(piece)] = piece
    lengths = torch.tensor([len(piece) for piece in pieces]).view(-1, 1)
    is_token = torch.arange(seq_len + 1) < lengths
    targets = rows[:, 1:].masked_fill(~is_token[:, 1:], IGNORE_INDEX)
    return Sequences(rows[:, :-1].contiguous(), targets, is_token[:, :-1].contiguous())


def check_seq_len(seq_len: int) -> None:
    """Refuse rows in which nothing follows anything."""
    if seq_len < 2:
        raise ValueError(f"seq_len={seq_len}: a sequence has at least 2 tokens; choose 2 or more")


def _check(documents: Sequence[Tensor], seq_len: int) -> None:
    check_seq_len(seq_len)
    for i, document in enumerate(documents):
        # A row would silently round numbers of another dtype.
        if document.dtype != torch.int64 or document.dim() != 1:
            given = f"{document.dtype} of shape {tuple(document.shape)}"
            raise ValueError(
                f"documents[{i}] is {given}: give int64 token ids (length,), as from encode"
            )


@checked
@dataclass(frozen=True, eq=False)
class Batches:
    """The batch of every step: `batches[step]`, for step 0, 1, 2, … without end.

    There is no position to save. A step's global batch follows from `seed` and the step alone, so a
    run resumes at any step, and with any number of data-parallel ranks, which share it. Each epoch
    has its own permutation and leaves out the rows that do not fill a batch.
    """

    sequences: Rows
    global_batch: int
    seed: int = 0

    def __post_init__(self) -> None:
        _check_size(self.sequences, self.global_batch)

    @property
    def steps_per_epoch(self) -> int:
        return len(self.sequences) // self.global_batch

    def __getitem__(self, step: int) -> Sequences:
        """Return the rows of `step`, `global_batch` of them."""
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        order = _order(self.seed, epoch, len(self.sequences))
        first = step_in_epoch * self.global_batch
        return self.sequences[torch.from_numpy(order[first : first + self.global_batch])]


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, n: int) -> np.ndarray:
    """Return the permutation of an epoch, drawn once and not at every step of it."""
    return np.random.default_rng((seed, epoch)).permutation(n)


def validation_batches(
    sequences: Rows, global_batch: int, max_batches: int | None = None
) -> tuple[Sequences, ...]:
    """Return the same full batches at every call, for all data-parallel ranks together.

    With `max_batches` the rows are spread evenly over the data. Rows that do not fill a batch are
    left out.
    """
    _check_size(sequences, global_batch)
    n_full = len(sequences) // global_batch
    n_batches = n_full if max_batches is None else min(max_batches, n_full)
    n_rows = n_batches * global_batch
    rows = torch.arange(n_rows) * len(sequences) // n_rows
    return tuple(sequences[batch] for batch in rows.split(global_batch))


def _check_size(sequences: Rows, global_batch: int) -> None:
    if not 1 <= global_batch <= len(sequences):
        raise ValueError(
            f"global_batch={global_batch} and {len(sequences)} sequences: choose from 1 to"
            f" {len(sequences)}, a smaller seq_len, or more text"
        )


def read_ahead(batches: Batches, first: int, last: int, workers: int) -> Iterator[Sequences]:
    """Return ``batches[first]`` to ``batches[last - 1]``, read by ``workers`` processes.

    The processes end with the iterator.
    """
    dataset: Any = batches  # DataLoader only asks it for a batch by number
    loader = DataLoader(dataset, batch_size=None, sampler=range(first, last), num_workers=workers)
    return iter(loader)


def unigram_entropy(targets: Tensor) -> float:
    """Return the entropy of the token frequencies: the best loss without any context.

    With p the relative frequencies in `targets`, H(p) = -Σ_v p(v) ln p(v). No distribution that
    ignores context has a smaller mean loss on `targets`: its cross-entropy is H(p, q) ≥ H(p) for
    any q (Cover & Thomas, Elements of Information Theory, theorem 2.6.3). So a validation loss
    under it proves that the model uses context.

    It is in nats a token, as `torch.nn.functional.cross_entropy`. Targets are int64 of any shape;
    `IGNORE_INDEX` is left out.
    """
    counts = torch.bincount(targets[targets != IGNORE_INDEX]).double()
    return float(torch.special.entr(counts / counts.sum()).sum())
