"""Notebook 05: a backward in two halves, what it buys, what it costs, and how it goes wrong."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_pp.exercises.answer import Answer
from course_pp.exercises.bench import (
    TOLERANCE,
    Bench,
    Findings,
    Outcome,
    Seat,
    WrongGradients,
)
from course_pp.exercises.exercise import Exercise
from course_pp.exercises.expect import close, expect_int, expect_number
from course_pp.exercises.formula import Formula, flawed
from course_pp.exercises.mistakes import OTHERWISE, Cause, Mistake, Stopped, why
from course_pp.exercises.orders import Orders, judge_orders, read_order
from course_pp.model import ModelConfig, build_stage_module
from course_pp.runtime import Link, forward_stage, recv_gradient, send_activation, send_gradient
from course_pp.runtime.stage import Stage
from course_pp.schedule import Action, Costs, Overlap, Schedule, build
from course_pp.schedule.schedule import looped

_W_BEFORE_I = (
    "W of a microbatch comes after its I, which leaves the gradients of each layer's output behind."
)
_LACKING = {
    "F": "The warm-up and the steady state together do every forward.",
    "I": "After the last forward come the input gradients that are left: the drain.",
    "W": "Every weight gradient has to be done before the step ends: those put off come last.",
}


def order_zb_h1(rank: int, p: int, m: int) -> list[Action]:
    """The actions of this rank, in order: F, I and W of each microbatch."""
    warm_up = p - 1 - rank
    order = [Action(rank, "F", i) for i in range(warm_up)]
    for i in range(m):
        if warm_up + i < m:
            order.append(Action(rank, "F", warm_up + i))
        order.append(Action(rank, "I", i))
        if i >= rank:
            order.append(Action(rank, "W", i - rank))
    return order + [Action(rank, "W", i) for i in range(m - rank, m)]


def _grade_order(answer: Answer) -> None:
    sizes = ((4, 8), (2, 4), (4, 4), (1, 3), (3, 7), (5, 12))
    values = iter(answer.calls([(rank, p, m) for p, m in sizes for rank in range(p)]))
    for p, m in sizes:
        rows = [_read_h1(next(values), rank, p, m) for rank in range(p)]
        judge_orders(
            f"With p={p} and m={m}",
            rows,
            build("zb_h1", p, m),
            impossible=_IMPOSSIBLE,
            crowded=_CROWDED_H1,
            slow=_SLOW_H1,
        )


def _read_h1(value: Any, rank: int, p: int, m: int) -> tuple[Action, ...]:
    def foreign(action: Action) -> str:
        if action.kind == "B":
            return "A whole backward: here it is split into `I`, and later `W`."
        if action.kind == "U" or action.stage != rank:
            return (
                f"Rank {rank} holds stage {rank}: its actions are `{rank}F0`, `{rank}I0`,"
                f" `{rank}W0` and so on."
            )
        return f"The microbatches are 0 to {m - 1}."

    what = f"order_zb_h1({rank}, {p}, {m})"
    return read_order(
        value, what, order_zb_h1(rank, p, m), foreign, lambda a: _LACKING[a.kind], _why_repeated
    )[0]


def _why_repeated(action: Action) -> str:
    if action.kind == "W":
        return "Each I has one W: those put off go on where the ones before them stopped."
    return "Each phase goes on where the one before stopped."


def _has_early_w(orders: Orders) -> bool:
    """Whether a W comes before its I."""
    for row in orders.rows:
        place = {
            (action.kind, action.stage, action.microbatch): at for at, action in enumerate(row)
        }
        if any(place["W", s, i] < place["I", s, i] for kind, s, i in place if kind == "W"):
            return True
    return False


def _kinds(row: Sequence[Action]) -> str:
    return "".join(action.kind for action in row)


def _waiting(kinds: str) -> int:
    """Return the number of I's before the first W, less one."""
    return kinds.split("W")[0].count("I") - 1


def _drain(kinds: str) -> str:
    return kinds[kinds.rindex("F") + 1 :]


