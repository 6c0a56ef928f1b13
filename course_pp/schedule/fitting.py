"""Why a run took as long as it did: from a measured timeline to costs, and from costs to causes."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from math import comb
from statistics import median
from typing import NamedTuple

from course_pp.arguments import checked
from course_pp.schedule.action import Span, format_time
from course_pp.schedule.costs import Costs
from course_pp.schedule.estimation import (
    MeasuredStep,
    Waits,
    Work,
    costs_of,
    estimate_waits,
    estimate_work,
)
from course_pp.schedule.precedence import Link, Precedence, Times
from course_pp.schedule.timeline import Timeline

CAUSES = ("imbalance", "transfer", "launch", "straggler")
"""The causes that a simulation can take away. What they do not explain is called ``rest``."""

_WORTH_SAYING = 0.01  # of the makespan
_WORTH_A_PLACE = 0.001
_ROWS = 16


@dataclass(frozen=True)
class Loss:
    """What one cause adds to the makespan, and where.

    Attributes:
        cause: ``imbalance``, ``transfer``, ``launch``, ``straggler`` or ``rest``.
        time: how much longer the run is because of it, in the timeline's unit. Negative if it is shorter.
        per_rank: the parts of ``time`` that arise on each rank; those of a message on the rank that receives it.
        per_link: the parts of ``time`` that arise on each link; all of it for ``transfer``, else empty.
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
    """What a measured timeline tells about stages, ranks and links, and what each of them cost. Prints as a table.

    Attributes:
        measured: the timeline.
        predicted: simulated from what was fitted.
        ideal: the same orders with each kind of action equally long in all stages (with as much work in all), all ranks
            as fast as the median rank, and neither transfers nor launches. Its bubble is that of the schedule itself.
        costs: of the stages at the speed of the median rank, and of the messages, in the timeline's unit.
        slowdown: for each rank, how many times as long as the median rank it takes for the work its stages are expected
            to be. Of an even number of ranks, the lower of the two in the middle is the median.
        links: for each pair of ranks that exchange messages, how long a message is on its way.
        launch: for each rank, the time from when its own order and its inputs allow an action until that starts.
        lost: what is lost to each cause, largest first; together exactly ``total_lost``. The rest, what the fitted
            numbers do not explain, is how much longer the run was than predicted.
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
        """How much longer the measured run is than the ideal one."""
        return float(self.measured.makespan - self.ideal.makespan)

    @checked
    def lost_to(self, cause: str) -> Loss:
        """Return what is lost to one cause. Raises ValueError for an unknown one."""
        for loss in self.lost:
            if loss.cause == cause:
                return loss
        raise ValueError(f"unknown cause {cause!r}: use one of {', '.join(CAUSES)} or rest")

    @cached_property
    def findings(self) -> tuple[str, ...]:
        """What costs at least a hundredth of the makespan, each cause in a sentence, largest first."""
        whole = float(self.measured.makespan)
        said = [
            f"{self._what(loss)}: {self._time(loss.time)}, {self._share(loss.time):.1%} of the makespan."
            for loss in self.lost
            if loss.time >= _WORTH_SAYING * whole > 0
        ]
        return tuple(said) or ("No cause costs a hundredth of the makespan.",)

    def __repr__(self) -> str:
        return "\n".join([*self._table(), "", *self._table_of_ranks(), "", *self.findings])

    def _table(self) -> list[str]:
        whole = float(self.measured.makespan)
        head = (
            f"{self.measured.name or 'run'} on {self.measured.n_ranks} ranks: {self.measured.how} {self._time(whole)}, "
            f"predicted {self._time(float(self.predicted.makespan))}, ideal {self._time(float(self.ideal.makespan))}"
        )
        rows = [f"{'lost to':<12}{'time':>10}{'makespan':>10}   most of it on"]
        for loss in self.lost:
            share = self._share(loss.time)
            where = "" if loss.where is None or share < _WORTH_A_PLACE else name_of(loss.where)
            rows.append(f"{loss.cause:<12}{self._time(loss.time):>10}{share:>10.1%}   {where}".rstrip())
        total = self.total_lost
        return [head, *rows, f"{'together':<12}{self._time(total):>10}{self._share(total):>10.1%}"]

    def _table_of_ranks(self) -> list[str]:
        rows = [f"{'rank':>4}{'slowdown':>10}{'launch':>10}" + "".join(f"{loss.cause:>11}" for loss in self.lost)]
        for rank in range(min(self.measured.n_ranks, _ROWS)):
            parts = "".join(f"{self._time(loss.per_rank[rank]):>11}" for loss in self.lost)
            rows.append(f"{rank:>4}{self.slowdown[rank]:>10.2f}{self._time(self.launch[rank]):>10}{parts}")
        if self.measured.n_ranks > _ROWS:
            rows.append(f"   … and {self.measured.n_ranks - _ROWS} more ranks")
        return rows

    def _share(self, time: float) -> float:
        """Return the part of the makespan; what would be written as -0.0% is 0."""
        share = time / (float(self.measured.makespan) or 1)
        return share if abs(share) >= 0.0005 else 0.0

    def _time(self, time: float) -> str:
        rounded = 0.0 if abs(time) < 1e-9 * float(self.measured.makespan) else time
        return f"{'-' if rounded < 0 else ''}{format_time(abs(rounded), self.measured.unit)}"

    def _what(self, loss: Loss) -> str:
        where = loss.where
        if loss.cause == "transfer" and isinstance(where, tuple):
            each, usual = self.links[where], median(self.links.values())
            return f"Messages cost most on {name_of(where)}, {self._time(each)} each (median {self._time(usual)})"
        assert isinstance(where, int)  # something is lost, and only messages travel over links
        return {
            "straggler": f"Rank {where} is a straggler, its work takes {self.slowdown[where]:.2f} times as long",
            "launch": f"Launching costs most on rank {where}, {self._time(self.launch[where])} an action",
            "imbalance": f"Stages differ, and those of rank {where} cost most",
            "rest": f"Times vary from action to action, most of all on rank {where}",
        }[loss.cause]


@checked
def fit(measured: Timeline, expected: Costs | None = None) -> Fit:
    """Estimate from one measured step what stages, ranks and links cost, and what was lost to which of them.

    Orders and placement are read off the spans. The time lost is that by which the measured makespan exceeds the ideal
    one: of the same orders with equal stages, equal ranks, and neither transfers nor launches. It is split among

    * imbalance: stages differ from one another as ``expected`` says, or as no slow rank could explain;
    * transfer: messages between ranks take time;
    * launch: an action starts later than its rank and inputs allow;
    * straggler: a rank takes longer (or, below zero, less) than expected, compared with the median rank;

    by simulating with and without each, averaged over the orders in which they can be taken away (see
    :func:`~course_pp.schedule.fitting.attribute`), and the rest, by which the run was longer than predicted with
    all four. Each part is split further among the ranks (and links) where it arises.

    The estimates are medians over microbatches, so the jitter of a few of them is in the rest.

    Args:
        measured: one step, for example of a recorder; its receives are used where it has any.
        expected: what the stages should cost relative to one another, each kind of action by itself; in any unit, and
            all equal unless given. If rank 3 takes longer because it has the head of the model, only ``expected`` can
            tell this imbalance from a straggler.

    Raises:
        ValueError: for a timeline without spans, of several steps or of a part of one, and for ``expected`` of another
            number of stages.
    """
    graph = MeasuredStep.read_off(measured)
    work = estimate_work(graph, Costs() if expected is None else expected)
    waits = estimate_waits(graph, measured.receives)

    def lengths_with(causes: frozenset[str]) -> Lengths:
        return _lengths(graph, work, waits, causes)

    lost = attribute(graph, CAUSES, lengths_with)
    predicted = imagine(graph, lengths_with(frozenset(CAUSES)))
    lost["rest"] = step(graph, predicted, imagine(graph, _as_measured(graph, waits)))
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
        lost=tuple(sorted(losses, key=lambda loss: -round(loss.time / (float(measured.makespan) or 1), 9))),
    )


class Place(NamedTuple):
    """Where time is lost: on a rank; for a message, on the rank that receives it, over ``link``."""

    rank: int
    link: Link | None


Shares = Mapping[Place, float]
"""What is lost at each place; negative where it is gained."""


class Lengths(NamedTuple):
    """How long each action takes, from when its rank and inputs allow it, and each message over a link."""

    actions: Sequence[float]
    links: Mapping[Link, float]


class Counterfactual(NamedTuple):
    """Assumed lengths, and the times they give."""

    lengths: Lengths
    times: Times


def _lengths(graph: MeasuredStep, work: Work, waits: Waits, causes: frozenset[str]) -> Lengths:
    """Return the lengths with just these causes at work."""
    times = work.at_median_speed if "imbalance" in causes else work.balanced
    actions = []
    for number, (span, time) in enumerate(zip(graph.spans, times, strict=True)):
        if "straggler" in causes:
            time *= work.slowdown[span.rank]
        if "launch" in causes and not graph.opens(number):
            time += waits.launch[span.rank]
        actions.append(time)
    return Lengths(actions, waits.links if "transfer" in causes else dict.fromkeys(waits.links, 0.0))


def _as_measured(graph: MeasuredStep, waits: Waits) -> Lengths:
    """Return the lengths with which every action ends when it did, while messages take their usual time."""
    ends = [float(span.end) for span in graph.spans]
    usual = graph.delays(waits.links)
    took = [end - float(graph.allowed(number, ends, usual)[0]) for number, end in enumerate(ends)]
    return Lengths(took, waits.links)


def attribute(
    graph: Precedence, causes: Sequence[str], lengths_with: Callable[[frozenset[str]], Lengths]
) -> dict[str, Shares]:
    """Split what all ``causes`` together add to the makespan among them.

    A cause may hide behind another: a slow link costs nothing while a slower rank is waited for anyway. So each cause
    is charged the average of what it adds, over all orders in which they can be added one by one. That is the Shapley
    value (Shapley 1953, "A value for n-person games"), the only split that adds up whatever the runs, treats
    causes alike and charges nothing to one that never matters.

    Args:
        lengths_with: returns the lengths when only these causes act.
    """
    settings = {present: imagine(graph, lengths_with(present)) for present in _subsets(causes)}
    lost: dict[str, Shares] = {}
    for cause in causes:
        total: defaultdict[Place, float] = defaultdict(float)
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

    Let the lengths change evenly from those before to those after. At each moment the makespan grows by what is added
    along the path that is longest then. It grows ever faster, because it is a maximum of sums of lengths. So the
    longest path before gives too little, and the longest path after too much. The result is the mixture of the two that
    gives just the difference.
    """
    first, last = (_added_along(graph, each, before.lengths, after.lengths) for each in (before, after))
    too_little, too_much = sum(first.values()), sum(last.values())
    difference = float(after.times.makespan - before.times.makespan)
    # Equal but for rounding where one path stays the longest.
    part = (difference - too_little) / (too_much - too_little) if too_much > too_little else 1.0
    part = min(max(part, 0.0), 1.0)
    places = first.keys() | last.keys()
    return {place: (1 - part) * first.get(place, 0.0) + part * last.get(place, 0.0) for place in places}


def _added_along(graph: Precedence, imagined: Counterfactual, before: Lengths, after: Lengths) -> Shares:
    """Split what the lengths after have more than those before, along the path that is longest as imagined."""
    added: defaultdict[Place, float] = defaultdict(float)
    for number, product in graph.longest_path(imagined.times.ends, graph.delays(imagined.lengths.links)):
        rank, _ = graph.places[number]
        added[Place(rank, None)] += after.actions[number] - before.actions[number]
        if product is not None:
            link = graph.link(number, product)
            added[Place(rank, link)] += after.links[link] - before.links[link]
    return added


def _subsets(things: Sequence[str]) -> Iterator[frozenset[str]]:
    return (frozenset(chosen) for size in range(len(things) + 1) for chosen in combinations(things, size))


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
    """Return when each action runs, after it was launched."""
    spans, times = [], imagined.times
    for number, (span, ready, end) in enumerate(zip(graph.spans, times.ready, times.ends, strict=True)):
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
    """Return ``rank 2`` or ``link 0–1``."""
    return f"rank {where}" if isinstance(where, int) else f"link {where[0]}–{where[1]}"
