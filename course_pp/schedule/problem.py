"""A search's question in numbers, and a simulator fast enough to be asked thousands of times.

All microbatches are alike, so on each rank, each stage may take them in order without loss. To see
this, take any schedule, and let the k-th ``F`` that a stage starts be the one of microbatch k, and
likewise its ``I`` and ``W``. Every action still finds its input: when a stage starts its k-th
action, at least k of the actions that it waits for have ended. A rank holds as much as before. So a
rank's order is a *word* over its (stage, kind) pairs, and the microbatch of each letter follows
from counting.

A letter is an integer: ``3 * stage + kind``, with the kinds ``F``, ``I``, ``W`` as 0, 1, 2.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from typing import NamedTuple

from course_pp.schedule.action import Action, Time
from course_pp.schedule.costs import Costs
from course_pp.schedule.schedule import Schedule

FORWARD, INPUT, WEIGHT = 0, 1, 2
_KINDS = "FIW"

Words = list[list[int]]
"""For each rank its letters in order."""


class Pass(NamedTuple):
    """A run of words.

    Attributes:
        total: sum of all ranks' ends, which tells equal makespans apart.
        ends: for each letter, when its k-th occurrence ends.
    """

    makespan: Time
    total: Time
    ends: list[list[Time]]


@dataclass(frozen=True)
class OrderProblem:
    """Sizes, times and memory caps.

    Attributes:
        ranks: for each stage its rank.
        split: whether the backward is in two halves, ``I`` and ``W``; if not, the letter of ``I``
            stands for ``B``.
        durations: time of each letter.
        waits_for: for each letter the letter whose k-th occurrence its k-th occurrence needs; -1
            for the first stage's ``F``.
        delays: for each letter the time of its input on its way.
        caps: for each rank the most activations it may hold.
        scale: the factor of all times, to calculate with integers where costs are fractions.
    """

    ranks: tuple[int, ...]
    n_ranks: int
    n_microbatches: int
    split: bool
    durations: tuple[Time, ...]
    waits_for: tuple[int, ...]
    delays: tuple[Time, ...]
    caps: tuple[int, ...]
    scale: int = 1

    @classmethod
    def of(
        cls,
        placement: Sequence[Sequence[int]],
        n_microbatches: int,
        costs: Costs,
        caps: Sequence[int],
        split: bool,
    ) -> "OrderProblem":
        """Read the times off ``costs``; ``placement`` has one rank for each stage."""
        n = len(placement)
        ranks = tuple(rank for (rank,) in placement)
        times = costs.durations(n)
        kinds = ("F", "I", "W") if split else ("F", "B", "B")
        durations = [times[kind][stage] for stage in range(n) for kind in kinds]
        waits_for = [-1] * (3 * n)
        for stage in range(n):
            forward, input_grad, weight_grad = range(3 * stage, 3 * stage + 3)
            if stage > 0:
                waits_for[forward] = forward - 3
            waits_for[input_grad] = input_grad + 3 if stage + 1 < n else forward
            waits_for[weight_grad] = input_grad
        delays: list[Time] = [0] * (3 * n)
        for stage, transfer in enumerate(costs.transfers(n)):
            if ranks[stage] != ranks[stage + 1]:
                delays[3 * (stage + 1) + FORWARD] = transfer
                delays[3 * stage + INPUT] = transfer
        scale = 1
        every = (*durations, *delays)
        if not any(isinstance(t, float) for t in every):
            scale = lcm(*(t.denominator for t in every if isinstance(t, Fraction)))
            durations = [int(t * scale) for t in durations]
            delays = [int(t * scale) for t in delays]
        return cls(
            ranks=ranks,
            n_ranks=1 + max(ranks),
            n_microbatches=n_microbatches,
            split=split,
            durations=tuple(durations),
            waits_for=tuple(waits_for),
            delays=tuple(delays),
            caps=tuple(caps),
            scale=scale,
        )

    @property
    def n_chunks(self) -> int:
        return len(self.ranks) // self.n_ranks

    def letters_of(self, rank: int) -> tuple[int, ...]:
        """Return the letters of a rank's words."""
        kinds = (FORWARD, INPUT, WEIGHT) if self.split else (FORWARD, INPUT)
        stages = [stage for stage, each in enumerate(self.ranks) if each == rank]
        return tuple(3 * stage + kind for stage in stages for kind in kinds)

    def releases(self, letter: int) -> bool:
        """Return whether the letter releases an activation."""
        return letter % 3 == (WEIGHT if self.split else INPUT)

    def fits(self, words: Words) -> bool:
        """Return whether no rank ever holds more than its cap.

        That depends on each rank's order alone, not on times.
        """
        return all(self.row_fits(rank, word) for rank, word in enumerate(words))

    def row_fits(self, rank: int, word: Iterable[int]) -> bool:
        """Return whether the rank never holds more than its cap."""
        held = 0
        cap = self.caps[rank]
        last = WEIGHT if self.split else INPUT
        for letter in word:
            kind = letter % 3
            if kind == FORWARD:
                held += 1
                if held > cap:
                    return False
            elif kind == last:
                held -= 1
        return True

    def run(self, words: Words) -> Pass | None:
        """Do every letter as early as its rank and its input allow.

        Return None if ranks wait for one another in a circle.
        """
        durations, waits_for, delays = self.durations, self.waits_for, self.delays
        ends: list[list[Time]] = [[] for _ in durations]
        clocks: list[Time] = [0] * self.n_ranks
        places = [0] * self.n_ranks
        asleep = [-1] * len(durations)
        able = list(range(self.n_ranks))
        while able:
            rank = able.pop()
            clock, word = clocks[rank], words[rank]
            for place in range(places[rank], len(word)):
                letter = word[place]
                done = ends[letter]
                maker = waits_for[letter]
                if maker >= 0:
                    made = ends[maker]
                    if len(made) <= len(done):
                        asleep[maker] = rank
                        places[rank] = place
                        break
                    arrival = made[len(done)] + delays[letter]
                    if arrival > clock:
                        clock = arrival
                clock += durations[letter]
                done.append(clock)
                if asleep[letter] >= 0:
                    able.append(asleep[letter])
                    asleep[letter] = -1
            else:
                places[rank] = len(word)
            clocks[rank] = clock
        if any(place < len(word) for place, word in zip(places, words, strict=True)):
            return None
        return Pass(max(clocks), sum(clocks), ends)

    def makespan(self, words: Words) -> Time:
        """Return the makespan of words that can run."""
        run = self.run(words)
        assert run is not None
        return run.makespan

    def words_of(self, schedule: Schedule) -> Words:
        """Return the orders of ``schedule``, with pairs taken apart.

        If halves are allowed, backwards are taken apart too.
        """
        words: Words = []
        for row in schedule.actions:
            word = []
            for action in row:
                for part in action.parts:
                    first = 3 * part.stage
                    if part.kind != "B":
                        word.append(first + _KINDS.index(part.kind))
                        continue
                    word.append(first + INPUT)
                    if self.split:
                        word.append(first + WEIGHT)
            words.append(word)
        return words

    def schedule_of(self, name: str, words: Words) -> Schedule:
        """Return the schedule, numbering microbatches of each stage and kind as they come."""
        counts = [0] * len(self.durations)
        kinds = "FIW" if self.split else "FB"
        rows = []
        for word in words:
            row = []
            for letter in word:
                stage, kind = divmod(letter, 3)
                row.append(Action(stage, kinds[kind], counts[letter]))
                counts[letter] += 1
            rows.append(tuple(row))
        return Schedule(name, tuple((rank,) for rank in self.ranks), tuple(rows))
