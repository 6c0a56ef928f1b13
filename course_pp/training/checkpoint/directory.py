"""The directory that holds a run's checkpoints, and how a checkpoint appears there and is deleted.

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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from course_pp.training.checkpoint.manifest import STATE, is_ours, problems, read_json, sync_directory
from course_pp.training.checkpoint.ranks import CheckpointError, sentence
from course_pp.training.checkpoint.writer import life_of
from course_pp.training.config import SettingError, check_whole

__all__ = [
    "Draft",
    "Retention",
    "check_free",
    "check_writable",
    "is_checkpoint",
    "life_of_run",
    "named",
    "step_directories",
    "step_of",
]

_STEP = re.compile(r"step_(\d{8,})")
_LEFTOVER = re.compile(r"\.step_\d{8,}\.(tmp|old)-\w+")


def named(root: str | os.PathLike[str]) -> Path:
    """Return the directory that ``root`` names.

    Raises:
        CheckpointError: for an empty name, which the system takes for the working directory.
    """
    if not os.fspath(root):
        raise CheckpointError("'' names no directory: give one, such as '.' for the working directory")
    return Path(root)


def step_name(step: int) -> str:
    """Return ``step_00000100``."""
    return f"step_{step:08d}"


def step_of(path: Path) -> int:
    """Return the step in the name of a checkpoint's directory."""
    return int(path.name.removeprefix("step_"))


def step_directories(root: Path) -> list[Path]:
    """Return every directory named as a checkpoint, newest first; whether it is whole is another question.

    Raises:
        CheckpointError: if ``root`` cannot be read.
    """
    with _readable(root):
        found = [path for path in root.iterdir() if _STEP.fullmatch(path.name)] if root.is_dir() else []
    return sorted(found, key=step_of, reverse=True)


def is_checkpoint(path: Path) -> bool:
    """Return True if ``path`` is meant as one checkpoint and not as the directory of a run's.

    Raises:
        CheckpointError: if ``path`` cannot be read.
    """
    with _readable(path):
        return bool(_STEP.fullmatch(path.name)) or (path / "manifest.json").exists() or (path / ".metadata").exists()


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(f"{path} cannot be read ({reason}): ask for access to it, or give another") from error


def check_free(final: Path) -> None:
    """Refuse to write to ``final`` unless nothing is there, or a damaged checkpoint of ours that may make way.

    Raises:
        CheckpointError: if a whole checkpoint is there, one of another version, or something else altogether.
    """
    if not os.path.lexists(final):
        return
    if not problems(final):
        alive = life_of_run(final)
        if alive is not None:
            raise CheckpointError(
                f"{final} is a whole checkpoint already, and {alive}; end that run before you resume from it, or save "
                "to another directory"
            )
        raise CheckpointError(
            f"{final} is a whole checkpoint already: resume from it, remove it, or save to another directory"
        )
    if final.is_symlink() or not is_ours(final):
        raise CheckpointError(
            f"{final} has the name of a checkpoint, but this version has not written it: move it away, or save to "
            "another directory"
        )


def life_of_run(path: Path) -> str | None:
    """As ``life_of``, of the run that wrote a checkpoint; None if the description of the run is illegible."""
    try:
        state = read_json(path / STATE)
    except CheckpointError:
        return None
    return life_of(state.get("writer")) if isinstance(state, dict) else None


def check_writable(root: Path) -> None:
    """Make the directory of a run's checkpoints and try to write there, before hours of training depend on it.

    Raises:
        CheckpointError: if it cannot be made, or written to.
    """
    Draft.open(root, 0).discard()


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay when a new one is complete.

    Attributes:
        keep_last: this many of the newest; None keeps all.
        keep_every: also those whose step is a multiple of this, for ever.
    """

    keep_last: int | None = None
    keep_every: int | None = None

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every"):
            value = getattr(self, name)
            if value is not None:
                check_whole(name, value, 1)
        if self.keep_every is not None and self.keep_last is None:
            sentence = "{keep_every} needs keep_last: without it everything is kept anyway"
            raise SettingError(sentence, {"keep_every": self.keep_every})

    def apply(self, newest: Path) -> None:
        """Delete what need not be kept beside ``newest``, the checkpoint that has just been written.

        Damaged checkpoints are neither counted nor deleted: someone may want to look at them. The same holds for those
        of later steps, which a run has left that went back to an earlier one.
        """
        if self.keep_last is None:
            return
        before = [path for path in step_directories(newest.parent) if step_of(path) < step_of(newest)]
        whole = [path for path in before if not problems(path, checksums=False)]
        for path in whole[self.keep_last - 1 :]:
            if self.keep_every is None or step_of(path) % self.keep_every:
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
            CheckpointError: if something is there that must stay (:func:`check_free`), or nothing can be written.
        """
        draft = cls.open(root, step)
        try:
            check_free(draft.final)
        except BaseException:
            draft.discard()
            raise
        return draft

    @classmethod
    def open(cls, root: Path, step: int) -> "Draft":
        """Make the directory to write to, whatever has the final name.

        Raises:
            CheckpointError: if nothing can be written.
        """
        final = root / step_name(step)
        try:
            root.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(root)
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

    @property
    def final(self) -> Path:
        """The name it gets when it is complete."""
        return self.path.with_name(self.path.name.removeprefix(".").partition(".")[0])

    def publish(self) -> Path:
        """Give the checkpoint its name; a damaged one of that name is removed.

        Raises:
            CheckpointError: if another run has come to the same step meanwhile (:func:`check_free`).
        """
        final = self.final
        check_free(final)
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
    """Delete a checkpoint; rename it first, so that nobody sees half of one."""
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
