"""Orders to begin a search with.

There are four sources: list scheduling, named orders with their weight gradients placed anew, Zero
Bubble's heuristic, and blocks that repeat. The basis is list scheduling (Graham 1966): the rank
that can start first takes the action that its rule prefers.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product, starmap
from random import Random

from course_pp.schedule.action import Time
from course_pp.schedule.costs import Costs
from course_pp.schedule.problem import FORWARD, INPUT, WEIGHT, OrderProblem, Words
from course_pp.schedule.schedule import Schedule

Choice = tuple[Time, int, int]
"""When a letter could start, its place among the preferences of the rank, and the letter."""


@dataclass(frozen=True)
class DispatchRule:
    """The preferences of a rank that could do several things.

    Attributes:
        order: the kinds, dearest first: ``"IFW"`` does first the work that others wait for, and
            fills with weight gradients.
        slope: the number of microbatches by which a rank may run further ahead of its backwards
            than the next rank; None for no limit. 1 gives the warm-up of 1F1B, 2 that of ZB-H2.
        patient: whether a rank leaves ``W`` if a message known to be on its way arrives before
            ``W`` would end.
        deep: whether a rank with two stages prefers the later one.
        window: the most microbatches that a rank with two stages may have under way; None for no
            limit.
    """

    order: str = "IFW"
    slope: int | None = None
    patient: bool = False
    deep: bool = True
    window: int | None = None


_RULES = tuple(
    starmap(
        DispatchRule, product(("IFW", "FIW", "IWF"), (None, 1, 2), (False, True), (True, False))
    )
)


def rules_for(problem: OrderProblem) -> tuple[DispatchRule, ...]:
    """Return the rules worth a try."""
    if problem.n_chunks == 1:
        return tuple(rule for rule in _RULES if rule.deep)
    # With two stages, a rank fills up with microbatches of the first unless entries are limited.
    cap = min(problem.caps)
    limits = {limit for limit in (cap // 2, cap // 2 + 1, cap - 2) if 0 < limit < cap}
    rules = []
    for window in (None, *sorted(limits)):
        rules += [replace(rule, window=window) for rule in _RULES]
    return tuple(rules)


class Desk:
    """A schedule as it is being written, rank by rank, and the choices of each rank.

    Attributes:
        words: for each rank the letters so far.
        clocks: when each rank is free.
        held: for each rank the number of activations it has.
        ahead: for each rank the number of its forwards less that of its input gradients.
        under_way: for each rank the number of activations of its first stage it has.
        inbox: for each letter, the times at which the inputs that it could take arrive.
    """

    def __init__(self, problem: OrderProblem, rule: DispatchRule) -> None:
        self.problem = problem
        self.words: Words = [[] for _ in range(problem.n_ranks)]
        self.clocks: list[Time] = [0] * problem.n_ranks
        self.inbox: list[list[Time]] = [[] for _ in problem.durations]
        self.inbox[FORWARD] = [0] * problem.n_microbatches
        self.held = [0] * problem.n_ranks
        self.ahead = [0] * problem.n_ranks
        self.under_way = [0] * problem.n_ranks
        self.rule = rule

        def preference(letter: int) -> tuple[int, int]:
            stage, kind = divmod(letter, 3)
            return rule.order.index("FIW"[kind]), -stage if rule.deep else stage

        self._letters = []
        for rank in range(problem.n_ranks):
            self._letters.append(sorted(problem.letters_of(rank), key=preference))
        # The letters that wait for each letter.
        self._readers: list[list[int]] = [[] for _ in problem.durations]
        used = {letter for letters in self._letters for letter in letters}
        for letter, maker in enumerate(problem.waits_for):
            if maker >= 0 and letter in used:
                self._readers[maker].append(letter)
        self._next: list[Choice | None] = [None] * problem.n_ranks
        for rank in range(problem.n_ranks):
            self._look(rank)

    def has_room(self, rank: int, stage: int) -> bool:
        """Return whether the rank may take a forward of the stage.

        It keeps a place free for each of its later stages: full of activations of the first, it
        could not go on.
        """
        problem = self.problem
        later = problem.ranks[stage + 1 :].count(rank)
        if self.held[rank] + 1 > problem.caps[rank] - later:
            return False
        # With several stages a rank, only the first keeps its distance: the others finish the
        # microbatches that are under way.
        if stage >= problem.n_ranks:
            return True
        if self.rule.window is not None and self.under_way[rank] >= self.rule.window:
            return False
        if self.rule.slope is None:
            return True
        ranks_behind = problem.n_ranks - 1 - rank
        distance = self.rule.slope * ranks_behind + (problem.n_chunks - 1) * problem.n_ranks
        return self.ahead[rank] <= distance

    def start(self, rank: int, letter: int) -> Time:
        """Return when the rank could start ``letter``, if an input for it is in the inbox."""
        return max(self.clocks[rank], self.inbox[letter][0])

    def _choices(self, rank: int) -> Iterator[Choice]:
        for place, letter in enumerate(self._letters[rank]):
            if self.inbox[letter] and (letter % 3 != FORWARD or self.has_room(rank, letter // 3)):
                yield self.start(rank, letter), place, letter

    def _look(self, rank: int) -> None:
        """Choose the rank's next letter."""
        best = min(self._choices(rank), default=None)
        if best is not None and best[2] % 3 == WEIGHT and self.rule.patient:
            end = best[0] + self.problem.durations[best[2]]
            others = [each for each in self._choices(rank) if each[2] % 3 != WEIGHT]
            best = min((each for each in others if each[0] < end), default=best)
        self._next[rank] = best

    def take(self, rank: int, letter: int) -> None:
        """Write the letter as the rank's next."""
        problem = self.problem
        end = self.start(rank, letter) + problem.durations[letter]
        self.clocks[rank] = end
        self.inbox[letter].pop(0)
        self.words[rank].append(letter)
        kind = letter % 3
        change = (kind == FORWARD) - problem.releases(letter)
        if letter < 3 * problem.n_ranks:
            self.under_way[rank] += change
        self.held[rank] += change
        self.ahead[rank] += (kind == FORWARD) - (kind == INPUT)
        touched = {rank}
        for reader in self._readers[letter]:
            self.inbox[reader].append(end + problem.delays[reader])
            touched.add(problem.ranks[reader // 3])
        for each in touched:
            self._look(each)

    def fill(self) -> bool:
        """Take the letters left, the earliest start first; return whether all could be placed."""
        n_letters = sum(map(len, self._letters)) * self.problem.n_microbatches
        for _ in range(n_letters - sum(map(len, self.words))):
            able = [(choice, rank) for rank, choice in enumerate(self._next) if choice is not None]
            if not able:
                return False
            (_, _, letter), rank = min(able)
            self.take(rank, letter)
        return True


def filled(schedule: Schedule, costs: Costs, limits: Sequence[int] | None = None) -> Schedule:
    """Return a named order with its weight gradients placed for ``costs``.

    Other ranks do not wait for a weight gradient, so it may come whenever its rank would otherwise
    wait (Qi et al. 2024, "Zero bubble pipeline parallelism", section 3.1). No rank holds more
    activations than the fullest did before, nor than its own limit, which the order keeps to. An
    order with whole backwards stays as it is, and so does one that would get no shorter.
    """
    if not splits_every_backward(schedule):
        return schedule
    changes = {"F": 1, "I": 0, "W": -1}
    most = 0
    for row in schedule.actions:
        parts = (part for action in row for part in action.parts)
        most = max([most, *accumulate(changes[part.kind] for part in parts)])
    caps = tuple(min(most, limit) for limit in limits or (most,) * schedule.n_ranks)
    problem = OrderProblem.of(schedule.placement, schedule.n_microbatches, costs, caps, split=True)
    named = problem.words_of(schedule)
    best = schedule
    makespan = problem.makespan(named)
    for patient in (True, False):
        desk = _Filling(problem, named, patient)
        if not desk.fill():
            continue
        now = problem.makespan(desk.words)
        if now < makespan:
            makespan = now
            best = problem.schedule_of(schedule.name, desk.words)
    return best


def splits_every_backward(schedule: Schedule) -> bool:
    """Return whether the schedule has ``F``, ``I`` and ``W``, and no other kind."""
    return {part.kind for part in schedule.parts} == set("FIW")


class _Filling(Desk):
    """Takes forwards and input gradients in a given order.

    A rank that is full or would wait takes its oldest weight gradient: if patient, only one that
    ends before the wait.
    """

    def __init__(self, problem: OrderProblem, words: Words, patient: bool) -> None:
        self._order = [deque(letter for letter in word if letter % 3 != WEIGHT) for word in words]
        super().__init__(problem, DispatchRule(patient=patient))

    def take(self, rank: int, letter: int) -> None:
        if letter % 3 != WEIGHT:
            self._order[rank].popleft()
        super().take(rank, letter)

    def _look(self, rank: int) -> None:
        clock = self.clocks[rank]
        order = self._order[rank]
        weights = [letter for letter in self._letters[rank] if letter % 3 == WEIGHT]
        ready = [letter for letter in weights if self.inbox[letter]]
        weight = min(ready, key=lambda letter: self.inbox[letter][0], default=None)

        # The next letter of the order: None if there is none, if it has no room or no input yet.
        start = None
        full = False
        if order:
            full = order[0] % 3 == FORWARD and self.held[rank] >= self.problem.caps[rank]
            if not full and self.inbox[order[0]]:
                start = self.start(rank, order[0])
        self._next[rank] = None if start is None else (start, 1, order[0])
        if weight is None:
            return
        end = clock
        if self.rule.patient:
            end += self.problem.durations[weight]
        if start is None:
            # At equal times a full rank goes first, and a rank that knows of no input goes last.
            self._next[rank] = (clock, 0 if full else 2, weight)
        elif clock < start and end <= start:
            self._next[rank] = (clock, 0, weight)


def zero_bubble_heuristic(problem: OrderProblem) -> Iterator[Words]:
    """Yield the words of the heuristic of Zero Bubble's authors, rewritten from their description.

    Qi et al. 2024, "Zero bubble pipeline parallelism" (arXiv 2401.10241), section 3.1, with the
    details of their repository ``sail-sg/zero-bubble-pipeline-parallelism`` (``scheduler/zb.py``):
    as many forwards as memory allows before the first input gradient arrives, then one forward and
    one input gradient a round on each rank, and weight gradients where a rank would wait or is
    full. Three questions that the paper leaves to trial are switches, so there are eight answers;
    none for chunks or whole backwards.
    """
    if problem.n_chunks != 1 or not problem.split:
        return
    for answers in product((True, False), repeat=3):
        attempt = _Attempt(problem, *answers)
        if attempt.finish():
            yield attempt.words


class _Attempt(Desk):
    """One run of the heuristic.

    Attributes:
        done: for each rank the number of its forwards, input gradients and weight gradients.
        bubbles: the time that each rank has waited since its first forward.
    """

    def __init__(
        self, problem: OrderProblem, stop_short: bool, backward_first: bool, greedy: bool
    ) -> None:
        super().__init__(problem, DispatchRule())
        self.n = problem.n_ranks
        self.stop_short = stop_short
        self.backward_first = backward_first
        self.greedy = greedy
        self.done = [[0, 0, 0] for _ in range(self.n)]
        self.bubbles: list[Time] = [0] * self.n

    def _look(self, rank: int) -> None:
        """Do nothing: the heuristic knows the next letter."""

    def finish(self) -> bool:
        """Write all words; return whether memory sufficed."""
        self._warm_up()
        for _ in range(1, self.problem.n_microbatches):
            wanted = [self._wants_forward(rank) for rank in range(self.n)]
            for rank in range(self.n):
                # Never more than the ranks after it can take.
                if all(wanted[rank:]) and not self._forward(rank):
                    return False
            for rank in reversed(range(self.n)):
                self._backward(rank)
        for rank in range(self.n):
            while self.done[rank][WEIGHT] < self.problem.n_microbatches:
                self._put(rank, WEIGHT)
        return True

    def _cost(self, rank: int, kind: int) -> Time:
        return self.problem.durations[3 * rank + kind]

    def _put(self, rank: int, kind: int) -> None:
        if self.done[rank][FORWARD]:
            self.bubbles[rank] += self.start(rank, 3 * rank + kind) - self.clocks[rank]
        self.take(rank, 3 * rank + kind)
        self.done[rank][kind] += 1

    def _warm_up(self) -> None:
        """Run forwards until the first input gradient arrives on each rank, then that gradient."""
        problem, n = self.problem, self.n
        for rank in range(n):
            self._put(rank, FORWARD)

        # The forwards that fit before the first input gradient arrives, from the last rank up.
        more = [0] * n
        back = self.clocks[n - 1] + self._cost(n - 1, INPUT)
        for rank in reversed(range(n - 1)):
            arrival = back + problem.delays[3 * rank + INPUT]
            clock = self.clocks[rank]
            while more[rank] + 1 < min(problem.n_microbatches, problem.caps[rank]):
                end = clock + self._cost(rank, FORWARD)
                is_late = end > arrival if self.stop_short else clock >= arrival
                if is_late:
                    break
                clock = end
                more[rank] += 1
            back = max(clock, arrival) + self._cost(rank, INPUT)

        # A rank runs fewer forwards ahead than the rank that feeds it, unless that one has done
        # all.
        for rank in range(1, n):
            if more[rank - 1] + 1 < problem.n_microbatches:
                more[rank] = min(more[rank], max(0, more[rank - 1] - 1))
        for rank in range(n):
            for _ in range(more[rank]):
                self._put(rank, FORWARD)
        for rank in reversed(range(n)):
            self._put(rank, INPUT)

    def _wants_forward(self, rank: int) -> bool:
        done = self.done
        if done[rank][FORWARD] >= self.problem.n_microbatches:
            return False
        if not self.backward_first or rank + 1 == self.n:
            return True
        if done[rank][FORWARD] < done[rank + 1][FORWARD] + 2:
            return True
        # The next rank has a forward in store. Is there time for one here before its next gradient
        # comes up?
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
        """Run weight gradients until the next action's input is there; the last may be late."""
        arrival = self.inbox[3 * rank + kind][0]
        done = self.done[rank]
        took = self._cost(rank, WEIGHT)
        while done[WEIGHT] < done[INPUT] and self.clocks[rank] + took <= arrival:
            self._put(rank, WEIGHT)
        left = arrival - self.clocks[rank]
        has_one = done[WEIGHT] < done[INPUT] and left > 0
        # Not greedy, a rank is late only if its bubble would become the largest otherwise.
        if has_one and (self.greedy or left > max(self.bubbles) - self.bubbles[rank]):
            self._put(rank, WEIGHT)


# Blocks to try from each beginning: at least _TRIES, and more where blocks are small, up to
# _LETTERS letters in all.
_TRIES = 500
_LETTERS = 150_000

_CLIMBS = 4


_Block = tuple[tuple[int, ...], int]
"""The waits before each letter of a microbatch, and the interval to the next microbatch.

Both are in units of a mean action.
"""


def repeating(problem: OrderProblem, seed: int, over: Callable[[], bool]) -> list[Words]:
    """Return words that repeat the way of one microbatch, with waits, at a fixed interval.

    Qi et al. 2024, "Pipeline parallelism with controllable memory" (arXiv 2405.15362), section 3,
    draw such blocks for a V and three amounts of memory. Here the waits are searched for, for two
    stages a rank in any placement, with any times and caps, until time is ``over``. A rule that
    acts whenever it can does not find them: with little memory a gradient should wait where the
    stages turn. With one stage a rank there are none.
    """
    if problem.n_chunks != 2:
        return []
    found = []
    for number in range(_CLIMBS):
        words = _Climb(problem, seed + number).best(number % 2 == 1, over)
        if words is not None:
            found.append(words)
    return found


class _Climb:
    """From one block to a neighbour that is no worse, and on."""

    def __init__(self, problem: OrderProblem, seed: int) -> None:
        self.problem = problem
        self.random = Random(seed)
        self.times = [float(time) for time in problem.durations]
        self.unit = sum(self.times) / sum(time > 0 for time in self.times)
        stages = range(len(problem.ranks))
        down = [3 * stage + FORWARD for stage in stages]
        up = [3 * stage + INPUT for stage in reversed(stages)]
        self.way = down + up
        self.kinds = (FORWARD, INPUT, WEIGHT) if problem.split else (FORWARD, INPUT)

    def best(self, one_by_one: bool, over: Callable[[], bool]) -> Words | None:
        """Return the words of the best block that was found; None if none fits.

        The climb begins with one microbatch after the other if ``one_by_one``, else with as many as
        a rank can work for.
        """
        problem = self.problem
        length = sum(self.times) / self.unit
        interval = 1 + round(length if one_by_one else length / problem.n_ranks)
        block: _Block = ((0,) * len(self.times), interval)
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
                # Until a first block fits, blocks are moved further apart.
                if now is None:
                    waits, interval = block
                    block = (waits, interval + 1)
                continue
            if now is None or run.makespan <= now:
                now = run.makespan
                block = tried
            if best is None or (run.makespan, run.total) < best[0]:
                best = (run.makespan, run.total), words
        return best and best[1]

    def _neighbour(self, block: _Block) -> _Block:
        random = self.random
        waits, interval = list(block[0]), block[1]
        for _ in range(random.choice((1, 1, 2, 3))):
            place = random.randrange(len(waits) + 2)
            if place < len(waits):
                waits[place] = max(0, waits[place] + random.choice((-2, -1, 1, 2)))
            else:
                interval = max(1, interval + random.choice((-2, -1, -1, 1)))
        return tuple(waits), interval

    def _words(self, block: _Block) -> Words:
        problem, times, unit = self.problem, self.times, self.unit
        waits, interval = block
        starts = [0.0] * len(times)
        clock = 0.0
        for letter in self.way:
            clock = clock + float(problem.delays[letter]) + waits[letter] * unit
            starts[letter] = clock
            clock += times[letter]
            if letter % 3 == INPUT:
                starts[letter + 1] = clock + waits[letter + 1] * unit
        rows: list[list[tuple[float, int, int]]] = [[] for _ in problem.caps]
        for stage, rank in enumerate(problem.ranks):
            for kind in self.kinds:
                letter = 3 * stage + kind
                for i in range(problem.n_microbatches):
                    entry = i * interval * unit
                    # At equal times, actions that free memory come before those that take it.
                    rows[rank].append((round(starts[letter] + entry, 6), -kind, letter))
        return [[letter for *_, letter in sorted(row)] for row in rows]