def _runs_ahead(orders: Orders) -> bool:
    """Whether ``rank`` does more forwards before its first I than 1F1B."""
    before_i = _kinds(orders.rows[orders.rank]).index("I")
    return before_i > len(orders.rows) - orders.rank


def _has_w_after_all_f(orders: Orders) -> bool:
    kinds = _kinds(orders.rows[orders.rank])
    return "F" not in kinds[kinds.index("W") :]


def _turns_back_early(orders: Orders) -> bool:
    """Whether some rank does its first I before it has done the warm-up of 1F1B."""
    p = len(orders.rows)
    return any(_kinds(row).index("I") < p - rank for rank, row in enumerate(orders.rows))


def _has_no_w_waiting(orders: Orders) -> bool:
    return not any(_waiting(_kinds(row)) for row in orders.rows)


def _lets_w_wait_in_front(orders: Orders) -> bool:
    """Whether rank 0 puts off the most W's, and the last rank none or few."""
    p = len(orders.rows)
    first, last = (_waiting(_kinds(orders.rows[rank])) for rank in (0, -1))
    return p > 1 and first >= p - 1 > last


def _has_in_drain(kinds: str) -> Callable[[Orders], bool]:
    """Return the condition that in some rank's drain these actions follow each other."""
    return lambda orders: any(kinds in _drain(_kinds(row)) for row in orders.rows)


def _begins_drain_with_w(orders: Orders) -> bool:
    return any(_drain(_kinds(row)).startswith("W") for row in orders.rows)


_IMPOSSIBLE: Cause = (
    (_has_early_w, _W_BEFORE_I),
    (
        OTHERWISE,
        "F and I go as in 1F1B: a warm-up of `p - 1 - rank` forwards, then F and I in turn, oldest"
        " first.",
    ),
)
_CROWDED_H1: Cause = (
    (
        _runs_ahead,
        "The warm-up is that of 1F1B: `p - 1 - rank` forwards, and one more in the steady state.",
    ),
    (
        _has_w_after_all_f,
        "All W's come after the last F. A W gives back a place that a later forward needs.",
    ),
    (
        OTHERWISE,
        "It puts off too many W's. With `p - rank` microbatches between F and I, room is left for"
        " `rank` that wait for their W.",
    ),
)
_SLOW_H1: Cause = (
    (
        _turns_back_early,
        "Some rank turns back too soon, and the ranks behind it starve: the warm-up is"
        " `p - 1 - rank` forwards.",
    ),
    (
        _has_no_w_waiting,
        "Each W comes right after its I, so the rank before waits for it after all, as under 1F1B."
        " The further back a rank is, the more W's it may put off.",
    ),
    (
        _lets_w_wait_in_front,
        "It is the other way round: rank 0 has the most in flight, and so the least room for W's"
        " that wait.",
    ),
    (
        _has_in_drain("II"),
        "In the drain each I is awaited: do one W after each, and not all of them at the end.",
    ),
    (
        _has_in_drain("WWI"),
        "In the drain each I is awaited: do one W after each, and not several.",
    ),
    (OTHERWISE, "Look at where a rank does W's while the rank before waits for its I."),
)


def forwards_first(rank: int, p: int, forward: float, input_grad: float) -> int:
    """The fewest forwards before the first I with which this rank never waits for it."""
    behind = p - 1 - rank
    return 1 + behind + math.ceil(behind * input_grad / forward)


