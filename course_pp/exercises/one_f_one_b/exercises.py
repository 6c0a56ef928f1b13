"""Notebook 03: 1F1B as an order and as a step, room for latency, a budget of memory, a clinic."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from course_pp.exercises.answer import Answer
from course_pp.exercises.bench import (
    Bench,
    Findings,
    Outcome,
    WrongGradients,
    with_norm,
)
from course_pp.exercises.exercise import Exercise
from course_pp.exercises.expect import expect_int, expect_list
from course_pp.exercises.formula import Formula, flawed
from course_pp.exercises.mistakes import OTHERWISE, Cause, Mistake, why
from course_pp.exercises.orders import Orders, judge_orders, read_order
from course_pp.runtime import (
    Link,
    backward_stage,
    forward_stage,
    recv_activation,
    recv_gradient,
    send_activation,
    send_gradient,
)
from course_pp.schedule import Action, Schedule, build


def order_1f1b(rank: int, p: int, m: int) -> list[Action]:
    """The actions of this rank, in order."""
    warm_up = min(m, p - 1 - rank)
    order = [Action(rank, "F", i) for i in range(warm_up)]
    for i in range(warm_up, m):
        order += [Action(rank, "F", i), Action(rank, "B", i - warm_up)]
    return order + [Action(rank, "B", i) for i in range(m - warm_up, m)]


def _has_mixed_backwards(orders: Orders) -> bool:
    for row in orders.rows:
        backwards = [action.microbatch for action in row if action.kind == "B"]
        if backwards != sorted(backwards):
            return True
    return False


_MIXED = (
    _has_mixed_backwards,
    "The next rank works on the oldest microbatch first, and so its gradient comes back first.",
)
_IMPOSSIBLE: Cause = (
    _MIXED,
    (OTHERWISE, "Does the warm-up get shorter from rank to rank, down to none on the last?"),
)
_SLOW: Cause = (
    _MIXED,
    (
        OTHERWISE,
        "Some rank turns back too soon, and the ranks behind it starve: its warm-up is too short.",
    ),
)
_CROWDED: Cause = (
    (
        Orders.holds_everything,
        "That is what GPipe holds: a backward has to come as soon as it can be done.",
    ),
    (
        lambda orders: orders.rank and orders.peak == orders.peaks[orders.rank - 1],
        "The warm-up gets shorter from rank to rank: `p - 1 - rank`.",
    ),
    (
        OTHERWISE,
        "A forward is in flight from its start: the first one after the warm-up counts, too.",
    ),
)


def _grade_order(answer: Answer) -> None:
    _grade_orders_of(answer, [(4, 8), (2, 4), (4, 4), (1, 3), (5, 7), (8, 12)])
    try:
        _grade_orders_of(answer, [(4, 2), (3, 1)])
    except Mistake as e:
        # Large m is right, so the fault shows only with fewer microbatches than ranks.
        cause = (
            "With fewer microbatches than ranks the warm-up is m at most: `min(m, p - 1 - rank)`."
        )
        raise Mistake(e.symptom, e.cause or cause, e.example) from None


def _grade_orders_of(answer: Answer, sizes: Sequence[tuple[int, int]]) -> None:
    calls = [(rank, p, m) for p, m in sizes for rank in range(p)]
    orders = dict(zip(calls, answer.calls(calls), strict=True))
    for p, m in sizes:
        rows = [_read_row(orders[rank, p, m], rank, p, m) for rank in range(p)]
        judge_orders(
            f"With p={p} and m={m}",
            rows,
            build("1f1b", p, m),
            impossible=_IMPOSSIBLE,
            crowded=_CROWDED,
            slow=_SLOW,
        )


def _read_row(value: Any, rank: int, p: int, m: int) -> tuple[Action, ...]:
    def foreign(action: Action) -> str:
        if action.kind not in "FB" or action.stage != rank:
            return (
                f"Rank {rank} holds stage {rank}: its actions are `{rank}F0`, `{rank}B0` and so on."
            )
        too_few = " When m is small, the warm-up is all there is of them: take a min."
        return f"The microbatches are 0 to {m - 1}." + too_few * (m < p - 1 - rank)

    def lacking(action: Action) -> str:
        if action.kind == "F":
            return ""
        if action.microbatch < m - (p - 1 - rank):
            return (
                "In the steady state each forward is followed by the oldest backward that is left,"
                " 0 first."
            )
        return (
            "After the last forward, as many backwards are left as the warm-up had forwards: the"
            " drain."
        )

    def repeated(action: Action) -> str:
        if action.kind == "F":
            return "The steady state goes on where the warm-up stopped."
        return "The drain goes on where the steady state stopped."

    wanted = [Action(rank, kind, i) for kind in "FB" for i in range(m)]
    return read_order(value, f"order_1f1b({rank}, {p}, {m})", wanted, foreign, lacking, repeated)[0]


def step_without_deadlock(
    stage: nn.Module,
    microbatches: list[torch.Tensor],
    targets: list[torch.Tensor],
    loss_fn: nn.Module,
    link: Link,
) -> None:
    """One 1F1B step on this rank."""
    m, in_flight, sends = len(microbatches), deque[tuple](), []

    def forward(i: int) -> None:
        x = recv_activation(microbatches[i], link)
        y = forward_stage(stage, x, targets[i], loss_fn, link)
        in_flight.append((x, y))
        sends.extend(send_activation(y, link))

    def backward() -> None:
        x, y = in_flight.popleft()
        dx = backward_stage(x, y, recv_gradient(y, m, link))
        sends.extend(send_gradient(dx, link))

    warm_up = min(m, link.n_ranks - 1 - link.rank)
    for i in range(warm_up):
        forward(i)
    for i in range(warm_up, m):
        forward(i)
        backward()
    while in_flight:
        backward()
    for send in sends:
        send.wait()


BENCH = Bench(
    lambda step, seat: step(*seat.stages, seat.microbatches, seat.parts, seat.loss_fn, seat.link),
    before=1.0,
)
_SIZES = {4: (8, 2), 3: (5,), 2: (1, 3)}


_NO_GRADIENT = "Backward has to run for every microbatch, from the `y` that still has its graph."
_ONCE = "`recv_gradient` gives the 1/m on the last rank, once."
_WRONG_GRADIENTS: Cause = (
    (
        lambda found: found.are_all() and found.replace_what_was_there(),
        "What `.grad` held before the step is gone: add to it, as `backward` does, and clear"
        " nothing.",
    ),
    (WrongGradients.all_are_times_m, f"Each is m times too large. {_ONCE}"),
    (WrongGradients.all_are_an_mth, f"Each is m times too small. {_ONCE}"),
    (
        WrongGradients.are_powers_of_m,
        "1/m enters on more than one rank; the chain rule already carries it from the last one.",
    ),
    (
        WrongGradients.multiply_received_inputs,
        "Only weights that multiply what a rank has received: their gradient needs that input once"
        " more, in backward. Who has written to it in between?",
    ),
    (
        WrongGradients.spare_the_last_rank,
        "The last rank is right and others are not: the gradient that comes back belongs to the"
        " oldest microbatch in flight. Which one does your backward take?",
    ),
    (
        OTHERWISE,
        "Look at which microbatch each backward belongs to, and at what it starts from.",
    ),
)


def _grade_step(answer: Answer, places_count: bool = False) -> None:
    _grade_step_on(BENCH, _SIZES, answer, places_count)
    if places_count:
        # On fewer ranks a step may have twice the slots it needs, and still only one too many,
        # which is allowed.
        _grade_step_on(replace(BENCH, n_blocks=5), {5: (8,)}, answer, places_count)


def _grade_step_on(
    bench: Bench, sizes: Mapping[int, Sequence[int]], answer: Answer, places_count: bool
) -> None:
    for where, m, ranks in bench.tried(answer, sizes, _demand_drain):
        bench.judge_gradients(where, ranks, m, missing=_NO_GRADIENT, wrong=_WRONG_GRADIENTS)
        for rank in range(len(ranks)):
            _judge_order(where, rank, m, ranks)
        if places_count:
            _judge_places(where, ranks)


def _warm_up(rank: int, p: int, m: int) -> int:
    return min(m, p - 1 - rank)


def _demand_drain(rank: int, m: int, order: str) -> None:
    """Refuse a step that lacks its last backwards.

    The other ranks wait for its messages, and would only tell that time is up.
    """
    warm_up = _warm_up(rank, dist.get_world_size(), m)
    done = order.count("B")
    if warm_up and 0 < done == m - warm_up:
        raise Mistake(
            f"With {m} microbatches, rank {rank} returned after {done} of {m} backwards.",
            "After the last forward, as many backwards are left as the warm-up had forwards: the"
            " drain.",
            f"rank {rank}  {order}",
        )


def _judge_order(where: str, rank: int, m: int, ranks: Sequence[Outcome]) -> None:
    def after(warm_up: int) -> str:
        return "F" * warm_up + "FB" * (m - warm_up) + "B" * warm_up

    p = len(ranks)
    order = ranks[rank].order
    peak = ranks[rank].peak
    warm_up = _warm_up(rank, p, m)
    enough = min(m, p - rank)
    begun = order.find("B") - 1
    if order == after(warm_up):
        return
    cause = (
        "One backward follows each forward of the steady state, and the drain comes after the last"
        " forward."
    )
    # The first cause is the weakest: these two know which warm-up the rank did.
    if rank > 0 and ranks[rank - 1].peak == peak > enough:
        cause = "The warm-up gets shorter from rank to rank: `p - 1 - rank` forwards."
    elif peak < m and order == after(begun):
        cause = (
            f"The warm-up of rank {rank} is {begun} forwards instead of {warm_up}, `min(m, p - 1 -"
            " rank)`. The forward that comes after it is in flight, too."
        )
    does = "does not work in the order of 1F1B"
    if peak > enough:
        does = f"holds {peak} activations; 1F1B holds {enough}"
    example = f"rank {rank}  {order}\n1F1B    {after(warm_up)}"
    raise Mistake(f"{where} the gradients are right, but rank {rank} {does}.", cause, example)


def held_with_latency(rank: int, p: int, forward: float, backward: float, latency: float) -> int:
    """The fewest places for activations with which this rank is as fast as GPipe."""
    per_link = math.ceil(2 * latency / (forward + backward))
    return 1 + (p - 1 - rank) * (1 + per_link)


def room_for_latency(p: int, forward: float, backward: float, latency: float) -> list[int]:
    """Return for each rank the fewest microbatches in flight for a step as short as GPipe's."""
    return [held_with_latency(rank, p, forward, backward, latency) for rank in range(p)]


