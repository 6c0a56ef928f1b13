"""At the time limit, the watchdog says which rank waits for whom, where, and what to change."""

import ctypes
import linecache
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from course_pp.launch import RanksHung, Wait, crew, on_ranks, watch
from course_pp.launch.errors import COMPUTES, SENDING, explain, waiting_ring, waits_from
from course_pp.launch.watch import RankReport, WatchedCall

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that can answer is heard, however long it waits for a core."""
    monkeypatch.setattr(crew, "_ANSWER_LIMIT_S", 30.0)


def both_receive(rank: int) -> None:
    dist.recv(torch.zeros(1), src=1 - rank)


def ring_of_sends(rank: int) -> None:
    dist.send(torch.zeros(1), dst=(rank + 1) % 3)


def one_does_not_join(rank: int) -> None:
    if rank != 1:
        dist.all_reduce(torch.zeros(1))


def different_collectives(rank: int) -> None:
    if rank == 0:
        dist.barrier()
    else:
        dist.broadcast(torch.zeros(1), src=0)


def wait_on_work(rank: int) -> None:
    if rank == 0:
        work = dist.irecv(torch.zeros(1), src=1)
        assert work is not None
        work.wait()


def batched(rank: int) -> None:
    if rank == 0:
        for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, torch.zeros(1), 1)]):
            work.wait()


def ranks_of_a_subgroup(rank: int) -> None:
    group = dist.new_group([1, 2])
    if rank == 1:
        dist.recv(torch.zeros(1), group_src=1, group=group)


def one_makes_a_group(rank: int) -> None:
    if rank == 0:
        dist.new_group([0, 1])


def endless_loop(rank: int) -> None:
    while rank == 0:
        pass


HANGS: list[tuple[Callable[[int], None], int, list[tuple[str, tuple[int, ...]]], str, str]] = [
    (
        both_receive,
        2,
        [("recv", (1,)), ("recv", (0,))],
        "dist.recv(torch.zeros(1), src=1 - rank)",
        "Rank 0 waits for rank 1 and rank 1 for rank 0: none can move. Let one of them send first.",
    ),
    (
        ring_of_sends,
        3,
        [("send", (1,)), ("send", (2,)), ("send", (0,))],
        "dist.send(torch.zeros(1), dst=(rank + 1) % 3)",
        (
            "Rank 0 waits for rank 1, rank 1 for rank 2 and rank 2 for rank 0: none can move. Let"
            " one of them receive"
        ),
    ),
    (
        one_does_not_join,
        3,
        [("all_reduce", (1,)), ("returned", ()), ("all_reduce", (1,))],
        "dist.all_reduce(torch.zeros(1))",
        "Rank 1 has returned",
    ),
    (
        different_collectives,
        2,
        [("barrier", (1,)), ("broadcast", (0,))],
        "dist.barrier()",
        "Let all of them make their calls in the same order.",
    ),
    (wait_on_work, 2, [("recv", (1,)), ("returned", ())], "work.wait()", "Rank 1 has returned"),
    (batched, 2, [("recv", (1,)), ("returned", ())], "work.wait()", "Rank 1 has returned"),
    (
        ranks_of_a_subgroup,
        3,
        [("returned", ()), ("recv", (2,)), ("returned", ())],
        "group_src=1",
        "Rank 2 has returned",
    ),
    (
        one_makes_a_group,
        2,
        [("new_group", (1,)), ("returned", ())],
        "dist.new_group([0, 1])",
        "Rank 1 has returned",
    ),
    (
        endless_loop,
        2,
        [("computes", ()), ("returned", ())],
        "while rank == 0:|pass",
        "Nobody waits for a message",
    ),
]


@pytest.mark.usefixtures("_patient")
@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("hang", "n", "expected", "source", "advice"), HANGS, ids=[h[0].__name__ for h in HANGS]
)
def test_a_hang_is_explained(
    hang: Callable[[int], None],
    n: int,
    expected: list[tuple[str, tuple[int, ...]]],
    source: str,
    advice: str,
) -> None:
    with pytest.raises(RanksHung) as hung:
        on_ranks(n, hang, timeout_s=1)
    assert [(wait.operation, wait.peers) for wait in hung.value.waits] == expected
    assert [wait.rank for wait in hung.value.waits] == list(range(n))
    waiting = next(wait for wait in hung.value.waits if wait.operation != "returned")
    assert waiting.where.startswith("test_watchdog.py line ")
    assert any(text in waiting.where for text in source.split("|"))
    message = str(hung.value)
    assert "still running after 1 s" in message
    assert advice in message


@pytest.mark.usefixtures("_patient")
def test_the_line_of_a_notebook_cell_is_shown() -> None:
    file = "/tmp/ipykernel_1/2.py"
    source = "import time\ndef sleep(rank):\n    time.sleep(1000)\n"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    cell: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, file, "exec"), cell)
    with pytest.raises(RanksHung) as hung:
        on_ranks(1, cell["sleep"], timeout_s=1)
    assert hung.value.waits == (Wait(0, "computes", (), "cell line 3: time.sleep(1000)"),)


def test_a_rank_between_two_lines_is_reported_by_its_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code = SimpleNamespace(co_filename=__file__, co_firstlineno=1, co_name="between")
    between = SimpleNamespace(f_code=code, f_lineno=None, f_back=None)
    monkeypatch.setattr(sys, "_current_frames", lambda: {threading.main_thread().ident: between})
    assert watch.report(0).line == 1


def test_native_code_that_lets_no_thread_run_is_reported_as_silent() -> None:
    def hold_the_interpreter_or_receive(rank: int) -> None:
        if rank == 0:
            ctypes.PyDLL(None).sleep(100)  # lets no other thread run
        dist.recv(torch.zeros(1), src=0)

    with pytest.raises(RanksHung) as hung:
        on_ranks(2, hold_the_interpreter_or_receive, timeout_s=1)
    assert [(wait.operation, wait.peers) for wait in hung.value.waits] == [
        ("does not answer", ()),
        ("recv", (0,)),
    ]


def test_a_cycle_is_found_behind_ranks_that_only_wait_for_it() -> None:
    waits = (
        Wait(0, "recv", (1,), ""),
        Wait(1, "all_reduce", (2, 3), ""),
        Wait(2, "computes", (), ""),
        Wait(3, "send", (1,), ""),
    )
    assert [wait.rank for wait in waiting_ring(waits)] == [1, 3]
    assert "Rank 1 waits for rank 3 and rank 3 for rank 1" in explain(waits, 3)


def test_ranks_that_wait_for_all_later_ones_are_each_looked_at_once() -> None:
    last = 40
    waits = [Wait(rank, "recv", tuple(range(rank + 1, last + 1)), "") for rank in range(last)]
    assert waiting_ring([*waits, Wait(last, "computes", (), "")]) == ()
    ring = waiting_ring([*waits, Wait(last, "recv", (last - 1,), "")])
    assert {last - 1, last} <= {wait.rank for wait in ring}


def test_the_rank_that_others_wait_for_is_pointed_at() -> None:
    waits = (
        Wait(0, "recv", (1,), "cell line 2: dist.recv(x, 1)"),
        Wait(1, "computes", (), "cell line 5: f(x)"),
    )
    assert (
        explain(waits, 3.0) == "2 ranks still running after 3 s:\n"
        "  rank 0 waits in recv for rank 1 (cell line 2: dist.recv(x, 1))\n"
        "  rank 1 computes (cell line 5: f(x))\n"
        "Look at rank 1 first: the others wait for it."
    )


def test_ranks_that_are_all_in_one_collective_wait_for_nobody() -> None:
    call = WatchedCall("all_gather", (0, 1))
    waits = waits_from((rank, RankReport(rank, call, "", 0, ""), False) for rank in (0, 1))
    assert (
        explain(waits, 3.0) == "2 ranks still running after 3 s:\n"
        "  rank 0 is in all_gather, as every rank of its group is\n"
        "  rank 1 is in all_gather, as every rank of its group is"
    )


@pytest.mark.parametrize("operation", [COMPUTES, SENDING])
def test_who_interrupts_is_not_told_to_raise_the_time_limit(operation: str) -> None:
    waits = (Wait(0, operation, (), ""),)
    assert "aise timeout_s" in explain(waits, 3.0)
    assert "timeout_s" not in explain(waits, 3.0, interrupted=True)
