"""An exercise of notebook 11: an order that was good, until a cost changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from course_pp.exercises.answer import Answer
from course_pp.exercises.exercise import Mistake
from course_pp.schedule import Costs, Schedule, Time, Timeline, build, simulate
from course_pp.schedule import check as problems_of

__all__ = ["CHANGES", "grade_repair", "repair"]


def repair(schedule: Schedule, costs: Costs, cap: int) -> Schedule:
    """Swap neighbours on a rank as long as that ends the ranks sooner, within the cap."""

    def ends(tl: Timeline) -> tuple[Time, Time]:
        return tl.makespan, sum(span.end for span in tl.spans)

    rows, least = [list(row) for row in schedule.actions], ends(simulate(schedule, costs))
    improved = True
    while improved:
        improved = False
        for row in rows:
            for i in range(len(row) - 1):
                row[i], row[i + 1] = row[i + 1], row[i]
                changed = Schedule(schedule.name, schedule.placement, tuple(map(tuple, rows)))
                if not problems_of(changed):
                    tl = simulate(changed, costs)
                    if max(tl.peak_activations) <= cap and ends(tl) < least:
                        schedule, least, improved = changed, ends(tl), True
                        continue
                row[i], row[i + 1] = row[i + 1], row[i]
    return schedule


CHANGES: tuple[tuple[Schedule, Costs, int, int], ...] = (
    (build("zb_h1", 3, 6), Costs(1, 1, 1, latency=(2, 0)), 4, 25),
    (build("zb_h1", 4, 6), Costs((1, 2, 1, 1), (1, 2, 1, 1), (1, 2, 1, 1), latency=1), 4, 40),
    (build("zb_h1", 4, 8), Costs(1, 1, 1, latency=(0, 2, 0)), 4, 35),
)
"""An order, the costs that it meets, the cap, and the least makespan, which ``optimum`` proves."""


def grade_repair(answer: Answer) -> None:
    """Ask for an order of the same actions, legal, within the cap, and as short as the best there is."""
    rows = [(schedule, costs, cap) for schedule, costs, cap, _ in CHANGES]
    for (schedule, costs, cap, best), got in zip(CHANGES, answer.calls(rows, "repair(…)"), strict=True):
        _judge(schedule, costs, cap, best, got)


def _judge(schedule: Schedule, costs: Costs, cap: int, best: int, got: Any) -> None:
    p, m = schedule.n_ranks, schedule.n_microbatches
    before = simulate(schedule, costs).makespan
    case = f"`build('zb_h1', {p}, {m})` with F {costs.forward}, latency {costs.latency} and room for {cap}"
    if not isinstance(got, Schedule):
        raise Mistake(f"For {case}, `repair` returned {type(got).__name__}.", "Return a `Schedule`.")
    if _sorted(got.actions) != _sorted(schedule.actions) or got.placement != schedule.placement:
        cause = "Change the order on a rank only: swap two neighbours, and keep the swap if it helps."
        raise Mistake(f"For {case}, `repair` returned other actions, or on other ranks.", cause)
    if problems := problems_of(got):
        cause = (
            "Not every swap is legal. Ask `problems_of(schedule)` first, and undo the swap if it has something to say."
        )
        raise Mistake(f"For {case}, the order cannot run: {problems[0]}.", cause)
    tl = simulate(got, costs)
    if max(tl.peak_activations) > cap:
        cause = "`simulate(…).peak_activations` tells what each rank holds: undo a swap that makes it more than `cap`."
        raise Mistake(f"For {case}, a rank holds {max(tl.peak_activations)} activations.", cause)
    if tl.makespan > best:
        cause = "Go through all neighbours of all ranks again, until no swap helps any more."
        if tl.makespan >= before:
            cause = "Simulate after each swap with the new costs, and keep what ends sooner."
        elif tl.makespan > best:
            cause += " A swap may leave the makespan as it is and still let actions end sooner: keep it too."
        raise Mistake(f"For {case}, it took {before}; now {tl.makespan}; {best} is possible.", cause)


def _sorted(rows: Sequence[Sequence[object]]) -> list[list[str]]:
    return [sorted(map(str, row)) for row in rows]
