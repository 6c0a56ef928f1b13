"""Two exercises of notebook 12: what a rank of a pipeline holds, and where data parallelism is as fast as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, floor
from typing import Any

from course_pp.exercises.answer import Answer, written_call
from course_pp.exercises.exercise import Mistake
from course_pp.exercises.expect import close, expect_number

__all__ = ["break_even", "bytes_held", "grade_break_even", "grade_bytes_held"]


def bytes_held(rank: int, pp: int, shard: int, layers: int, layer: int, matrix: int, kept: float, m: int) -> float:
    """Bytes on a rank of a 1F1B pipeline whose parameters are sharded."""
    n_layers = layers // pp + (rank < layers % pp)
    parameters = n_layers * layer
    if rank == 0:
        parameters += matrix
    if rank == pp - 1:
        parameters += matrix
    in_flight = min(pp - rank, m)
    return 16 * parameters / shard + in_flight * n_layers * kept


_Formula = Callable[..., float]


def _held(
    ends: str = "both",
    flight: Callable[[int, int, int], int] = lambda rank, pp, m: min(pp - rank, m),
    each: int = 16,
    cut: bool = False,
    even: Callable[[int, int, int], float] = lambda rank, pp, layers: layers // pp + (rank < layers % pp),
    whole: bool = False,
    a_layer: Callable[[float], float] = lambda n: n,
    uncut: bool = False,
) -> _Formula:
    """``bytes_held``, but for what is given."""

    def formula(rank: int, pp: int, shard: int, layers: int, layer: int, matrix: int, kept: float, m: int) -> float:
        n = even(rank, pp, layers)
        n_matrices = (rank == 0) * (ends in ("both", "first")) + (rank == pp - 1) * (ends in ("both", "last"))
        n_matrices += 2 * (ends == "everywhere") + (ends == "once" and rank in (0, pp - 1))
        ends_cut = n_matrices * matrix * (shard if uncut else 1)
        parameters = (n * layer + ends_cut) / (1 if whole else shard)
        return each * parameters + flight(rank, pp, m) * a_layer(n) * kept / (shard if cut else 1)

    return formula


_WRONG_BYTES: Sequence[tuple[_Formula, str]] = (
    (_held("none"), "The first stage holds the embedding, the last one the head: neither is in your answer."),
    (_held("first"), "The last stage holds the head, as large as the embedding."),
    (_held("last"), "The first stage holds the embedding, as large as the head."),
    (_held("once"), "A pipeline of one stage holds both, embedding and head."),
    (_held("everywhere"), "Only the first stage holds the embedding, and only the last one the head."),
    (_held(flight=lambda rank, pp, m: m),
     "1F1B has at most `pp - rank` microbatches in flight, not all of them (03)."),
    (_held(flight=lambda rank, pp, m: min(pp, m)),
     "Only rank 0 has `pp` microbatches in flight: later ranks have fewer."),
    (_held(flight=lambda rank, pp, m: pp - rank), "There are never more than `m` microbatches in flight."),
    (_held(flight=lambda rank, pp, m: 1), "Several microbatches are in flight at once, and each keeps its bytes (03)."),
    (_held(flight=lambda rank, pp, m: min(rank + 1, m)), "The first rank has most in flight, not the last."),
    (_held(each=4), "Gradients and AdamW's two moments stand beside the parameters: 16 bytes each, not 4."),
    (_held(each=2), "Parameters, gradients and two moments are kept in float32: 16 bytes each, not 2."),
    (_held(each=8), "Parameters, gradients and two moments are kept in float32: 16 bytes each, not 8."),
    (_held(each=12), "Parameters, gradients and *two* moments: 16 bytes each, not 12."),
    (_held(cut=True), "Shards cut parameters, not activations: each data-parallel rank has its own sequences."),
    (_held(whole=True), "FSDP cuts what is kept of each parameter into `shard` parts."),
    (_held(uncut=True), "FSDP cuts embedding and head into `shard` parts, too."),
    (_held(a_layer=lambda n: 1), "`kept` is of one layer: this rank has several."),
    (_held(flight=lambda rank, pp, m: 0), "Activations are not in your answer: `kept` bytes a layer and microbatch."),
    (_held(even=lambda rank, pp, layers: layers / pp), "Layers are whole: earlier stages take the extras."),
    (_held(even=lambda rank, pp, layers: layers // pp),
     "Where `pp` does not divide the layers, earlier stages take one more."),
    (_held(even=lambda rank, pp, layers: layers // pp + (rank >= pp - layers % pp)),
     "The *earlier* stages take the extras."),
    (_held(even=lambda rank, pp, layers: -(-layers // pp)), "Only the first `layers % pp` stages take one more."),
)  # fmt: skip


def grade_bytes_held(answer: Answer) -> None:
    """Ask for the bytes of every rank of four pipelines."""
    runs = [(1, 8, 32, 202_383_360, 131_072_000, 0.0, 16), (4, 2, 10, 12_000, 5_000, 700.0, 8)]
    runs += [(4, 3, 32, 218_112_000, 525_336_576, 6.5e8, 2), (3, 1, 4, 1000, 77, 50.0, 5)]
    cases = [(rank, *run) for run in runs for rank in range(run[0])]
    _judge(answer, cases, bytes_held, _WRONG_BYTES)


def break_even(n: int, parameters: float, batch: int, speed: float, bandwidth: float, each: int) -> float:
    """Tokens a sequence from which data parallelism is as fast as 1F1B."""
    # Ring: (n - 1) / n * 2 * each * parameters / bandwidth; bubble: (n - 1) / n * 6 * parameters * tokens / speed.
    return each * speed / (3 * bandwidth)


def _even(ring: float = 2.0, work: float = 6.0, power: Callable[..., float] = lambda n, batch: 1.0) -> _Formula:
    def formula(n: int, parameters: float, batch: int, speed: float, bandwidth: float, each: int) -> float:
        return ring * each * speed / (work * bandwidth) * power(n, batch)

    return formula


_SAME_WORK = (
    "Both ways do the work of the whole batch, in the same time. What differs is bubble and ring, each once a step."
)
_WRONG_TOKENS: Sequence[tuple[_Formula, str]] = (
    (_even(ring=1),
     "An all-reduce goes round twice, to sum and to pass on: `2 * (n - 1) / n` times the bytes (00)."),
    (_even(work=2), "Backward is work, too: 6 operations a parameter and token, not 2."),
    (_even(work=4), "Forward is work, too: 6 operations a parameter and token, not 4."),
    (_even(power=lambda n, batch: (n - 1) / n),
     "The bubble has the same (n - 1) / n as the ring: look at how long a stage's microbatch takes."),
    (_even(power=lambda n, batch: n / (n - 1)), "The ring has the same (n - 1) / n as the bubble."),
    (_even(power=lambda n, batch: n),
     "A rank of the ring sends an n-th of the bytes in each of its 2 (n - 1) steps, not all of them."),
    (_even(power=lambda n, batch: 1 / n),
     "A stage has an n-th of the layers, so a microbatch takes it an n-th of a sequence's time."),
    (_even(power=lambda n, batch: 1 / batch), _SAME_WORK),
    (_even(power=lambda n, batch: n / batch), _SAME_WORK),
    (_even(power=lambda n, batch: batch), _SAME_WORK),
    (lambda n, parameters, batch, speed, bandwidth, each: each * parameters * speed / (3 * bandwidth),
     "The gradients have `each * parameters` bytes, and the work grows with `parameters`, too."),
    (lambda n, parameters, batch, speed, bandwidth, each: speed / (3 * bandwidth), "A gradient has `each` bytes."),
    *((lambda *given, whole=whole: whole(break_even(*given)), "Give the tokens as they come out, not rounded.")
      for whole in (ceil, floor, round)),
    (lambda n, parameters, batch, speed, bandwidth, each: 3 * bandwidth / (each * speed),
     "This is one over the tokens: with a faster link fewer are enough."),
)  # fmt: skip


def grade_break_even(answer: Answer) -> None:
    """Ask for the tokens at which ring and bubble take the same time."""
    cases = [(8, 7e9, 64, 4e14, 4e10, 4), (16, 7e9, 64, 4e14, 4e10, 4), (8, 4.05e11, 64, 4e14, 4e10, 4)]
    cases += [(8, 7e9, 1024, 4e14, 4e10, 4), (2, 1.2e8, 6, 1e12, 1e9, 2), (64, 7e10, 64, 6e14, 3e11, 2)]
    _judge(answer, cases, break_even, _WRONG_TOKENS)


def _judge(
    answer: Answer, cases: Sequence[tuple[Any, ...]], right: _Formula, wrong: Sequence[tuple[_Formula, str]]
) -> None:
    calls = [written_call(answer.name, *case) for case in cases]
    got = [expect_number(value, call) for value, call in zip(answer.calls(cases), calls, strict=True)]
    missed = [i for i, case in enumerate(cases) if not close(got[i], right(*case))]
    if not missed:
        return
    causes = [
        why for each, why in wrong if all(close(value, each(*case)) for value, case in zip(got, cases, strict=True))
    ]
    i = missed[0]
    raise Mistake(f"`{calls[i]}` is {got[i]:,.6g}, not {right(*cases[i]):,.6g}.", causes[0] if causes else "")
