"""The best order found in some seconds, under a memory cap, and its distance from a bound."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from random import Random
from time import monotonic
from typing import Literal, TypeVar

from course_pp.base.arguments import checked, refuse_below
from course_pp.schedule.action import Time
from course_pp.schedule.bounds import bound, limits_of
from course_pp.schedule.catalogue import build, find, names
from course_pp.schedule.costs import Costs, divide
from course_pp.schedule.heuristics import Desk, filled, repeating, rules_for, zero_bubble_heuristic
from course_pp.schedule.problem import FORWARD, OrderProblem, Pass, Words
from course_pp.schedule.schedule import Schedule, looped, v_shaped
from course_pp.schedule.simulation import simulate
from course_pp.schedule.timeline import Timeline

Layout = Literal["loop", "v"]
MemoryLimit = int | Sequence[int | None] | None

_MOST_ACTIONS = 20_000
_PATIENCE = 6_000
_WALKING = 0.95  # share of the time: the exact simulation at the end needs some too
_SCOUTS, _REPEATING, _SCOUTING = 4, 2, 800
_ROUND = 400  # tries from one fall of the threshold to the next


@dataclass(frozen=True)
class PlacementQuestion:
    """The question which order of one placement is best. An activation weighs 1 in ``costs``."""

    placement: tuple[tuple[int, ...], ...]
    problem: OrderProblem
    costs: Costs
    bound: Time

    def named(self) -> list[Schedule]:
        """Return the catalogue's schedules that answer the question.

        They have this placement and its kinds of backward, and fit in the caps.
        """
        problem, found = self.problem, []
        for name in names():
            entry = find(name)
            if entry.updates or not (entry.any_chunks or entry.n_chunks == problem.n_chunks):
                continue
            try:
                schedule = build(name, problem.n_ranks, problem.n_microbatches, problem.n_chunks)
            except ValueError:  # a size that this one does not allow
                continue
            halves = any(part.kind in "IW" for part in schedule.parts)
            answers = schedule.placement == self.placement and (problem.split or not halves)
            if answers and problem.fits(problem.words_of(schedule)):
                found.append(schedule)
        return found


def questions(
    n_ranks: int,
    n_microbatches: int,
    costs: Costs,
    memory_limit: MemoryLimit,
    n_chunks: int,
    placement: Layout | None,
    split: bool,
) -> list[PlacementQuestion]:
    refuse_below(1, "search", n_ranks=n_ranks, n_microbatches=n_microbatches)
    if n_chunks not in (1, 2):
        raise ValueError(f"n_chunks is {n_chunks}: a search takes 1 or 2 stages a rank")
    if placement == "v" and n_chunks == 1:
        raise ValueError(
            "placement is 'v' with n_chunks 1: a V has two stages a rank; give n_chunks=2, or"
            " 'loop'"
        )
    actions = 3 * n_ranks * n_chunks * n_microbatches
    if actions > _MOST_ACTIONS:
        raise ValueError(
            f"3 × n_ranks × n_chunks × n_microbatches is {actions:,}: a search goes through every"
            f" action many times, so keep it at {_MOST_ACTIONS:,} or below"
        )
    times = costs.durations(n_ranks * n_chunks)
    # W may take no time, as in a frozen stage.
    for name, kind in (("forward", "F"), ("input_grad", "I")):
        if 0 in times[kind]:
            raise ValueError(
                f"{name} is 0 in stage {times[kind].index(0)}: give a time above 0 for a search"
            )
    most = n_chunks * n_microbatches
    limits = limits_of(memory_limit, n_ranks)
    for rank, cap in enumerate(limits):
        if cap is not None and cap < n_chunks:
            raise ValueError(
                f"memory_limit is {cap} on rank {rank}: a microbatch keeps an activation in each of"
                f" its {n_chunks} stages there until its backward comes, so give at least"
                f" {n_chunks}"
            )
    caps = [most if cap is None else min(int(cap), most) for cap in limits]
    layouts = [placement] if placement else ["loop", "v"][:n_chunks]
    counted = replace(costs, activation=1, released_by_input_grad=0, weights=0)
    # For the bound, a whole backward is an input gradient that leaves no weight gradient for later.
    halves = [costs.each(name, n_ranks * n_chunks) for name in ("input_grad", "weight_grad")]
    whole = tuple(map(sum, zip(*halves, strict=True)))
    timed = counted if split else replace(counted, input_grad=whole, weight_grad=0)
    asked = []
    for layout in layouts:
        ranks_of = v_shaped(n_ranks) if layout == "v" else looped(n_ranks, n_chunks)
        problem = OrderProblem.of(ranks_of, n_microbatches, counted, caps, split)
        least = bound(n_ranks, n_microbatches, timed, caps, placement=ranks_of)
        asked.append(PlacementQuestion(ranks_of, problem, counted, least))
    return asked


@dataclass(frozen=True)
class Found:
    """The result of a search: the best order, and its simulation under the costs of the search.

    Attributes:
        bound: a time that no order of this placement and memory beats (see
            :func:`course_pp.schedule.bound`).
        stopped: the reason why the search ended. ``bound``: no order can be better. ``patience``:
            thousands of tries gained nothing; the same seed then gives the same result everywhere.
            ``time``: the time was up.
        tries: the number of orders simulated.
    """

    schedule: Schedule
    timeline: Timeline
    bound: Time
    stopped: str
    tries: int

    @property
    def gap(self) -> Time:
        """The distance of the makespan from the bound, over the bound; 0 if none is better."""
        gap = divide(self.timeline.makespan - self.bound, self.bound)
        return 0 if isinstance(gap, float) and gap < 1e-12 else gap


@checked
def search(
    n_ranks: int,
    n_microbatches: int,
    costs: Costs | None = None,
    memory_limit: MemoryLimit = None,
    n_chunks: int = 1,
    seconds: float = 5.0,
    *,
    placement: Layout | None = None,
    split: bool = True,
    seed: int = 0,
) -> Found:
    """Look for the order of least makespan.

    The search starts from four kinds of orders: the catalogue's schedules with this placement that
    fit, adapted to these costs; list scheduling by many rules; the heuristic of the Zero Bubble
    authors; and, with two stages a rank, repeating blocks made for the caps. It takes the best few
    and improves them locally, so the result is never worse than any of them. Among equal makespans
    it prefers ranks that finish early. Microbatches are alike, so each stage takes them in order,
    and the search changes only the order of the kinds of work.

    Args:
        costs: one unit for each of ``F``, ``I`` and ``W`` unless given. Its memory fields are
            ignored: every activation counts 1.
        memory_limit: the most activations that a rank may hold, each from its ``F`` until its ``B``
            or ``W``; one number, or one for each rank, None for no limit.
        n_chunks: stages a rank, 1 or 2.
        seconds: the time limit.
        placement: ``loop`` or, for two chunks, ``v``. Both are tried unless given.
        split: whether the backward may be split into ``I`` and ``W``; if not, it is ``B``. A whole
            ``B`` is never better than its halves in a row.
        seed: the seed of the random moves.
    """
    if not 0 < seconds < inf:
        raise ValueError(
            f"search: seconds is {seconds}: give a time limit above 0, and a finite one"
        )
    began = monotonic()
    costs = Costs() if costs is None else costs
    asked = questions(n_ranks, n_microbatches, costs, memory_limit, n_chunks, placement, split)
    return best_of(
        [
            answer(question, began + _WALKING * seconds * (number + 1) / len(asked), seed)
            for number, question in enumerate(asked)
        ]
    )


AnyFound = TypeVar("AnyFound", bound=Found)


def best_of(found: Sequence[AnyFound]) -> AnyFound:
    """Return the best of several placements' results.

    Its ``stopped`` is ``bound`` if the bounds prove that no placement has a shorter order.
    """
    best = min(found, key=lambda each: each.timeline.makespan)
    unsettled = set()
    for each in found:
        if each.stopped != "bound" and each.bound < best.timeline.makespan:
            unsettled.add(each.stopped)
    stopped = "bound"
    if unsettled:
        stopped = "time" if "time" in unsettled else "patience"
    return replace(
        best,
        bound=min(each.bound for each in found),
        stopped=stopped,
        tries=sum(each.tries for each in found),
    )


def answer(question: PlacementQuestion, deadline: float, seed: int) -> Found:
    """Search for one placement, until ``deadline`` by ``time.monotonic``."""
    problem = question.problem
    enough: Time = question.bound * problem.scale
    if isinstance(enough, float):
        enough *= 1 + 1e-12

    def over() -> bool:
        return monotonic() > deadline

    starts = _starts(question, seed, enough, over)
    improvers = [Improver(problem, words, seed + number) for number, words in enumerate(starts)]
    if improvers[0].score[0] > enough:
        for improver in improvers:
            improver.improve(enough, _SCOUTING, over)
    # With two stages a rank there are many more orders, and a start that looks worse often leads
    # further.
    improvers.sort(key=lambda each: each.score)
    worth_it = improvers[:1] if problem.n_chunks == 1 else improvers
    for improver in worth_it:
        stopped = improver.improve(enough, _PATIENCE, over)
        if stopped == "bound":
            break
    best = min(improvers, key=lambda each: each.score)
    orders = [problem.schedule_of("found", best.best)]
    # The search takes pairs apart, so a named order whose pairs run as one may be quicker.
    if question.costs.overlapped is not None:
        orders += question.named()
    timed = [(order, simulate(order, question.costs)) for order in orders]
    order, timeline = min(timed, key=lambda each: each[1].makespan)
    return Found(order, timeline, question.bound, stopped, sum(each.tries for each in improvers))


def _starts(
    question: PlacementQuestion, seed: int, enough: Time, over: Callable[[], bool]
) -> list[Words]:
    """Return the best few orders of all kinds of starts, best first.

    Orders of repeating blocks have places of their own. After improvement they often overtake
    orders that were better at first.
    """
    problem = question.problem
    tried: list[Words] = []
    for named in question.named():
        tried.append(problem.words_of(filled(named, question.costs, problem.caps)))
    tried += zero_bubble_heuristic(problem)
    for rule in rules_for(problem):
        # One rule always gets its turn, so that there is an answer whatever the time.
        if tried and over():
            break
        desk = Desk(problem, rule)
        if desk.fill():
            tried.append(desk.words)
    best = _ranked(problem, tried)[:_SCOUTS]
    if best[0][0] > enough:
        best += _ranked(problem, repeating(problem, seed, over))[:_REPEATING]
    return [words for *_, words in sorted(best, key=lambda each: each[:2])]


def _ranked(problem: OrderProblem, tried: Iterable[Words]) -> list[tuple[Time, Time, Words]]:
    """Return (makespan, sum of the ranks' ends, words), best first; only one of several equals."""
    ranked: dict[tuple[Time, Time], Words] = {}
    for words in tried:
        if (run := problem.run(words)) is not None:
            ranked.setdefault((run.makespan, run.total), words)
    return [(*score, ranked[score]) for score in sorted(ranked)]


class Improver:
    """The best words so far, and a walk that looks for better ones by moving a letter of a word.

    Only a change of the longest path can shorten the run. A block is a part of that path that one
    rank does in one go. A move takes a letter of a block past the block's end, or takes the block's
    last letter, for which another rank waits, further to the front (Nowicki and Smutnicki 1996, "A
    fast taboo search algorithm for the job shop problem"). A change for the worse is accepted
    within a threshold that falls to zero. Then the next round starts from the best words (Dueck and
    Scheuer 1990, "Threshold accepting").

    Attributes:
        best: the best words so far.
        score: the makespan of the best words, and the sum of the ranks' ends.
        tries: the number of orders simulated.
        last_gain: the number of tries at which the makespan last fell.
    """

    def __init__(self, problem: OrderProblem, words: Words, seed: int) -> None:
        self.problem = problem
        self.random = Random(seed)
        self.best = [list(word) for word in words]
        run = problem.run(words)
        assert run is not None
        self.score = (run.makespan, run.total)
        self.tries = self.last_gain = 0

    def improve(self, enough: Time, patience: int, over: Callable[[], bool]) -> str:
        """Walk until one of three ends is reached, and return its name.

        ``bound``: the makespan is ``enough``. ``patience``: so many tries gained nothing. ``time``:
        the time is ``over``.
        """
        began = self.tries
        while True:
            if self.score[0] <= enough:
                return "bound"
            if self.tries - began >= patience and self.tries - self.last_gain >= patience:
                return "patience"
            if over():
                return "time"
            self._walk(enough, over)

    def _walk(self, enough: Time, over: Callable[[], bool]) -> None:
        """Walk from the best words while the threshold falls once."""
        words = [list(word) for word in self.best]
        run = self.problem.run(words)
        assert run is not None
        shortest = float(min(t for t in self.problem.durations if t > 0))
        start = shortest * self.random.choice((0.0, 0.3, 1.01, 2.01))
        now = (run.makespan, run.total)
        blocks = self._blocks(words, run)
        for step in range(_ROUND):
            if step % 16 == 0 and over():
                return
            move = self._move(words, blocks)
            if move is None:
                continue
            rank, taken, put = move
            kept = words[rank]
            words[rank] = self._moved(rank, kept, taken, put)
            self.tries += 1
            found = self.problem.run(words) if self.problem.row_fits(rank, words[rank]) else None
            slack = start * (1 - step / _ROUND)
            if found is None or (found.makespan - now[0], found.total - now[1]) > (slack, slack):
                words[rank] = kept
                continue
            now = (found.makespan, found.total)
            blocks = self._blocks(words, found)
            if now < self.score:
                if now[0] < self.score[0]:
                    self.last_gain = self.tries
                self.best, self.score = [list(each) for each in words], now
                if now[0] <= enough:
                    return

    def _moved(self, rank: int, word: list[int], taken: int, put: int) -> list[int]:
        """Return the word with one letter at another place.

        Where the rank would then hold too much, a letter that makes room comes first.
        """
        problem = self.problem
        cap = problem.caps[rank]
        word = word.copy()
        word.insert(put, word.pop(taken))
        held = 0
        place = 0
        while place < len(word):
            letter = word[place]
            if letter % 3 == FORWARD and held == cap:
                later = place + 1
                while later < len(word) and not problem.releases(word[later]):
                    later += 1
                if later == len(word):
                    break
                # Either the release moves forward, or the forward moves back.
                if self.random.random() < 0.5:
                    word.insert(place, word.pop(later))
                else:
                    word.insert(later, word.pop(place))
                continue
            if letter % 3 == FORWARD:
                held += 1
            elif problem.releases(letter):
                held -= 1
            place += 1
        return word

    def _move(
        self, words: Words, blocks: list[tuple[int, int, int]]
    ) -> tuple[int, int, int] | None:
        """Return a rank, the place of a letter in its word, and where to put it."""
        random = self.random
        rank, first, last = blocks[random.randrange(len(blocks))]
        word = words[rank]
        if random.random() < 0.5:
            # The letter that the next block waits for comes sooner.
            taken = last
            put = max(0, last - 1)
            if last > first and random.random() < 0.7:
                put = random.randrange(first, last)
            if first > 0 and random.random() < 0.3:
                put = random.randrange(max(0, first - 6), first)
        else:
            # A letter of the block gives way.
            taken = random.randrange(first, last + 1)
            put = last
            if random.random() >= 0.5:
                put = random.randrange(last, min(len(word) - 1, last + 8) + 1)
            if random.random() < 0.2:
                put = random.randrange(max(0, first - 8), first + 1)
        # To swap equal letters changes nothing.
        if put == taken or (word[put] == word[taken] and abs(put - taken) == 1):
            return None
        return rank, taken, put

    def _blocks(self, words: Words, run: Pass) -> list[tuple[int, int, int]]:
        """Return the blocks of the longest path, from its end back.

        Each is a rank, and the first and last place of the block in its word.
        """
        problem, ends = self.problem, run.ends
        waits_for, delays, durations = problem.waits_for, problem.delays, problem.durations
        counts: list[list[int]] = []
        where: dict[tuple[int, int], int] = {}
        for word in words:
            seen: dict[int, int] = {}
            row = []
            for place, letter in enumerate(word):
                k = seen.get(letter, 0)
                seen[letter] = k + 1
                row.append(k)
                where[letter, k] = place
            counts.append(row)
        rank = max(range(problem.n_ranks), key=lambda r: ends[words[r][-1]][counts[r][-1]])
        place = last = len(words[rank]) - 1
        blocks = []
        while True:
            letter = words[rank][place]
            k = counts[rank][place]
            start = ends[letter][k] - durations[letter]
            maker = waits_for[letter]
            before = None if place == 0 else ends[words[rank][place - 1]][counts[rank][place - 1]]
            arrival = None if maker < 0 else ends[maker][k] + delays[letter]
            if (
                arrival is not None
                and (before is None or arrival > before)
                and problem.ranks[maker // 3] != rank
            ):
                blocks.append((rank, place, last))
                rank = problem.ranks[maker // 3]
                place = last = where[maker, k]
            elif before is None or start <= 0:
                blocks.append((rank, place, last))
                return blocks
            else:
                place -= 1
