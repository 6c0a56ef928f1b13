"""An exercise of notebook 03: the smallest bubble that a budget of memory allows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from course_pp.exercises.answer import Answer
from course_pp.exercises.exercise import Mistake
from course_pp.exercises.expect import expect_int, expect_list

__all__ = ["choose", "grade_choose"]


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


class _Case(NamedTuple):
    """The arguments of ``choose``."""

    state: int
    activations: int
    rows: int
    min_rows: int
    budget: float
    max_ranks: int

    def needed(self, p: int, m: int, in_flight: int, shards: int | None = None) -> float:
        """Bytes on the first rank, with the state in as many shards as there are ranks, or in ``shards``."""
        return self.state / (shards or p) + in_flight * self.activations / (p * m)

    def choice(self, in_flight: Callable[[int, int], int], shards: int | None = None) -> tuple[int, int] | None:
        """What is chosen if the first rank counts ``in_flight(p, m)`` microbatches, and the state as `needed` does."""
        counts = [m for m in range(1, self.rows // self.min_rows + 1) if self.rows % m == 0]
        pairs = [(p, m) for p in range(1, self.max_ranks + 1) for m in counts]
        fitting = [pair for pair in pairs if self.needed(*pair, in_flight(*pair), shards) <= self.budget]
        return min(fitting, key=lambda pair: ((pair[0] - 1) / (sum(pair) - 1), *pair), default=None)


_JUST = 1e-9


def grade_choose(answer: Answer) -> None:
    cases = [
        _Case(400, 200, 16, 1, 120, 8),
        _Case(400, 200, 16, 4, 120, 8),
        _Case(400, 800, 32, 2, 200, 8),
        _Case(100, 50, 8, 1, 200, 8),
        _Case(600, 240, 12, 5, 180, 16),
        _Case(400, 4000, 8, 1, 200, 16),
        _Case(800, 100, 30, 4, 170, 6),
        _Case(395, 197, 16, 1, 111, 8),
        _Case(100, 50, 8, 8, 100, 4),
        _Case(100, 40, 8, 1, 90, 8),
        _Case(400, 10, 16, 1, 85, 4),
    ]
    found = dict(zip(cases, answer.calls([tuple(case) for case in cases]), strict=True))
    for case in cases:
        _judge_choice(case, found)


def _judge_choice(case: _Case, found: dict[_Case, Any]) -> None:
    call, best, got = f"choose({', '.join(map(str, case))})", choose(*case), found[case]
    if got is None:
        if best is None:
            return
        p, m = best
        example = f"{p} ranks and {m} microbatches need {case.needed(p, m, min(m, p)):g} of {case.budget} on rank 0."
        raise Mistake(f"`{call}` is None, though something fits.", _why_none(case, best, found), example)
    both = "Return p and m alone."
    p, m = (expect_int(each, f"{call}[{index}]", both) for index, each in enumerate(expect_list(got, call, 2)))
    if not 1 <= p <= case.max_ranks:
        swapped = 1 <= m <= case.max_ranks and case.rows % max(p, 1) == 0
        cause = "The ranks come first: (p, m)." if swapped else "`max_ranks` is the most there are."
        raise Mistake(f"`{call}` takes {p} ranks, and there are 1 to {case.max_ranks}.", cause)
    if m < 1 or case.rows % m:
        raise Mistake(f"`{call}` cuts {case.rows} rows into {m} microbatches.", "m must divide the rows.")
    if case.rows // m < case.min_rows:
        symptom = f"`{call}` makes microbatches of {case.rows // m} rows; {case.min_rows} are the least."
        raise Mistake(symptom, "m is at most rows // min_rows.")
    needed = case.needed(p, m, min(m, p))
    if needed > case.budget:
        example = f"{case.state} / {p} + {min(m, p)} × {case.activations} / ({p} × {m}) = {needed:g}"
        cause = "Rank 0 holds min(m, p) activations, each of 1 / (p m) of what the batch keeps in the whole model."
        if best is None:
            cause = "No p and m fit there: return None."
        elif math.floor(needed) <= case.budget:
            cause = "It is less than 1 too much: `//` drops that, `/` does not."
        raise Mistake(f"`{call}` is {(p, m)}, and rank 0 would need {needed:g} of {case.budget}.", cause, example)
    assert best is not None  # or something above was wrong with what was found
    ours, best_bubble = ((ranks - 1) / (count + ranks - 1) for ranks, count in ((p, m), best))
    if ours > best_bubble:
        example = f"{best} fits too: bubble {best_bubble:.1%} instead of {ours:.1%}."
        symptom = f"`{call}` is {(p, m)}, which fits, but its bubble is not the smallest."
        raise Mistake(symptom, _why_missed(case, (p, m), found), example)


def _why_none(case: _Case, best: tuple[int, int], found: dict[_Case, Any]) -> str:
    if why := _why_all(found):
        return why
    if best[0] == case.max_ranks:
        return "`max_ranks` itself is allowed, and a `range` ends before its end."
    return "Does your search come across this pair, and what does it count for it?"


def _why_all(found: dict[_Case, Any]) -> str:
    """The mistake that explains every choice; empty if none does."""
    if all(_same_choice(got, case.choice(lambda p, m: m)) for case, got in found.items()):
        return "You count m activations in flight, as GPipe has. 1F1B holds min(m, p) on rank 0."
    if all(_same_choice(got, case.choice(lambda p, m: p)) for case, got in found.items()):
        return "A/m holds for m ≥ p; with fewer, rank 0 holds m: min(m, p)·A/(pm)."
    if all(_same_choice(got, case.choice(min, shards=1)) for case, got in found.items()):
        return "The state is divided among the ranks: rank 0 has `state / p` of it."
    less = ((case._replace(budget=case.budget - _JUST), got) for case, got in found.items())
    if all(_same_choice(got, case.choice(min)) for case, got in less):
        return "What needs exactly `budget` fits: `<=`."
    return ""


def _same_choice(got: Any, choice: tuple[int, int] | None) -> bool:
    if got is None or choice is None:
        return got == choice
    # One rank has no bubble, whatever m.
    return got[0] == choice[0] == 1 or tuple(got) == choice


def _why_missed(case: _Case, got: tuple[int, int], found: dict[_Case, Any]) -> str:
    if why := _why_all(found):
        return why
    if got[1] < case.rows // case.min_rows:
        return "More microbatches make the bubble smaller, and under 1F1B they cost no memory."
    return "Fewer ranks make the bubble smaller, as long as it fits."
