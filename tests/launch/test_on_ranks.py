"""`on_ranks` returns the ranks' results, shows their lines, and reports how they failed."""

import contextlib
import ctypes
import importlib
import io
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from course_pp.launch import (
    LaunchError,
    RankDied,
    RanksHung,
    RankTraceback,
    crew,
    fork_server,
    on_ranks,
    run_torchrun,
)
from course_pp.launch.surroundings import Lines
from tests.processes import no_process_left

pytestmark = pytest.mark.timeout(60)


def receive_from(peer: int) -> None:
    import torch
    import torch.distributed as dist

    dist.recv(torch.zeros(1), src=peer)


class ShapeError(ValueError):
    """Defined in a test module, like an exception in a cell."""


class TurnsIntoText(Exception):
    """Pickles, but what is built from it is no exception."""

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, ("text",)


class Unbuildable(Exception):
    """Pickles, but cannot be built again."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


@dataclass(frozen=True)
class Unmarkable(Exception):
    """Takes neither a cause nor a note."""

    value: int


@pytest.mark.parametrize("n", [1, 3])
def test_results_come_back_in_rank_order_from_a_ready_process_group(n: int) -> None:
    offset = 10

    def total(rank: int, scale: float) -> tuple[int, float, int, int]:
        import torch
        import torch.distributed as dist

        value = torch.tensor([rank * scale])
        dist.all_reduce(value)
        return rank + offset, value.item(), dist.get_world_size(), torch.get_num_threads()

    everything = 2.0 * sum(range(n))
    assert on_ranks(n, total, 2.0) == [(rank + offset, everything, n, 1) for rank in range(n)]


def test_a_rank_sees_torchruns_variables_and_the_callers_folder_path_arguments_and_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SET_FOR_THIS_CALL", "yes")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", "--pp=2"])
    (tmp_path / "beside_the_notebook.py").write_text("ANSWER = 42")
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SET_FOR_THIS_CALL")

    def look(rank: int) -> tuple[list[str], str, int, list[str]]:
        import beside_the_notebook

        return (
            [os.environ[name] for name in names],
            os.getcwd(),
            beside_the_notebook.ANSWER,
            sys.argv,
        )

    arguments = ["train.py", "--pp=2"]
    seen = [
        ([str(r), str(r), "2", "2", "yes"], os.path.realpath(tmp_path), 42, arguments)
        for r in range(2)
    ]
    assert on_ranks(2, look) == seen


@pytest.fixture
def _own_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ranks are forked from a process that no other test has had import anything."""
    servers = fork_server.ForkServers()
    monkeypatch.setattr(fork_server, "SERVERS", servers)
    monkeypatch.setattr(crew, "SERVERS", servers)
    yield
    servers.stop()


@pytest.mark.long
@pytest.mark.usefixtures("_own_server")
def test_what_is_no_string_in_the_callers_path_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])
    assert on_ranks(1, lambda rank: tmp_path in sys.path) == [False]


def test_a_rank_computes_with_as_many_threads_as_asked_for() -> None:
    assert on_ranks(1, lambda rank: torch.get_num_threads(), threads=2) == [2]


@pytest.mark.parametrize("argument", [3, threading.Lock()], ids=["sent", "refused"])
def test_how_a_test_module_is_pickled_stays_as_it_was(argument: object) -> None:
    before = cloudpickle.list_registry_pickle_by_value()
    with contextlib.suppress(TypeError):
        on_ranks(1, lambda rank, _: None, argument)
    assert cloudpickle.list_registry_pickle_by_value() == before


def test_without_a_backend_the_function_makes_the_group_itself() -> None:
    def join(rank: int) -> int:
        import torch.distributed as dist

        assert not dist.is_initialized()
        dist.init_process_group("gloo")
        return dist.get_world_size()

    assert on_ranks(2, join, backend=None) == [2, 2]


def test_output_arrives_in_whole_labelled_lines_whoever_wrote_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def talk(rank: int) -> None:
        print(f"python {rank}")
        subprocess.run(["echo", f"child {rank}"], check=True)
        ctypes.CDLL(None).puts(f"C {rank}".encode())
        print(f"error {rank}", file=sys.stderr)
        print("10%\r100%", end="")

    on_ranks(2, talk)
    out, err = capsys.readouterr()
    for rank in range(2):
        label = f"[rank {rank}] "
        assert {
            f"{label}{text}" for text in (f"python {rank}", f"child {rank}", f"C {rank}", "100%")
        } <= set(out.splitlines())
        assert f"{label}error {rank}" in err.splitlines()
    assert all(line.startswith("[rank ") for line in out.splitlines())


