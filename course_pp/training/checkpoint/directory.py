"""The directory that holds a run's checkpoints, and how one comes to be there and goes.

    step_00000100                 complete; appears by being renamed
    .step_00000200.tmp-k3jd92ab   being written, or left behind by a save that was killed
    .step_00000050.old-x81mmz0q   being deleted

While it writes, rank 0 holds a lock on the directory, which the system releases when the process ends, however it
ends. So a later save can tell a leftover from the work of a run that is still alive.
"""

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path

from course_pp.training.checkpoint.manifest import problems, sync_directory
from course_pp.training.checkpoint.ranks import CheckpointError, sentence

__all__ = ["Draft", "Retention", "is_checkpoint", "step_directories"]

_STEP = re.compile(r"step_(\d{8,})")
_LEFTOVER = re.compile(r"\.step_\d{8,}\.(tmp|old)-\w+")


def step_name(step: int) -> str:
    """``step_00000100``."""
    return f"step_{step:08d}"


def step_directories(root: Path) -> list[Path]:
    """Every directory named as a checkpoint, newest first; whether it is whole is another question."""
    if not root.is_dir():
        return []
    found = [(int(match[1]), path) for path in root.iterdir() if (match := _STEP.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def is_checkpoint(path: Path) -> bool:
    """True if ``path`` is meant as one checkpoint and not as the directory of a run's."""
    return bool(_STEP.fullmatch(path.name)) or (path / "manifest.json").exists() or (path / ".metadata").exists()


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay when a new one is complete.

    Args:
        keep_last: this many of the newest; None keeps all.
        keep_every: also those whose step is a multiple of this, for ever.
    """

    keep_last: int | None = None
    keep_every: int | None = None

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name}={value!r} must be a whole number of at least 1, or None")
        if self.keep_every is not None and self.keep_last is None:
            raise ValueError(f"keep_every={self.keep_every} needs keep_last: without it everything is kept anyway")

    def apply(self, root: Path) -> None:
        """Delete what need not stay. Damaged checkpoints neither count nor go: someone may want to look at them."""
        if self.keep_last is None:
            return
        whole = [path for path in step_directories(root) if not problems(path, checksums=False)]
        for path in whole[self.keep_last :]:
            step = int(path.name.removeprefix("step_"))
            if self.keep_every is None or step % self.keep_every:
                try:
                    _delete(path)
                except OSError as error:  # the new checkpoint is there: no reason to stop
                    warnings.warn(f"{path} could not be removed ({sentence(error)})", stacklevel=2)


class Draft:
    """A checkpoint that is being written: under its final name it is complete or not there."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock: int | None = lock

    @classmethod
    def begin(cls, root: Path, step: int) -> "Draft":
        """Make the directory to write to, and remove what killed saves have left.

        Raises:
            CheckpointError: if there is a whole checkpoint of this step, or the directory cannot be written.
        """
        final = root / step_name(step)
        try:
            root.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(root)
            if final.exists() and not problems(final):
                raise CheckpointError(
                    f"{final} is a whole checkpoint already: resume from it, remove it, or save to another directory"
                )
            while True:
                path = _unique(final, "tmp")
                path.mkdir()
                with contextlib.suppress(FileNotFoundError):
                    lock = _lock(path)
                    if path.exists():
                        return cls(path, lock)
                    os.close(lock)
                # Another save took it for a leftover in the moment before the lock.
        except OSError as error:
            raise CheckpointError(
                f"{root} cannot hold checkpoints ({sentence(error)}): choose another directory"
            ) from error

    def publish(self) -> Path:
        """Give the checkpoint its name; a damaged one that has it makes way."""
        final = self.path.with_name(self.path.name.removeprefix(".").partition(".")[0])
        if final.exists():
            _delete(final)
        self.path.rename(final)
        sync_directory(final.parent)
        self._release()
        return final

    def discard(self) -> None:
        """Remove what was written, unless it was published."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            self._release()

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _delete(path: Path) -> None:
    """Take the name away first, so that nobody sees half a checkpoint."""
    gone = path.rename(_unique(path, "old"))
    shutil.rmtree(gone, ignore_errors=True)


def _unique(final: Path, kind: str) -> Path:
    return final.with_name(f".{final.name}.{kind}-{secrets.token_hex(4)}")


def _remove_leftovers(root: Path) -> None:
    for path in root.iterdir():
        if not _LEFTOVER.fullmatch(path.name):
            continue
        with contextlib.suppress(OSError):  # locked by a live run, gone meanwhile, or no locks on this file system
            handle = _lock(path, wait=False)
            shutil.rmtree(path, ignore_errors=True)
            os.close(handle)


def _lock(directory: Path, wait: bool = True) -> int:
    """Hold a lock on ``directory`` until the returned handle is closed or this process ends.

    Where the file system has no locks, a draft goes without one: nobody can then lock it as a leftover either.

    Raises:
        OSError: with ``wait=False``, if the lock cannot be had at once.
    """
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        if not wait:
            os.close(handle)
            raise
    return handle
