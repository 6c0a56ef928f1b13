"""Exercises of notebook 11: a lower bound of one's own, and a rule by which each rank chooses what to do next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from course_pp.exercises.answer import Answer
from course_pp.exercises.exercise import Mistake
from course_pp.exercises.expect import expect_number
from course_pp.schedule import Action, Costs, Schedule, Time, bound, build, optima, simulate
from course_pp.schedule.schedule import looped
from course_pp.schedule.searching.heuristics import Desk, Rule
from course_pp.schedule.searching.problem import Problem

__all__ = ["grade_choose", "grade_lower_bound", "lower_bound", "next_action", "play"]


def lower_bound(p: int, m: int, forward: float, input_grad: float, weight_grad: float) -> float:
    """A time before which no order can finish, whatever the memory; all stages are alike, messages take no time."""
    work = m * (forward + input_grad + weight_grad)
    bounds = []
    for rank in range(p):
        down = rank * forward
        bounds.append(down + work)
        # The last input gradient of this rank still has to go up, and stage 0 then has a weight gradient to do.
        bounds.append(down + m * (forward + input_grad) + rank * input_grad + weight_grad)
    return max(bounds)


_BOUNDS: list[tuple[int, int, float, float, float]] = [
    (4, 8, 1, 1, 1),
    (1, 3, 1, 2, 3),
    (4, 1, 1, 1, 1),
    (2, 6, 1, 2, 1),
    (4, 8, 10, 12, 7),
    (3, 5, 2, 3, 0.5),
    (6, 12, 1, 1, 0.25),
    (8, 4, 1, 3, 2),
]


def grade_lower_bound(answer: Answer) -> None:
    """Ask for a number that no order beats, and that is as high as two simple arguments make it."""
    for case, got in zip(_BOUNDS, answer.calls(_BOUNDS), strict=True):
        p, m, forward, input_grad, weight_grad = case
        call, costs = f"lower_bound({', '.join(map(str, case))})", Costs(forward, input_grad, weight_grad)
        value = expect_number(got, call)
        name, least = _best_named(p, m, costs)
        if value > least * (1 + 1e-9):
            raise Mistake(
                f"`{call}` is {value:g}, yet {name} is done after {float(least):g}.",
                "A lower bound holds for every order. Each argument must be sure by itself; take the latest of them.",
                f"`simulate(build({name!r}, {p}, {m}), Costs({forward}, {input_grad}, {weight_grad})).makespan`",
            )
        if value < bound(p, m, costs) * (1 - 1e-9):
            raise Mistake(f"`{call}` is {value:g}; more can be said.", _what_is_missing(value, case))


def _best_named(p: int, m: int, costs: Costs) -> tuple[str, Time]:
    names = ("naive", "1f1b", "zb_h1", "zb_h2")
    return min(((name, simulate(build(name, p, m), costs).makespan) for name in names), key=lambda each: each[1])


def _what_is_missing(value: float, case: tuple[int, int, float, float, float]) -> str:
    p, m, forward, input_grad, weight_grad = case
    if value < m * (forward + input_grad + weight_grad) * (1 - 1e-9):
        return "One rank alone has `m` times all three kinds of work to do."
    if value < (m * (forward + input_grad + weight_grad) + (p - 1) * forward) * (1 - 1e-9):
        return "The last rank cannot begin before a microbatch has come down to it. Then it has all its work to do."
    return (
        "When the last rank has done its last input gradient, the gradient still goes up through all the others, and "
        "rank 0 has a weight gradient to do then. Where weight gradients are short, that is what counts."
    )


Choice = Callable[[list[Action], int, int], Action]
"""What a rank does next: from what it could start now, how many activations it holds, and how many it may hold."""


def next_action(able: list[Action], held: int, cap: int) -> Action:
    """What others wait for first, so that they can go on; weight gradients when there is nothing else to do."""
    best, rank = able[0], 3
    for action in able:
        place = "IFW".index(action.kind)
        if place < rank:
            best, rank = action, place
    return best


def play(next_action: Choice, p: int, m: int, cap: int, costs: Costs | None = None) -> Schedule:
    """The schedule that a rule makes: whenever a rank could start several things at once, the rule says which.

    A rank that could start only one thing first starts that.

    Args:
        next_action: ``next_action(able, held, cap)``; ``able`` holds an ``F``, an ``I`` and a ``W`` at most, and no
            ``F`` while the rank holds ``cap`` activations.
        p: ranks, of one stage each.
        m: microbatches.
        cap: how many activations each rank may hold.
        costs: one unit for everything unless given.

    Raises:
        Mistake: for a choice that is not in ``able``.
    """
    problem = Problem.of(looped(p), m, costs or Costs(1, 1, 1), [cap] * p, split=True)
    desk = _Asking(problem, next_action)
    desk.fill()
    return problem.schedule_of("own rule", desk.words)


class _Asking(Desk):
    def __init__(self, problem: Problem, next_action: Choice) -> None:
        self._choose = next_action
        super().__init__(problem, Rule("FIW"))

    def _look(self, rank: int) -> None:
        choices = sorted(self._choices(rank))
        soonest = [each for each in choices if each[0] == choices[0][0]]
        self._next[rank] = soonest[0] if len(soonest) == 1 else self._asked(rank, soonest) if soonest else None

    def _asked(self, rank: int, soonest: Sequence[tuple[Time, int, int]]) -> tuple[Time, int, int]:
        able = {Action(rank, "FIW"[each[2] % 3], self.words[rank].count(each[2])): each for each in soonest}
        held, cap = self.held[rank], self.problem.caps[rank]
        chosen = self._choose(list(able), held, cap)
        if not isinstance(chosen, Action) or chosen not in able:
            raise Mistake(
                f"`next_action({list(able)}, {held}, {cap})` returned {chosen!r:.60}.",
                "Return one of the actions in `able`.",
            )
        return able[chosen]


_MEASURED = (10, 12, 7)
_HIDDEN = [
    (4, 8, 7, (1, 1, 1)),
    (3, 6, 3, _MEASURED),
    (2, 8, 3, _MEASURED),
    (4, 8, 2, (1, 1, 1)),
    (3, 8, 2, _MEASURED),
    (4, 8, 6, _MEASURED),
]
_Case = tuple[int, int, int, tuple[int, int, int]]
_NEAR = 1.05


def grade_choose(answer: Answer) -> None:
    """Ask for a rule whose orders take at most a twentieth longer than the proven optimum."""
    (orders,) = answer.on_ranks(1, _played, _HIDDEN)
    best = {(r.n_ranks, r.n_microbatches, r.cap, r.times): r.makespan for r in optima() if r.split}
    for case, order in zip(_HIDDEN, orders, strict=True):
        p, m, cap, times = case
        costs = Costs(*times)
        makespan = simulate(order, costs).makespan
        if makespan > _NEAR * best[case]:
            raise Mistake(
                f"With p = {p}, m = {m}, room for {cap} and F, I, W of {times} the rule's order takes {makespan}; the "
                f"best takes {best[case]}.",
                _habit(order, costs),
                f"`show.timeline(simulate(play(next_action, {p}, {m}, {cap}, Costs{times}), Costs{times}))`",
            )


def _played(rank: int, next_action: Choice, cases: Sequence[_Case]) -> list[Schedule]:
    return [play(next_action, p, m, cap, Costs(*times)) for p, m, cap, times in cases]


def _habit(order: Schedule, costs: Costs) -> str:
    """What kept a gradient waiting most often: the kind that ran while an input gradient could have."""
    tl = simulate(order, costs)
    ends = {span.action: span.end for span in tl.spans}
    instead: Counter[str] = Counter()
    for row in tl.by_rank:
        for span in row:
            action = span.action.parts[0]
            if action.kind != "I":
                continue
            ready = max(ends[each] for each in _inputs(action, order.n_stages))
            instead.update(each.action.parts[0].kind for each in row if ready <= each.start < span.start)
    instead.pop("I", None)
    if not instead:
        return "No gradient waits long for a rank that does something else; where do ranks idle, and for what?"
    kind = instead.most_common(1)[0][0]
    does = {"F": "the next forward", "W": "a weight gradient"}[kind]
    return f"Ranks often do {does} while an input gradient could start, and the rank above waits for that."


def _inputs(action: Action, n_stages: int) -> list[Action]:
    own = Action(action.stage, "F", action.microbatch)
    return [own] if action.stage + 1 == n_stages else [own, Action(action.stage + 1, "I", action.microbatch)]
