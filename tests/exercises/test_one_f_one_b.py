"""The graders of notebook 03, by what learners hand in."""

import time
from collections import deque
from collections.abc import Callable
from itertools import chain, product
from math import ceil, floor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from course_pp.exercises.judging_steps import batch, layers, one_process
from course_pp.exercises.lopsided import LopsidedLoss
from course_pp.exercises.one_f_one_b import choose, held_with_latency, order_1f1b, with_room
from course_pp.exercises.one_f_one_b_steps import PATIENTS
from course_pp.launch import on_ranks
from course_pp.runtime import (
    Link,
    backward_stage,
    forward_stage,
    partition_model,
    recv_activation,
    recv_gradient,
    send_activation,
    send_gradient,
    train_step_pipeline_1f1b,
    train_step_pipeline_gpipe,
)
from course_pp.schedule import Action, Costs, build, simulate
from tests.exercises.grading import accepts, hangs, refuses
from tests.grids import folded

Answer = Callable[..., Any]


# The order.


def forwards(rank: int, m: int) -> list[Action]:
    return [Action(rank, "F", i) for i in range(m)]


def backwards(rank: int, m: int) -> list[Action]:
    return [Action(rank, "B", i) for i in range(m)]


def in_phases(rank: int, m: int, warm_up: int) -> list[Action]:
    """A warm-up of that many forwards, then one forward, one backward, then the backwards left."""
    f, b = forwards(rank, m), backwards(rank, m)
    return [*f[:warm_up], *chain(*zip(f[warm_up:], b, strict=False)), *b[m - warm_up :]]


def by_limit(rank: int, p: int, m: int) -> list[str]:
    order, f, b = [], 0, 0
    while b < m:
        if f < m and f - b < p - rank:
            order.append(f"{rank}F{f}")
            f += 1
        else:
            order.append(f"{rank}B{b}")
            b += 1
    return order


def newest_first(rank: int, p: int, m: int) -> list[Action]:
    row = order_1f1b(rank, p, m)
    numbers = iter(reversed(range(m)))
    return [Action(rank, "B", next(numbers)) if action.kind == "B" else action for action in row]


def without_drain(rank: int, p: int, m: int) -> list[Action]:
    return order_1f1b(rank, p, m)[: 2 * m - min(m, p - 1 - rank)]


def counting_anew(rank: int, p: int, m: int) -> list[Action]:
    warm_up = min(m, p - 1 - rank)
    steady = [Action(rank, kind, i) for i in range(m - warm_up) for kind in "FB"]
    return [*forwards(rank, warm_up), *steady, *backwards(rank, m)[m - warm_up :]]


def without_min(rank: int, p: int, m: int) -> list[Action]:
    warm_up = p - 1 - rank
    steady = chain(*zip(forwards(rank, m)[warm_up:], backwards(rank, m), strict=False))
    return [*forwards(rank, warm_up), *steady, *backwards(rank, m)[-warm_up:]] if warm_up else [*steady]


def by_index_without_min(rank: int, p: int, m: int) -> list[Action]:
    warm_up = p - 1 - rank
    order = [Action(rank, "F", i) for i in range(min(m, warm_up))]
    for i in range(warm_up, m):
        order += [Action(rank, "F", i), Action(rank, "B", i - warm_up)]
    return order + [Action(rank, "B", i) for i in range(m - warm_up, m)]


