"""From an order of actions to times: each action starts as early as its rank and inputs allow."""

from collections.abc import Sequence

from course_pp.base.arguments import checked
from course_pp.schedule.action import Action, Overlap, Span, Time
from course_pp.schedule.costs import Costs
from course_pp.schedule.legality import precedence_or_problems
from course_pp.schedule.schedule import Schedule
from course_pp.schedule.timeline import Timeline


@checked
def simulate(
    schedule: Schedule,
    costs: Costs | None = None,
    durations: Sequence[Sequence[Time]] | None = None,
) -> Timeline:
    """Return when each rank does what, if every action starts as soon as it can.

    Sends are buffered: a rank hands its message over and goes on, and the message arrives a
    transfer later. With integer or fractional costs every number is exact. A value that crosses an
    edge is one message for each rank that reads it, and one more for its gradient.

    Args:
        costs: by default one unit for each of ``F``, ``I`` and ``W``, and no latency.
        durations: the time of each action, rank by rank, where it does not follow from the stage;
            ``costs`` then counts for messages alone.

    Raises:
        ValueError: for a schedule that cannot run, with what :func:`course_pp.schedule.check` says
            about it, and for costs that do not fit its number of stages.
    """
    if costs is None:
        costs = Costs()
    if durations is not None:
        n_actions = [len(row) for row in schedule.actions]
        if [len(row) for row in durations] != n_actions:
            raise ValueError(
                "durations do not fit the schedule: give one number for each action, rank by rank"
            )
    graph, problems = precedence_or_problems(schedule)
    if graph is None:
        more = f" (and {len(problems) - 1} more problems)" if len(problems) > 1 else ""
        raise ValueError(f"{schedule!r} cannot run: {problems[0]}{more}")

    transfers = costs.transfers(schedule.n_stages)
    edge_transfers = costs.edge_transfers(schedule.edges, schedule.n_stages)
    token_transfer = costs.token_transfer(schedule.n_stages) if schedule.feedback else 0
    travel = graph.dependencies.travel_times(transfers, edge_transfers, token_transfer)
    if durations is None:
        durations = durations_of(schedule, costs)
    times = graph.run(
        [durations[rank][place] for rank, place in graph.places],
        lambda _, product: travel[product // schedule.n_microbatches],
    )

    spans = []
    for (rank, place), start, end in zip(graph.places, times.ready, times.ends, strict=True):
        spans.append(Span(rank, schedule.actions[rank][place], start, end))
    return Timeline(
        schedule.n_ranks,
        tuple(spans),
        transfers=transfers,
        edges=schedule.edges,
        edge_transfers=edge_transfers,
        feedback=schedule.feedback,
        token_transfer=token_transfer,
        name=schedule.name,
    )


def durations_of(schedule: Schedule, costs: Costs) -> list[list[Time]]:
    """Return the time of each action, rank by rank."""
    times = costs.durations(schedule.n_stages)
    pairs = None if costs.overlapped is None else costs.each("overlapped", schedule.n_stages)

    def duration(action: Action | Overlap) -> Time:
        if type(action) is Action:
            return times[action.kind][action.stage]
        if pairs is not None:
            return pairs[action.parts[0].stage]
        return sum(times[part.kind][part.stage] for part in action.parts)

    return [list(map(duration, row)) for row in schedule.actions]
