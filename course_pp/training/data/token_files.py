"""Tokens on disk that are never loaded whole: a flat file of numbers, mapped into memory, and a description beside it.

    data.bin         uint16 or uint32, little-endian: [BOT] … [EOT] [BOT] … [EOT] …
    data.bin.json    how many, of which tokenizer, and two digests: of all bytes, and of 64 places spread over them

The digest of all bytes is computed once, while the file is written, and stands for the data in checkpoints. A start
reads 64 places of 64 KiB at most and compares their digest; so it notices a file that was cut off, swapped, or changed
in many places, in a moment and whatever the size. ``open_tokens(path, verify=True)`` reads everything.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from course_pp.arguments import checked
from course_pp.files import naming
from course_pp.training.data.sequences import Sequences, check_seq_len, padded_rows
from course_pp.training.data.tokenizer import Tokenizer

__all__ = ["PackedTokens", "PaddedTokens", "TokenFile", "open_tokens", "write_tokens"]

_FORMAT = "course_pp tokens 1"
_PLACES, _PLACE_BYTES = 64, 2**16
_CHUNK = 2**24  # tokens looked at together
_DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


@dataclass(frozen=True)
class TokenFile:
    """A file of tokens that was looked at and is whole.

    Attributes:
        path: of the numbers.
        dtype: ``"uint16"`` or ``"uint32"``.
        n_tokens: how many.
        vocab_size: tokens are below it.
        digest: SHA-256 of all bytes.
        sample: SHA-256 of some of them.
        tokenizer: the definition of what made them.
    """

    path: Path
    dtype: str
    n_tokens: int
    vocab_size: int
    digest: str
    sample: str
    tokenizer: str

    @cached_property
    def tokens(self) -> np.ndarray:
        """All of them, mapped: what is not looked at is not read."""
        return np.memmap(self.path, dtype=_DTYPES[self.dtype], mode="r", shape=(self.n_tokens,))

    @cached_property
    def special_ids(self) -> tuple[int, int, int]:
        """Those of its tokenizer."""
        return Tokenizer(self.tokenizer).special_ids

    @cached_property
    def bounds(self) -> np.ndarray:
        """Where documents begin, and where the last one ends: found by reading the file once."""
        _, bot, _ = self.special_ids
        parts = [at + np.flatnonzero(self.tokens[at : at + _CHUNK] == bot) for at in range(0, self.n_tokens, _CHUNK)]
        return np.concatenate([*parts, [self.n_tokens]])

    def __getstate__(self) -> dict[str, Any]:
        # A mapping would travel to a data worker as a copy of the whole file.
        return {name: value for name, value in self.__dict__.items() if name != "tokens"}


@checked
def write_tokens(path: str | os.PathLike[str], documents: Iterable[str], tokenizer: Tokenizer) -> TokenFile:
    """Write documents, one after the other, without holding more than one.

    The file appears whole or not at all.

    Raises:
        ValueError: no documents, or a ``path`` where something other than a file is.
        OSError: the files cannot be written.
    """
    path, vocab_size = Path(path), tokenizer.vocab_size
    for taken in filter(_is_no_file, (path, _beside(path))):  # or a device would be replaced
        raise ValueError(f"{str(taken)!r} is no plain file: name a new one, or one that may be replaced")
    dtype = "uint16" if vocab_size <= 2**16 else "uint32"
    beside, hasher, n_tokens = path.with_name(f".{path.name}.{os.getpid()}"), hashlib.sha256(), 0
    try:
        with naming(path):
            file = beside.open("wb")
        with file:
            for document in documents:
                content = np.array(tokenizer.encode_document(document), dtype=_DTYPES[dtype])
                hasher.update(content.tobytes())
                with naming(path):
                    file.write(content.tobytes())
                n_tokens += len(content)
            with naming(path):
                file.flush()
        if not n_tokens:
            raise ValueError(f"{path}: no documents to write (or only empty ones); give text")
        sample = _sample(beside)
        written = TokenFile(path, dtype, n_tokens, vocab_size, hasher.hexdigest(), sample, tokenizer.definition)
        description = {"format": _FORMAT, **{k: v for k, v in asdict(written).items() if k != "path"}}
        _beside(path).unlink(missing_ok=True)  # a new file never goes by an old description
        os.replace(beside, path)
        with naming(_beside(path)):
            _beside(beside).write_text(json.dumps(description))
        os.replace(_beside(beside), _beside(path))
    finally:
        for draft in (beside, _beside(beside)):
            draft.unlink(missing_ok=True)
    return written


@checked
def open_tokens(path: str | os.PathLike[str], verify: bool = False) -> TokenFile:
    """Open a file that :func:`write_tokens` has written.

    Args:
        verify: read all of it and compare with the digest, instead of some places.

    Raises:
        ValueError: it is not there, was cut off or changed, or has no description.
    """
    path = Path(path)
    how = "write it with python -m course_pp tokens"
    for strange in filter(_is_no_file, (path, _beside(path))):  # a pipe would be waited for
        raise ValueError(f"token file {str(path)!r} cannot be opened ({str(strange)!r} is no plain file): {how}")
    try:
        found = json.loads(_beside(path).read_text())
        n_bytes = path.stat().st_size
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"token file {str(path)!r} cannot be opened ({error}): {how}") from error
    try:
        is_ours = found.pop("format") == _FORMAT
        tokens = TokenFile(path, **found)
        expected = tokens.n_tokens * _DTYPES[tokens.dtype].itemsize
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{_beside(path)} does not describe a token file: {how}") from error
    if not is_ours:
        raise ValueError(f"{_beside(path)} does not describe a token file of this format, {_FORMAT!r}: {how}")
    if n_bytes != expected:
        what = "cut off" if n_bytes < expected else "too long"
        raise ValueError(
            f"token file {str(path)!r} is {what}: it has {n_bytes:,} bytes, and its description says {expected:,}: "
            "copy it again"
        )
    if (verify and _whole(path) != tokens.digest) or (not verify and _sample(path) != tokens.sample):
        raise ValueError(f"token file {str(path)!r} is not the one that its description describes: copy both again")
    return tokens


@checked
@dataclass(frozen=True, eq=False)
class PackedTokens:
    """The rows of a token file, without gaps; as :class:`Sequences`, but read when they are asked for.

    Attributes:
        file: the tokens.
        seq_len: tokens in a row, at least 2.
        first, last: which tokens; by default all.

    Raises:
        ValueError: a ``seq_len`` under 2, or too few tokens for one row.
    """

    file: TokenFile
    seq_len: int
    first: int = 0
    last: int | None = None

    def __post_init__(self) -> None:
        check_seq_len(self.seq_len)
        if not 0 <= self.first <= self._end <= self.file.n_tokens:
            raise ValueError(
                f"first={self.first}, last={self.last} of {self.file.n_tokens} tokens: give two of them, in order"
            )
        if self._end - self.first <= self.seq_len:
            raise ValueError(
                f"first={self.first}, last={self.last}: "
                f"{self._end - self.first} tokens of {str(self.file.path)!r} are too few for one sequence of "
                f"seq_len={self.seq_len}, which needs {self.seq_len + 1}: write more, or choose a smaller seq_len"
            )

    @property
    def _end(self) -> int:
        return self.file.n_tokens if self.last is None else self.last

    @property
    def is_padded(self) -> bool:
        """False: every position is a token."""
        return False

    def __len__(self) -> int:
        return (self._end - self.first - 1) // self.seq_len

    def __getitem__(self, rows: slice | Tensor) -> Sequences:
        """Return the chosen rows: a slice, or an int64 tensor of row numbers."""
        chosen = range(len(self))[rows] if isinstance(rows, slice) else rows.tolist()
        tokens, starts = self.file.tokens, [self.first + row * self.seq_len for row in chosen]
        read = [tokens[start : start + self.seq_len + 1].astype(np.int64) for start in starts]
        both = torch.from_numpy(np.stack(read) if read else np.empty((0, self.seq_len + 1), np.int64))
        return Sequences(both[:, :-1].contiguous(), both[:, 1:].contiguous())

    @property
    def digest(self) -> str:
        """Equal for equal rows of equal data; computed from the file's own digest."""
        parts = (self.file.digest, self.seq_len, self.first, self._end)
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    @checked
    def split(self, validation: float = 0.1, most: int = 1_000_000) -> tuple["PackedTokens", "PackedTokens"]:
        """Return the rows for training, and from the end of the file rows for validation.

        Args:
            validation: their share of the tokens, between 0 and 1.
            most: validation tokens at most.

        Raises:
            ValueError: either part is too small for one row.
        """
        held_out = max(self.seq_len + 1, min(most, round((self._end - self.first) * validation)))
        cut = max(self.first, self._end - held_out)
        train = PackedTokens(self.file, self.seq_len, self.first, cut)
        return train, PackedTokens(self.file, self.seq_len, cut, self._end)


