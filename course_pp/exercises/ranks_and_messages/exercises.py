"""Notebook 00: a ring without a deadlock, the second half of a ring all-reduce, and its cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_pp.exercises.answer import Answer
from course_pp.exercises.exercise import Exercise
from course_pp.exercises.expect import close, expect_number, expect_tensor
from course_pp.exercises.formula import Formula
from course_pp.exercises.in_process import unchanged
from course_pp.exercises.mistakes import OTHERWISE, Cause, Mistake, Stopped
from course_pp.exercises.traffic import Traffic, watched_traffic

_OVERWRITTEN = -1.0


def shift(x: Tensor, rank: int, p: int) -> Tensor:
    """Sends x to the right in a ring of p ranks; returns what came from the left."""
    if p == 1:
        return x.clone()
    received = torch.empty_like(x)
    sending = dist.isend(x, dst=(rank + 1) % p)
    dist.recv(received, src=(rank - 1) % p)
    sending.wait()  # type: ignore[union-attr]
    return received


def _mine(rank: int, dtype: torch.dtype) -> Tensor:
    return torch.tensor([10 * rank + 1, 10 * rank + 2, 10 * rank + 3], dtype=dtype)


def _shifted(
    rank: int, answer: Callable[..., Any], p: int, dtype: torch.dtype, late: int | None
) -> tuple[Any, bool]:
    """Return the result of the answer, and whether it is the memory of the argument.

    The argument is overwritten afterwards: the caller may do so.
    """
    x = _mine(rank, dtype)
    dist.barrier()
    if rank == late:
        time.sleep(0.3)
    with unchanged(x=x):
        got = answer(x, rank, p)
    is_x = False
    if isinstance(got, Tensor):
        is_x = got.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        got = got.clone()
    x.fill_(_OVERWRITTEN)
    return got, is_x


# Ranks, dtype, and the rank that comes late, if any.
_RINGS: tuple[tuple[int, torch.dtype, int | None], ...] = (
    (2, torch.float32, None),
    (3, torch.float32, None),
    (1, torch.float32, None),
    (4, torch.float64, None),
    (3, torch.float32, 1),
)


def _grade_shift(answer: Answer) -> None:
    for p, dtype, late in _RINGS:
        try:
            results = answer.on_ranks(p, _shifted, p, dtype, late)
        except Stopped as e:
            raise Mistake(
                e.symptom, _why_stopped(answer, p, dtype, e) or e.cause, e.example
            ) from None
        for rank, (got, is_x) in enumerate(results):
            _judge_shift(rank, p, dtype, got, is_x)


def _why_stopped(answer: Answer, p: int, dtype: torch.dtype, stopped: Stopped) -> str:
    """Return a better cause than the launcher's diagnosis; empty if there is none."""
    if p == 1 and (stopped.how == "endless" or stopped.error == "ValueError"):
        return "In a ring of one, left and right are the rank itself, which cannot send to itself."
    # gloo ends the process if a message is longer than the memory for it. With float32 the answer
    # was right.
    if stopped.how == "died" and dtype != torch.float32 and "os.abort" not in answer.source:
        return (
            f"Here `x` is of {dtype}, and what it is received into is smaller: memory like `x` has"
            " its shape and its dtype, `torch.empty_like(x)`."
        )
    if stopped.how == "changed":
        return "Receive into a tensor of its own; while it is being sent, nobody may write to `x`."
    if stopped.how != "endless":
        return ""
    if (
        "isend" in answer.source
        and ".wait(" not in answer.source
        and ".is_completed(" not in answer.source
    ):
        return (
            "`isend` only starts to send: keep what it returns and call `wait()` on it, or the send"
            " may be given up."
        )
    return _why_nothing_comes(stopped, p) if "isend" in answer.source else ""


def _why_nothing_comes(stopped: Stopped, p: int) -> str:
    """Explain why every rank waits after it has sent: one of its neighbours is wrong."""
    receiving = [wait for wait in stopped.waits if wait.operation == "recv"]
    if p < 3 or len(receiving) < p:
        return ""
    if all(wait.peers == ((wait.rank - 1) % p,) for wait in receiving):
        return (
            "Everyone waits for its left neighbour, and nothing comes: is it sent to the right,"
            " `(rank + 1) % p`?"
        )
    return "A rank receives from its left neighbour: `(rank - 1) % p`."


