"""The caller's end of the process that ranks are forked from (`server`)."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from course_pp.launch.errors import LaunchError
from course_pp.launch.server import FORK, preload_request

_END_LIMIT_S = 10.0


def search_path() -> list[str]:
    """Return ``sys.path`` without entries that the import system skips or cannot look into."""
    return [entry for entry in sys.path if isinstance(entry, str) and "\0" not in entry]


class Server:
    """The caller's end of the process that forks ranks. Raises OSError if it cannot be started."""

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
                [_interpreter(), "-P", str(Path(__file__).with_name("boot.py")), str(theirs.fileno())],
                stdin=path,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
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
                socket.send_fds(self._socket, [FORK], fds)
        except OSError as e:
            raise self.lost() from e

    def preload(self, modules: tuple[str, ...]) -> None:
        """Have the server import what ranks had to import, so that the next ranks find it imported."""
        with self._lock, contextlib.suppress(OSError):
            self._socket.sendall(preload_request(modules))

    def lost(self) -> LaunchError:
        self.stop()
        return LaunchError(
            f"the process that starts ranks ended{self._last_words and f': {self._last_words}'}. "
            f"Check that `{sys.executable} -c 'import torch.distributed.pipelining'` works, then call again."
        )

    def stop(self) -> None:
        """End the process: by closing the socket, or by a signal if it is stopped or stuck in an import."""
        self._socket.close()
        try:
            self.process.wait(_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if not self._errors.closed:
            self._errors.seek(0)
            self._last_words = "".join(self._errors.read().decode(errors="replace").strip().splitlines()[-1:])
        self._open.close()


def _interpreter() -> str:
    if not sys.executable:
        raise LaunchError(f"sys.executable is {sys.executable!r}; it must name the Python that ranks run.")
    return sys.executable


class Servers:
    """Holds at most one server a process; starts it when it is first needed, and again if it was lost."""

    def __init__(self) -> None:
        self._server: Server | None = None
        atexit.register(self.stop)

    def get(self) -> Server:
        server = self._server
        # After a fork the server belongs to the parent process.
        if server is None or server.owner != os.getpid() or server.process.poll() is not None:
            self.stop()
            server = self._server = Server()
        return server

    def stop(self) -> None:
        if self._server is not None and self._server.owner == os.getpid():
            self._server.stop()
            self._server = None

    def pid(self) -> int | None:
        return None if self._server is None else self._server.process.pid


SERVERS = Servers()