_WRONG_FORWARDS: tuple[tuple[Callable[..., float], str], ...] = (
    (lambda rank, p, f, b: p - rank, "That is 1F1B. The gradient also has to come back up."),
    (lambda rank, p, f, b: 1 + 2 * (p - 1 - rank),
     "That holds where an input gradient takes as long as a forward. The way up takes `(p - 1 -"
     " rank) * input_grad`."),
    (lambda rank, p, f, b: p - 1 - rank + math.ceil((p - 1 - rank) * b / f),
     "A rank's own forward of microbatch 0 counts, too."),
    (lambda rank, p, f, b: 2 * (p - rank),
     "The rank begins with its I as soon as the gradient is there."),
    (lambda rank, p, f, b: p - rank + math.floor((p - 1 - rank) * b / f),
     "You round down: then it waits for the rest."),
    (lambda rank, p, f, b: p - rank + (p - 1 - rank) * math.ceil(b / f),
     "You round up rank by rank. The way up is one stretch of time: add first, then round."),
    (lambda rank, p, f, b: 1 + p - rank + math.ceil((p - rank) * b / f),
     "The rank's own I is not in the way: it is what the forwards are done before."),
    (lambda rank, p, f, b: p - rank + math.ceil((p - rank) * b / f),
     "The rank's own I is not in the way: it is what the forwards are done before."),
    (lambda rank, p, f, b: 1 + rank + math.ceil(rank * b / f),
     "Behind rank r are `p - 1 - r` ranks: the first has the longest to wait."),
)  # fmt: skip


def _first_gradient(case: tuple[Any, ...], got: int, right: int) -> str:
    rank, p, f, b = case
    forwards = "1 forward takes" if got == 1 else f"{got} forwards take"
    arrives = (p - rank) * f + (p - 1 - rank) * b
    return f"Its first gradient is there {arrives} after it began; {forwards} {got * f}."


_GRADE_FORWARDS = Formula(
    forwards_first,
    [
        (rank, p, f, b)
        for p, f, b in (
            (4, 1, 1), (3, 2, 2), (4, 10, 20), (4, 10, 15), (5, 20, 10), (6, 10, 11), (1, 5, 5), (4, 30, 10)
        )
        for rank in range(p)
    ],
    _WRONG_FORWARDS,
    "Microbatch 0 passes this rank and all behind it, `p - rank` forwards, and its gradient comes"
    " up through `p - 1 - rank` input gradients. How many forwards fit into that time?",
    read=lambda value, call: expect_int(value, call,
        "A part of a forward is no help: round up, `math.ceil`."),
    example=_first_gradient,
)  # fmt: skip


def place_weights(order: list[Action], room: int) -> list[Action]:
    """The order of one rank with its W's put in, as late as ``room`` activations allow."""
    waiting: list[Action] = []
    placed: list[Action] = []
    left, held = sum(action.kind == "F" for action in order), 0
    for action in order:
        if action.kind == "F" and held == room:
            placed.append(waiting.pop(0))
            held -= 1
        placed.append(action)
        if action.kind == "F":
            held, left = held + 1, left - 1
        else:
            waiting.append(Action(action.stage, "W", action.microbatch))
            if left == 0:
                placed.append(waiting.pop(0))
    return placed + waiting


def _grade_place_weights(answer: Answer) -> None:
    cases = [
        (f"the F's and I's of {name}", _without_w(build(name, p, m)), room)
        for p, m in ((4, 8), (3, 7), (2, 3))
        for name, room in (("zb_h1", p), ("zb_h1", p + 1), ("zb_h2", 2 * p - 1), ("zb_h1", 2 * m))
    ]
    # Two F's follow two I's: an answer that asks only after an I whether the room is full frees one
    # place where two are needed.
    doubled: list[list[Action]] = []
    for order in _without_w(build("zb_h1", 3, 4)):
        doubled.append([])
        for action in order:
            first = 2 * action.microbatch
            pair = (replace(action, microbatch=first), replace(action, microbatch=first + 1))
            doubled[-1] += pair
    cases.append(("two F's or two I's at a time", doubled, 6))
    values = iter(answer.calls([(order, room) for _, given, room in cases for order in given]))
    for what, given, room in cases:
        rows = [_read_placed(next(values), order, room) for order in given]
        best = Schedule(
            "best", looped(len(given)), tuple(tuple(place_weights(order, room)) for order in given)
        )
        case = f"With {what}, p={len(given)} and room for {room}"
        judge_orders(
            case,
            rows,
            best,
            impossible=_W_BEFORE_I,
            crowded=_CROWDED,
            slow=_SLOW,
            costs=(Costs(), Costs(3, 3, 2)),
        )


