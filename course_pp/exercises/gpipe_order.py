"""An exercise of notebook 02: all forwards, then all backwards, as an order of actions."""

from __future__ import annotations

from course_pp.exercises.answer import Answer
from course_pp.exercises.exercise import Mistake
from course_pp.exercises.expect import expect_list
from course_pp.schedule import Action, Costs, Gap, Schedule, Timeline, build, check, simulate

__all__ = ["afab_order", "grade_afab_order"]

_UNITS = Costs(1, 1, 1)


def afab_order(p: int, m: int) -> list[list[Action]]:
    """For each of p ranks its actions in order: all m forwards, then all m backwards."""
    rows = []
    for rank in range(p):
        forwards = [Action(rank, "F", i) for i in range(m)]
        backwards = [Action(rank, "B", i) for i in range(m)]
        rows.append(forwards + backwards)
    return rows


def grade_afab_order(answer: Answer) -> None:
    cases = [(1, 1), (2, 1), (2, 3), (3, 2), (4, 8), (1, 4), (6, 5)]
    for (p, m), rows in zip(cases, answer.calls(cases), strict=True):
        _grade_order(rows, p, m)


def _grade_order(rows: object, p: int, m: int) -> None:
    call = f"`afab_order({p}, {m})`"
    schedule = _as_schedule(rows, p, call)
    _refuse_if_it_cannot_run(schedule, m, call)
    for rank, row in enumerate(schedule.actions):
        kinds = [action.parts[0].kind for action in row]
        late = next((i for i in range(1, len(row)) if kinds[i] == "F" and kinds[i - 1] != "F"), None)
        if late is not None:
            raise Mistake(
                f"{call} can run, but rank {rank} does {row[late - 1]} before {row[late]}.",
                "GPipe does all forwards before the first backward.",
                f"rank {rank}: {' '.join(map(str, row))}",
            )
    timeline, shortest = simulate(schedule, _UNITS), 3 * (m + p - 1)
    if timeline.makespan > shortest:
        gap = _needless_gap(timeline, simulate(build("gpipe", p, m), _UNITS))
        raise Mistake(
            f"{call} can run, but takes {timeline.makespan} units of time; {shortest} are enough (F takes 1, B 2).",
            "The ranks take the microbatches in different orders, so one waits for what another does late.",
            f"rank {gap.rank} idles from {gap.start} to {gap.end}: {gap.cause}",
        )


def _needless_gap(timeline: Timeline, shortest: Timeline) -> Gap:
    """The longest gap of the rank that waits longest for what it would not wait for in the shortest timeline."""

    def waited(of: Timeline, rank: int) -> float:
        done = max(span.end for span in of.by_rank[rank])
        return sum(float(gap.end - gap.start) for gap in of.idle_gaps if gap.rank == rank and gap.start < done)

    # Of ranks that wait equally long, those before the last wait because it does.
    rank = max(range(timeline.n_ranks), key=lambda rank: (waited(timeline, rank) - waited(shortest, rank), rank))
    return max((gap for gap in timeline.idle_gaps if gap.rank == rank), key=lambda gap: gap.end - gap.start)


def _as_schedule(rows: object, p: int, call: str) -> Schedule:
    rows = expect_list(rows, call.strip("`"))
    if any(isinstance(row, Action) for row in rows):
        raise Mistake(f"{call} gave one list of actions.", "Return a list with one such list for each rank.")
    if len(rows) != p:
        lists, ranks = (f"{n} {word}{'s' * (n != 1)}" for n, word in ((len(rows), "list"), (p, "rank")))
        raise Mistake(f"{call} gave {lists} for {ranks}.", "Each rank has one list.")
    for rank, row in enumerate(rows):
        if not isinstance(row, list | tuple) or not all(isinstance(action, Action) for action in row):
            cause = 'Write a list of actions such as `Action(rank, "F", 0)`.'
            raise Mistake(f"{call} has something else than actions for rank {rank}.", cause, f"{row!r:.200}")
    return Schedule("afab", tuple((rank,) for rank in range(p)), tuple(map(tuple, rows)))


def _refuse_if_it_cannot_run(schedule: Schedule, m: int, call: str) -> None:
    parts = list(schedule.parts)
    stages, microbatches = {part.stage for part in parts}, {part.microbatch for part in parts}
    if schedule.n_ranks != m and (stages, microbatches) == (set(range(m)), set(range(schedule.n_ranks))):
        raise Mistake(
            f"{call} has {schedule.n_microbatches} microbatches instead of {m}.",
            "Stage and microbatch have changed places: `Action(stage, kind, microbatch)`.",
            f"rank 0: {' '.join(map(str, schedule.actions[0]))}",
        )
    if strange := next((part for part in parts if not 0 <= part.microbatch < m), None):
        cause = f"m is {m}: number them from 0 to {m - 1}."
        raise Mistake(f"{call} has `{strange}`, a microbatch that does not exist.", cause)
    if all(part.kind == "F" for part in parts):
        raise Mistake(f"{call} has no backward.", 'After all forwards come all backwards, as `Action(rank, "B", i)`.')
    if other := next((part for part in parts if part.kind not in "FB"), None):
        cause = "`I` and `W` are the halves of a backward, for schedules that part them. Here it is whole: `B`."
        raise Mistake(f"{call} has `{other}`, which is no forward and no backward.", cause)
    if problems := check(schedule):
        cause = "Every rank does the forward and the backward of each microbatch, 0 to m - 1, in its own stage."
        raise Mistake(f"{call} cannot run: {problems[0]}.", cause, "\n".join(problems[1:4]))
    if schedule.n_microbatches != m:
        raise Mistake(f"{call} has {schedule.n_microbatches} microbatches.", f"m is {m}: number them 0 to {m - 1}.")
