"""Documents that are read once, in order, without an end or a length: they become rows as they
come.

    documents ─► [BOT] … [EOT] [BOT] … ─► rows, row i + 1 beginning with the last token that row i predicted
    documents ─► [BOT] … [EOT] ─► rows of one document each, padded

The position is a document's number and a token in it. With it is kept a digest of that document: a
stream that holds another one there is refused.
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
        name: equal streams have equal names.
        documents: gives the documents from number n on, the same at every call and on every rank;
            None and white space count, but are not trained on.
        seq_len: tokens in a row, at least 2.
        first: number of the first document; those before it are held out.
        is_padded: each document has rows of its own, as :func:`~course_pp.training.data.padded`
            makes them.
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
        """Digest of the name, not of the documents, which nobody has seen yet."""
        parts = (
            self.name,
            self.tokenizer.digest,
            self.seq_len,
            self.first,
            *["padded"] * self.is_padded,
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def split(self, n_rows: int) -> tuple["Stream", Sequences]:
        """Return the stream after its first documents, and these as ``n_rows`` rows at least, for validation."""
        held: list[Tensor] = []
        number, needed = self.first, n_rows if self.is_padded else n_rows * self.seq_len + 1
        for number, document in enumerate(self.documents(self.first), start=self.first):
            if needed <= 0:
                pad, *_ = self.tokenizer.special_ids
                rows = (
                    padded(held, self.seq_len, pad)
                    if self.is_padded
                    else packed(held, self.seq_len)
                )
                return replace(self, first=number), rows
            if document is not None and document.strip():
                held.append(torch.tensor(self.tokenizer.encode_document(document)))
                needed -= (
                    -(-(len(held[-1]) - 1) // self.seq_len) if self.is_padded else len(held[-1])
                )
        why = f"{n_rows} validation rows of {self.seq_len} tokens would take all of it"
        raise ValueError(
            f"{self.name} ends after {number + 1} documents, and {why}: evaluate on less"
            " (--eval-batches)"
        )


@dataclass(frozen=True)
class _Document:
    epoch: int
    number: int
    digest: str
    tokens: np.ndarray


class StreamedBatches:
    """The batch of every step, read in order, without end; as :class:`~course_pp.training.data.Batches` otherwise."""

    def __init__(self, stream: Stream, global_batch: int) -> None:
        self.sequences, self._rows = stream, global_batch
        self._step, self._first, self._token = 0, stream.first, 0
        self._unread: deque[_Document] = deque()
        self._reading = self._read(stream.first, 1)

    def __getitem__(self, step: int) -> Sequences:
        """Return the rows of ``step``, which must be the next."""
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
        self._token += n
        while self._token >= len(self._unread[0].tokens):
            self._token -= len(self._unread.popleft().tokens)
        shape = self._rows, self.sequences.seq_len
        return Sequences(rows[:-1].view(shape), rows[1:].clone().view(shape))

    def _padded(self) -> Sequences:
        seq_len, (pad, *_) = self.sequences.seq_len, self.sequences.tokenizer.special_ids
        pieces: list[Tensor] = []
        while len(pieces) < self._rows:
            tokens = self._following().tokens
            pieces.append(torch.from_numpy(tokens[self._token : self._token + seq_len + 1]))
            self._token += seq_len
            if self._token >= len(tokens) - 1:
                self._unread.popleft()
                self._token = 0
        self._following()  # the position names it
        return padded_rows(pieces, seq_len, pad)

    @property
    def epoch(self) -> int:
        """How many times the document that comes next is read, this time included."""
        return self._unread[0].epoch if self._unread else 1

    def state(self) -> dict[str, Any]:
        """Return the position, as JSON can hold it."""
        if not self._unread:
            return {"document": self._first, "token": self._token, "digest": None}
        next_one = self._unread[0]
        place = {"document": next_one.number, "token": self._token, "digest": next_one.digest}
        return {**place, "epoch": next_one.epoch}

    def seek(self, step: int, state: Mapping[str, Any]) -> None:
        """Go on with ``step`` at a position that :meth:`state` told; refuse a stream with another document there."""
        self._step, self._first, self._token = step, state["document"], state["token"]
        self._unread.clear()
        self._reading = self._read(self._first, state.get("epoch", 1))  # older states lack it
        if state["digest"] is None:
            return
        found = self._following()
        if (found.number, found.digest) != (state["document"], state["digest"]):
            which = f"document {state['document']} of {self.sequences.name}"
            raise ValueError(
                f"{which} is another than when the run was saved: give the same stream"
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
                    tokens = np.array(stream.tokenizer.encode_document(document))
                    yield _Document(
                        epoch, number, hashlib.sha256(document.encode()).hexdigest(), tokens
                    )
            if not found and start == stream.first:
                raise ValueError(
                    f"{stream.name} holds no text from document {start} on: name a stream with text"
                    " in it"
                )
            start, epoch = stream.first, epoch + 1
