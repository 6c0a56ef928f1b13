"""The messages between a rank and its caller, how they are pickled, and how their bytes travel."""

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
    """The options of a call and the surroundings of its caller: all that a rank needs but ``fn``.

    Attributes:
        sources: entries of ``linecache`` whose text is in no file, such as notebook cells.
        port: port of the store that rank 0 hosts on the loopback address.
    """

    world_size: int
    backend: str | None
    threads: int
    timeout_s: float
    environ: Mapping[str, str]
    sys_path: tuple[str, ...]
    cwd: str
    argv: tuple[str, ...]
    sources: Mapping[str, Any]
    rank: int = 0
    port: int = 0


class Said(Enum):
    """A message that needs no fields. READY and OVER go to the caller, ASK goes to a rank."""

    READY = "the function is about to be called"
    OVER = "the function has returned or raised; its result or exception is pickled and sent next"
    ASK = "say what you are doing"


@dataclass(frozen=True)
class Returned:
    """The function returned.

    Attributes:
        value: the pickled result.
        imported: modules of this package that the rank imported and its server had not.
    """

    value: bytes
    imported: tuple[str, ...] = ()


@dataclass(frozen=True)
class Raised:
    """The function raised.

    Attributes:
        exception: the pickled exception; None if it does not pickle.
        summary: the exception as ``Type: message``.
        text: the rank's traceback.
        at: time in seconds of the monotonic clock, which all processes of one machine share.
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


def pickled(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Pickle ``(fn, args)``: functions of cells and scripts as a whole, installed ones by name."""
    import cloudpickle

    module = inspect.getmodule(fn)
    # A caller may have registered the module already; then it must stay registered.
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
    """Pickle with cloudpickle, and also two kinds that it refuses.

    They are modules of a class of their own, such as the settings of torch, and cached functions of
    cells and scripts.
    """
    import cloudpickle

    def is_sent_whole(fn: Any) -> bool:
        whole = ("__main__", *cloudpickle.list_registry_pickle_by_value())
        name = getattr(fn, "__module__", None)
        return name not in sys.modules or name in whole

    class Pickler(cloudpickle.CloudPickler):
        def reducer_override(self, obj: Any) -> Any:
            # cloudpickle sends along every loaded submodule whose name a function mentions, and
            # knows plain modules only. A function that uses `dist` and any `.config` would drag in
            # torch.distributed.config, whose class is its own.
            if isinstance(obj, ModuleType) and type(obj) is not ModuleType:
                return importlib.import_module, (obj.__name__,)
            # By default a cached function is sent by its name, which no rank knows.
            if isinstance(obj, CACHED) and is_sent_whole(obj.__wrapped__):
                return _cached, (obj.__wrapped__, obj.cache_parameters())
            return super().reducer_override(obj)

    file = io.BytesIO()
    Pickler(file).dump(value)
    return file.getvalue()


def _cached(fn: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(fn)


def _is_script(module: ModuleType) -> bool:
    """Return whether the functions of ``module`` are sent whole, so that no rank has to import it.

    A script is a file that is neither installed nor part of a package. A test module counts as one:
    its import would bring pytest along.
    """
    file = os.path.abspath(getattr(module, "__file__", None) or "")
    library = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
    # cloudpickle sends the functions of __main__ whole without being told.
    if module.__name__ == "__main__" or any(file.startswith(folder + os.sep) for folder in library):
        return False
    from_pytest = (
        type(getattr(module, "__loader__", None)).__module__ == "_pytest.assertion.rewrite"
    )
    return file.endswith(".py") and (from_pytest or not module.__package__)


# A message on a stream socket is a length in eight bytes, then that many bytes. A rank blocks in
# `send` and `receive`. The caller uses a `Channel`, which never blocks: a message of any size keeps
# to the time limit. All of them raise EOFError or OSError if the other end is gone.


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
    """The caller's end. No call waits: each moves the bytes that the socket takes or has now."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._unsent: deque[memoryview] = deque()
        self._expect(_LENGTH.size, is_length=True)

    def _expect(self, n_bytes: int, is_length: bool) -> None:
        self._data = bytearray(n_bytes)
        self._room = memoryview(self._data)
        self._is_length = is_length

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    @property
    def is_sending(self) -> bool:
        return bool(self._unsent)

    @property
    def is_receiving(self) -> bool:
        """Whether a part of a message has arrived, but not all of it."""
        return not self._is_length or len(self._room) < _LENGTH.size

    def send(self, message: bytes) -> None:
        self._unsent += [memoryview(_LENGTH.pack(len(message))), memoryview(message)]

    def write(self) -> None:
        """Send as many bytes as the socket takes now."""
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
        """Read all bytes that have arrived; return the messages that they complete."""
        messages = []
        # Ends by BlockingIOError, an OSError, when the socket is empty.
        with contextlib.suppress(EOFError, OSError):
            while True:
                message = self._read()
                if message is not None:
                    messages.append(message)
        return messages

    def _read(self) -> bytearray | None:
        got = self._socket.recv_into(self._room)
        if not got:
            raise EOFError
        self._room = self._room[got:]
        if self._room:
            return None
        data = self._data
        if self._is_length:
            (length,) = _LENGTH.unpack(data)
            self._expect(length, is_length=False)
            return None
        self._expect(_LENGTH.size, is_length=True)
        return data
