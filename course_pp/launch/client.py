"""The caller's end of the process that ranks are forked from (`server`)."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
from typing import IO

from course_pp.launch.errors import LaunchError
from course_pp.launch.server import FORK, preload_request

_END_LIMIT_S = 10.0


def search_path() -> list[str]:
    """``sys.path`` without what is no string: the import system passes over it, too."""
    return [entry for entry in sys.path if isinstance(entry, str)]


class Server:
    """The caller's end of the process that forks ranks."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._socket = ours
        self.owner = os.getpid()
        self.warm = False
        self._lock = threading.Lock()
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        code = (
            f"import sys; sys.path[:] = {search_path()!r}; "
            f"from course_pp.launch.server import serve; serve({theirs.fileno()})"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            pass_fds=[theirs.fileno()],
            # Away from the terminal's interrupts: the caller decides when ranks end.
            start_new_session=True,
        )
        theirs.close()

    def fork(self, fds: list[int]) -> None:
        try:
            with self._lock:
                socket.send_fds(self._socket, [FORK], fds)
        except OSError as e:
            raise self.lost() from e

    def preload(self, modules: tuple[str, ...]) -> None:
        """Has the server import what ranks had to import, so that those of the next call need not."""
        with self._lock, contextlib.suppress(OSError):
            self._socket.sendall(preload_request(modules))

    def lost(self) -> LaunchError:
        self.stop()
        self._errors.seek(0)
        last = self._errors.read().decode(errors="replace").strip().splitlines()[-1:]
        return LaunchError(
            f"the process that starts ranks ended{': ' + last[0] if last else ''}. "
            f"Check that `{sys.executable} -c 'import torch.distributed.pipelining'` works, then call again."
        )

    def stop(self) -> None:
        self._socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_LIMIT_S)


class Servers:
    """At most one server a process, started when it is first needed and again if it was lost."""

    def __init__(self) -> None:
        self._server: Server | None = None
        atexit.register(self.stop)

    def get(self) -> Server:
        server = self._server
        # After a fork the server belongs to the parent process.
        if server is None or server.owner != os.getpid() or server.process.poll() is not None:
            server = self._server = Server()
        return server

    def stop(self) -> None:
        if self._server is not None and self._server.owner == os.getpid():
            self._server.stop()
            self._server = None

    def pid(self) -> int | None:
        return None if self._server is None else self._server.process.pid


SERVERS = Servers()
