"""Why a run took as long as it did: from a measured timeline to costs, and from costs to causes.

Every estimate is a median, so that a single hiccup does not change it.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from math import comb
from statistics import median, median_low
from typing import NamedTuple

from course_pp.base.arguments import checked
from course_pp.schedule.action import Product, Receive, Span, format_time
from course_pp.schedule.costs import Costs
from course_pp.schedule.legality import check
from course_pp.schedule.precedence import Link, Precedence, Times
from course_pp.schedule.schedule import Schedule, implied_placement
from course_pp.schedule.timeline import Timeline

CAUSES = ("imbalance", "transfer", "launch", "straggler")
"""The causes that a simulation can take away. Time that they do not explain is called ``rest``."""

# Shares of the makespan. A smaller loss gets no sentence, or no place in the table.
_WORTH_SAYING = 0.01
_WORTH_A_PLACE = 0.001
# The table has one row a rank. A table of hundreds would hide the findings below it.
_ROWS = 16
# A median of fewer gaps than this on one rank says little.
_ENOUGH = 5


@dataclass(frozen=True)
class Loss:
    """The time that one cause adds to the makespan, and the places where it arises.

    Attributes:
        cause: one of :data:`CAUSES`, or ``rest``.
        time: the time by which the run is longer because of the cause, in the timeline's unit. It
            is negative if the run is shorter.
        per_rank: the part of ``time`` that arises on each rank. Waiting for a message counts on
            the rank that receives it.
        per_link: the part of ``time`` that arises on each link; empty unless the cause is
            ``transfer``.
    """

    cause: str
    time: float
    per_rank: tuple[float, ...]
    per_link: Mapping[Link, float]

    @property
    def where(self) -> Link | int | None:
        """The link, or else the rank, with the largest part; None if nothing is lost."""
        parts: dict[Link | int, float] = dict(self.per_link) or dict(enumerate(self.per_rank))
        worst = max(parts, key=parts.__getitem__)
        return worst if parts[worst] > 0 else None


@dataclass(frozen=True, repr=False)
class Fit:
    """The costs of stages, ranks and links, as a measured timeline shows them. Prints as a table.

    Attributes:
        predicted: the run simulated with the fitted times.
        ideal: the same orders simulated with equal stages, with all ranks as fast as the median
            rank, and with neither transfers nor launches. Its bubble is the bubble of the schedule
            itself.
        costs: costs of the stages at the speed of the median rank, and of the messages, in the
            timeline's unit.
        slowdown: each rank's time for the expected work of its stages, divided by the time of the
            median rank. With an even number of ranks, the lower of the two in the middle is the
            median.
        links: {pair of ranks: time that a message is on its way between them}.
        launch: each rank's launch time. It begins when the rank's own order and its inputs allow
            an action, and it ends when the action starts.
        lost: the loss to each cause, largest first. The losses add up to exactly ``total_lost``.
    """

    measured: Timeline
    predicted: Timeline
    ideal: Timeline
    costs: Costs
    slowdown: tuple[float, ...]
    links: Mapping[Link, float]
    launch: tuple[float, ...]
    lost: tuple[Loss, ...]

    @property
    def total_lost(self) -> float:
        """The time by which the measured run is longer than the ideal one."""
        return float(self.measured.makespan - self.ideal.makespan)

    @checked
    def lost_to(self, cause: str) -> Loss:
        for loss in self.lost:
            if loss.cause == cause:
                return loss
        raise ValueError(f"unknown cause {cause!r}: use one of {', '.join(CAUSES)} or rest")

    @cached_property
    def findings(self) -> tuple[str, ...]:
        """A sentence on each cause that costs a hundredth of the makespan, largest first."""
        whole = float(self.measured.makespan)
        said = []
        for loss in self.lost:
            if loss.time >= _WORTH_SAYING * whole > 0:
                share = self._share(loss.time)
                said.append(
                    f"{self._what(loss)}: {self._time(loss.time)}, {share:.1%} of the makespan."
                )
        return tuple(said) or ("No cause costs a hundredth of the makespan.",)

    def __repr__(self) -> str:
        tl = self.measured
        measured, predicted, ideal = (
            self._time(float(each.makespan)) for each in (tl, self.predicted, self.ideal)
        )
        rows = [
            f"{tl.name or 'run'} on {tl.n_ranks} ranks: {tl.how} {measured}, predicted {predicted},"
            f" ideal {ideal}",
            f"{'lost to':<12}{'time':>10}{'makespan':>10}   most of it on",
        ]
        for loss in self.lost:
            share = self._share(loss.time)
            where = ""
            if loss.where is not None and share >= _WORTH_A_PLACE:
                where = name_of(loss.where)
            row = f"{loss.cause:<12}{self._time(loss.time):>10}{share:>10.1%}   {where}"
            rows.append(row.rstrip())
        total = self.total_lost
        rows.append(f"{'together':<12}{self._time(total):>10}{self._share(total):>10.1%}")
        rows.append("")

        causes = "".join(f"{loss.cause:>11}" for loss in self.lost)
        rows.append(f"{'rank':>4}{'slowdown':>10}{'launch':>10}{causes}")
        for rank in range(min(tl.n_ranks, _ROWS)):
            slowdown = self.slowdown[rank]
            launch = self._time(self.launch[rank])
            parts = "".join(f"{self._time(loss.per_rank[rank]):>11}" for loss in self.lost)
            rows.append(f"{rank:>4}{slowdown:>10.2f}{launch:>10}{parts}")
        if tl.n_ranks > _ROWS:
            rows.append(f"   … and {tl.n_ranks - _ROWS} more ranks")
        return "\n".join([*rows, "", *self.findings])

    def _share(self, time: float) -> float:
        """Return ``time`` as a share of the makespan; 0 for a share that prints as -0.0%."""
        share = time / (float(self.measured.makespan) or 1)
        return share if abs(share) >= 0.0005 else 0.0

    def _time(self, time: float) -> str:
        """Return a time as text, with a minus sign if needed; a rounding error counts as 0."""
        rounded = 0.0 if abs(time) < 1e-9 * float(self.measured.makespan) else time
        sign = "-" if rounded < 0 else ""
        return sign + format_time(abs(rounded), self.measured.unit)

    def _what(self, loss: Loss) -> str:
        where = loss.where
        if loss.cause == "transfer" and isinstance(where, tuple):
            each, usual = self.links[where], median(self.links.values())
            return (
                f"Messages cost most on {name_of(where)}, {self._time(each)} each (median"
                f" {self._time(usual)})"
            )
        assert isinstance(where, int)  # something is lost, and only messages travel over links
        return {
            "straggler": (
                f"Rank {where} is a straggler, its work takes {self.slowdown[where]:.2f} times as"
                " long"
            ),
            "launch": (
                f"Launching costs most on rank {where}, {self._time(self.launch[where])} an action"
            ),
            "imbalance": f"Stages differ, and those of rank {where} cost most",
            "rest": f"Times vary from action to action, most of all on rank {where}",
        }[loss.cause]


@checked
def fit(measured: Timeline, expected: Costs | None = None) -> Fit:
    """Estimate the costs of stages, ranks and links from one measured step, and the loss to each.

    Orders and placement are read off the spans. The time by which the measured makespan exceeds the
    ideal one is split among four causes:

    * imbalance: stages differ from one another as ``expected`` says, or as no slow rank could
        explain;
    * transfer: messages between ranks take time;
    * launch: an action starts later than its rank and inputs allow;
    * straggler: a rank takes longer than expected, compared with the median rank. The loss is below
        zero for a rank that takes less.

    The loss to each comes from simulations with and without it (see
    :func:`~course_pp.schedule.fitting.attribute`). The rest is the time by which the run was longer
    than predicted with all four; the jitter of a few microbatches is an example. Each loss is split
    further among the ranks and links where it arises.

    Args:
        measured: one whole step, for example from a recorder. Its receives are used if it has any.
        expected: the expected costs of the stages relative to one another, in any unit. Each kind
            of action is compared only with itself. All stages are equal unless given. If rank 3
            takes longer because it has the head of the model, only ``expected`` can tell this
            imbalance from a straggler.
    """
    graph = MeasuredStep.read_off(measured)
    work = estimate_work(graph, Costs() if expected is None else expected)
    waits = estimate_waits(graph, measured.receives)

    def lengths_with(causes: frozenset[str]) -> Lengths:
        times = work.at_median_speed if "imbalance" in causes else work.balanced
        actions = []
        for number, (span, time) in enumerate(zip(graph.spans, times, strict=True)):
            slowdown = work.slowdown[span.rank] if "straggler" in causes else 1.0
            launch = (
                waits.launch[span.rank] if "launch" in causes and not graph.opens(number) else 0.0
            )
            actions.append(time * slowdown + launch)
        return Lengths(
            actions, waits.links if "transfer" in causes else dict.fromkeys(waits.links, 0.0)
        )

    lost = attribute(graph, CAUSES, lengths_with)
    predicted = imagine(graph, lengths_with(frozenset(CAUSES)))
    # Imagine that every action ends when it did, and that messages take their usual time. Any
    # difference from the prediction is then due to single actions: the rest.
    ends, usual = [float(span.end) for span in graph.spans], graph.delays(waits.links)
    took = [end - float(graph.allowed(number, ends, usual)[0]) for number, end in enumerate(ends)]
    lost["rest"] = step(graph, predicted, imagine(graph, Lengths(took, waits.links)))
    losses = (_loss(cause, shares, measured.n_ranks) for cause, shares in lost.items())
    costs = costs_of(graph, work, waits.links)
    return Fit(
        measured=measured,
        predicted=_timeline(graph, predicted, waits.launch, costs, measured),
        ideal=_timeline(graph, imagine(graph, lengths_with(frozenset())), None, None, measured),
        costs=costs,
        slowdown=work.slowdown,
        links=waits.links,
        launch=waits.launch,
        # Rounded, so that causes that cost nothing but rounding errors keep their order.
        lost=tuple(
            sorted(losses, key=lambda loss: -round(loss.time / (float(measured.makespan) or 1), 9))
        ),
    )


class ActionGroup(NamedTuple):
    """Actions that should take equally long. An overlapped pair has two kinds and stages."""

    rank: int
    kinds: str
    stages: tuple[int, ...]


class Durations(NamedTuple):
    """The estimated times of actions.

    Attributes:
        slowdown: the field of :class:`Fit`.
        per_group: the time of each group, if its rank were as fast as the median rank.
        at_median_speed: the time of each action, if its rank were as fast as the median rank.
        balanced: the time of each action, if in addition each kind of action took equally long in
            all stages. The sum over all actions stays the same.
    """

    slowdown: tuple[float, ...]
    per_group: Mapping[ActionGroup, float]
    at_median_speed: tuple[float, ...]
    balanced: tuple[float, ...]


class Waits(NamedTuple):
    """The times between one action and the next: ``launch`` and ``links`` of :class:`Fit`."""

    launch: tuple[float, ...]
    links: Mapping[Link, float]


@dataclass(frozen=True)
class MeasuredStep(Precedence):
    """The precedence of the actions of a step that was run, with their measured times."""

    spans: tuple[Span, ...]

    @classmethod
    def read_off(cls, tl: Timeline) -> "MeasuredStep":
        """Return the step that a timeline shows."""
        graph = Precedence.of(schedule_of(tl))
        spans = tuple(tl.by_rank[rank][place] for rank, place in graph.places)
        return cls(**vars(graph), spans=spans)

    def made(self, product: int) -> float:
        """Return when the product was made."""
        return float(self.spans[self.makers[product]].end)

    def free_from(self, number: int) -> float:
        """Return when the rank of an action became free for it."""
        before = self.before[number]
        return 0.0 if before is None else float(self.spans[before].end)


def schedule_of(tl: Timeline) -> Schedule:
    """Return the schedule that was run: each rank's order, and the placement that it implies."""
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
    schedule = Schedule(tl.name, implied_placement(rows), rows, tl.edges, tl.feedback)
    if problems := check(schedule):
        raise ValueError(
            f"{tl!r} is not one whole step: {problems[0]}; record all of one step on every rank"
        )
    return schedule


