"""A named order for given times: forwards and input gradients stay as they are, weight gradients go into the gaps.

Nobody waits for a weight gradient, so it may come whenever its rank would otherwise wait (Qi et al. 2024, "Zero bubble
pipeline parallelism", section 3.1). Where the gaps are depends on how long things take.
"""

from collections import deque
from collections.abc import Sequence
from itertools import accumulate

from course_pp.schedule.costs import Costs
from course_pp.schedule.schedule import Schedule
from course_pp.schedule.searching.listing import Desk, Rule
from course_pp.schedule.searching.problem import FORWARD, WEIGHT, Problem, Words
from course_pp.schedule.span import Time


def filled(schedule: Schedule, costs: Costs, limits: Sequence[int] | None = None) -> Schedule:
    """Return the order with its weight gradients placed for ``costs``, or as it is where that is no shorter.

    No rank holds more activations than the fullest did before, nor than its own limit, which the order keeps to. An
    order with whole backwards stays as it is.
    """
    if not splits_every_backward(schedule):
        return schedule
    changes = {"F": 1, "I": 0, "W": -1}
    most = max(max(accumulate(changes[part.kind] for a in row for part in a.parts)) for row in schedule.actions)
    caps = tuple(min(most, limit) for limit in limits or (most,) * schedule.n_ranks)
    problem = Problem.of(schedule.placement, schedule.n_microbatches, costs, caps, split=True)
    named, best = problem.words_of(schedule), schedule
    makespan = _makespan(problem, named)
    for patient in (True, False):
        desk = _Filling(problem, named, patient)
        words = [[letter for letter, _ in row] for row in desk.rows] if desk.fill() else named
        if (now := _makespan(problem, words)) < makespan:
            best, makespan = problem.schedule_of(schedule.name, words), now
    return best


def splits_every_backward(schedule: Schedule) -> bool:
    """Return whether all of a schedule's backwards are in two halves."""
    return {part.kind for part in schedule.parts} == set("FIW")


def _makespan(problem: Problem, words: Words) -> Time:
    run = problem.run(words)
    assert run is not None
    return run.makespan


class _Filling(Desk):
    """Takes forwards and input gradients in a given order.

    A rank that would wait takes its oldest weight gradient: if patient, only one that ends before the wait does. It
    also takes one if it is full.
    """

    def __init__(self, problem: Problem, words: Words, patient: bool) -> None:
        self._order = [deque(letter for letter in word if letter % 3 != WEIGHT) for word in words]
        super().__init__(problem, Rule(patient=patient))

    def take(self, rank: int, letter: int, microbatch: int | None = None) -> None:
        """Write the letter to the rank's row."""
        if letter % 3 != WEIGHT:
            self._order[rank].popleft()
        super().take(rank, letter, microbatch)

    def _look(self, rank: int) -> None:
        clock, order = self.clocks[rank], self._order[rank]
        letters = (letter for letter in self._letters[rank] if letter % 3 == WEIGHT and self.inbox[letter])
        weight = min(letters, key=lambda letter: self.inbox[letter][0][0], default=None)
        full = bool(order) and order[0] % 3 == FORWARD and self.held[rank] >= self.problem.caps[rank]
        known = bool(order) and not full and bool(self.inbox[order[0]])
        start = max(clock, self.inbox[order[0]][0][0]) if known else None
        self._next[rank] = None if start is None else (start, 1, order[0])
        if weight is not None:
            end = clock + (self.problem.durations[weight] if self.rule.patient else 0)
            if start is None:
                self._next[rank] = (clock, 0 if full else 2, weight)
            elif clock < start and end <= start:
                self._next[rank] = (clock, 0, weight)