WRONG_ORDERS = [
    (lambda rank, p, m: forwards(rank, m) + backwards(rank, m), "holds 8 activations", "what GPipe holds"),
    (lambda rank, p, m: in_phases(rank, m, 0), "takes", "starve"),
    (lambda rank, p, m: in_phases(rank, m, min(m, p - rank)), "the first one after the warm-up counts"),
    (lambda rank, p, m: in_phases(rank, m, min(m, rank)), "wait", "shorter from rank to rank"),
    (lambda rank, p, m: in_phases(rank, m, min(m, p - 1)), "holds", "1F1B holds"),
    (newest_first, "backwards in the order", "oldest"),
    (without_drain, "lacks", "the drain"),
    (counting_anew, "2 times", "goes on where the warm-up stopped"),
    (without_min, "does not exist", "take a min"),
    (
        by_index_without_min,
        "(0, 4, 2)` raised ValueError: microbatch -1",
        "With fewer microbatches than ranks the warm-up is m",
    ),
    (lambda rank, p, m: [Action(0, a.kind, a.microbatch) for a in order_1f1b(rank, p, m)], "not rank 1's"),
    (lambda rank, p, m: [f"{a.kind}{a.microbatch}" for a in order_1f1b(rank, p, m)], "no action"),
    (lambda rank, p, m: None, "Is a `return` missing?"),
]


@pytest.mark.parametrize(("answer", "words"), [(answer, words) for answer, *words in WRONG_ORDERS])
def test_a_wrong_order_is_told_why(answer: Answer, words: list[str]) -> None:
    refuses("order_1f1b", answer, *words)


def test_an_order_may_be_found_by_a_limit_and_written_as_text() -> None:
    accepts("order_1f1b", by_limit)
    accepts("order_1f1b", lambda rank, p, m: tuple(in_phases(rank, m, min(m, p - 1 - rank))))


# The step on real ranks: one function with everything that learners change about it.


def step_with(
    warm_up: Callable[[int, int, int], int] = lambda rank, p, m: min(m, p - 1 - rank),
    take: Callable[[Any], Any] = lambda in_flight: in_flight.popleft(),
    send: Callable[..., list[Any]] = lambda start, message, link: start(message, link),
    keep: bool = True,
    waits_before_drain: bool = False,
    times: Callable[[int], float] = lambda m: 1.0,
    begin: Callable[[Any], Any] = lambda y: y,
    arriving: Callable[[Any, int], Any] = lambda dy, m: dy,
    drains: bool = True,
) -> Answer:
    def step(stage: Any, microbatches: Any, targets: Any, loss_fn: Any, link: Any) -> None:
        m, in_flight, sends = len(microbatches), deque[Any](), []

        def forward(i: int) -> None:
            x = recv_activation(microbatches[i], link)
            y = forward_stage(stage, x, targets[i], loss_fn, link)
            in_flight.append((x, y))
            sends.extend(send(send_activation, y, link) if keep else send(send_activation, y, link)[:0])

        def backward() -> None:
            x, y = take(in_flight)
            dy = recv_gradient(y, m, link)
            dy = dy * times(m) if link.is_last else arriving(dy, m)
            dx = backward_stage(x, begin(y), dy)
            sends.extend(send(send_gradient, dx, link) if keep else send(send_gradient, dx, link)[:0])

        ahead = warm_up(link.rank, link.n_ranks, m)
        for i in range(ahead):
            forward(i)
        for i in range(ahead, m):
            forward(i)
            backward()
        begun = list(sends)
        while in_flight and drains:
            backward()
        for each in begun if waits_before_drain else sends:
            each.wait()

    return step


def blocking(start: Callable[..., Any], message: Any, link: Any) -> list[Any]:
    to = link.rank + (1 if start is send_activation else -1)
    if 0 <= to < link.n_ranks:
        dist.send(message.detach(), to)
    return []


def waiting_at_once(start: Callable[..., Any], message: Any, link: Any) -> list[Any]:
    for send in start(message, link):
        send.wait()
    return []


def step_with_slots(
    n_slots: Callable[[int, int], int],
    copies: bool = False,
    allocate: Callable[..., Any] = list,
    memory_for: Callable[[Any, int], Any] = lambda slots, i: slots[i % len(slots)],
) -> Answer:
    def step(stage: Any, microbatches: Any, targets: Any, loss_fn: Any, link: Any) -> None:
        m, in_flight, sends = len(microbatches), deque[Any](), []
        warm_up = min(m, link.n_ranks - 1 - link.rank)
        slots = allocate(torch.empty(link.shape, dtype=link.dtype) for _ in range(n_slots(warm_up, m)))

        def forward(i: int) -> None:
            x = microbatches[i]
            if not link.is_first:
                slot = memory_for(slots, i)
                dist.recv(slot, link.rank - 1)
                x = (slot.clone() if copies else slot.detach()).requires_grad_()
            y = forward_stage(stage, x, targets[i], loss_fn, link)
            in_flight.append((x, y))
            sends.extend(send_activation(y, link))

        for i in range(m + warm_up):
            if i < m:
                forward(i)
            if i >= warm_up:
                x, y = in_flight.popleft()
                sends.extend(send_gradient(backward_stage(x, y, recv_gradient(y, m, link)), link))
        for send in sends:
            send.wait()

    return step


