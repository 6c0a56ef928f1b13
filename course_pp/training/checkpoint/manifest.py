"""What a whole checkpoint consists of: size and checksum of every file, written when all of them
are there.

Version 2 has XXH3 of 128 bits, which is computed about as fast as memory is read; version 1 had
SHA-256, and is read. Both detect damage, and neither detects tampering: whoever can change a file
can change the manifest.
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

from course_pp.base import ranks as base_ranks
from course_pp.base.arguments import WrongArgument, checked

T = TypeVar("T")

MANIFEST, STATE, METADATA = "manifest.json", "state.json", ".metadata"
_FORMAT = "course_pp checkpoint, version 2"
_READABLE = (_FORMAT, "course_pp checkpoint, version 1")
_CHUNK = 1 << 20
_KIND = "xxh3_128"
_CHECKSUMS: dict[str, tuple[Callable[[], Any], int]] = {
    _KIND: (xxhash.xxh3_128, 32),
    "sha256": (hashlib.sha256, 64),
}
"""For each kind of checksum what computes it, and its number of hexadecimal digits."""


class CheckpointError(ValueError):
    """A checkpoint cannot be written, or must not be loaded; one sentence, the same on every rank."""


class Ranks(base_ranks.Ranks):
    """The ranks that save or load together. Whatever fails on one of them, all raise a :class:`CheckpointError`."""

    refusal = CheckpointError

    def first(self, work: Callable[[], T]) -> T:
        """Do ``work`` on rank 0 and tell everyone the result."""
        return self.each(lambda: work() if self.rank == 0 else None)[0]  # type: ignore[return-value]

    @staticmethod
    def sentence(error: Exception) -> str:
        """Return what went wrong, for a person."""
        return sentence(error)


def sentence(error: BaseException) -> str:
    """Return what went wrong, for a person."""
    if isinstance(error, CheckpointError | WrongArgument):
        return str(error)
    if isinstance(error, pickle.UnpicklingError):
        # torch would suggest to load it nevertheless
        return "a record in it holds something other than a tensor"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class Digest:
    """Of a file when it was written."""

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
    """Declare the directory complete: the last file written to it."""
    listed = {
        name: {"bytes": files[name].bytes, files[name].kind: files[name].checksum}
        for name in sorted(files)
    }
    write_file(
        directory / MANIFEST,
        json.dumps({"format": _FORMAT, "step": step, "files": listed}, indent=1).encode(),
    )
    sync_directory(directory)


def sync_directory(directory: Path) -> None:
    """Wait until the names in ``directory`` are on the disk: renaming alone promises an order only."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """A regular file opened for reading: no link is followed, and no pipe or device waited for."""
    try:
        # Without O_NONBLOCK a named pipe would be waited for before anybody could see that it is
        # one.
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
        step, files = (
            manifest["step"],
            {name: _listed(name, entry) for name, entry in manifest["files"].items()},
        )
        if said in _READABLE and type(step) is int and {STATE, METADATA} <= files.keys():
            return step, files
    raise CheckpointError(f"{MANIFEST} is damaged: entries are missing or make no sense")


def _listed(name: str, entry: Mapping[str, Any]) -> Digest:
    """Return the digest in a manifest's entry; a ValueError or the like if there is none, or the file is elsewhere."""
    [kind] = entry.keys() - {"bytes"}
    digest = Digest(entry["bytes"], entry[kind], kind)
    sound = is_plain_name(name) and name != MANIFEST and type(digest.bytes) is int
    if not sound or not re.fullmatch(f"[0-9a-f]{{{_CHECKSUMS[kind][1]}}}", digest.checksum):
        raise ValueError
    return digest


def is_plain_name(name: str) -> bool:
    """Return whether ``name`` can be that of a file in a checkpoint's directory."""
    return name.isprintable() and name == os.path.basename(name) and name not in ("", ".", "..")


def is_ours(directory: Path) -> bool:
    """Return whether this version wrote the checkpoint, even if it is damaged now, by its manifest or description."""
    for name in (MANIFEST, STATE):
        try:
            found = read_json(directory / name)
        except CheckpointError:
            continue
        if not isinstance(found, dict):
            return False
        return (
            found.get("format") in _READABLE
            if name == MANIFEST
            else {"step", "layout", "config"} <= set(found)
        )
    return False


@checked
def verify(path: str | os.PathLike[str]) -> list[str]:
    """Return what is wrong with one checkpoint, a sentence for each file; empty if every byte is as it was written."""
    return problems(Path(path))


def problems(directory: Path, part: int = 0, n_parts: int = 1, checksums: bool = True) -> list[str]:
    """Return what is wrong with a checkpoint; empty if it is whole.

    Args:
        part, n_parts: check the manifest and every ``n_parts``-th file from ``part`` on, so that
            ranks share the work.
        checksums: False compares sizes only.
    """
    try:
        step, files = read_manifest(directory)
    except CheckpointError as error:
        return [str(error)]
    named = re.fullmatch(r"step_(\d+)", directory.name)
    found = (
        [f"the directory was renamed: it holds step {step}"]
        if named and int(named[1]) != step
        else []
    )
    mine = sorted(files)[part::n_parts]
    return found + [
        problem
        for name in mine
        if (problem := _problem_of(directory / name, files[name], checksums))
    ]


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
    # Into one buffer, which stays in the processor's cache; a file that is mapped to memory could
    # vanish under us.
    checksum, buffer = new_checksum(kind), memoryview(bytearray(_CHUNK))
    while n := file.readinto(buffer):  # type: ignore[attr-defined]
        checksum.update(buffer[:n])
    return checksum.hexdigest()


def spelled(path: Path, found: Iterable[str], most: int = 3) -> str:
    """Return a checkpoint and its problems in one line."""
    found = list(found)
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return f"{path}: {'; '.join(found[:most])}{more}"
