"""Exercises of notebook 05: a backward in two halves, what it buys, what it costs, and how it goes wrong."""

from __future__ import annotations

from typing import Any

from course_pp.exercises.answer import Answer
from course_pp.exercises.exercise import Exercise, Mistake
from course_pp.exercises.zero_bubble_orders import (
    forwards_first,
    grade_forwards_first,
    grade_order,
    grade_place_weights,
    order_zb_h1,
    place_weights,
)
from course_pp.exercises.zero_bubble_steps import grade_healed_split_step, healed_split_step

__all__ = ["EXERCISES"]


def choose_schedule(
    points: dict[str, tuple[float, float]], state: float, activation: float, budget: float
) -> str | None:
    """The schedule with the smallest bubble that fits, or None."""
    fitting = [(bubble, held, name) for name, (held, bubble) in points.items() if state + held * activation <= budget]
    return min(fitting)[2] if fitting else None


_Points = dict[str, tuple[float, float]]
"""For each schedule, activations of one microbatch in all layers of a rank, and the bubble."""

_POINTS: _Points = {
    "gpipe": (8, 0.27),
    "1f1b": (4, 0.27),
    "zb_h1": (4, 0.11),
    "zb_h2": (7, 0.11),
    "zb_v": (4, 0.06),
    "v_half": (2.5, 0.16),
    "naive": (1, 0.75),
}
_BUDGETS: list[tuple[_Points, float, float, float]] = [
    (_POINTS, 10, 2, 18.0),
    (_POINTS, 10, 2, 17.9),
    (_POINTS, 10, 2, 100),
    (_POINTS, 10, 2, 12),
    (_POINTS, 10, 2, 11),
    (_POINTS, 0, 3, 8),
    ({"a": (3, 0.1), "b": (2, 0.1), "c": (1, 0.2)}, 1, 1, 10),
    ({"b": (2, 0.1), "a": (3, 0.1), "c": (1, 0.2)}, 1, 1, 10),
    ({"a": (5, 0.0), "b": (6, 0.0)}, 1, 1, 6),
    ({"a": (5, 0.3)}, 2, 1, 6),
]


def _grade_choose(answer: Answer) -> None:
    found = answer.calls(_BUDGETS)
    known = ""
    if found == [_with_pairs_swapped(*case) for case in _BUDGETS]:
        known = "In each pair the activations come first, then the bubble. Here they are swapped."
    for (points, state, activation, budget), got in zip(_BUDGETS, found, strict=True):
        _judge_choice(points, state, activation, budget, got, known)


def _with_pairs_swapped(points: _Points, state: float, activation: float, budget: float) -> str | None:
    swapped = {name: (bubble, held) for name, (held, bubble) in points.items()}
    return choose_schedule(swapped, state, activation, budget)


def _without_the_exact(points: _Points, state: float, activation: float, budget: float) -> str | None:
    """What `<` instead of `<=` chooses."""
    below = {name: (held, bubble) for name, (held, bubble) in points.items() if state + held * activation < budget}
    return choose_schedule(below, state, activation, budget)


def _judge_choice(points: _Points, state: float, activation: float, budget: float, got: Any, known: str = "") -> None:
    call, best = (
        f"choose_schedule(…, {state}, {activation}, {budget})",
        choose_schedule(points, state, activation, budget),
    )
    given = f"The points were {', '.join(f'{name} {point}' for name, point in points.items())}."

    def needs(name: str) -> float:
        return state + points[name][0] * activation

    if got == best:
        return
    is_strict = (
        best is not None and needs(best) == budget and got == _without_the_exact(points, state, activation, budget)
    )
    exactly = "What needs exactly the budget fits: `<=`."
    if got is None:
        example = f"{best} needs {state} + {points[best or ''][0]} × {activation} = {needs(best or ''):g}. {given}"
        cause = exactly if is_strict else "Return a name wherever `state + held * activation` is within the budget."
        raise Mistake(f"`{call}` is None, though {best} fits.", known or cause, example)
    if not isinstance(got, str) or got not in points:
        raise Mistake(f"`{call}` is {got!r:.60}, which is no schedule of those.", "Return a name, or None.", given)
    if needs(got) > budget:
        cause = "A rank needs its state, and `activation` bytes for each activation that it holds."
        if best is None:
            cause = "Nothing fits there: return None."
        example = f"{state} + {points[got][0]} × {activation} = {needs(got):g}. {given}"
        raise Mistake(f"`{call}` is {got}, which needs {needs(got):g} of {budget}.", known or cause, example)
    if points[got][1] > points[best or ""][1]:
        cause = "Less memory than the budget buys nothing: of what fits, the smallest bubble is wanted."
        if is_strict:
            cause = exactly
        example = f"{best} fits too: bubble {points[best or ''][1]} instead of {points[got][1]}. {given}"
        raise Mistake(f"`{call}` is {got}, and its bubble is not the smallest.", known or cause, example)
    cause = "Of equal bubbles take the one that holds less: on the picture, the point further to the left."
    raise Mistake(f"`{call}` is {got}; {best} has the same bubble and holds less.", cause, given)


EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        "order_zb_h1",
        "05",
        "ZB-H1 as an order",
        2,
        8,
        (
            "F and I go as F and B do under 1F1B: `p - 1 - rank` forwards, then F and I in turn, then the I's that are "
            "left.",
            "1F1B lets rank 0 hold p activations, and this rank has `p - rank` between F and I. So it may have `rank` "
            "microbatches waiting for their W.",
            "After the I of microbatch i comes the W of microbatch `i - rank`, if there is one, also in the drain. The "
            "last `rank` W's come at the end.",
        ),
        order_zb_h1,
        grade_order,
    ),
    Exercise(
        "forwards_first",
        "05",
        "how far H2 runs ahead",
        2,
        6,
        (
            "Count from this rank's first forward to the arrival of its first gradient. What does microbatch 0 pass?",
            "It passes `p - rank` forwards, this rank's included, and its gradient `p - 1 - rank` input gradients.",
            "Meanwhile the rank does forwards: that time over `forward`, rounded up once, with `math.ceil`.",
        ),
        forwards_first,
        grade_forwards_first,
    ),
    Exercise(
        "place_weights",
        "05",
        "which W's may wait",
        3,
        9,
        (
            "Walk through the order and keep two things: how many activations are held, and a list of the W's that "
            "wait. An F adds an activation, a W gives one back.",
            "A W may wait as long as there is room. If the next action is an F and `held == room`, the oldest W goes "
            "first.",
            "After the last F no place is needed any more, but the rank idles between the I's: let one W follow each. "
            "Whatever still waits comes at the end.",
        ),
        place_weights,
        grade_place_weights,
    ),
    Exercise(
        "choose_schedule",
        "05",
        "a budget of memory",
        1,
        5,
        (
            "First throw out what does not fit: `state + held * activation` must be at most `budget`.",
            "Of what is left take the smallest bubble; if two have the same, the one that holds less.",
            "`min` of tuples `(bubble, held, name)` does both. Mind the case in which nothing is left.",
        ),
        choose_schedule,
        _grade_choose,
    ),
    Exercise(
        "healed_split_step",
        "05",
        "bug clinic",
        3,
        9,
        (
            "Which gradients are wrong, and what do they need that the others do not?",
            "`free.append(slot)` says that nobody needs this memory any more. Who does, until when?",
            "Give the slot back in `weight_backward`. More slots are then in use at once: `min(m, p)` on every rank.",
        ),
        healed_split_step,
        grade_healed_split_step,
        limit_s=10.0,
    ),
)
