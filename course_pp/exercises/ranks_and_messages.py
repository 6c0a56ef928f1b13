"""Exercises of notebook 00: a ring without a deadlock, the second half of a ring all-reduce, and what one costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from course_pp.exercises.answer import Answer, written_call
from course_pp.exercises.exercise import Exercise, Mistake, Stopped
from course_pp.exercises.expect import close, expect_number, expect_tensor
from course_pp.exercises.traffic import watched_traffic

_LATE_S = 0.3
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
) -> tuple[Any, bool, list[float]]:
    """What the answer returned, whether in the memory of its argument, and what it left in that.

    Then the argument is overwritten, as is allowed.
    """
    x = _mine(rank, dtype)
    dist.barrier()
    if rank == late:
        time.sleep(_LATE_S)
    got = answer(x, rank, p)
    left, is_x = x.tolist(), False
    if isinstance(got, Tensor):
        is_x, got = got.untyped_storage().data_ptr() == x.untyped_storage().data_ptr(), got.clone()
    x.fill_(_OVERWRITTEN)
    return got, is_x, left


# Ranks, dtype, and the rank that comes late, if any.
_RINGS: tuple[tuple[int, torch.dtype, int | None], ...] = (
    (2, torch.float32, None),
    (3, torch.float32, None),
    (1, torch.float32, None),
    (4, torch.float64, None),
    (3, torch.float32, 1),
)


def grade_shift(answer: Answer) -> None:
    for p, dtype, late in _RINGS:
        try:
            results = answer.on_ranks(p, _shifted, p, dtype, late)
        except Stopped as e:
            raise Mistake(e.symptom, _why_stopped(answer, p, dtype, e) or e.cause, e.example) from None
        for rank, (got, is_x, left) in enumerate(results):
            _judge_shift(rank, p, dtype, got, is_x, left)


def _why_stopped(answer: Answer, p: int, dtype: torch.dtype, stopped: Stopped) -> str:
    """Return a better cause than the launcher's diagnosis; empty if there is none."""
    if p == 1 and (stopped.how == "endless" or stopped.error == "ValueError"):
        return "In a ring of one, left and right are the rank itself, which cannot send to itself."
    # gloo ends the process if a message is longer than the memory for it. With float32 the answer was right.
    if stopped.how == "died" and dtype != torch.float32:
        return (
            f"Here `x` is of {dtype}, and what it is received into is smaller: memory like `x` has its shape and its "
            "dtype, `torch.empty_like(x)`."
        )
    if stopped.how != "endless":
        return ""
    if "isend" in answer.source and "wait" not in answer.source and "is_completed" not in answer.source:
        return "`isend` only starts to send: keep what it returns and call `wait()` on it, or the send may be given up."
    return _why_nothing_comes(stopped, p) if "isend" in answer.source else ""


def _why_nothing_comes(stopped: Stopped, p: int) -> str:
    """Explain why every rank waits after it has sent: for the wrong neighbour, or for what went to the wrong one."""
    receiving = [wait for wait in stopped.waits if wait.operation == "recv"]
    if p < 3 or len(receiving) < p:
        return ""
    if all(wait.peers == ((wait.rank - 1) % p,) for wait in receiving):
        return "Everyone waits for its left neighbour, and nothing comes: is it sent to the right, `(rank + 1) % p`?"
    return "A rank receives from its left neighbour: `(rank - 1) % p`."