def _judge_shift(rank: int, p: int, dtype: torch.dtype, got: Any, is_x: bool) -> None:
    mine = _mine(rank, dtype)
    want = _mine((rank - 1) % p, dtype)
    where = f"rank {rank} of {p}"
    left = (rank - 1) % p
    if p > 1 and isinstance(got, Tensor) and _is_number(got, left):
        cause = "`x` goes round: send it, and receive into memory like it, `torch.empty_like(x)`."
        raise Mistake(
            f"On {where}, `shift` returned {left}, the number of the left neighbour, not its `x`.",
            cause,
        )
    value = expect_tensor(got, f"shift(x, {rank}, {p})", mine.shape, dtype)
    if torch.equal(value, want):
        if is_x:
            raise Mistake(
                f"On {where}, `shift` returned `x` itself.",
                "A caller that overwrites `x` would change the result, too: return `x.clone()`.",
            )
        return
    if torch.equal(value, torch.full_like(value, _OVERWRITTEN)):
        raise Mistake(
            f"On {where}, `shift` returned what the left neighbour wrote into `x` after its own"
            " `shift` had returned.",
            "`isend` does not copy: call `wait()` on what it returned before you return.",
        )
    cause = "A message is read as it is once `recv` has returned, or `wait()` of an `irecv`."
    if torch.equal(value, mine):
        cause = "That is its own `x`: return the tensor that was received."
    elif torch.equal(value, _mine((rank + 1) % p, dtype)):
        cause = (
            "That comes from the right: send to `(rank + 1) % p`, receive from `(rank - 1) % p`."
        )
    raise Mistake(
        f"On {where}, `shift` returned something else than the left neighbour's `x`.",
        cause,
        f"returned  {value.tolist()}\nexpected  {want.tolist()}, the x of rank {(rank - 1) % p}",
    )


def _is_number(got: Tensor, number: int) -> bool:
    """Whether a tensor has this number everywhere, or the bytes of it, read as floats."""
    as_long = got.flatten().contiguous().view(torch.uint8).tolist()[:8]
    return got.numel() > 0 and (
        bool((got == number).all()) or as_long == [*number.to_bytes(8, "little")]
    )


def exchange(out: Tensor, to: int, into: Tensor, source: int) -> int:
    """Sends one tensor while receiving another; returns the bytes sent. The notebook defines the same."""
    sending = dist.isend(out, dst=to)
    dist.recv(into, src=source)
    sending.wait()  # type: ignore[union-attr]
    return out.nbytes


def all_gather(chunks: Sequence[Tensor], rank: int, p: int) -> int:
    """Passes complete chunks round the ring until all ranks hold all; returns the bytes sent."""
    sent = 0
    for step in range(p - 1):
        out, into = (rank + 1 - step) % p, (rank - step) % p
        sent += exchange(chunks[out], (rank + 1) % p, chunks[into], (rank - 1) % p)
    return sent


def _unfinished(rank: int) -> int:
    """Return the value of an incomplete chunk before the gather, far from all others.

    So a sum of two chunks can be recognised.
    """
    return -100 * (rank + 1)


def _complete(n: int) -> Tensor:
    return torch.arange(1, n + 1)


def _gathered(
    rank: int, answer: Callable[..., Any], p: int, n: int
) -> tuple[list[int], Any, Traffic]:
    """Return the tensor's numbers after the answer's gather, its return value and its traffic."""
    x = torch.full((n,), _unfinished(rank))
    chunks = x.tensor_split(p)
    complete = _complete(n).tensor_split(p)
    chunks[(rank + 1) % p].copy_(complete[(rank + 1) % p])
    with watched_traffic() as traffic:
        returned = answer(chunks, rank, p)
    return x.tolist(), returned, traffic


_IN_PLACE = (
    "Write what is received into the chunk's own memory: give `chunks[…]` to `exchange` to receive"
    " into, or copy it there with `chunks[…].copy_(received)`."
)


def _grade_all_gather(answer: Answer) -> None:
    counts = []
    for p, n in ((2, 4), (3, 6), (4, 8), (3, 7), (4, 3), (1, 2)):
        try:
            results = answer.on_ranks(p, _gathered, p, n)
        except Stopped as e:
            cause = e.cause
            if "does not support item assignment" in e.symptom:
                cause = f"`chunks` is a tuple of views of one tensor. {_IN_PLACE}"
            raise Mistake(e.symptom, _why_nothing_comes(e, p) or cause, e.example) from None
        lengths = [len(chunk) for chunk in _complete(n).tensor_split(p)]
        uneven = ""
        if len(set(lengths)) > 1:
            uneven = f", with chunks of {', '.join(map(str, lengths))} numbers"
        run = f"On {p} rank{'s' if p > 1 else ''}{uneven}"
        values = [numbers for numbers, _, _ in results]
        if values != [_complete(n).tolist()] * p:
            raise _wrong_gather(run, values, p, n)
        if collectives := results[0][2].collectives:
            raise Mistake(
                f"{run}, the chunks are right, but `{collectives[0]}` of PyTorch brought them"
                " there.",
                "Here the question is what it has to do: use `exchange` only, with the two"
                " neighbours.",
            )
        allowed = _complete(n).element_size() * (p - 1) * max(lengths)
        if (most := max(traffic.n_bytes for _, _, traffic in results)) > allowed:
            raise Mistake(
                f"{run}, the chunks are right, but a rank sent {most} bytes where {allowed} are"
                " enough.",
                "In each of the p - 1 steps a rank passes on one chunk, the one that it received"
                " last.",
            )
        counts += [
            (run, rank, returned, traffic.n_bytes, lengths)
            for rank, (_, returned, traffic) in enumerate(results)
        ]
    for count in counts:
        _judge_returned(*count)