def clears_first(stage: Any, *rest: Any) -> None:
    stage.zero_grad()
    step_with()(stage, *rest)


def changes_its_targets(stage: Any, microbatches: Any, targets: Any, *rest: Any) -> None:
    step_with()(stage, microbatches, targets, *rest)
    targets[0].zero_()


def runs_dry(stage: Any, microbatches: Any, targets: Any, loss_fn: Any, link: Any) -> None:
    """As many forwards as 1F1B holds, then all their backwards, and again: a GPipe of short steps."""
    m, in_flight, sends = len(microbatches), deque[Any](), []
    for i in range(m):
        x = recv_activation(microbatches[i], link)
        y = forward_stage(stage, x, targets[i], loss_fn, link)
        in_flight.append((x, y))
        sends.extend(send_activation(y, link))
        while in_flight and (len(in_flight) == link.n_ranks - link.rank or i % 4 == 3 or i == m - 1):
            x, y = in_flight.popleft()
            sends.extend(send_gradient(backward_stage(x, y, recv_gradient(y, m, link)), link))
            if len(in_flight) == link.n_ranks - link.rank - 1 and i % 4 != 3 and i != m - 1:
                break
    for send in sends:
        send.wait()


def without_guards(start: Callable[..., Any], message: Any, link: Any) -> list[Any]:
    down = start is send_activation
    return [dist.isend(message if message is not None else torch.empty(0), link.rank + (1 if down else -1))]


def without_a_guard_for_gradients(start: Callable[..., Any], message: Any, link: Any) -> list[Any]:
    return start(message, link) if start is send_activation else without_guards(start, message, link)


WRONG_STEPS = [
    (step_with(send=without_guards), "rank 3 sends to rank 4", "The last rank has nobody below", "`link.is_last`"),
    (step_with(send=without_a_guard_for_gradients), "The first rank has nobody above", "`link.is_first`"),
    (step_with(warm_up=lambda rank, p, m: 0), "The warm-up of rank 0 is too short", "0 forwards instead of 3"),
    (step_with(drains=False), "rank 0 returned after 5 of 8 backwards", "the drain"),
    (runs_dry, "does not work in the order of 1F1B"),
    (clears_first, "add to it, as `backward` does"),
    (changes_its_targets, "changed its argument `targets[0]`"),
    (hangs(step_with(send=blocking)), "waits in send for", "A blocking `send`"),
    (hangs(step_with(send=waiting_at_once)), "wait after the last backward"),
    (hangs(step_with(keep=False)), "Keep that, and `wait()`"),
    (step_with(waits_before_drain=True), "Keep that, and `wait()`"),
    (train_step_pipeline_gpipe, "the gradients are right", "holds 8 activations; 1F1B holds 4"),
    (
        step_with(warm_up=lambda rank, p, m: min(m, p - rank)),
        "holds 5 activations; 1F1B holds 4",
        "The warm-up of rank 0 is 4 forwards",
        "is in flight, too",
    ),
    (step_with(take=lambda in_flight: in_flight.pop()), "The last rank is right", "oldest microbatch"),
    (step_with(times=lambda m: m), "m times too large"),
    (step_with(times=lambda m: 1 / m), "m times too small"),
    (step_with(arriving=lambda dy, m: dy / m), "1/m enters on more than one rank; the chain rule already carries"),
    (step_with(begin=lambda y: y.detach().requires_grad_()), "no gradient for rank"),
]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("answer", "words"), [(answer, words) for answer, *words in WRONG_STEPS])
def test_a_wrong_step_is_told_why(answer: Answer, words: list[str]) -> None:
    refuses("step_without_deadlock", answer, *words)


