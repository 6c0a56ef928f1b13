"""What ranks take from where they are called: a working folder, and descriptors for their streams."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Iterator

from course_pp.launch.errors import LaunchError


def working_folder() -> str:
    """Return the current folder. Raises LaunchError if it has been deleted."""
    __tracebackhide__ = True
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise LaunchError(
            "the folder you are in has been deleted. Change to another one, for example "
            'os.chdir(os.path.expanduser("~")).'
        ) from None


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


@contextlib.contextmanager
def start_refused_in_a_sentence(n: int) -> Iterator[None]:
    """Turn what the system refuses while ``n`` ranks are started into a LaunchError."""
    __tracebackhide__ = True
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            raise LaunchError(
                f"{n} ranks need more open files than the limit of {limit} leaves. Close some, start fewer ranks, or "
                "raise the limit (ulimit -n)."
            ) from None
        file = f": {error.filename}" if error.filename else ""
        raise LaunchError(f"the system refuses to start ranks: {error.strerror}{file}.") from None
