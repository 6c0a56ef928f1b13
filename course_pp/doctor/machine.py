"""Checks of the operating system: memory, disk, files, processes, ports, clocks, a home folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from course_pp.doctor.finding import Check, Finding, right, wrong

_GIB = 2**30
_MIB = 2**20
OLDEST_PYTHON = (3, 11)
SHARED_MEMORY = Path("/dev/shm")
# Eight ranks and JupyterLab: the largest notebooks at their peak.
_MEMORY_BYTES = 3 * _GIB
_DISK_BYTES = 500 * _MIB
_SHARED_BYTES = 64 * _MIB
# JupyterLab holds about 100, its kernel 60, `on_ranks(8)` 40 more.
_OPEN_FILES = 256
_PROCESSES = 256
_CONNECT_S = 2.0
_CLOCK_S = 1.0
_STEP_S = 0.01
_LATE_S = 0.01
_NETWORK = ("nfs", "lustre", "gpfs", "beegfs", "cifs", "smb", "ceph", "fuse", "9p", "afs")
_EIGHT_RANKS = "notebooks 02 to 04 and 08, which start up to 8 ranks"
_ROOT = Path("/sys/fs/cgroup")
_OURS = Path("/proc/self/cgroup")
# In version 1 of control groups "no limit" is the largest multiple of a page.
_NO_LIMIT = 2**60
# Names of the limit, of the use, and of the part of the use that is copies of files. The system
# drops such copies when it needs room. Version 2 of control groups stands first, then version 1.
_MEMORY = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def python(version: tuple[int, ...] = tuple(sys.version_info[:3])) -> Finding:
    says = f"{'.'.join(map(str, version))} at {sys.executable}"
    if version[:2] < OLDEST_PYTHON:
        remedy = "make clean lab PYTHON=python3.11"
        return wrong("Python", f"{says} is too old", breaks="all notebooks", remedy=remedy)
    return right("Python", says)


def memory() -> Finding:
    # A process can get the memory that the system has left, but no more than its container allows.
    found = [value for value in (_available(), memory_left()) if value is not None]
    if not found:
        return right("memory", "not known on this system; eight ranks need 3 GiB")
    free = min(found)
    says = f"{free / _GIB:.1f} GiB free, {_MEMORY_BYTES / _GIB:.0f} GiB needed"
    if free < _MEMORY_BYTES:
        breaks = f"{_EIGHT_RANKS}: the system kills a rank"
        remedy = "close other programs, or ask for a larger machine or job"
        return wrong("memory", says, breaks=breaks, remedy=remedy)
    return right("memory", says)


def _available() -> int | None:
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def shared_memory() -> Finding:
    """Say whether /dev/shm takes files.

    Semaphores and tensors that processes of one machine share lie there.
    """
    name = "shared memory"
    if not sys.platform.startswith("linux"):
        return right(name, "not needed on this system")
    breaks = (
        "NCCL between GPUs of one machine, and training with data workers (workers > 0); the"
        " notebooks run"
    )
    remedy = (
        "in a container, start it with --shm-size=1g or --ipc=host; else mount -t tmpfs tmpfs"
        " /dev/shm"
    )
    if not SHARED_MEMORY.is_dir():
        return wrong(name, f"there is no {SHARED_MEMORY}", breaks=breaks, remedy=remedy)
    try:
        _write(SHARED_MEMORY)
    except OSError as error:
        says = f"{SHARED_MEMORY} takes no file ({error.strerror})"
        return wrong(name, says, breaks=breaks, remedy=remedy)
    free = shutil.disk_usage(SHARED_MEMORY).free
    if free < _SHARED_BYTES:
        says = f"only {free / _MIB:.0f} MiB free in {SHARED_MEMORY}"
        return wrong(name, says, breaks=breaks, remedy=remedy)
    return right(name, f"{free / _GIB:.1f} GiB free in {SHARED_MEMORY}")


def disk() -> list[Finding]:
    here = _place(
        "disk here",
        Path.cwd,
        breaks="notebook 09, which writes checkpoints beside itself, and saving any notebook",
        remedy=(
            "free some, or copy the course to another disk: python -m course_pp lab --folder FOLDER"
        ),
    )
    temporary = _place(
        "disk for temporary files",
        lambda: Path(tempfile.gettempdir()),
        breaks="every on_ranks, check and %torchrun, so all notebooks",
        remedy="free some, or set TMPDIR to a folder with space",
    )
    return [here, temporary]


def _place(name: str, find: Callable[[], Path], breaks: str, remedy: str) -> Finding:
    folder: Path | str = "this machine"
    try:
        # Even looking for the folder fails if no temporary folder takes a file.
        folder = find()
        _write(folder)
    except OSError as error:
        says = f"{folder} takes no file ({error.strerror or error})"
        return wrong(name, says, breaks=breaks, remedy=remedy)
    free = shutil.disk_usage(folder).free
    if free < _DISK_BYTES:
        says = f"only {free / _MIB:.0f} MiB free in {folder}, {_DISK_BYTES / _MIB:.0f} MiB needed"
        return wrong(name, says, breaks=breaks, remedy=remedy)
    return right(name, f"{free / _GIB:.1f} GiB free in {folder}")


def _write(folder: Path) -> None:
    """Write a megabyte and remove it again. Only writing shows that a quota is used up."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(_MIB))
        file.flush()
        os.fsync(file.fileno())


