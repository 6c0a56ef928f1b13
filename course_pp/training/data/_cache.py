"""Results worth keeping between runs, as checksummed files that many ranks may read and write at once."""

import contextlib
import hashlib
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/course_pp`, else `~/.cache/course_pp` (XDG Base Directory Specification)."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        home = os.path.expanduser("~")
        # Some containers run under a user id that has no home.
        base = os.path.join(home, ".cache") if os.path.isabs(home) else tempfile.gettempdir()
    return Path(base) / "course_pp"


def remembered(name: str, make: Callable[[], bytes], cache_dir: str | os.PathLike[str] | None = None) -> bytes:
    """Return the bytes kept under `name`; where none are kept, or they are damaged, those of `make()`, then kept.

    Several processes that find nothing each call `make`; since a file appears by renaming, whoever
    reads finds a whole one. A directory that cannot be written costs a warning and the next `make`.
    """
    path = (default_cache_dir() if cache_dir is None else Path(cache_dir)) / name
    payload = _read(path)
    if payload is None:
        payload = make()
        try:
            _write(path, payload)
        except OSError as error:
            warnings.warn(
                f"{path} could not be written ({error.strerror or error}): the next run computes it again; "
                "set XDG_CACHE_HOME to a directory that can be written",
                stacklevel=3,
            )
    return payload


def _read(path: Path) -> bytes | None:
    try:
        checksum, _, payload = path.read_bytes().partition(b"\n")
    except OSError:
        return None
    return payload if checksum == _checksum(payload) else None


def _write(path: Path, payload: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with open(handle, "wb") as file:
            file.write(_checksum(payload) + b"\n" + payload)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _checksum(payload: bytes) -> bytes:
    return hashlib.sha256(payload).hexdigest().encode()
