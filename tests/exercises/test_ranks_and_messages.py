"""The graders of notebook 00: what learners really write, and what they are told."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from course_pp.exercises.formula import flawed
from course_pp.exercises.ranks_and_messages.exercises import (
    added_up,
    all_gather,
    contributions,
    even_ranks_send_first,
    exchange,
    shift,
)
from course_pp.launch import on_ranks
from tests.exercises.grading import accepts, hangs, refuses

# shift: right


def by_parity(x, rank, p):
    if p == 1:
        return x + 0
    received = torch.zeros_like(x)
    right, left = (rank + 1) % p, (rank - 1) % p
    if rank % 2 == 0:
        dist.send(x, right)
        dist.recv(received, left)
    else:
        dist.recv(received, left)
        dist.send(x, right)
    return received


def in_a_batch(x, rank, p):
    received = x.clone()
    if p > 1:
        sending = dist.P2POp(dist.isend, x, (rank + 1) % p)
        receiving = dist.P2POp(dist.irecv, received, (rank - 1) % p)
        for work in dist.batch_isend_irecv([receiving, sending]):
            work.wait()
    return received


def rank_0_receives_first(x, rank, p):
    received = torch.empty_like(x)
    if p == 1:
        return x.clone()
    first, second = (dist.recv, dist.send) if rank == 0 else (dist.send, dist.recv)
    peers = {dist.send: (x, (rank + 1) % p), dist.recv: (received, (rank - 1) % p)}
    first(*peers[first])
    second(*peers[second])
    return received


# shift: wrong


ALONE = "    if p == 1:\n        return x.clone()\n"
SENDING, WAITED = (
    "sending = dist.isend(x, dst=(rank + 1) % p)",
    "    sending.wait()  # type: ignore[union-attr]\n",
)
RECEIVING = "dist.recv(received, src=(rank - 1) % p)"
BOTH = f"    {SENDING}\n    {RECEIVING}\n{WAITED}"
HANDLES: list[Any] = []


def shift_with(*changes: tuple[str, str]) -> Callable[..., Any]:
    return flawed(shift, *changes)


def keeps_the_handle_and_does_not_wait(x, rank, p):
    if p == 1:
        return x.clone()
    received = torch.empty_like(x)
    HANDLES.append(dist.isend(x, (rank + 1) % p))
    dist.recv(received, (rank - 1) % p)
    return received


WRONG_SHIFTS = [
    (hangs(shift_with((BOTH, f"    dist.send(x, (rank + 1) % p)\n    {RECEIVING}\n"))),
     "waits in send", "none can move", "use isend"),
    (hangs(shift_with((BOTH, f"    {RECEIVING}\n    dist.send(x, (rank + 1) % p)\n"))),
     "waits in recv", "none can move", "send first"),
    # Two ranks cannot tell left from right.
    (shift_with(("dst=(rank + 1)", "dst=(rank - 1)"), ("src=(rank - 1)", "src=(rank + 1)")),
     "rank 0 of 3", "comes from the right", "(rank + 1) % p"),
    (hangs(shift_with(("dst=(rank + 1)", "dst=(rank - 1)"))),
     "on 3 ranks, was still running", "is it sent to the right, `(rank + 1) % p`?"),
    (shift_with(("dst=(rank + 1) % p", "dst=rank")),
     "on 2 ranks, raised ValueError: rank", "cannot send to itself: messages go to another rank"),
    (shift_with((ALONE, "")), "on one rank", "cannot send to itself"),
    (shift_with(("(rank + 1) % p", "rank + 1"), ("(rank - 1) % p", "rank - 1")), "modulo 2"),
    (hangs(shift_with((SENDING, "dist.isend(x, dst=(rank + 1) % p)"), (WAITED, ""))),
     "still running", "keep what it returns and call `wait()`"),
    # The handle dies with the call: what x becomes is sent, or nothing is. Each of the two is told.
    (hangs(keeps_the_handle_and_does_not_wait), "`isend`", "call `wait()` on"),
    (shift_with(("return x.clone()", "return x")),
     "rank 0 of 1", "returned `x` itself", "`x.clone()`"),
    (shift_with((SENDING, SENDING.replace("(x,", "(x.clone(),") + "; received = x")),
     "changed its argument `x`", "a tensor of its own"),
    (shift_with(("return received", "return x")), "its own `x`"),
    (shift_with(("    return received", "")), "is None", "Is a `return` missing?"),
    (shift_with(("torch.empty_like(x)", "torch.empty(3)")),
     "`x` is of torch.float64", "`torch.empty_like(x)`"),
]  # fmt: skip


@pytest.mark.sample(3)
@pytest.mark.parametrize("answer", [by_parity, in_a_batch, rank_0_receives_first])
def test_a_ring_without_a_deadlock_is_correct_however_it_is_written(
    answer: Callable[..., Any],
) -> None:
    accepts("shift", answer)


@pytest.mark.sample(3)
@pytest.mark.parametrize(("answer", "words"), [(answer, words) for answer, *words in WRONG_SHIFTS])
def test_a_shift_that_is_wrong_is_told_why(answer: Callable[..., Any], words: list[str]) -> None:
    refuses("shift", answer, *words)


# all_gather: right


def from_received_index(chunks, rank, p):
    sent, have = 0, (rank + 1) % p
    for _ in range(1, p):
        coming = (have - 1) % p
        sent += exchange(chunks[have], (rank + 1) % p, chunks[coming], (rank - 1) % p)
        have = coming
    return sent


def from_its_owner(chunks, rank, p):
    sent = torch.tensor(0)
    for distance in range(1, p):
        left = (rank - distance) % p
        sent += exchange(
            chunks[(rank + 1) % p], (rank + distance) % p, chunks[(left + 1) % p], left
        )
    return sent


# all_gather: wrong


def binds_a_name_to_what_came(chunks, rank, p):
    chunk = chunks[(rank + 1) % p]
    for step in range(p - 1):
        received = torch.empty_like(chunks[(rank - step) % p])
        exchange(chunk, (rank + 1) % p, received, (rank - 1) % p)
        chunk = received


def into_the_wrong_chunk(chunks, rank, p):
    complete = chunks[(rank + 1) % p].clone()
    for step in range(p - 1):
        received = torch.empty_like(complete)
        exchange(complete, (rank + 1) % p, received, (rank - 1) % p)
        chunks[(rank + 1 + step) % p].copy_(received)
        complete = received


def everything_at_every_step(chunks, rank, p):
    for step in range(p - 1):
        into = (rank - step) % p
        for i, chunk in enumerate(chunks):
            received = torch.empty_like(chunk)
            exchange(chunk, (rank + 1) % p, received, (rank - 1) % p)
            if i == into:
                chunk.copy_(received)


def by_the_library(chunks, rank, p):
    for i, chunk in enumerate(chunks):
        dist.broadcast(chunk, src=(i - 1) % p)


INDICES, STEPS = "(rank + 1 - step) % p, (rank - step) % p", "range(p - 1)"
INTO = ", chunks[into], (rank - 1) % p)"


def gather_with(*changes: tuple[str, str]) -> Callable[..., Any]:
    return flawed(all_gather, *changes)


def received_into(like: str, then: str) -> Callable[..., Any]:
    return gather_with(
        (INTO, f", (received := torch.empty_like({like})), (rank - 1) % p)\n        {then}")
    )


def returning(value: str) -> Callable[..., Any]:
    return gather_with(("return sent", f"return {value}"))


WRONG_GATHERS = [
    (gather_with((INDICES, "(rank - 1 - step) % p, (rank - 2 - step) % p")),
     "On 3 ranks, rank 0 received chunk 0 as it was on rank 1, unfinished", "`(rank + 1) % p`"),
    (gather_with((INDICES, "(rank - step) % p, (rank - 1 - step) % p")),
     "On 2 ranks", "as it was on rank 1, unfinished"),
    (gather_with((STEPS, "range(p - 2)")), "still unfinished on rank 0", "p - 1 steps"),
    (gather_with((STEPS, "range(p * (p > 1))")), "a rank sent", "bytes where"),
    (gather_with(("sent = 0", "sent, chunks = 0, [chunk.clone() for chunk in chunks]")),
     "still unfinished", "give `chunks[…]` to `exchange`", "`chunks[…].copy_(received)`"),
    (binds_a_name_to_what_came, "still unfinished", "`chunks[…].copy_(received)`"),
    (received_into("chunks[into]", "chunks[into] = received"),
     "item assignment", "is a tuple", "`chunks[…].copy_(received)`"),
    (received_into("chunks[into]", "chunks[into].add_(received)"),
     "was added to", "nothing is added"),
    (into_the_wrong_chunk, "holds numbers of another chunk", "same index"),
    (received_into("chunks[0]", "chunks[into].copy_(received)"),
     "on 3 ranks, raised RuntimeError: The size of tensor a"),
    (everything_at_every_step, "a rank sent 32 bytes where 16 are enough"),
    (by_the_library, "broadcast", "use `exchange` only"),
    (returning("sent // 8"),
     "rank 0 returned 2; it sent 16 bytes", "counts numbers, and each has 8 bytes"),
    (returning("p - 1"), "rank 0 returned 1; it sent 16 bytes", "the number of steps"),
    (returning("sum(chunk.nbytes for chunk in chunks) - chunks[(rank + 1) % p].nbytes"),
     "with chunks of 3, 2, 2 numbers", "That is what it received"),
    (returning("(p - 1) * chunks[rank].nbytes"),
     "with chunks of 3, 2, 2 numbers", "Chunks differ in length"),
    (returning("None"), "`all_gather(chunks, 0, 2)` is None", "Is a `return` missing?"),
]  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize("answer", [from_received_index, from_its_owner])
def test_a_gather_is_correct_however_it_is_written(answer: Callable[..., Any]) -> None:
    accepts("all_gather", answer)


@pytest.mark.sample(3)
@pytest.mark.parametrize(("answer", "words"), [(answer, words) for answer, *words in WRONG_GATHERS])
def test_a_gather_that_is_wrong_is_told_why(answer: Callable[..., Any], words: list[str]) -> None:
    refuses("all_gather", answer, *words)


# ring_seconds


@pytest.mark.parametrize(
    "answer",
    [
        lambda n_bytes, p, latency, bandwidth: (
            2 * (p - 1) * latency + 2 * (p - 1) / p * n_bytes / bandwidth
        ),
        lambda n_bytes, p, latency, bandwidth: torch.tensor(
            sum(latency + n_bytes / (p * bandwidth) for _ in range(2 * p - 2)), dtype=torch.float64
        ),
    ],
)
def test_the_time_is_correct_however_it_is_written(answer: Callable[..., Any]) -> None:
    accepts("ring_seconds", answer)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda n, p, a, b: (a + n / b) * max(1, 2 * p - 2), "one chunk"),
        (lambda n, p, a, b: 2 * (p - 1) * (a + n / p / b) or a, "One rank has nobody to send to"),
        (lambda n, p, a, b: None, "Is a `return` missing?"),
        (lambda n, p, a, b: f"{n / b} s", "is a str; a number is asked for"),
        (lambda n, p, a, b: float("nan"), "division by zero"),
    ],
)
def test_a_wrong_time_is_told_why(answer: Callable[..., Any], words: str) -> None:
    refuses("ring_seconds", answer, words)


# What the notebook looks at: its rings, and contributions that can be told apart.

N_BYTES = 240


def reduce_scatter(chunks, rank, p):
    sent = 0
    for step in range(p - 1):
        received = chunks[rank - step - 1].clone()
        sent += exchange(chunks[rank - step], (rank + 1) % p, received, (rank - 1) % p)
        chunks[rank - step - 1].add_(received)
    return sent


def adds_nothing(chunks, rank, p):
    return 0


def looked_at(rank):
    return (
        even_ranks_send_first(rank),
        contributions(rank, reduce_scatter),
        contributions(rank, reduce_scatter, all_gather),
        added_up(rank, N_BYTES, reduce_scatter),
        added_up(rank, N_BYTES, adds_nothing),
    )


def test_three_ranks_get_through_and_their_contributions_can_be_told_apart() -> None:
    received, halves, wholes, right, wrong = zip(*on_ranks(3, looked_at), strict=True)
    assert received == (2, 0, 1)
    assert halves == ([1, 111, 101], [11, 10, 111], [111, 110, 100])
    assert wholes == ([111, 111, 111],) * 3
    assert right == ((True, 2 * 2 * N_BYTES // 3),) * 3
    assert wrong == ((False, 2 * N_BYTES // 3),) * 3