def estimate_work(graph: MeasuredStep, expected: Costs) -> Durations:
    """Tell slow ranks from large stages.

    The expected costs tell them apart, and so do several stages on one rank, which share its speed.
    The slowdown of a rank is its measured work divided by the expected work of its stages, with a
    unit of time for each kind of action. Other differences are due to the stages.
    """
    durations = defaultdict(list)
    groups = []
    for span in graph.spans:
        parts = span.action.parts
        kinds = "".join(part.kind for part in parts)
        group = ActionGroup(span.rank, kinds, tuple(part.stage for part in parts))
        groups.append(group)
        durations[group].append(float(span.duration))
    measured = {group: median(times) for group, times in durations.items()}
    many = {group: len(times) for group, times in durations.items()}
    slowdown = _slowdown(graph, measured, many, expected)
    alone = {group: time / slowdown[group.rank] for group, time in measured.items()}
    mean = {}
    for kinds in {group.kinds for group in alone}:
        same = [group for group in alone if group.kinds == kinds]
        total = sum(many[group] * alone[group] for group in same)
        mean[kinds] = total / sum(many[group] for group in same)
    at_median_speed = tuple(alone[group] for group in groups)
    balanced = tuple(mean[group.kinds] for group in groups)
    return Durations(slowdown, alone, at_median_speed, balanced)


