"""The files of a whole checkpoint: size and checksum of each, written when all of them are there.

Version 2 has XXH3 of 128 bits, which is computed about as fast as memory is read. Version 1 had
SHA-256, and can still be read. Both detect damage. Neither detects tampering: a person who can
change a file can change the manifest.
"""

import errno
import hashlib
import json
import os
import pickle
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import xxhash

from course_pp.base.arguments import WrongArgument, checked
from course_pp.base.ranks import Ranks

T = TypeVar("T")

MANIFEST = "manifest.json"
STATE = "state.json"
METADATA = ".metadata"
_FORMAT = "course_pp checkpoint, version 2"
_READABLE = (_FORMAT, "course_pp checkpoint, version 1")
_CHUNK = 1 << 20
_KIND = "xxh3_128"
_CHECKSUMS: dict[str, tuple[Callable[[], Any], int]] = {
    _KIND: (xxhash.xxh3_128, 32),
    "sha256": (hashlib.sha256, 64),
}
"""Kinds of checksum: the function that computes it, and its number of hexadecimal digits."""


class CheckpointError(ValueError):
    """A checkpoint cannot be written or must not be loaded. All ranks raise the same sentence."""


class CheckpointRanks(Ranks):
    """The ranks that save or load together. If one fails, all raise a :class:`CheckpointError`."""

    refusal = CheckpointError

    def first(self, work: Callable[[], T]) -> T:
        """Do ``work`` on rank 0 and tell everyone the result."""
        return self.each(lambda: work() if self.rank == 0 else None)[0]  # type: ignore[return-value]

    @staticmethod
    def sentence(error: Exception) -> str:
        """Return the words for an error, for a person."""
        return sentence(error)


def sentence(error: BaseException) -> str:
    """Return the words for an error, for a person."""
    if isinstance(error, CheckpointError | WrongArgument):
        return str(error)
    if isinstance(error, pickle.UnpicklingError):
        # torch's own sentence suggests to load the file nevertheless.
        return "a record in it holds something other than a tensor"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class Digest:
    """Size and checksum of a file when it was written."""

    bytes: int
    checksum: str
    kind: str = _KIND


def new_checksum(kind: str = _KIND) -> Any:
    return _CHECKSUMS[kind][0]()


def write_file(path: Path, content: bytes) -> Digest:
    """Write ``content`` and wait until it is on the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    checksum = new_checksum()
    checksum.update(content)
    return Digest(len(content), checksum.hexdigest())


def write_manifest(directory: Path, step: int, files: Mapping[str, Digest]) -> None:
    """Declare the directory complete. The manifest is the last file written to it."""
    listed = {}
    for name in sorted(files):
        digest = files[name]
        listed[name] = {"bytes": digest.bytes, digest.kind: digest.checksum}
    manifest = {"format": _FORMAT, "step": step, "files": listed}
    write_file(directory / MANIFEST, json.dumps(manifest, indent=1).encode())
    sync_directory(directory)


def sync_directory(directory: Path) -> None:
    """Wait until the names in ``directory`` are on the disk.

    Renaming alone promises only that names change in order.
    """
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file for reading. Follow no link, and wait for no pipe or device."""
    try:
        # Without O_NONBLOCK, opening a named pipe would wait, and its kind could not be checked.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise CheckpointError(f"{path.name} is not a plain file")
            yield file
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise CheckpointError(
                f"{path.name} is a link: put the file itself in its place"
            ) from error
        raise CheckpointError(f"{path.name} cannot be read ({error.strerror})") from error


def read_plain(path: Path) -> bytes:
    """Return the content of a file, as :func:`opened` opens it."""
    with opened(path) as file:
        return file.read()


def read_json(path: Path) -> Any:
    """Return the content of a JSON file, as :func:`opened` opens it."""
    content = read_plain(path)
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name} is damaged: it is not JSON") from error


