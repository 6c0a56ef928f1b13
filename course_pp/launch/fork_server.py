"""The process that ranks are forked from, and its caller's end.

Importing torch costs more than a second, so it is paid once: this process imports torch, starts no
thread, and forks a rank for each request. The fork server of ``multiprocessing`` cannot stand in
for it. There a child outlives a caller that is killed, nobody ends the processes that a child
started, and all calls of a process share one server with the environment of the first call.

A request to fork is one byte on the server's socket. The rank's file descriptors travel with it:
control socket, life socket, standard output and error and, for the rank that hosts the store, a
listening socket. Once the rank has ended, the server writes its exit status to the life socket.
When the other end of a life socket closes, on purpose or because the caller was killed, the server
ends the rank's process group. Only the server reaps ranks, so it never signals a process id that
the system has given to another process.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import importlib
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator

from course_pp.base.imports import imports_that_stay
from course_pp.launch.errors import LaunchError

_FORK, _PRELOAD = b"f", b"p"
STATUS = struct.Struct("i")
_LENGTH = struct.Struct("I")
_FEWEST_DESCRIPTORS, _MOST_DESCRIPTORS = 4, 5
_CHECK_PARENT_S = 2.0
_END_LIMIT_S = 10.0
_HUGE_PAGE = 2 << 20
_MADV_COLLAPSE = 25
_PR_SET_CHILD_SUBREAPER = 36
# The path comes on standard input: an argument has at most 128 KiB, which some paths exceed.
_BEGIN = """
import json, sys
sys.path[:] = json.load(sys.stdin)
from course_pp.launch.fork_server import serve
serve(int(sys.argv[1]))
"""


def search_path() -> list[str]:
    """Return ``sys.path`` without entries that the import system skips or cannot look into."""
    return [entry for entry in sys.path if isinstance(entry, str) and "\0" not in entry]


class ForkServer:
    """The caller's end of the process that forks ranks."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.warm = False
        self._last_words = ""
        self._lock = threading.Lock()
        with contextlib.ExitStack() as opened:
            self._socket, theirs = map(opened.enter_context, socket.socketpair())
            self._errors = opened.enter_context(tempfile.TemporaryFile())
            path = opened.enter_context(tempfile.TemporaryFile("w+"))
            json.dump(search_path(), path)
            path.seek(0)
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BEGIN, str(theirs.fileno())],
                stdin=path,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "MKL_NUM_THREADS": "1",
                    "OPENBLAS_NUM_THREADS": "1",
                },
                pass_fds=[theirs.fileno()],
                # Away from the terminal's interrupts: the caller decides when ranks end.
                start_new_session=True,
            )
            path.close()
            theirs.close()
            self._open = opened.pop_all()

    def fork(self, fds: list[int]) -> None:
        try:
            with self._lock:
                socket.send_fds(self._socket, [_FORK], fds)
        except OSError as e:
            raise self.lost() from e

    def preload(self, modules: tuple[str, ...]) -> None:
        names = " ".join(modules).encode()
        with self._lock, contextlib.suppress(OSError):
            self._socket.sendall(_PRELOAD + _LENGTH.pack(len(names)) + names)

    def lost(self) -> LaunchError:
        self.stop()
        because = f": {self._last_words}" if self._last_words else ""
        return LaunchError(
            f"the process that starts ranks ended{because}."
            f" Check that `{sys.executable} -c 'import torch.distributed.pipelining'` works, then"
            " call again."
        )

    def stop(self) -> None:
        """End the process. It ends by itself when the socket closes, unless it is stuck."""
        self._socket.close()
        try:
            self.process.wait(_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            # A debugger has stopped it, or an import does not come to an end.
            self.process.kill()
            self.process.wait()
        if not self._errors.closed:
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").strip().splitlines()
            self._last_words = lines[-1] if lines else ""
        self._open.close()


class ForkServers:
    """Holds at most one server a process; starts one when it is needed and there is none."""

    def __init__(self) -> None:
        self._server: ForkServer | None = None
        atexit.register(self.stop)

    def get(self) -> ForkServer:
        server = self._server
        # After a fork the server belongs to the parent process.
        if server is None or server.owner != os.getpid() or server.process.poll() is not None:
            self.stop()
            server = self._server = ForkServer()
        return server

    def stop(self) -> None:
        if self._server is not None and self._server.owner == os.getpid():
            self._server.stop()
            self._server = None

    def pid(self) -> int | None:
        return None if self._server is None else self._server.process.pid


SERVERS = ForkServers()


def serve(sock_fd: int) -> None:
    """Fork ranks until the caller at the other end of ``sock_fd`` is gone; then end all ranks."""
    parent = os.getppid()
    # If the caller blocked SIGCHLD we would never learn that a rank has ended.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    # Some modules of torch ask for GPUs while they are imported. They must ask NVML: once they have
    # asked the CUDA runtime, no process forked from here can use it. Ranks never see the variable,
    # because they get the environment of their call.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    with _importing_for_ranks():
        import cloudpickle  # noqa: F401
        import torch.distributed.pipelining  # noqa: F401

        from course_pp.launch import rank, watch  # noqa: F401

        watch.instrument(sys.modules["torch.distributed.distributed_c10d"])
    if sys.platform.startswith("linux"):
        # A process that a rank started and left behind becomes a child of this one, whatever group
        # or session it moved to. So we can find it and end it.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    _Forker(socket.socket(fileno=sock_fd), parent).run()


class _Forker:
    """The server itself: forks, ends and reaps ranks. Single-threaded, so that forking is safe."""

    def __init__(self, requests: socket.socket, parent: int) -> None:
        self._requests = requests
        self._parent = parent
        self._lives: dict[int, socket.socket] = {}
        self._preloaded: dict[str, float] = {}
        self._selector = selectors.DefaultSelector()
        # SIGCHLD writes to this pipe, so that one `select` waits for ranks and for sockets.
        self._child_read, self._child_write = os.pipe()
        os.set_blocking(self._child_write, False)
        os.set_blocking(self._child_read, False)
        self._selector.register(requests, selectors.EVENT_READ)
        self._selector.register(self._child_read, selectors.EVENT_READ)

    def run(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # Only a signal that has a handler wakes the pipe.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._child_write, warn_on_full_buffer=False)
        try:
            # A child of the caller may hold our socket open when the caller is dead, so we also
            # look whether the caller is still our parent.
            while os.getppid() == self._parent:
                for key, _ in self._selector.select(_CHECK_PARENT_S):
                    if key.fileobj is self._requests:
                        if not self._answer():
                            return
                    elif key.fd == self._child_read:
                        self._reap()
                    else:
                        self._end(key.data)
        finally:
            for pid in self._lives:
                _end_group(pid)
                os.waitpid(pid, 0)
            _end_orphans()

    def _answer(self) -> bool:
        """Serve one request; return False once the caller is gone."""
        data, fds, _, _ = socket.recv_fds(self._requests, 1, _MOST_DESCRIPTORS)
        if data == _FORK:
            # The system drops descriptors for which this process has no room.
            if len(fds) < _FEWEST_DESCRIPTORS:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            self._forget_what_changed()
            self._fork_rank(fds)
        elif data == _PRELOAD:
            (length,) = _LENGTH.unpack(self._requests.recv(_LENGTH.size, socket.MSG_WAITALL))
            self._preload(self._requests.recv(length, socket.MSG_WAITALL).decode().split())
        return bool(data)

    def _preload(self, modules: list[str]) -> None:
        before = set(sys.modules)
        with _importing_for_ranks():
            for name in modules:
                # A rank has imported this module, so the import fails only if a file has changed
                # since. The next rank will then report it.
                with contextlib.suppress(BaseException):
                    importlib.import_module(name)
        package = __name__.partition(".")[0] + "."
        for name in sys.modules.keys() - before:
            if name.startswith(package):
                self._preloaded[name] = _changed_at(name)

    def _forget_what_changed(self) -> None:
        """Forget all preloaded modules if a file of one has changed; ranks then import it anew."""
        if all(_changed_at(name) == then for name, then in self._preloaded.items()):
            return
        for name in self._preloaded:
            module = sys.modules.pop(name)
            # `from parent import child` would still find the old module in its parent.
            parent, _, child = name.rpartition(".")
            if getattr(sys.modules.get(parent), child, None) is module:
                delattr(sys.modules[parent], child)
        self._preloaded.clear()

    def _fork_rank(self, fds: list[int]) -> None:
        pid = os.fork()
        if pid == 0:
            self._become_rank(fds)
        # Server and rank both set the group. Whichever runs first, the rank leads its group before
        # anybody can signal it.
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        control, life, *others = fds
        for fd in (control, *others):
            os.close(fd)
        self._lives[pid] = socket.socket(fileno=life)
        self._selector.register(self._lives[pid], selectors.EVENT_READ, pid)

    def _become_rank(self, fds: list[int]) -> None:
        try:
            os.setpgid(0, 0)
            # Undo the settings of `run`: fn may start processes and wait for them.
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            control, life, out, err, *listener = fds
            os.dup2(out, 1)
            os.dup2(err, 2)
            # The connections of other ranks must close when the server closes them.
            self._selector.close()
            self._requests.close()
            for other in self._lives.values():
                other.close()
            for fd in (life, out, err, self._child_read, self._child_write):
                os.close(fd)
            from course_pp.launch import rank

            rank.main(control, listener[0] if listener else None)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(1)

    def _end(self, pid: int) -> None:
        # The rank may have been reaped since the selector looked. Then the number is not ours.
        if pid in self._lives:
            self._selector.unregister(self._lives[pid])
            _end_group(pid)

    def _reap(self) -> None:
        """Collect the ranks that have ended, and send their exit status to their callers."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._child_read, 4096)
        ended = []
        for pid, life in list(self._lives.items()):
            exit_code = _reaped(pid)
            if exit_code is not None:
                del self._lives[pid]
                with contextlib.suppress(KeyError):
                    self._selector.unregister(life)
                ended.append((life, exit_code))
        if not self._lives:
            _end_orphans()
        for life, exit_code in ended:
            with contextlib.suppress(OSError):
                life.sendall(STATUS.pack(exit_code))
            life.close()


def _changed_at(module: str) -> float:
    """Return the time at which the file of a module was last written; 0 if there is no file."""
    file = getattr(sys.modules[module], "__file__", None)
    try:
        return os.stat(file).st_mtime if file else 0.0
    except OSError:
        return 0.0


@contextlib.contextmanager
def _importing_for_ranks() -> Iterator[None]:
    """Make the modules that are imported inside cheap to fork.

    The garbage collector passes over them, and they lie in few pages.
    """
    with imports_that_stay():
        yield
    _use_huge_pages()


def _reaped(pid: int) -> int | None:
    """Return the exit code of a rank that has ended, and end its group; None while it runs."""
    # Until the dead leader is reaped, its number belongs to it and so to its group. Now is the only
    # moment at which the group can be signalled safely.
    if hasattr(os, "waitid"):
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return None
        _end_group(pid)
    done, status = os.waitpid(pid, os.WNOHANG)
    if not done:
        return None
    if not hasattr(os, "waitid"):
        _end_group(pid)
    return os.waitstatus_to_exitcode(status)


def _end_group(pid: int) -> None:
    """End a rank that is not reaped yet, and its group. The rank itself may have left the group."""
    for end in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            end(pid, signal.SIGKILL)


def _end_orphans() -> None:
    """End the processes that ranks left behind. Call it when no rank is left.

    Every child of this process is such an orphan then.
    """
    children = f"/proc/self/task/{os.getpid()}/children"
    with contextlib.suppress(OSError):
        # When an orphan ends, its children become ours in their turn.
        while orphans := _read(children).split():
            for pid in map(int, orphans):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _read(file: str) -> str:
    with open(file) as opened:
        return opened.read()


def _use_huge_pages() -> None:
    """Move this process's memory into huge pages, where Linux is 6.1 or later.

    A fork then copies a hundred page-table entries, not 50,000. Each range is asked for by itself:
    a setting of the allocator would stay on in the ranks, where learners measure.
    """
    if not sys.platform.startswith("linux"):
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    try:
        maps = _read("/proc/self/maps")
    except OSError:  # a container without /proc
        return
    for line in maps.splitlines():
        span, mode, _, _, inode, *name = line.split()
        # Only private memory that belongs to no file can be moved.
        if mode == "rw-p" and inode == "0" and name in ([], ["[heap]"]):
            first, last = span.split("-")
            begin = -(-int(first, 16) // _HUGE_PAGE) * _HUGE_PAGE
            end = int(last, 16) // _HUGE_PAGE * _HUGE_PAGE
            if begin < end:
                madvise(begin, end - begin, _MADV_COLLAPSE)