def test_bytes_that_are_no_text_are_shown_with_a_replacement(
    capsys: pytest.CaptureFixture[str],
) -> None:
    on_ranks(1, lambda rank: os.write(1, b"\xff\n"))
    assert capsys.readouterr().out == "[rank 0] \N{REPLACEMENT CHARACTER}\n"


def test_lines_are_whole_however_their_bytes_arrive() -> None:
    seen: list[str] = []
    lines = Lines(seen.append)
    for piece in (b"a", b"b", b"c\nd\n", b"", b"e", b"f"):
        lines.feed(piece)
    assert seen == ["abc", "d"]
    lines.close()
    assert seen == ["abc", "d", "ef"]


class SlowSink(io.StringIO):
    """Takes less in a second than a rank writes, like the page of a notebook."""

    def write(self, text: str) -> int:
        time.sleep(0.001)
        return len(text)


@pytest.mark.parametrize("fails", [False, True])
def test_ranks_that_print_faster_than_it_can_be_shown_end(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def print_or_fail(rank: int) -> None:
        if fails and rank == 1:
            time.sleep(0.3)
            raise ShapeError("the reason")
        while True:
            print("x" * 1000)

    monkeypatch.setattr(sys, "stdout", SlowSink())
    error, words = (
        (ShapeError, "the reason") if fails else (RanksHung, r"2 ranks still running after 0\.5 s")
    )
    with pytest.raises(error, match=words):
        on_ranks(2, print_or_fail, timeout_s=30 if fails else 0.5)


def test_what_a_rank_printed_before_it_failed_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    def print_and_fail(rank: int) -> None:
        print("x" * 50_000 + "\nlast words")
        raise ShapeError

    with pytest.raises(ShapeError):
        on_ranks(1, print_and_fail)
    assert capsys.readouterr().out.endswith("x\n[rank 0] last words\n")


def test_the_first_failing_rank_wins_with_its_own_exception_and_traceback() -> None:
    def fail(rank: int) -> None:
        if rank == 1:
            time.sleep(0.1)
            raise ShapeError("width 3 does not fit")
        receive_from(1)

    with pytest.raises(ShapeError, match="width 3 does not fit") as failure:
        on_ranks(3, fail)
    assert failure.value.__notes__ == ["Raised first on rank 1 of 3."]
    assert isinstance(failure.value.__cause__, RankTraceback)
    assert 'raise ShapeError("width 3 does not fit")' in str(failure.value.__cause__)


def test_a_rank_that_closes_its_connections_while_failing_still_wins_over_its_peers() -> None:
    def fail(rank: int) -> None:
        import torch.distributed as dist

        try:
            if rank == 1:
                raise ShapeError("the reason")
            receive_from(1)
        finally:
            if rank == 1:
                dist.destroy_process_group()
                time.sleep(0.1)

    with pytest.raises(ShapeError, match="the reason"):
        on_ranks(2, fail)


@pytest.mark.parametrize(
    ("leave", "exit_code", "words"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), -signal.SIGKILL, "SIGKILL"),
        (lambda: os.kill(os.getpid(), signal.SIGABRT), -signal.SIGABRT, "SIGABRT"),
        (lambda: os.kill(os.getpid(), 40), -40, "signal 40"),
        (lambda: os._exit(7), 7, "exit code 7"),
        (lambda: sys.exit(3), 3, r"sys\.exit\(3\)"),
    ],
    ids=["killed", "aborted", "signal without a name", "os._exit", "sys.exit"],
)
def test_a_rank_that_dies_is_named_and_its_peers_errors_do_not_hide_it(
    leave: Callable[[], None], exit_code: int, words: str
) -> None:
    def die(rank: int) -> None:
        if rank == 1:
            leave()
        receive_from(1)

    with pytest.raises(RankDied, match=f"rank 1 .*{words}") as death:
        on_ranks(2, die)
    assert (death.value.rank, death.value.exit_code) == (1, exit_code)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: threading.Lock(), TypeError, "rank 0 returned a lock that cannot be sent back"),
        (
            lambda: (_ for _ in ()).throw(Unbuildable(1, 2)),
            LaunchError,
            "rank 0 raised .*Unbuildable: 1 and 2",
        ),
        (
            lambda: (_ for _ in ()).throw(TurnsIntoText()),
            LaunchError,
            "rank 0 raised .*TurnsIntoText",
        ),
        (
            lambda: (_ for _ in ()).throw(Unmarkable(3)),
            LaunchError,
            "rank 0 raised .*Unmarkable: 3",
        ),
    ],
    ids=["result", "exception", "no exception", "frozen exception"],
)
def test_what_cannot_be_pickled_still_arrives_as_a_sentence(
    make: Callable[[], Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        on_ranks(1, lambda rank: make())


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: on_ranks(0, print), "n is 0; it must be at least 1"),
        (lambda: on_ranks(2, lambda: None), r"on_ranks calls <lambda>\(rank, \*args\) with 0 args"),
        (lambda: on_ranks(2, lambda rank, p: p), "missing a required argument: 'p'"),
        (lambda: on_ranks(2, print, threading.Lock()), "cannot be sent to the ranks"),
        (lambda: on_ranks(2, print, timeout_s=float("nan")), "timeout_s is nan"),
        (lambda: on_ranks(2, print, timeout_s=1e10), "pass for example timeout_s=3600"),
    ],
    ids=["no rank", "takes no rank", "too few", "lock", "nan", "too long"],
)
def test_a_call_that_cannot_work_is_refused_before_any_rank_starts(
    call: Callable[[], object], words: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        call()


def raise_key_error(*_: object, **__: object) -> None:
    raise KeyError("here")


def frames_of_ours(failure: BaseException) -> list[str]:
    frames = traceback.extract_tb(failure.__traceback__)
    return [Path(frame.filename).name for frame in frames if "course_pp/launch" in frame.filename]


@pytest.mark.ranks
@pytest.mark.parametrize(
    "call",
    [
        lambda: on_ranks(1, raise_key_error),
        lambda: on_ranks(1, print, where="nowhere"),
        lambda: run_torchrun(["nowhere.py"]),
    ],
    ids=["on a rank", "where", "no script"],
)
def test_a_script_shows_one_frame_of_ours_where_the_error_explains_itself(
    call: Callable[[], object],
) -> None:
    with pytest.raises((KeyError, ValueError, FileNotFoundError)) as failure:
        call()
    assert len(frames_of_ours(failure.value)) == 1


@pytest.mark.parametrize(
    ("owner", "part", "broken", "kind"),
    [(crew.Crew, "_poll", raise_key_error, KeyError), (crew, "_pipe", tuple, ValueError)],
    ids=["lookup", "unpacking"],
)
def test_a_fault_of_this_package_keeps_its_frames(
    monkeypatch: pytest.MonkeyPatch, owner: object, part: str, broken: object, kind: type[Exception]
) -> None:
    monkeypatch.setattr(owner, part, broken)
    with pytest.raises(kind) as failure:
        on_ranks(1, print)
    assert frames_of_ours(failure.value)[-1] == "crew.py"


def test_functions_that_mention_both_dist_and_a_config_go_there_and_back() -> None:
    """torch.distributed.config is a module of a class that cloudpickle cannot send by itself."""

    class Settings:
        config = 3

    def make(rank: int) -> Callable[[], int]:
        here = dist.get_rank() + Settings().config
        return lambda: here + dist.is_available() + Settings().config

    assert [made() for made in on_ranks(2, make)] == [7, 8]


def test_the_longest_time_limit_works() -> None:
    assert on_ranks(2, lambda rank: rank, timeout_s=1_000_000) == [0, 1]


def test_a_call_inside_a_rank_is_refused() -> None:
    with pytest.raises(RuntimeError, match="inside a rank of on_ranks"):
        on_ranks(1, lambda rank: on_ranks(1, print))


@pytest.mark.long
@pytest.mark.ranks
def test_a_script_without_a_main_guard_runs_once(tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text(
        textwrap.dedent("""
        from course_pp.launch import on_ranks
        print("top of the script")
        class Box:
            def __init__(self, value): self.value = value
        def boxed(rank): return Box(rank)
        results = on_ranks(2, boxed)
        assert all(type(box) is Box for box in results)
        print([box.value for box in results])
        """)
    )
    run = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=50, check=True
    )
    assert run.stdout.splitlines() == ["top of the script", "[0, 1]"]


def test_several_threads_can_start_ranks_at_once() -> None:
    results: dict[int, list[int]] = {}

    def call(k: int) -> None:
        results[k] = on_ranks(2, lambda rank: 10 * k + rank)

    threads = [threading.Thread(target=call, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {k: [10 * k, 10 * k + 1] for k in range(3)}


def test_the_server_that_ranks_fork_from_has_one_thread() -> None:
    def threads_of_parent(rank: int) -> int:
        return len(os.listdir(f"/proc/{os.getppid()}/task"))

    if sys.platform.startswith("linux"):
        assert on_ranks(1, threads_of_parent) == [1]


@pytest.mark.long
@pytest.mark.usefixtures("_own_server")
def test_what_a_rank_imported_of_this_package_is_there_for_the_next_call() -> None:
    def threads_and_what_was_there(rank: int) -> tuple[int, bool]:
        names = {
            f"course_pp.exercises.{name}.lab"
            for name in ("fsdp_reshard_policy", "dcp_checkpointing")
        }
        inherited = names <= sys.modules.keys()
        # Together they take longer to import than most steps of the course: tokenizers and xxhash
        # come along.
        import course_pp.exercises.dcp_checkpointing.lab
        import course_pp.exercises.fsdp_reshard_policy.lab  # noqa: F401

        tasks = f"/proc/{os.getppid()}/task"
        return len(os.listdir(tasks)) if sys.platform.startswith("linux") else 1, inherited

    on_ranks(2, threads_and_what_was_there)
    # It takes no thread into the server, from which the rank was forked.
    assert on_ranks(2, threads_and_what_was_there) == [(1, True)] * 2


@pytest.mark.usefixtures("_own_server")
def test_a_module_that_has_changed_is_imported_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A part of the package that does not lie in its folder, where other tests and the linter look
    # meanwhile.
    (tmp_path / "extends.py").write_text(
        f"import course_pp\ncourse_pp.__path__.append({str(tmp_path)!r})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    fork_server.SERVERS.get().preload(("extends",))

    def value_and_whether_it_was_there(rank: int) -> tuple[int, bool]:
        name = "course_pp.a_module_of_a_test"
        inherited = name in sys.modules
        return importlib.import_module(name).VALUE, inherited

    file = tmp_path / "a_module_of_a_test.py"
    steps = (1, 1_000_000_000, False), (1, 1_000_000_000, True), (22, 1_000_000_001, False)
    for value, written, inherited in steps:
        if not inherited:  # else the server may be reading it just now
            file.write_text(f"VALUE = {value}\n")
            os.utime(file, (written, written))
        assert on_ranks(2, value_and_whether_it_was_there) == [(value, inherited)] * 2


@pytest.mark.long
@pytest.mark.usefixtures("_own_server")
def test_what_reads_the_environment_of_the_call_is_not_kept_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def backend(rank: int) -> str:
        import matplotlib

        import course_pp.show.timelines  # noqa: F401

        return matplotlib.get_backend()

    for chosen in ("svg", "pdf"):
        monkeypatch.setenv("MPLBACKEND", chosen)
        assert on_ranks(1, backend) == [chosen]


@pytest.mark.parametrize(("peer", "operation"), [(5, "recv"), (-1, "send")])
def test_a_peer_that_does_not_exist_is_named(peer: int, operation: str) -> None:
    def reach(rank: int) -> None:
        if rank == 0:
            getattr(dist, operation)(torch.zeros(1), peer)

    with pytest.raises(
        ValueError, match=f"rank 0 (receives from|sends to) rank {peer}, but .* are 0 to 1"
    ):
        on_ranks(2, reach, timeout_s=10)


def test_nccl_without_a_gpu_a_rank_is_refused() -> None:
    with pytest.raises(ValueError, match="backend='nccl' needs a GPU"):
        on_ranks(torch.cuda.device_count() + 1, lambda rank: None, backend="nccl")


def test_an_interrupt_says_who_waited_for_whom(tmp_path: Path) -> None:
    script = tmp_path / "interrupted.py"
    script.write_text(
        "from course_pp.launch import on_ranks\n"
        "def swap(rank):\n"
        "    import torch, torch.distributed as dist\n"
        "    print('waiting', flush=True)\n"
        "    dist.recv(torch.zeros(1), src=1 - rank)\n"
        "on_ranks(2, swap)\n"
    )
    with no_process_left():
        process = subprocess.Popen(
            [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert "waiting" in process.stdout.readline()
        assert "waiting" in process.stdout.readline()
        time.sleep(1)  # from what it printed to the next line
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=40)
    assert "rank 0 waits in recv for rank 1" in errors
