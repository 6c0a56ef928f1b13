"""The best order of all, by constraint programming, with a proof or the gap that is left."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from math import inf
from time import monotonic
from types import ModuleType
from typing import Any

from course_pp.base.arguments import checked
from course_pp.base.imports import imports_of_extra
from course_pp.schedule.action import Time
from course_pp.schedule.costs import Costs, divide
from course_pp.schedule.problem import FORWARD, INPUT, WEIGHT, OrderProblem, Words
from course_pp.schedule.searching.search import (
    Found,
    Layout,
    MemoryLimit,
    PlacementQuestion,
    answer,
    best_of,
    questions,
)
from course_pp.schedule.simulation import simulate

_LONGEST = 2**40


@dataclass(frozen=True)
class Optimum(Found):
    """A :class:`Found` whose ``bound`` is the highest that was proven.

    Attributes:
        proven: whether it is proven that no schedule is better.
    """

    proven: bool = False


@checked
def optimum(
    n_ranks: int,
    n_microbatches: int,
    costs: Costs | None = None,
    memory_limit: MemoryLimit = None,
    n_chunks: int = 1,
    seconds: float = 60.0,
    *,
    placement: Layout | None = None,
    split: bool = True,
    seed: int = 0,
) -> Optimum:
    """Find the order of least makespan and prove it, as far as time allows. For small sizes.

    It begins with :func:`course_pp.schedule.search`. If the result meets the bound, the bound is
    the proof. Otherwise CP-SAT of OR-Tools looks for a shorter order. In its model an action is an
    interval, and a rank does one action at a time. Each stage takes the microbatches in order,
    which loses nothing because they are alike. With one stage a rank, a forward starts no earlier
    than the end of the weight gradient that makes room for it.

    Args:
        costs: costs as in ``search``. A float stands for the decimal that it prints as, and the
            proof holds for these decimals.
        seconds: the time limit. The search ends then, with the gap that remains. If it ends before,
            the result is the same each time.
    """
    with imports_of_extra("ortools"):
        from ortools.sat.python import cp_model
    if not 0 < seconds < inf:
        raise ValueError(
            f"optimum: seconds is {seconds}: give a time limit above 0, and a finite one"
        )
    began = monotonic()
    given = Costs() if costs is None else costs
    asked = questions(
        n_ranks, n_microbatches, _exact(given), memory_limit, n_chunks, placement, split
    )
    found = []
    for number, question in enumerate(asked):
        problem = question.problem
        whole = problem.n_microbatches * (sum(problem.durations) + sum(problem.delays))
        if whole > _LONGEST:
            raise ValueError(
                "costs have so many digits that a solver in whole numbers would count to"
                f" {float(whole):.1g}: round them, so that it is at most {float(_LONGEST):.1g}"
            )
        deadline = began + seconds * (number + 1) / len(asked)
        start = answer(question, monotonic() + (deadline - monotonic()) / 4, seed)
        found.append(_prove(cp_model, question, start, deadline, seed))
    best = best_of(found)
    proven, bound = best.bound >= best.timeline.makespan, best.bound
    timeline = simulate(best.schedule, replace(given, activation=1))
    if isinstance(timeline.makespan, float):
        bound = timeline.makespan if proven else float(bound)
    return replace(best, timeline=timeline, bound=bound, proven=proven)


def _prove(
    cp_model: ModuleType, question: PlacementQuestion, start: Found, deadline: float, seed: int
) -> Optimum:
    """Look for an order better than ``start``, or for the proof that there is none."""
    as_they_are = Optimum(
        start.schedule,
        start.timeline,
        start.bound,
        start.stopped,
        start.tries,
        proven=start.stopped == "bound",
    )
    left = deadline - monotonic()
    if as_they_are.proven or left <= 0:
        return as_they_are
    problem = question.problem
    words = problem.words_of(start.schedule)
    model = _Model(cp_model, problem, words, question.bound)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = left
    # Several workers would race, and the result would differ from run to run.
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed % 2**31
    status = _solved(solver, model.model)
    bound = max(question.bound, divide(round(solver.best_objective_bound), problem.scale))
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return replace(as_they_are, bound=bound, stopped="time")
    schedule = problem.schedule_of("found", model.words(solver))
    timeline = simulate(schedule, question.costs)
    if timeline.makespan >= start.timeline.makespan:
        schedule, timeline = start.schedule, start.timeline
    proven = status == cp_model.OPTIMAL
    return Optimum(
        schedule, timeline, bound, "bound" if proven else "time", start.tries, proven=proven
    )


def _solved(solver: Any, model: Any) -> Any:
    """Return the status of a search that an interrupt ends.

    The solver's own handler of interrupts is off: when the solver removes it, no handler is left,
    and the next interrupt would end the process. Python handles an interrupt in the main thread
    only, so the solver runs in another one and the main thread stops it.
    """
    solver.parameters.catch_sigint_signal = False
    with ThreadPoolExecutor(1) as thread:
        searching = thread.submit(solver.solve, model)
        try:
            return searching.result()
        finally:
            solver.stop_search()


class _Model:
    """The question in CP-SAT's terms: the start of each letter of each microbatch."""

    def __init__(
        self, cp_model: ModuleType, problem: OrderProblem, hint: Words, bound: Time
    ) -> None:
        self.problem = problem
        self.model: Any = cp_model.CpModel()
        run = problem.run(hint)
        assert run is not None
        self.horizon = int(run.makespan)
        self.letters = [
            letter for rank in range(problem.n_ranks) for letter in problem.letters_of(rank)
        ]
        self.starts = {
            (letter, k): self.model.new_int_var(0, self.horizon, f"{letter}.{k}")
            for letter in self.letters
            for k in range(problem.n_microbatches)
        }
        for (letter, k), start in self.starts.items():
            maker = problem.waits_for[letter]
            if maker >= 0:
                self.model.add(start >= self._end(maker, k) + int(problem.delays[letter]))
            # Microbatches are alike, so to fix their order in each stage loses no makespan.
            if k:
                self.model.add(start >= self._end(letter, k - 1))
        for rank in range(problem.n_ranks):
            self.model.add_no_overlap(
                self.model.new_fixed_size_interval_var(
                    start, int(problem.durations[letter]), f"{letter}.{k}"
                )
                for (letter, k), start in self.starts.items()
                if problem.ranks[letter // 3] == rank
            )
            self._memory(rank)
        makespan = self.model.new_int_var(
            int(-(-bound * problem.scale // 1)), self.horizon, "makespan"
        )
        for letter in self.letters:
            self.model.add(makespan >= self._end(letter, problem.n_microbatches - 1))
        self.model.minimize(makespan)
        for (letter, k), start in self.starts.items():
            self.model.add_hint(start, int(run.ends[letter][k] - problem.durations[letter]))
        self.model.add_hint(makespan, self.horizon)

    def _end(self, letter: int, k: int) -> Any:
        return self.starts[letter, k] + int(self.problem.durations[letter])

    def _memory(self, rank: int) -> None:
        problem, m = self.problem, self.problem.n_microbatches
        cap, last = problem.caps[rank], WEIGHT if problem.split else INPUT
        stages = [stage for stage, each in enumerate(problem.ranks) if each == rank]
        if cap >= len(stages) * m:
            return
        # With one stage, microbatch k + cap takes the place of microbatch k, and a plain constraint
        # says so.
        if len(stages) == 1:
            first, last = 3 * stages[0] + FORWARD, 3 * stages[0] + last
            for k in range(m - cap):
                self.model.add(self.starts[first, k + cap] >= self._end(last, k))
            return
        held = []
        for stage in stages:
            for k in range(m):
                begin, end = self.starts[3 * stage + FORWARD, k], self._end(3 * stage + last, k)
                size = self.model.new_int_var(0, self.horizon, "")
                held.append(self.model.new_interval_var(begin, size, end, f"held {stage}.{k}"))
        self.model.add_cumulative(held, [1] * len(held), cap)

    def words(self, solver: Any) -> Words:
        """Return the solution's orders. At equal starts, letters that take no time come first."""
        words: Words = [[] for _ in range(self.problem.n_ranks)]
        durations = self.problem.durations
        timed = [
            (solver.value(start), durations[letter], letter)
            for (letter, _), start in self.starts.items()
        ]
        for _, _, letter in sorted(timed):
            words[self.problem.ranks[letter // 3]].append(letter)
        return words


def _exact(costs: Costs) -> Costs:
    """Return the same costs in fractions: a float stands for the decimal that it prints as."""

    def exact(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(exact, value))
        return Fraction(repr(value)) if isinstance(value, float) else value

    return replace(
        costs,
        overlapped=None,
        **{
            field.name: exact(getattr(costs, field.name))
            for field in fields(costs)
            if field.name != "overlapped"
        },
    )
