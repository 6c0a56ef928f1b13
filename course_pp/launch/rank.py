"""The life of a rank of ``on_ranks``, from the fork on."""

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
from datetime import timedelta
from typing import Any

from course_pp.launch import watch
from course_pp.launch.channel import Left, Raised, RankJob, Returned, Said, dumps, receive, send

_INSIDE = "COURSE_PP_RANK_PID"
# Packages that course_pp.training imports besides torch. Their import starts no thread and reads no
# variable of the environment.
_HARMLESS = {"tokenizers", "xxhash"}


class _Caller:
    """The control connection, shared by the main thread and one that answers questions."""

    def __init__(self, connection: socket.socket, rank: int) -> None:
        self._connection = connection
        self._rank = rank
        self._lock = threading.Lock()
        self._pid = os.getpid()
        threading.Thread(target=self._answer, name="course_pp-watch", daemon=True).start()

    def send(self, message: object) -> None:
        """Send the message. Does nothing in a process that the function forked.

        Raises OSError if the connection is closed.
        """
        if os.getpid() != self._pid:
            return
        data = pickle.dumps(message)
        with self._lock:
            send(self._connection, data)

    def _answer(self) -> None:
        while True:
            try:
                receive(self._connection)
                self.send(watch.report(self._rank))
            except (EOFError, OSError):
                # The caller is gone, and perhaps the server with it.
                watch.end_this_process()


def inside() -> bool:
    """Return whether this process is a rank of ``on_ranks``; a child of a rank is not."""
    return os.environ.get(_INSIDE) == str(os.getpid())


def main(control: int, listener: int | None) -> None:
    """Run the function, send how it ended, and wait to be ended.

    This function never returns. A rank that left would close its connections, and its peers' errors
    about that could reach the caller before the reason does.
    """
    pid = os.getpid()  # fn may fork
    connection = socket.socket(fileno=control)
    job: RankJob = pickle.loads(receive(connection))
    payload = receive(connection)
    caller = _Caller(connection, job.rank)
    # Held until the end: rank 0's store also serves ranks that are slower than rank 0's function.
    stores: list[object] = []
    outcome = _outcome(job, payload, listener, caller=caller, stores=stores)
    if os.getpid() != pid:
        # A child that fn forked has come out of fn, too. Only the rank itself sends a result.
        if isinstance(outcome, Left):
            os._exit(outcome.exit_code)
        if isinstance(outcome, Raised):
            print(outcome.text, file=sys.stderr)
            os._exit(1)
        os._exit(0)
    try:
        caller.send(outcome)
    except OSError as error:
        lost = f"this rank cannot reach its caller any more: {error}. Did fn close descriptors?\n"
        # fn may have closed sys.stderr, too.
        with contextlib.suppress(OSError):
            os.write(2, lost.encode())
        os._exit(1)
    threading.Event().wait()


def _outcome(
    job: RankJob,
    payload: bytes | bytearray,
    listener: int | None,
    caller: _Caller,
    stores: list[object],
) -> Returned | Raised | Left:
    inherited = set(sys.modules)
    try:
        _enter(job)
        stores.append(_join(job, listener))
        try:
            fn, args = pickle.loads(payload)
        except BaseException as e:
            raise TypeError(
                f"fn or its arguments cannot be rebuilt on a rank ({type(e).__name__}: {e}). "
                "Make what only works in one process inside the function."
            ) from e
        caller.send(Said.READY)
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
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
            ctypes.CDLL(None).fflush(None)  # for lines that native code has printed
    _say_over(caller)
    try:
        data = dumps(value)
        # If building the value again fails, hangs or ends the process, let that happen to this
        # process and not to the caller's.
        pickle.loads(data)
    except BaseException as e:
        what = type(value).__qualname__
        error = TypeError(
            f"rank {job.rank} returned a {what} that cannot be sent back ({type(e).__name__}: {e})."
            " Return tensors, numbers, strings or containers of them."
        )
        return _raised(error.with_traceback(e.__traceback__))
    return Returned(data, _own_modules(inherited))


def _say_over(caller: _Caller) -> None:
    # If the connection is gone, sending the outcome will fail too, and `main` reports that.
    with contextlib.suppress(OSError):
        caller.send(Said.OVER)


def _own_modules(inherited: set[str]) -> tuple[str, ...]:
    """Return the modules of this package that this rank imported; the server imports them next.

    Return none if the rank also imported a package that is new to the server. Such a package may
    start threads, which a server that forks must not have, or read the environment of this call.
    The packages of `_HARMLESS` do neither.
    """
    known = {name.partition(".")[0] for name in inherited}
    known |= sys.stdlib_module_names | _HARMLESS | {"course_pp"}
    ours = []
    for name in sys.modules.keys() - inherited:
        package = name.partition(".")[0]
        if package not in known:
            return ()
        if package == "course_pp":
            ours.append(name)
    return tuple(sorted(ours))


def _enter(job: RankJob) -> None:
    """Make this process look like the caller's, as rank ``job.rank``."""
    rank = str(job.rank)
    size = str(job.world_size)
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
        # With this, env:// connects to the store that is there already; else it would bind the port
        # a second time.
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
    # The caller reads UTF-8, whatever the locale of this process is.
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = open(  # noqa: SIM115
            number, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False
        )
        setattr(sys, name, stream)


def _join(job: RankJob, listener: int | None) -> Any:
    """Connect the rank's store, and make the default process group if there is a backend."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(job.threads)
    # At the time limit the caller says which rank hangs. Torch's own limit must not come first.
    timeout = timedelta(seconds=job.timeout_s + 60)
    hosting: dict[str, Any] = {}
    if listener is not None:
        hosting = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listener}
    store = dist.TCPStore("127.0.0.1", job.port, job.world_size, timeout=timeout, **hosting)
    if job.backend is None:
        return store
    if job.backend == "nccl":
        if torch.cuda.device_count() < job.world_size:
            raise ValueError(
                f"backend='nccl' needs a GPU for each rank; here are"
                f" {torch.cuda.device_count()} GPUs for {job.world_size} ranks. Use"
                " backend='gloo', or fewer ranks."
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
        # Many exceptions can be pickled but not built again.
        pickle.loads(blob)
    except BaseException:
        blob = None
    began_elsewhere = bool(getattr(error, "began_elsewhere", False))
    return Raised(blob, summary, text=text, at=at, began_elsewhere=began_elsewhere)
