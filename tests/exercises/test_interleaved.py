"""The graders of notebook 04, by what learners hand in."""

from collections.abc import Callable
from dataclasses import replace
from math import sqrt
from typing import Any

import pytest
import torch
from torch import nn

from course_pp.exercises.formula import flawed
from course_pp.exercises.interleaved.exercises import (
    PATIENTS,
    best_chunks,
    examine,
    healed_chunks_step,
    lean,
    order_in_rounds,
    stages_of_rank,
    turns,
)
from course_pp.schedule import Action, Costs, Schedule, build, simulate
from tests.exercises.grading import accepts, refuses

Answer = Callable[..., Any]


def by_formula(p: int, m: int, layers: int, f: float, b: float, latency: float) -> int:
    steps = {}
    for v in range(1, layers + 1):
        if not layers % v:
            steps[v] = (m * v + p - 1) * (f + b) / v + (2 * (v * p - 1) * latency if p > 1 else 0)
    return min(steps, key=lambda v: (round(steps[v], 6), v))


def with_whole_ranks(p: int, m: int, layers: int, f: float, b: float, latency: float) -> int:
    def step(v: int) -> float:
        return float(simulate(build("interleaved_1f1b", p, m, v), Costs(f, b, 0, latency)).makespan)

    return min((v for v in range(1, layers + 1) if not layers % v), key=step)


def nearest_to_root(p: int, m: int, layers: int, f: float, b: float, latency: float) -> int:
    if not latency:
        return layers
    root = sqrt((p - 1) / p * (f + b) / (2 * latency))
    return min((v for v in range(1, layers + 1) if not layers % v), key=lambda v: abs(v - root))


def by_counter(rank: int, p: int, m: int, v: int, n: int) -> list[str]:
    """As Megatron-LM does it: the chunk follows from how many forwards there were."""
    table = [
        (chunk, i)
        for first in range(0, m, n)
        for chunk in range(v)
        for i in range(first, min(first + n, m))
    ]
    ahead = min(m * v, (v - 1) * n + 2 * (p - 1 - rank))
    order = []
    for k in range(m * v + ahead):
        if k < m * v:
            order.append(f"{table[k][0] * p + rank}F{table[k][1]}")
        if k >= ahead:
            chunk, i = table[k - ahead]
            order.append(f"{(v - 1 - chunk) * p + rank}B{i}")
    return order


def changed(**change: Any) -> Answer:
    """The right order, but for what a learner changes about it."""

    def order(rank: int, p: int, m: int, v: int, n: int) -> list[Action]:
        forwards, backwards = [], []
        for first in range(0, m, n):
            last = first + n if change.get("whole_rounds") else min(first + n, m)
            for chunk in range(v):
                back = chunk if change.get("up_again") else v - 1 - chunk
                forwards += [Action(chunk * p + rank, "F", i) for i in range(first, last)]
                backwards += [Action(back * p + rank, "B", i) for i in range(first, last)]
        if change.get("newest_first"):
            backwards = [Action(f.stage, "B", f.microbatch) for f in reversed(forwards)]
        warm_up = change.get("warm_up", lambda rank, p, m, v, n: (v - 1) * n + 2 * (p - 1 - rank))
        ahead = warm_up(rank, p, m, v, n)
        if change.get("cut", True):
            ahead = min(m * v, ahead)
        pairs = [
            action for pair in zip(forwards[ahead:], backwards, strict=False) for action in pair
        ]
        left = len(backwards) if change.get("no_drain") else m * v - ahead
        return forwards[:ahead] + pairs + backwards[left:]

    return order


def with_rounds_of(size: Callable[[int, int], int]) -> Answer:
    return lambda rank, p, m, v, n: order_in_rounds(rank, p, m, v, size(p, m))


def moved_by(microbatch: Answer) -> Answer:
    return lambda rank, p, m, v, n: [
        Action(action.stage, action.kind, microbatch(action, m, n))
        for action in order_in_rounds(rank, p, m, v, n)
    ]


def only(wanted: Answer) -> Answer:
    return lambda rank, p, m, v, n: [
        a for a in order_in_rounds(rank, p, m, v, n) if wanted(a, m, n)
    ]


def ahead_by(warm_up: Answer) -> Answer:
    return changed(warm_up=warm_up)


