"""Names that torch keeps to itself: the classes in DCP's ``.metadata``, and how to read that file safely."""

import io
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
from torch.distributed.tensor import DTensor
from torch.serialization import _get_layout

__all__ = [
    "Metadata",
    "Record",
    "TensorStorageMetadata",
    "chunk_of",
    "files_of",
    "quiet_alone",
    "read_metadata",
    "record_of",
]

_KINDS = (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
    _MEM_FORMAT_ENCODING,
    _StorageInfo,
    torch.Size,
    _get_layout,
)
_DTYPES = {("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_LARGEST = 1 << 60  # of a size or an offset: their sums still fit 64 bits


class _Described:
    """An object as a pickle describes it: its arguments and its state. It has no behaviour.

    A pickle can call what it names and also set attributes of it. So it never gets the real classes, which the whole
    process shares.
    """

    kind: Any = None
    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any) -> "_Described":
        self = super().__new__(cls)
        self.arguments, self.state = arguments, None
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Reads a description of tensors as a tree of :class:`_Described`; dtypes are what they are, and cannot change."""

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        stand_ins = {
            (kind.__module__, kind.__qualname__): type(kind.__name__, (_Described,), {"kind": kind}) for kind in _KINDS
        }
        self._known: dict[tuple[str, str], Any] = {**stand_ins, **_DTYPES}

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._known[module, name]
        except KeyError:
            raise pickle.UnpicklingError(
                f"it asks for {module}.{name}, which no description of tensors needs"
            ) from None


def read_metadata(content: bytes) -> Metadata:
    """Return what DCP's ``.metadata`` says of tensors and where they are, rebuilt from checked numbers and names.

    Raises:
        pickle.UnpicklingError: if it holds anything else; nothing of it has been run, and nothing changed.
    """
    try:
        return _metadata(_Unpickler(content).load())
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # damaged pickles raise whatever the byte they trip over makes them
        raise pickle.UnpicklingError(f"it is not readable ({type(error).__name__}: {error})") from error


def _metadata(found: Any) -> Metadata:
    fields = _fields(found, Metadata)
    entries: Any = {_checked(key, str): _entry(entry) for key, entry in fields["state_dict_metadata"].items()}
    records = {_index(index): _record(record) for index, record in fields["storage_data"].items()}
    return Metadata(entries, storage_data=records)


def _entry(found: Any) -> TensorStorageMetadata:
    fields = _fields(found, TensorStorageMetadata)
    dtype, *_ = _fields(fields["properties"], TensorProperties, tuple)
    chunks = [_fields(chunk, ChunkStorageMetadata) for chunk in fields["chunks"]]
    return TensorStorageMetadata(
        TensorProperties(dtype=_checked(dtype, torch.dtype)),
        _size(fields["size"]),
        [ChunkStorageMetadata(_size(chunk["offsets"]), _size(chunk["sizes"])) for chunk in chunks],
    )


def _index(found: Any) -> MetadataIndex:
    fields = _fields(found, MetadataIndex)
    return MetadataIndex(_checked(fields["fqn"], str), _size(fields["offset"]))


def _record(found: Any) -> _StorageInfo:
    fields = _fields(found, _StorageInfo)
    if fields.get("transform_descriptors"):
        raise pickle.UnpicklingError("it describes records that are not plain tensors")
    return _StorageInfo(_checked(fields["relative_path"], str), _whole(fields["offset"]), _whole(fields["length"]))


def _fields(found: Any, kind: type, state: type = dict) -> Any:
    """Return the state of a ``kind``."""
    if not isinstance(found, _Described) or found.kind is not kind:
        raise pickle.UnpicklingError("it does not describe a checkpoint")
    return _checked(found.state, state)


def _size(found: Any) -> torch.Size:
    if not isinstance(found, _Described) or found.kind is not torch.Size or len(found.arguments) != 1:
        raise pickle.UnpicklingError("it does not describe a checkpoint")
    return torch.Size([_whole(n) for n in _checked(found.arguments[0], tuple)])


def _whole(found: Any) -> int:
    if not 0 <= _checked(found, int) < _LARGEST:
        raise pickle.UnpicklingError(f"it holds {found}, which is no size of anything")
    return found


def _checked(found: Any, kind: type) -> Any:
    if type(found) is not kind:
        raise pickle.UnpicklingError("it does not describe a checkpoint")
    return found


@dataclass(frozen=True)
class Record:
    """Where a piece of a tensor is: ``n_bytes`` of ``file`` from byte ``begin`` on, torch's framing included."""

    file: str
    begin: int
    n_bytes: int


def files_of(metadata: Metadata) -> list[str]:
    """Return every name of a file that the description refers to."""
    return [record.relative_path for record in metadata.storage_data.values()]


def record_of(metadata: Metadata, key: str, offsets: torch.Size) -> Record | None:
    """Return where the piece of ``key`` that begins at ``offsets`` is; None if it is nowhere."""
    found = metadata.storage_data.get(MetadataIndex(key, offsets))
    return None if found is None else Record(found.relative_path, found.offset, found.length)


def chunk_of(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offsets and sizes of this rank's part of a sharded tensor."""
    [chunk] = tensor.__create_chunk_list__()
    return tuple(chunk.offsets), tuple(chunk.sizes)


@contextmanager
def quiet_alone() -> Iterator[None]:
    """Silence DCP's warning that there is only one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield
