"""Lines of several ranks, each labelled and never glued together."""

from __future__ import annotations

from collections.abc import Callable


class Lines:
    """Cuts the bytes of one stream into whole lines and hands each on as text.

    Args:
        emit: called with each line, without its end.
    """

    def __init__(self, emit: Callable[[str], None]) -> None:
        self._emit = emit
        self._rest = b""

    def feed(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._emit(_text(line))

    def close(self) -> None:
        """Hands on a last line that had no end."""
        if self._rest:
            self._emit(_text(self._rest))
            self._rest = b""


def _text(line: bytes) -> str:
    # A progress bar rewrites its line after a carriage return: what it showed last is what is kept.
    return line.decode(errors="replace").rstrip("\r").rsplit("\r", 1)[-1]
