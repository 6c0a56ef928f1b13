"""From the spans of a run to a few numbers: what stages cost, how slow ranks are, how long messages and launches take.

Every number is a median, so that a single hiccup does not enter it.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_low
from typing import NamedTuple

from course_pp.schedule.action import Product, Receive, Span
from course_pp.schedule.costs import Costs
from course_pp.schedule.legality import check
from course_pp.schedule.precedence import Link, Precedence
from course_pp.schedule.schedule import Schedule, implied_placement
from course_pp.schedule.timeline import Timeline

_Values = Mapping[tuple[str, int], float]
"""For a kind of action and a stage, a time."""

_ENOUGH = 5


class Group(NamedTuple):
    """Actions that should take equally long: same rank, kinds and stages (two of each for an overlapped pair)."""

    rank: int
    kinds: str
    stages: tuple[int, ...]


@dataclass(frozen=True)
class Work:
    """How long actions take.

    Attributes:
        slowdown: for each rank, how many times as long it takes for the same work as the median rank.
        per_group: the time of each group, if its rank were as fast as the median rank.
        at_median_speed: the same, for each action.
        balanced: the same, if also each kind of action took equally long in all stages, with as much work in all.
    """

    slowdown: tuple[float, ...]
    per_group: Mapping[Group, float]
    at_median_speed: tuple[float, ...]
    balanced: tuple[float, ...]


@dataclass(frozen=True)
class Waits:
    """What lies between one action and the next.

    Attributes:
        launch: for each rank, the time from when its own order and its inputs allow an action until the action starts.
        links: for two ranks, how long a message between them is on its way.
    """

    launch: tuple[float, ...]
    links: Mapping[Link, float]


@dataclass(frozen=True)
class MeasuredStep(Precedence):
    """What had to wait for what in a step that was run.

    Attributes:
        spans: the actions with their measured times.
    """

    spans: tuple[Span, ...]

    @classmethod
    def read_off(cls, tl: Timeline) -> "MeasuredStep":
        """Raises ValueError where :func:`schedule_of` does."""
        graph = Precedence.of(schedule_of(tl))
        return cls(**vars(graph), spans=tuple(tl.by_rank[rank][place] for rank, place in graph.places))


def schedule_of(tl: Timeline) -> Schedule:
    """Return the schedule that was run: each rank's order, and the placement that it implies.

    Raises:
        ValueError: for a timeline without spans, of several steps, or that lacks actions.
    """
    if not tl.spans:
        raise ValueError(f"{tl!r} has no spans: record a step first")
    seen = set()
    for action in tl.actions:
        if action in seen:
            raise ValueError(
                f"{action} was done more than once, so {tl!r} has several steps: give one, "
                "with clear() of the recorder before it"
            )
        seen.add(action)
    rows = tuple(tuple(span.action for span in row) for row in tl.by_rank)
    found = implied_placement(rows)
    missing = next((stage for stage in range(tl.n_stages) if stage not in found), None)
    if missing is not None:
        raise ValueError(f"{tl!r} has nothing of stage {missing}: give a timeline of all ranks")
    schedule = Schedule(tl.name, tuple(found[stage] for stage in range(tl.n_stages)), rows, tl.edges, tl.feedback)
    if problems := check(schedule):
        raise ValueError(f"{tl!r} is not one whole step: {problems[0]}; record all of one step on every rank")
    return schedule


def _group_of(span: Span) -> Group:
    parts = span.action.parts
    return Group(span.rank, "".join(part.kind for part in parts), tuple(part.stage for part in parts))


def estimate_work(graph: MeasuredStep, expected: Costs) -> Work:
    """Tell slow ranks from large stages, as far as ``expected`` and stages that share a rank tell them apart.

    The slowdown of a rank is its work over the expected work of its stages, each kind of action in its own unit of
    time. What remains is due to the stages.
    """
    durations = defaultdict(list)
    groups = [_group_of(span) for span in graph.spans]
    for span, group in zip(graph.spans, groups, strict=True):
        durations[group].append(float(span.duration))
    measured = {group: median(times) for group, times in durations.items()}
    many = {group: len(times) for group, times in durations.items()}
    slowdown = _slowdown(graph, measured, many, expected)
    alone = {group: time / slowdown[group.rank] for group, time in measured.items()}
    mean = {}
    for kinds in {group.kinds for group in alone}:
        same = [group for group in alone if group.kinds == kinds]
        mean[kinds] = sum(many[group] * alone[group] for group in same) / sum(many[group] for group in same)
    return Work(slowdown, alone, tuple(alone[group] for group in groups), tuple(mean[group.kinds] for group in groups))


def _slowdown(
    graph: MeasuredStep, measured: Mapping[Group, float], many: Mapping[Group, int], expected: Costs
) -> tuple[float, ...]:
    per_kind = expected.durations(graph.schedule.n_stages)

    def units(group: Group) -> float:
        return float(sum(per_kind[kind][stage] for kind, stage in zip(group.kinds, group.stages, strict=True)))

    rates = defaultdict(list)
    for group, time in measured.items():
        if units(group):
            rates[group.kinds].append(time / units(group))
    took, should_take = [0.0] * graph.schedule.n_ranks, [0.0] * graph.schedule.n_ranks
    for group, time in measured.items():
        if units(group):
            took[group.rank] += many[group] * time
            should_take[group.rank] += many[group] * units(group) * median(rates[group.kinds])
    ratios = [a / b if a and b else None for a, b in zip(took, should_take, strict=True)]
    # Of two ranks the faster one is the measure.
    usual = median_low([ratio for ratio in ratios if ratio is not None] or [1.0])
    return tuple(1.0 if ratio is None else ratio / usual for ratio in ratios)


def estimate_waits(graph: MeasuredStep, receives: Iterable[Receive]) -> Waits:
    """Tell message times from launch times: a message shows where a rank had nothing to do but wait for it.

    If a value was made after its receiver became free, the receiver waited for it: it was on its way until the receive
    ended, or until the consumer was launched. If it had arrived before, the rest of the gap is launching, and its link
    is known only to be no slower. Both directions of a link count together, as an activation and its gradient are of
    one size, and often only one of the two is ever waited for.
    """
    waited = {(each.rank, each.product): float(each.end) for each in receives}
    longest = _longest_possible(graph)
    links, launch = longest, (0.0,) * graph.schedule.n_ranks
    # Which message comes last, and which is sure to have come in time, depends on what is being estimated.
    for _ in range(3):
        launch = _launches(graph, links)
        links = _transfers(graph, waited, launch, links, longest)
    return Waits(launch, links)


def _longest_possible(graph: MeasuredStep) -> dict[Link, float]:
    """Return for each link the least time from the end of a product until it is used."""
    longest: dict[Link, float] = {}
    for number, span in enumerate(graph.spans):
        for product in graph.received[number]:
            link, time = graph.link(number, product), max(0.0, float(span.start) - _made(graph, product))
            longest[link] = min(time, longest.get(link, time))
    return longest


def _made(graph: MeasuredStep, product: int) -> float:
    return float(graph.spans[graph.makers[product]].end)


def _free_from(graph: MeasuredStep, number: int) -> float:
    before = graph.before[number]
    return 0.0 if before is None else float(graph.spans[before].end)


def _last(graph: MeasuredStep, number: int, links: Mapping[Link, float]) -> tuple[float, int]:
    """Return when the last of the products that an action receives arrives, and which it is."""
    arrivals = [(_made(graph, each) + links[graph.link(number, each)], each) for each in graph.received[number]]
    return max(arrivals, key=lambda arrival: arrival[0])


def _launches(graph: MeasuredStep, links: Mapping[Link, float]) -> tuple[float, ...]:
    """Return for each rank the median gap before actions that waited for no message; of all ranks, if it has few."""
    gaps: list[list[float]] = [[] for _ in range(graph.schedule.n_ranks)]
    for number, span in enumerate(graph.spans):
        free = _free_from(graph, number)
        waits = bool(graph.received[number]) and _last(graph, number, links)[0] > free
        if not waits and not graph.opens(number):
            gaps[span.rank].append(float(span.start) - free)
    usual = median([gap for row in gaps for gap in row] or [0.0])
    return tuple(median(row) if len(row) >= _ENOUGH else usual for row in gaps)


def _transfers(
    graph: MeasuredStep,
    waited: Mapping[tuple[int, Product], float],
    launch: Sequence[float],
    links: Mapping[Link, float],
    longest: Mapping[Link, float],
) -> dict[Link, float]:
    """Return for each link the median over messages that were waited for; without any, what is usual and possible.

    Args:
        waited: for a rank and what it received, when that was there.
    """
    times = defaultdict(list)
    for number, span in enumerate(graph.spans):
        if not graph.received[number]:
            continue
        _, last = _last(graph, number, links)
        made = _made(graph, last)
        if made >= _free_from(graph, number):
            arrived = waited.get((span.rank, graph.dependencies.describe(last)), float(span.start) - launch[span.rank])
            times[graph.link(number, last)].append(max(0.0, arrived - made))
    known = {link: median(values) for link, values in times.items()}
    usual = median(known.values()) if known else 0.0
    return {link: known.get(link, min(usual, longest[link])) for link in links}


def costs_of(graph: MeasuredStep, work: Work, links: Mapping[Link, float]) -> Costs:
    """Return the times of actions at the median speed, stage by stage, and of messages, boundary by boundary.

    Where only whole backwards were measured, half of each counts as input gradient: they do not tell the halves apart.
    """
    n_stages = graph.schedule.n_stages
    alone, pairs = _per_stage(work.per_group)
    forward = _filled(alone, "F", n_stages)
    whole, inputs, weights = (_filled(alone, kind, n_stages) for kind in "BIW")
    split = [("I", stage) in alone for stage in range(n_stages)]
    overlapped = [pairs.get(("F", s), forward[s] + (whole[s] or inputs[s] + weights[s])) for s in range(n_stages)]
    latency, edge_latency = _latencies(graph, links)
    return Costs(
        forward=forward,
        input_grad=[inputs[s] if split[s] else whole[s] / 2 for s in range(n_stages)],
        weight_grad=[weights[s] if split[s] else whole[s] / 2 for s in range(n_stages)],
        overlapped=overlapped if pairs else None,
        update=_filled(alone, "U", n_stages),
        latency=latency,
        edge_latency=edge_latency,
    )


def _per_stage(times: Mapping[Group, float]) -> tuple[_Values, _Values]:
    """Return the time of each kind of action in each stage, and of each overlapped pair by the stage of its forward.

    A kind that never came alone gets half of its pair.
    """
    alone, shared, pairs = defaultdict(list), defaultdict(list), defaultdict(list)
    for group, time in times.items():
        if len(group.stages) == 1:
            alone[group.kinds, group.stages[0]].append(time)
            continue
        pairs["F", group.stages[0]].append(time)
        for key in zip(group.kinds, group.stages, strict=True):
            shared[key].append(time / 2)
    return (
        {key: median(values) for key, values in (shared | alone).items()},
        {key: median(values) for key, values in pairs.items()},
    )


def _filled(times: _Values, kind: str, n_stages: int) -> tuple[float, ...]:
    return tuple(times.get((kind, stage), 0.0) for stage in range(n_stages))


def _latencies(graph: MeasuredStep, links: Mapping[Link, float]) -> tuple[tuple[float, ...], float | None]:
    """Return the mean over the messages of each boundary, and over those of edges; None if there are no edges.

    Replicas of a stage may have different links.
    """
    crossing: list[list[float]] = [[] for _ in range(graph.schedule.n_stages - 1)]
    of_edges = []
    for number, received in enumerate(graph.received):
        for each in received:
            product, time = graph.dependencies.describe(each), links[graph.link(number, each)]
            if product.what in ("activation", "gradient"):
                crossing[product.stage - (product.what == "gradient")].append(time)
            elif product.name:
                of_edges.append(time)
    means = tuple(sum(times) / len(times) if times else 0.0 for times in crossing)
    return means, sum(of_edges) / len(of_edges) if of_edges else None
