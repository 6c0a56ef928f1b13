"""What a grader notices of messages: whether the last one was waited for."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from course_pp.exercises.answer import Answer
from course_pp.exercises.mistakes import Mistake
from course_pp.exercises.traffic import last_message_waited_for

pytestmark = pytest.mark.ranks

N_MESSAGES = 2


def receives(rank: int) -> bool:
    if rank == 0:
        for _ in range(N_MESSAGES):
            dist.recv(torch.empty(1), 1)
    return rank == 0


def begun() -> list[dist.Work]:
    return [dist.isend(torch.ones(1), 0) for _ in range(N_MESSAGES)]  # type: ignore[misc]


def waits_for_all(rank: int) -> None:
    if not receives(rank):
        for handle in begun():
            handle.wait()


def waits_for_the_last(rank: int) -> None:
    if not receives(rank):
        first, last = begun()
        last.wait()
        assert first is not last


def sends_blocking(rank: int) -> None:
    if not receives(rank):
        for _ in range(N_MESSAGES):
            dist.send(torch.ones(1), 0)


def meets_at_a_barrier(rank: int) -> None:
    handles = [] if receives(rank) else begun()
    dist.barrier()
    handles.clear()


def waits_for_the_first(rank: int) -> None:
    if not receives(rank):
        first, last = begun()
        first.wait()
        assert first is not last


def waits_for_none(rank: int) -> None:
    if not receives(rank):
        begun()


def watched(rank: int, fn: Callable[[int], None]) -> None:
    with last_message_waited_for(rank, rank - 1):
        fn(rank)


@pytest.mark.parametrize(
    "answer", [waits_for_all, waits_for_the_last, sends_blocking, meets_at_a_barrier]
)
def test_a_last_message_that_is_known_to_be_taken_is_accepted(
    answer: Callable[[int], None],
) -> None:
    Answer(answer).on_ranks(2, watched)


@pytest.mark.parametrize("answer", [waits_for_the_first, waits_for_none])
def test_a_last_message_that_nobody_waits_for_is_refused_though_it_may_arrive(
    answer: Callable[[int], None],
) -> None:
    with pytest.raises(
        Mistake, match="Rank 1 returned before its last message to rank 0 was known to be taken"
    ):
        Answer(answer).on_ranks(2, watched)
