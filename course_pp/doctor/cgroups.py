"""What control groups leave: limits of a container or a job, at every level above this process, in either version."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

_ROOT, _OURS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# Version 1 writes a limit that nobody set as the largest multiple of a page.
_NO_LIMIT = 2**60
# Limit, use, and what of the use are copies of files, which the system drops where it needs room.
_MEMORY = (("memory.max", "memory.current", "inactive_file"),
           ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"))  # fmt: skip


def memory_left(root: Path = _ROOT, ours: Path = _OURS) -> int | None:
    """Return the bytes until the nearest limit; None without a limit."""
    left = []
    for group in _levels("memory", root, ours):
        for limit, used, droppable in _MEMORY:
            with contextlib.suppress(OSError, ValueError):
                most = int((group / limit).read_text())
                counted = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                if most < _NO_LIMIT:
                    left.append(most - int((group / used).read_text()) + int(counted.get(droppable, 0)))
    return min(left, default=None)  # no limit is the word "max"


def processes_left(root: Path = _ROOT, ours: Path = _OURS) -> int | None:
    """Processes and threads until the nearest limit; None without a limit."""
    left = []
    for group in _levels("pids", root, ours):
        with contextlib.suppress(OSError, ValueError):
            left.append(int((group / "pids.max").read_text()) - int((group / "pids.current").read_text()))
    return min(left, default=None)


def _levels(controller: str, root: Path, ours: Path) -> Iterator[Path]:
    """Yield the folders of this process's group and of all above it, which limit it too.

    A container may see its own group as the root, and still read the path that its host gave it.
    """
    bases = {root, root / "unified", root / controller}
    with contextlib.suppress(OSError):
        for line in ours.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            mounts = (root / controllers, root / controller) if controllers else (root, root / "unified")
            for mount in mounts:
                below = Path(path.lstrip("/"))
                bases |= {mount / each for each in (below, *below.parents)}
    yield from sorted(bases)
