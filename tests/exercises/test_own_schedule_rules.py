"""Two graders of notebook 11, by what learners hand in: a lower bound, and a rule for what comes next."""

from collections.abc import Callable
from typing import Any

import pytest

from course_pp.exercises.answer import Answer
from course_pp.exercises.mistakes import Mistake
from course_pp.exercises.own_schedule_rules import grade_choose, grade_lower_bound, lower_bound, next_action, play
from course_pp.schedule import Action, Costs, bound, check, simulate

pytestmark = pytest.mark.ranks


def judged(grade: Callable[[Answer], None], fn: Callable[..., Any], limit_s: float = 10.0) -> str:
    """What the grader has against an answer; nothing if it is right."""
    try:
        grade(Answer(fn, limit_s))
    except Mistake as mistake:
        return str(mistake)
    return ""


def work_alone(p: int, m: int, f: float, i: float, w: float) -> float:
    return m * (f + i + w)


def last_rank_waits(p: int, m: int, f: float, i: float, w: float) -> float:
    return (p - 1) * f + m * (f + i + w)


def as_1f1b(p: int, m: int, f: float, i: float, w: float) -> float:
    return (p - 1 + m) * (f + i + w)


def one_microbatch(p: int, m: int, f: float, i: float, w: float) -> float:
    return p * (f + i) + w


@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (lower_bound, ""),
        (lambda p, m, f, i, w: float(bound(p, m, Costs(f, i, w))), ""),
        (work_alone, "The last rank cannot begin before a microbatch has come down"),
        (last_rank_waits, "the gradient still goes up through all the others"),
        (as_1f1b, "lower_bound(4, 8, 1, 1, 1)` is 33, yet zb_h1 is done after 27"),
        (one_microbatch, "One rank alone has `m` times all three kinds"),
        (lambda p, m, f, i, w: "27", "`lower_bound(4, 8, 1, 1, 1)` is"),
    ],
)
def test_a_lower_bound_is_sure_and_as_high_as_two_arguments_make_it(fn: Callable[..., Any], says: str) -> None:
    found = judged(grade_lower_bound, fn)
    assert says in found if says else not found


def by(order: str) -> Callable[..., Action]:
    return lambda able, held, cap: min(able, key=lambda action: order.index(action.kind))


def weights_when_full(able: list[Action], held: int, cap: int) -> Action:
    return min(able, key=lambda action: ("WIF" if held == cap else "IFW").index(action.kind))


@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (next_action, ""),
        (weights_when_full, ""),
        (by("FIW"), "the next forward while an input gradient could start"),
        (by("WIF"), "the best takes"),
        (by("FWI"), "the best takes"),
        (lambda able, held, cap: able[0], "the best takes"),
        (lambda able, held, cap: Action(0, "F", 99), "Return one of the actions in `able`"),
        (lambda able, held, cap: None, "Return one of the actions in `able`"),
    ],
)
def test_a_rule_is_judged_by_what_its_orders_take_beside_the_optimum(fn: Callable[..., Any], says: str) -> None:
    found = judged(grade_choose, fn)
    assert says in found if says else not found


@pytest.mark.parametrize("cap", [1, 3, 8])
def test_whatever_the_rule_the_order_is_legal_and_fits(cap: int) -> None:
    order = play(by("FIW"), 3, 5, cap)
    assert check(order) == []
    assert max(simulate(order).peak_activations) <= cap
