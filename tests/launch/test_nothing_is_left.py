"""However a call ends, neither a rank, nor what a rank started, nor an open descriptor is left."""

import gc
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from course_pp.launch import RanksHung, on_ranks
from course_pp.launch.crew import Crew
from course_pp.launch.fork_server import SERVERS, ForkServer
from tests.processes import descendants, no_process_left

pytestmark = pytest.mark.timeout(60)

ON_RANKS = """
import subprocess, sys
from pathlib import Path
from course_pp.launch import on_ranks

def hang(rank, folder):
    import torch, torch.distributed as dist
    subprocess.Popen(["sleep", "1000"])
    Path(folder, f"started-{rank}").touch()
    dist.recv(torch.zeros(1), src=1 - rank)

on_ranks(2, hang, sys.argv[1])
"""

SCRIPT = """
import os, subprocess, sys
from pathlib import Path
import torch, torch.distributed as dist

dist.init_process_group()
rank = dist.get_rank()
subprocess.Popen(["sleep", "1000"], start_new_session=True)
Path(sys.argv[1], f"started-{rank}").touch()
dist.recv(torch.zeros(1), src=1 - rank)
"""

RUN_TORCHRUN = """
import sys
from course_pp.launch import run_torchrun
run_torchrun(["--nproc-per-node=2", sys.argv[1] + "/script.py", sys.argv[1]], where="local")
"""


def wait_for(*files: Path) -> None:
    limit = time.monotonic() + 40
    while not all(file.exists() for file in files):
        assert time.monotonic() < limit, "the ranks did not start"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("caller", "how"),
    [
        pytest.param(ON_RANKS, signal.SIGKILL, id="on_ranks-killed"),
        pytest.param(
            RUN_TORCHRUN, signal.SIGINT, id="torchrun-interrupted", marks=pytest.mark.long
        ),
        pytest.param(RUN_TORCHRUN, signal.SIGKILL, id="torchrun-killed", marks=pytest.mark.long),
        # test_an_interrupt_says_who_waited_for_whom interrupts such a caller, too.
        pytest.param(ON_RANKS, signal.SIGINT, id="on_ranks-interrupted", marks=pytest.mark.full),
    ],
)
def test_when_the_caller_is_interrupted_or_killed(
    tmp_path: Path, caller: str, how: signal.Signals
) -> None:
    if caller == RUN_TORCHRUN and how == signal.SIGKILL:
        script = SCRIPT.replace(", start_new_session=True", "")
    else:
        script = SCRIPT
    (tmp_path / "script.py").write_text(script)
    with no_process_left(within_s=15):
        process = subprocess.Popen(
            [sys.executable, "-c", caller, str(tmp_path)],
            stderr=subprocess.PIPE,
            text=True,
            # A caller that is killed cannot remove its temporary files.
            env={**os.environ, "TMPDIR": str(tmp_path)},
        )
        wait_for(tmp_path / "started-0", tmp_path / "started-1")
        process.send_signal(how)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == -how
    assert ("KeyboardInterrupt" in errors) == (how == signal.SIGINT)


def start_a_child_and(then: str, rank: int) -> int:
    child = subprocess.Popen(["sleep", "1000"])
    if then == "raise" and rank == 1:
        raise ValueError("after starting a child")
    if then == "exit" and rank == 1:
        os._exit(1)
    while then == "hang":
        time.sleep(1)
    return child.pid


@pytest.mark.parametrize("then", ["return", "raise", "exit", "hang"])
def test_children_of_ranks_end_with_the_call(then: str) -> None:
    def run(rank: int) -> int:
        return start_a_child_and(then, rank)

    with no_process_left():
        try:
            on_ranks(2, run, timeout_s=0.5 if then == "hang" else 30)
        except (ValueError, RuntimeError, RanksHung):
            assert then != "return"


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    """Fails unless this process, and the one that ranks fork from, soon have no more open than
    before.

    Ranks end when their connections close, and the server closes a rank's last socket after it has
    told the caller that the rank has ended: both a moment later.
    """
    on_ranks(1, print)
    processes = psutil.Process(), psutil.Process(SERVERS.pid())
    gc.collect()  # what tests before this one may have left to it
    while processes[1].status() != psutil.STATUS_SLEEPING:
        time.sleep(0.01)
    before = [process.num_fds() for process in processes]
    yield
    limit = time.monotonic() + 20
    while any(process.num_fds() > most for process, most in zip(processes, before, strict=True)):
        assert time.monotonic() < limit, (
            f"{[p.num_fds() for p in processes]} descriptors are open, {before} were"
        )
        time.sleep(0.02)


def test_calls_leave_no_descriptor_open_here_or_where_ranks_fork_from() -> None:
    with no_descriptor_left():
        for _ in range(20):
            on_ranks(2, print)


@pytest.mark.parametrize(
    ("owner", "method", "nth"),
    [
        (ForkServer, "fork", 1),
        (ForkServer, "fork", 2),
        (Crew, "_watch", 2),
        (Crew, "_poll", 1),
        (Crew, "_wait_for_ends", 1),
        (Crew, "_drain", 1),
    ],
)
def test_an_interrupt_at_any_moment_leaves_no_descriptor_open(
    monkeypatch: pytest.MonkeyPatch, owner: type, method: str, nth: int
) -> None:
    calls = itertools.count(1)
    undisturbed = getattr(owner, method)

    def interrupted(*args: Any) -> Any:
        if next(calls) == nth:
            raise KeyboardInterrupt
        return undisturbed(*args)

    with no_descriptor_left(), no_process_left():
        monkeypatch.setattr(owner, method, interrupted)
        with pytest.raises(KeyboardInterrupt):
            on_ranks(2, print)


@pytest.mark.long
def test_ranks_end_when_the_process_they_fork_from_is_killed() -> None:
    def kill_the_server(rank: int) -> None:
        if rank == 0:
            os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(1000)

    with (
        no_process_left(),
        pytest.raises(RuntimeError, match="the process that starts ranks ended"),
    ):
        on_ranks(2, kill_the_server)
    assert on_ranks(2, lambda rank: rank) == [0, 1], "the next call starts a new one"


def test_a_child_that_left_the_group_and_session_of_its_rank_ends_too() -> None:
    with no_process_left():
        on_ranks(2, lambda rank: subprocess.Popen(["sleep", "1000"], start_new_session=True).pid)


def test_the_helper_sees_a_process_that_has_left_its_parent_group_and_session() -> None:
    before = descendants()
    subprocess.run(["sh", "-c", "setsid sleep 1000 > /dev/null 2>&1 &"], check=True)
    limit = time.monotonic() + 20
    while (
        list((started := descendants(others=before)).values()) != ["sleep 1000"]
        and time.monotonic() < limit
    ):
        time.sleep(0.02)  # it is a shell first, then setsid
    for pid in started:
        os.kill(pid, signal.SIGKILL)
    assert list(started.values()) == ["sleep 1000"]