def home() -> Finding:
    """Say whether progress can be kept: in a folder that exists, takes files, and locks them."""
    name = "progress file"
    remedy = "set COURSE_PP_PROGRESS to a file that can be written, on a local disk"
    breaks = "nothing stops, but what check(...) finds is forgotten, in all notebooks"
    path = Path(os.environ.get("COURSE_PP_PROGRESS") or os.environ.get("XDG_STATE_HOME") or "~")
    with contextlib.suppress(RuntimeError):
        path = path.expanduser()
    if str(path).startswith("~"):  # as it does if the user has no home
        return wrong(name, "there is no home folder", breaks=breaks, remedy=remedy)
    folder = path if path.is_dir() else path.parent
    while not folder.exists():
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        says = f"{folder} takes no locked file ({error.strerror})"
        return wrong(name, says, breaks=breaks, remedy=remedy)
    return right(name, f"can be kept below {folder}")


def open_files() -> Finding:
    """Say whether a process may open enough files.

    A rank needs one for each other rank, and some in its caller.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return right("open files", "any number allowed")
    if soft >= _OPEN_FILES:
        return right("open files", f"{soft} allowed")
    remedy = f"raise the hard limit of {hard} (limits.conf)"
    if hard == resource.RLIM_INFINITY or hard >= _OPEN_FILES:
        remedy = "ulimit -n 4096 before make lab"
    says = f"a process may open {soft}, {_OPEN_FILES} needed"
    return wrong("open files", says, breaks=f"JupyterLab, and {_EIGHT_RANKS}", remedy=remedy)


def processes() -> Finding:
    """Say whether enough processes and threads may be started.

    Each rank is one process with about ten threads.
    """
    limits = []
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    # The limit does not hold for root.
    if soft != resource.RLIM_INFINITY and os.getuid() != 0:
        limits.append(soft - _threads_of_this_user())
    if (left := processes_left()) is not None:
        limits.append(left)
    if not limits:
        return right("processes", "no limit")
    left = min(limits)
    says = f"{left} more may be started, {_PROCESSES} needed with their threads"
    if left < _PROCESSES:
        remedy = "end other programs, or raise ulimit -u"
        return wrong("processes", says, breaks=_EIGHT_RANKS, remedy=remedy)
    return right("processes", says)


def _threads_of_this_user() -> int:
    count = 0
    user = os.getuid()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if process.stat().st_uid == user:
                count += len(os.listdir(process / "task"))
    return count


def ports() -> Finding:
    """Say whether a process can connect to another on this machine, as ranks and the kernel do."""
    name = "ports"
    breaks = "every rank and every kernel, so all notebooks"
    remedy = (
        "let the firewall pass the loopback interface (127.0.0.1), and bring it up: ip link set"
        " lo up"
    )
    try:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            listener.settimeout(_CONNECT_S)
            port = listener.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), _CONNECT_S) as near:
                far, _ = listener.accept()
                with far:
                    near.sendall(b"x")
                    far.settimeout(_CONNECT_S)
                    far.recv(1)
    except TimeoutError:
        says = f"messages to 127.0.0.1 are dropped: no answer in {_CONNECT_S:.0f} s"
        return wrong(name, says, breaks=breaks, remedy=remedy)
    except OSError as error:
        says = f"nothing reaches 127.0.0.1 ({error.strerror})"
        return wrong(name, says, breaks=breaks, remedy=remedy)
    return right(name, f"a message to 127.0.0.1:{port} arrives")


def host_name() -> Finding:
    """Say whether this machine finds itself by its name, as gloo and torchrun look it up."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        says = f"{name!r} has no address"
        breaks = "%torchrun cells of all notebooks, which wait or fail"
        remedy = f"add the line 127.0.1.1 {name} to /etc/hosts, or set GLOO_SOCKET_IFNAME=lo"
        return wrong("host name", says, breaks=breaks, remedy=remedy)
    return right("host name", f"{name} is {address}")


