"""The graders of notebook 05, by what learners hand in."""

import math
from collections import deque
from collections.abc import Callable
from itertools import accumulate, cycle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from course_pp.exercises import zero_bubble_lab
from course_pp.exercises.zero_bubble import choose_schedule
from course_pp.exercises.zero_bubble_clinic import PATIENTS, examine, gradient_norm
from course_pp.exercises.zero_bubble_lab import one_after_another, time_halves
from course_pp.exercises.zero_bubble_orders import order_zb_h1, place_weights
from course_pp.exercises.zero_bubble_steps import healed_split_step
from course_pp.runtime import forward_stage, recv_gradient, send_activation, send_gradient
from course_pp.schedule import Action, build, check, simulate
from tests.exercises.grading import accepts, refuses

Answer = Callable[..., Any]


# The order of ZB-H1.


def with_lag(rank: int, p: int, m: int, lag: int, warm_up: int | None = None, drain: bool = True) -> list[Action]:
    """F and I of 1F1B, or of another warm-up; a W after each I but the first ``lag``, unless the drain has none."""
    ahead = min(m, p - 1 - rank if warm_up is None else warm_up)
    order, done = [Action(rank, "F", i) for i in range(ahead)], 0
    for i in range(m):
        order += [Action(rank, "F", ahead + i)] if ahead + i < m else []
        order.append(Action(rank, "I", i))
        if i >= lag and (drain or ahead + i < m):
            order.append(Action(rank, "W", done))
            done += 1
    return order + [Action(rank, "W", i) for i in range(done, m)]


def not_split(rank: int, p: int, m: int) -> list[Action]:
    return list(build("1f1b", p, m).actions[rank])  # type: ignore[arg-type]


def without_the_last(rank: int, p: int, m: int) -> list[Action]:
    return order_zb_h1(rank, p, m)[: 3 * m - rank]


def newest_first(rank: int, p: int, m: int) -> list[Action]:
    """Which W comes first makes no difference to time or memory."""
    row = order_zb_h1(rank, p, m)
    waiting, out = [], []
    for action in row:
        if action.kind == "I":
            waiting.append(action.microbatch)
        out.append(Action(rank, "W", waiting.pop()) if action.kind == "W" else action)
    return out


WRONG_ORDERS = [
    (not_split, "a whole backward", "Here it is split"),
    (lambda rank, p, m: with_lag(rank, p, m, 0), "units, and ZB-H1", "Each W comes right after its I"),
    (lambda rank, p, m: with_lag(rank, p, m, m), "holds 8 activations", "All W's come after the last F"),
    (lambda rank, p, m: with_lag(rank, p, m, p - 1 - rank), "holds 7 activations", "room is left for `rank`"),
    (lambda rank, p, m: with_lag(rank, p, m, rank, drain=False), "units, and ZB-H1", "do one W after each"),
    (lambda rank, p, m: with_lag(rank, p, m, 0, p - rank), "The warm-up is that of 1F1B"),
    (lambda rank, p, m: with_lag(rank, p, m, 0, 0), "units, and ZB-H1", "turns back too soon"),
    (without_the_last, "lacks", "those put off come last"),
    (lambda rank, p, m: order_zb_h1(0, p, m), "not rank 1's"),
    (lambda rank, p, m: [f"{a.kind}{a.microbatch}" for a in order_zb_h1(rank, p, m)], "no action"),
]


@pytest.mark.parametrize(("answer", "words"), [(answer, words) for answer, *words in WRONG_ORDERS])
def test_a_wrong_order_is_told_why(answer: Answer, words: list[str]) -> None:
    refuses("order_zb_h1", answer, *words)


def test_an_order_may_be_written_as_text_and_take_any_w_first() -> None:
    accepts("order_zb_h1", lambda rank, p, m: [str(action) for action in order_zb_h1(rank, p, m)])
    accepts("order_zb_h1", newest_first)


# The warm-up of ZB-H2.

