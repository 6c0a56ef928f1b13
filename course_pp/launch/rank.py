"""What happens in a rank of ``on_ranks``, and the messages between it and the caller."""

from __future__ import annotations

import contextlib
import ctypes
import linecache
import os
import pickle
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from course_pp.launch import channel, watch
from course_pp.launch.pickling import dumps

_INSIDE = "COURSE_PP_RANK_PID"
# What course_pp.training imports besides torch: importing them starts no thread and reads no environment.
_HARMLESS = {"tokenizers", "xxhash"}


@dataclass(frozen=True)
class RankJob:
    """Everything a rank needs besides the function.

    Attributes:
        port: of the store that rank 0 hosts on the loopback address.
        environ, sys_path, cwd, argv: the caller's at the time of the call.
        sources: ``linecache`` entries that exist in no file, such as notebook cells.
        threads: intra-operation threads of torch.
        backend: of the process group, or None for no process group.
        timeout_s: time limit of the call, seconds.
    """

    rank: int
    world_size: int
    port: int
    environ: Mapping[str, str]
    sys_path: tuple[str, ...]
    cwd: str
    argv: tuple[str, ...]
    sources: Mapping[str, Any]
    threads: int
    backend: str | None
    timeout_s: float


@dataclass(frozen=True)
class Ready:
    """The function is about to be called."""


@dataclass(frozen=True)
class Over:
    """The function has returned or raised; its result or exception is pickled and sent next."""


@dataclass(frozen=True)
class Returned:
    """The function returned.

    Attributes:
        value: pickled.
        imported: modules of this package that the rank had to import, because the process it was forked from had not.
    """

    value: bytes
    imported: tuple[str, ...] = ()


@dataclass(frozen=True)
class Raised:
    """The function raised.

    Attributes:
        exception: pickled, or None where it cannot be.
        summary: ``Type: message``.
        text: the rank's traceback.
        at: monotonic clock, seconds; comparable between processes of one machine.
        began_elsewhere: whether the exception itself says that another rank failed first.
    """

    exception: bytes | None
    summary: str
    text: str
    at: float
    began_elsewhere: bool = False


@dataclass(frozen=True)
class Left:
    """The function called ``sys.exit``."""

    exit_code: int


@dataclass(frozen=True)
class Ask:
    """From the caller: say what you are doing."""


class ControlEnd:
    """A rank's end of the control connection; the main thread and the watching thread both write to it."""

    def __init__(self, connection: socket.socket, rank: int) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._rank = rank
        self._pid = os.getpid()
        threading.Thread(target=self._answer, name="course_pp-watch", daemon=True).start()

    def send(self, message: object) -> None:
        """Send it, but nothing from a process that the function forked. Raises OSError if the connection is closed."""
        if os.getpid() != self._pid:
            return
        data = pickle.dumps(message)
        with self._lock:
            channel.send(self._connection, data)

    def _answer(self) -> None:
        while True:
            try:
                channel.receive(self._connection)
                self.send(watch.report(self._rank))
            except (EOFError, OSError):
                # The caller is gone, and perhaps the server with it.
                watch.end_this_process()


def inside() -> bool:
    """Return whether this process is a rank of ``on_ranks``; a child of a rank is not."""
    return os.environ.get(_INSIDE) == str(os.getpid())


def main(control: int, listener: int | None) -> None:
    """Run the function, send how it ended, and wait to be ended.

    It never returns of itself: a rank that left would close its connections, and its peers' errors about that
    could reach the caller before the reason does.
    """
    pid = os.getpid()  # fn may fork
    connection = socket.socket(fileno=control)
    job: RankJob = pickle.loads(channel.receive(connection))
    payload = channel.receive(connection)
    caller = ControlEnd(connection, job.rank)
    # Held here until the end: rank 0's store serves ranks that are slower than rank 0's function.
    stores: list[object] = []
    outcome = _outcome(job, payload, listener, caller, stores)
    if os.getpid() != pid:
        _end_child(outcome)
    try:
        caller.send(outcome)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.write(2, f"this rank cannot reach its caller any more: {error}. Did fn close descriptors?\n".encode())
        os._exit(1)
    threading.Event().wait()


def _end_child(outcome: Returned | Raised | Left) -> None:
    """End a child that fn forked and that came out of fn, too: only the rank itself sends a result."""
    if isinstance(outcome, Raised):
        print(outcome.text, file=sys.stderr)
    os._exit(outcome.exit_code if isinstance(outcome, Left) else isinstance(outcome, Raised))


