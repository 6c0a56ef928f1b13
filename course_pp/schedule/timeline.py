"""When each rank did which action, and the numbers that follow from it."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import pairwise
from math import inf
from operator import attrgetter
from typing import NamedTuple

from course_pp.schedule.action import Action, Gap, Product, Receive, Span, Time, format_time
from course_pp.schedule.costs import Costs
from course_pp.schedule.edges import Edge, lanes_of
from course_pp.schedule.memory import Curve, curve_of_rank, most_versions
from course_pp.schedule.precedence import Dependencies


@dataclass(frozen=True, repr=False)
class Timeline:
    """The spans of ``n_ranks`` ranks, kept sorted by rank, then by time, which counts from 0.

    With integer and fractional times every number below is exact.

    Attributes:
        unit: ``"s"``, or empty for relative costs.
        transfers: the time of a message between two ranks, for each boundary between stages; empty
            if unknown.
        receives: the intervals in which a rank was blocked until a message was there, sorted as the
            spans are; empty if not measured.
        edge_transfers: the time of a message between two ranks, for each reader of each edge; empty
            if unknown.
        edges, feedback: the same as in :class:`Schedule`.
        token_transfer: the time of a token on its way to the first stage, in generation.
        measured: whether ranks ran it, emulated ranks included. False for a simulated or fitted
            timeline.
        name: the schedule that ran, for labels. This and ``measured`` play no part in comparisons.
    """

    n_ranks: int
    spans: tuple[Span, ...]
    unit: str = ""
    transfers: tuple[Time, ...] = ()
    receives: tuple[Receive, ...] = ()
    edges: tuple[Edge, ...] = field(default=(), kw_only=True)
    edge_transfers: tuple[Time, ...] = field(default=(), kw_only=True)
    feedback: int = field(default=0, kw_only=True)
    token_transfer: Time = field(default=0, kw_only=True)
    measured: bool = field(default=False, compare=False, kw_only=True)
    name: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if self.n_ranks < 1:
            raise ValueError(f"n_ranks is {self.n_ranks}: give an integer of at least 1")
        if self.unit not in ("", "s"):
            raise ValueError(f"unit is {self.unit!r}: use '' for relative costs or 's' for seconds")
        done: tuple[Span | Receive, ...] = (*self.spans, *self.receives)
        for each in done:
            if not 0 <= each.rank < self.n_ranks:
                raise ValueError(
                    f"{_name(each)} is on rank {each.rank}: give a rank from 0 to"
                    f" {self.n_ranks - 1}"
                )
            # Written so that NaN, for which every comparison is false, is refused too.
            if not 0 <= each.start <= each.end < inf:
                raise ValueError(
                    f"{_name(each)} runs from {each.start} to {each.end}: give finite times from 0"
                    " on, the start first"
                )
        # Stable, so spans of no length keep the order in which the rank did them.
        ordered = sorted(done, key=attrgetter("rank", "start", "end"))
        for before, after in pairwise(ordered):
            if before.rank == after.rank and after.start < before.end:
                raise ValueError(
                    f"{_name(before)} and {_name(after)} overlap on rank {after.rank}: the first"
                    f" ends at {before.end}, the second starts at {after.start}; a rank does one"
                    " thing at a time (a pair run together is one span with an Overlap)"
                )
        spans = tuple(each for each in ordered if isinstance(each, Span))
        receives = tuple(each for each in ordered if isinstance(each, Receive))
        object.__setattr__(self, "spans", spans)
        object.__setattr__(self, "receives", receives)

    def __repr__(self) -> str:
        name = f"{self.name}, " if self.name else ""
        return (
            f"Timeline({name}{self.n_ranks} ranks, {len(self.spans)} spans, makespan"
            f" {format_time(self.makespan, self.unit)}, bubble {float(self.bubble_fraction):.1%})"
        )

    @property
    def how(self) -> str:
        """The origin of its times: "measured" or "simulated"."""
        return "measured" if self.measured else "simulated"

    @cached_property
    def by_rank(self) -> tuple[tuple[Span, ...], ...]:
        """The spans of each rank in order of time; empty for a rank that does nothing."""
        rows: list[list[Span]] = [[] for _ in range(self.n_ranks)]
        for span in self.spans:
            rows[span.rank].append(span)
        return tuple(map(tuple, rows))

    @cached_property
    def actions(self) -> tuple[Action, ...]:
        """Every action that was done, overlapped pairs taken apart, in the order of ``spans``."""
        return tuple(part for span in self.spans for part in span.action.parts)

    @cached_property
    def n_stages(self) -> int:
        """One more than the last stage seen."""
        return 1 + max((action.stage for action in self.actions), default=-1)

    @cached_property
    def n_microbatches(self) -> int:
        """How many different microbatches were seen."""
        return len({action.microbatch for action in self.actions})

    @cached_property
    def makespan(self) -> Time:
        """When the last rank finishes; 0 for a timeline without spans."""
        return max((span.end for span in self.spans), default=0)

    @cached_property
    def busy(self) -> tuple[Time, ...]:
        """For each rank, the time it spends in spans."""
        return tuple(sum((span.duration for span in row), 0) for row in self.by_rank)

    @cached_property
    def waited(self) -> tuple[Time, ...]:
        """For each rank, the time it was blocked in receives.

        This is the part of its idle time that other ranks could shorten.
        """
        waits: list[Time] = [0] * self.n_ranks
        for receive in self.receives:
            waits[receive.rank] += receive.duration
        return tuple(waits)

    @cached_property
    def bubble_fraction(self) -> Time:
        """Idle time over ``n_ranks × makespan``: the share of the machine that is left unused."""
        total = self.n_ranks * self.makespan
        return (total - sum(self.busy)) / total if total else 0

    @cached_property
    def utilisation(self) -> Time:
        """``1 - bubble_fraction``."""
        return 1 - self.bubble_fraction

    @cached_property
    def span_bubble_fraction(self) -> Time:
        """``(T - busiest rank's work) / T``: the bubble as the zero-bubble papers count it.

        T is the longest time that any rank takes from its first span to its last. A rank may start
        late and end late without loss, as the next step can begin meanwhile.
        """
        longest = max((row[-1].end - row[0].start for row in self.by_rank if row), default=0)
        return (longest - max(self.busy)) / longest if longest else 0

    @cached_property
    def peak_activations(self) -> tuple[int, ...]:
        """For each rank, the most (stage, microbatch) activations held at once.

        An activation is held from its ``F`` until its ``B`` or ``W``.
        """
        return tuple(map(_peak_held, self.by_rank))

    @cached_property
    def peak_values(self) -> tuple[Time, ...]:
        """For each rank, the most values of edges held at once, one for each microbatch.

        This memory comes on top of the activations. A rank holds a value for the stages on it that
        read it: from the start of the first reader's ``F``, or of the writer's ``F`` if the writer
        is on the same rank, until the end of the first reader's ``B`` or ``I``, as the first reader
        goes backward last. Without a backward, the last reader's ``F`` ends it. Messages on their
        way and gradients do not count.
        """
        return self.peak_memory(Costs(activation=0))

    @cached_property
    def weight_versions(self) -> tuple[int, ...]:
        """For each rank, the most versions of a stage's weights that it needs at once.

        Microbatches in flight still need older versions.
        """
        return tuple(map(most_versions, self.by_rank))

    def memory_curve(self, costs: Costs | None = None) -> tuple[Curve, ...]:
        """Return for each rank the memory it holds: (time, amount) at each change, first at 0.

        Args:
            costs: the memory that a forward keeps and the part that ``I`` releases, and the memory
                of weights and of values of edges. By default activations and values are counted,
                one each.
        """
        costs = Costs() if costs is None else costs
        kept = costs.each("activation", self.n_stages)
        early = costs.each("released_by_input_grad", self.n_stages)
        weights = costs.each("weights", self.n_stages)
        values = costs.each("edge_activation", len(lanes_of(self.edges)))
        return tuple(
            curve_of_rank(row, kept, early, weights, self.edges, values) for row in self.by_rank
        )

    def peak_memory(self, costs: Costs | None = None) -> tuple[Time, ...]:
        """Return for each rank the highest point of its :meth:`memory_curve`.

        The weights of the stages in its spans count too.
        """
        return tuple(max(amount for _, amount in curve) for curve in self.memory_curve(costs))

    @cached_property
    def _inputs(self) -> "Inputs":
        return Inputs(self)

    @cached_property
    def idle_gaps(self) -> tuple[Gap, ...]:
        """Every interval between 0 and the makespan in which a rank does nothing, by rank and time.

        The cause names the output of another rank, or the transfer, that the rank waits for. It
        also names an action that could have run meanwhile if the rank's order had not put it later.
        """
        return tuple(gap for rank in range(self.n_ranks) for gap in _gaps_of_rank(self, rank))

    @cached_property
    def critical_path(self) -> tuple[Span, ...]:
        """The chain of spans that sets the makespan, in order.

        Each span starts when the span before it ends, or when its message arrives.
        """
        before: dict[int, Span] = {}
        for row in self.by_rank:
            for earlier, later in pairwise(row):
                before[id(later)] = earlier
        lasts = [row[-1] for row in self.by_rank if row]
        span: Span | None = max(lasts, key=lambda each: each.end, default=None)
        path = []
        while span is not None:
            path.append(span)
            causes = [(each.arrival, each.maker) for each in self._inputs.of(span)]
            # Listed last: at equal times a message counts as the cause, not the rank's own order.
            if id(span) in before:
                causes.append((before[id(span)].end, before[id(span)]))
            span = max(causes, key=lambda cause: cause[0], default=(0, None))[1]
        return tuple(reversed(path))


def _name(done: Span | Receive) -> str:
    return str(done.action) if isinstance(done, Span) else f"the receive of {done.product}"


def _peak_held(row: Sequence[Span]) -> int:
    held: set[tuple[int, int]] = set()
    peak = 0
    for span in row:
        parts = span.action.parts
        held.update((part.stage, part.microbatch) for part in parts if part.kind == "F")
        peak = max(peak, len(held))
        held.difference_update((part.stage, part.microbatch) for part in parts if part.kind in "BW")
    return peak


# Two questions have one answer: why does a rank wait, and which chain of spans sets the makespan?
# Both ask where the inputs of a span came from.


class Need(NamedTuple):
    """A product that a span needs, when it was at hand, and the span that made it."""

    product: int
    arrival: Time
    maker: Span


class Inputs:
    """The inputs of any span of a timeline.

    An action may appear several times in one timeline, once in each step. A span then takes the
    product that was made last before it started.
    """

    def __init__(self, tl: Timeline) -> None:
        ranks_of: defaultdict[int, set[int]] = defaultdict(set)
        for span in tl.spans:
            for part in span.action.parts:
                ranks_of[part.stage].add(span.rank)
        # A stage that the timeline does not show counts as held by one rank.
        shares = tuple(max(1, len(ranks_of[stage])) for stage in range(max(1, tl.n_stages)))
        n_microbatches = 1 + max((part.microbatch for part in tl.actions), default=0)
        self._dependencies = Dependencies(n_microbatches, shares, tl.edges, tl.feedback)
        self._travel = self._dependencies.travel_times(
            tl.transfers, tl.edge_transfers, tl.token_transfer
        )
        self._maker: dict[int, Span] = {}
        self._others: defaultdict[int, list[Span]] = defaultdict(list)
        for span in tl.spans:
            for product in self._dependencies.made_by(span.action):
                if product in self._maker:
                    self._others[product].append(span)
                else:
                    self._maker[product] = span
        self.repeat = bool(self._others)

    def name(self, item: Need) -> Product:
        return self._dependencies.describe(item.product)

    def of(self, span: Span) -> list[Need]:
        """Return the inputs of ``span`` that the timeline shows being made."""
        found = []
        for product in self._dependencies.needed_by(span.action):
            maker = self._maker.get(product)
            if product in self._others:
                makers = [maker, *self._others[product]]
                done = [each for each in makers if each and each.end <= span.start]
                maker = max(done, key=lambda each: each.end, default=None)
            if maker is not None and maker.end <= span.start:
                arrival = maker.end
                if maker.rank != span.rank:
                    arrival += self._travel[product // self._dependencies.n_microbatches]
                found.append(Need(product, arrival, maker))
        return found


def _gaps_of_rank(tl: Timeline, rank: int) -> Iterator[Gap]:
    row = tl.by_rank[rank]
    inputs = tl._inputs
    makespan = tl.makespan

    @cache
    def at(time: Time) -> str:
        return format_time(time, tl.unit)

    def gap(start: Time, end: Time, reason: str) -> Gap:
        return Gap(rank, start, end, f"rank {rank} waits from {at(start)} to {at(end)} {reason}")

    ends = [0, *(span.end for span in row)]
    # Looking up inputs takes longer than all else here, and many ranks have no gap.
    if any(span.start > end for span, end in zip(row, ends, strict=False)):
        needs = [inputs.of(span) for span in row]
        others = _ready_later(needs)
        for index, span in enumerate(row):
            free_from = ends[index]
            if span.start > free_from:
                reason = _why(span, free_from, needs[index], inputs, at)
                ready, other = others[index]
                # In a timeline of several steps the next step's first actions are ready too soon to
                # mean anything.
                if ready is not None and ready < span.start and not inputs.repeat:
                    able_from = at(max(ready, free_from))
                    reason += f", though {row[other].action} could have started at {able_from}"
                yield gap(free_from, span.start, reason)
    if makespan > ends[-1]:
        reason = "because its work is done" if row else "because it has no work"
        yield gap(ends[-1], makespan, reason)


def _ready_later(needs: Sequence[Sequence[Need]]) -> list[tuple[Time | None, int]]:
    """Return for each action of a rank the later action whose inputs come first: when, and which.

    The last action has none: None, -1.
    """
    best: tuple[Time | None, int] = (None, -1)
    found = []
    for index in reversed(range(len(needs))):
        found.append(best)
        ready = max((each.arrival for each in needs[index]), default=0)
        # At equal times the earlier action of the order.
        if best[0] is None or ready <= best[0]:
            best = (ready, index)
    return found[::-1]


def _why(
    span: Span, free_from: Time, needs: Sequence[Need], inputs: Inputs, at: Callable[[Time], str]
) -> str:
    """Say which input of ``span`` arrived last, or why the rank started it so late otherwise."""
    # The rank's own products were there when it became free, so only the products of other ranks
    # can keep it waiting.
    foreign = [each for each in needs if each.maker.rank != span.rank]
    if not foreign:
        return f"before {span.action}, which needs nothing from another rank"
    last = max(foreign, key=lambda each: each.arrival)
    product = inputs.name(last)
    maker = last.maker
    if maker.end == span.start:
        return f"for {product}"
    since = f"ready on rank {maker.rank} at {at(maker.end)}"
    # A measured span may start later than the known transfer time explains.
    explained = last.arrival == span.start
    if maker.end > free_from:
        rest = "transfer" if explained else "transfer or overhead"
        return f"for {product}, {since}; the rest is {rest}"
    overhead = "" if explained else " or other overhead"
    return f"for the transfer of {product}{overhead}, {since}"
