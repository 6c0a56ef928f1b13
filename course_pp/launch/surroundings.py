"""What a call takes from the process it is made in, and gives back to it: cells, descriptors, printed lines."""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from course_pp.launch.channel import RankJob
from course_pp.launch.errors import is_cell
from course_pp.launch.fork_server import search_path


def shell() -> Any:
    """Return the IPython shell in which this runs; None in a script or a test."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None


def job_here(world_size: int, backend: str | None, threads: int, timeout_s: float) -> RankJob:
    """Return what the ranks of a call from this process need."""
    return RankJob(
        world_size,
        backend,
        threads,
        timeout_s,
        environ=dict(os.environ),
        sys_path=tuple(search_path()),
        cwd=os.getcwd(),
        argv=tuple(getattr(sys, "argv", ())),
        sources={name: entry for name, entry in linecache.cache.items() if is_cell(name)},
    )


@contextlib.contextmanager
def standard_descriptors_taken() -> Iterator[None]:
    """Keep what is opened inside off the numbers 0 to 2: where they are closed, ``print`` would write into it."""
    placeholders = []
    try:
        # For reading only: what is printed to them is refused as before.
        while (number := os.open(os.devnull, os.O_RDONLY)) <= 2:
            placeholders.append(number)
        os.close(number)
        yield
    finally:
        for number in placeholders:
            os.close(number)


class Lines:
    """Cuts the bytes of one stream into whole lines, and calls ``emit`` with each as text, without its end."""

    def __init__(self, emit: Callable[[str], None]) -> None:
        self._emit = emit
        self._rest: list[bytes] = []

    def feed(self, data: bytes) -> None:
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0] = self._take_rest() + lines[0]
        self._rest.append(rest)
        for line in lines:
            self._emit_text(line)

    def close(self) -> None:
        """Hand on a last line that had no end."""
        if rest := self._take_rest():
            self._emit_text(rest)

    def _take_rest(self) -> bytes:
        """Take what came since the last line end. Joined once: a long line arrives in thousands of pieces."""
        rest, self._rest = b"".join(self._rest), []
        return rest

    def _emit_text(self, line: bytes) -> None:
        # A progress bar rewrites its line after a carriage return: what it showed last is what is
        # kept.
        self._emit(line.decode(errors="replace").rstrip("\r").rsplit("\r", 1)[-1])


def show(stream: str, line: str) -> None:
    """Print a line on ``sys.stdout`` or ``sys.stderr``, if it is there; what it has no code for becomes an escape."""
    file: TextIO | None = getattr(sys, stream)
    if file is None:
        return
    try:
        file.write(f"{line}\n")
    except UnicodeEncodeError as error:
        file.write(f"{line}\n".encode(error.encoding, "backslashreplace").decode(error.encoding))