def _judge_shift(rank: int, p: int, dtype: torch.dtype, got: Any, is_x: bool, left: list[float]) -> None:
    mine, want = _mine(rank, dtype), _mine((rank - 1) % p, dtype)
    where = f"rank {rank} of {p}"
    if left != mine.tolist():
        raise Mistake(
            f"On {where}, `shift` changed `x` from {mine.tolist()} to {left}.",
            "Receive into a tensor of its own; while it is being sent, nobody may write to `x`.",
        )
    value = expect_tensor(got, f"shift(x, {rank}, {p})", mine.shape, dtype)
    if torch.equal(value, want):
        if is_x:
            raise Mistake(
                f"On {where}, `shift` returned `x` itself.",
                "Whoever overwrites `x` would change what came back, too: return `x.clone()`.",
            )
        return
    if torch.equal(value, torch.full_like(value, _OVERWRITTEN)):
        raise Mistake(
            f"On {where}, `shift` returned what the left neighbour wrote into `x` after its own `shift` had returned.",
            "`isend` does not copy: call `wait()` on what it returned before you return.",
        )
    cause = "A message is read as it is once `recv` has returned, or `wait()` of an `irecv`."
    if torch.equal(value, mine):
        cause = "That is its own `x`: return the tensor that was received."
    elif torch.equal(value, _mine((rank + 1) % p, dtype)):
        cause = "That comes from the right: send to `(rank + 1) % p`, receive from `(rank - 1) % p`."
    raise Mistake(
        f"On {where}, `shift` returned something else than the left neighbour's `x`.",
        cause,
        f"returned  {value.tolist()}\nexpected  {want.tolist()}, the x of rank {(rank - 1) % p}",
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
    """The value of an incomplete chunk before the gather; far from all others, so that a sum can be told."""
    return -100 * (rank + 1)


def _complete(n: int) -> Tensor:
    return torch.arange(1, n + 1)


class _Gathered(NamedTuple):
    """What a gather left on one rank: the values of the tensor, what it returned and sent, the collectives called."""

    values: list[int]
    returned: Any
    sent: int
    collectives: list[str]


def _gathered(rank: int, answer: Callable[..., Any], p: int, n: int) -> _Gathered:
    x = torch.full((n,), _unfinished(rank))
    chunks = x.tensor_split(p)
    complete = _complete(n).tensor_split(p)
    chunks[(rank + 1) % p].copy_(complete[(rank + 1) % p])
    with watched_traffic() as traffic:
        returned = answer(chunks, rank, p)
    return _Gathered(x.tolist(), returned, traffic.n_bytes, traffic.collectives)


_IN_PLACE = (
    "Write what is received into the chunk's own memory: give `chunks[…]` to `exchange` to receive into, or copy it "
    "there with `chunks[…].copy_(received)`."
)


def grade_all_gather(answer: Answer) -> None:
    counts = []
    for p, n in ((2, 4), (3, 6), (4, 8), (3, 7), (4, 3), (1, 2)):
        try:
            results = answer.on_ranks(p, _gathered, p, n)
        except Stopped as e:
            tuple_assigned = "does not support item assignment" in e.symptom
            cause = f"`chunks` is a tuple of views of one tensor. {_IN_PLACE}" if tuple_assigned else e.cause
            raise Mistake(e.symptom, _why_nothing_comes(e, p) or cause, e.example) from None
        lengths = [len(chunk) for chunk in _complete(n).tensor_split(p)]
        uneven = f", with chunks of {', '.join(map(str, lengths))} numbers" if len(set(lengths)) > 1 else ""
        run = f"On {p} rank{'s' if p > 1 else ''}{uneven}"
        values = [result.values for result in results]
        if values != [_complete(n).tolist()] * p:
            raise _wrong_gather(run, values, p, n)
        if collectives := results[0].collectives:
            raise Mistake(
                f"{run}, the chunks are right, but `{collectives[0]}` of PyTorch brought them there.",
                "Here the question is what it has to do: use `exchange` only, with the two neighbours.",
            )
        allowed = _complete(n).element_size() * (p - 1) * max(lengths)
        if (most := max(result.sent for result in results)) > allowed:
            raise Mistake(
                f"{run}, the chunks are right, but a rank sent {most} bytes where {allowed} are enough.",
                "In each of the p - 1 steps a rank passes on one chunk, the one that it received last.",
            )
        counts += [(run, rank, result, lengths) for rank, result in enumerate(results)]
    for count in counts:
        _judge_returned(*count)


def _judge_returned(run: str, rank: int, result: _Gathered, lengths: Sequence[int]) -> None:
    p, size, sent = len(lengths), _complete(1).element_size(), result.sent
    got = expect_number(result.returned, f"all_gather(chunks, {rank}, {p})")
    if close(got, sent):
        return
    causes = {
        sum(lengths) * size - lengths[(rank + 1) % p] * size: "That is what it received: what it sent is asked for.",
        (p - 1) * lengths[rank] * size: "Chunks differ in length: add up what each `exchange` returned.",
        (p - 1) * lengths[0] * size: "Chunks differ in length: add up what each `exchange` returned.",
        p - 1: "That is the number of steps. `exchange` returns the bytes of one: add these up.",
        sent // size: f"That counts numbers, and each has {size} bytes. `exchange` returns bytes: add these up.",
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
        symptom = f"{run}, rank {at[0]} received chunk {chunk_of[at[1]]} as it was on rank {source}, unfinished."
        cause = "First a rank sends its complete chunk, `(rank + 1) % p`; later, the one it received last."
    elif at := found(lambda rank, value: value in right):
        symptom = f"{run}, chunk {chunk_of[at[1]]} of rank {at[0]} holds numbers of another chunk."
        cause = "The chunk that a rank receives into must have the same index as the one its left neighbour sends."
    else:
        rank, i = wrong[0]
        symptom = f"{run}, chunk {chunk_of[i]} is still unfinished on rank {rank}: nothing was received into it."
        cause = f"There are p - 1 steps. {_IN_PLACE}"
    return Mistake(symptom, cause, example)


def ring_seconds(n_bytes: float, p: int, latency: float, bandwidth: float) -> float:
    """Seconds a ring all-reduce takes; bandwidth in bytes a second."""
    rounds = 2 * (p - 1)
    return rounds * (latency + n_bytes / p / bandwidth)


_RingFormula = Callable[[float, int, float, float], float]
_RING_MISTAKES: tuple[tuple[_RingFormula, str], ...] = (
    (lambda n, p, a, b: (p - 1) * (a + n / p / b), "That is one half: reduce-scatter and all-gather take p - 1 each."),
    (lambda n, p, a, b: 2 * (p - 1) * (a + n / b), "A round moves one chunk, `n_bytes / p`, not the whole tensor."),
    (lambda n, p, a, b: a + 2 * (p - 1) * n / p / b, "Each of the rounds waits for the one before: all pay latency."),
    (lambda n, p, a, b: 2 * (p - 1) * a + n / p / b, "Each of the rounds moves a chunk, not only one of them."),
    (lambda n, p, a, b: 2 * (p - 1) * n / p / b, "The latency of the rounds is missing."),
    (lambda n, p, a, b: 2 * p * (a + n / p / b), "A chunk is complete after p - 1 hops, not p."),
    (lambda n, p, a, b: 2 * (p - 1) * (a + n / p * b), "Bytes divided by bytes a second are seconds."),
    (lambda n, p, a, b: 2 * (p - 1) * (a + n // p / b), "`//` drops the rest of the bytes: divide with `/`."),
    (lambda n, p, a, b: (p - 1) * (a + n / b), "That is everyone sending everything, not a ring."),
)


def grade_ring_seconds(answer: Answer) -> None:
    cases = [
        (8e6, 4, 1e-4, 1e9),
        (400.0, 8, 1e-5, 1e10),
        (3e9, 2, 2e-6, 5e10),
        (1e6, 1000, 1e-5, 1e9),
        (1e6, 1, 1e-5, 1e9),
        (1001, 4, 1e-6, 1e8),
    ]
    results = answer.calls(cases)
    numbers = [
        expect_number(got, written_call("ring_seconds", *case)) for case, got in zip(cases, results, strict=True)
    ]
    for case, got in zip(cases, numbers, strict=True):
        want = ring_seconds(*case)
        if close(got, want):
            continue
        # On one rank several of the mistakes give the same number.
        several = [(c, g) for c, g in zip(cases, numbers, strict=True) if c[1] > 1]
        known = (cause for formula, cause in _RING_MISTAKES if all(close(g, formula(*c)) for c, g in several))
        alone = "One rank has nobody to send to." if case[1] == 1 else ""
        call = written_call("ring_seconds", *case)
        raise Mistake(f"`{call}` is {got:.10g}, not {want:.10g}.", next(known, alone))


EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        name="shift",
        notebook="00",
        title="a ring that does not hang",
        difficulty=1,
        minutes=5,
        hints=(
            "If all ranks begin with the same blocking call, all wait. Either the ranks differ, or the call does not "
            "block.",
            "`isend` starts to send and returns a handle. Then `recv` from `(rank - 1) % p` into a tensor like `x`, "
            "and only then `wait()` on the handle.",
            "`torch.empty_like(x)` has the shape and the dtype of `x`. In a ring of one there is nobody to send to: "
            "return a copy.",
        ),
        solution=shift,
        grade=grade_shift,
    ),
    Exercise(
        name="all_gather",
        notebook="00",
        title="the second half of the ring",
        difficulty=2,
        minutes=10,
        hints=(
            "It has the shape of `reduce_scatter`: p - 1 steps, each one `exchange` with the same two neighbours, but "
            "nothing is added.",
            "In step 0 a rank sends the only chunk that is complete there, `(rank + 1) % p`. Which one is its left "
            "neighbour sending at that moment?",
            "What arrived in one step is sent in the next: the index sent is `(rank + 1 - step) % p`, the index "
            "received `(rank - step) % p`.",
        ),
        solution=all_gather,
        grade=grade_all_gather,
    ),
    Exercise(
        name="ring_seconds",
        notebook="00",
        title="what an all-reduce costs",
        difficulty=1,
        minutes=5,
        hints=(
            "How many rounds are there, and how many bytes does a rank send in one of them?",
            "Each half has p - 1 rounds. A round takes the latency and the time of one chunk of `n_bytes / p`.",
        ),
        solution=ring_seconds,
        grade=grade_ring_seconds,
    ),
)
