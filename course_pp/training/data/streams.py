"""Documents that are read once, in order, without an end or a length; made into rows.

    documents ─► [BOT] … [EOT] [BOT] … ─► rows without gaps; row i + 1 begins with the last token
                                          that row i predicted
    documents ─► [BOT] … [EOT] ─► rows of one document each, padded

The position is a document's number and a token in it. A digest of that document is kept with it, so
that a stream that holds another document there is refused.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from course_pp.base.arguments import checked
from course_pp.training.data.sequences import Sequences, check_seq_len, packed, padded, padded_rows
from course_pp.training.data.tokenizer import Tokenizer


@checked
@dataclass(frozen=True, eq=False)
class Stream:
    """Documents, and how they become rows.

    Attributes:
        name: name of the data; equal streams have equal names.
        documents: function that returns the documents from number n on, the same at every call and
            on every rank. None and white space count, but are not trained on.
        seq_len: tokens in a row, at least 2.
        first: number of the first document; documents before it are held out.
        is_padded: True if each document has rows of its own, as
            :func:`~course_pp.training.data.padded` makes them.
    """

    name: str
    documents: Callable[[int], Iterable[str | None]]
    tokenizer: Tokenizer
    seq_len: int
    first: int = 0
    is_padded: bool = False

    def __post_init__(self) -> None:
        check_seq_len(self.seq_len)

    @cached_property
    def digest(self) -> str:
        """Digest of the name. The documents cannot be part of it, as they were not read yet."""
        parts: tuple[object, ...] = (self.name, self.tokenizer.digest, self.seq_len, self.first)
        if self.is_padded:
            parts += ("padded",)
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def split(self, n_rows: int) -> tuple["Stream", Sequences]:
        """Take documents from the beginning for validation.

        Return the stream after them, and at least ``n_rows`` rows of them.
        """
        held: list[Tensor] = []
        number = self.first
        # Padded documents fill whole rows. Packed ones fill tokens, and the first has no target.
        needed = n_rows if self.is_padded else n_rows * self.seq_len + 1
        for number, document in enumerate(self.documents(self.first), start=self.first):
            if needed <= 0:
                if self.is_padded:
                    pad, *_ = self.tokenizer.special_ids
                    rows = padded(held, self.seq_len, pad)
                else:
                    rows = packed(held, self.seq_len)
                return replace(self, first=number), rows
            if document is not None and document.strip():
                tokens = torch.tensor(self.tokenizer.encode_document(document))
                held.append(tokens)
                if self.is_padded:
                    needed -= -(-(len(tokens) - 1) // self.seq_len)
                else:
                    needed -= len(tokens)
        raise ValueError(
            f"{self.name} ends after {number + 1} documents, and {n_rows} validation rows of"
            f" {self.seq_len} tokens would take all of it: evaluate on less (--eval-batches)"
        )


@dataclass(frozen=True)
class _Document:
    epoch: int
    number: int
    digest: str
    tokens: np.ndarray


class StreamedBatches:
    """The batch of every step, read in order, without end.

    Unlike :class:`~course_pp.training.data.Batches` it has a position.
    """

    def __init__(self, stream: Stream, global_batch: int) -> None:
        self.sequences = stream
        self._rows = global_batch
        self._step = 0
        # The next batch begins at this token of the first unread document. Before a document was
        # read, only its number is known.
        self._first = stream.first
        self._token = 0
        self._unread: deque[_Document] = deque()
        self._reading = self._read(stream.first, epoch=1)

    def __getitem__(self, step: int) -> Sequences:
        """Return the rows of ``step``, which must be the next step."""
        if step != self._step:
            raise ValueError(
                f"step={step}: a stream is read in order, and its next step is {self._step}"
            )
        batch = self._padded() if self.sequences.is_padded else self._packed()
        self._step = step + 1
        return batch

    def _packed(self) -> Sequences:
        n = self._rows * self.sequences.seq_len
        while sum(len(document.tokens) for document in self._unread) < self._token + n + 1:
            self._unread.append(next(self._reading))
        tokens = np.concatenate([document.tokens for document in self._unread])[self._token :]
        rows = torch.from_numpy(tokens[: n + 1].astype(np.int64))
        # The last target is the next batch's first input, so it stays.
        self._token += n
        while self._token >= len(self._unread[0].tokens):
            self._token -= len(self._unread.popleft().tokens)
        shape = self._rows, self.sequences.seq_len
        return Sequences(rows[:-1].view(shape), rows[1:].clone().view(shape))

    def _padded(self) -> Sequences:
        seq_len = self.sequences.seq_len
        pad, *_ = self.sequences.tokenizer.special_ids
        pieces: list[Tensor] = []
        while len(pieces) < self._rows:
            tokens = self._following().tokens
            pieces.append(torch.from_numpy(tokens[self._token : self._token + seq_len + 1]))
            self._token += seq_len
            if self._token >= len(tokens) - 1:
                self._unread.popleft()
                self._token = 0
        # Read the next document, so that the position can name it.
        self._following()
        return padded_rows(pieces, seq_len, pad)

    @property
    def epoch(self) -> int:
        """Number of times that the next document is read, this time included."""
        return self._unread[0].epoch if self._unread else 1

    def state(self) -> dict[str, Any]:
        """Return the position, as JSON can hold it."""
        if not self._unread:
            return {"document": self._first, "token": self._token, "digest": None}
        next_one = self._unread[0]
        return {
            "document": next_one.number,
            "token": self._token,
            "digest": next_one.digest,
            "epoch": next_one.epoch,
        }

    def seek(self, step: int, state: Mapping[str, Any]) -> None:
        """Go on with ``step`` at the position in a :meth:`state`.

        Refuse a stream with another document there.
        """
        self._step = step
        self._first = state["document"]
        self._token = state["token"]
        self._unread.clear()
        # Older states lack the epoch.
        self._reading = self._read(self._first, epoch=state.get("epoch", 1))
        if state["digest"] is None:
            return
        found = self._following()
        if (found.number, found.digest) != (state["document"], state["digest"]):
            raise ValueError(
                f"document {state['document']} of {self.sequences.name} is another than when the"
                " run was saved: give the same stream"
            )

    def _following(self) -> _Document:
        if not self._unread:
            self._unread.append(next(self._reading))
        return self._unread[0]

    def _read(self, start: int, epoch: int) -> Iterator[_Document]:
        """Yield the documents with text in them, without end."""
        stream = self.sequences
        while True:
            found = False
            for number, document in enumerate(stream.documents(start), start=start):
                if document is not None and document.strip():
                    found = True
                    digest = hashlib.sha256(document.encode()).hexdigest()
                    tokens = np.array(stream.tokenizer.encode_document(document))
                    yield _Document(epoch, number, digest=digest, tokens=tokens)
            if not found and start == stream.first:
                raise ValueError(
                    f"{stream.name} holds no text from document {start} on: name a stream with text"
                    " in it"
                )
            start = stream.first
            epoch += 1
