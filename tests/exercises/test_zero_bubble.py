"""The graders of notebook 05, by what learners hand in."""

from collections import deque
from collections.abc import Callable
from itertools import accumulate, cycle
from types import SimpleNamespace
from typing import Any

import pytest

from course_pp.exercises.formula import flawed
from course_pp.exercises.zero_bubble import exercises as zero_bubble
from course_pp.exercises.zero_bubble.exercises import (
    PATIENTS,
    choose_schedule,
    examine,
    healed_split_step,
    one_after_another,
    order_zb_h1,
    place_weights,
    time_halves,
)
from course_pp.schedule import Action, build, check, simulate
from tests.exercises.grading import accepts, refuses

Answer = Callable[..., Any]


def with_lag(
    lag: Callable[[int, int], int], warm_up: Answer | None = None, drain: str = "IW"
) -> Answer:
    """F and I of 1F1B or of another warm-up, with a W after each I but the first ``lag``."""

    def order_zb_h1(rank: int, p: int, m: int) -> list[Action]:
        ahead = min(m, warm_up(rank, p) if warm_up else p - 1 - rank)
        order, waiting = [Action(rank, "F", i) for i in range(ahead)], deque[Action]()
        for i in range(m):
            order += [Action(rank, "F", ahead + i)] if ahead + i < m else []
            order.append(Action(rank, "I", i))
            waiting.append(Action(rank, "W", i))
            if ahead + i >= m and drain != "IW":
                order += [waiting.popleft() for _ in range(len(waiting) if drain == "IWW" else 0)]
            elif len(waiting) > lag(rank, p):
                order.append(waiting.popleft())
        return [*order, *waiting]

    return order_zb_h1


def newest_first(rank: int, p: int, m: int) -> list[Action]:
    """Which W comes first makes no difference to time or memory."""
    waiting, out = [], []
    for action in order_zb_h1(rank, p, m):
        if action.kind == "I":
            waiting.append(action.microbatch)
        out.append(Action(rank, "W", waiting.pop()) if action.kind == "W" else action)
    return out


def w_before_i(rank: int, p: int, m: int) -> list[Action]:
    halves = {"I": "W", "W": "I"}
    return [Action(rank, halves.get(a.kind, a.kind), a.microbatch) for a in order_zb_h1(rank, p, m)]


def forwards_counted(rank: int, p: int, f: float, b: float) -> int:
    arrives, n = (p - rank) * f + (p - 1 - rank) * b, 0
    while n * f < arrives:
        n += 1
    return n


def put(short: int = 0, after_i: bool = False, drain: str = "IW") -> Answer:
    """W's before an F or after an I where all room but ``short`` is used, and in the drain."""

    def place_weights(order: list[Action], room: int) -> list[Action]:
        left, held, waiting, out = (
            sum(a.kind == "F" for a in order),
            0,
            deque[Action](),
            list[Action](),
        )

        def weights(n: int) -> None:
            nonlocal held
            for _ in range(min(n, len(waiting))):
                out.append(waiting.popleft())
                held -= 1

        for action in order:
            if action.kind == "F":
                weights(held >= room - short and not after_i)
                out.append(action)
                held, left = held + 1, left - 1
                continue
            weights(not left and drain == "WI")
            out.append(action)
            waiting.append(Action(action.stage, "W", action.microbatch))
            weights(
                drain.count("W") if not left and drain != "WI" else after_i and held >= room - short
            )
        return [*out, *waiting]

    return place_weights


def at_once(order: list[Action], room: int) -> list[Action]:
    return [
        each
        for a in order
        for each in ([a, Action(a.stage, "W", a.microbatch)] if a.kind == "I" else [a])
    ]


def at_the_end(order: list[Action], room: int) -> list[Action]:
    return order + [Action(a.stage, "W", a.microbatch) for a in order if a.kind == "I"]


def in_place(order: list[Action], room: int) -> list[Action]:
    placed = place_weights(order, room)
    order[:] = placed
    return order


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