def _without_w(schedule: Schedule) -> list[list[Action]]:
    rows = []
    for row in schedule.actions:
        parts = [part for action in row for part in action.parts]
        rows.append([part for part in parts if part.kind != "W"])
    return rows


_CROWDED = (
    "Where the room is used up, the forward that comes next needs the place of a W: do the oldest"
    " first."
)


def _read_placed(value: Any, order: list[Action], room: int) -> tuple[Action, ...]:
    def lacking(action: Action) -> str:
        return _LACKING["W"] if action.kind == "W" else as_it_was

    def repeated(action: Action) -> str:
        return _why_repeated(action) if action.kind == "W" else as_it_was

    what = f"place_weights(…, {room})"
    alien = "Only W's are put in: one for each I, with its stage and its microbatch."
    as_it_was = "Others wait for each F and each I: leave them all, and in their order."
    row, example = read_order(
        value, what, place_weights(order, room), lambda _: alien, lacking, repeated
    )
    if [action for action in row if action.kind != "W"] != order:
        example = f"The order was `{' '.join(map(str, order))}`.\n{example}"
        raise Mistake(f"`{what}` changes the order of F and I.", as_it_was, example)
    return row


_SLOW: Cause = (
    (
        _has_in_drain("II"),
        "After the last F nothing needs room, and a rank waits for each I that is left: a W that"
        " waits until all are done leaves that time idle.",
    ),
    (
        _has_no_w_waiting,
        "Each W comes at once, though nobody waits for it and somebody waits for the I after it."
        " Is there room?",
    ),
    (
        lambda orders: _begins_drain_with_w(orders) or _has_in_drain("WWI")(orders),
        "After the last F let one W follow each I: one before it, or a second one, delays an I"
        " that another rank waits for.",
    ),
    (
        OTHERWISE,
        "A W is done although there is room for the next forward: it delays an I that another rank"
        " waits for.",
    ),
)


def choose_schedule(
    points: dict[str, tuple[float, float]], state: float, activation: float, budget: float
) -> str | None:
    """The schedule with the smallest bubble that fits, or None."""
    fitting = [
        (bubble, held, name)
        for name, (held, bubble) in points.items()
        if state + held * activation <= budget
    ]
    return min(fitting)[2] if fitting else None


_Points = dict[str, tuple[float, float]]
"""{schedule: (activations of one microbatch in all layers of a rank, bubble)}."""

_POINTS: _Points = {
    "gpipe": (8, 0.27), "1f1b": (4, 0.27), "zb_h1": (4, 0.11), "zb_h2": (7, 0.11),
    "zb_v": (4, 0.06), "v_half": (2.5, 0.16), "naive": (1, 0.75),
}  # fmt: skip
_BUDGETS: list[tuple[_Points, float, float, float]] = [
    *((_POINTS, 10, 2, budget) for budget in (18.0, 17.9, 100, 12, 11)),
    (_POINTS, 0, 3, 8),
    ({"a": (3, 0.1), "b": (2, 0.1), "c": (1, 0.2)}, 1, 1, 10),
    ({"b": (2, 0.1), "a": (3, 0.1), "c": (1, 0.2)}, 1, 1, 10),
    ({"a": (5, 0.0), "b": (6, 0.0)}, 1, 1, 6),
    ({"a": (5, 0.3)}, 2, 1, 6),
    ({"a": (3, 0.2), "b": (2, 0.1), "c": (4, 0.3)}, 1, 1, 4),
]


