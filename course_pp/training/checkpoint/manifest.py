"""What a whole checkpoint consists of: size and checksum of every file, written when all of them are there.

Version 2 has XXH3 of 128 bits, which is computed about as fast as memory is read; version 1 had SHA-256, and is read.
Both detect damage, and neither detects tampering: whoever can change a file can change the manifest.
"""

import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from course_pp.arguments import checked
from course_pp.training.checkpoint.ranks import CheckpointError

__all__ = [
    "MANIFEST",
    "METADATA",
    "STATE",
    "Digest",
    "is_plain_name",
    "new_checksum",
    "opened",
    "problems",
    "read_json",
    "read_plain",
    "verify",
    "write_file",
    "write_manifest",
]

MANIFEST, STATE, METADATA = "manifest.json", "state.json", ".metadata"
FORMAT = "course_pp checkpoint, version 2"
_READABLE = (FORMAT, "course_pp checkpoint, version 1")
_CHUNK = 1 << 20
_CHECKSUMS: dict[str, tuple[Callable[[], Any], int]] = {
    "xxh3_128": (xxhash.xxh3_128, 32),
    "sha256": (hashlib.sha256, 64),
}
"""For each kind of checksum what computes it, and its number of hexadecimal digits; the first is written."""


@dataclass(frozen=True)
class Digest:
    """Size and checksum of a file when it was written.

    Attributes:
        bytes: its size.
        checksum: in hexadecimal digits.
        kind: of the checksum.
    """

    bytes: int
    checksum: str
    kind: str = next(iter(_CHECKSUMS))

    @classmethod
    def of_entry(cls, entry: Mapping[str, Any]) -> "Digest":
        """Return the digest in a manifest's entry; an error of some kind if there is none."""
        [kind] = entry.keys() - {"bytes"}
        return cls(entry["bytes"], entry[kind], kind)

    @property
    def is_sound(self) -> bool:
        """Whether this can be a digest at all."""
        if type(self.bytes) is not int or self.kind not in _CHECKSUMS:
            return False
        return bool(re.fullmatch(f"[0-9a-f]{{{_CHECKSUMS[self.kind][1]}}}", str(self.checksum)))


def new_checksum(kind: str = next(iter(_CHECKSUMS))) -> Any:
    """Something with ``update`` and ``hexdigest``, as in ``hashlib``."""
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
    listed = {name: {"bytes": files[name].bytes, files[name].kind: files[name].checksum} for name in sorted(files)}
    manifest = {"format": FORMAT, "step": step, "files": listed}
    write_file(directory / MANIFEST, json.dumps(manifest, indent=1).encode())
    sync_directory(directory)


def sync_directory(directory: Path) -> None:
    """Wait until the names in ``directory`` are on the disk: renaming alone promises an order, not that it happened."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_plain(path: Path) -> bytes:
    """Return the content of a regular file: no link is followed, and no pipe or device waited for.

    Raises:
        CheckpointError: if it cannot be read.
    """
    with opened(path) as file:
        return file.read()


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """A file opened for reading, as :func:`read_plain` does.

    Raises:
        CheckpointError: if it cannot be opened, or read.
    """
    try:
        # Without O_NONBLOCK a named pipe would be waited for before anybody could see that it is one.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise CheckpointError(f"{path.name} is not a plain file")
            yield file
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise CheckpointError(f"{path.name} is a link: put the file itself in its place") from error
        raise CheckpointError(f"{path.name} cannot be read ({error.strerror})") from error


def read_json(path: Path) -> Any:
    """Return the content of a JSON file.

    Raises:
        CheckpointError: if it cannot be read, or is not JSON.
    """
    content = read_plain(path)
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name} is damaged: it is not JSON") from error


def read_manifest(directory: Path) -> tuple[int, dict[str, Digest]]:
    """Return the step and the files of a checkpoint.

    Raises:
        CheckpointError: if there is no manifest, or it is not one.
    """
    if not directory.is_dir():
        raise CheckpointError("there is no such directory")
    if not os.path.lexists(directory / MANIFEST):
        raise CheckpointError(f"{MANIFEST} is missing: not a checkpoint of this package, or one whose writing stopped")
    manifest = read_json(directory / MANIFEST)
    try:
        if manifest["format"] not in _READABLE:
            read = " and ".join(map(repr, _READABLE))
            raise CheckpointError(f"{MANIFEST} says format {manifest['format']!r}, this package reads {read}")
        step, files = manifest["step"], {name: Digest.of_entry(entry) for name, entry in manifest["files"].items()}
        intact = type(step) is int and all(map(_is_sound, files, files.values())) and {STATE, METADATA} <= set(files)
    except CheckpointError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError):
        intact = False
    if not intact:
        raise CheckpointError(f"{MANIFEST} is damaged: entries are missing or make no sense")
    return step, files


def is_ours(directory: Path) -> bool:
    """Return whether this version wrote the checkpoint in ``directory``, even if it is damaged now.

    The format in the manifest tells; if that is gone or illegible, the entries in the description of the run do.
    """
    for name in (MANIFEST, STATE):
        try:
            found = read_json(directory / name)
        except CheckpointError:
            continue
        if not isinstance(found, dict):
            return False
        return found.get("format") in _READABLE if name == MANIFEST else {"step", "layout", "config"} <= set(found)
    return False


def _is_sound(name: str, digest: Digest) -> bool:
    """Return whether an entry names a file of this directory, and not something elsewhere."""
    return is_plain_name(name) and name != MANIFEST and digest.is_sound


def is_plain_name(name: str) -> bool:
    """Return whether ``name`` can be that of a file in a checkpoint's directory."""
    return name.isprintable() and name == os.path.basename(name) and name not in ("", ".", "..")


def problems(directory: Path, part: int = 0, n_parts: int = 1, checksums: bool = True) -> list[str]:
    """Return what is wrong with a checkpoint; empty if it is whole.

    Args:
        part, n_parts: check the manifest and every ``n_parts``-th file from ``part`` on, so that ranks share the work.
        checksums: False compares sizes only.
    """
    try:
        step, files = read_manifest(directory)
    except CheckpointError as error:
        return [str(error)]
    named = re.fullmatch(r"step_(\d+)", directory.name)
    found = [f"the directory was renamed: it holds step {step}"] if named and int(named[1]) != step else []
    mine = sorted(files)[part::n_parts]
    return found + [problem for name in mine if (problem := _problem_of(directory / name, files[name], checksums))]


@checked
def verify(path: str | os.PathLike[str]) -> list[str]:
    """Return what is wrong with one checkpoint, a sentence for each file; empty if every byte is as it was written."""
    return problems(Path(path))


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
    # Into one buffer, which stays in the processor's cache; a file that is mapped to memory could vanish under us.
    checksum, buffer = new_checksum(kind), memoryview(bytearray(_CHUNK))
    while n := file.readinto(buffer):  # type: ignore[attr-defined]
        checksum.update(buffer[:n])
    return checksum.hexdigest()


def spelled(path: Path, found: Iterable[str], most: int = 3) -> str:
    """Return a checkpoint and its problems in one line."""
    found = list(found)
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return f"{path}: {'; '.join(found[:most])}{more}"