def best_by(
    key: Callable[[float, float], Any],
    fits: Callable[..., bool] = lambda held, s, a, budget: s + held * a <= budget,
) -> Answer:
    def choose_schedule(points: Any, s: float, a: float, budget: float) -> str | None:
        fitting = [name for name, (held, _) in points.items() if fits(held, s, a, budget)]
        return min(fitting, key=lambda name: key(*points[name]), default=None)

    return choose_schedule


def fitting_by(fits: Callable[..., bool]) -> Answer:
    return best_by(lambda held, bubble: (bubble, held), fits)


def by_sorting(points: Any, state: float, activation: float, budget: float) -> Any:
    ordered = sorted(points, key=lambda name: points[name][::-1])
    return next((name for name in ordered if points[name][0] * activation + state <= budget), None)


WRONG = {
    "order_zb_h1": [
        (
            lambda rank, p, m: build("1f1b", p, m).actions[rank],
            "has `0B0`",
            "A whole backward: here it is split",
        ),
        (
            with_lag(lambda rank, p: 0),
            "takes 30 units; 27 are enough",
            "Each W comes right after its I",
        ),
        (with_lag(lambda rank, p: 99), "holds 8 activations", "All W's come after the last F"),
        (with_lag(lambda rank, p: p - 1 - rank), "holds 7 activations", "room is left for `rank`"),
        (
            with_lag(lambda rank, p: rank, drain="I"),
            "it takes",
            "do one W after each, and not all of them at the end",
        ),
        (
            with_lag(lambda rank, p: rank, drain="IWW"),
            "it takes",
            "do one W after each, and not several",
        ),
        (with_lag(lambda rank, p: 0, lambda rank, p: p - rank), "The warm-up is that of 1F1B"),
        (with_lag(lambda rank, p: 0, lambda rank, p: 0), "it takes", "turns back too soon"),
        (
            lambda rank, p, m: order_zb_h1(rank, p, m)[: 3 * m - rank],
            "lacks",
            "those put off come last",
        ),
        (lambda rank, p, m: order_zb_h1(0, p, m), "has `0F0`", "its actions are `1F0`"),
        (
            lambda rank, p, m: order_zb_h1(rank, p, m + 1),
            "has `0F8`",
            "The microbatches are 0 to 7",
        ),
        (
            lambda rank, p, m: order_zb_h1(rank, p, m)[:1] + order_zb_h1(rank, p, m),
            "2 times",
            "Each phase goes on",
        ),
        (w_before_i, "cannot run", "W of a microbatch comes after its I"),
        (lambda rank, p, m: order_zb_h1(rank, p, m)[::-1], "cannot run"),
        (
            lambda rank, p, m: [f"{a.kind}{a.microbatch}" for a in order_zb_h1(rank, p, m)],
            "no action",
        ),
    ],
    "forwards_first": [
        (
            lambda rank, p, f, b: p - rank,
            "is 4, not 7",
            "That is 1F1B",
            "7 after it began; 4 forwards take 4",
        ),
        (lambda rank, p, f, b: p - rank + (p - 1 - rank) * b / f, "a float", "round up"),
    ],
    "place_weights": [
        (at_once, "it takes", "Is there room?"),
        (at_the_end, "activations at", "do the oldest first"),
        (put(drain=""), "it takes", "leaves that time idle"),
        (put(drain="WI"), "it takes", "let one W follow each I"),
        (put(drain="IWWWWWWWW"), "it takes", "let one W follow each I"),
        (put(short=1), "it takes", "delays an I"),
        (
            put(after_i=True),
            "With two F's or two I's at a time",
            "holds 7 activations",
            "do the oldest first",
        ),
        (
            lambda order, room: [a for a in place_weights(order, room) if a.kind != "W"],
            "lacks",
            "those put off",
        ),
        (
            lambda order, room: sorted(place_weights(order, room), key=lambda a: a.kind),
            "changes the order of F and I",
        ),
        (in_place, "changed its argument"),
    ],
    "choose_schedule": [
        (fitting_by(lambda *_: True), "is 'zb_v', not 'v_half'", "does not fit into `budget`"),
        (
            best_by(lambda held, bubble: held),
            "is 'naive', not 'zb_v'",
            "Less memory than the budget buys nothing",
        ),
        (
            best_by(lambda held, bubble: held, lambda *_: True),
            "Less memory than the budget buys nothing",
        ),
        (best_by(lambda held, bubble: (held, bubble)), "Less memory than the budget buys nothing"),
        (best_by(lambda held, bubble: -bubble), "the largest bubble of what fits"),
        (best_by(lambda held, bubble: bubble), "holds less"),
        (fitting_by(lambda held, s, a, budget: held * a <= budget), "A rank needs its state"),
        (fitting_by(lambda held, s, a, budget: s + held <= budget), "A rank needs its state"),
        (
            fitting_by(lambda held, s, a, budget: (s + held) * a <= budget),
            "The state is bytes already",
        ),
        (
            fitting_by(lambda held, s, a, budget: s + held * a <= budget - 1e-6),
            "exactly the budget fits",
        ),
        (
            lambda points, s, a, budget: None,
            "is None, not 'zb_v'",
            "wherever `state + held * activation` is within",
        ),
        (
            lambda points, *row: choose_schedule({k: v[::-1] for k, v in points.items()}, *row),
            "first, then the bubble",
        ),
        (lambda *row: choose_schedule(*row) or "none", "no schedule of those"),
        (
            lambda points, s, a, budget: min(
                (v[1], k) for k, v in points.items() if s + v[0] * a <= budget
            )[1],
            "raised ValueError",
            "where nothing is left",
        ),
    ],
}
RIGHT = {
    "order_zb_h1": [
        newest_first,
        with_lag(lambda rank, p: rank),
        lambda rank, p, m: [str(action) for action in order_zb_h1(rank, p, m)],
    ],
    "forwards_first": [
        forwards_counted,
        lambda rank, p, f, b: -(-((p - rank) * f + (p - 1 - rank) * b) // f),
    ],
    "place_weights": [
        put(),
        after_the_input_gradient,
        lambda order, room: tuple(map(str, place_weights(order, room))),
    ],
    "choose_schedule": [by_sorting, best_by(lambda held, bubble: (bubble, held))],
}


@pytest.mark.parametrize(
    ("name", "answer", "words"),
    [(name, answer, words) for name, rows in WRONG.items() for answer, *words in rows],
)
def test_a_wrong_answer_is_told_why(name: str, answer: Answer, words: list[str]) -> None:
    refuses(name, answer, *words)


@pytest.mark.parametrize(
    ("name", "answer"), [(name, answer) for name, answers in RIGHT.items() for answer in answers]
)
def test_a_right_answer_may_be_written_in_another_way(name: str, answer: Answer) -> None:
    accepts(name, answer)


SLOTS, NORM = "range(min(m, link.n_ranks))", "return gradient_norm(stage)"
FREED_BY_I = (
    ("waiting.append((slot, y, dy))", "waiting.append((slot, y, dy)); free.append(slot)"),
    ("\n        free.append(slot)\n", "\n"),
)
BY_HAND = (
    "torch.autograd.backward(y, dy, inputs=list(stage.parameters()))",
    (
        "for p, g in zip(stage.parameters(), torch.autograd.grad(y, list(stage.parameters()), dy)):"
        " p.grad = g if p.grad is None else p.grad + g"
    ),
)


def step(*changes: tuple[str, str]) -> Answer:
    return flawed(healed_split_step, *changes)


WRONG_STEPS = [
    (PATIENTS["A"], "Who has written to its slot"),
    (PATIENTS["B"], "which `y` meets which `dy`"),
    (PATIENTS["C"], "the gradients are right, but the norm", "after the last W"),
    (
        step((SLOTS, "range(link.n_ranks - link.rank)")),
        "pop from an empty deque",
        "If it is `free` that is empty",
    ),
    (step((SLOTS, "range(link.n_ranks + 1)")), "memory for 5 inputs", "p slots are enough"),
    (step((SLOTS, "range(m)"), *FREED_BY_I), "memory for 8 inputs", "1F1B lets a rank hold 4"),
    (
        step((SLOTS, "range(link.n_ranks + 2)"), ("slot.detach()", "slot.clone()"), *FREED_BY_I),
        "memory for",
        "copies of inputs",
    ),
    (
        step((SLOTS, "range(100)"), ("        free.append(slot)\n", "")),
        "memory for 100 inputs",
        "the slots, used or not",
    ),
    (
        step((SLOTS, "range(m)"), ("free.append(", "free.appendleft(")),
        "memory for 8 inputs",
        "1F1B lets a rank hold 4",
    ),
    (
        step(("> link.rank:", "> 0:")),
        "has done a W before its forward 3",
        "Let `rank` of them wait",
    ),
    (step(("> link.rank:", "> 0:"), BY_HAND), "has done a W before its forward 3"),
    (
        step(
            (
                "[dx] = torch.autograd.grad(y, x, dy, retain_graph=True)",
                "torch.autograd.backward(y, dy, retain_graph=True); dx = x.grad",
            )
        ),
        "twice too large",
    ),
    (step((NORM, "return None")), "Is a `return` missing?"),
    (step(("send.wait()", "pass")), "was known to be taken"),
    (
        step((NORM, "return sum(float(p.grad.square().sum()) for p in stage.parameters()) ** 0.5")),
        "the norm on rank 0",
        "norm of all gradients",
    ),
]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("answer", "words"), [(answer, words) for answer, *words in WRONG_STEPS])
def test_a_wrong_step_is_told_why(answer: Answer, words: list[str]) -> None:
    refuses("healed_split_step", answer, *words)