WRONG_COUNTS = [
    (lambda rank, p, f, b: p - rank, "and the rank waits", "That is 1F1B"),
    (lambda rank, p, f, b: 2 * (p - 1 - rank) + 1, "as long as a forward"),
    (lambda rank, p, f, b: p - rank + (p - 1 - rank) * b // f, "round down"),
    (lambda rank, p, f, b: p - rank + (p - 1 - rank) * math.ceil(b / f), "add first, then round"),
    (lambda rank, p, f, b: 1 + p - rank + math.ceil((p - rank) * b / f), "own I is not in the way"),
    (lambda rank, p, f, b: p - rank + (p - 1 - rank) * b / f, "a float", "round up"),
]


@pytest.mark.parametrize(("answer", "words"), [(answer, words) for answer, *words in WRONG_COUNTS])
def test_a_wrong_count_of_forwards_is_told_why(answer: Answer, words: list[str]) -> None:
    refuses("forwards_first", answer, *words)


def test_forwards_may_be_counted_one_by_one() -> None:
    def counted(rank: int, p: int, f: float, b: float) -> int:
        arrives, n = (p - rank) * f + (p - 1 - rank) * b, 0
        while n * f < arrives:
            n += 1
        return n

    accepts("forwards_first", counted)
    accepts("forwards_first", lambda rank, p, f, b: -(-((p - rank) * f + (p - 1 - rank) * b) // f))


# Where W's may wait.


def at_once(order: list[Action], room: int) -> list[Action]:
    return [each for a in order for each in ([a, Action(a.stage, "W", a.microbatch)] if a.kind == "I" else [a])]


def at_the_end(order: list[Action], room: int) -> list[Action]:
    return order + [Action(a.stage, "W", a.microbatch) for a in order if a.kind == "I"]


def not_in_the_drain(order: list[Action], room: int) -> list[Action]:
    placed, held, waiting = [], 0, deque[Action]()
    for action in order:
        if action.kind == "F" and held == room and waiting:
            placed.append(waiting.popleft())
            held -= 1
        held += action.kind == "F"
        placed.append(action)
        if action.kind == "I":
            waiting.append(Action(action.stage, "W", action.microbatch))
    return placed + list(waiting)


def one_too_soon(order: list[Action], room: int) -> list[Action]:
    left, held, waiting, placed = sum(a.kind == "F" for a in order), 0, deque[Action](), []
    for action in order:
        if action.kind == "F" and held >= room - 1 and waiting:
            placed.append(waiting.popleft())
            held -= 1
        placed.append(action)
        if action.kind == "F":
            held, left = held + 1, left - 1
        else:
            waiting.append(Action(action.stage, "W", action.microbatch))
            if not left:
                placed.append(waiting.popleft())
    return [*placed, *waiting]


def in_place(order: list[Action], room: int) -> list[Action]:
    placed = place_weights(order, room)
    order[:] = placed
    return order


WRONG_PLACES = [
    (at_once, "units", "Is there room?"),
    (at_the_end, "activations at", "do the oldest first"),
    (not_in_the_drain, "units", "leaves that time idle"),
    (one_too_soon, "units", "delays an I"),
    (lambda order, room: [a for a in place_weights(order, room) if a.kind != "W"], "lacks", "those put off come last"),
    (lambda order, room: sorted(place_weights(order, room), key=lambda a: a.kind), "changes the order of F and I"),
    (in_place, "changed its argument"),
]


@pytest.mark.parametrize(("answer", "words"), [(answer, words) for answer, *words in WRONG_PLACES])
def test_a_wrong_place_for_a_weight_gradient_is_told_why(answer: Answer, words: list[str]) -> None:
    refuses("place_weights", answer, *words)


def test_weight_gradients_may_be_placed_by_counting_back() -> None:
    def after_the_input_gradient(order: list[Action], room: int) -> list[Action]:
        """The W that the next forward needs may as well come right after the I before it."""
        placed, forwards, finished, begun = [], 0, 0, 0
        n = sum(a.kind == "F" for a in order)
        for at, action in enumerate(order):
            placed.append(action)
            forwards += action.kind == "F"
            begun += action.kind == "I"
            ends = forwards == n and action.kind == "I"
            full = forwards - finished == room and at + 1 < len(order) and order[at + 1].kind == "F"
            if ends or (full and begun > finished):
                placed.append(Action(action.stage, "W", finished))
                finished += 1
        return placed + [Action(order[0].stage, "W", i) for i in range(finished, n)]

    accepts("place_weights", after_the_input_gradient)
    accepts("place_weights", lambda order, room: tuple(map(str, place_weights(order, room))))


# A budget.

WRONG_CHOICES = [
    (lambda points, s, a, budget: min(points, key=lambda name: points[name][1]), "which needs"),
    (
        lambda points, s, a, budget: min(
            (name for name in points if s + points[name][0] * a <= budget), key=lambda n: points[n][0], default=None
        ),
        "not the smallest",
    ),
    (
        lambda points, s, a, budget: choose_schedule(points, 0, a, budget),
        "which needs",
        "A rank needs its state",
    ),
    (lambda points, s, a, budget: choose_schedule(points, s, a, budget - 1e-6), "What needs exactly the budget fits"),
    (lambda points, s, a, budget: None, "though zb_v fits", "wherever `state + held * activation` is within"),
    (
        lambda points, s, a, budget: min((held, name) for name, (held, _) in points.items())[1],
        "its bubble is not the smallest",
        "Less memory than the budget buys nothing",
    ),
    (
        lambda points, s, a, budget: min(
            (name for name in points if s + points[name][0] * a <= budget), key=lambda n: points[n][1], default=None
        ),
        "holds less",
    ),
    (
        lambda points, s, a, budget: choose_schedule(
            {name: (bubble, held) for name, (held, bubble) in points.items()}, s, a, budget
        ),
        "the activations come first, then the bubble",
    ),
    (
        lambda points, s, a, budget: min(
            (name for name in points if s + points[name][0] * a <= budget), key=lambda n: points[n], default=None
        ),
        "Less memory than the budget buys nothing",
    ),
    (lambda points, s, a, budget: choose_schedule(points, s, a, budget) or "none", "no schedule of those"),
]


@pytest.mark.parametrize(("answer", "words"), [(answer, words) for answer, *words in WRONG_CHOICES])
def test_a_wrong_choice_is_told_why(answer: Answer, words: list[str]) -> None:
    refuses("choose_schedule", answer, *words)


def test_a_choice_may_be_made_by_sorting_or_by_a_loop() -> None:
    def by_loop(points: Any, state: float, activation: float, budget: float) -> Any:
        best = None
        for name, (held, bubble) in points.items():
            if state + held * activation > budget:
                continue
            if best is None or (bubble, held) < (points[best][1], points[best][0]):
                best = name
        return best

    def by_sorting(points: Any, state: float, activation: float, budget: float) -> Any:
        ordered = sorted(points, key=lambda name: points[name][::-1])
        return next((name for name in ordered if points[name][0] * activation + state <= budget), None)

    accepts("choose_schedule", by_loop)
    accepts("choose_schedule", by_sorting)


# The clinic: one function with everything that learners change about it.


def step_with(
    n_slots: Callable[[int, int, int], int] = lambda rank, p, m: min(m, p),
    lag: Callable[[int, int], int] = lambda rank, p: rank,
    freed_by: str = "W",
    free_it: Callable[[Any, Any], None] = lambda free, slot: free.append(slot),
    take: Callable[[Any], Any] = lambda waiting: waiting.popleft(),
    twice: bool = False,
    by_hand: bool = False,
    copies: bool = False,
    norm_of: Callable[[Any], Any] = gradient_norm,
) -> Answer:
    def step(stage: Any, microbatches: Any, targets: Any, loss_fn: Any, link: Any) -> Any:
        m, rank, ahead = len(microbatches), link.rank, link.n_ranks - 1 - link.rank
        free = deque(torch.empty(link.shape, dtype=link.dtype) for _ in range(n_slots(rank, link.n_ranks, m)))
        in_flight, waiting, sends = deque[Any](), deque[Any](), []

        def forward(i: int) -> None:
            slot = free.popleft()
            if link.is_first:
                slot.copy_(microbatches[i])
            else:
                dist.recv(slot, rank - 1)
            x = (slot.clone() if copies else slot.detach()).requires_grad_()
            y = forward_stage(stage, x, targets[i], loss_fn, link)
            in_flight.append((slot, x, y))
            sends.extend(send_activation(y, link))

        def input_backward() -> None:
            slot, x, y = in_flight.popleft()
            dy = recv_gradient(y, m, link)
            if twice:
                torch.autograd.backward(y, dy, retain_graph=True)
                dx = x.grad
            else:
                [dx] = torch.autograd.grad(y, x, dy, retain_graph=True)
            sends.extend(send_gradient(dx, link))
            waiting.append((slot, y, dy))
            if freed_by == "I":
                free.append(slot)

        def weight_backward() -> None:
            slot, y, dy = take(waiting)
            if by_hand:
                parameters = list(stage.parameters())
                for each, gradient in zip(parameters, torch.autograd.grad(y, parameters, dy), strict=True):
                    each.grad = gradient if each.grad is None else each.grad + gradient
            else:
                torch.autograd.backward(y, dy, inputs=list(stage.parameters()))
            if freed_by == "W":
                free_it(free, slot)

        for i in range(m + ahead):
            if i < m:
                forward(i)
            if i >= ahead:
                input_backward()
                if len(waiting) > lag(rank, link.n_ranks):
                    weight_backward()
        while waiting:
            weight_backward()
        for send in sends:
            send.wait()
        return norm_of(stage)

    return step


WRONG_STEPS = [
    (PATIENTS["A"], "Who has written to its slot"),
    (PATIENTS["B"], "which `y` meets which `dy`"),
    (PATIENTS["C"], "the gradients are right, but the norm", "after the last W"),
    (step_with(n_slots=lambda rank, p, m: p - rank), "pop from an empty deque", "If it is `free` that is empty"),
    (step_with(n_slots=lambda rank, p, m: m, freed_by="I"), "memory for 8 inputs", "1F1B lets a rank hold 4"),
    (step_with(freed_by="I", copies=True, n_slots=lambda rank, p, m: p + 2), "memory for", "copies of inputs"),
    (step_with(n_slots=lambda rank, p, m: 100, freed_by="nobody"), "memory for 100 inputs", "the slots, used or not"),
    (
        step_with(n_slots=lambda rank, p, m: m, free_it=lambda free, slot: free.appendleft(slot)),
        "memory for 8 inputs",
        "1F1B lets a rank hold 4",
    ),
    (step_with(lag=lambda rank, p: 0), "has done a W before its forward 3", "Let `rank` of them wait"),
    (step_with(twice=True), "twice too large"),
    (step_with(norm_of=lambda stage: None), "Is a `return` missing?"),
    (
        step_with(norm_of=lambda stage: sum(float(p.grad.square().sum()) for p in stage.parameters()) ** 0.5),
        "the norm on rank 0",
        "It is of all gradients",
    ),
]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("answer", "words"), [(answer, words) for answer, *words in WRONG_STEPS])
def test_a_wrong_step_is_told_why(answer: Answer, words: list[str]) -> None:
    refuses("healed_split_step", answer, *words)


def test_a_step_may_add_gradients_by_hand_take_any_w_first_and_have_p_slots() -> None:
    by_hand = step_with(by_hand=True, take=lambda waiting: waiting.pop(), n_slots=lambda rank, p, m: p)
    accepts("healed_split_step", by_hand)


def test_each_patient_shows_its_symptom_and_the_healed_step_none() -> None:
    found = {name: examine(step) for name, step in (*PATIENTS.items(), ("healed", healed_split_step))}
    wrong = {name: [list(rank.values()).count(False) for rank in each.by_rank] for name, each in found.items()}
    assert wrong == {"A": [0, 1, 1, 1], "B": [0, 3, 3, 0], "C": [0, 0, 0, 0], "healed": [0, 0, 0, 0]}
    assert [name for name, each in found.items() if each.norm == pytest.approx(each.norm_of_one)] == ["healed"]
    assert "rank 1: 3 right, 1 wrong: 1.0.weight" in str(found["A"])


# What the notebook measures and strings together.


@pytest.mark.parametrize(("name", "of_two"), [("zb_h1", 54), ("zb_h2", 51), ("dualpipe_v", 108)])
def test_steps_one_after_another_can_run_and_overlap_where_a_rank_is_done_early(name: str, of_two: int) -> None:
    steps = one_after_another(build(name, 4, 8))
    assert check(steps) == []
    assert steps.n_microbatches == 16
    assert simulate(steps).makespan == of_two


def test_each_half_of_a_backward_is_timed() -> None:
    seconds = time_halves(torch.nn.Linear(4, 4), torch.randn(2, 4), repeats=1)
    assert list(seconds) == ["F", "B", "I", "W"]
    assert min(seconds.values()) > 0


@pytest.mark.parametrize(
    ("i", "said"),
    [
        (1.0, ""),
        (2.5, "This machine was too busy: I is a part of B but took longer. Run the cell again.\n"),
    ],
)
def test_a_half_that_takes_longer_than_the_whole_is_said_to_be_the_machines(
    i: float, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ends = accumulate(time for took in cycle((1.0, 2.0, 1.0, i, 1.0)) for time in (0.0, took))
    monkeypatch.setattr(zero_bubble_lab, "time", SimpleNamespace(perf_counter=lambda: next(ends)))
    seconds = time_halves(torch.nn.Linear(4, 4), torch.randn(2, 4), repeats=1)
    assert seconds == {"F": 1.0, "B": 2.0, "I": i, "W": 1.0}
    assert capsys.readouterr().out == said