def clock() -> Finding:
    """Say whether the clock steps, and whether a sleep ends in time, as emulated ranks need."""
    wall = time.time()
    steady = time.monotonic()
    late = []
    while time.monotonic() < steady + _CLOCK_S:
        begun = time.monotonic()
        time.sleep(0.02)
        late.append(time.monotonic() - begun - 0.02)
    step = (time.time() - wall) - (time.monotonic() - steady)
    if abs(step) > _STEP_S:
        says = (
            f"the time of day moved by {step * 1e3:.0f} ms against the steady clock in"
            f" {_CLOCK_S:.0f} s"
        )
        breaks = "times in logs and make (no notebook)"
        return wrong("clock", says, breaks=breaks, remedy="wait until NTP has settled")
    late.sort()
    typical = late[len(late) // 2]
    says = (
        f"no step in {_CLOCK_S:.0f} s; a sleep of 20 ms ends {max(0.0, typical) * 1e3:.1f} ms late"
    )
    if typical > _LATE_S:
        breaks = (
            "no cell, but emulated timelines of notebooks 02 to 06 and 11 show more idle time than"
            " the prose says"
        )
        return wrong("clock", says, breaks=breaks, remedy="close what else runs here")
    return right("clock", says)


def cores() -> Finding:
    n = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        # A job on Linux may have only a part of the cores.
        n = len(os.sched_getaffinity(0))
    if n < 2:
        breaks = "no cell, but measured timelines of notebooks 01 and 07 to 09 show no speed-up"
        remedy = "take a machine or job with 2 cores"
        return wrong("cores", "one: ranks take turns", breaks=breaks, remedy=remedy)
    return right("cores", f"{n}, which {n} ranks can use at once")


def shared_folder() -> Finding:
    """Say on which kind of file system the course lies. Every node of a cluster must see it."""
    here = Path.cwd()
    kind = _file_system(here)
    if kind is None:
        return right("file system", f"of unknown kind at {here}")
    if kind.startswith(_NETWORK):
        return right("file system", f"{kind} at {here}, shared")
    return right("file system", f"{kind} at {here}, of this machine alone")


def _file_system(folder: Path) -> str | None:
    """Return the kind of the mount that holds ``folder``; None on a system without /proc."""
    best: tuple[int, str] | None = None
    with contextlib.suppress(OSError):
        for line in Path("/proc/mounts").read_text().splitlines():
            _, point, kind, *_ = line.split()
            where = point.replace("\\040", " ")
            # The longest point is the innermost mount. Of two at one point the later one covers
            # the other.
            if folder.is_relative_to(where) and (best is None or len(where) >= best[0]):
                best = len(where), kind
    return best and best[1]


# A container or a job may have limits. They stand in control groups, of version 1 or 2, at every
# level above this process.


def memory_left(root: Path = _ROOT, ours: Path = _OURS) -> int | None:
    """Return the bytes until the nearest limit; None without a limit."""
    left = []
    for group in _levels("memory", root, ours):
        for limit, used, droppable in _MEMORY:
            # ValueError: in version 2 "no limit" is the word "max".
            with contextlib.suppress(OSError, ValueError):
                most = int((group / limit).read_text())
                in_use = int((group / used).read_text())
                lines = (group / "memory.stat").read_text().splitlines()
                counted = dict(line.split() for line in lines)
                if most < _NO_LIMIT:
                    left.append(most - in_use + int(counted.get(droppable, 0)))
    return min(left, default=None)


def processes_left(root: Path = _ROOT, ours: Path = _OURS) -> int | None:
    """Return how many processes and threads the nearest limit leaves; None without a limit."""
    left = []
    for group in _levels("pids", root, ours):
        with contextlib.suppress(OSError, ValueError):
            most = int((group / "pids.max").read_text())
            in_use = int((group / "pids.current").read_text())
            left.append(most - in_use)
    return min(left, default=None)


def _levels(controller: str, root: Path, ours: Path) -> Iterator[Path]:
    """Yield the folders of this process's group and of all groups above it, which limit it too.

    A container may see its own group as the root, although /proc tells the path on its host.
    """
    bases = {root, root / "unified", root / controller}
    with contextlib.suppress(OSError):
        for line in ours.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            # Version 1 names its controllers, version 2 does not.
            mounts = (root, root / "unified")
            if controllers:
                mounts = (root / controllers, root / controller)
            below = Path(path.lstrip("/"))
            for mount in mounts:
                bases.add(mount / below)
                bases.update(mount / parent for parent in below.parents)
    yield from sorted(bases)


CHECKS = (
    Check("Python", python),
    Check("cores", cores),
    Check("memory", memory, _EIGHT_RANKS),
    Check("shared memory", shared_memory, "training with data workers"),
    Check("disk", disk, "notebook 09, and saving any notebook"),
    Check("progress file", home, "what check(...) remembers"),
    Check("open files", open_files, _EIGHT_RANKS),
    Check("processes", processes, _EIGHT_RANKS),
    Check("ports", ports, "all notebooks"),
    Check("host name", host_name, "%torchrun cells of all notebooks"),
    Check("clock", clock, "emulated timelines of notebooks 02 to 06 and 11"),
    Check("file system", shared_folder, "jobs on several nodes"),
)
