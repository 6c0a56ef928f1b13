"""Why a rank waits, and which chain of work sets the end: both follow from where each span's inputs came from."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import NamedTuple

from course_pp.schedule.action import Gap, Product, Span, Time, format_time
from course_pp.schedule.edges import Edge
from course_pp.schedule.precedence import Dependencies


class Input(NamedTuple):
    """Something a span needs, when it was at hand, and which span made it."""

    product: int
    arrival: Time
    maker: Span


class Inputs:
    """Finds the inputs of any span of a timeline, whose attributes it takes.

    A step may appear several times in one timeline; a span then takes what was last made before it started.
    """

    def __init__(
        self,
        spans: Sequence[Span],
        edges: Sequence[Edge],
        feedback: int,
        transfers: Sequence[Time],
        edge_transfers: Sequence[Time],
        token_transfer: Time,
    ) -> None:
        on: defaultdict[int, set[int]] = defaultdict(set)
        microbatches = {0}
        for span in spans:
            for part in span.action.parts:
                on[part.stage].add(span.rank)
                microbatches.add(part.microbatch)
        shares = tuple(max(1, len(on[stage])) for stage in range(1 + max(on, default=0)))
        self._dependencies = Dependencies(1 + max(microbatches), shares, tuple(edges), feedback)
        self._travel = self._dependencies.travel_times(transfers, edge_transfers, token_transfer)
        self._maker: dict[int, Span] = {}
        self._others: defaultdict[int, list[Span]] = defaultdict(list)
        for span in spans:
            for product in self._dependencies.made_by(span.action):
                if product in self._maker:
                    self._others[product].append(span)
                else:
                    self._maker[product] = span

    @property
    def repeat(self) -> bool:
        """Whether anything is made more than once."""
        return bool(self._others)

    def name(self, item: Input) -> Product:
        return self._dependencies.describe(item.product)

    def of(self, span: Span) -> list[Input]:
        """Return the inputs of ``span`` that the timeline shows being made."""
        found = []
        for product in self._dependencies.needed_by(span.action):
            maker = self._maker.get(product)
            if product in self._others:
                makers = (each for each in (maker, *self._others[product]) if each and each.end <= span.start)
                maker = max(makers, key=lambda each: each.end, default=None)
            if maker is not None and maker.end <= span.start:
                arrival = maker.end
                if maker.rank != span.rank:
                    arrival += self._travel[product // self._dependencies.n_microbatches]
                found.append(Input(product, arrival, maker))
        return found


def gaps_of_rank(rank: int, row: Sequence[Span], inputs: Inputs, makespan: Time, unit: str) -> Iterator[Gap]:
    @cache
    def at(time: Time) -> str:
        return format_time(time, unit)

    def gap(start: Time, end: Time, reason: str) -> Gap:
        return Gap(rank, start, end, f"rank {rank} waits from {at(start)} to {at(end)} {reason}")

    ends = [0, *(span.end for span in row)]
    if any(span.start > end for span, end in zip(row, ends, strict=False)):
        needs = [inputs.of(span) for span in row]
        others = _ready_later(needs)
        for index, span in enumerate(row):
            if span.start > ends[index]:
                reason = _why(span, ends[index], needs[index], inputs, at)
                ready, other = others[index]
                # In a timeline of several steps the next step's first actions are ready too soon to mean anything.
                if ready is not None and ready < span.start and not inputs.repeat:
                    reason += f", though {row[other].action} could have started at {at(max(ready, ends[index]))}"
                yield gap(ends[index], span.start, reason)
    if makespan > ends[-1]:
        yield gap(ends[-1], makespan, "because its work is done" if row else "because it has no work")


def critical_path(rows: Sequence[Sequence[Span]], inputs: Inputs) -> tuple[Span, ...]:
    """Return the spans that set the makespan, in order of time, found from the end by what each of them waited for."""
    before = {id(later): earlier for row in rows for earlier, later in pairwise(row)}
    span: Span | None = max((row[-1] for row in rows if row), key=lambda each: each.end, default=None)
    path = []
    while span is not None:
        path.append(span)
        causes = [(each.arrival, each.maker) for each in inputs.of(span)]
        if id(span) in before:
            causes.append((before[id(span)].end, before[id(span)]))
        span = max(causes, key=lambda cause: cause[0], default=(0, None))[1]
    return tuple(reversed(path))


def _ready_later(needs: Sequence[Sequence[Input]]) -> list[tuple[Time | None, int]]:
    """Return for each action of a rank: of those after it, which has its inputs first, and when."""
    best: tuple[Time | None, int] = (None, -1)
    found = []
    for index in reversed(range(len(needs))):
        found.append(best)
        ready = max((each.arrival for each in needs[index]), default=0)
        if best[0] is None or ready <= best[0]:
            best = (ready, index)
    return found[::-1]


def _why(span: Span, free_from: Time, needs: Sequence[Input], inputs: Inputs, at: Callable[[Time], str]) -> str:
    """Name the input of ``span`` that arrived last, or what else kept the rank from starting it."""
    # What the rank made itself was there when it became free, so only the others can keep it waiting.
    foreign = [each for each in needs if each.maker.rank != span.rank]
    if not foreign:
        return f"before {span.action}, which needs nothing from another rank"
    last = max(foreign, key=lambda each: each.arrival)
    product, maker = inputs.name(last), last.maker
    if maker.end == span.start:
        return f"for {product}"
    since = f"ready on rank {maker.rank} at {at(maker.end)}"
    known = last.arrival == span.start
    if maker.end > free_from:
        return f"for {product}, {since}; the rest is transfer{'' if known else ' or overhead'}"
    return f"for the transfer of {product}{'' if known else ' or other overhead'}, {since}"