def by_search(rank: int, p: int, v: int, shape: str) -> tuple[int, ...]:
    there = range(p)
    ranks = [r for c in range(v) for r in (reversed(there) if shape == "V" and c % 2 else there)]
    return tuple(stage for stage, place in enumerate(ranks) if place == rank)


def in_halves(
    chunks: Any, order: Any, microbatches: Any, targets: Any, loss_fn: Any, ring: Any
) -> None:
    """A right step that keeps the arguments of a backward at its forward, and waits for sends late."""
    p, m, kept, sends = ring.n_ranks, len(microbatches), {}, []

    def forward(stage: int, i: int) -> None:
        x = ring.recv_activation() if stage else microbatches[i]
        y = nn.Sequential(chunks[(stage - ring.rank) // p])(x)
        if stage < ring.last_stage:
            sends.append(ring.send_activation(y))
        kept[i, stage] = (x, y) if stage < ring.last_stage else (x, loss_fn(y, targets[i]) / m)

    def backward(stage: int, i: int) -> None:
        x, y = kept.pop((i, stage))
        torch.autograd.backward(y, ring.recv_gradient() if y.dim() else None)
        if stage:
            sends.append(ring.send_gradient(x.grad))

    for action in order:
        (forward if action.kind == "F" else backward)(action.stage, action.microbatch)
    for send in sends:
        send.wait()


def ill(*changes: tuple[str, str]) -> Answer:
    return flawed(healed_chunks_step, *changes)


def by_kind(
    chunks: Any, order: Any, microbatches: Any, targets: Any, loss_fn: Any, ring: Any
) -> None:
    """All forwards, then all backwards."""
    forwards_first = sorted(order, key=lambda action: action.kind == "B")
    healed_chunks_step(chunks, forwards_first, microbatches, targets, loss_fn, ring)


def last_first(
    chunks: Any, order: Any, microbatches: Any, targets: Any, loss_fn: Any, ring: Any
) -> None:
    """As given, but for which microbatch is which: on all ranks alike."""
    turned = [
        replace(action, microbatch=len(microbatches) - 1 - action.microbatch) for action in order
    ]
    healed_chunks_step(chunks, turned, microbatches, targets, loss_fn, ring)


WRONG = {
    "warm_up_forwards": [
        (
            lambda rank, p, v: p - 1 - rank,
            "cannot run",
            "The first backward is in the *last* chunk",
        ),
        (
            lambda rank, p, v: v * (p - 1 - rank),
            "take",
            "a round of p forwards in each other chunk",
        ),
        (
            lambda rank, p, v: (v - 1) * p + 2 * (p - 1 - rank),
            "is no faster",
            "Megatron-LM's count",
        ),
        (lambda rank, p, v: (v - 1) * p, "cannot run", "each rank behind needs one to work on"),
        (lambda rank, p, v: (v - 1) * p + rank, "cannot run", "*shorter* from rank to rank"),
        (lambda rank, p, v: float(v * p - 1 - rank), "a float", "whole"),
        (
            lambda rank, p, v: p - 1 - rank - v if rank else v * p - 1,
            "is 0, not 6",
            "in the *last* chunk",
        ),
        (lambda rank, p, v: v * p - 1 - rank - 9, "is -2, not 7", "count the ranks behind"),
    ],
    "best_chunks": [
        (with_whole_ranks, "Without latency every chunk more"),
        (
            lambda *row: best_chunks(*row) if row[-1] == 0 else with_whole_ranks(*row),
            "a chunk takes a v-th of them",
        ),
        (lambda *row: best_chunks(*row) if row[2] != 6 else 2, "Add up the work"),
        (lambda *row: 3 if row[0] == 8 else best_chunks(*row), "cannot be cut into 3 equal chunks"),
        (lambda *row: sqrt(2.0), "round, and try both neighbours"),
        (lambda *row: best_chunks(*row) if row[0] > 1 else 2, "is 2, not 1", "take the fewest"),
        (nearest_to_root, "best_chunks(4, 12, 16, 24, 72, 4)", "The divisor nearest to the root"),
    ],
    "order_in_rounds": [
        (
            ahead_by(lambda rank, p, m, v, n: (v - 1) * p + 2 * (p - 1 - rank)),
            "cannot run",
            "rounds of n, not of p",
        ),
        (
            ahead_by(lambda rank, p, m, v, n: (v - 1) * n + p - 1 - rank),
            "messages that take 1",
            "too short",
        ),
        (
            ahead_by(lambda rank, p, m, v, n: m * v),
            "holds 16 activations at its peak; 11 are enough",
            "everything",
        ),
        (
            ahead_by(lambda rank, p, m, v, n: (v - 1) * n + 2 * (p - rank)),
            "holds 13 activations",
            "Count the warm-up",
        ),
        (
            ahead_by(lambda rank, p, m, v, n: (v - 1) * n + 3 * (p - 1 - rank)),
            "cannot run",
            "Count the warm-up",
        ),
        (
            changed(up_again=True),
            "backwards in another order",
            "in backward the last chunk comes first",
        ),
        (changed(newest_first=True), "backwards in another order", "comes back first"),
        (changed(no_drain=True), "lacks `0B2`", "as many backwards are left"),
        (
            changed(cut=False),
            "`order_in_rounds(0, 4, 4, 2, 4)` lacks `4B0`",
            "The warm-up is all forwards at most",
        ),
        (
            moved_by(lambda action, m, n: (action.microbatch + n) % m),
            "forwards in another order",
            "0 to n - 1",
        ),
        (
            only(lambda action, m, n: action.kind == "F" or action.microbatch >= m - n),
            "lacks `4B0`",
            "A round adds",
        ),
        (lambda *row: [], "`order_in_rounds(0, 4, 8, 2, 4)` is `[]`"),
        (changed(whole_rounds=True), "has `0F10`", "the last round takes what is left"),
        (with_rounds_of(lambda p, m: p), "forwards in another order", "A round is n microbatches"),
        (with_rounds_of(lambda p, m: m), "forwards in another order", "then comes the next round"),
        (
            lambda rank, p, m, v, n: order_in_rounds(0, p, m, v, n),
            "has `0F0`",
            "stage `c * p + rank`",
        ),
        (lambda rank, p, m, v, n: order_in_rounds(rank, p, m, v, n) * 2, "has `0F0` 2 times"),
    ],
    "stages_of_rank": [
        (
            lambda rank, p, v, shape: [rank, 2 * p - 1 - rank][:v],
            "'loop')` is [0, 7]",
            "is on rank s % p",
        ),
        (lambda rank, p, v, shape: [rank, rank + p][:v], "holds v = 3 stages"),
        (
            lambda rank, p, v, shape: stages_of_rank(rank, p, v, shape)[::-1],
            "in the order of the model",
        ),
        (
            lambda rank, p, v, shape: [
                c * p + (rank if shape == "loop" or not c else p - 1 - rank) for c in range(v)
            ],
            "The third goes down the ranks again",
        ),
    ],
    "healed_chunks_step": [
        (
            PATIENTS["B"],
            "chunk 0 wrong, chunk 1 none",
            "Which of its chunks does a rank need for stage s",
        ),
        (PATIENTS["C"], "chunk 0 wrong, chunk 1 right", "Ends are stages, not ranks"),
        (ill(("1 / m", "1")), "m times too large"),
        (ill(("in order:", "in [a for a in order if a.kind == 'F']:")), "No backward has run"),
        (ill(("stage // ring.n_ranks", "stage")), "IndexError", "`chunks[s // ring.n_ranks]`"),
        (ill(("kept.pop((stage, i))", "kept.pop((i, stage))")), "KeyError", "the same key"),
        (ill(("if stage > 0:", "if True:")), "there is no gradient to send: stage 0 has none"),
        (
            ill(
                (
                    "            else:\n                sends.",
                    "            if True:\n                sends.",
                )
            ),
            "the last stage sends none",
        ),
        (
            by_kind,
            "the gradients are right, but rank 0 works in another order",
            "Go through `order`",
        ),
        (last_first, "rank 0 was given 0F0 0F1", "and did 0F7 0F6", "Go through `order`"),
    ],
}
RIGHT = {
    "warm_up_forwards": [
        lambda rank, p, v: v * p - 1 - rank,
        lambda rank, p, v: sum(p for _ in range(v - 1)) + len(range(rank + 1, p)),
    ],
    "best_chunks": [by_formula],
    "order_in_rounds": [by_counter, changed()],
    "stages_of_rank": [
        by_search,
        lambda rank, p, v, shape: (
            range(rank, p * v, p) if shape == "loop" else by_search(rank, p, v, shape)
        ),
        lambda rank, p, v, shape: [*by_search(rank, p, v, shape)],
    ],
    "healed_chunks_step": [in_halves],
}


def cases(answers: dict[str, list[Any]], of_steps: bool) -> list[tuple[Any, ...]]:
    return [
        (name, each)
        for name, rows in answers.items()
        for each in rows
        if name.endswith("_step") == of_steps
    ]


@pytest.mark.parametrize(("name", "case"), cases(WRONG, of_steps=False))
def test_a_wrong_answer_is_told_why(name: str, case: tuple[Any, ...]) -> None:
    refuses(name, *case)


@pytest.mark.sample(3)
@pytest.mark.parametrize(("name", "case"), cases(WRONG, of_steps=True))
def test_an_ill_step_is_told_why(name: str, case: tuple[Any, ...]) -> None:
    refuses(name, *case)


@pytest.mark.parametrize(
    ("name", "answer"), [(name, each) for name, answers in RIGHT.items() for each in answers]
)
def test_a_right_answer_may_be_written_in_another_way(name: str, answer: Answer) -> None:
    accepts(name, answer)


@pytest.mark.parametrize(("p", "v"), [(2, 2), (4, 2), (4, 3), (8, 2)])
def test_the_shortest_warm_up_has_the_step_and_on_rank_0_the_memory_of_1f1b(p: int, v: int) -> None:
    """Rank 0 holds v p chunks, as the notebook says, and no rank can do with fewer."""
    m = 3 * p
    schedule = lean(p, m, v)
    short, roomy = simulate(schedule), simulate(build("interleaved_1f1b", p, m, v))
    assert short.makespan == roomy.makespan == 3 * (m * v + p - 1)
    assert short.peak_activations == tuple(v * p - rank for rank in range(p))
    assert roomy.peak_activations == tuple(
        (v - 1) * p + 2 * (p - 1 - rank) + 1 for rank in range(p)
    )


@pytest.mark.parametrize(("p", "v"), [(4, 2), (8, 2)])
def test_megatrons_room_makes_latency_cost_the_same_however_many_microbatches(
    p: int, v: int
) -> None:
    costs = Costs(latency=1)

    def added(schedule: Schedule) -> float:
        return float(simulate(schedule, costs).makespan - 3 * (schedule.n_microbatches * v + p - 1))

    rooms = [added(build("interleaved_1f1b", p, m, v)) for m in (p, 2 * p, 4 * p)]
    leans = [added(lean(p, m, v)) for m in (p, 2 * p, 4 * p)]
    assert set(rooms) == {2 * (v * p - 1)}
    assert leans == sorted(set(leans))


def test_each_patient_has_a_symptom_of_its_own() -> None:
    a, b, c = (examine(PATIENTS[name]) for name in "ABC")
    assert {finding for chunks in a.by_rank for finding in chunks.values()} == {"wrong"}
    assert a.value != pytest.approx(a.of_one, rel=1e-6)
    assert [list(chunks.values()).index("none") for chunks in b.by_rank] == [1, 0, 1, 0]
    assert b.value != pytest.approx(b.of_one, rel=1e-6)
    assert list(c.by_rank) == [{"chunk 0": "wrong", "chunk 1": "right"}] * 4
    assert c.value == pytest.approx(c.of_one)
    assert "  chunk 0: wrong, none , wrong, none\n" in str(b)


def test_a_healthy_step_has_every_gradient_of_one_process() -> None:
    assert examine(healed_chunks_step, n_ranks=2).equal


# Orders that the notebook compares.


def test_larger_rounds_turn_less_often_and_hold_more() -> None:
    small, whole = (build("interleaved_1f1b", 4, 16, 2, round_size=n) for n in (4, 16))
    breadth = build("looped_bfs", 4, 16, 2)
    assert (turns(whole), turns(breadth), turns(small)) == (3, 3, 47)
    assert (simulate(whole).peak_activations[0], simulate(breadth).peak_activations[0]) == (23, 32)
