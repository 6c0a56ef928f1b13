"""Documents that are read once, in order, without an end or a length: what is trained on is packed as it comes.

    documents ─► [BOT] … [EOT] [BOT] … ─► rows, row i + 1 beginning with the last token that row i predicted

The position is a document's number and a token in it, so a run goes on exactly where it was. With it is kept a digest
of that document: a stream that holds another one there is refused.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from course_pp.arguments import checked
from course_pp.training.data.sequences import Sequences, check_seq_len, packed
from course_pp.training.data.tokenizer import Tokenizer

__all__ = ["Stream", "StreamedBatches"]


@checked
@dataclass(frozen=True, eq=False)
class Stream:
    """Documents, and how they become rows.

    Attributes:
        name: tells this stream from others; equal streams have equal names.
        documents: gives the documents from number n on, the same at every call and on every rank; None and white space
            count, but are not trained on.
        tokenizer: of the rows.
        seq_len: tokens in a row, at least 2.
        first: number of the first document; those before it are held out.

    Raises:
        ValueError: a ``seq_len`` under 2, or a negative ``first``.
    """

    name: str
    documents: Callable[[int], Iterable[str | None]]
    tokenizer: Tokenizer
    seq_len: int
    first: int = 0

    def __post_init__(self) -> None:
        check_seq_len(self.seq_len)
        if self.first < 0:
            raise ValueError(f"first={self.first}: documents count from 0")

    @property
    def is_padded(self) -> bool:
        """False: every position is a token."""
        return False

    @cached_property
    def digest(self) -> str:
        """Digest of the name, not of the documents, which nobody has seen yet."""
        parts = (self.name, self.tokenizer.digest, self.seq_len, self.first)
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    @checked
    def split(self, n_rows: int) -> tuple["Stream", Sequences]:
        """Return the stream after its first documents, and these as ``n_rows`` rows at least, for validation.

        Raises:
            ValueError: the stream ends before that.
        """
        held: list[Tensor] = []
        number, needed = self.first, n_rows * self.seq_len + 1
        for number, document in enumerate(self.documents(self.first), start=self.first):
            if needed <= 0:
                rest = Stream(self.name, self.documents, self.tokenizer, self.seq_len, number)
                return rest, packed(held, self.seq_len)
            if document is not None and document.strip():
                held.append(torch.tensor(self.tokenizer.encode_document(document)))
                needed -= len(held[-1])
        raise ValueError(
            f"{self.name} ends after {number + 1} documents, all of which {n_rows} validation rows of {self.seq_len} "
            "tokens would take: give more text, or evaluate on less (--eval-batches)"
        )


@dataclass(frozen=True)
class _Document:
    number: int
    digest: str
    tokens: np.ndarray


@checked
class StreamedBatches:
    """The batch of every step, read in order; as :class:`~course_pp.training.data.Batches`, but with a position.

    At the end of the documents it begins again with the first. Tokens are never left out.
    """

    def __init__(self, stream: Stream, global_batch: int) -> None:
        if global_batch < 1:
            raise ValueError(f"global_batch={global_batch}: must be at least 1")
        self.sequences, self._rows = stream, global_batch
        self._step, self._first, self._token = 0, stream.first, 0
        self._unread: deque[_Document] = deque()
        self._reading = self._read(stream.first)

    def __getitem__(self, step: int) -> Sequences:
        """Return the rows of ``step``, which must be the next.

        Raises:
            ValueError: another step than the next, or a stream without text.
        """
        if step != self._step:
            raise ValueError(f"step={step}: a stream is read in order, and its next step is {self._step}")
        n = self._rows * self.sequences.seq_len
        while self._n_unread() < n + 1:
            self._unread.append(next(self._reading))
        tokens = np.concatenate([document.tokens for document in self._unread])[self._token :]
        rows = torch.from_numpy(tokens[: n + 1].astype(np.int64))
        self._step, self._token = step + 1, self._token + n
        while self._token >= len(self._unread[0].tokens):
            self._token -= len(self._unread.popleft().tokens)
        shape = self._rows, self.sequences.seq_len
        return Sequences(rows[:-1].view(shape), rows[1:].clone().view(shape))

    def state(self) -> dict[str, Any]:
        """Return the position, as JSON can hold it."""
        if not self._unread:
            return {"document": self._first, "token": self._token, "digest": None}
        return {"document": self._unread[0].number, "token": self._token, "digest": self._unread[0].digest}

    def seek(self, step: int, state: Mapping[str, Any]) -> None:
        """Go on with ``step`` at a position that :meth:`state` told.

        Raises:
            ValueError: the stream holds another document there.
        """
        self._step, self._first, self._token = step, state["document"], state["token"]
        self._unread.clear()
        self._reading = self._read(self._first)
        if state["digest"] is None:
            return
        self._unread.append(next(self._reading))
        found = self._unread[0]
        if (found.number, found.digest) != (state["document"], state["digest"]):
            raise ValueError(
                f"document {state['document']} of {self.sequences.name} is another than when the run was saved: give "
                "the same stream, or begin another run in a new folder"
            )

    def _n_unread(self) -> int:
        return sum(len(document.tokens) for document in self._unread) - self._token

    def _read(self, start: int) -> Iterator[_Document]:
        """Yield the documents with text in them, without end."""
        stream = self.sequences
        while True:
            found = False
            for number, document in enumerate(stream.documents(start), start=start):
                if document is not None and document.strip():
                    found = True
                    tokens = np.array(stream.tokenizer.encode_document(document))
                    yield _Document(number, hashlib.sha256(document.encode()).hexdigest(), tokens)
            if not found and start == stream.first:
                raise ValueError(f"{stream.name} holds no text from document {start} on: name a stream with text in it")
            start = stream.first
