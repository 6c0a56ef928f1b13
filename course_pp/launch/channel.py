"""Messages between a rank and its caller: eight bytes that hold a length, then so many bytes, over a stream socket.

A rank blocks in `send` and `receive`. The caller uses a `Channel`, which never blocks, so that a message of any size
keeps to the time limit.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections import deque

_LENGTH = struct.Struct("!Q")


def send(connection: socket.socket, message: bytes) -> None:
    """Send a whole message. Raises OSError if the other end is gone."""
    connection.sendall(_LENGTH.pack(len(message)))
    connection.sendall(message)


def receive(connection: socket.socket) -> bytearray:
    """Wait for a whole message and return it. Raises EOFError or OSError if the other end is gone."""
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
        """Whether `write` has more to send."""
        return bool(self._unsent)

    @property
    def is_receiving(self) -> bool:
        """Whether a part of a message has arrived, and not yet the whole."""
        return not self._is_length or len(self._room) < _LENGTH.size

    def send(self, message: bytes) -> None:
        """Queue a message for `write`."""
        self._unsent += [memoryview(_LENGTH.pack(len(message))), memoryview(message)]

    def write(self) -> None:
        """Send what the socket takes now. Raises OSError if the rank is gone."""
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                sent = self._socket.send(self._unsent[0])
                self._unsent[0] = self._unsent[0][sent:]
                if not self._unsent[0]:
                    self._unsent.popleft()

    def read(self) -> bytearray | None:
        """Read once; return a message when that completes one. Raises EOFError or OSError if the rank is gone."""
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
        self._expect(_LENGTH.unpack(data)[0] if was_length else _LENGTH.size, is_length=not was_length)
        return None if was_length else data
