"""What tests of the launcher share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import no_process_left


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No process is left when the test has ended."""
    with no_process_left(within_s=15):
        yield


def pretend(tool: Path, shell: str) -> None:
    """Make a program of a few lines of sh."""
    tool.write_text(f"#!/bin/sh\n{shell}\n")
    tool.chmod(0o755)
