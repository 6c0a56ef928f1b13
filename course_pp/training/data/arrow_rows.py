"""Rows of token ids that the package `datasets` has saved, mapped into memory: `save_to_disk`, after its own `map`."""

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from course_pp.arguments import checked
from course_pp.training.data.corpus import import_datasets
from course_pp.training.data.sequences import Sequences, check_seq_len

__all__ = ["ArrowRows", "open_arrow"]


@checked
@dataclass(frozen=True, eq=False)
class ArrowRows:
    """Rows of one length, made by :func:`open_arrow`; as :class:`Sequences`, but read when they are asked for.

    Attributes:
        folder: what `save_to_disk` has written.
        column: which holds the ids, seq_len + 1 in each row: the last is only predicted, the first only predicts.
        seq_len: tokens in a row.
        digest: equal for equal data, as `datasets` fingerprints it.
    """

    folder: str
    column: str
    seq_len: int
    digest: str

    def __post_init__(self) -> None:
        check_seq_len(self.seq_len)

    @cached_property
    def _dataset(self) -> Any:
        return _load(self.folder).with_format("numpy", columns=[self.column])

    def __getstate__(self) -> dict[str, Any]:
        # A data worker maps the files itself.
        return {name: value for name, value in self.__dict__.items() if name != "_dataset"}

    @property
    def is_padded(self) -> bool:
        """False: every position is a token."""
        return False

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, rows: slice | Tensor) -> Sequences:
        """Return the chosen rows: a slice, or an int64 tensor of row numbers."""
        chosen = list(range(len(self))[rows]) if isinstance(rows, slice) else rows.tolist()
        read: Iterable[Any] = self._dataset[chosen][self.column] if chosen else ()
        both = torch.from_numpy(np.array(list(read), dtype=np.int64).reshape(len(chosen), self.seq_len + 1))
        return Sequences(both[:, :-1].contiguous(), both[:, 1:].contiguous())


@checked
def open_arrow(folder: str | os.PathLike[str], column: str = "input_ids") -> ArrowRows:
    """Open rows of token ids that `datasets` has saved with `save_to_disk`; of the ids themselves nothing is read.

    Args:
        folder: one split, not several.
        column: of lists of whole numbers, all of one length of at least 3: seq_len + 1.

    Raises:
        ValueError: the folder is missing or of another kind; no such column; values that are no ids, or rows of several
            lengths.
        RuntimeError: the package `datasets` is not installed.
    """
    folder = os.fspath(folder)
    dataset = _load(folder)
    if not hasattr(dataset, "column_names") or isinstance(dataset, dict):
        splits = ", ".join(map(str, dataset))
        raise ValueError(f"{folder!r} holds several splits, {splits}: give the folder of one of them")
    if column not in dataset.column_names:
        raise ValueError(f"{folder!r} has no column {column!r}: it has {', '.join(dataset.column_names)}")
    import pyarrow
    import pyarrow.compute

    ids = dataset.data.column(column)
    kind = getattr(ids.type, "value_type", None)
    if kind is None or not pyarrow.types.is_integer(kind):
        raise ValueError(f"column {column!r} of {folder!r} holds {ids.type}, not lists of token ids: tokenize it first")
    found = pyarrow.compute.min_max(pyarrow.compute.list_value_length(ids))
    shortest, longest = found["min"].as_py(), found["max"].as_py()
    if shortest is None or shortest != longest or ids.null_count:
        lengths = "no rows" if shortest is None else f"rows of {shortest} to {longest} ids"
        raise ValueError(
            f"column {column!r} of {folder!r} has {lengths}: pack the ids into rows of one length, seq_len + 1, or "
            "take python -m course_pp tokens"
        )
    parts = (dataset._fingerprint, column, len(dataset), shortest)
    return ArrowRows(folder, column, shortest - 1, hashlib.sha256(repr(parts).encode()).hexdigest())


def _load(folder: str) -> Any:
    datasets = import_datasets(f"folder {folder!r}")
    if not Path(folder).is_dir():
        raise ValueError(f"folder {folder!r} is not there: give what Dataset.save_to_disk has written")
    try:
        return datasets.load_from_disk(folder)
    except Exception as error:  # whatever a damaged file makes of it
        raise ValueError(
            f"folder {folder!r} cannot be opened ({type(error).__name__}: {error}): give what Dataset.save_to_disk has "
            "written, or write it again"
        ) from error