_LESS_MEMORY = (
    "Less memory than the budget buys nothing: of what fits, the smallest bubble is wanted."
)
_EXACTLY = "A schedule that needs exactly the budget fits: `<=`."
_NEEDS = "A rank needs its state, and `activation` bytes for each activation that it holds."
_NEEDED = "state + held * activation"
_FITS = " if state + held * activation <= budget"
_LEAST = "(bubble, held, name)"
_WRONG_CHOICES = (
    (("name, (held, bubble)", "name, (bubble, held)"),
     "In each pair the activations come first, then the bubble. Here they are swapped."),
    (("<= budget", "< budget"), _EXACTLY),
    ((_NEEDED, "held * activation"), _NEEDS),
    ((_NEEDED, "state + held"), _NEEDS),
    ((_NEEDED, "held * (state + activation)"),
     "The state is there once, and not for each activation."),
    ((_NEEDED, "(state + held) * activation"),
     "The state is bytes already: only what is held is multiplied by `activation`."),
    ((_FITS, ""), "Throw out first what does not fit into `budget`."),
    ((_FITS, ""), (_LEAST, "(held, bubble, name)"), _LESS_MEMORY),
    ((_LEAST, "(held, bubble, name)"), _LESS_MEMORY),
    ((_LEAST, "(-bubble, held, name)"), "That is the largest bubble of what fits."),
    ((_LEAST, "(bubble, name, name)"),
     "Of equal bubbles take the one that holds less, whatever its name."),
    ((_LEAST, "(-held, bubble, name)"),
     "The most memory that fits need not have the smallest bubble: compare the bubbles."),
)  # fmt: skip


def _why_other_choice(case: tuple[Any, ...], got: Any, best: str | None) -> str:
    points, state, activation, budget = case
    if got is None:
        return (
            f"{best} fits: return a name wherever `state + held * activation` is within the budget."
        )
    if not isinstance(got, str) or got not in points:
        return "That is no schedule of those: return a name, or None."
    held, bubble = points[got]
    if state + held * activation > budget:
        return f"It does not fit. {_NEEDS if best else 'Nothing fits there: return None.'}"
    best_held, least_bubble = points[best or ""]
    causes = (
        (state + best_held * activation == budget, _EXACTLY),
        (
            bubble == least_bubble,
            "Of equal bubbles take the one that holds less: on the picture, the point further to"
            " the left.",
        ),
        (OTHERWISE, _LESS_MEMORY),
    )
    return why(causes)


def _what_they_need(case: tuple[Any, ...], got: Any, best: str | None) -> str:
    points, state, activation, _ = case
    needs = [
        f"{name} needs {state} + {points[name][0]} × {activation} ="
        f" {state + points[name][0] * activation:g}, and its bubble is {points[name][1]}."
        for name in (got, best)
        if isinstance(name, str) and name in points
    ]
    return "\n".join(
        [
            *needs,
            f"The points were {', '.join(f'{name} {point}' for name, point in points.items())}.",
        ]
    )


_GRADE_CHOICE = Formula(
    choose_schedule,
    _BUDGETS,
    _WRONG_CHOICES,
    _why_other_choice,
    read=lambda value, call: value,
    call=lambda points, state, activation, budget: (
        f"choose_schedule(…, {state}, {activation}, {budget})"
    ),
    example=_what_they_need,
)


def gradient_norm(stage: nn.Module) -> float:
    """The norm of all gradients there are, of all ranks: what clipping asks for. Call it on every rank at once."""
    squares = sum(
        (p.grad.double().square().sum() for p in stage.parameters() if p.grad is not None),
        torch.tensor(0.0),
    )
    total = squares.double().clone()
    if dist.is_initialized():
        dist.all_reduce(total)
    return float(total.sqrt())


