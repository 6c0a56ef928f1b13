"""The tensors of a checkpoint. DCP writes and reads them; their description is read without DCP.

DCP writes one file a rank, which holds each tensor as ``torch.save`` would. It describes them all
in ``.metadata``, a pickle, and unpickling can run code. So the pickle is read here as a tree of
names and numbers, which are checked one by one. DCP then reads exactly the pieces of the checked
description: if one were missing, the run that loads would keep its own numbers there.
"""

import io
import os
import pickle
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.serialization import get_crc32_options, set_crc32_options

from course_pp.base.torch_private import checkpoint_record, named_by_checkpoints
from course_pp.training.checkpoint.manifest import (
    METADATA,
    CheckpointError,
    CheckpointRanks,
    Digest,
    new_checksum,
    read_plain,
    sentence,
)

_Record = checkpoint_record()
_KINDS = (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
    _Record,
    torch.Size,
    *named_by_checkpoints(),
)
"""Classes that ``.metadata`` may name, besides dtypes."""
_DTYPES = {
    ("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)
}
# The largest size or offset: sums of them still fit 64 bits.
_LARGEST = 1 << 60


@dataclass(frozen=True)
class Piece:
    """A rectangle of a tensor, in one file.

    Attributes:
        offsets, sizes: its beginning in the tensor and its extent, an entry a dimension.
        file: name of the file that holds it.
        n_bytes: size in the file, torch's framing included.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    n_bytes: int

    @property
    def rank(self) -> int:
        """The rank that wrote it."""
        match = re.match(r"__(\d+)_", self.file)
        return int(match[1]) if match else 0


@dataclass(frozen=True)
class TensorEntry:
    """One tensor and where its pieces are."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def n_bytes(self) -> int:
        """Bytes of its numbers."""
        return prod(self.shape) * self.dtype.itemsize


def read_description(
    directory: Path, files: Mapping[str, Digest]
) -> tuple[dict[str, TensorEntry], Metadata]:
    """Return the tensors that the files hold, by key, and the same description for DCP.

    Both are made of checked numbers and names.
    """
    try:
        metadata = _metadata(_Unpickler(read_plain(directory / METADATA)).load())
        keys = metadata.state_dict_metadata
        return {key: _entry(key, metadata, files) for key in keys}, metadata
    except (CheckpointError, pickle.UnpicklingError) as error:
        problem = str(error)
    except Exception as error:
        # A damaged pickle can raise anything, by the meaning that its bytes happen to have.
        problem = f"it is not readable ({type(error).__name__}: {error})"
    raise CheckpointError(f"{directory}: {METADATA} is refused: {problem}")


class _Described:
    """An object as a pickle describes it: its arguments and its state. It has no behaviour.

    A pickle can call the classes that it names and set their attributes, so it never gets the
    process's real classes.
    """

    kind: Any = None
    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any) -> "_Described":
        self = super().__new__(cls)
        self.arguments = arguments
        self.state = None
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Reads a description of tensors as a tree of :class:`_Described`.

    Only dtypes are the real objects; they cannot be changed.
    """

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        self._known: dict[tuple[str, str], Any] = dict(_DTYPES)
        for kind in _KINDS:
            stand_in = type(kind.__name__, (_Described,), {"kind": kind})
            self._known[kind.__module__, kind.__qualname__] = stand_in

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._known:
            raise pickle.UnpicklingError(
                f"it asks for {module}.{name}, which no description of tensors needs"
            )
        return self._known[module, name]


def _metadata(found: Any) -> Metadata:
    """Return a description for DCP, rebuilt from the checked parts of an unpickled one."""
    fields = _state(found, Metadata)
    records = {}
    for index, record in fields["storage_data"].items():
        index = _state(index, MetadataIndex)
        record = _state(record, _Record)
        if record.get("transform_descriptors"):
            raise pickle.UnpicklingError("it describes records that are not plain tensors")
        key = MetadataIndex(_sure(index["fqn"], str), _size(index["offset"]))
        records[key] = _Record(
            _sure(record["relative_path"], str),
            _whole(record["offset"]),
            _whole(record["length"]),
        )

    entries: dict[str, Any] = {}
    for key, entry in fields["state_dict_metadata"].items():
        entry = _state(entry, TensorStorageMetadata)
        dtype, *_ = _state(entry["properties"], TensorProperties, tuple)
        chunks = []
        for chunk in entry["chunks"]:
            chunk = _state(chunk, ChunkStorageMetadata)
            chunks.append(ChunkStorageMetadata(_size(chunk["offsets"]), _size(chunk["sizes"])))
        entries[_sure(key, str)] = TensorStorageMetadata(
            TensorProperties(dtype=_sure(dtype, torch.dtype)), _size(entry["size"]), chunks
        )
    return Metadata(entries, storage_data=records)


def _state(found: Any, kind: type, state: type = dict) -> Any:
    if not isinstance(found, _Described) or found.kind is not kind:
        raise pickle.UnpicklingError("it does not describe a checkpoint")
    return _sure(found.state, state)


def _size(found: Any) -> torch.Size:
    is_size = isinstance(found, _Described) and found.kind is torch.Size
    if not is_size or len(found.arguments) != 1:
        raise pickle.UnpicklingError("it does not describe a checkpoint")
    return torch.Size([_whole(n) for n in _sure(found.arguments[0], tuple)])


def _whole(found: Any) -> int:
    if not 0 <= _sure(found, int) < _LARGEST:
        raise pickle.UnpicklingError(f"it holds {found}, which is no size of anything")
    return found


def _sure(found: Any, kind: type) -> Any:
    # Not isinstance: True is an int, but no size.
    if type(found) is not kind:
        raise pickle.UnpicklingError("it does not describe a checkpoint")
    return found


def _entry(key: str, metadata: Metadata, files: Mapping[str, Digest]) -> TensorEntry:
    """Return one tensor and its pieces.

    The pieces must make up the whole. To compare their sizes is enough, because DCP writes no
    pieces that overlap.
    """
    entry: Any = metadata.state_dict_metadata[key]
    pieces = []
    for chunk in entry.chunks:
        record = metadata.storage_data.get(MetadataIndex(key, chunk.offsets))
        if record is not None and record.relative_path not in files:
            raise CheckpointError(f"it refers to {record.relative_path!r}, not in the manifest")
        n_bytes = prod(chunk.sizes) * entry.properties.dtype.itemsize
        end = 0 if record is None else record.offset + record.length
        if record is None or record.length < n_bytes or end > files[record.relative_path].bytes:
            raise CheckpointError(
                f"no file holds the {n_bytes:,} bytes of {key} from {tuple(chunk.offsets)} on"
            )
        piece = Piece(
            offsets=tuple(chunk.offsets),
            sizes=tuple(chunk.sizes),
            file=record.relative_path,
            n_bytes=record.length,
        )
        pieces.append(piece)
    if sum(prod(piece.sizes) for piece in pieces) != prod(entry.size):
        raise CheckpointError(f"the pieces of {key} do not make up its shape {tuple(entry.size)}")
    return TensorEntry(key, entry.properties.dtype, tuple(entry.size), tuple(pieces))


class _HashedFile:
    """A file for writing that knows the checksum of its content, so that nothing is read back."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._checksum = new_checksum()
        self._size = 0
        # torch.save hides a failed write behind a sentence about the format of archives.
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            written: int = self._file.write(data)
        except OSError as error:
            self.failure = error
            raise
        self._checksum.update(data)
        self._size += written
        return written

    def digest(self) -> Digest:
        return Digest(self._size, self._checksum.hexdigest())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class _HashingFiles(FileSystem):
    """Notes size and checksum of every file written through it."""

    def __init__(self) -> None:
        self.digests: dict[str, Digest] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with Path(path).open(mode) as file:
            stream = _HashedFile(file)
            try:
                yield stream
            except Exception as error:
                if stream.failure is not None:
                    raise stream.failure from error
                raise
        self.digests[Path(path).name] = stream.digest()

    # DCP writes .metadata under another name first.
    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.digests[Path(new_path).name] = self.digests.pop(Path(path).name)


