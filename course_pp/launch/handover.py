"""What ``on_ranks`` under Slurm leaves in a folder for the node, and what the node leaves there for it.

What is pickled is read by the same user on both ends.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Printed by the node when it has taken a call, by number, and when the call's end lies in the folder.
BEGUN, ENDED = "course_pp begins call", "course_pp ended call"


@dataclass(frozen=True)
class RemoteCall:
    """A call of ``on_ranks`` on its way to a node.

    Attributes:
        n, backend, threads, timeout_s: as given.
        payload: function and arguments, pickled.
        sys_path: of the caller, None if the nodes have an interpreter of their own.
        environ: variables that have changed since the call before, or the job's begin; None if they are gone.
        cwd, argv, sources: of the caller; `sources` are ``linecache`` entries that exist in no file.
        python: version of the caller's interpreter; functions travel between equal ones only.
    """

    n: int
    payload: bytes
    backend: str | None
    threads: int
    timeout_s: float
    sys_path: tuple[str, ...] | None
    environ: Mapping[str, str | None]
    cwd: str
    argv: tuple[str, ...]
    sources: Mapping[str, Any]
    python: tuple[int, int] = sys.version_info[:2]


@dataclass(frozen=True)
class End:
    """How a call ended on the node.

    Attributes:
        results: one pickle a rank, or None if ``raised`` says why there are none.
        raised: exception, its cause and its notes, pickled.
    """

    results: tuple[bytes, ...] | None
    raised: bytes | None = None


def call_file(folder: Path, number: int) -> Path:
    return folder / f"call-{number}"


def end_file(folder: Path, number: int) -> Path:
    return folder / f"end-{number}"


def write(file: Path, value: object) -> None:
    """Write a pickle so that another node sees all of it or nothing. Raises OSError, and leaves nothing then."""
    half = file.with_suffix(".part")
    try:
        half.write_bytes(pickle.dumps(value))
        os.replace(half, file)
    except OSError:
        with contextlib.suppress(OSError):
            half.unlink()
        raise
