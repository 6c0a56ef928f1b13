"""Tokens on disk that are never loaded whole.

They are in a file of numbers, or in rows that the package `datasets` has saved.

    data.bin         uint16 or uint32, little-endian: [BOT] … [EOT] [BOT] … [EOT] …
    data.bin.json    the number of tokens, their tokenizer, and two digests: of all bytes, and of 64
                     places spread over them

The digest of all bytes stands for the data in checkpoints. Opening a file reads at most 64 places
of 64 KiB. So it takes a moment, and still notices that a file was cut off, swapped, or changed in
many places.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from course_pp.base.files import write_atomically
from course_pp.base.imports import imports_of_extra
from course_pp.training.data.sequences import Sequences, check_seq_len, padded_rows
from course_pp.training.data.tokenizer import Tokenizer

_FORMAT = "course_pp tokens 1"
_HOW = "write it with python -m course_pp tokens"
_PLACES = 64
_PLACE_BYTES = 2**16
_CHUNK = 2**24  # tokens that are searched at a time, to bound the memory
_DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


@dataclass(frozen=True)
class TokenFile:
    """A file of tokens that was looked at and is whole.

    Attributes:
        dtype: ``"uint16"`` or ``"uint32"``.
        vocab_size: upper limit of the tokens; all are below it.
        digest: SHA-256 of all bytes.
        sample: SHA-256 of 64 places.
        tokenizer: definition of the tokenizer that made the tokens.
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
        """All tokens, mapped into memory, so only the parts that are used are read."""
        return np.memmap(self.path, dtype=_DTYPES[self.dtype], mode="r", shape=(self.n_tokens,))

    @cached_property
    def special_ids(self) -> tuple[int, int, int]:
        return Tokenizer(self.tokenizer).special_ids

    @cached_property
    def bounds(self) -> np.ndarray:
        """Places where documents begin, and the end of the last one. The file is read once."""
        _, bot, _ = self.special_ids
        parts = []
        for at in range(0, self.n_tokens, _CHUNK):
            parts.append(at + np.flatnonzero(self.tokens[at : at + _CHUNK] == bot))
        return np.concatenate([*parts, [self.n_tokens]])

    def __getstate__(self) -> dict[str, Any]:
        # Pickling the mapping would send a copy of the whole file to a data worker.
        return {name: value for name, value in self.__dict__.items() if name != "tokens"}


def write_tokens(
    path: str | os.PathLike[str], documents: Iterable[str], tokenizer: Tokenizer
) -> TokenFile:
    """Write documents, one after the other, and hold one at a time in memory.

    The file appears whole or not at all.
    """
    path = Path(path)
    for taken in (path, _beside(path)):
        # Replacing a device would remove it.
        if _is_no_file(taken):
            raise ValueError(
                f"{str(taken)!r} is no plain file: name a new one, or one that may be replaced"
            )
    vocab_size = tokenizer.vocab_size
    dtype = "uint16" if vocab_size <= 2**16 else "uint32"
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    hasher = hashlib.sha256()
    n_tokens = 0
    try:
        with draft.open("wb") as file:
            for document in documents:
                content = np.array(tokenizer.encode_document(document), dtype=_DTYPES[dtype])
                hasher.update(content.tobytes())
                file.write(content.tobytes())
                n_tokens += len(content)
        if not n_tokens:
            raise ValueError(f"{path}: no documents to write (or only empty ones); give text")
        written = TokenFile(
            path=path,
            dtype=dtype,
            n_tokens=n_tokens,
            vocab_size=vocab_size,
            digest=hasher.hexdigest(),
            sample=_sample(draft),
            tokenizer=tokenizer.definition,
        )
        description = {"format": _FORMAT, **asdict(written)}
        del description["path"]
        # Removed first, so that a new file never stands beside an old description.
        _beside(path).unlink(missing_ok=True)
        os.replace(draft, path)
        write_atomically(_beside(path), json.dumps(description))
    finally:
        draft.unlink(missing_ok=True)
    return written


