"""Names that torch keeps to itself: the classes in DCP's ``.metadata``, and how to read that file safely."""

import io
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PosixPath
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.serialization import _get_layout

__all__ = [
    "Metadata",
    "TensorStorageMetadata",
    "files_of",
    "quiet_alone",
    "read_metadata",
    "record_of",
]

_CLASSES = (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
    _MEM_FORMAT_ENCODING,
    _StorageInfo,
)
_ALLOWED: dict[tuple[str, str], Any] = {
    **{(kind.__module__, kind.__qualname__): kind for kind in _CLASSES},
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _get_layout,
    ("pathlib", "PosixPath"): PosixPath,
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
}


class _MetadataUnpickler(pickle.Unpickler):
    """Builds descriptions of tensors and nothing else: a pickle can only call what this finds for it."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(
                f"it asks for {module}.{name}, which no description of tensors needs"
            ) from None


def read_metadata(content: bytes) -> Metadata:
    """What DCP's ``.metadata`` file describes.

    Raises:
        pickle.UnpicklingError: if it holds anything else; nothing of it has been run.
    """
    try:
        metadata = _MetadataUnpickler(io.BytesIO(content)).load()
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # damaged pickles raise whatever the byte they trip over makes them
        raise pickle.UnpicklingError(f"it is not readable ({type(error).__name__}: {error})") from error
    parts = (getattr(metadata, "state_dict_metadata", None), getattr(metadata, "storage_data", None))
    if not isinstance(metadata, Metadata) or not all(isinstance(part, dict) for part in parts):
        raise pickle.UnpicklingError("it does not describe a checkpoint")
    return metadata


def files_of(metadata: Metadata) -> list[str]:
    """Every name of a file that the description refers to.

    Raises:
        pickle.UnpicklingError: if a record is to be transformed on reading, which ours never are.
    """
    records = metadata.storage_data.values()
    if not all(map(_is_plain, records)):
        raise pickle.UnpicklingError("it describes records that are not plain tensors")
    return [record.relative_path for record in records]


def _is_plain(record: Any) -> bool:
    plain = isinstance(record, _StorageInfo) and not record.transform_descriptors
    return plain and isinstance(record.relative_path, str)


def record_of(metadata: Metadata, key: str, offsets: torch.Size) -> tuple[str, int]:
    """File name and bytes of the piece of ``key`` that begins at ``offsets``."""
    record = metadata.storage_data[MetadataIndex(key, offsets)]
    return record.relative_path, record.length


@contextmanager
def quiet_alone() -> Iterator[None]:
    """Without DCP's warning that one process is one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield
