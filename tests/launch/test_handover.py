"""Calls of `on_ranks` through a pretended Slurm: each gets its result, and nothing is left."""

import contextlib
import errno
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from course_pp.launch import LaunchError, guard, on_ranks, ranks, remote
from course_pp.launch.channel import RankJob
from course_pp.launch.on_slurm import TASKS, End, RemoteCall, call_file, end_file, write
from course_pp.launch.process import Process, shared_folder
from course_pp.launch.where import Needs, Place, load_site
from tests.launch.conftest import pretend
from tests.processes import no_process_left

pytestmark = pytest.mark.timeout(60)

# srun's parent is the guard, who leads the session of job 9.
SERVE = 'echo "9 $PPID" > "${0%/*}/sent"; shift 8; exec "$@"'
# The node has left after one call, and srun has not noticed yet.
SERVE_ONCE = (
    'echo "9 $PPID" > "${{0%/*}}/sent"; shift 8; [ -e {0} ] && exec "$@"; touch {0}; head -n 1 |'
    ' "$@"; sleep 2'
)
SQUEUE = (
    'case "$*" in *%L*) echo UNLIMITED;; *%t*) echo "R|gpu|None";; *allocsid*) cat "${0%/*}/sent"'
    " || :;; esac"
)


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cluster of one node, this machine. Nothing is left of it, not even in the shared folder."""
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("COURSE_PP_WHERE")
    monkeypatch.setenv("COURSE_PP_SITE", str(tmp_path / "site.toml"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    (tmp_path / "site.toml").write_text(f'folder = "{tmp_path / "shared"}"\n')
    (tmp_path / "bin").mkdir()
    for name, shell in (
        ("srun", SERVE),
        ("squeue", SQUEUE),
        ("sinfo", "true"),
        ("scancel", "true"),
    ):
        pretend(tmp_path / "bin" / name, shell)
    with no_process_left(within_s=15):
        yield tmp_path / "bin"
        TASKS.stop()
    assert not list(tmp_path.glob("shared/*"))


def test_threads_of_one_kernel_get_each_their_own_results(tools: Path, tmp_path: Path) -> None:
    def slow(rank: int, mine: str, seconds: float) -> str:
        (tmp_path / mine).touch()
        time.sleep(seconds)
        return mine

    def call(mine: str, seconds: float) -> None:
        results[mine] = on_ranks(1, slow, mine, seconds, backend=None)

    results: dict[str, list[str]] = {}
    first = threading.Thread(target=call, args=("first", 0.7))
    first.start()
    while not (tmp_path / "first").exists():
        time.sleep(0.02)
    call("second", 0.0)
    first.join()
    assert results == {"first": ["first"], "second": ["second"]}


@pytest.mark.long
def test_a_kept_job_needs_no_look_at_the_cluster_and_keeps_no_files(
    tools: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert on_ranks(1, lambda rank: "first", backend=None) == ["first"]
    pretend(tools / "sinfo", f"touch {tmp_path / 'asked'}")
    assert on_ranks(1, lambda rank: "second", backend=None) == ["second"]
    assert "kept since the last call" in capsys.readouterr().out
    assert not (tmp_path / "asked").exists()
    [folder] = (tmp_path / "shared").iterdir()
    assert not list(folder.iterdir())

    needs = Needs.of_call(1, 60, "gloo")
    assert TASKS.kept(needs, load_site(), None)
    assert TASKS._task is not None
    TASKS._task._answered_at -= load_site().keep_s
    assert not TASKS.kept(needs, load_site(), None), "it may leave before a call arrives"


@pytest.mark.long
def test_a_call_that_the_kept_job_did_not_take_any_more_runs_in_a_new_one(
    tools: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(tools / "srun", SERVE_ONCE.format(tmp_path / "served"))
    assert on_ranks(1, lambda rank: "first", backend=None) == ["first"]
    assert on_ranks(1, lambda rank: "second", backend=None) == ["second"]
    out = capsys.readouterr().out
    assert out.count("kept since the last call") == 1
    assert out.count("Ranks run in a Slurm job of their own") == 2


OURS = str(os.getuid())
IDLE = """
from course_pp.launch import remote
remote._LOOK_S = 0.1, 0.1
print(remote._next_calls(1000.0, remote._Others("course_pp")), flush=True)
"""
BUSY = """
from pathlib import Path
from types import SimpleNamespace
from course_pp.launch import remote
remote._LOOK_S, remote._TURN_S = (0.1, 1000.0), 0.5
remote.SERVERS = SimpleNamespace(get=lambda: None)
remote._answer = lambda folder, number: None
remote.main(Path(), 1000.0, "course_pp")
"""


@pytest.mark.parametrize(
    ("user", "reason", "in_vain"),
    [
        ("70001", "Resources", "(Nodes required for job are DOWN)"),
        ("70001", "Priority", "JobHeldUser"),
        ("70001", "AssocGrpCpuLimit", "AssocGrpCPUMinutesLimit"),
        (OURS, "QOSMaxJobsPerUserLimit", "BeginTime"),
        (OURS, "Resources", "QOSMaxCpuPerJobLimit"),
    ],
    ids=["cores", "its turn", "a group's share", "fewer jobs of ours", "cores for ours"],
)
def test_an_idle_job_takes_calls_until_a_job_of_the_course_waits_for_its_cores(
    tools: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    user: str,
    reason: str,
    in_vain: str,
) -> None:
    monkeypatch.setenv("SLURM_JOB_PARTITION", "gpu")
    asked = "--noheader --states=PD --name=course_pp -o %i %U %r --partition=gpu"
    pretend(
        tools / "squeue",
        f'touch {tmp_path / "looked"}; [ "$*" != "{asked}" ] || cat {tmp_path / "waiting"}',
    )

    def idle(then: Callable[[subprocess.Popen[str]], object]) -> str:
        (tmp_path / "looked").unlink(missing_ok=True)
        pipe = subprocess.PIPE
        with subprocess.Popen(
            [sys.executable, "-c", IDLE], stdin=pipe, stdout=pipe, text=True
        ) as node:
            assert node.stdin
            assert node.stdout
            while not (tmp_path / "looked").exists():
                time.sleep(0.02)
            then(node)
            return node.stdout.readline()

    (tmp_path / "waiting").write_text(
        f"11 {user} {in_vain}\n12 70002 QOSMaxJobsPerUserLimit\nodd\n"
    )
    assert idle(lambda node: print("2\n3", file=node.stdin, flush=True)) == "[2, 3]\n"
    assert (
        idle(lambda node: (tmp_path / "waiting").write_text(f"11 70002 None\n12 {user} {reason}\n"))
        == "[]\n"
    )


@pytest.mark.parametrize(
    ("waiting", "gives_way"),
    [("echo 12 70001 Priority", True), ("true", False), ("date +'%N 70001 Priority'", False)],
    ids=["one", "nobody", "another-each-time"],
)
def test_a_job_that_is_never_idle_leaves_between_calls_once_another_has_waited_for_a_turn(
    tools: Path, waiting: str, gives_way: bool
) -> None:
    pretend(tools / "squeue", waiting)
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", BUSY], stdin=pipe, stdout=pipe, bufsize=0) as node:
        assert node.stdin
        assert node.stdout
        answered = 0
        for number in range(1, 16):
            with contextlib.suppress(BrokenPipeError):
                node.stdin.write(b"%d\n" % number)
            if not node.stdout.readline():
                break
            assert node.stdout.readline() == b"course_pp ended call %d\n" % number, (
                "what has begun is never lost"
            )
            answered = number
            time.sleep(0.1)
        assert (2 <= answered < 15) if gives_way else answered == 15


def test_ranks_that_run_here_although_srun_is_at_hand_say_so_once(
    tools: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(tools / "sinfo", "exit 1")
    ranks._say_once.cache_clear()
    assert [on_ranks(1, lambda rank: "here", backend=None) for _ in range(2)] == [["here"]] * 2
    assert capsys.readouterr().out.count("No cluster answers behind srun.") == 1


@pytest.mark.parametrize(
    ("line", "sent"), [('setup = ["module load x"]', True), ('python = "/opt/python"', False)]
)
def test_the_search_path_goes_to_nodes_that_run_the_same_interpreter(
    tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, sent: bool
) -> None:
    def results(place: Place, needs: Needs, call: RemoteCall) -> list[bytes]:
        return [pickle.dumps(bool(call.job.sys_path))]

    (tmp_path / "site.toml").write_text(line)
    monkeypatch.setattr(TASKS, "results", results)
    assert on_ranks(1, print) == [sent]


def left_by_the_node(folder: Path) -> str:
    remote._answer(folder, 1)
    end: End = pickle.loads(end_file(folder, 1).read_bytes())
    assert end.results is None
    error, _, _ = pickle.loads(end.raised or b"")
    assert isinstance(error, LaunchError)
    assert not list(folder.glob("*.part"))
    return str(error)


def test_what_fails_around_a_call_is_told_with_the_folder_and_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert f"cannot read the call in {tmp_path}" in left_by_the_node(tmp_path)

    call = RemoteCall(RankJob(1, None, 1, 1.0, {}, (), "/no/such/folder", (), {}), b"")
    write(call_file(tmp_path, 1), call)
    assert "cannot enter the folder you are in, /no/such/folder" in left_by_the_node(tmp_path)
    assert not call_file(tmp_path, 1).exists()

    write(call_file(tmp_path, 1), replace(call, python=(3, 1)))
    ours = ".".join(map(str, sys.version_info[:2]))
    assert f"you call from Python 3.1, and the node runs Python {ours}" in left_by_the_node(
        tmp_path
    )

    def full(file: Path, data: bytes) -> int:
        with file.open("wb") as opened:
            opened.write(data[:4000])
        if len(data) > 4000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return len(data)

    monkeypatch.setattr(remote, "_end", lambda file: End((b"x" * 5000,)))
    monkeypatch.setattr(Path, "write_bytes", full)
    assert f"cannot be written to {tmp_path} (No space left on device)" in left_by_the_node(
        tmp_path
    )


@pytest.mark.parametrize(
    ("parent", "words"),
    [
        ("", "folder is '', which names none.*Set folder in site.toml"),
        ("~no-such-user/x", "in which none can be made.*Set folder in site.toml"),
        ("/dev/null", "in which none can be made.*Set folder in site.toml"),
        ("open", "where others may exchange what ranks are given.*chmod go-w"),
    ],
)
def test_a_shared_folder_that_is_of_no_use_or_not_ours_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parent: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "open").mkdir()
    for mode in (0o777, 0o2770):
        (tmp_path / "open").chmod(mode)
        with pytest.raises(ValueError, match=words):
            shared_folder(parent)
    assert not list((tmp_path / "open").iterdir())
    (tmp_path / "open").chmod(0o1777)
    with shared_folder("open") as folder:
        assert Path(folder).parent == tmp_path / "open"


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_an_interrupt_just_after_the_job_was_submitted_ends_it(
    tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Process, "watch", interrupted)
    # A notebook keeps the traceback, and in it whatever the frames hold.
    with no_process_left(within_s=15), pytest.raises(KeyboardInterrupt) as kept:
        on_ranks(1, print)
    assert kept.tb


def test_a_job_that_an_interrupt_cancels_is_said_to_be_and_only_one_of_our_own_gives_way(
    tools: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Process, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        on_ranks(1, print)
    _, shown, cancelled = capsys.readouterr().out.splitlines()
    assert shown.endswith(" 305 course_pp")
    assert cancelled == "the Slurm job is cancelled."
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with pytest.raises(KeyboardInterrupt):
        on_ranks(1, print)
    _, shown, cancelled = capsys.readouterr().out.splitlines()
    assert shown.endswith(" 305")
    assert cancelled == "the run in Slurm job 7 is cancelled.", "not the job itself"


STARTER = """
import os, subprocess, sys, time
guard, folder, home = sys.argv[1:]
command = [sys.executable, guard, str(os.getpid()), folder, "sleep", "1000"]
subprocess.Popen(command, stdin=subprocess.PIPE)
if os.fork() == 0:
    time.sleep(1000)
open(f"{home}/started", "w").close()
time.sleep(1000)
"""


def test_job_and_folder_go_with_a_killed_kernel_though_its_child_holds_the_pipe(
    tools: Path, tmp_path: Path
) -> None:
    # The controller is away at the first call.
    pretend(
        tools / "scancel",
        f'echo "$@" >> {tmp_path / "cancelled"}; [ $(wc -l < {tmp_path / "cancelled"}) = 2 ]',
    )
    (tmp_path / "shared" / "run").mkdir(parents=True)
    (tmp_path / "shared" / "run" / "call-1").touch()
    argv = [
        sys.executable,
        "-c",
        STARTER,
        str(guard.__file__),
        str(tmp_path / "shared" / "run"),
        str(tmp_path),
    ]
    starter = subprocess.Popen(argv, start_new_session=True)
    over = f'case "$*" in *--states=PENDING,*) ;; *) echo 7 {starter.pid};; esac'
    pretend(tools / "squeue", f"{over}; echo 8 1; echo 9 {starter.pid}")
    limit = time.monotonic() + 30
    while not (tmp_path / "started").exists():
        assert time.monotonic() < limit
        time.sleep(0.05)
    starter.kill()
    starter.wait()
    try:
        while (tmp_path / "shared" / "run").exists():
            assert time.monotonic() < limit, "the guard waits for the end of the pipe"
            time.sleep(0.05)
    finally:
        os.killpg(starter.pid, signal.SIGKILL)
    assert (tmp_path / "cancelled").read_text() == 2 * "--quiet 9\n", (
        "one job of three of the same name"
    )
