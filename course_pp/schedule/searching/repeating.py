"""Orders that repeat: one microbatch's way down and up, with waits, begun anew at a fixed interval.

Qi et al. 2024, "Pipeline parallelism with controllable memory" (arXiv 2405.15362), section 3: how long a microbatch
holds its activations, over the interval, is the memory of the whole. They draw such blocks for a V and three amounts of
memory. Here the waits are searched for, for two stages a rank in any placement, with any times and caps. A rule that
acts whenever it can does not find them: with little memory a gradient should wait where the stages turn.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from course_pp.schedule.searching.problem import FORWARD, INPUT, WEIGHT, Problem, Words
from course_pp.schedule.span import Time

_TRIES, _LETTERS = 500, 150_000
"""Blocks to try from each beginning: so many, or more where they are small and simulated soon."""

_CLIMBS = 4


@dataclass(frozen=True)
class _Block:
    """A microbatch's way, in units of a mean action.

    Attributes:
        waits: before each letter, beyond what it needs.
        interval: from one microbatch to the next.
    """

    waits: tuple[int, ...]
    interval: int


def repeating(problem: Problem, seed: int, over: Callable[[], bool]) -> list[Words]:
    """Return the words of good blocks within the caps, until time is ``over``. None for one stage a rank."""
    climbs = range(_CLIMBS if problem.n_chunks == 2 else 0)
    found = (_Climb(problem, seed + number).best(number % 2 == 1, over) for number in climbs)
    return [words for words in found if words is not None]


class _Climb:
    """From one block to a neighbour that is no worse, and on."""

    def __init__(self, problem: Problem, seed: int) -> None:
        self.problem, self.random = problem, Random(seed)
        stages = range(len(problem.ranks))
        self.times = [float(time) for time in problem.durations]
        self.unit = sum(self.times) / sum(time > 0 for time in self.times)
        self.way = [3 * stage + FORWARD for stage in stages] + [3 * stage + INPUT for stage in reversed(stages)]
        self.kinds = (FORWARD, INPUT, WEIGHT) if problem.split else (FORWARD, INPUT)

    def best(self, one_by_one: bool, over: Callable[[], bool]) -> Words | None:
        """Return the words of the best block that was found; None without any that fits.

        Args:
            one_by_one: begin with one microbatch after the other; if not, with as many as a rank can work for.
        """
        problem, length = self.problem, sum(self.times) / self.unit
        block = _Block((0,) * len(self.times), 1 + round(length if one_by_one else length / problem.n_ranks))
        best: tuple[tuple[Time, Time], Words] | None = None
        now: Time | None = None
        n_letters = len(self.way) * problem.n_microbatches
        for _ in range(max(_TRIES, _LETTERS // n_letters)):
            if over():
                break
            tried = self._neighbour(block)
            words = self._words(tried)
            run = problem.run(words) if problem.fits(words) else None
            if run is None:
                if now is None:  # nothing has fitted yet
                    block = replace(block, interval=block.interval + 1)
                continue
            if now is None or run.makespan <= now:
                now, block = run.makespan, tried
            if best is None or (run.makespan, run.total) < best[0]:
                best = (run.makespan, run.total), words
        return best and best[1]

    def _neighbour(self, block: _Block) -> _Block:
        random, waits, interval = self.random, list(block.waits), block.interval
        for _ in range(random.choice((1, 1, 2, 3))):
            place = random.randrange(len(waits) + 2)
            if place < len(waits):
                waits[place] = max(0, waits[place] + random.choice((-2, -1, 1, 2)))
            else:
                interval = max(1, interval + random.choice((-2, -1, -1, 1)))
        return _Block(tuple(waits), interval)

    def _words(self, block: _Block) -> Words:
        """Return each rank's letters in the order of their starts."""
        problem, times, unit = self.problem, self.times, self.unit
        starts, clock = [0.0] * len(times), 0.0
        for letter in self.way:
            starts[letter] = clock = clock + float(problem.delays[letter]) + block.waits[letter] * unit
            clock += times[letter]
            if letter % 3 == INPUT:
                starts[letter + 1] = clock + block.waits[letter + 1] * unit
        rows: list[list[tuple[float, int, int]]] = [[] for _ in problem.caps]
        for stage, rank in enumerate(problem.ranks):
            for kind in self.kinds:
                first, letter = starts[3 * stage + kind], 3 * stage + kind
                entries = (i * block.interval * unit for i in range(problem.n_microbatches))
                # At one moment what gives room comes first.
                rows[rank] += [(round(first + entry, 6), -kind, letter) for entry in entries]
        return [[letter for *_, letter in sorted(row)] for row in rows]