def _slowdown(
    graph: MeasuredStep,
    measured: Mapping[ActionGroup, float],
    many: Mapping[ActionGroup, int],
    expected: Costs,
) -> tuple[float, ...]:
    per_kind = expected.durations(graph.schedule.n_stages)
    units = {}
    rates = defaultdict(list)
    for group, time in measured.items():
        parts = zip(group.kinds, group.stages, strict=True)
        units[group] = float(sum(per_kind[kind][stage] for kind, stage in parts))
        if units[group]:
            rates[group.kinds].append(time / units[group])
    took = [0.0] * graph.schedule.n_ranks
    should_take = [0.0] * graph.schedule.n_ranks
    for group, time in measured.items():
        if units[group]:
            took[group.rank] += many[group] * time
            should_take[group.rank] += many[group] * units[group] * median(rates[group.kinds])

    # A rank without work, or whose work should take no time, counts as usual.
    ratios: dict[int, float] = {}
    for rank, (own, usual_time) in enumerate(zip(took, should_take, strict=True)):
        if own and usual_time:
            ratios[rank] = own / usual_time
    # The lower median: of two ranks the slower one is the straggler, not both by half.
    usual = median_low(ratios.values() or [1.0])
    return tuple(ratios.get(rank, usual) / usual for rank in range(graph.schedule.n_ranks))


