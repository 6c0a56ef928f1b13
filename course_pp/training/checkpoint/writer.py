"""Which process wrote a checkpoint, and whether it is still alive.

A process is known by its number, the moment it began, and a digest of the machine's last start: numbers are used again,
and those of other machines or containers mean nothing here. No name of a machine goes into a checkpoint.
"""

import hashlib
import os
from pathlib import Path
from typing import Any

__all__ = ["life_of", "this_process"]


def this_process() -> dict[str, Any] | None:
    """Return what identifies this process; None where the system does not say."""
    machine, started = _machine(), _started(os.getpid())
    return None if machine is None or started is None else {"pid": os.getpid(), "started": started, "machine": machine}


def life_of(writer: object) -> str | None:
    """Say that the process which wrote a checkpoint may be alive; None if it has ended, is this one, or unknown.

    Args:
        writer: what :func:`this_process` gave then.
    """
    if not isinstance(writer, dict) or writer == this_process():
        return None
    pid = writer.get("pid")
    if type(pid) is not int or pid < 1:
        return None
    if writer.get("machine") != _machine():
        return (
            f"the run that wrote it may be alive: process {pid} of another machine, or of this one before it restarted"
        )
    return f"the run that wrote it is alive: process {pid}" if _started(pid) == writer.get("started") else None


def _machine() -> str | None:
    """Return a digest that processes share if they see one another's numbers, until the machine starts anew."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return None
    return hashlib.blake2b(f"{boot}{namespace}".encode(), digest_size=8).hexdigest()


def _started(pid: int) -> int | None:
    """Return when a process began, in clock ticks since the machine did; None if there is none, or it has ended."""
    try:
        # The name in parentheses may hold anything, spaces included.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return None if fields[0] in "ZX" else int(fields[19])
    except (OSError, IndexError, ValueError):
        return None