def with_room(limits: Sequence[int], m: int) -> Schedule:
    """Return an order in which a rank goes forward while its limit of microbatches allows."""
    rows = []
    for rank, limit in enumerate(limits):
        row: list[Action] = []
        begun = 0
        for done in range(m):
            row += [Action(rank, "F", i) for i in range(begun, min(m, done + limit))]
            begun = max(begun, min(m, done + limit))
            row.append(Action(rank, "B", done))
        rows.append(tuple(row))
    return Schedule("yours", tuple((rank,) for rank in range(len(limits))), tuple(rows))


_CLUSTERS = (
    (4, 20, 40, 0),
    (4, 20, 30, 80),
    (4, 20, 40, 10),
    (4, 20, 40, 30),
    (3, 10, 10, 15),
    (5, 20, 40, 31),
    (4, 30, 10, 100),
)
_WRONG_ROOM = (
    (lambda rank, p, f, b, latency: p - rank,
     "That is 1F1B without latency. Microbatches are also on the links."),
    (lambda rank, p, f, b, latency: 1 + (p - 1 - rank) * (1 + math.ceil(latency / (f + b))),
     "A microbatch crosses each link twice, as an activation and as a gradient: 2 × latency."),
    (lambda rank, p, f, b, latency: 1 + (p - 1 - rank) * (1 + 2 * latency // (f + b)),
     "You round down. A link with a microbatch on it for a third of the time needs room for one."),
    (lambda rank, p, f, b, latency: p - rank + math.ceil(2 * (p - 1 - rank) * latency / (f + b)),
     "You round the sum over all links. Each link holds whole microbatches: round up for each."),
    (lambda rank, p, f, b, latency: p - rank + math.ceil((p - 1 - rank) * latency / (f + b)),
     "A microbatch crosses each link twice, 2 × latency, and each link holds whole ones: round up"
     " for each."),
    (lambda rank, p, f, b, latency: 1 + (p - 1 - rank) * (1 + 2 * math.ceil(latency / (f + b))),
     "There and back is one trip of 2 × latency: add first, and round up once a link."),
)  # fmt: skip


_OTHER_ROOM: Cause = (
    (lambda case, held, enough: held < 1, "To do anything a rank must hold 1."),
    (
        lambda case, held, enough: held > enough and case[-1] == 0,
        "Without latency it is 1F1B: a microbatch is on one of the p - rank ranks from here to the"
        " last.",
    ),
    (
        lambda case, held, enough: held > enough,
        "A rank takes in a microbatch every forward + backward. How many of those fit into 2 ×"
        " latency, and how many links lie behind this rank?",
    ),
    (
        OTHERWISE,
        "A microbatch is on a rank from here to the last, or on a link, there or back.",
    ),
)


def _shown_room(case: tuple[Any, ...], held: int, enough: int) -> str:
    rank, p, forward, backward, latency = case
    every = forward + backward
    return (
        f"There and back, a microbatch is {2 * latency:g} on a link, and a new one comes every"
        f" {every:g}: {2 * latency / every:.3g} at once. Behind rank {rank} lie {p - 1 - rank}"
        " links."
    )


_GRADE_ROOM = Formula(
    held_with_latency,
    [(rank, *cluster) for cluster in _CLUSTERS for rank in range(cluster[0])],
    _WRONG_ROOM,
    _OTHER_ROOM,
    read=partial(
        expect_int, remedy="A part of a microbatch needs a whole place: round up, `math.ceil`."
    ),
    example=_shown_room,
)


def choose(
    state: int, activations: int, rows: int, min_rows: int, budget: float, max_ranks: int
) -> tuple[int, int] | None:
    """Ranks and microbatches with the smallest bubble that fits under 1F1B, or None."""
    found = []
    for p in range(1, max_ranks + 1):
        for m in range(1, rows // min_rows + 1):
            fits = state / p + min(m, p) * activations / (p * m) <= budget
            if rows % m == 0 and fits:
                found.append(((p - 1) / (m + p - 1), p, m))
    return min(found)[1:] if found else None


def _on_rank_0(state: int, activations: int, p: int, m: int) -> float:
    return state / p + min(m, p) * activations / (p * m)


_ACTIVATIONS = "min(m, p) * activations / (p * m)"
_WRONG_CHOICES = (
    ((_ACTIVATIONS, "activations / p"),
     "You count m activations in flight, as GPipe has. 1F1B holds min(m, p) on rank 0."),
    ((_ACTIVATIONS, "activations / m"),
     "A/m holds for m ≥ p; with fewer, rank 0 holds m: min(m, p)·A/(pm)."),
    (("state / p", "state"), "The state is divided among the ranks: rank 0 has `state / p` of it."),
    (("<= budget", "< budget"), "A choice that needs exactly `budget` fits: `<=`."),
)  # fmt: skip


def _read_choice(value: Any, call: str) -> tuple[int, int] | None:
    if value is None:
        return None
    p, m = expect_list(value, call, 2)
    both = "Return p and m alone."
    return expect_int(p, f"{call}[0]", both), expect_int(m, f"{call}[1]", both)


def _why_other_choice(
    case: tuple[Any, ...], got: tuple[int, int] | None, right: tuple[int, int] | None
) -> str:
    state, activations, rows, min_rows, budget, max_ranks = case
    if got is None:
        assert right is not None
        if right[0] == max_ranks:
            return "`max_ranks` itself is allowed, and a `range` ends before its end."
        return (
            "Does your search come across this pair? Rank 0 has `state / p`, and min(m, p)·A/(pm)."
        )
    p, m = got
    if p < 1 or m < 1:
        return "There is at least one rank, and one microbatch."
    needed = _on_rank_0(state, activations, p, m)
    causes = (
        (p > max_ranks >= m and rows % p == 0, "The ranks come first: (p, m)."),
        (p > max_ranks, "`max_ranks` is the most there are."),
        (rows % m > 0, "m must divide the rows."),
        (rows // m < min_rows, "m is at most rows // min_rows."),
        (right is None, "No p and m fit there: return None."),
        (
            math.floor(needed) <= budget < needed,
            "It is less than 1 too much: `//` drops that, `/` does not.",
        ),
        (
            needed > budget,
            "Rank 0 holds min(m, p) activations, each of 1 / (p m) of what the batch keeps in the"
            " whole model.",
        ),
        (
            m < rows // min_rows,
            "More microbatches make the bubble smaller, and under 1F1B they cost no memory.",
        ),
        (OTHERWISE, "Fewer ranks make the bubble smaller, as long as it fits."),
    )
    return why(causes)


def _shown_choice(case: tuple[Any, ...], *choices: tuple[int, int] | None) -> str:
    state, activations, rows, min_rows, budget, _ = case
    lines = []
    for p, m in filter(None, choices):
        if p < 1 or m < 1:
            continue
        held = f"{state} / {p} + {min(m, p)} × {activations} / ({p} × {m})"
        needed = _on_rank_0(state, activations, p, m)
        lines.append(
            f"{(p, m)}: {held} = {needed:g} of {budget} on rank 0; {rows / m:g} of at least"
            f" {min_rows} rows a microbatch; bubble {(p - 1) / (m + p - 1):.1%}"
        )
    return "\n".join(lines)


_BUDGETS = [
    (400, 200, 16, 1, 120, 8),
    (400, 200, 16, 4, 120, 8),
    (400, 800, 32, 2, 200, 8),
    # One rank has no bubble, whatever m: here it is 1.
    (100, 50, 8, 8, 200, 8),
    (600, 240, 12, 5, 180, 16),
    (400, 4000, 8, 1, 200, 16),
    (800, 100, 30, 4, 170, 6),
    (395, 197, 16, 1, 111, 8),
    (100, 50, 8, 8, 100, 4),
    (100, 40, 8, 1, 90, 8),
    (400, 10, 16, 1, 85, 4),
]
_GRADE_CHOOSE = Formula(
    choose, _BUDGETS, _WRONG_CHOICES, _why_other_choice, read=_read_choice, example=_shown_choice
)


def healed_step(
    stage: nn.Module,
    microbatches: list[torch.Tensor],
    targets: list[torch.Tensor],
    loss_fn: nn.Module,
    link: Link,
) -> None:
    """One 1F1B step on this rank, with memory for no more than 1F1B holds."""
    m, in_flight, sends = len(microbatches), deque[tuple](), []
    warm_up = min(m, link.n_ranks - 1 - link.rank)
    slots = [torch.empty(link.shape, dtype=link.dtype) for _ in range(warm_up + 1)]

    def forward(i: int) -> None:
        x = microbatches[i]
        if not link.is_first:
            slot = slots[i % len(slots)]
            dist.recv(slot, link.rank - 1)
            x = slot.detach().requires_grad_()
        y = forward_stage(stage, x, targets[i], loss_fn, link)
        in_flight.append((x, y))
        sends.extend(send_activation(y, link))

    def backward() -> None:
        x, y = in_flight.popleft()
        dx = backward_stage(x, y, recv_gradient(y, m, link))
        sends.extend(send_gradient(dx, link))

    for i in range(warm_up):
        forward(i)
    for i in range(warm_up, m):
        forward(i)
        backward()
    while in_flight:
        backward()
    for send in sends:
        send.wait()


def _judge_places(where: str, ranks: Sequence[Outcome]) -> None:
    for rank in range(1, len(ranks)):
        # p - rank slots are allowed with few microbatches, too, which need fewer. And one more: a
        # name may keep an input until it names the next one.
        enough = len(ranks) - rank
        places = ranks[rank].places
        if places > enough + 1:
            raise Mistake(
                f"{where} the gradients are right, but rank {rank} has memory for {places} received"
                f" activations; 1F1B needs {enough}.",
                "That many are never in flight at once: a slot is free again after the backward of"
                " its microbatch. Count the slots, and a copy of each input as well.",
            )


PATIENTS = {
    "A": flawed(
        healed_step,
        (
            "in_flight.append((x, y))",
            "in_flight.append((x, y if link.is_last else y.detach().requires_grad_()))",
        ),
        (
            "send_gradient(dx, link)",
            "send_gradient(torch.zeros_like(x) if dx is None else dx, link)",
        ),
    ),
    "B": flawed(healed_step, ("range(warm_up + 1)", "range(max(1, warm_up))")),
    "C": flawed(
        healed_step,
        ("range(warm_up + 1)]", "range(m)]; outbox = torch.empty(link.shape, dtype=link.dtype)"),
        (
            "send_activation(y, link)",
            "send_activation(y if link.is_last else outbox.copy_(y.detach()), link)",
        ),
    ),
}
"""1F1B steps that run and give wrong gradients, each for another reason. With one microbatch B and
C are healthy, and C is so whenever each message is taken before the next one is written.
"""


EXERCISES = (
    Exercise(order_1f1b, _grade_order, "03", "1F1B as an order", 2, 6, (
        "How many forwards does a rank do before its first backward? The last rank does 1, the one"
        " before it 2.",
        "The warm-up has `min(m, p - 1 - rank)` forwards. In the steady state each further forward"
        " is followed by the oldest backward that is left: forward i, backward `i - warm_up`.",
        "The drain has as many backwards as the warm-up had forwards: those of microbatches `m -"
        " warm_up` to m - 1.",
    )),
    Exercise(step_without_deadlock, _grade_step, "03", "messages that do not block", 2, 8, (
        "Begin with a copy of `first_try`. Its order of forwards and backwards is right, only the"
        " sends block.",
        "`send_activation` and `send_gradient` of 02 begin to send and return handles at once. Keep"
        " these, or the messages may be lost.",
        "`sends.extend(send_activation(y, link))`, likewise for the gradient, and after the last"
        " backward: `for send in sends: send.wait()`.",
    )),
    Exercise(held_with_latency, _GRADE_ROOM, "03", "room for what is on its way", 3, 8, (
        "Without latency the answer is `p - rank`: one microbatch for each rank from here to the"
        " last. What else is there for a microbatch to be on?",
        "Each link is crossed twice. While one microbatch spends `2 * latency` on it, a new one"
        " comes every `forward + backward`.",
        "Each of the `p - 1 - rank` links needs room for `math.ceil(2 * latency / (forward +"
        " backward))` of them.",
    )),
    Exercise(choose, _GRADE_CHOOSE, "03", "a budget of memory", 2, 7, (
        "Rank 0 holds most. It needs `state / p`, and `min(m, p)` activations of one microbatch in"
        " one stage.",
        "One microbatch in one stage keeps `activations / (p * m)`.",
        "Try all p up to `max_ranks` and all m that divide `rows` and leave `min_rows`. Of those"
        " that fit, take the one with the smallest `(p - 1) / (m + p - 1)`.",
    )),
    Exercise(healed_step, partial(_grade_step, places_count=True), "03", "bug clinic", 3, 8, (
        "Which gradients are wrong? All are of the weights that multiply what a rank has received."
        " What does their gradient need that the others do not?",
        "`x` is needed from its forward until its backward. How many forwards does rank r do in"
        " between, and how many slots are there?",
        "In the steady state the forward comes first: `warm_up + 1` microbatches are in flight.",
    )),
)  # fmt: skip


WARD = replace(
    BENCH, loss_fn=nn.MSELoss(), width=64, block=with_norm, rows=16, n_blocks=8, before=None
)
"""Where the notebook looks at its patients, and at torch's schedules."""


def examine(
    step: Callable[..., Any], m: int = 8, stagger_s: float = 0.0, timeout_s: float = 60.0
) -> Findings:
    """Run ``step(stage, microbatches, targets, loss_fn, link)`` on four real ranks, beside one
    process.

    Each rank starts ``stagger_s`` later than the one before, as on a busy cluster.
    """
    ranks = WARD.ran(step, 4, m, stagger_s, timeout_s)
    return WARD.compared([(rank.losses, rank.gradients) for rank in ranks], m)