@checked
@dataclass(frozen=True, eq=False)
class PaddedTokens:
    """The documents of a token file in rows of their own, as :func:`padded` makes them, but read when asked for.

    Attributes:
        file: the tokens.
        seq_len: tokens in a row, at least 2.
        first, last: which documents; by default all.

    Raises:
        ValueError: a ``seq_len`` under 2, or no document.
    """

    file: TokenFile
    seq_len: int
    first: int = 0
    last: int | None = None

    def __post_init__(self) -> None:
        check_seq_len(self.seq_len)
        n_documents = len(self.file.bounds) - 1
        if not 0 <= self.first < self._end <= n_documents:
            raise ValueError(
                f"first={self.first}, last={self.last} of the {n_documents} documents of {str(self.file.path)!r}: give "
                "two of them, in order, or write more"
            )

    @property
    def _end(self) -> int:
        return len(self.file.bounds) - 1 if self.last is None else self.last

    @cached_property
    def _spans(self) -> tuple[np.ndarray, np.ndarray]:
        """Where the tokens of each row begin and end."""
        bounds = self.file.bounds[self.first : self._end + 1]
        rows = -(-(np.diff(bounds) - 1) // self.seq_len)
        number = np.arange(rows.sum()) - np.repeat(np.cumsum(rows) - rows, rows)  # of a row in its document
        starts = np.repeat(bounds[:-1], rows) + number * self.seq_len
        return starts, np.minimum(starts + self.seq_len + 1, np.repeat(bounds[1:], rows))

    @property
    def is_padded(self) -> bool:
        """True: a mask says where tokens are."""
        return True

    def __len__(self) -> int:
        return len(self._spans[0])

    def __getitem__(self, rows: slice | Tensor) -> Sequences:
        """Return the chosen rows: a slice, or an int64 tensor of row numbers."""
        starts, ends = (each[rows if isinstance(rows, slice) else rows.numpy()] for each in self._spans)
        pieces = [self.file.tokens[start:end].astype(np.int64) for start, end in zip(starts, ends, strict=True)]
        pad, *_ = self.file.special_ids
        return padded_rows([torch.from_numpy(piece) for piece in pieces], self.seq_len, pad)

    @property
    def digest(self) -> str:
        """Equal for equal rows of equal data; computed from the file's own digest."""
        parts = (self.file.digest, self.seq_len, self.first, self._end, "padded")
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    @checked
    def split(self, validation: float = 0.1, most: int = 1_000_000) -> tuple["PaddedTokens", "PaddedTokens"]:
        """Return the documents for training, and from the end of the file documents for validation.

        Args:
            validation: their share of the tokens, between 0 and 1.
            most: validation tokens at most, unless one document alone has more.

        Raises:
            ValueError: either part is without a document.
        """
        bounds = self.file.bounds[self.first : self._end + 1]
        held_out = min(most, round(int(bounds[-1] - bounds[0]) * validation))
        cut = self.first + min(int(np.searchsorted(bounds, bounds[-1] - held_out)), len(bounds) - 2)
        return replace(self, last=cut), replace(self, first=cut)


def _is_no_file(path: Path) -> bool:
    return path.exists() and not path.is_file()


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def _sample(path: Path) -> str:
    """Return the SHA-256 of places spread over the file, its beginning and end among them."""
    hasher, size = hashlib.sha256(), path.stat().st_size
    with path.open("rb") as file:
        last = max(0, size - _PLACE_BYTES)
        for start in sorted({last * i // (_PLACES - 1) for i in range(_PLACES)}):
            file.seek(start)
            hasher.update(file.read(_PLACE_BYTES))
    return hasher.hexdigest()


def _whole(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