def estimate_waits(graph: MeasuredStep, receives: Iterable[Receive]) -> Waits:
    """Tell message times from launch times.

    A message time can be seen only where a rank had nothing to do but wait for the message. If a
    value was made after its receiver became free, the receiver waited for it: the message was on
    its way until the receive ended, or until the consumer was launched. If the message had arrived
    before, the gap is launching, and gives only an upper limit for the link. Both directions of a
    link count together, because an activation and its gradient have one size, and often a rank
    waits for only one of the two.
    """
    waited = {(each.rank, each.product): float(each.end) for each in receives}
    longest: dict[Link, float] = {}  # the least time from the end of a product until it is used
    for number, span in enumerate(graph.spans):
        for product in graph.received[number]:
            link, made = graph.link(number, product), graph.spans[graph.makers[product]].end
            # Subtract first and round then, so that equal exact times give equal floats.
            time = max(0.0, float(span.start - made))
            longest[link] = min(time, longest.get(link, time))
    links, launch = longest, (0.0,) * graph.schedule.n_ranks
    # The estimates depend on each other: the link times decide which message comes last and which
    # came in time. Three rounds settle them.
    for _ in range(3):
        launch = _launches(graph, links)
        links = _transfers(graph, waited, launch, links, longest)
    return Waits(launch, links)


def _last(graph: MeasuredStep, number: int, links: Mapping[Link, float]) -> tuple[float, int]:
    """Return the time at which an action has received its last product, and that product."""
    arrivals = [
        (graph.made(each) + links[graph.link(number, each)], each)
        for each in graph.received[number]
    ]
    return max(arrivals, key=lambda arrival: arrival[0])


