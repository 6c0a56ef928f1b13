"""The graders of notebook 00: what learners really write, and what they are told."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from course_pp.exercises.ranks_and_messages import exchange
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


@hangs
def sends_first(x, rank, p):
    received = torch.empty_like(x)
    dist.send(x, (rank + 1) % p)
    dist.recv(received, (rank - 1) % p)
    return received


@hangs
def receives_first(x, rank, p):
    received = torch.empty_like(x)
    dist.recv(received, (rank - 1) % p)
    dist.send(x, (rank + 1) % p)
    return received


def to_the_left(x, rank, p):
    if p == 1:
        return x.clone()
    received = torch.empty_like(x)
    sending = dist.isend(x, (rank - 1) % p)
    dist.recv(received, (rank + 1) % p)
    sending.wait()
    return received


@hangs
def sends_where_it_receives_from(x, rank, p):
    if p == 1:
        return x.clone()
    received = torch.empty_like(x)
    sending = dist.isend(x, (rank - 1) % p)
    dist.recv(received, (rank - 1) % p)
    sending.wait()
    return received


def sends_to_itself(x, rank, p):
    dist.isend(x, rank).wait()
    return x.clone()


def forgets_the_ring_of_one(x, rank, p):
    received = torch.empty_like(x)
    sending = dist.isend(x, (rank + 1) % p)
    dist.recv(received, (rank - 1) % p)
    sending.wait()
    return received


def does_not_wrap_round(x, rank, p):
    received = torch.empty_like(x)
    sending = dist.isend(x, rank + 1)
    dist.recv(received, rank - 1)
    sending.wait()
    return received


@hangs
def does_not_wait(x, rank, p):
    if p == 1:
        return x.clone()
    received = torch.empty_like(x)
    dist.isend(x, (rank + 1) % p)
    dist.recv(received, (rank - 1) % p)
    return received


HANDLES = []


def keeps_the_handle_and_does_not_wait(x, rank, p):
    if p == 1:
        return x.clone()
    received = torch.empty_like(x)
    HANDLES.append(dist.isend(x, (rank + 1) % p))
    dist.recv(received, (rank - 1) % p)
    return received


def returns_x_from_a_ring_of_one(x, rank, p):
    return x if p == 1 else rank_0_receives_first(x, rank, p)


def receives_into_x(x, rank, p):
    if p == 1:
        return x
    sending = dist.isend(x.clone(), (rank + 1) % p)
    dist.recv(x, (rank - 1) % p)
    sending.wait()
    return x


def returns_its_own(x, rank, p):
    forgets_the_ring_of_one(x, rank, p)
    return x


def returns_nothing(x, rank, p):
    forgets_the_ring_of_one(x, rank, p)


def assumes_float32(x, rank, p):
    if p == 1:
        return x.clone()
    received = torch.empty(3)
    sending = dist.isend(x, (rank + 1) % p)
    dist.recv(received, (rank - 1) % p)
    sending.wait()
    return received


@pytest.mark.sample(3)
@pytest.mark.parametrize("answer", [by_parity, in_a_batch, rank_0_receives_first])
def test_a_ring_without_a_deadlock_is_correct_however_it_is_written(answer: Callable[..., Any]) -> None:
    accepts("shift", answer)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (sends_first, ["waits in send", "none can move", "use isend"]),
        (receives_first, ["waits in recv", "none can move", "send first"]),
        (to_the_left, ["comes from the right", "(rank + 1) % p"]),
        (sends_where_it_receives_from, ["on 3 ranks was still running", "is it sent to the right, `(rank + 1) % p`?"]),
        (
            sends_to_itself,
            ["on 2 ranks, raised ValueError: rank", "cannot send to itself: messages go to another rank"],
        ),
        (forgets_the_ring_of_one, ["on one rank", "cannot send to itself"]),
        (does_not_wrap_round, ["modulo 2"]),
        (does_not_wait, ["still running", "keep what it returns and call `wait()`"]),
        # The handle dies with the call: what x becomes is sent, or nothing is. Each of the two is told.
        (keeps_the_handle_and_does_not_wait, ["`isend`", "call `wait()` on"]),
        (returns_x_from_a_ring_of_one, ["rank 0 of 1", "returned `x` itself", "`x.clone()`"]),
        (receives_into_x, ["changed `x`", "a tensor of its own"]),
        (returns_its_own, ["its own `x`"]),
        (returns_nothing, ["is None", "Is a `return` missing?"]),
        (assumes_float32, ["`x` is of torch.float64", "`torch.empty_like(x)`"]),
    ],
)
def test_a_shift_that_is_wrong_is_told_why(answer: Callable[..., Any], words: list[str]) -> None:
    if answer is to_the_left:
        # Two ranks cannot tell left from right.
        words = [*words, "rank 0 of 3"]
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
        sent += exchange(chunks[(rank + 1) % p], (rank + distance) % p, chunks[(left + 1) % p], left)
    return sent


# all_gather: wrong


def counts_numbers(chunks, rank, p):
    return from_received_index(chunks, rank, p) // chunks[0].element_size()


def counts_steps(chunks, rank, p):
    from_received_index(chunks, rank, p)
    return p - 1


def counts_what_it_receives(chunks, rank, p):
    total = sum(chunk.nbytes for chunk in chunks)
    from_received_index(chunks, rank, p)
    return total - chunks[(rank + 1) % p].nbytes


def counts_as_if_chunks_were_equal(chunks, rank, p):
    from_received_index(chunks, rank, p)
    return (p - 1) * chunks[rank].nbytes


def counts_nothing(chunks, rank, p):
    from_received_index(chunks, rank, p)


def begins_with_the_chunk_before(chunks, rank, p):
    for step in range(p - 1):
        out, into = (rank - 1 - step) % p, (rank - 2 - step) % p
        exchange(chunks[out], (rank + 1) % p, chunks[into], (rank - 1) % p)


def begins_with_its_own_number(chunks, rank, p):
    for step in range(p - 1):
        out, into = (rank - step) % p, (rank - 1 - step) % p
        exchange(chunks[out], (rank + 1) % p, chunks[into], (rank - 1) % p)


def one_step_too_few(chunks, rank, p):
    for step in range(p - 2):
        out, into = (rank + 1 - step) % p, (rank - step) % p
        exchange(chunks[out], (rank + 1) % p, chunks[into], (rank - 1) % p)


def one_step_too_many(chunks, rank, p):
    for step in range(p):
        out, into = (rank + 1 - step) % p, (rank - step) % p
        if p > 1:
            exchange(chunks[out], (rank + 1) % p, chunks[into], (rank - 1) % p)


def binds_a_name_to_what_came(chunks, rank, p):
    chunk = chunks[(rank + 1) % p]
    for step in range(p - 1):
        received = torch.empty_like(chunks[(rank - step) % p])
        exchange(chunk, (rank + 1) % p, received, (rank - 1) % p)
        chunk = received


def puts_another_tensor_into_the_tuple(chunks, rank, p):
    for step in range(p - 1):
        out, into = (rank + 1 - step) % p, (rank - step) % p
        received = torch.empty_like(chunks[into])
        exchange(chunks[out], (rank + 1) % p, received, (rank - 1) % p)
        chunks[into] = received


def returns_new_chunks(chunks, rank, p):
    new = [chunk.clone() for chunk in chunks]
    from_received_index(new, rank, p)
    return new


def adds_as_in_the_first_half(chunks, rank, p):
    for step in range(p - 1):
        out, into = (rank + 1 - step) % p, (rank - step) % p
        received = torch.empty_like(chunks[into])
        exchange(chunks[out], (rank + 1) % p, received, (rank - 1) % p)
        chunks[into].add_(received)


def into_the_wrong_chunk(chunks, rank, p):
    complete = chunks[(rank + 1) % p].clone()
    for step in range(p - 1):
        received = torch.empty_like(complete)
        exchange(complete, (rank + 1) % p, received, (rank - 1) % p)
        chunks[(rank + 1 + step) % p].copy_(received)
        complete = received


def equal_lengths_only(chunks, rank, p):
    for step in range(p - 1):
        out, into = (rank + 1 - step) % p, (rank - step) % p
        received = torch.empty_like(chunks[0])
        exchange(chunks[out], (rank + 1) % p, received, (rank - 1) % p)
        chunks[into].copy_(received)


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


@pytest.mark.sample(2)
@pytest.mark.parametrize("answer", [from_received_index, from_its_owner])
def test_a_gather_is_correct_however_it_is_written(answer: Callable[..., Any]) -> None:
    accepts("all_gather", answer)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (
            begins_with_the_chunk_before,
            ["On 3 ranks, rank 0 received chunk 0 as it was on rank 1, unfinished", "`(rank + 1) % p`"],
        ),
        (begins_with_its_own_number, ["On 2 ranks", "as it was on rank 1, unfinished"]),
        (one_step_too_few, ["still unfinished on rank 0", "p - 1 steps"]),
        (one_step_too_many, ["a rank sent", "bytes where"]),
        (returns_new_chunks, ["still unfinished", "give `chunks[…]` to `exchange`", "`chunks[…].copy_(received)`"]),
        (binds_a_name_to_what_came, ["still unfinished", "`chunks[…].copy_(received)`"]),
        (puts_another_tensor_into_the_tuple, ["item assignment", "is a tuple", "`chunks[…].copy_(received)`"]),
        (adds_as_in_the_first_half, ["was added to", "nothing is added"]),
        (into_the_wrong_chunk, ["holds numbers of another chunk", "same index"]),
        (equal_lengths_only, ["on 3 ranks, raised RuntimeError: The size of tensor a"]),
        (everything_at_every_step, ["a rank sent 32 bytes where 16 are enough"]),
        (by_the_library, ["broadcast", "use `exchange` only"]),
        (counts_numbers, ["rank 0 returned 2; it sent 16 bytes", "counts numbers, and each has 8 bytes"]),
        (counts_steps, ["rank 0 returned 1; it sent 16 bytes", "the number of steps"]),
        (counts_what_it_receives, ["with chunks of 3, 2, 2 numbers", "That is what it received"]),
        (counts_as_if_chunks_were_equal, ["with chunks of 3, 2, 2 numbers", "Chunks differ in length"]),
        (counts_nothing, ["`all_gather(chunks, 0, 2)` is None", "Is a `return` missing?"]),
    ],
)
def test_a_gather_that_is_wrong_is_told_why(answer: Callable[..., Any], words: list[str]) -> None:
    refuses("all_gather", answer, *words)


# ring_seconds


@pytest.mark.parametrize(
    "answer",
    [
        lambda n_bytes, p, latency, bandwidth: 2 * (p - 1) * latency + 2 * (p - 1) / p * n_bytes / bandwidth,
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
        (lambda n, p, a, b: (p - 1) * (a + n / p / b), "one half"),
        (lambda n, p, a, b: 2 * (p - 1) * (a + n / b), "one chunk, `n_bytes / p`"),
        (lambda n, p, a, b: a + 2 * (p - 1) * n / p / b, "all pay latency"),
        (lambda n, p, a, b: 2 * (p - 1) * n / p / b, "latency of the rounds is missing"),
        (lambda n, p, a, b: 2 * (p - 1) * (a + n / p * b), "Bytes divided by bytes a second"),
        (lambda n, p, a, b: 2 * p * (a + n / p / b), "p - 1 hops"),
        (lambda n, p, a, b: 2 * (p - 1) * (a + n // p / b), "`//` drops the rest of the bytes"),
        (lambda n, p, a, b: (a + n / b) * max(1, 2 * p - 2), "one chunk"),
        (lambda n, p, a, b: 2 * (p - 1) * (a + n / p / b) or a, "One rank has nobody to send to"),
        (lambda n, p, a, b: None, "Is a `return` missing?"),
        (lambda n, p, a, b: f"{n / b} s", "is a str; a number is asked for"),
        (lambda n, p, a, b: float("nan"), "division by zero"),
    ],
)
def test_a_wrong_time_is_told_why(answer: Callable[..., Any], words: str) -> None:
    refuses("ring_seconds", answer, words)