class _Writer(dcp.FileSystemWriter):
    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.fs = self.files = _HashingFiles()

    def storage_meta(self) -> None:
        """Return nothing about this machine. DCP would note the full path of the directory."""


class _Reader(dcp.FileSystemReader):
    def __init__(self, directory: Path, metadata: Metadata) -> None:
        super().__init__(directory)
        self._metadata = metadata

    def read_metadata(self) -> Metadata:
        return self._metadata


def write_tensors(
    directory: Path, tensors: Mapping[str, Tensor], ranks: CheckpointRanks
) -> dict[str, Digest]:
    """Write everyone's tensors, each by one rank. Return the digests of this rank's files."""
    writer = _Writer(directory)

    def write() -> None:
        with writing_to(directory.parent), _without_crc32():
            dcp.save(
                dict(tensors),
                storage_writer=writer,
                process_group=ranks.group,
                no_dist=ranks.size == 1,
            )

    ranks.collectively(write)
    return writer.files.digests


def read_tensors(directory: Path, metadata: Metadata, tensors: Mapping[str, Tensor]) -> None:
    """Load the values of ``tensors``, in place, from the checkpoint's files in ``directory``.

    Raises:
        CheckpointError: in one sentence, if that fails.
    """
    with _in_a_sentence(f"{directory} cannot be loaded"):
        dcp.load(dict(tensors), storage_reader=_Reader(directory, metadata), no_dist=True)


def writing_to(root: Path) -> AbstractContextManager[None]:
    """Return a block that says in one sentence why a checkpoint cannot be written to ``root``."""
    return _in_a_sentence(
        f"a checkpoint cannot be written to {root}", "make room there, or save to another directory"
    )


@contextmanager
def _in_a_sentence(problem: str, remedy: str = "") -> Iterator[None]:
    """Raise a failure in one sentence, where DCP has a traceback for each rank.

    If the disk failed, the ``remedy`` follows.
    """
    failure: BaseException
    try:
        with torch.no_grad(), warnings.catch_warnings():
            # DCP warns that it works in one process, which is meant so.
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            yield
        return
    except CheckpointError:
        raise
    except dcp.CheckpointException as error:
        # Of several ranks' failures the lowest rank's, so that all ranks say the same.
        failure = error.failures[min(error.failures)][0]
    except Exception as error:
        failure = error
    what = " ".join(sentence(failure).split())
    more = f"; {remedy}" if remedy and isinstance(failure, OSError) else ""
    raise CheckpointError(f"{problem}: {what}{more}") from failure


@contextmanager
def _without_crc32() -> Iterator[None]:
    """Leave CRC-32 out. It takes longer than writing, and the manifest has a stronger checksum."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)
