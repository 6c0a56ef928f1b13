"""Timelines small enough to check by hand, laid out by the shortest loops that give them."""

from course_pp.schedule import Action, Span, Time, Timeline


def naive(n_ranks: int, forward: Time = 1, backward: Time = 2, unit: str = "") -> Timeline:
    """One microbatch down the ranks and back: one rank works at a time."""
    spans, clock = [], 0 * forward
    for kind, cost, ranks in (
        ("F", forward, range(n_ranks)),
        ("B", backward, range(n_ranks)[::-1]),
    ):
        for rank in ranks:
            spans.append(Span(rank, Action(rank, kind, 0), clock, clock + cost))
            clock += cost
    return Timeline(n_ranks, tuple(spans), unit)


def gpipe(
    n_ranks: int, n_microbatches: int, forward: Time = 1, backward: Time = 2, latency: Time = 0
) -> Timeline:
    """All forwards, then all backwards, each as early as its inputs and its rank allow."""
    spans, free = [], [0 * forward] * n_ranks
    arrival: dict[tuple[str, int, int], Time] = {}
    for kind, cost, step in (("F", forward, 1), ("B", backward, -1)):
        for microbatch in range(n_microbatches):
            for rank in range(n_ranks)[::step]:
                start = max(free[rank], arrival.get((kind, rank - step, microbatch), 0))
                free[rank] = start + cost
                arrival[kind, rank, microbatch] = free[rank] + latency
                spans.append(Span(rank, Action(rank, kind, microbatch), start, free[rank]))
    return Timeline(n_ranks, tuple(spans))
