"""`on_ranks` in a process without streams or files, and with functions that do strange things."""

import io
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest

from course_pp.launch import LaunchError, RankDied, RanksHung, fork_server, on_ranks
from course_pp.launch.channel import Channel
from course_pp.launch.crew import Crew
from course_pp.launch.errors import SENDING
from course_pp.launch.fork_server import SERVERS, ForkServer

pytestmark = pytest.mark.timeout(60)


NO_STREAMS = """
import os, resource, signal, sys
from itertools import count, islice
from pathlib import Path
from course_pp.launch import on_ranks

sys.path[:] += [f"/no/such/{'x' * 200}/{i}" for i in range(2000)]
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())

def look(rank):
    print("\\N{RIGHTWARDS ARROW}")
    return rank, len(sys.path) >= 2000, signal.pthread_sigmask(signal.SIG_BLOCK, ())

try:
    said = on_ranks(2, look)
except BaseException as error:
    said = error
Path(sys.argv[1]).write_text(repr(said))
"""


@pytest.mark.long
def test_ranks_start_from_a_process_that_lacks_nearly_everything(
    tmp_path: Path,
) -> None:
    """No streams, few files, a long path, blocked signals, ASCII; each warning is an error."""
    plain = {
        "LC_ALL": "C",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONUTF8": "0",
        "PYTHONWARNINGS": "error",
    }
    run = 'exec "$@" 0<&- 1>&- 2>&-'
    argv = ["sh", "-c", run, "sh", sys.executable, "-c", NO_STREAMS, str(tmp_path / "said")]
    subprocess.run(argv, env={**os.environ, **plain}, timeout=50, check=True)
    assert (tmp_path / "said").read_text() == repr([(0, True, set()), (1, True, set())])


def test_where_nothing_is_printed_ranks_print_nothing_and_where_a_character_is_missing_an_escape(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert on_ranks(1, lambda rank: print("lost")) == [None]
    page = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(page, "ascii", write_through=True))
    on_ranks(1, lambda rank: print("a \N{RIGHTWARDS ARROW} \udcff"))
    assert page.getvalue() == b"[rank 0] a \\u2192 \\udcff\n"


def test_too_few_files_are_told_and_the_next_call_works() -> None:
    on_ranks(1, print)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = set(map(int, os.listdir("/dev/fd")))
    # leaves 8 unused below it
    few = next(islice((number for number in count() if number not in used), 8, None))
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            on_ranks(8, print)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert on_ranks(2, lambda rank: rank) == [0, 1]


@pytest.mark.ranks
def test_a_process_to_fork_from_that_is_stopped_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "_END_LIMIT_S", 0.1)
    server = ForkServer()
    server.process.send_signal(signal.SIGSTOP)
    server.stop()
    assert server.process.poll() == -signal.SIGKILL


class Rebuilt:
    """Is pickled as a call, made where it is rebuilt."""

    def __init__(self, call: Callable[..., Any], *args: Any) -> None:
        self.call = call, args

    def __reduce__(self) -> Any:
        return self.call