def _outcome(
    job: RankJob, payload: bytes | bytearray, listener: int | None, caller: ControlEnd, stores: list[object]
) -> Returned | Raised | Left:
    inherited = set(sys.modules)
    try:
        _enter(job)
        stores.append(_join(job, listener))
        fn, args = _unpickled(payload)
        caller.send(Ready())
        value = fn(job.rank, *args)
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
        if isinstance(e.code, str):
            print(e.code, file=sys.stderr)
        return Left(code)
    except BaseException as e:
        _say_over(caller)
        return _raised(e)
    finally:
        _flush()
    _say_over(caller)
    try:
        data = dumps(value)
        # What cannot be built again, never comes to an end of it, or ends the process, does so here and not there.
        pickle.loads(data)
    except BaseException as e:
        what = type(value).__qualname__
        error = TypeError(
            f"rank {job.rank} returned a {what} that cannot be sent back ({type(e).__name__}: {e}). "
            "Return tensors, numbers, strings or containers of them."
        )
        return _raised(error.with_traceback(e.__traceback__))
    return Returned(data, _own_modules(inherited))


def _say_over(caller: ControlEnd) -> None:
    # Whoever cannot say this will hear so again with the outcome.
    with contextlib.suppress(OSError):
        caller.send(Over())


def _unpickled(payload: bytes | bytearray) -> tuple[Any, tuple[Any, ...]]:
    try:
        fn, args = pickle.loads(payload)
    except BaseException as error:
        raise TypeError(
            f"fn or its arguments cannot be rebuilt on a rank ({type(error).__name__}: {error}). "
            "Make what only works in one process inside the function."
        ) from error
    return fn, args


def _own_modules(inherited: set[str]) -> tuple[str, ...]:
    """Return the modules of this package that this rank imported; none if they imported another package, too.

    The server imports them for the next call. Another package may start threads, which a server that forks must not
    have, or read the environment of this call; those of `_HARMLESS` do neither.
    """
    own = _top(__name__)
    new = sys.modules.keys() - inherited
    known = {_top(name) for name in inherited} | sys.stdlib_module_names | _HARMLESS | {own}
    if any(_top(name) not in known for name in new):
        return ()
    return tuple(sorted(name for name in new if _top(name) == own))


def _top(module: str) -> str:
    return module.partition(".")[0]


def _enter(job: RankJob) -> None:
    """Make this process look like the caller's, as rank ``job.rank``."""
    rank, size = str(job.rank), str(job.world_size)
    os.environ.clear()
    os.environ.update(job.environ)
    os.environ.update(
        RANK=rank,
        LOCAL_RANK=rank,
        WORLD_SIZE=size,
        LOCAL_WORLD_SIZE=size,
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(job.port),
        OMP_NUM_THREADS=str(job.threads),
        # Makes env:// connect to the store that is already there instead of binding the port again.
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="0",
    )
    os.environ[_INSIDE] = str(os.getpid())
    # Looking up the machine's own name fails on laptops that change networks.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    sys.path[:] = job.sys_path
    sys.argv[:] = job.argv
    os.chdir(job.cwd)
    linecache.cache.update(job.sources)
    # The caller reads UTF-8, whatever the locale.
    for number, name in ((1, "stdout"), (2, "stderr")):
        setattr(sys, name, open(number, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False))  # noqa: SIM115


def _join(job: RankJob, listener: int | None) -> Any:
    """Connect the rank's store and, unless ``job.backend`` is None, make the default process group."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(job.threads)
    # The watchdog answers at the time limit; the group's own must not come first.
    timeout = timedelta(seconds=job.timeout_s + 60)
    if listener is None:
        store = dist.TCPStore("127.0.0.1", job.port, job.world_size, False, timeout)
    else:
        store = dist.TCPStore(
            "127.0.0.1",
            job.port,
            job.world_size,
            True,
            timeout,
            wait_for_workers=False,
            master_listen_fd=listener,
        )
    if job.backend is not None:
        if job.backend == "nccl":
            if torch.cuda.device_count() < job.world_size:
                raise ValueError(
                    f"backend='nccl' needs a GPU a rank; here are {torch.cuda.device_count()} GPUs for "
                    f"{job.world_size} ranks. Use backend='gloo', or fewer ranks."
                )
            torch.cuda.set_device(job.rank)
        dist.init_process_group(
            job.backend,
            store=dist.PrefixStore("on_ranks", store),
            rank=job.rank,
            world_size=job.world_size,
            timeout=timeout,
        )
    return store


def _raised(error: BaseException) -> Raised:
    at = time.monotonic()
    own_frames = error.__traceback__.tb_next if error.__traceback__ else None
    text = "".join(traceback.format_exception(type(error), error, own_frames))
    text = re.sub(r'File "[^"]*(?:ipykernel_|<ipython-input)[^"]*", line', "Cell, line", text)
    summary = "".join(traceback.format_exception_only(error)).strip()
    try:
        blob = dumps(error)
        # Many an exception class pickles and then cannot be built again.
        pickle.loads(blob)
    except BaseException:
        blob = None
    return Raised(blob, summary, text, at, bool(getattr(error, "began_elsewhere", False)))


def _flush() -> None:
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
        ctypes.CDLL(None).fflush(None)


def listening_socket() -> socket.socket:
    """Return a socket that listens on a free port of the loopback address, for the store of rank 0."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", 0))
    listener.listen(socket.SOMAXCONN)
    return listener