def healed_split_step(
    stage: nn.Module,
    microbatches: list[torch.Tensor],
    targets: list[torch.Tensor],
    loss_fn: nn.Module,
    link: Link,
) -> float:
    """One step of ZB-H1 on this rank, which receives into slots that it uses again; returns the norm."""
    m, ahead = len(microbatches), link.n_ranks - 1 - link.rank
    free = deque(torch.empty(link.shape, dtype=link.dtype) for _ in range(min(m, link.n_ranks)))
    in_flight, waiting, sends = deque[tuple](), deque[tuple](), []

    def forward(i: int) -> None:
        slot = free.popleft()
        if link.is_first:
            slot.copy_(microbatches[i])
        else:
            dist.recv(slot, link.rank - 1)
        x = slot.detach().requires_grad_()
        y = forward_stage(stage, x, targets[i], loss_fn, link)
        in_flight.append((slot, x, y))
        sends.extend(send_activation(y, link))

    def input_backward() -> None:
        slot, x, y = in_flight.popleft()
        dy = recv_gradient(y, m, link)
        [dx] = torch.autograd.grad(y, x, dy, retain_graph=True)
        sends.extend(send_gradient(dx, link))
        waiting.append((slot, y, dy))

    def weight_backward() -> None:
        slot, y, dy = waiting.popleft()
        torch.autograd.backward(y, dy, inputs=list(stage.parameters()))
        free.append(slot)

    for i in range(m + ahead):
        if i < m:
            forward(i)
        if i >= ahead:
            input_backward()
            if len(waiting) > link.rank:
                weight_backward()
    while waiting:
        weight_backward()
    for send in sends:
        send.wait()
    return gradient_norm(stage)


def _call(step: Callable[..., Any], seat: Seat) -> tuple[Any, int]:
    """Call the step; return its result, and the places for inputs at the first forward."""
    size = math.prod(seat.link.shape) * seat.link.dtype.itemsize
    places = list[int]()

    def count(*_: object) -> None:
        if not places:
            storages = [each.untyped_storage() for each in gc.get_objects() if type(each) is Tensor]
            places.append(
                len({storage.data_ptr() for storage in storages if storage.nbytes() == size})
            )

    # Objects from before the step are not its slots, so freeze them out of the count.
    gc.freeze()
    seat.stages[0].register_forward_pre_hook(count)
    return step(*seat.stages, seat.microbatches, seat.parts, seat.loss_fn, seat.link), sum(places)


BENCH = Bench(_call)
_SIZES = {4: (8, 2), 3: (5,), 2: (1, 3)}
_OUT_OF_SLOTS = (
    "If it is `free` that is empty: a slot is in use from its F until its W, so more are in use at"
    " once than before. 1F1B lets every rank hold `min(m, p)`."
)


_NO_GRADIENT = (
    "`torch.autograd.grad` returns gradients and adds none: W has to put them into `.grad`."
)
_WRONG_GRADIENTS: Cause = (
    (
        lambda found: found.m > 1 and found.are_times(found.m),
        "Each that differs is m times too large: `recv_gradient` gives the 1/m on the last rank.",
    ),
    (
        lambda found: found.m > 1 and found.are_times(2),
        "Each that differs is twice too large: I and W both add to them.",
    ),
    (
        WrongGradients.multiply_received_inputs,
        "Only weights that multiply what a rank has received: W needs that input once more. Who"
        " has written to its slot in between?",
    ),
    (
        lambda found: all(0 < rank < found.p - 1 for rank, _ in found.wrong),
        "Rank 0 puts nothing off, and on the last rank every `dy` is 1/m: there it does not matter"
        " which `y` meets which `dy`. Elsewhere both have to be of one microbatch.",
    ),
    (OTHERWISE, "Does every microbatch have its W, once, from its own `y` and `dy`?"),
)


def _grade_healed_step(answer: Answer) -> None:
    try:
        for where, m, ranks in BENCH.tried(answer, _SIZES):
            _judge_step(where, m, ranks)
    except Stopped as stopped:
        # Python's words for an empty list or deque; an index that is too large has others.
        if stopped.error == "IndexError" and "pop from " in stopped.symptom:
            raise Mistake(stopped.symptom, _OUT_OF_SLOTS, stopped.example) from None
        raise


