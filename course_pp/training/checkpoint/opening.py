"""Finding a whole checkpoint, and reading its descriptions: what it holds, and of which run."""

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from course_pp.arguments import checked
from course_pp.training.checkpoint._torch import Metadata, TensorStorageMetadata
from course_pp.training.checkpoint.description import open_metadata
from course_pp.training.checkpoint.directory import is_checkpoint, step_directories
from course_pp.training.checkpoint.manifest import STATE, problems, read_json, read_manifest, spelled
from course_pp.training.checkpoint.ranks import CheckpointError, Ranks
from course_pp.training.checkpoint.state import Group

__all__ = ["Opened", "find_latest", "open_checkpoint", "open_together"]


@dataclass(frozen=True)
class Opened:
    """A checkpoint whose descriptions have been read, and no tensor yet."""

    path: Path
    metadata: Metadata
    state: dict[str, Any]

    def entry(self, key: str) -> TensorStorageMetadata | None:
        """Return the shape and dtype of a tensor; None if it is not there."""
        entry = self.metadata.state_dict_metadata.get(key)
        return entry if isinstance(entry, TensorStorageMetadata) else None

    def first_name(self, name: str) -> str:
        """Return the name under which a weight was saved; its own, unless that is another name of a tied weight."""
        aliases = self.state.get("tied", {})
        for _ in aliases:
            name = aliases.get(name, name)
        return name

    @property
    def keys(self) -> list[str]:
        """The keys of all tensors."""
        return list(self.metadata.state_dict_metadata)

    @property
    def groups(self) -> list[Group] | None:
        """The optimizer's groups; None if no optimizer was saved."""
        saved = self.state["optimizer"]
        return None if saved is None else [Group(**group) for group in saved["groups"]]


@checked
def find_latest(root: str | os.PathLike[str]) -> Path | None:
    """Return the newest whole checkpoint in ``root``, found by reading every byte of it; None if there is none at all.

    Newer ones that are damaged are named in a warning.

    Raises:
        CheckpointError: if there are checkpoints, but none is whole: starting anew is then for a person to decide; if
            ``root`` cannot be read.
    """
    return _newest(Path(root), lambda: step_directories(Path(root)), _problems_now, warn=True)


def open_checkpoint(path: str | os.PathLike[str]) -> Opened:
    """Read the descriptions in a checkpoint, or in the newest whole one of a run, in this process alone.

    Raises:
        CheckpointError: if it is damaged, or holds anything that is not a tensor or JSON.
    """
    opened = open_together(Path(path), Ranks(alone=True))
    if opened is None:
        raise CheckpointError(f"{path} holds no checkpoint: give a directory that save has written to")
    return opened


def open_together(path: Path, ranks: Ranks) -> Opened | None:
    """Find, check and describe a checkpoint, if there is one; the ranks share the reading of its bytes."""

    def check(candidate: Path) -> list[str] | None:
        found = ranks.each(lambda: _problems_now(candidate, ranks.rank, ranks.size))
        return None if None in found else sorted({problem for mine in found for problem in mine or ()})

    # Listed on one rank: a save that is going on must not show itself to some ranks only.
    if not ranks.first(lambda: is_checkpoint(path)):
        newest = _newest(path, lambda: ranks.first(lambda: step_directories(path)), check, warn=ranks.rank == 0)
        if newest is None:
            return None
        path = newest
    elif (found := check(path)) is None or found:
        raise CheckpointError(spelled(path, found or ["there is no such directory"]))
    opened: list[Opened] = []
    ranks.each(lambda: opened.append(_describe(path)))
    return opened[0]


def _describe(path: Path) -> Opened:
    _, files = read_manifest(path)
    return Opened(path, open_metadata(path, files), _state_of(path))


def _problems_now(path: Path, part: int = 0, n_parts: int = 1) -> list[str] | None:
    """As :func:`problems`; None if a run has deleted the checkpoint since it was listed, or while it was read."""
    found = problems(path, part, n_parts)
    return found if not found or os.path.lexists(path) else None


def _newest(
    root: Path, listed: Callable[[], Sequence[Path]], check: Callable[[Path], list[str] | None], warn: bool
) -> Path | None:
    """Return the first of ``listed`` that is whole; list again if one has vanished, as a newer one has come then."""
    damaged: list[str] = []
    candidates = iter(listed())
    while (path := next(candidates, None)) is not None:
        found = check(path)
        if found is None:
            damaged, candidates = [], iter(listed())
        elif found:
            damaged.append(spelled(path, found))
        else:
            if damaged and warn:
                warnings.warn(f"using {path}, because newer ones are not whole: {'; '.join(damaged)}", stacklevel=4)
            return path
    if damaged:
        raise CheckpointError(
            f"none of the checkpoints in {root} is whole ({'; '.join(damaged)}): "
            "restore one from a copy, or start anew in another directory"
        )
    return None


def _state_of(path: Path) -> dict[str, Any]:
    try:
        state = read_json(path / STATE)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    expected = {"step": int, "seed": int, "extra": dict, "layout": dict, "config": (dict, type(None))}
    sound = isinstance(state, dict) and all(isinstance(state.get(key), kind) for key, kind in expected.items())  # type: ignore[arg-type]
    sound = sound and isinstance(state.get("optimizer", 0), dict | None) and _are_names(state.get("tied", {}))
    if not sound:
        raise CheckpointError(f"{path}: {STATE} is damaged: entries are missing or make no sense")
    return state


def _are_names(aliases: object) -> bool:
    return isinstance(aliases, dict) and all(isinstance(first, str) for first in aliases.values())
