"""What goes between a rank and its caller: the messages, how they are pickled, and how their bytes travel."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import io
import os
import socket
import struct
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import Any

_LENGTH = struct.Struct("!Q")
CACHED = type(functools.cache(len))


@dataclass(frozen=True)
class RankJob:
    """Everything a rank needs besides the function: what was asked for, and its caller's surroundings."""

    world_size: int
    backend: str | None
    threads: int
    timeout_s: float
    environ: Mapping[str, str]
    sys_path: tuple[str, ...]
    cwd: str
    argv: tuple[str, ...]
    sources: Mapping[str, Any]  # of ``linecache`` what exists in no file, such as notebook cells
    rank: int = 0
    port: int = 0  # of the store that rank 0 hosts on the loopback address


class Said(Enum):
    """What takes no more words."""

    READY = "the function is about to be called"
    OVER = "the function has returned or raised; its result or exception is pickled and sent next"
    ASK = "from the caller: say what you are doing"


@dataclass(frozen=True)
class Returned:
    """The function returned."""

    value: bytes  # pickled
    # modules of this package that the process it was forked from had not
    imported: tuple[str, ...] = ()


@dataclass(frozen=True)
class Raised:
    """The function raised."""

    exception: bytes | None  # pickled, where it can be
    summary: str  # ``Type: message``
    text: str  # the rank's traceback
    at: float  # monotonic clock, seconds; comparable between processes of one machine
    # whether the exception itself says that another rank failed first
    began_elsewhere: bool = False


@dataclass(frozen=True)
class Left:
    """The function called ``sys.exit``."""

    exit_code: int


def pickled(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Pickle ``(fn, args)``: what a cell or a script defines is sent whole, what is installed by name."""
    import cloudpickle

    module = inspect.getmodule(fn)
    known = cloudpickle.list_registry_pickle_by_value()
    by_value = module is not None and _is_script(module) and module.__name__ not in known
    try:
        if by_value:
            cloudpickle.register_pickle_by_value(module)
        return dumps((fn, args))
    except (Exception, SystemExit) as e:
        raise TypeError(
            f"{getattr(fn, '__name__', fn)!r} or its arguments cannot be sent to the ranks ({e}). "
            "Make what cannot be pickled (files, locks, connections) inside the function."
        ) from e
    finally:
        if by_value:
            cloudpickle.unregister_pickle_by_value(module)


def dumps(value: object) -> bytes:
    """Pickle with cloudpickle, and also what it refuses: modules of a class of their own, as torch's settings are."""
    import cloudpickle

    def is_sent_whole(fn: Any) -> bool:
        name = getattr(fn, "__module__", None)
        return name not in sys.modules or name in (
            "__main__",
            *cloudpickle.list_registry_pickle_by_value(),
        )

    class Pickler(cloudpickle.CloudPickler):
        def reducer_override(self, obj: Any) -> Any:
            # cloudpickle sends along every loaded submodule whose name a function mentions, and
            # knows plain modules only: `dist` beside any `.config` would drag in
            # torch.distributed.config, which is of a class of its own.
            if isinstance(obj, ModuleType) and type(obj) is not ModuleType:
                return importlib.import_module, (obj.__name__,)
            # Left alone it is sent by its name, which no rank knows.
            if isinstance(obj, CACHED) and is_sent_whole(obj.__wrapped__):
                return _cached, (obj.__wrapped__, obj.cache_parameters())
            return super().reducer_override(obj)

    file = io.BytesIO()
    Pickler(file).dump(value)
    return file.getvalue()


def _cached(fn: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(fn)


def _is_script(module: ModuleType) -> bool:
    """Return whether the file is run rather than imported, and is sent whole, so that no rank has
    to import it.

    That is a file in no package which is not installed, and a test module, whose import would bring
    pytest along.
    """
    file = os.path.abspath(getattr(module, "__file__", None) or "")
    library = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
    if module.__name__ == "__main__" or any(file.startswith(folder + os.sep) for folder in library):
        return False
    from_pytest = (
        type(getattr(module, "__loader__", None)).__module__ == "_pytest.assertion.rewrite"
    )
    return file.endswith(".py") and (from_pytest or not module.__package__)


# A message on a stream socket is eight bytes that hold a length, then so many bytes. A rank blocks
# in `send` and `receive`. The caller uses a `Channel`, which never blocks, so that a message of any
# size keeps to the time limit. Where the other end is gone, they raise EOFError or OSError.


def send(connection: socket.socket, message: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(message)))
    connection.sendall(message)


def receive(connection: socket.socket) -> bytearray:
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    return _exactly(connection, length)


def _exactly(connection: socket.socket, n_bytes: int) -> bytearray:
    data = bytearray(n_bytes)
    room = memoryview(data)
    while room:
        got = connection.recv_into(room)
        if not got:
            raise EOFError
        room = room[got:]
    return data


class Channel:
    """The caller's end. Each call moves the bytes that can be moved at once, and returns."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._unsent: deque[memoryview] = deque()
        self._expect(_LENGTH.size, is_length=True)

    def _expect(self, n_bytes: int, is_length: bool) -> None:
        self._data, self._is_length = bytearray(n_bytes), is_length
        self._room = memoryview(self._data)

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    @property
    def is_sending(self) -> bool:
        return bool(self._unsent)

    @property
    def is_receiving(self) -> bool:
        """Whether a part of a message has arrived, and not yet the whole."""
        return not self._is_length or len(self._room) < _LENGTH.size

    def send(self, message: bytes) -> None:
        self._unsent += [memoryview(_LENGTH.pack(len(message))), memoryview(message)]

    def write(self) -> None:
        """Send what the socket takes now."""
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                sent = self._socket.send(self._unsent[0])
                self._unsent[0] = self._unsent[0][sent:]
                if not self._unsent[0]:
                    self._unsent.popleft()

    def read(self) -> bytearray | None:
        """Read once; return a message when that completes one."""
        try:
            return self._read()
        except BlockingIOError:
            return None

    def read_all(self) -> list[bytearray]:
        """Read all that has arrived; return the messages that it completes."""
        messages = []
        with contextlib.suppress(EOFError, OSError):
            while True:
                message = self._read()
                messages += [] if message is None else [message]
        return messages

    def _read(self) -> bytearray | None:
        got = self._socket.recv_into(self._room)
        if not got:
            raise EOFError
        self._room = self._room[got:]
        if self._room:
            return None
        data, was_length = self._data, self._is_length
        self._expect(
            _LENGTH.unpack(data)[0] if was_length else _LENGTH.size, is_length=not was_length
        )
        return None if was_length else data
