"""Errors of the system that say which file they are about, and the folder for what is kept of a learner."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def state_folder() -> Path:
    """The folder of ``COURSE_PP_PROGRESS``, or the user's state directory; it may begin with ``~``."""
    if chosen := os.environ.get("COURSE_PP_PROGRESS"):
        return Path(chosen).parent
    if sys.platform == "darwin":
        return Path("~/Library/Application Support/course_pp")
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state") / "course_pp"


@contextmanager
def naming(file: str | Path) -> Iterator[None]:
    """Name ``file`` in an OSError from inside: of a write to a full disk the system does not."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file)) from None
