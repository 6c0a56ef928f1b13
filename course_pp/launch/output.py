"""Lines of several ranks, each labelled and never glued together."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TextIO

from course_pp.launch.errors import LaunchError


class Lines:
    """Cuts the bytes of one stream into whole lines, and hands each on as text.

    Args:
        emit: called with each line, without its end.
    """

    def __init__(self, emit: Callable[[str], None]) -> None:
        self._emit = emit
        self._rest: list[bytes] = []

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the stream."""
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0] = self._take_rest() + lines[0]
        self._rest.append(rest)
        for line in lines:
            self._emit(_text(line))

    def close(self) -> None:
        """Hand on a last line that had no end."""
        if rest := self._take_rest():
            self._emit(_text(rest))

    def _take_rest(self) -> bytes:
        """Take what came since the last line end. Joined once: a long line arrives in thousands of pieces."""
        rest, self._rest = b"".join(self._rest), []
        return rest


def _text(line: bytes) -> str:
    # A progress bar rewrites its line after a carriage return: what it showed last is what is kept.
    return line.decode(errors="replace").rstrip("\r").rsplit("\r", 1)[-1]


def show(stream: str, line: str) -> None:
    """Print a line of a rank on ``sys.stdout`` or ``sys.stderr``; like ``print``, nothing where that is None.

    Characters that the stream has no code for become escapes.

    Args:
        stream: ``"stdout"`` or ``"stderr"``.

    Raises:
        LaunchError: the stream is closed.
        OSError: the line cannot be written, to a full disk for example.
    """
    __tracebackhide__ = True
    file: TextIO | None = getattr(sys, stream)
    if file is None:
        return
    try:
        _write(file, f"{line}\n")
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error
        raise OSError(error.errno, f"what the ranks print cannot be shown on sys.{stream}: {reason}") from None
    except ValueError as error:
        raise LaunchError(
            f"what the ranks print cannot be shown on sys.{stream}: {str(error).rstrip('.')}. "
            f"Give it an open file, or None to drop what they print: sys.{stream} = None."
        ) from None


def _write(file: TextIO, text: str) -> None:
    try:
        file.write(text)
    except UnicodeEncodeError as error:
        file.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
