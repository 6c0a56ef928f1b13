"""List scheduling: at each moment, the rank that can start first takes what its rule likes best.

Graham 1966 has the idea; a rule here says in which order a rank prefers its kinds of work, how far its forwards may
run ahead, and whether it rather waits for a message than start a weight gradient that would make the message wait.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from course_pp.schedule.searching.problem import FORWARD, INPUT, WEIGHT, Problem, Words
from course_pp.schedule.span import Time

Choice = tuple[Time, int, int]
"""When it could start, its place among what the rank prefers, and the letter."""


@dataclass(frozen=True)
class Rule:
    """What a rank does when it could do several things.

    Attributes:
        order: the kinds, dearest first: ``"IFW"`` does what others wait for and fills with weight gradients.
        slope: how many more microbatches a rank may run ahead of its backwards than the next rank; None for no limit.
            1 gives the warm-up of 1F1B, 2 that of ZB-H2.
        patient: whether a rank leaves ``W`` if a message known to be on its way arrives before ``W`` would end.
        deep: whether a rank with two stages prefers the later one.
        window: how many microbatches a rank with two stages may have under way; None for no limit.
    """

    order: str = "IFW"
    slope: int | None = None
    patient: bool = False
    deep: bool = True
    window: int | None = None


_RULES = tuple(
    Rule(order, slope, patient, deep)
    for order in ("IFW", "FIW", "IWF")
    for slope in (None, 1, 2)
    for patient in (False, True)
    for deep in (True, False)
)


def rules_for(problem: Problem) -> tuple[Rule, ...]:
    """Return the rules worth a try. With two stages, a rank fills up with the first unless entries are limited."""
    if problem.n_chunks == 1:
        return tuple(rule for rule in _RULES if rule.deep)
    cap = min(problem.caps)
    windows = [None, *sorted({window for window in (cap // 2, cap // 2 + 1, cap - 2) if 0 < window < cap})]
    return tuple(replace(rule, window=window) for window in windows for rule in _RULES)


class Desk:
    """A schedule as it is being written, rank by rank, with what each rank could do next.

    Attributes:
        rows: for each rank the letters so far, each with its microbatch.
        clocks: when each rank is free.
        held: for each rank how many activations it has.
        ahead: by how many its forwards exceed its input gradients.
        under_way: how many activations of its first stage it has.
        inbox: for each letter the microbatches it could take, first come first, each with its time of arrival.
    """

    def __init__(self, problem: Problem, rule: Rule) -> None:
        self.problem = problem
        self.rows: list[list[tuple[int, int]]] = [[] for _ in range(problem.n_ranks)]
        self.clocks: list[Time] = [0] * problem.n_ranks
        self.inbox: list[list[tuple[Time, int]]] = [[] for _ in problem.durations]
        self.inbox[FORWARD] = [(0, microbatch) for microbatch in range(problem.n_microbatches)]
        self.held = [0] * problem.n_ranks
        self.ahead = [0] * problem.n_ranks
        self.under_way = [0] * problem.n_ranks
        self.rule = rule
        self._letters = [self._preferred(rank) for rank in range(problem.n_ranks)]
        self._readers: list[list[int]] = [[] for _ in problem.durations]
        used = {letter for letters in self._letters for letter in letters}
        for letter, maker in enumerate(problem.waits_for):
            if maker >= 0 and letter in used:
                self._readers[maker].append(letter)
        self._next: list[Choice | None] = [None] * problem.n_ranks
        for rank in range(problem.n_ranks):
            self._look(rank)

    def _preferred(self, rank: int) -> list[int]:
        order = ["FIW".index(kind) for kind in self.rule.order]
        sign = -1 if self.rule.deep else 1
        return sorted(self.problem.letters_of(rank), key=lambda each: (order.index(each % 3), sign * (each // 3)))

    def has_room(self, rank: int, stage: int) -> bool:
        """Return whether the rank may take a forward of the stage.

        It keeps a place free for each of its later stages: full of activations of the first, it could not go on.
        """
        problem = self.problem
        later = sum(each == rank for each in problem.ranks[stage + 1 :])
        if self.held[rank] + 1 > problem.caps[rank] - later:
            return False
        # With several stages a rank, only the first keeps its distance: the others finish what is under way.
        if stage >= problem.n_ranks:
            return True
        if self.rule.window is not None and self.under_way[rank] >= self.rule.window:
            return False
        if self.rule.slope is None:
            return True
        distance = self.rule.slope * (problem.n_ranks - 1 - rank) + (problem.n_chunks - 1) * problem.n_ranks
        return self.ahead[rank] <= distance

    def _choices(self, rank: int) -> Iterator[Choice]:
        clock = self.clocks[rank]
        for place, letter in enumerate(self._letters[rank]):
            if (inbox := self.inbox[letter]) and (letter % 3 != FORWARD or self.has_room(rank, letter // 3)):
                yield max(clock, inbox[0][0]), place, letter

    def _look(self, rank: int) -> None:
        """Find what the rank would do next."""
        best = min(self._choices(rank), default=None)
        if best is not None and best[2] % 3 == WEIGHT and self.rule.patient:
            end = best[0] + self.problem.durations[best[2]]
            best = min((each for each in self._choices(rank) if each[2] % 3 != WEIGHT and each[0] < end), default=best)
        self._next[rank] = best

    def take(self, rank: int, letter: int, microbatch: int | None = None) -> None:
        """Write the letter to the rank's row, for its oldest microbatch or the one that is named."""
        problem, inbox = self.problem, self.inbox[letter]
        place = 0 if microbatch is None else next(i for i, (_, each) in enumerate(inbox) if each == microbatch)
        arrival, microbatch = inbox.pop(place)
        end = max(self.clocks[rank], arrival) + problem.durations[letter]
        self.clocks[rank] = end
        self.rows[rank].append((letter, microbatch))
        kind = letter % 3
        if letter < 3 * problem.n_ranks:
            self.under_way[rank] += (kind == FORWARD) - problem.releases(letter)
        self.held[rank] += (kind == FORWARD) - problem.releases(letter)
        self.ahead[rank] += (kind == FORWARD) - (kind == INPUT)
        touched = {rank}
        for reader in self._readers[letter]:
            self.inbox[reader].append((end + problem.delays[reader], microbatch))
            touched.add(problem.ranks[reader // 3])
        for each in touched:
            self._look(each)

    def fill(self) -> bool:
        """Take what is left, the earliest start first; return whether all could be placed."""
        left = sum(len(self.problem.letters_of(r)) for r in range(self.problem.n_ranks)) * self.problem.n_microbatches
        left -= sum(map(len, self.rows))
        for _ in range(left):
            able = [(choice, rank) for rank, choice in enumerate(self._next) if choice is not None]
            if not able:
                return False
            (_, _, letter), rank = min(able)
            self.take(rank, letter)
        return True


def listed(problem: Problem, rule: Rule) -> Words | None:
    """Return the orders that a rule makes; None if it gets stuck."""
    desk = Desk(problem, rule)
    return [[letter for letter, _ in row] for row in desk.rows] if desk.fill() else None
