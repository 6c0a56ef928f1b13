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
        self._rest: list[bytes] = []

    def feed(self, data: bytes) -> None:
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0] = self._take_rest() + lines[0]
        self._rest.append(rest)
        for line in lines:
            self._emit(_text(line))

    def close(self) -> None:
        """Hands on a last line that had no end."""
        if rest := self._take_rest():
            self._emit(_text(rest))

    def _take_rest(self) -> bytes:
        """What came since the last line end. Joined once: a long line arrives in thousands of pieces."""
        rest, self._rest = b"".join(self._rest), []
        return rest


def _text(line: bytes) -> str:
    # A progress bar rewrites its line after a carriage return: what it showed last is what is kept.
    return line.decode(errors="replace").rstrip("\r").rsplit("\r", 1)[-1]
