"""Can a schedule run? And if not, why not."""

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
    """Return everything that keeps ``schedule`` from running, each problem in a sentence; empty if
    it can run.

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
    """Return who waits for whom in a schedule that can run, or else what keeps it from running."""
    if problems := problems_of_bookkeeping(schedule):
        return None, problems
    graph = Precedence.of(schedule)
    return (None, _problems_of_order(graph)) if graph.stuck else (graph, [])


def problems_of_bookkeeping(schedule: Schedule) -> list[str]:
    """Return problems that show without a run: missing, repeated or misplaced actions, and impossible edges."""
    problems = [*_misplaced(schedule), *_repeated_or_missing(schedule)]
    if schedule.feedback and any(part.kind != "F" for part in schedule.parts):
        problems.append(
            "tokens feed back to the first stage, yet there are backwards: generation is forward"
            " only"
        )
    return [*problems, *problems_of_edges(schedule.edges, schedule.n_stages)]


def _misplaced(schedule: Schedule) -> Iterable[str]:
    placement, n_stages = schedule.placement, schedule.n_stages
    for rank, row in enumerate(schedule.actions):
        for action in row:
            for part in action.parts:
                if part.stage >= n_stages:
                    yield f"rank {rank} has {part}, but the stages are 0 to {n_stages - 1}"
                elif (
                    placement[part.stage] != (rank,)
                    and schedule.rank_of(part.stage, part.microbatch) != rank
                ):
                    owner = schedule.rank_of(part.stage, part.microbatch)
                    yield f"rank {rank} has {part}, which belongs to rank {owner} by the placement"


def _repeated_or_missing(schedule: Schedule) -> Iterable[str]:
    # One number for stage and microbatch, as a hundred thousand pairs keep the garbage collector
    # busy.
    m = schedule.n_microbatches

    def missing(kind: str, work: int) -> str:
        stage, microbatch = divmod(work, m)
        return (
            f"{stage}{kind}{microbatch} is missing from rank {schedule.rank_of(stage, microbatch)}"
        )

    done: dict[str, list[int]] = {kind: [] for kind in KINDS}
    for part in schedule.parts:
        done[part.kind].append(part.stage * m + part.microbatch)
    counts = {kind: Counter(works) for kind, works in done.items()}
    for kind, counter in counts.items():
        if len(counter) < len(done[kind]):
            for work, times in counter.items():
                if times > 1:
                    yield f"{work // m}{kind}{work % m} appears {times} times"
    microbatches = {work % m for counter in counts.values() for work in counter}
    if not microbatches:
        yield "there are no actions"
    elif len(microbatches) < m:
        absent = next(number for number in count() if number not in microbatches)
        yield (
            f"microbatch {absent} does not appear, yet {max(microbatches)} does: number them from 0"
            " without gaps"
        )
    expected = {
        stage * m + microbatch for stage in range(schedule.n_stages) for microbatch in microbatches
    }
    forward, whole, inputs, weights = (counts[kind].keys() for kind in "FBIW")
    for work in sorted(expected - forward):
        yield missing("F", work)
    if any(done[kind] for kind in "BIWU"):
        right = (whole - inputs - weights) | ((inputs & weights) - whole)
        for work in sorted(expected - right):
            kinds = {kind for kind in "BIW" if work in counts[kind]}
            if "B" in kinds:
                (s, i), half = divmod(work, m), max(kinds - {"B"})
                yield f"{s}B{i} is the whole backward, yet there is {s}{half}{i} too"
            else:
                yield missing(min({"I", "W"} - kinds) if kinds else "B", work)


def _problems_of_order(graph: Precedence) -> list[str]:
    schedule, dependencies = graph.schedule, graph.dependencies
    places = {
        product: (rank, index)
        for rank, row in enumerate(schedule.actions)
        for index, action in enumerate(row)
        for product in dependencies.made_by(action)
    }

    def needed(rank: int, index: int) -> list[tuple[int, int]]:
        return [
            places[product] for product in dependencies.needed_by(schedule.actions[rank][index])
        ]

    return [*_out_of_order(schedule, needed), *_cycles(schedule, graph.stuck, needed)]


def _out_of_order(
    schedule: Schedule, needed: Callable[[int, int], list[tuple[int, int]]]
) -> Iterable[str]:
    for rank, row in enumerate(schedule.actions):
        for index, action in enumerate(row):
            for maker, place in needed(rank, index):
                if maker == rank and place == index:
                    yield (
                        f"rank {rank} runs {action} as one, but its backward needs its forward to"
                        " be done"
                    )
                elif maker == rank and place > index:
                    yield f"rank {rank} has {action} before {row[place]}, which it needs"


def _cycles(
    schedule: Schedule,
    stuck: Mapping[int, int],
    needed: Callable[[int, int], list[tuple[int, int]]],
) -> Iterable[str]:
    """Yield the problem of each cycle of ranks that wait for one another. From any stuck rank, waits lead into one."""
    waits_for = {
        rank: next(
            (m, place) for m, place in needed(rank, index) if place >= stuck.get(m, place + 1)
        )
        for rank, index in stuck.items()
    }
    left = {rank: (waits_for[rank][0],) for rank in sorted(stuck)}
    while cycle := find_cycle(left):
        left = {rank: peers for rank, peers in left.items() if rank not in cycle}
        # One rank that waits for itself is out of order and reported as that.
        if len(cycle) > 1:
            steps = "; ".join(
                f"rank {r} cannot start {schedule.actions[r][stuck[r]]} until rank {maker} has done"
                f" {schedule.actions[maker][place]}"
                for r, (maker, place) in ((r, waits_for[r]) for r in cycle)
            )
            yield (
                f"deadlock, ranks {' → '.join(map(str, [*cycle, cycle[0]]))} wait in a circle:"
                f" {steps}"
            )
