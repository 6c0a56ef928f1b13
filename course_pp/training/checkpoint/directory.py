"""The directory that holds a run's checkpoints, and how a checkpoint appears there and is deleted.

    step_00000100                 complete; appears by being renamed
    .step_00000200.tmp-k3jd92ab   being written, or left behind by a save that was killed
    .step_00000050.old-x81mmz0q   being deleted

While it writes, rank 0 holds a lock on the directory. The system releases the lock when the process
ends, however it ends. So a later save can tell a leftover from the work of a run that is alive.
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

from course_pp.training.checkpoint.manifest import (
    MANIFEST,
    METADATA,
    CheckpointError,
    is_ours,
    problems,
    sentence,
    sync_directory,
)
from course_pp.training.config import Count, SettingError, check_setting

_STEP = re.compile(r"step_(\d{8,})")
_LEFTOVER = re.compile(r"\.step_\d{8,}\.(tmp|old)-\w+")


def named(root: str | os.PathLike[str]) -> Path:
    """Return the directory. Refuse an empty name, which would be the working directory."""
    if not os.fspath(root):
        raise CheckpointError(
            "'' names no directory: give one, such as '.' for the working directory"
        )
    return Path(root)


def step_of(path: Path) -> int:
    """Return the step in the name of a checkpoint's directory."""
    return int(path.name.removeprefix("step_"))


def step_directories(root: Path) -> list[Path]:
    """Return every directory named as a checkpoint, newest first. Some may be damaged."""
    if not root.is_dir():
        return []
    found = [path for path in root.iterdir() if _STEP.fullmatch(path.name)]
    return sorted(found, key=step_of, reverse=True)


def is_checkpoint(path: Path) -> bool:
    """Return True if ``path`` is meant as one checkpoint, not as the directory of a run."""
    has_files = (path / MANIFEST).exists() or (path / METADATA).exists()
    return has_files or _STEP.fullmatch(path.name) is not None


def check_free(final: Path) -> None:
    """Refuse to write to ``final`` if something is there, except a damaged checkpoint of ours."""
    if not os.path.lexists(final):
        return
    if not problems(final):
        raise CheckpointError(
            f"{final} is a whole checkpoint already: resume from it, or save to another directory"
        )
    if final.is_symlink() or not is_ours(final):
        raise CheckpointError(
            f"{final} has the name of a checkpoint, but this version has not written it: move it"
            " away, or save to another directory"
        )


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay.

    Attributes:
        keep_last: number of newest checkpoints to keep; None keeps all.
        keep_every: also keep the steps that are a multiple of this number.
    """

    keep_last: int | None = None
    keep_every: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_setting(name, value, Count | None)
        if self.keep_every is not None and self.keep_last is None:
            raise SettingError(
                "{keep_every} needs keep_last: without it everything is kept anyway",
                keep_every=self.keep_every,
            )

    def apply(self, newest: Path) -> None:
        """Delete checkpoints before ``newest`` that need not be kept.

        Damaged checkpoints and later steps do not count as kept, and are left alone.
        """
        if self.keep_last is None:
            return
        step = step_of(newest)
        before = [path for path in step_directories(newest.parent) if step_of(path) < step]
        whole = [path for path in before if not problems(path, checksums=False)]
        for path in whole[self.keep_last - 1 :]:
            if self.keep_every is not None and step_of(path) % self.keep_every == 0:
                continue
            try:
                _delete(path)
            except OSError as error:
                # The new checkpoint is complete, so an old one that stays is no reason to stop.
                warnings.warn(f"{path} could not be removed ({sentence(error)})", stacklevel=2)


class Draft:
    """A checkpoint that is being written, in the directory ``path``.

    Making one removes leftovers of killed saves.
    """

    def __init__(self, root: Path, step: int) -> None:
        self.final = root / f"step_{step:08d}"
        self._lock: int | None = None
        try:
            root.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(root)
            while self._lock is None:
                self.path = _unique(self.final, "tmp")
                self.path.mkdir()
                with contextlib.suppress(FileNotFoundError):
                    lock = _lock(self.path)
                    if self.path.exists():
                        self._lock = lock
                    else:
                        # Another save took it for a leftover before it was locked.
                        os.close(lock)
        except OSError as error:
            raise CheckpointError(
                f"{root} cannot hold checkpoints ({sentence(error)}): choose another directory"
            ) from error

    def publish(self) -> None:
        """Give the checkpoint its name, unless another run has come to the same step.

        A damaged checkpoint of that name is removed.
        """
        check_free(self.final)
        if self.final.exists():
            _delete(self.final)
        self.path.rename(self.final)
        sync_directory(self.final.parent)
        self.discard()

    def discard(self) -> None:
        """Release the lock, and remove the draft unless it was published."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None


def _delete(path: Path) -> None:
    """Delete a checkpoint. Rename it first, so that nobody sees half of one."""
    gone = path.rename(_unique(path, "old"))
    shutil.rmtree(gone, ignore_errors=True)


def _unique(final: Path, kind: str) -> Path:
    return final.with_name(f".{final.name}.{kind}-{secrets.token_hex(4)}")


def _remove_leftovers(root: Path) -> None:
    for path in root.iterdir():
        if not _LEFTOVER.fullmatch(path.name):
            continue
        # An OSError means: locked by a run that is alive, already gone, or a file system without
        # locks.
        with contextlib.suppress(OSError):
            handle = _lock(path, wait=False)
            shutil.rmtree(path, ignore_errors=True)
            os.close(handle)


def _lock(directory: Path, wait: bool = True) -> int:
    """Lock a directory until the returned handle is closed or this process ends.

    Without ``wait``, raise an OSError if another process holds the lock.

    Where the file system has no locks, a draft goes without. No other save can then lock it and
    take it for a leftover.
    """
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        if not wait:
            os.close(handle)
            raise
    return handle
