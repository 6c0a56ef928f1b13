"""Errors of the system that say which file they are about."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def naming(file: str | Path) -> Iterator[None]:
    """Name ``file`` in an OSError from inside: of a write to a full disk the system does not."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file)) from None