def test_a_step_may_be_written_in_another_way() -> None:
    accepts("step_without_deadlock", train_step_pipeline_1f1b)


def in_one_tensor(slots: Any) -> torch.Tensor:
    return torch.stack(list(slots))


def with_every_name_in_one_function(stage: Any, microbatches: Any, targets: Any, loss_fn: Any, link: Any) -> None:
    m, in_flight, sends = len(microbatches), deque[Any](), []
    warm_up = min(m, link.n_ranks - 1 - link.rank)
    for i in range(m + warm_up):
        if i < m:
            x = recv_activation(microbatches[i], link)
            y = forward_stage(stage, x, targets[i], loss_fn, link)
            in_flight.append((x, y))
            sends += send_activation(y, link)
        if i >= warm_up:
            x, y = in_flight.popleft()
            sends += send_gradient(backward_stage(x, y, recv_gradient(y, m, link)), link)
    for each in sends:
        each.wait()


ENOUGH = {
    "as separate tensors": step_with_slots(lambda warm_up, m: warm_up + 1),
    "in one tensor": step_with_slots(lambda warm_up, m: warm_up + 1, allocate=in_one_tensor),
    "fresh, in one function": with_every_name_in_one_function,
}
TOO_MANY = {
    "one for each microbatch": step_with_slots(lambda warm_up, m: m),
    "one for each microbatch, in one tensor": step_with_slots(lambda warm_up, m: m, allocate=in_one_tensor),
    "the sick slots, not used, and fresh memory": step_with_slots(
        lambda warm_up, m: max(1, warm_up), memory_for=lambda slots, i: torch.empty_like(slots[0])
    ),
    "the sick slots and a copy of each input": step_with_slots(lambda warm_up, m: max(1, warm_up), copies=True),
}
TOO_FEW = [
    ("as many as the warm-up", lambda warm_up, m: max(1, warm_up)),
    ("one", lambda warm_up, m: 1),
    ("two", lambda warm_up, m: 2),
]


@pytest.mark.sample(3)
@pytest.mark.parametrize("answer", ENOUGH.values(), ids=ENOUGH)
def test_the_patient_is_healed_by_enough_slots(answer: Answer) -> None:
    accepts("healed_step", answer)


@pytest.mark.sample(3)
@pytest.mark.parametrize("answer", TOO_MANY.values(), ids=TOO_MANY)
def test_more_memory_than_1f1b_needs_for_what_is_received_is_not_the_cure(answer: Answer) -> None:
    refuses("healed_step", answer, "received activations; 1F1B needs 3", "the slots, used or not")


@pytest.mark.sample(3)
@pytest.mark.parametrize("n_slots", [n for _, n in TOO_FEW], ids=[name for name, _ in TOO_FEW])
def test_too_few_slots_are_told_by_the_weights_that_they_spoil(n_slots: Callable[[int, int], int]) -> None:
    refuses("healed_step", step_with_slots(n_slots), ".0.weight", "Who has written to it in between?")


def test_the_patient_is_healed_by_fresh_memory_too_but_not_by_another_order() -> None:
    accepts("healed_step", step_with())
    refuses("healed_step", step_with(take=lambda in_flight: in_flight.pop()), "oldest microbatch")


# The patients of the clinic: what they have must show, and nothing else.


