"""The check for processes left behind finds them, and counts no other."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.processes import no_process_left

_SHELL = (
    "import subprocess, sys\nfor command in sys.stdin: print(subprocess.Popen(['sleep', '60']).pid,"
    " flush=True)"
)


@pytest.fixture
def shell() -> Iterator[subprocess.Popen[str]]:
    """A process that starts another for each line it reads."""
    with subprocess.Popen(
        [sys.executable, "-c", _SHELL], text=True, stdin=-1, stdout=-1, process_group=0
    ) as process:
        try:
            yield process
        finally:
            subprocess.run(["kill", "--", f"-{process.pid}"], check=True)


def starts_one(shell: subprocess.Popen[str]) -> int:
    assert shell.stdin is not None
    assert shell.stdout is not None
    print(file=shell.stdin, flush=True)
    return int(shell.stdout.readline())


def test_what_an_older_process_starts_is_its_own(shell: subprocess.Popen[str]) -> None:
    with no_process_left(within_s=0.0):
        starts_one(shell)


def test_what_the_test_itself_started_is_left_behind() -> None:
    with (
        pytest.raises(AssertionError, match=r"left behind: .*sleep 59"),
        no_process_left(within_s=0.0),
    ):
        sleeping = subprocess.Popen(["sleep", "59"])
    sleeping.kill()
    sleeping.wait()
