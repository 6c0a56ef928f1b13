"""Can a schedule run? And if not, why not?"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import count

from course_pp.base.arguments import checked
from course_pp.base.cycles import find_cycle
from course_pp.schedule.action import KINDS
from course_pp.schedule.edges import problems_of_edges
from course_pp.schedule.precedence import Precedence
from course_pp.schedule.schedule import Schedule


@checked
def check(schedule: Schedule) -> list[str]:
    """Return everything that keeps ``schedule`` from running, each problem in a sentence.

    The list is empty if it can run. The problems are:

    * An action is missing, repeated, of a stage that does not exist or on a rank that does not hold
      its stage. Every microbatch must pass every stage forward and, unless the schedule is forward
      only, backward: as ``B``, or as ``I`` and ``W``.
    * An edge names a stage that does not exist, goes backwards, or makes a value that another stage
      makes too.
    * A rank has an action before another of its own actions that it depends on.
    * Ranks wait for one another in a cycle, which is spelled out. Sends are buffered: a rank that
      sends never waits for the receiver. Actions start in the order listed, overlapped pairs when
      the inputs of both are there.
    """
    _, problems = precedence_or_problems(schedule)
    return problems


def precedence_or_problems(schedule: Schedule) -> tuple[Precedence | None, list[str]]:
    """Return the precedence of a schedule that can run, or None and the problems of another."""
    if problems := problems_of_bookkeeping(schedule):
        return None, problems
    graph = Precedence.of(schedule)
    if graph.stuck:
        return None, _problems_of_order(graph)
    return graph, []


def problems_of_bookkeeping(schedule: Schedule) -> list[str]:
    """Return problems that show without a run: wrong sets of actions, and impossible edges."""
    counts = _counted(schedule)
    problems = [
        *_misplaced(schedule),
        *_repeated(counts, schedule.n_microbatches),
        *_missing(schedule, counts),
    ]
    if schedule.feedback and any(part.kind != "F" for part in schedule.parts):
        problems.append(
            "tokens feed back to the first stage, yet there are backwards: generation is forward"
            " only"
        )
    return [*problems, *problems_of_edges(schedule.edges, schedule.n_stages)]


def _misplaced(schedule: Schedule) -> Iterable[str]:
    placement = schedule.placement
    n_stages = schedule.n_stages
    for rank, row in enumerate(schedule.actions):
        for action in row:
            for part in action.parts:
                if part.stage >= n_stages:
                    yield f"rank {rank} has {part}, but the stages are 0 to {n_stages - 1}"
                # The usual case, a stage on one rank, is decided without a call.
                elif placement[part.stage] != (rank,):
                    owner = schedule.rank_of(part.stage, part.microbatch)
                    if owner != rank:
                        yield (
                            f"rank {rank} has {part}, which belongs to rank {owner} by the"
                            " placement"
                        )


def _counted(schedule: Schedule) -> dict[str, Counter[int]]:
    """Return for each kind how often each stage and microbatch appears.

    Stage and microbatch are one number, as a hundred thousand pairs keep the garbage collector
    busy.
    """
    m = schedule.n_microbatches
    works: dict[str, list[int]] = {kind: [] for kind in KINDS}
    for part in schedule.parts:
        works[part.kind].append(part.stage * m + part.microbatch)
    return {kind: Counter(each) for kind, each in works.items()}


def _repeated(counts: Mapping[str, Counter[int]], m: int) -> Iterable[str]:
    for kind, counter in counts.items():
        for work, times in counter.items():
            if times > 1:
                stage, microbatch = divmod(work, m)
                yield f"{stage}{kind}{microbatch} appears {times} times"


def _missing(schedule: Schedule, counts: Mapping[str, Counter[int]]) -> Iterable[str]:
    m = schedule.n_microbatches
    microbatches = {work % m for counter in counts.values() for work in counter}
    if not microbatches:
        yield "there are no actions"
    elif len(microbatches) < m:
        absent = next(number for number in count() if number not in microbatches)
        yield (
            f"microbatch {absent} does not appear, yet {max(microbatches)} does: number them from 0"
            " without gaps"
        )
    expected: set[int] = set()
    for stage in range(schedule.n_stages):
        expected.update(stage * m + microbatch for microbatch in microbatches)

    def missing(kind: str, work: int) -> str:
        stage, microbatch = divmod(work, m)
        rank = schedule.rank_of(stage, microbatch)
        return f"{stage}{kind}{microbatch} is missing from rank {rank}"

    for work in sorted(expected - counts["F"].keys()):
        yield missing("F", work)
    if not any(counts[kind] for kind in "BIWU"):
        return
    whole, inputs, weights = (counts[kind].keys() for kind in "BIW")
    right = (whole - inputs - weights) | ((inputs & weights) - whole)
    for work in sorted(expected - right):
        if work in whole:
            stage, i = divmod(work, m)
            half = "W" if work in weights else "I"
            yield f"{stage}B{i} is the whole backward, yet there is {stage}{half}{i} too"
        elif work in inputs:
            yield missing("W", work)
        elif work in weights:
            yield missing("I", work)
        else:
            yield missing("B", work)


_Place = tuple[int, int]
"""A rank, and the place of an action in its order."""


def _problems_of_order(graph: Precedence) -> list[str]:
    schedule, dependencies = graph.schedule, graph.dependencies
    makers: dict[int, _Place] = {}
    for rank, row in enumerate(schedule.actions):
        for place, action in enumerate(row):
            makers.update(dict.fromkeys(dependencies.made_by(action), (rank, place)))

    def needed(rank: int, place: int) -> list[_Place]:
        action = schedule.actions[rank][place]
        return [makers[product] for product in dependencies.needed_by(action)]

    return [*_out_of_order(schedule, needed), *_cycles(schedule, graph.stuck, needed)]


def _out_of_order(schedule: Schedule, needed: Callable[[int, int], list[_Place]]) -> Iterable[str]:
    """Yield each action that its own rank does before another that it needs."""
    for rank, row in enumerate(schedule.actions):
        for place, action in enumerate(row):
            for maker, needed_place in needed(rank, place):
                if (maker, needed_place) == (rank, place):
                    yield (
                        f"rank {rank} runs {action} as one, but its backward needs its forward to"
                        " be done"
                    )
                elif maker == rank and needed_place > place:
                    yield f"rank {rank} has {action} before {row[needed_place]}, which it needs"


def _cycles(
    schedule: Schedule, stuck: Mapping[int, int], needed: Callable[[int, int], list[_Place]]
) -> Iterable[str]:
    """Yield the problem of each cycle of ranks that wait for one another.

    From any stuck rank, waits lead into a cycle.
    """
    waits_for: dict[int, _Place] = {}
    for rank, place in stuck.items():
        for maker, needed_place in needed(rank, place):
            is_done = maker not in stuck or needed_place < stuck[maker]
            if not is_done:
                waits_for[rank] = (maker, needed_place)
                break
    left = {rank: (waits_for[rank][0],) for rank in sorted(stuck)}
    while cycle := find_cycle(left):
        left = {rank: peers for rank, peers in left.items() if rank not in cycle}
        # One rank that waits for itself is out of order and reported as that.
        if len(cycle) == 1:
            continue
        steps = []
        for rank in cycle:
            maker, place = waits_for[rank]
            steps.append(
                f"rank {rank} cannot start {schedule.actions[rank][stuck[rank]]} until rank"
                f" {maker} has done {schedule.actions[maker][place]}"
            )
        circle = " → ".join(map(str, [*cycle, cycle[0]]))
        yield f"deadlock, ranks {circle} wait in a circle: {'; '.join(steps)}"