def _judge_step(where: str, m: int, ranks: Sequence[Outcome]) -> None:
    p = len(ranks)
    _, expected = BENCH.one_process(m)
    BENCH.judge_gradients(where, ranks, m, missing=_NO_GRADIENT, wrong=_WRONG_GRADIENTS)
    norm = _norm(expected)
    for rank, outcome in enumerate(ranks):
        found = expect_number(outcome.returned[0], f"healed_split_step(…) on rank {rank}")
        if not close(found, norm, TOLERANCE):
            symptom = (
                f"{where} the gradients are right, but the norm on rank {rank} is {found:.6g} and"
                f" not {norm:.6g}."
            )
            raise Mistake(symptom, "It is the norm of all gradients: take it after the last W.")
    if p > m:
        return
    for rank, outcome in enumerate(ranks):
        if "W" in "".join(outcome.events.split("F")[:p]):
            symptom = (
                f"{where} the gradients are right, but rank {rank} has done a W before its forward"
                f" {p - 1}."
            )
            cause = (
                f"That W delays an I that rank {rank - 1} waits for. Let `rank` of them wait, as"
                " before."
            )
            raise Mistake(symptom, cause)
        # One slot more is allowed: a name may keep an input until it names the next one.
        slots = outcome.returned[1]
        if rank and (slots > p or outcome.places > p + 1):
            symptom = (
                f"{where} the gradients are right, but rank {rank} has memory for"
                f" {max(slots, outcome.places)} inputs"
            )
            cause = (
                "A slot is free again after the W of its microbatch: give it back, and p slots are"
                " enough. Count the slots, used or not, and copies of inputs as well."
            )
            raise Mistake(f"{symptom}; 1F1B lets a rank hold {p}.", cause)


def _norm(gradients: dict[str, Tensor]) -> float:
    return float(sum(gradient.square().sum() for gradient in gradients.values()) ** 0.5)


EXERCISES: tuple[Exercise, ...] = (
    Exercise(order_zb_h1, _grade_order, "05", "ZB-H1 as an order", 2, 8, (
        "F and I go as F and B do under 1F1B: `p - 1 - rank` forwards, then F and I in turn, then"
        " the I's that are left.",
        "1F1B lets rank 0 hold p activations, and this rank has `p - rank` between F and I. So it"
        " may have `rank` microbatches waiting for their W.",
        "After the I of microbatch i comes the W of microbatch `i - rank`, if there is one, also in"
        " the drain. The last `rank` W's come at the end.",
    )),
    Exercise(forwards_first, _GRADE_FORWARDS, "05", "how far H2 runs ahead", 2, 6, (
        "Count from this rank's first forward to the arrival of its first gradient. What does"
        " microbatch 0 pass?",
        "It passes `p - rank` forwards, this rank's included, and its gradient `p - 1 - rank` input"
        " gradients.",
        "Meanwhile the rank does forwards: that time over `forward`, rounded up once, with"
        " `math.ceil`.",
    )),
    Exercise(place_weights, _grade_place_weights, "05", "which W's may wait", 3, 9, (
        "Walk through the order and keep two things: how many activations are held, and a list of"
        " the W's that wait. An F adds an activation, a W gives one back.",
        "A W may wait as long as there is room. If the next action is an F and `held == room`, the"
        " oldest W goes first.",
        "After the last F no place is needed any more, but the rank idles between the I's: let one"
        " W follow each. Whatever still waits comes at the end.",
    )),
    Exercise(choose_schedule, _GRADE_CHOICE, "05", "a budget of memory", 1, 5, (
        "First throw out what does not fit: `state + held * activation` must be at most `budget`.",
        "Of what is left take the smallest bubble; if two have the same, the one that holds less.",
        "`min` of tuples `(bubble, held, name)` does both. Mind the case in which nothing is left.",
    )),
    Exercise(healed_split_step, _grade_healed_step, "05", "bug clinic", 3, 9, (
        "Which gradients are wrong, and what do they need that the others do not?",
        "`free.append(slot)` says that nobody needs this memory any more. Who does, until when?",
        "Give the slot back in `weight_backward`. More slots are then in use at once: `min(m, p)`"
        " on every rank.",
    ), limit_s=10.0),
)  # fmt: skip