def test_a_step_may_add_gradients_by_hand_take_any_w_first_and_have_p_slots() -> None:
    accepts(
        "healed_split_step",
        step((SLOTS, "range(link.n_ranks)"), BY_HAND, ("waiting.popleft()", "waiting.pop()")),
    )


@pytest.mark.ranks
def test_each_patient_shows_its_symptom_and_the_healed_step_none() -> None:
    found = {
        name: examine(step) for name, step in (*PATIENTS.items(), ("healed", healed_split_step))
    }
    wrong = {
        name: [list(rank.values()).count("wrong") for rank in each.by_rank]
        for name, each in found.items()
    }
    assert wrong == {
        "A": [0, 1, 1, 1],
        "B": [0, 3, 3, 0],
        "C": [0, 0, 0, 0],
        "healed": [0, 0, 0, 0],
    }
    assert [name for name, each in found.items() if each.value == pytest.approx(each.of_one)] == [
        "healed"
    ]
    assert "rank 1: 3 right, 1 wrong (1.0.weight)" in str(found["A"])


# What the notebook measures and strings together.


@pytest.mark.parametrize(("name", "of_two"), [("zb_h1", 54), ("zb_h2", 51), ("dualpipe_v", 108)])
def test_steps_one_after_another_can_run_and_overlap_where_a_rank_is_done_early(
    name: str, of_two: int
) -> None:
    steps = one_after_another(build(name, 4, 8))
    assert check(steps) == []
    assert steps.n_microbatches == 16
    assert simulate(steps).makespan == of_two


def test_each_half_of_a_backward_is_timed() -> None:
    seconds = time_halves(repeats=1)
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
    monkeypatch.setattr(zero_bubble, "time", SimpleNamespace(perf_counter=lambda: next(ends)))
    seconds = time_halves(repeats=1)
    assert seconds == {"F": 1.0, "B": 2.0, "I": i, "W": 1.0}
    assert capsys.readouterr().out == said