def refuse_elsewhere(pid: int) -> None:
    if os.getpid() != pid:
        raise LookupError("another process")


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (
            lambda: Rebuilt(time.sleep, 1000),
            RanksHung,
            "rank 0 sends what its function returned or raised",
        ),
        (lambda: Rebuilt(os._exit, 3), RankDied, "rank 0 ended with exit code 3 while it sent"),
        (
            lambda: Rebuilt(sys.exit, "bye"),
            TypeError,
            r"returned a Rebuilt that cannot be sent back \(SystemExit: bye",
        ),
        (
            lambda: Rebuilt(refuse_elsewhere, os.getpid()),
            TypeError,
            "what rank 0 returned cannot be rebuilt where",
        ),
    ],
    ids=["never", "ends the process", "leaves", "only on the rank"],
)
def test_a_result_that_cannot_be_rebuilt_is_one_sentence_within_the_time_limit(
    make: Callable[[], Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words) as failure:
        on_ranks(1, lambda rank: make(), timeout_s=1 if error is RanksHung else 30)
    if isinstance(failure.value, RanksHung):
        assert [wait.operation for wait in failure.value.waits] == [SENDING]
        assert "let the ranks return less" in str(failure.value)


def test_an_argument_that_cannot_be_rebuilt_on_a_rank_is_called_one() -> None:
    with pytest.raises(
        TypeError,
        match=r"its arguments cannot be rebuilt on a rank \(LookupError: another process\)",
    ):
        on_ranks(1, lambda rank, value: None, Rebuilt(refuse_elsewhere, os.getpid()))


def test_an_interrupt_that_a_rank_raises_is_not_taken_for_the_callers() -> None:
    def interrupt(rank: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(LaunchError, match="raised KeyboardInterrupt"):
        on_ranks(2, interrupt)


def test_a_rank_that_says_another_failed_first_is_believed_whatever_its_words() -> None:
    class Told(RuntimeError):
        began_elsewhere = True

    def fail(rank: int) -> None:
        if rank == 0:
            raise Told("told")
        time.sleep(0.2)
        raise LookupError("the reason")

    with pytest.raises(LookupError, match="the reason"):
        on_ranks(2, fail)


def test_what_a_function_forks_does_not_answer_for_the_rank() -> None:
    def fork(rank: int) -> str:
        if os.fork() == 0:
            return "child"
        time.sleep(0.3)
        return "rank"

    assert on_ranks(2, fork) == ["rank", "rank"]


def test_a_rank_that_moves_to_the_group_of_its_parent_ends_alone() -> None:
    on_ranks(1, print)
    server = SERVERS.pid()
    on_ranks(2, lambda rank: os.setpgid(0, os.getpgid(os.getppid())))
    assert on_ranks(1, lambda rank: os.getppid()) == [server]


def test_a_rank_that_closes_what_it_did_not_open_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def close(rank: int) -> None:
        if rank == 1:  # a thread of rank 0 serves the store, and would abort first
            os.closerange(3, 1000)

    with pytest.raises(RankDied, match="rank 1 ended with exit code 1"):
        on_ranks(2, close, backend=None)
    out, err = capsys.readouterr()
    assert err.startswith("[rank 1] this rank cannot reach its caller any more")
    assert (out, err.count("\n")) == ("", 1)


def test_the_callers_end_of_a_connection_never_waits_for_the_rest_of_a_message() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = Channel(ours)
        assert (channel.read(), channel.is_receiving) == (None, False)
        theirs.sendall((3).to_bytes(8, "big") + b"ab")
        assert (channel.read(), channel.read(), channel.is_receiving) == (None, None, True)
        theirs.sendall(b"c")
        assert (channel.read(), channel.is_receiving) == (b"abc", False)
        theirs.sendall(2 * ((1).to_bytes(8, "big") + b"d") + (9).to_bytes(8, "big") + b"a part")
        assert channel.read_all() == [b"d", b"d"]
        channel.send(bytes(10_000_000))
        channel.write()
        assert channel.is_sending


def test_the_end_of_a_rank_does_not_overtake_what_it_said(monkeypatch: pytest.MonkeyPatch) -> None:
    poll = Crew._poll

    def late(crew: Crew, seconds: float) -> None:
        time.sleep(0.2)  # all that it says, and its end, have arrived
        poll(crew, seconds)

    monkeypatch.setattr(Crew, "_poll", late)
    with pytest.raises(RankDied, match="rank 0 ended with exit code 3 while it sent"):
        on_ranks(1, lambda rank: Rebuilt(os._exit, 3))


def test_a_server_in_a_container_without_proc_does_without_huge_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def absent(file: str) -> str:
        raise FileNotFoundError(file)

    monkeypatch.setattr(fork_server, "_read", absent)
    fork_server._use_huge_pages()