PATIENTS: dict[str, Callable[..., float]] = {
    "A": flawed(
        healed_split_step,
        ("range(min(m, link.n_ranks))", "range(ahead + 1)"),
        ("waiting.append((slot, y, dy))", "waiting.append((slot, y, dy)); free.append(slot)"),
        ("\n        free.append(slot)\n", "\n"),
    ),
    "B": flawed(
        healed_split_step,
        ("in_flight, waiting, sends = ", "gradients = []; in_flight, waiting, sends = "),
        ("waiting.append((slot, y, dy))", "waiting.append((slot, y)); gradients.append(dy)"),
        ("slot, y, dy = waiting.popleft()", "(slot, y), dy = waiting.popleft(), gradients.pop()"),
    ),
    "C": flawed(
        healed_split_step,
        ("    while waiting:", "    norm = gradient_norm(stage)\n    while waiting:"),
        ("return gradient_norm(stage)", "return norm"),
    ),
}
"""Steps of ZB-H1 that run and go wrong, each for another reason.

Each returns the norm that it would clip by.
"""


def examine(step: Callable[..., float], n_ranks: int = 4, n_microbatches: int = 8) -> Findings:
    """Run a step of ZB-H1 on real ranks; compare its gradients and norm with one process."""
    ranks = BENCH.ran(step, n_ranks, n_microbatches)
    norm = _norm(BENCH.one_process(n_microbatches)[1])
    found = BENCH.compared([(rank.losses, rank.gradients) for rank in ranks], n_microbatches)
    return replace(found, value=ranks[-1].returned[0], of_one=norm, what="norm")


def time_halves(repeats: int = 15) -> dict[str, float]:
    """Return the seconds of F, B, I and W of a transformer block, medians of ``repeats`` rounds.

    The four take turns in a round. Two more rounds come first and are not measured. The block is
    256 wide and gets 4 sequences of 128 tokens. If a half takes longer than the whole, a line says
    that this machine was too busy.
    """
    config = ModelConfig(dim=256, n_layers=3, n_heads=4, vocab_size=256)
    module = build_stage_module(config, 1, 3)
    x = torch.randn(4, 128, config.dim)
    stage = Stage(0, module, x.device, False, None)
    gradient = torch.randn_like(stage.evaluate(x, None)[0])
    seconds: dict[str, list[float]] = {kind: [] for kind in "FBIW"}
    for _ in range(repeats + 2):
        for kinds in ("FB", "FIW"):
            given = x.detach().requires_grad_()
            work: dict[str, Callable[[], object]] = {
                "F": lambda: stage.forward(0, given, None, kinds == "FIW"),  # noqa: B023
                "B": lambda: stage.backward(0, (gradient,)),
                "I": lambda: stage.backward_input(0, (gradient,)),
                "W": lambda: stage.backward_weight(0),
            }
            for kind in kinds:
                start = time.perf_counter()
                work[kind]()
                seconds[kind].append(time.perf_counter() - start)
            module.zero_grad()
    medians = {kind: statistics.median(row[2:]) for kind, row in seconds.items()}
    for half in "IW":
        if medians[half] > medians["B"]:
            print(
                f"This machine was too busy: {half} is a part of B but took longer. Run the cell"
                " again."
            )
    return medians


def blocks(n: int = 8) -> nn.Sequential:
    """Return a small model of ``n`` equal blocks, which can be cut into stages."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(n))
    )


def one_after_another(schedule: Schedule, n_steps: int = 2) -> Schedule:
    """Return ``n_steps`` steps in a row: each rank begins its next step as soon as it can.

    The microbatches of the second step continue the numbers of the first.
    """
    m = schedule.n_microbatches
    rows = []
    for row in schedule.actions:
        steps: list[Action | Overlap] = []
        for step in range(n_steps):
            steps += [_later(action, step * m) for action in row]
        rows.append(tuple(steps))
    return Schedule(f"{schedule.name}, {n_steps} steps", schedule.placement, tuple(rows))


def _later(action: Action | Overlap, by: int) -> Action | Overlap:
    parts = [Action(part.stage, part.kind, part.microbatch + by) for part in action.parts]
    return parts[0] if isinstance(action, Action) else Overlap(*parts)
