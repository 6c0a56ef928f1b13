"""A notebook's folder goes with its kernel, however that ends."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from course_pp.notebook import ScratchFolder

# A kernel that has written something, and has a child that still holds what it held open.
_KERNEL = """
import os, sys, time
from pathlib import Path
from course_pp.notebook import ScratchFolder
folder = ScratchFolder("09_", Path(sys.argv[1]))
(folder.path / "step_1").mkdir()
if child := os.fork():
    print(os.getpid(), child, flush=True)
else:
    os.setsid()
time.sleep(60)
"""


def _gone(folder: Path, limit_s: float = 20.0) -> bool:
    end = time.monotonic() + limit_s
    while folder.exists() and time.monotonic() < end:
        time.sleep(0.05)
    return not folder.exists()


@pytest.mark.parametrize("signal_", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_folder_goes_with_its_kernel_even_if_that_is_killed_and_a_child_lives(
    tmp_path: Path, signal_: int
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _KERNEL, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as kernel:
        assert kernel.stdout is not None
        pid, child = map(int, kernel.stdout.readline().split())
        [folder] = tmp_path.iterdir()
        assert (folder / "step_1").exists()
        os.kill(pid, signal_)
        try:
            assert _gone(folder)
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_folder_goes_when_the_cell_is_run_again(tmp_path: Path) -> None:
    folder = ScratchFolder("09_", tmp_path)
    first = folder.path
    (first / "run").mkdir()
    folder = ScratchFolder("09_", tmp_path)
    assert _gone(first)
    assert folder.path.exists()
    folder.remove()
    folder.remove()
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScratchFolder]:
    """Shared, as each takes two seconds to go: a name is used by one test."""
    place = tmp_path_factory.mktemp("notebooks")
    (place / "mine").mkdir()
    folder = ScratchFolder("09_", place)
    yield folder
    folder.remove()


def test_a_fresh_folder_holds_nothing_of_an_earlier_run_or_a_copy(folder: ScratchFolder) -> None:
    run = folder.fresh("run")
    (run / "step_4").mkdir()
    copy = folder.fresh("copy", copy_of=run)
    (copy / "step_8").mkdir()
    assert [path.name for path in run.iterdir()] == ["step_4"]
    copy = folder.fresh("copy", copy_of=run)
    assert [path.name for path in copy.iterdir()] == ["step_4"]
    assert list(folder.fresh("run").iterdir()) == []


@pytest.mark.parametrize("name", ["", ".", "..", "../mine", "a/b", "/mine"])
def test_a_fresh_folder_is_never_one_that_others_write(folder: ScratchFolder, name: str) -> None:
    with pytest.raises(ValueError, match="no name of a folder in 09_"):
        folder.fresh(name)
    assert folder.path.exists()
    assert (folder.path.parent / "mine").exists()


def test_a_copy_is_of_a_folder_that_is_there_and_not_of_what_it_replaces(
    folder: ScratchFolder,
) -> None:
    with pytest.raises(
        ValueError, match="there is no folder 'unmade' to copy: first run the cell that writes it"
    ):
        folder.fresh("copy", copy_of=folder.path / "unmade")
    run = folder.fresh("replaced")
    (run / "step").mkdir()
    for source in (run, run / "step"):
        with pytest.raises(ValueError, match="copy_of is 'replaced' or in it"):
            folder.fresh("replaced", copy_of=source)
    assert (run / "step").is_dir()


def test_where_nothing_can_be_written_it_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match=r"cannot make a folder for runs in .*nowhere' \(No such file or directory\)",
    ):
        ScratchFolder("09_", tmp_path / "nowhere")
