"""Next-token sequences of one length, packed without gaps or padded document by document."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from course_pp.arguments import checked
from course_pp.training.data.tokenizer import PAD_ID

_LONGEST = 10**8  # every row has room for so many

IGNORE_INDEX = -100
"""Target where nothing is to be predicted; the default of `torch.nn.functional.cross_entropy`."""


class Rows(Protocol):
    """Sequences of one length, in memory (:class:`Sequences`) or on disk."""

    def __len__(self) -> int:
        """Return how many rows there are."""

    def __getitem__(self, rows: slice | Tensor) -> "Sequences":
        """Return the chosen rows: a slice, or an int64 tensor of row numbers."""

    @property
    def seq_len(self) -> int:
        """Tokens in a row."""

    @property
    def is_padded(self) -> bool:
        """Whether a mask says where tokens are."""

    @property
    def digest(self) -> str:
        """Equal for equal data."""


@checked
@dataclass(frozen=True, eq=False)
class Sequences:
    """Inputs and the tokens to be predicted from them: `targets[i, t]` follows `inputs[i, t]`.

    Attributes:
        inputs: int64 (n, seq_len).
        targets: int64 (n, seq_len), `IGNORE_INDEX` where nothing is to be predicted.
        attention_mask: bool (n, seq_len), True on tokens and False on padding; None where nothing is padded.

    Raises:
        ValueError: tensors of another dtype, or of unequal shapes.
    """

    inputs: Tensor
    targets: Tensor
    attention_mask: Tensor | None = None

    def __post_init__(self) -> None:
        if self.inputs.dim() != 2:
            raise ValueError(f"inputs have shape {tuple(self.inputs.shape)}: give token ids (n, seq_len)")
        named = (("inputs", self.inputs, torch.int64), ("targets", self.targets, torch.int64))
        for name, tensor, dtype in (*named, ("attention_mask", self.attention_mask, torch.bool)):
            if tensor is not None and (tensor.dtype != dtype or tensor.shape != self.inputs.shape):
                raise ValueError(
                    f"{name} are {tensor.dtype} of shape {tuple(tensor.shape)}: "
                    f"give {dtype} of the inputs' shape, {tuple(self.inputs.shape)}"
                )

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, rows: slice | Tensor) -> "Sequences":
        """Return the chosen rows: a slice, or an int64 tensor of row numbers."""
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
        """SHA-256 of all rows: equal data, equal digest."""
        hasher = hashlib.sha256(str(tuple(self.inputs.shape)).encode())
        for tensor in (self.inputs, self.targets, self.attention_mask):
            if tensor is not None:
                hasher.update(tensor.cpu().numpy().tobytes())
        return hasher.hexdigest()

    @property
    def n_targets(self) -> int:
        """How many tokens are predicted, the divisor of a mean loss."""
        return int((self.targets != IGNORE_INDEX).sum())


@checked
def packed(documents: Sequence[Tensor], seq_len: int) -> Sequences:
    """Join documents and cut them into rows; a row may begin and end within a document.

    Each token after the first is predicted exactly once, in order; fewer than `seq_len` at the end are left
    out.

    Args:
        documents: `[BOT] … [EOT]`, int64 (length,) each, as from `encode`.
        seq_len: tokens in a row, at least 2.

    Raises:
        ValueError: `seq_len` is under 2, or the documents do not fill one row.
    """
    _check(documents, seq_len)
    stream = torch.cat(list(documents))
    n = (len(stream) - 1) // seq_len
    if n == 0:
        raise ValueError(
            f"{len(stream)} tokens are too few for one sequence of seq_len={seq_len}, which needs "
            f"{seq_len + 1}: give more text, or choose a smaller seq_len"
        )
    return Sequences(stream[: n * seq_len].view(n, seq_len), stream[1 : n * seq_len + 1].view(n, seq_len))


@checked
def padded(documents: Sequence[Tensor], seq_len: int, pad_id: int = PAD_ID) -> Sequences:
    """Give each document a row `[BOT] … [EOT] [PAD] …` of its own; a longer one continues on the next row.

    A continuing row begins with the last token its predecessor predicted, so each token of a document after
    its `[BOT]` is predicted exactly once. Nothing is predicted from `[EOT]` or `[PAD]`.

    Args:
        documents: `[BOT] … [EOT]`, int64 (length,) each, as from `encode`.
        seq_len: tokens in a row, at least 2.
        pad_id: the tokenizer's id of `[PAD]`.

    Raises:
        ValueError: `seq_len` is under 2, or there is no document.
    """
    _check(documents, seq_len)
    starts = [(document, start) for document in documents for start in range(0, len(document) - 1, seq_len)]
    return padded_rows([document[start : start + seq_len + 1] for document, start in starts], seq_len, pad_id)


def padded_rows(pieces: Sequence[Tensor], seq_len: int, pad_id: int) -> Sequences:
    """Return a row for each piece of 2 to seq_len + 1 tokens: its last is no input, its first no target."""
    rows = torch.full((len(pieces), seq_len + 1), pad_id)
    for row, piece in zip(rows, pieces, strict=True):
        row[: len(piece)] = piece
    is_token = torch.arange(seq_len + 1) < torch.tensor([len(piece) for piece in pieces]).view(-1, 1)
    targets = rows[:, 1:].masked_fill(~is_token[:, 1:], IGNORE_INDEX)
    return Sequences(rows[:, :-1].contiguous(), targets, is_token[:, :-1].contiguous())


def check_seq_len(seq_len: int) -> None:
    """Refuse rows in which nothing follows anything."""
    if seq_len < 2:
        raise ValueError(f"seq_len={seq_len}: a sequence has at least 2 tokens; choose 2 or more")
    if seq_len > _LONGEST:
        raise ValueError(f"seq_len={seq_len}: choose at most {_LONGEST:,} tokens")


def _check(documents: Sequence[Tensor], seq_len: int) -> None:
    check_seq_len(seq_len)
    if not documents:
        raise ValueError("no documents: 0 tokens do not make a sequence; give more text")
    for i, document in enumerate(documents):
        if document.dtype != torch.int64 or document.dim() != 1 or len(document) < 2:
            raise ValueError(
                f"documents[{i}] is {document.dtype} of shape {tuple(document.shape)}: "
                "give [BOT] … [EOT] as int64 token ids (length,), as from encode"
            )
