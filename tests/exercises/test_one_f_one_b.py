"""The graders of notebook 03, by what learners hand in."""

from collections import deque
from collections.abc import Callable
from itertools import chain, product
from math import ceil
from typing import Any

import pytest

from course_pp.exercises.formula import flawed
from course_pp.exercises.one_f_one_b.exercises import (
    PATIENTS,
    choose,
    examine,
    healed_step,
    held_with_latency,
    order_1f1b,
    step_without_deadlock,
    with_room,
)
from course_pp.runtime import (
    backward_stage,
    forward_stage,
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
    return (
        [*forwards(rank, warm_up), *steady, *backwards(rank, m)[-warm_up:]]
        if warm_up
        else [*steady]
    )


def by_index_without_min(rank: int, p: int, m: int) -> list[Action]:
    warm_up = p - 1 - rank
    order = [Action(rank, "F", i) for i in range(min(m, warm_up))]
    for i in range(warm_up, m):
        order += [Action(rank, "F", i), Action(rank, "B", i - warm_up)]
    return order + [Action(rank, "B", i) for i in range(m - warm_up, m)]


WRONG_ORDERS = [
    (
        lambda rank, p, m: forwards(rank, m) + backwards(rank, m),
        "holds 8 activations",
        "what GPipe holds",
    ),
    (lambda rank, p, m: in_phases(rank, m, 0), "takes", "starve"),
    (
        lambda rank, p, m: in_phases(rank, m, min(m, p - rank)),
        "the first one after the warm-up counts",
    ),
    (lambda rank, p, m: in_phases(rank, m, min(m, rank)), "wait", "shorter from rank to rank"),
    (
        lambda rank, p, m: in_phases(rank, m, min(m, p - 1)),
        "holds",
        "are enough",
        "gets shorter from rank to rank",
    ),
    (newest_first, "cannot run", "oldest"),
    (without_drain, "lacks", "the drain"),
    (counting_anew, "2 times", "goes on where the warm-up stopped"),
    (without_min, "does not belong there", "take a min"),
    (
        by_index_without_min,
        "(0, 4, 2)` raised ValueError: microbatch -1",
        "With fewer microbatches than ranks the warm-up is m",
    ),
    (
        lambda rank, p, m: [Action(0, a.kind, a.microbatch) for a in order_1f1b(rank, p, m)],
        "Rank 1 holds stage 1",
    ),
    (lambda rank, p, m: [f"{a.kind}{a.microbatch}" for a in order_1f1b(rank, p, m)], "no action"),
    (lambda rank, p, m: None, "Is a `return` missing?"),
]


@pytest.mark.parametrize(("answer", "words"), [(answer, words) for answer, *words in WRONG_ORDERS])
def test_a_wrong_order_is_told_why(answer: Answer, words: list[str]) -> None:
    refuses("order_1f1b", answer, *words)


def test_an_order_may_be_found_by_a_limit_and_written_as_text() -> None:
    accepts("order_1f1b", by_limit)
    accepts("order_1f1b", lambda rank, p, m: tuple(in_phases(rank, m, min(m, p - 1 - rank))))


# Steps on real ranks: a solution with one change.

DOWN, UP = "sends.extend(send_activation(y, link))", "sends.extend(send_gradient(dx, link))"
WARM_UP, DRAIN = (
    "min(m, link.n_ranks - 1 - link.rank)",
    "    while in_flight:\n        backward()\n",
)
BLOCKING = (
    "if not link.is_last: dist.send(y.detach(), link.rank + 1)",
    "if link.rank: dist.send(dx, link.rank - 1)",
)
AT_ONCE = (
    "[send.wait() for send in send_activation(y, link)]",
    "[send.wait() for send in send_gradient(dx, link)]",
)


def step_with(*changes: tuple[str, str]) -> Answer:
    return flawed(step_without_deadlock, *changes)


def sending(down: str, up: str) -> Answer:
    return step_with((DOWN, down), (UP, up))


def runs_dry(stage: Any, microbatches: Any, targets: Any, loss_fn: Any, link: Any) -> None:
    """As many forwards as 1F1B holds, then all their backwards, and again: short GPipe steps."""
    m, in_flight, sends = len(microbatches), deque[Any](), []
    for i in range(m):
        x = recv_activation(microbatches[i], link)
        y = forward_stage(stage, x, targets[i], loss_fn, link)
        in_flight.append((x, y))
        sends.extend(send_activation(y, link))
        while in_flight and (
            len(in_flight) == link.n_ranks - link.rank or i % 4 == 3 or i == m - 1
        ):
            x, y = in_flight.popleft()
            sends.extend(send_gradient(backward_stage(x, y, recv_gradient(y, m, link)), link))
            if len(in_flight) == link.n_ranks - link.rank - 1 and i % 4 != 3 and i != m - 1:
                break
    for send in sends:
        send.wait()


WRONG_STEPS = [
    (step_with((DOWN, "sends.append(dist.isend(y.detach(), link.rank + 1))")),
     "rank 3 sends to rank 4", "The last rank has nobody below", "`link.is_last`"),
    (step_with((UP, "sends.append(dist.isend(dx if link.rank else y, link.rank - 1))")),
     "The first rank has nobody above", "`link.is_first`"),
    (step_with((WARM_UP, "0")), "The warm-up of rank 0 is 0 forwards instead of 3"),
    (step_with((DRAIN, "")), "rank 0 returned after 5 of 8 backwards", "the drain"),
    (runs_dry, "does not work in the order of 1F1B"),
    (step_with(("m, in_flight", "stage.zero_grad(); m, in_flight")),
     "add to it, as `backward` does"),
    (step_with((DRAIN, f"{DRAIN}    targets[0].zero_()\n")), "changed its argument `targets[0]`"),
    (hangs(sending(*BLOCKING)), "waits in send for", "A blocking `send`"),
    (hangs(sending(*AT_ONCE)), "wait after the last backward"),
    (hangs(sending("send_activation(y, link)", "send_gradient(dx, link)")),
     "Keep that, and `wait()`"),
    (step_with((DRAIN, f"    begun = list(sends)\n{DRAIN}"), ("send in sends", "send in begun")),
     "Keep that, and `wait()`"),
    (train_step_pipeline_gpipe, "the gradients are right", "holds 8 activations; 1F1B holds 4"),
    (step_with((WARM_UP, "min(m, link.n_ranks - link.rank)")),
     "holds 5 activations; 1F1B holds 4", "The warm-up of rank 0 is 4 forwards", "is in flight, too"),
    (step_with(("popleft()", "pop()")), "The last rank is right", "oldest microbatch"),
    (step_with(("recv_gradient(y, m, link)", "recv_gradient(y, m, link) * m ** link.is_last")),
     "m times too large"),
    (step_with(("recv_gradient(y, m, link)", "recv_gradient(y, m, link) / m ** link.is_last")),
     "m times too small"),
    (step_with(("recv_gradient(y, m, link)", "recv_gradient(y, m, link) / m ** (not link.is_last)")),
     "1/m enters on more than one rank; the chain rule already carries"),
    (step_with(("(x, y, recv", "(x, y.detach().requires_grad_(), recv")), "no gradient for rank"),
]  # fmt: skip


@pytest.mark.sample(3)
@pytest.mark.parametrize(("answer", "words"), [(answer, words) for answer, *words in WRONG_STEPS])
def test_a_wrong_step_is_told_why(answer: Answer, words: list[str]) -> None:
    refuses("step_without_deadlock", answer, *words)


def test_a_step_may_be_written_in_another_way() -> None:
    accepts("step_without_deadlock", train_step_pipeline_1f1b)


def slots(n: str, *changes: tuple[str, str]) -> Answer:
    return flawed(healed_step, ("range(warm_up + 1)", f"range({n})"), *changes)


def in_one_tensor(n: str) -> Answer:
    each = "[torch.empty(link.shape, dtype=link.dtype) for _ in range(warm_up + 1)]"
    return flawed(healed_step, (each, f"torch.empty({n}, *link.shape, dtype=link.dtype)"))


def fresh_in_one_function(
    stage: Any, microbatches: Any, targets: Any, loss_fn: Any, link: Any
) -> None:
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


TOO_MANY, TOO_FEW = (
    ["received activations; 1F1B needs 3", "Count the slots"],
    [".0.weight", "Who has written to it"],
)
COPIED = "x = slot.detach().requires_grad_()", "x = slot.clone().requires_grad_()"
WRONG_CURES = {
    "a slot for each microbatch": (slots("m"), TOO_MANY),
    "twice as many slots": (slots("max(1, 2 * warm_up)"), ["received activations; 1F1B needs 4"]),
    "a slot for each microbatch, in one tensor": (in_one_tensor("m"), TOO_MANY),
    "the sick slots and a copy of each input": (slots("max(1, warm_up)", COPIED), TOO_MANY),
    "as many slots as the warm-up": (slots("max(1, warm_up)"), TOO_FEW),
    "one slot": (slots("1"), TOO_FEW),
    "two slots": (slots("2"), TOO_FEW),
    "another order": (step_with(("popleft()", "pop()")), ["oldest microbatch"]),
}
CURES = {
    "enough slots, in one tensor": in_one_tensor("warm_up + 1"),
    "fresh memory": step_with(),
    "fresh memory, in one function": fresh_in_one_function,
}


@pytest.mark.sample(3)
@pytest.mark.parametrize(("answer", "words"), WRONG_CURES.values(), ids=WRONG_CURES)
def test_a_wrong_cure_is_told_what_it_does(answer: Answer, words: list[str]) -> None:
    refuses("healed_step", answer, *words)


@pytest.mark.sample(3)
@pytest.mark.parametrize("answer", CURES.values(), ids=CURES)
def test_the_patient_is_healed_in_several_ways(answer: Answer) -> None:
    accepts("healed_step", answer)


# The patients of the clinic: what they have must show, and nothing else.

# By patient and number of microbatches: for each rank how many of its gradients are right, are
# missing, are wrong.
WELL = [(12, 0, 0)] * 4
SYMPTOMS = {
    ("A", 8): [(0, 12, 0), (0, 12, 0), (0, 12, 0), (12, 0, 0)],
    ("B", 8): [(12, 0, 0), (11, 0, 1), (11, 0, 1), (12, 0, 0)],
    ("C", 8): [(0, 0, 12)] * 4,
    ("B", 1): WELL,
    ("C", 1): WELL,
}


@pytest.mark.ranks
@pytest.mark.parametrize(("name", "m"), SYMPTOMS)
def test_a_patient_shows_its_symptom(name: str, m: int) -> None:
    found = examine(PATIENTS[name], m, stagger_s=0.05)
    counts = [
        tuple(list(rank.values()).count(kind) for kind in ("right", "none", "wrong"))
        for rank in found.by_rank
    ]
    assert counts == SYMPTOMS[name, m]
    assert (found.value == pytest.approx(found.of_one)) == ((name, m) != ("C", 8))


@pytest.mark.ranks
def test_a_healthy_step_has_every_gradient_and_the_loss_of_one_process() -> None:
    found = examine(train_step_pipeline_1f1b, 3)
    assert found.equal
    assert found.value == pytest.approx(found.of_one, rel=1e-12)
    assert "rank 0: 12 right" in str(found)


# Room for what is on its way.


def one_too_few_on_rank_0(rank: int, p: int, f: float, b: float, latency: float) -> int:
    return held_with_latency(rank, p, f, b, latency) - (rank == 0 and latency in (31, 80))


WRONG_LIMITS = [
    (
        lambda rank, p, f, b, latency: 2 * (p - rank) - 1,
        "is 7, not 4",
        "Without latency it is 1F1B",
    ),
    (
        lambda rank, p, f, b, latency: 1 + (p - 1 - rank) * (1 + ceil(2 * latency / f)),
        "every forward + backward",
    ),
    (
        lambda rank, p, f, b, latency: 1 + (p - 1 - rank) * (1 + 2 * latency / (f + b)),
        "a whole place",
        "math.ceil",
    ),
    (one_too_few_on_rank_0, "is 15, not 16", "3.2 at once. Behind rank 0 lie 3 links"),
    (lambda rank, p, f, b, latency: 0, "must hold 1"),
    (
        lambda rank, p, f, b, latency: 2 if rank == 1 else 1,
        "is 1, not 4",
        "0 at once. Behind rank 0 lie 3 links",
    ),
]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("answer", "words"), [(answer, words) for answer, *words in WRONG_LIMITS])
def test_wrong_room_for_what_is_on_its_way_is_told_why(answer: Answer, words: list[str]) -> None:
    refuses("held_with_latency", answer, *words)