def read_manifest(directory: Path) -> tuple[int, dict[str, Digest]]:
    """Return the step and the files of a checkpoint."""
    if not directory.is_dir():
        raise CheckpointError("there is no such directory")
    if not os.path.lexists(directory / MANIFEST):
        raise CheckpointError(
            f"{MANIFEST} is missing: not a checkpoint of this package, or one whose writing stopped"
        )
    manifest = read_json(directory / MANIFEST)
    said = manifest.get("format") if isinstance(manifest, dict) else None
    if isinstance(said, str) and said not in _READABLE:
        raise CheckpointError(
            f"{MANIFEST} says format {said!r}, this package reads {' and '.join(_READABLE)}"
        )
    with suppress(KeyError, TypeError, ValueError, AttributeError):
        step = manifest["step"]
        files = {name: _listed(name, entry) for name, entry in manifest["files"].items()}
        if said in _READABLE and type(step) is int and {STATE, METADATA} <= files.keys():
            return step, files
    raise CheckpointError(f"{MANIFEST} is damaged: entries are missing or make no sense")


def _listed(name: str, entry: Mapping[str, Any]) -> Digest:
    """Return the digest in a manifest's entry.

    An entry without one, or the name of a file elsewhere, raises a ValueError, KeyError or the
    like.
    """
    [kind] = entry.keys() - {"bytes"}
    digest = Digest(entry["bytes"], entry[kind], kind)
    if not is_plain_name(name) or name == MANIFEST or type(digest.bytes) is not int:
        raise ValueError(name)
    if not re.fullmatch(f"[0-9a-f]{{{_CHECKSUMS[kind][1]}}}", digest.checksum):
        raise ValueError(digest.checksum)
    return digest


def is_plain_name(name: str) -> bool:
    """Return True if ``name`` can be the name of a file in a checkpoint's directory."""
    return name.isprintable() and name == os.path.basename(name) and name not in ("", ".", "..")


def is_ours(directory: Path) -> bool:
    """Return True if this version wrote the checkpoint, even if it is damaged now.

    The manifest says so, or if it cannot be read, the description.
    """
    with suppress(CheckpointError):
        manifest = read_json(directory / MANIFEST)
        return isinstance(manifest, dict) and manifest.get("format") in _READABLE
    with suppress(CheckpointError):
        state = read_json(directory / STATE)
        return isinstance(state, dict) and {"step", "layout", "config"} <= set(state)
    return False


@checked
def verify(path: str | os.PathLike[str]) -> list[str]:
    """Return the problems of one checkpoint, a sentence for each file.

    There are none if every byte is as it was written.
    """
    return problems(Path(path))


def problems(directory: Path, part: int = 0, n_parts: int = 1, checksums: bool = True) -> list[str]:
    """Return the problems of a checkpoint; none if it is whole.

    Args:
        part, n_parts: share of the work. Files ``part``, ``part + n_parts`` and so on are checked,
            and always the manifest.
        checksums: False compares only sizes.
    """
    try:
        step, files = read_manifest(directory)
    except CheckpointError as error:
        return [str(error)]
    found = []
    numbered = re.fullmatch(r"step_(\d+)", directory.name)
    if numbered and int(numbered[1]) != step:
        found.append(f"the directory was renamed: it holds step {step}")
    for name in sorted(files)[part::n_parts]:
        problem = _problem_of(directory / name, files[name], checksums)
        if problem is not None:
            found.append(problem)
    return found


def _problem_of(path: Path, expected: Digest, checksums: bool) -> str | None:
    if not os.path.lexists(path):
        return f"{path.name} is missing"
    try:
        with opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size != expected.bytes:
                return f"{path.name} has {size:,} bytes instead of {expected.bytes:,}"
            if checksums and _checksum(file, expected.kind) != expected.checksum:
                return f"{path.name} is damaged: its bytes are not those that were written"
    except CheckpointError as error:
        return str(error)
    return None


def _checksum(file: BinaryIO, kind: str) -> str:
    # One small buffer stays in the processor's cache. If the file were mapped into memory and then
    # truncated, reading it would kill the process.
    checksum = new_checksum(kind)
    buffer = memoryview(bytearray(_CHUNK))
    while n := file.readinto(buffer):  # type: ignore[attr-defined]
        checksum.update(buffer[:n])
    return checksum.hexdigest()


def spelled(path: Path, found: Iterable[str], most: int = 3) -> str:
    """Return a checkpoint and its problems in one line."""
    found = list(found)
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return f"{path}: {'; '.join(found[:most])}{more}"
