"""The surroundings of a call: the cells and descriptors of its process, and the lines it prints."""

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
    """Describe a call from this process to its ranks."""
    # No file holds the source of a cell: a rank's traceback needs it from here.
    cells = {name: entry for name, entry in linecache.cache.items() if is_cell(name)}
    return RankJob(
        world_size=world_size,
        backend=backend,
        threads=threads,
        timeout_s=timeout_s,
        environ=dict(os.environ),
        sys_path=tuple(search_path()),
        cwd=os.getcwd(),
        argv=tuple(getattr(sys, "argv", ())),
        sources=cells,
    )


@contextlib.contextmanager
def standard_descriptors_taken() -> Iterator[None]:
    """Keep files that are opened inside off the descriptors 0 to 2.

    If the process has closed those, ``print`` would write into such a file.
    """
    placeholders = []
    try:
        # Opened for reading only, so that printing to them fails as it did before.
        while (number := os.open(os.devnull, os.O_RDONLY)) <= 2:
            placeholders.append(number)
        os.close(number)
        yield
    finally:
        for number in placeholders:
            os.close(number)


class Lines:
    """Cuts the bytes of one stream into lines; ``emit`` gets each as text, without its line end."""

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
        """Emit a last line that had no end."""
        if rest := self._take_rest():
            self._emit_text(rest)

    def _take_rest(self) -> bytes:
        """Take the bytes since the last line end."""
        # Joined only here: a long line arrives in thousands of pieces.
        rest = b"".join(self._rest)
        self._rest = []
        return rest

    def _emit_text(self, line: bytes) -> None:
        # A progress bar rewrites its line after a carriage return: keep its last state only.
        self._emit(line.decode(errors="replace").rstrip("\r").rsplit("\r", 1)[-1])


def show(stream: str, line: str) -> None:
    """Print a line on ``sys.stdout`` or ``sys.stderr``, if the process has that stream."""
    file: TextIO | None = getattr(sys, stream)
    if file is None:
        return
    try:
        file.write(f"{line}\n")
    except UnicodeEncodeError as error:
        # A stream in ASCII or Latin-1 gets an escape for each character that it cannot show.
        file.write(f"{line}\n".encode(error.encoding, "backslashreplace").decode(error.encoding))