def _launches(graph: MeasuredStep, links: Mapping[Link, float]) -> tuple[float, ...]:
    """Return each rank's median gap before the actions that waited for no message.

    A rank with few such gaps gets the median over all ranks.
    """
    gaps: list[list[float]] = [[] for _ in range(graph.schedule.n_ranks)]
    for number, span in enumerate(graph.spans):
        free = graph.free_from(number)
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
    """Return each link's median time over the messages that a rank waited for.

    A link without such messages gets the median of the other links, or its longest possible time
    if that is less.
    """
    times = defaultdict(list)
    for number, span in enumerate(graph.spans):
        if not graph.received[number]:
            continue
        _, last = _last(graph, number, links)
        made = graph.made(last)
        if made >= graph.free_from(number):
            arrived = waited.get(
                (span.rank, graph.dependencies.describe(last)),
                float(span.start) - launch[span.rank],
            )
            times[graph.link(number, last)].append(max(0.0, arrived - made))
    known = {link: median(values) for link, values in times.items()}
    usual = median(known.values()) if known else 0.0
    return {link: known.get(link, min(usual, longest[link])) for link in links}


def costs_of(graph: MeasuredStep, work: Durations, links: Mapping[Link, float]) -> Costs:
    """Return the times of actions at the median speed by stage, and of messages by boundary.

    A whole backward does not show its halves. Where no other was measured, half of it counts as
    input gradient. A kind that never came alone gets half of its overlapped pair.
    """
    alone, shared, pairs = defaultdict(list), defaultdict(list), defaultdict(list)
    for group, time in work.per_group.items():
        if len(group.stages) == 1:
            alone[group.kinds, group.stages[0]].append(time)
            continue
        pairs[group.stages[0]].append(time)
        for key in zip(group.kinds, group.stages, strict=True):
            shared[key].append(time / 2)
    found = {key: median(values) for key, values in (shared | alone).items()}
    stages = range(graph.schedule.n_stages)
    forward, whole, inputs, weights, update = (
        [found.get((kind, s), 0.0) for s in stages] for kind in "FBIWU"
    )
    split = [("I", s) in found for s in stages]
    alone_both = [forward[s] + (whole[s] or inputs[s] + weights[s]) for s in stages]
    latency, edge_latency = _latencies(graph, links)
    return Costs(
        forward=forward,
        input_grad=[inputs[s] if split[s] else whole[s] / 2 for s in stages],
        weight_grad=[weights[s] if split[s] else whole[s] / 2 for s in stages],
        overlapped=(
            [median(pairs[s]) if s in pairs else alone_both[s] for s in stages] if pairs else None
        ),
        update=update,
        latency=latency,
        edge_latency=edge_latency,
    )