def _judge_returned(run: str, rank: int, returned: Any, sent: int, lengths: Sequence[int]) -> None:
    p = len(lengths)
    size = _complete(1).element_size()
    got = expect_number(returned, f"all_gather(chunks, {rank}, {p})")
    if close(got, sent):
        return
    causes = {
        sum(lengths) * size
        - lengths[(rank + 1) % p] * size: "That is what it received: what it sent is asked for.",
        (p - 1)
        * lengths[rank]
        * size: "Chunks differ in length: add up what each `exchange` returned.",
        (p - 1)
        * lengths[0]
        * size: "Chunks differ in length: add up what each `exchange` returned.",
        p - 1: "That is the number of steps. `exchange` returns the bytes of one: add these up.",
        sent // size: (
            f"That counts numbers, and each has {size} bytes. `exchange` returns bytes: add"
            " these up."
        ),
    }
    raise Mistake(
        f"{run}, the chunks are right, but rank {rank} returned {got:g}; it sent {sent} bytes.",
        causes.get(int(got), "Add up what each `exchange` returned."),
    )


def _wrong_gather(run: str, values: list[list[int]], p: int, n: int) -> Mistake:
    right = _complete(n).tolist()
    chunk_of = [chunk for chunk, part in enumerate(_complete(n).tensor_split(p)) for _ in part]
    wrong = [(rank, i) for rank in range(p) for i in range(n) if values[rank][i] != right[i]]
    example = "\n".join(f"rank {rank}: {row}" for rank, row in enumerate(values))
    example += f"\nexpected on all: {right} (-100, -200, …: unfinished, from rank 0, 1, …)"

    def found(kind: Callable[[int, int], bool]) -> tuple[int, int] | None:
        return next(((rank, i) for rank, i in wrong if kind(rank, values[rank][i])), None)

    unfinished = {_unfinished(rank) for rank in range(p)}
    if at := found(lambda rank, value: value not in unfinished and value not in right):
        symptom = f"{run}, chunk {chunk_of[at[1]]} of rank {at[0]} was added to."
        cause = "In this half nothing is added: a complete chunk replaces the other."
    elif at := found(lambda rank, value: value in unfinished and value != _unfinished(rank)):
        source = -values[at[0]][at[1]] // 100 - 1
        symptom = (
            f"{run}, rank {at[0]} received chunk {chunk_of[at[1]]} as it was on rank {source},"
            " unfinished."
        )
        cause = (
            "First a rank sends its complete chunk, `(rank + 1) % p`; later, the one it received"
            " last."
        )
    elif at := found(lambda rank, value: value in right):
        symptom = f"{run}, chunk {chunk_of[at[1]]} of rank {at[0]} holds numbers of another chunk."
        cause = (
            "The chunk that a rank receives into must have the same index as the one its left"
            " neighbour sends."
        )
    else:
        rank, i = wrong[0]
        symptom = (
            f"{run}, chunk {chunk_of[i]} is still unfinished on rank {rank}: nothing was received"
            " into it."
        )
        cause = f"There are p - 1 steps. {_IN_PLACE}"
    return Mistake(symptom, cause, example)


def ring_seconds(n_bytes: float, p: int, latency: float, bandwidth: float) -> float:
    """Seconds a ring all-reduce takes; bandwidth in bytes a second."""
    rounds = 2 * (p - 1)
    return rounds * (latency + n_bytes / p / bandwidth)


