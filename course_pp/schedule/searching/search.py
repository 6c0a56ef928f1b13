"""The best order that can be found in some seconds, under a memory cap, and how far from the best it may be."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from time import monotonic

from course_pp.arguments import checked
from course_pp.schedule.costs import Costs, divide
from course_pp.schedule.schedule import Schedule
from course_pp.schedule.searching.filling import filled
from course_pp.schedule.searching.improving import Improver
from course_pp.schedule.searching.listing import listed, rules_for
from course_pp.schedule.searching.problem import Problem, Words
from course_pp.schedule.searching.question import Layout, MemoryLimit, Question, questions, refuse_no_time
from course_pp.schedule.searching.repeating import repeating
from course_pp.schedule.searching.zero_bubble import zero_bubble_heuristic
from course_pp.schedule.simulation import simulate
from course_pp.schedule.span import Time
from course_pp.schedule.timeline import Timeline

_PATIENCE = 6_000
_WALKING = 0.95  # of the time; the exact simulation at the end takes some too
_SCOUTS, _REPEATING, _SCOUTING = 4, 2, 800


@dataclass(frozen=True)
class Found:
    """The result of a search.

    Attributes:
        schedule: the best order found.
        timeline: its simulation under the costs that were searched for.
        bound: what no order of this placement and memory can beat: see :func:`course_pp.schedule.bound`.
        stopped: why the search ended: ``bound`` (nothing can be better), ``patience`` (nothing was gained for
            thousands of tries; the same seed then gives the same result everywhere) or ``time``.
        tries: how many orders were simulated.
    """

    schedule: Schedule
    timeline: Timeline
    bound: Time
    stopped: str
    tries: int

    @property
    def gap(self) -> Time:
        """How far the makespan is above the bound, as a share of it: 0 if the schedule is proven to be the best."""
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

    It starts from every schedule of the catalogue with this placement that fits, built for these costs, from list
    scheduling by many rules, from the heuristic of the Zero Bubble authors and, with two stages a rank, from repeating
    blocks made for the caps; it takes the best few, and improves them locally. So it is never worse than any of those.
    Among equal makespans it prefers ranks that finish early.

    Known: list scheduling, local search, and searching pipeline schedules as such (Qi et al. 2024, section 3; Tessel,
    Lin et al. 2024). A simplification of ours: microbatches are alike, so each stage takes them in order, and only the
    order of kinds of work remains to be found.

    Args:
        costs: one unit for each of ``F``, ``I`` and ``W`` unless given. Of memory it says nothing here.
        memory_limit: how many activations a rank may hold, each from its ``F`` until its ``B`` or ``W``; one number,
            or one for each rank, None for no limit.
        n_chunks: stages a rank, 1 or 2.
        seconds: end after that long.
        placement: ``loop`` or, for two chunks, ``v``. Both are tried unless given.
        split: whether the backward may be halved into ``I`` and ``W``; if not, it is ``B``. A whole ``B`` is never
            better than its halves in a row.
        seed: of the random moves.

    Raises:
        ValueError: for sizes below 1 or beyond some thousand actions, a number of chunks or a placement that is not
            offered, times of 0, a limit under which no microbatch gets through, and a time that is not above 0.
    """
    refuse_no_time("search", seconds)
    began = monotonic()
    costs = Costs() if costs is None else costs
    asked = questions(n_ranks, n_microbatches, costs, memory_limit, n_chunks, placement, split)
    found = [
        answer(question, began + _WALKING * seconds * (number + 1) / len(asked), seed)
        for number, question in enumerate(asked)
    ]
    best = min(found, key=lambda each: each.timeline.makespan)
    return replace(
        best,
        bound=min(each.bound for each in found),
        stopped=stopped_of_all(found),
        tries=sum(each.tries for each in found),
    )


def stopped_of_all(found: Sequence[Found]) -> str:
    """Return why a search of several placements ended: ``bound`` if none of them can still hold anything better."""
    least = min(each.timeline.makespan for each in found)
    unsettled = {each.stopped for each in found if each.stopped != "bound" and each.bound < least}
    return "time" if "time" in unsettled else "patience" if unsettled else "bound"


def answer(question: Question, deadline: float, seed: int) -> Found:
    """Search for one placement, until ``deadline`` by ``time.monotonic``."""
    problem = question.problem
    enough: Time = question.bound * problem.scale
    if isinstance(enough, float):
        enough *= 1 + 1e-12

    def over() -> bool:
        return monotonic() > deadline

    starts = _starts(question, seed, enough, over)
    improvers = [Improver(problem, words, seed + number) for number, words in enumerate(starts)]
    for improver in improvers if improvers[0].score[0] > enough else ():
        improver.improve(enough, _SCOUTING, over)
    # With two stages a rank there are many more orders, and a start that looks worse often leads further.
    improvers.sort(key=lambda each: each.score)
    for improver in improvers[: 1 if problem.n_chunks == 1 else None]:
        stopped = improver.improve(enough, _PATIENCE, over)
        if stopped == "bound":
            break
    best = min(improvers, key=lambda each: each.score)
    schedule = problem.schedule_of("found", best.best)
    candidates = [simulate(schedule, question.costs)]
    orders = [schedule]
    if question.costs.overlapped is not None:  # pairs run as one may be quicker than what was searched
        orders += question.named()
        candidates += [simulate(each, question.costs) for each in orders[1:]]
    winner = min(range(len(orders)), key=lambda i: candidates[i].makespan)
    return Found(orders[winner], candidates[winner], question.bound, stopped, sum(each.tries for each in improvers))


def _starts(question: Question, seed: int, enough: Time, over: Callable[[], bool]) -> list[Words]:
    """Return the best few of the catalogue, of the heuristic and of all rules, best first, then the best that repeat.

    These have their place kept: improved, they often end before what was ahead of them.
    """
    problem = question.problem
    tried: list[Words] = [problem.words_of(filled(each, question.costs, problem.caps)) for each in question.named()]
    tried += zero_bubble_heuristic(problem)
    for rule in rules_for(problem):
        # One rule always gets its turn, so that there is an answer whatever the time.
        if tried and over():
            break
        if (words := listed(problem, rule)) is not None:
            tried.append(words)
    best = _ranked(problem, tried)[:_SCOUTS]
    if best[0][0] > enough:
        best += _ranked(problem, repeating(problem, seed, over))[:_REPEATING]
    return [words for *_, words in sorted(best, key=lambda each: each[:2])]


def _ranked(problem: Problem, tried: Iterable[Words]) -> list[tuple[Time, Time, Words]]:
    """Return the makespan, sum of the ranks' ends and words, best first; of equals the first alone."""
    ranked: dict[tuple[Time, Time], Words] = {}
    for words in tried:
        if (run := problem.run(words)) is not None:
            ranked.setdefault((run.makespan, run.total), words)
    return [(*score, ranked[score]) for score in sorted(ranked)]