def open_tokens(path: str | os.PathLike[str]) -> TokenFile:
    """Open a file of :func:`write_tokens`."""
    path = Path(path)
    for strange in (path, _beside(path)):
        # Opening a pipe would wait for a writer.
        if _is_no_file(strange):
            raise ValueError(
                f"token file {str(path)!r} cannot be opened ({str(strange)!r} is no plain file):"
                f" {_HOW}"
            )
    try:
        found = json.loads(_beside(path).read_text())
        n_bytes = path.stat().st_size
        form = found.pop("format")
        tokens = TokenFile(path, **found)
        expected = tokens.n_tokens * _DTYPES[tokens.dtype].itemsize
    except (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"token file {str(path)!r} cannot be opened ({error}): {_HOW}") from error
    if form != _FORMAT:
        raise ValueError(
            f"{_beside(path)} does not describe a token file of this format, {_FORMAT!r}: {_HOW}"
        )
    if n_bytes != expected:
        what = "cut off" if n_bytes < expected else "too long"
        raise ValueError(
            f"token file {str(path)!r} is {what}: it has {n_bytes:,} bytes, and its description"
            f" says {expected:,}: copy it again"
        )
    if _sample(path) != tokens.sample:
        raise ValueError(
            f"token file {str(path)!r} is not the one that its description describes: copy both"
            " again"
        )
    return tokens


@dataclass(frozen=True, eq=False)
class _OnDisk:
    """Rows of a token file.

    Attributes:
        file: the tokens.
        seq_len: tokens in a row, at least 2.
        first, last: range of the tokens of the file, or of its documents; by default all of them.
    """

    file: TokenFile
    seq_len: int
    first: int = 0
    last: int | None = None

    def __post_init__(self) -> None:
        check_seq_len(self.seq_len)
        least = 1 if self.is_padded else self.seq_len + 1
        if self.first < 0 or not self.first + least <= self._end <= self._most:
            what = "documents" if self.is_padded else "tokens"
            raise ValueError(
                f"first={self.first}, last={self.last} of {self._most} {what} of"
                f" {str(self.file.path)!r} are too few for one sequence of seq_len={self.seq_len}:"
                " write more"
            )

    @property
    def _most(self) -> int:
        return len(self.file.bounds) - 1 if self.is_padded else self.file.n_tokens

    @property
    def _end(self) -> int:
        return self._most if self.last is None else self.last

    @property
    def is_padded(self) -> bool:
        return isinstance(self, PaddedTokens)

    @property
    def digest(self) -> str:
        parts: tuple[object, ...] = (self.file.digest, self.seq_len, self.first, self._end)
        if self.is_padded:
            parts += ("padded",)
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def split(self, validation: float = 0.1, most: int = 1_000_000) -> tuple[Self, Self]:
        """Return the rows for training, and rows for validation from the end of the file.

        Args:
            validation: share of the tokens for validation, between 0 and 1.
            most: largest number of validation tokens; one document may have more by itself.
        """
        cut = self._cut(validation, most)
        return replace(self, last=cut), replace(self, first=cut)

    def _cut(self, validation: float, most: int) -> int:
        """Return the token or document at which the rows for validation begin."""
        raise NotImplementedError


class PackedTokens(_OnDisk):
    """The rows of a token file, without gaps. ``first`` and ``last`` count tokens."""

    def __len__(self) -> int:
        return (self._end - self.first - 1) // self.seq_len

    def __getitem__(self, rows: slice | Tensor) -> Sequences:
        """Return the chosen rows: a slice, or an int64 tensor of row numbers."""
        chosen = np.arange(len(self))[rows] if isinstance(rows, slice) else rows.numpy()
        starts = self.first + chosen * self.seq_len
        both = self.file.tokens[starts[:, None] + np.arange(self.seq_len + 1)].astype(np.int64)
        return _following(torch.from_numpy(both))

    def _cut(self, validation: float, most: int) -> int:
        held_out = max(self.seq_len + 1, min(most, round((self._end - self.first) * validation)))
        return max(self.first, self._end - held_out)


