"""The folder of a learner's progress, files that several processes write, and errors of files."""

import fcntl
import os
import secrets
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LOCK_LIMIT_S = 2.0


def state_folder() -> Path:
    """Return the folder of ``COURSE_PP_PROGRESS``, or the user's state directory.

    The variable may begin with ``~``.
    """
    if chosen := os.environ.get("COURSE_PP_PROGRESS"):
        return Path(chosen).parent
    if sys.platform == "darwin":
        return Path("~/Library/Application Support/course_pp")
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state") / "course_pp"


@contextmanager
def naming(file: str | Path) -> Iterator[None]:
    """Name ``file`` in an OSError from inside: of a write to a full disk the system does not."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file)) from None


@contextmanager
def locked(path: Path) -> Iterator[Path]:
    """Hold the lock of a file and yield its real path.

    The lock is a file beside it, as the file itself is replaced.
    """
    given, path = path, Path(os.path.realpath(path))
    if str(given).startswith("~"):
        raise OSError("nobody has that home directory")
    if path.exists() and not path.is_file():
        raise OSError("it is no file" if not path.is_dir() else "it is a directory")
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(f"{path.name}.lock"), "a") as lock:
        limit = time.monotonic() + _LOCK_LIMIT_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > limit:
                    raise OSError("another process holds its lock") from None
                time.sleep(0.01)
        yield path


def write_atomically(path: Path, text: str) -> None:
    """Replace the file by ``text`` so that no reader ever sees half of it.

    A link stays a link, and the mode stays as it is.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")  # to a device; a directory refuses
        return
    # Not of `tempfile`, whose files only their owner may read.
    new = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(new, "x", encoding="utf-8", newline="") as file:
            file.write(text)
        if path.exists():
            shutil.copymode(path, new)
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
