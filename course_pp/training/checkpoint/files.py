"""DCP's writer and reader of files: the one notes what it writes, the other reads nothing that could run.

DCP writes one file a rank, holding each tensor as ``torch.save`` would, and describes them all in ``.metadata``.
"""

import io
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.serialization import get_crc32_options, set_crc32_options

from course_pp.training.checkpoint._torch import Metadata, quiet_alone
from course_pp.training.checkpoint.manifest import Digest, new_checksum
from course_pp.training.checkpoint.ranks import CheckpointError, Ranks, sentence

__all__ = ["cannot_write", "read_tensors", "write_tensors"]

_MAKE_ROOM = "make room there, or save to another directory"


class _HashedFile:
    """A file for writing that knows the checksum of what went into it, so that nothing is read back."""

    def __init__(self, file: io.BufferedWriter, failures: list[OSError]) -> None:
        self._file, self._failures = file, failures
        self._checksum = new_checksum()
        self._size = 0

    def write(self, data: Any) -> int:
        try:
            written = self._file.write(data)
        except OSError as error:
            # torch.save turns it into a sentence about the format of archives.
            self._failures.append(error)
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
        self.failures: list[OSError] = []

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """Open a file."""
        with Path(path).open(mode) as file:
            stream = _HashedFile(file, self.failures)  # type: ignore[arg-type]
            yield stream
        self.digests[Path(path).name] = stream.digest()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Rename a file."""
        super().rename(path, new_path)
        self.digests[Path(new_path).name] = self.digests.pop(Path(path).name)


class _Writer(dcp.FileSystemWriter):
    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.fs = self.files = _HashingFiles()

    def storage_meta(self) -> None:
        """Return nothing about this machine: DCP would note the directory's full path."""


class _Reader(dcp.FileSystemReader):
    def __init__(self, directory: Path, metadata: Metadata) -> None:
        super().__init__(directory)
        self._metadata = metadata

    def read_metadata(self) -> Metadata:
        """Return what was read already, and found harmless."""
        return self._metadata


def write_tensors(directory: Path, tensors: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Digest]:
    """Write everyone's tensors; what several ranks hold is written by one of them.

    Returns:
        The digests of the files that this rank wrote.

    Raises:
        CheckpointError: on every rank, if one could not write.
    """
    writer = _Writer(directory)

    def write() -> None:
        dcp.save(dict(tensors), storage_writer=writer, process_group=ranks.group, no_dist=ranks.size == 1)

    with _without_crc32():
        _run(write, ranks, writer.files.failures, f"a checkpoint cannot be written to {directory.parent}")
    return writer.files.digests


def cannot_write(root: Path, error: OSError) -> str:
    """Return the sentence for a disk that is full, or cannot be written."""
    return f"a checkpoint cannot be written to {root}: {error.strerror or error}; {_MAKE_ROOM}"


def read_tensors(directory: Path, metadata: Metadata, tensors: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Fill ``tensors``, in place, each rank its own parts of them.

    Raises:
        CheckpointError: on every rank, if one could not read; tensors may then be filled in part.
    """
    reader = _Reader(directory, metadata)

    def read() -> None:
        dcp.load(dict(tensors), storage_reader=reader, process_group=ranks.group, no_dist=ranks.size == 1)

    _run(read, ranks, [], f"{directory} cannot be loaded")


def _run(work: Any, ranks: Ranks, failures: list[OSError], problem: str) -> None:
    """Do what DCP does together, and say what went wrong in one sentence instead of a traceback a rank."""
    failure: BaseException | None = None
    with torch.no_grad(), quiet_alone():
        try:
            work()
        except (dcp.CheckpointException, Exception) as error:
            failure = error
    mine = f"{failures[0].strerror or failures[0]}; {_MAKE_ROOM}" if failures else None
    reasons = [reason for reason in ranks.gather(mine) if reason is not None]
    if failure is None and not reasons:
        return
    if not reasons and isinstance(failure, dcp.CheckpointException):
        reasons = [sentence(error) for _, (error, _) in sorted(failure.failures.items())]
    raise CheckpointError(f"{problem}: {' '.join((reasons or [sentence(failure)])[0].split())}") from failure  # type: ignore[arg-type]


@contextmanager
def _without_crc32() -> Iterator[None]:
    """Leave CRC-32 out: the manifest has a stronger checksum, and this one takes longer than writing the bytes."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)