class PaddedTokens(_OnDisk):
    """The documents of a token file, as :func:`padded`. ``first`` and ``last`` count documents."""

    @cached_property
    def _spans(self) -> tuple[np.ndarray, np.ndarray]:
        """The beginning and the end of each row's tokens."""
        bounds = self.file.bounds[self.first : self._end + 1]
        rows = -(-(np.diff(bounds) - 1) // self.seq_len)
        # The number of each row in its document, from 0.
        number = np.arange(rows.sum()) - np.repeat(np.cumsum(rows) - rows, rows)
        starts = np.repeat(bounds[:-1], rows) + number * self.seq_len
        return starts, np.minimum(starts + self.seq_len + 1, np.repeat(bounds[1:], rows))

    def __len__(self) -> int:
        return len(self._spans[0])

    def __getitem__(self, rows: slice | Tensor) -> Sequences:
        """Return the chosen rows: a slice, or an int64 tensor of row numbers."""
        starts, ends = self._spans
        chosen = rows if isinstance(rows, slice) else rows.numpy()
        pieces = []
        for start, end in zip(starts[chosen], ends[chosen], strict=True):
            pieces.append(torch.from_numpy(self.file.tokens[start:end].astype(np.int64)))
        pad, *_ = self.file.special_ids
        return padded_rows(pieces, self.seq_len, pad)

    def _cut(self, validation: float, most: int) -> int:
        bounds = self.file.bounds[self.first : self._end + 1]
        held_out = min(most, round(int(bounds[-1] - bounds[0]) * validation))
        cut = int(np.searchsorted(bounds, bounds[-1] - held_out))
        # One document at least is for validation.
        return self.first + min(cut, len(bounds) - 2)


@dataclass(frozen=True, eq=False)
class ArrowRows:
    """Rows of one length in an Arrow file, read when they are needed; see :func:`open_arrow`.

    Attributes:
        column: name of the column with the ids. A row has seq_len + 1: the last is only predicted,
            the first only predicts.
        digest: digest that is equal for equal data, from the fingerprint of `datasets`.
    """

    folder: str
    column: str
    seq_len: int
    digest: str

    @cached_property
    def _dataset(self) -> Any:
        with imports_of_extra("hf"):
            import datasets

        return datasets.load_from_disk(self.folder).with_format("numpy", columns=[self.column])

    def __getstate__(self) -> dict[str, Any]:
        # A data worker maps the files itself.
        return {name: value for name, value in self.__dict__.items() if name != "_dataset"}

    @property
    def is_padded(self) -> bool:
        return False

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, rows: slice | Tensor) -> Sequences:
        """Return the chosen rows: a slice, or an int64 tensor of row numbers."""
        chosen = list(range(len(self))[rows]) if isinstance(rows, slice) else rows.tolist()
        read: Iterable[Any] = self._dataset[chosen][self.column] if chosen else ()
        ids = np.array(list(read), dtype=np.int64).reshape(len(chosen), self.seq_len + 1)
        return _following(torch.from_numpy(ids))


def open_arrow(folder: str | os.PathLike[str], column: str = "input_ids") -> ArrowRows:
    """Open rows of token ids that `datasets` has saved with `save_to_disk`. It reads no ids.

    Args:
        folder: folder of one split, not of several.
        column: column of lists of whole numbers, all of one length of at least 3: seq_len + 1.
    """
    folder = os.fspath(folder)
    with imports_of_extra("hf"):
        import datasets
        import pyarrow.compute

    try:
        dataset = datasets.load_from_disk(folder)
        ids = dataset.data.column(column)  # fails for a folder of several splits
        kind = ids.type.value_type
        lengths = pyarrow.compute.min_max(pyarrow.compute.list_value_length(ids))
    except Exception as error:  # a damaged file may raise anything
        raise ValueError(
            f"folder {folder!r} cannot be opened ({type(error).__name__}: {error}): give what"
            " Dataset.save_to_disk has written of one split with lists of token ids in column"
            f" {column!r}"
        ) from error
    shortest, longest = lengths["min"].as_py(), lengths["max"].as_py()
    has_one_length = shortest is not None and shortest == longest and not ids.null_count
    if not has_one_length or not pyarrow.types.is_integer(kind):
        raise ValueError(
            f"column {column!r} of {folder!r} holds rows of {shortest} to {longest} values of"
            f" {kind}: pack token ids into rows of one length, seq_len + 1"
        )
    check_seq_len(shortest - 1)
    parts = (dataset._fingerprint, column, len(dataset), shortest)
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()
    return ArrowRows(folder, column, seq_len=shortest - 1, digest=digest)


def _following(ids: Tensor) -> Sequences:
    """Return rows in which each token is predicted from the tokens before it.

    ids is (n, seq_len + 1).
    """
    return Sequences(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())


def _is_no_file(path: Path) -> bool:
    return path.exists() and not path.is_file()


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def _sample(path: Path) -> str:
    """Return the SHA-256 of places spread over the file, with its beginning and its end."""
    hasher = hashlib.sha256()
    with path.open("rb") as file:
        last = max(0, path.stat().st_size - _PLACE_BYTES)
        # A set, because places of a small file coincide.
        for start in sorted({last * i // (_PLACES - 1) for i in range(_PLACES)}):
            file.seek(start)
            hasher.update(file.read(_PLACE_BYTES))
    return hasher.hexdigest()