_WRONG_SECONDS = (
    (lambda n, p, a, b: (p - 1) * (a + n / p / b),
     "That is one half: reduce-scatter and all-gather take p - 1 each."),
    (lambda n, p, a, b: 2 * (p - 1) * (a + n / b),
     "A round moves one chunk, `n_bytes / p`, not the whole tensor."),
    (lambda n, p, a, b: a + 2 * (p - 1) * n / p / b,
     "Each of the rounds waits for the one before: all pay latency."),
    (lambda n, p, a, b: 2 * (p - 1) * a + n / p / b,
     "Each of the rounds moves a chunk, not only one of them."),
    (lambda n, p, a, b: 2 * (p - 1) * n / p / b, "The latency of the rounds is missing."),
    (lambda n, p, a, b: 2 * p * (a + n / p / b), "A chunk is complete after p - 1 hops, not p."),
    (lambda n, p, a, b: 2 * (p - 1) * (a + n / p * b),
     "Bytes divided by bytes a second are seconds."),
    (lambda n, p, a, b: 2 * (p - 1) * (a + n // p / b),
     "`//` drops the rest of the bytes: divide with `/`."),
    (lambda n, p, a, b: (p - 1) * (a + n / b), "That is everyone sending everything, not a ring."),
)  # fmt: skip
_RINGS_TIMED = [
    (8e6, 4, 1e-4, 1e9),
    (400.0, 8, 1e-5, 1e10),
    (3e9, 2, 2e-6, 5e10),
    (1e6, 1000, 1e-5, 1e9),
    (1e6, 1, 1e-5, 1e9),
    (1001, 4, 1e-6, 1e8),
]


_OTHER_SECONDS: Cause = (
    (lambda case, got, right: case[1] == 1, "One rank has nobody to send to."),
    (
        OTHERWISE,
        "The rounds follow each other: each pays the latency, and the time of one chunk.",
    ),
)
_GRADE_RING_SECONDS = Formula(ring_seconds, _RINGS_TIMED, _WRONG_SECONDS, _OTHER_SECONDS)


EXERCISES = (
    Exercise(shift, _grade_shift, "00", "a ring that does not hang", 1, 5, (
        "If all ranks begin with the same blocking call, all wait. Either the ranks differ, or the"
        " call does not block.",
        "`isend` starts to send and returns a handle. Then `recv` from `(rank - 1) % p` into a"
        " tensor like `x`, and only then `wait()` on the handle.",
        "`torch.empty_like(x)` has the shape and the dtype of `x`. In a ring of one there is nobody"
        " to send to: return a copy.",
    )),
    Exercise(all_gather, _grade_all_gather, "00", "the second half of the ring", 2, 10, (
        "It has the shape of `reduce_scatter`: p - 1 steps, each one `exchange` with the same two"
        " neighbours, but nothing is added.",
        "In step 0 a rank sends the only chunk that is complete there, `(rank + 1) % p`. Which one"
        " is its left neighbour sending at that moment?",
        "What arrived in one step is sent in the next: the index sent is `(rank + 1 - step) % p`,"
        " the index received `(rank - step) % p`.",
    )),
    Exercise(ring_seconds, _GRADE_RING_SECONDS, "00", "what an all-reduce costs", 1, 5, (
        "How many rounds are there, and how many bytes does a rank send in one of them?",
        "Each half has p - 1 rounds. A round takes the latency and the time of one chunk of"
        " `n_bytes / p`.",
    )),
)  # fmt: skip


Half = Callable[[Sequence[Tensor], int, int], object]
"""One half of a ring all-reduce: ``half(chunks, rank, p)`` changes ``chunks`` in place."""


def even_ranks_send_first(rank: int) -> int:
    """Send this rank's number to the right; return the number that came from the left.

    Sends block, so odd ranks receive first.
    """
    p = dist.get_world_size()
    mine, theirs = torch.tensor([rank]), torch.empty(1, dtype=torch.int64)
    right, left = (rank + 1) % p, (rank - 1) % p
    if rank % 2 == 0:
        dist.send(mine, dst=right)
        dist.recv(theirs, src=left)
    else:
        dist.recv(theirs, src=left)
        dist.send(mine, dst=right)
    return int(theirs)


def contributions(rank: int, *halves: Half) -> list[int]:
    """Run halves of a ring all-reduce in which rank r contributes 10^r to each chunk; return the
    chunks.

    So 111 is the complete sum of three ranks, and 101 lacks the part of rank 1.
    """
    p = dist.get_world_size()
    x = torch.full((p,), 10**rank)
    for half in halves:
        half(x.tensor_split(p), rank, p)
    return x.tolist()


def added_up(
    rank: int, n_bytes: int, reduce_scatter: Callable[[Sequence[Tensor], int, int], int]
) -> tuple[bool, int]:
    """All-reduce a float32 tensor in a ring: the half given, then the course's own all-gather.

    Returns:
        Whether the sum is that of ``dist.all_reduce``, and the bytes that this rank sent. The
        entries are small whole numbers, whose sums are exact in any order.
    """
    p = dist.get_world_size()
    x = torch.arange(n_bytes // 4, dtype=torch.float32) % 1000 * (rank + 1)
    total = x.clone()
    chunks = total.tensor_split(p)
    sent = reduce_scatter(chunks, rank, p) + all_gather(chunks, rank, p)
    dist.all_reduce(x)
    return torch.equal(total, x), sent