def spoilt(rank: int, name: str, m: int) -> list[str]:
    """Parameters of this rank whose gradient is not that of one process, after a step in which ranks begin late."""
    stage, (inputs, targets) = partition_model(layers(), dist.get_world_size(), rank), batch(m)
    dist.barrier()
    time.sleep(0.1 * rank)
    link = Link((len(inputs) // m, inputs.shape[1]), torch.float64)
    PATIENTS[name](stage, inputs.chunk(m), targets.chunk(m), LopsidedLoss(), link)
    right = one_process(m)
    healthy = [n for n, p in stage.named_parameters() if p.grad is not None and torch.allclose(p.grad, right[n])]
    return [n for n, _ in stage.named_parameters() if n not in healthy]


def symptoms(name: str, m: int) -> list[list[str]]:
    return on_ranks(4, spoilt, name, m, timeout_s=30)


def everything(layer: int) -> list[str]:
    return [f"{layer}.{part}" for part in ("0.weight", "0.bias", "2.weight", "2.bias")]


def test_a_detached_output_spoils_all_ranks_but_the_last() -> None:
    assert symptoms("A", 8) == [everything(0), everything(1), everything(2), []]


def test_too_few_slots_spoil_the_first_weight_of_the_ranks_between() -> None:
    assert symptoms("B", 8) == [[], ["1.0.weight"], ["2.0.weight"], []]


def test_one_buffer_for_all_that_is_sent_spoils_every_rank() -> None:
    assert symptoms("C", 8) == [everything(rank) for rank in range(4)]


@pytest.mark.parametrize("name", ["B", "C"])
def test_with_one_microbatch_no_buffer_is_written_twice(name: str) -> None:
    assert symptoms(name, 1) == [[], [], [], []]


# Room for what is on its way.


def one_too_few_on_rank_0(rank: int, p: int, f: float, b: float, latency: float) -> int:
    return held_with_latency(rank, p, f, b, latency) - (rank == 0 and latency in (31, 80))


WRONG_LIMITS = [
    (lambda rank, p, f, b, latency: p - rank, "1F1B without latency"),
    (lambda rank, p, f, b, latency: 1 + (p - 1 - rank) * (1 + ceil(latency / (f + b))), "crosses each link twice"),
    (lambda rank, p, f, b, latency: 1 + (p - 1 - rank) * (1 + floor(2 * latency / (f + b))), "You round down"),
    (lambda rank, p, f, b, latency: p - rank + ceil(2 * (p - 1 - rank) * latency / (f + b)), "Each link holds whole"),
    (lambda rank, p, f, b, latency: 1 + (p - 1 - rank) * (1 + 2 * ceil(latency / (f + b))), "round up once a link"),
    (lambda rank, p, f, b, latency: 2 * (p - rank) - 1, "would do", "Without latency it is 1F1B"),
    (lambda rank, p, f, b, latency: 1 + (p - 1 - rank) * (1 + ceil(2 * latency / f)), "every forward + backward"),
    (lambda rank, p, f, b, latency: 1 + (p - 1 - rank) * (1 + 2 * latency / (f + b)), "a whole place", "math.ceil"),
    (one_too_few_on_rank_0, "400 microbatches take"),
    (lambda rank, p, f, b, latency: 0, "must hold 1"),
    (lambda rank, p, f, b, latency: 2 if rank == 1 else 1, "cannot run"),
]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("answer", "words"), [(answer, words) for answer, *words in WRONG_LIMITS])
def test_wrong_room_for_what_is_on_its_way_is_told_why(answer: Answer, words: list[str]) -> None:
    refuses("held_with_latency", answer, *words)


def from_the_last_rank_up(rank: int, p: int, forward: float, backward: float, latency: float) -> int:
    if rank == p - 1:
        return 1
    here, there_and_back = 1, -(-2 * latency // (forward + backward))
    return int(here + there_and_back) + from_the_last_rank_up(rank + 1, p, forward, backward, latency)


def test_the_solution_says_that_the_fewest_places_are_asked_for() -> None:
    assert "The fewest places for activations" in (held_with_latency.__doc__ or "")


def test_room_may_be_counted_rank_by_rank() -> None:
    accepts("held_with_latency", from_the_last_rank_up)


@folded("p, latency, m", product([2, 3, 5], [0, 1, 3, 7], [1, 6, 24]))
def test_with_that_room_latency_costs_what_it_costs_gpipe(p: int, latency: int, m: int) -> None:
    costs = Costs(1, 1, 1, latency)
    limits = [held_with_latency(rank, p, 1, 2, latency) for rank in range(p)]
    assert simulate(with_room(limits, m), costs).makespan == simulate(build("gpipe", p, m), costs).makespan


# A budget.


def equal_microbatches(rows: int, least: int) -> list[int]:
    return [m for m in range(1, rows + 1) if rows % m == 0 and rows // m >= least]


def chosen_by(
    needed: Callable[[float, float, int, int], float],
    rank_by: Callable[[int, int], Any] = lambda p, m: (p - 1) / (m + p - 1),
    sizes: Callable[[int, int], Any] = equal_microbatches,
) -> Answer:
    def answer(state: int, activations: int, rows: int, min_rows: int, budget: int, max_ranks: int) -> Any:
        pairs = [(p, m) for p in range(1, max_ranks + 1) for m in sizes(rows, min_rows)]
        fitting = [(p, m) for p, m in pairs if needed(state, activations, p, m) <= budget]
        return min(fitting, key=lambda pair: rank_by(*pair), default=None)

    return answer


def on_first_rank(state: float, activations: float, p: int, m: int) -> float:
    return state / p + min(m, p) * activations / (p * m)


WRONG_CHOICES = [
    (chosen_by(lambda s, a, p, m: s / p + a / p), "as GPipe has"),
    (chosen_by(lambda s, a, p, m: s / p + a / m), "A/m holds for m ≥ p; with fewer, rank 0 holds m: min(m, p)·A/(pm)"),
    (chosen_by(lambda s, a, p, m: s / p + a / (p * m)), "would need", "min(m, p) activations"),
    (chosen_by(lambda s, a, p, m: s / p), "would need"),
    (chosen_by(lambda s, a, p, m: s + min(m, p) * a / (p * m)), "rank 0 has `state / p`"),
    (
        chosen_by(lambda s, a, p, m: s + min(m, p) * a / (p * m), lambda p, m: ((p - 1) / (m + p - 1), -m)),
        "rank 0 has `state / p`",
    ),
    (chosen_by(lambda s, a, p, m: s // p + min(m, p) * a // (p * m)), "`//` drops that"),
    (chosen_by(lambda s, a, p, m: s // p + min(m, p) * a / (p * m)), "`//` drops that"),
    (chosen_by(lambda s, a, p, m: s / p + min(m, p) * a // (p * m)), "`//` drops that"),
    (chosen_by(on_first_rank, lambda p, m: (-p, -m)), "Fewer ranks make the bubble smaller"),
    (chosen_by(on_first_rank, lambda p, m: m), "More microbatches make the bubble smaller"),
    (chosen_by(on_first_rank, sizes=lambda rows, least: range(1, rows // least + 1)), "m must divide the rows"),
    (
        chosen_by(on_first_rank, sizes=lambda rows, least: [m for m in range(1, rows + 1) if rows % m == 0]),
        "are the least",
    ),
    (lambda *args: (choose(*args) or (1, 1))[::-1], "The ranks come first"),
    (lambda *args: choose(*args) or (16, 8), "would need 275 of 200", "No p and m fit there"),
    (lambda *args: None, "though something fits"),
]


@pytest.mark.parametrize(("answer", "words"), [(answer, words) for answer, *words in WRONG_CHOICES])
def test_a_wrong_choice_is_told_why(answer: Answer, words: list[str]) -> None:
    refuses("choose", answer, *words)


def the_fewest_ranks_with_the_most_microbatches(
    state: int, activations: int, rows: int, min_rows: int, budget: int, max_ranks: int
) -> list[int] | None:
    m = max(m for m in range(1, rows // min_rows + 1) if rows % m == 0)
    fitting = [p for p in range(1, max_ranks + 1) if on_first_rank(state, activations, p, m) <= budget]
    return [fitting[0], m] if fitting else None


def test_a_choice_may_be_found_by_thinking_or_by_trying() -> None:
    accepts("choose", the_fewest_ranks_with_the_most_microbatches)
    accepts("choose", chosen_by(on_first_rank))