def _latencies(
    graph: MeasuredStep, links: Mapping[Link, float]
) -> tuple[tuple[float, ...], float | None]:
    """Return the mean time of the messages of each boundary, and of the messages of edges.

    The latter is None if there are no edges. Messages of one boundary may take different links, if
    its stages have replicas.
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


class LossPlace(NamedTuple):
    """A place where time is lost: a rank, and the link of a message it waits for, or None."""

    rank: int
    link: Link | None


Shares = Mapping[LossPlace, float]
"""The time lost at each place."""


class Lengths(NamedTuple):
    """The time of each action from when its rank and inputs allow it, and of messages by link."""

    actions: Sequence[float]
    links: Mapping[Link, float]


class Counterfactual(NamedTuple):
    """Assumed lengths, and the times of the run that they give."""

    lengths: Lengths
    times: Times


def attribute(
    graph: Precedence, causes: Sequence[str], lengths_with: Callable[[frozenset[str]], Lengths]
) -> dict[str, Shares]:
    """Split the time that all ``causes`` together add to the makespan among them.

    A cause may hide behind another: a slow link costs nothing if its receiver waits for a slower
    rank anyway. So add the causes one by one, in every possible order. Each cause is charged the
    average time that it adds. This is the Shapley value (Shapley 1953, "A value for n-person
    games"). No other split adds up for all runs, treats causes alike, and charges nothing to a
    cause that never matters.
    """
    settings = {present: imagine(graph, lengths_with(present)) for present in _subsets(causes)}
    lost: dict[str, Shares] = {}
    for cause in causes:
        total: defaultdict[LossPlace, float] = defaultdict(float)
        for present in _subsets([other for other in causes if other != cause]):
            weight = 1 / (len(causes) * comb(len(causes) - 1, len(present)))
            for place, time in step(graph, settings[present], settings[present | {cause}]).items():
                total[place] += weight * time
        lost[cause] = dict(total)
    return lost


def imagine(graph: Precedence, lengths: Lengths) -> Counterfactual:
    return Counterfactual(lengths, graph.run(lengths.actions, graph.delays(lengths.links)))


def step(graph: Precedence, before: Counterfactual, after: Counterfactual) -> Shares:
    """Split the difference between two makespans among the places where the lengths differ.

    Let the lengths change evenly from ``before`` to ``after``. At each moment the makespan grows by
    the lengths that are added along the path that is longest then. It grows ever faster, because it
    is a maximum of sums. So the path that is longest before gives too little, and the path that is
    longest after gives too much. The result is the mixture of the two that gives the difference.
    """
    first, last = (
        _added_along(graph, each, before.lengths, after.lengths) for each in (before, after)
    )
    too_little, too_much = sum(first.values()), sum(last.values())
    difference = float(after.times.makespan - before.times.makespan)
    # Where one path stays the longest, the two differ by rounding only.
    part = (difference - too_little) / (too_much - too_little) if too_much > too_little else 1.0
    part = min(max(part, 0.0), 1.0)
    places = first.keys() | last.keys()
    return {
        place: (1 - part) * first.get(place, 0.0) + part * last.get(place, 0.0) for place in places
    }


def _added_along(
    graph: Precedence, imagined: Counterfactual, before: Lengths, after: Lengths
) -> Shares:
    """Split the lengths that ``after`` has beyond ``before``, along the longest imagined path."""
    added: defaultdict[LossPlace, float] = defaultdict(float)
    for number, product in graph.longest_path(
        imagined.times.ends, graph.delays(imagined.lengths.links)
    ):
        rank, _ = graph.places[number]
        added[LossPlace(rank, None)] += after.actions[number] - before.actions[number]
        if product is not None:
            link = graph.link(number, product)
            added[LossPlace(rank, link)] += after.links[link] - before.links[link]
    return added


def _subsets(things: Sequence[str]) -> Iterator[frozenset[str]]:
    for size in range(len(things) + 1):
        yield from map(frozenset, combinations(things, size))


def _loss(cause: str, shares: Shares, n_ranks: int) -> Loss:
    per_rank = [0.0] * n_ranks
    per_link: defaultdict[Link, float] = defaultdict(float)
    for place, time in shares.items():
        per_rank[place.rank] += time
        if place.link is not None and cause == "transfer":
            per_link[place.link] += time
    return Loss(cause, sum(per_rank), tuple(per_rank), dict(per_link))


def _timeline(
    graph: MeasuredStep,
    imagined: Counterfactual,
    launch: Sequence[float] | None,
    costs: Costs | None,
    measured: Timeline,
) -> Timeline:
    spans, times = [], imagined.times
    for number, (span, ready, end) in enumerate(
        zip(graph.spans, times.ready, times.ends, strict=True)
    ):
        wait = launch[span.rank] if launch is not None and not graph.opens(number) else 0.0
        spans.append(Span(span.rank, span.action, ready + wait, end))
    n = graph.schedule.n_stages
    return Timeline(
        measured.n_ranks,
        tuple(spans),
        measured.unit,
        () if costs is None else costs.transfers(n),
        edges=measured.edges,
        edge_transfers=() if costs is None else costs.edge_transfers(graph.schedule.edges, n),
        feedback=measured.feedback,
        token_transfer=0 if costs is None else costs.token_transfer(n),
        name=measured.name,
    )


def name_of(where: Link | int) -> str:
    """Return a link or a rank in words."""
    return f"rank {where}" if isinstance(where, int) else f"link {where[0]}–{where[1]}"
