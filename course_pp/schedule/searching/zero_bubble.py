"""The heuristic that the authors of Zero Bubble schedule with, written anew from their description.

Qi et al. 2024, "Zero bubble pipeline parallelism" (arXiv 2401.10241), section 3.1, with the details of their repository
``sail-sg/zero-bubble-pipeline-parallelism`` (``scheduler/zb.py``): as many forwards as memory allows before the first
input gradient arrives, then one forward and one input gradient a round on each rank, and weight gradients where a rank
would wait or is full. Three questions that the paper leaves to trial are switches; they try all eight answers, and
keep the best. One stage a rank.
"""

from collections.abc import Iterator
from itertools import product

from course_pp.schedule.searching.problem import FORWARD, INPUT, WEIGHT, Problem, Words
from course_pp.schedule.span import Time


def zero_bubble_heuristic(problem: Problem) -> Iterator[Words]:
    """Yield the words of each answer that fits the caps, up to eight; none for chunks or whole backwards."""
    if problem.n_chunks != 1 or not problem.split:
        return
    for answers in product((True, False), repeat=3):
        attempt = _Attempt(problem, *answers)
        if attempt.finish():
            yield attempt.words


class _Attempt:
    """One run of the heuristic.

    Attributes:
        words: for each rank its letters so far.
        done: for each rank how many forwards, input gradients and weight gradients those are.
        clocks: when each rank is free.
        bubbles: how long each rank has waited since its first forward.
    """

    def __init__(self, problem: Problem, stop_short: bool, backward_first: bool, greedy: bool) -> None:
        n = problem.n_ranks
        self.problem, self.n = problem, n
        self.stop_short, self.backward_first, self.greedy = stop_short, backward_first, greedy
        self.words: Words = [[] for _ in range(n)]
        self.done = [[0, 0, 0] for _ in range(n)]
        self.clocks: list[Time] = [0] * n
        self.bubbles: list[Time] = [0] * n
        self.ends: list[list[Time]] = [[] for _ in problem.durations]

    def finish(self) -> bool:
        """Write all words; return whether they fit the memory."""
        self._warm_up()
        for _ in range(1, self.problem.n_microbatches):
            forwards = self._wanted_forwards()
            for rank in range(self.n):
                if forwards[rank] and not self._forward(rank):
                    return False
            for rank in reversed(range(self.n)):
                self._backward(rank)
        for rank in range(self.n):
            while self.done[rank][WEIGHT] < self.problem.n_microbatches:
                self._put(rank, WEIGHT)
        return True

    def _cost(self, rank: int, kind: int) -> Time:
        return self.problem.durations[3 * rank + kind]

    def _arrival(self, rank: int, kind: int) -> Time:
        """Return when the input of the rank's next forward or input gradient is there."""
        letter = 3 * rank + kind
        maker = self.problem.waits_for[letter]
        return 0 if maker < 0 else self.ends[maker][self.done[rank][kind]] + self.problem.delays[letter]

    def _put(self, rank: int, kind: int) -> None:
        start = max(self.clocks[rank], self._arrival(rank, kind))
        if self.done[rank][FORWARD]:
            self.bubbles[rank] += start - self.clocks[rank]
        self.clocks[rank] = start + self._cost(rank, kind)
        self.ends[3 * rank + kind].append(self.clocks[rank])
        self.words[rank].append(3 * rank + kind)
        self.done[rank][kind] += 1

    def _warm_up(self) -> None:
        """A first forward each, what fits before the first input gradient arrives, and the first input gradients."""
        problem, n = self.problem, self.n
        for rank in range(n):
            self._put(rank, FORWARD)
        more = [0] * n
        back = self.clocks[n - 1] + self._cost(n - 1, INPUT)
        for rank in reversed(range(n - 1)):
            arrival, clock = back + problem.delays[3 * rank + INPUT], self.clocks[rank]
            while more[rank] + 1 < min(problem.n_microbatches, problem.caps[rank]):
                then = clock + self._cost(rank, FORWARD)
                if then > arrival if self.stop_short else clock >= arrival:
                    break
                clock, more[rank] = then, more[rank] + 1
            back = max(clock, arrival) + self._cost(rank, INPUT)
        for rank in range(1, n):
            # A rank can be ahead only by fewer forwards than the rank that feeds it, unless that one has done all.
            while more[rank] > 0 and more[rank] >= more[rank - 1] and more[rank - 1] + 1 < problem.n_microbatches:
                more[rank] -= 1
        for rank in range(n):
            for _ in range(more[rank]):
                self._put(rank, FORWARD)
        for rank in reversed(range(n)):
            self._put(rank, INPUT)

    def _wanted_forwards(self) -> list[bool]:
        """Return for each rank whether it runs a forward this round: never more than the ranks after it can take."""
        wanted = [self._wants_forward(rank) for rank in range(self.n)]
        for rank in reversed(range(self.n - 1)):
            wanted[rank] = wanted[rank] and wanted[rank + 1]
        return wanted

    def _wants_forward(self, rank: int) -> bool:
        done = self.done
        if done[rank][FORWARD] >= self.problem.n_microbatches:
            return False
        if not self.backward_first or rank + 1 == self.n or done[rank][FORWARD] < done[rank + 1][FORWARD] + 2:
            return True
        # The next rank has a forward in store. Is there time for one here before its next gradient comes up?
        next_gradient = (
            self.clocks[rank + 1]
            + self._cost(rank + 1, FORWARD)
            + self._cost(rank + 1, INPUT)
            + self.problem.delays[3 * rank + INPUT]
        )
        clock = self.clocks[rank]
        if clock >= next_gradient:
            return False
        too_many = max(0, done[rank][FORWARD] - done[rank][WEIGHT] + 1 - self.problem.caps[rank])
        freed = min(too_many, done[rank][INPUT] - done[rank][WEIGHT])
        if clock + self._cost(rank, FORWARD) + freed * self._cost(rank, WEIGHT) <= next_gradient:
            return True
        return next_gradient - clock > max(self.bubbles) - self.bubbles[rank]

    def _forward(self, rank: int) -> bool:
        done = self.done[rank]
        while done[FORWARD] - done[WEIGHT] + 1 > self.problem.caps[rank]:
            if done[WEIGHT] >= done[INPUT]:
                return False
            self._put(rank, WEIGHT)
        if rank > 0:
            self._fill_until(rank, FORWARD)
        self._put(rank, FORWARD)
        return True

    def _backward(self, rank: int) -> None:
        done = self.done[rank]
        if rank + 1 < self.n:
            self._fill_until(rank, INPUT)
        if rank == 0 and done[FORWARD] == self.problem.n_microbatches:
            while done[WEIGHT] < done[INPUT]:
                self._put(rank, WEIGHT)
        self._put(rank, INPUT)

    def _fill_until(self, rank: int, kind: int) -> None:
        """Weight gradients until the input of the next action is there; the last may make it late."""
        arrival, done = self._arrival(rank, kind), self.done[rank]
        while done[WEIGHT] < done[INPUT] and self.clocks[rank] + self._cost(rank, WEIGHT) <= arrival:
            self._put(rank, WEIGHT)
        left = arrival - self.clocks[rank]
        if done[WEIGHT] < done[INPUT] and left > 0 and (self.greedy or left > max(self.bubbles) - self.bubbles[rank]):
            self._put(rank, WEIGHT)