def from_the_last_rank_up(
    rank: int, p: int, forward: float, backward: float, latency: float
) -> int:
    if rank == p - 1:
        return 1
    here, there_and_back = 1, -(-2 * latency // (forward + backward))
    return int(here + there_and_back) + from_the_last_rank_up(
        rank + 1, p, forward, backward, latency
    )


def test_the_solution_says_that_the_fewest_places_are_asked_for() -> None:
    assert "The fewest places for activations" in (held_with_latency.__doc__ or "")


def test_room_may_be_counted_rank_by_rank() -> None:
    accepts("held_with_latency", from_the_last_rank_up)


@folded("p, latency, m", product([2, 3, 5], [0, 1, 3, 7], [1, 6, 24]))
def test_with_that_room_latency_costs_what_it_costs_gpipe(p: int, latency: int, m: int) -> None:
    costs = Costs(1, 1, 1, latency)
    limits = [held_with_latency(rank, p, 1, 2, latency) for rank in range(p)]
    assert (
        simulate(with_room(limits, m), costs).makespan
        == simulate(build("gpipe", p, m), costs).makespan
    )


# A budget.


def equal_microbatches(rows: int, least: int) -> list[int]:
    return [m for m in range(1, rows + 1) if rows % m == 0 and rows // m >= least]


def chosen_by(
    needed: Callable[[float, float, int, int], float],
    rank_by: Callable[[int, int], Any] = lambda p, m: (p - 1) / (m + p - 1),
    sizes: Callable[[int, int], Any] = equal_microbatches,
) -> Answer:
    def answer(
        state: int, activations: int, rows: int, min_rows: int, budget: int, max_ranks: int
    ) -> Any:
        pairs = [(p, m) for p in range(1, max_ranks + 1) for m in sizes(rows, min_rows)]
        fitting = [(p, m) for p, m in pairs if needed(state, activations, p, m) <= budget]
        return min(fitting, key=lambda pair: rank_by(*pair), default=None)

    return answer


def on_first_rank(state: float, activations: float, p: int, m: int) -> float:
    return state / p + min(m, p) * activations / (p * m)


WRONG_CHOICES = [
    (chosen_by(lambda s, a, p, m: s / p + a / p), "as GPipe has"),
    (
        chosen_by(lambda s, a, p, m: s / p + a / m),
        "A/m holds for m ≥ p; with fewer, rank 0 holds m: min(m, p)·A/(pm)",
    ),
    (
        chosen_by(lambda s, a, p, m: s / p + a / (p * m)),
        "of 120 on rank 0",
        "min(m, p) activations",
    ),
    (chosen_by(lambda s, a, p, m: s / p), "of 120 on rank 0", "min(m, p) activations"),
    (chosen_by(lambda s, a, p, m: s + min(m, p) * a / (p * m)), "rank 0 has `state / p`"),
    (
        chosen_by(
            lambda s, a, p, m: s + min(m, p) * a / (p * m), lambda p, m: ((p - 1) / (m + p - 1), -m)
        ),
        "rank 0 has `state / p`",
    ),
    (chosen_by(lambda s, a, p, m: s // p + min(m, p) * a // (p * m)), "`//` drops that"),
    (chosen_by(lambda s, a, p, m: s // p + min(m, p) * a / (p * m)), "`//` drops that"),
    (chosen_by(lambda s, a, p, m: s / p + min(m, p) * a // (p * m)), "`//` drops that"),
    (chosen_by(on_first_rank, lambda p, m: (-p, -m)), "Fewer ranks make the bubble smaller"),
    (chosen_by(on_first_rank, lambda p, m: m), "More microbatches make the bubble smaller"),
    (
        chosen_by(on_first_rank, sizes=lambda rows, least: range(1, rows // least + 1)),
        "m must divide the rows",
    ),
    (
        chosen_by(
            on_first_rank,
            sizes=lambda rows, least: [m for m in range(1, rows + 1) if rows % m == 0],
        ),
        "m is at most rows // min_rows",
    ),
    (lambda *args: (choose(*args) or (1, 1))[::-1], "The ranks come first"),
    (lambda *args: choose(*args) or (16, 8), "275 of 200 on rank 0", "No p and m fit there"),
    (lambda *args: None, "is None, not (4, 16)", "`state / p`"),
]


@pytest.mark.parametrize(("answer", "words"), [(answer, words) for answer, *words in WRONG_CHOICES])
def test_a_wrong_choice_is_told_why(answer: Answer, words: list[str]) -> None:
    refuses("choose", answer, *words)


def the_fewest_ranks_with_the_most_microbatches(
    state: int, activations: int, rows: int, min_rows: int, budget: int, max_ranks: int
) -> list[int] | None:
    m = max(m for m in range(1, rows // min_rows + 1) if rows % m == 0)
    fitting = [
        p for p in range(1, max_ranks + 1) if on_first_rank(state, activations, p, m) <= budget
    ]
    return [fitting[0], m] if fitting else None


def test_a_choice_may_be_found_by_thinking_or_by_trying() -> None:
    accepts("choose", the_fewest_ranks_with_the_most_microbatches)
    accepts("choose", chosen_by(on_first_rank))
