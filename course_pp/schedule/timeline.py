"""When each rank did what, and the numbers that follow from it.

Times count from 0. A simulated timeline has ``unit=""`` (costs are relative) and may use
:class:`fractions.Fraction`, in which case every number below is exact; a measured one has ``unit="s"``.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from operator import attrgetter

from course_pp.schedule.action import Action, Overlap, Product

Time = float | Fraction


@dataclass(frozen=True, slots=True)
class Span:
    """Rank ``rank`` was busy with ``action`` from ``start`` to ``end``."""

    rank: int
    action: Action | Overlap
    start: Time
    end: Time

    @property
    def duration(self) -> Time:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Gap:
    """Rank ``rank`` did nothing from ``start`` to ``end``, and why, in one sentence."""

    rank: int
    start: Time
    end: Time
    cause: str

    @property
    def duration(self) -> Time:
        return self.end - self.start


@dataclass(frozen=True, repr=False)
class Timeline:
    """The spans of ``n_ranks`` ranks, kept sorted by rank, then by time.

    Raises:
        ValueError: for a span that ends before it starts, starts before 0, is not finite or names a rank
            that does not exist, and for two spans of one rank that overlap.
    """

    n_ranks: int
    spans: tuple[Span, ...]
    unit: str = ""
    transfers: tuple[Time, ...] = ()

    def __post_init__(self) -> None:
        if type(self.n_ranks) is not int or self.n_ranks < 1:
            raise ValueError(f"a timeline of {self.n_ranks!r} ranks: give an integer of at least 1")
        if self.unit not in ("", "s"):
            raise ValueError(f"unknown unit {self.unit!r}: use '' for relative costs or 's' for seconds")
        for span in self.spans:
            _refuse_impossible(span, self.n_ranks)
        # Stable, so spans of no length keep the order in which the rank did them.
        ordered = tuple(sorted(self.spans, key=attrgetter("rank", "start", "end")))
        for before, after in pairwise(ordered):
            if before.rank == after.rank and after.start < before.end:
                raise ValueError(
                    f"{before.action} and {after.action} overlap on rank {after.rank}: the first ends at "
                    f"{before.end}, the second starts at {after.start}; a rank does one thing at a time "
                    "(a pair run together is one span with an Overlap)"
                )
        object.__setattr__(self, "spans", ordered)

    def __repr__(self) -> str:
        return (
            f"Timeline({self.n_ranks} ranks, {len(self.spans)} spans, "
            f"makespan {format_time(self.makespan, self.unit)}, bubble {float(self.bubble_fraction):.1%})"
        )

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
    def bubble_fraction(self) -> Time:
        """Idle time over ``n_ranks × makespan``: the share of the machine that is paid for and unused.

        0 for a timeline of no length.
        """
        total = self.n_ranks * self.makespan
        return (total - sum(self.busy)) / total if total else 0

    @cached_property
    def utilisation(self) -> Time:
        """``1 - bubble_fraction``."""
        return 1 - self.bubble_fraction

    @cached_property
    def span_bubble_fraction(self) -> Time:
        """``(T - busiest rank's work) / T``, where T is the longest any rank takes from first to last span.

        The bubble as the zero-bubble papers count it: a rank may start late and end late without loss, as
        the next step can begin meanwhile. 0 for a timeline of no length.
        """
        longest = max((row[-1].end - row[0].start for row in self.by_rank if row), default=0)
        return (longest - max(self.busy)) / longest if longest else 0

    @cached_property
    def peak_activations(self) -> tuple[int, ...]:
        """For each rank, the most (stage, microbatch) activations held at once.

        One is held from the start of its ``F`` until the end of its ``B`` or ``W``.
        """
        return tuple(map(_peak_held, self.by_rank))

    @cached_property
    def idle_gaps(self) -> tuple[Gap, ...]:
        """Every interval between 0 and the makespan in which a rank does nothing, by rank and time."""
        ready = _when_ready(self.spans)
        return tuple(gap for rank, row in enumerate(self.by_rank) for gap in self._gaps_of_rank(rank, row, ready))

    def _gaps_of_rank(
        self, rank: int, row: Sequence[Span], ready: dict[Product, list[tuple[Time, int]]]
    ) -> Iterable[Gap]:
        free_from: Time = 0
        for span in row:
            if span.start > free_from:
                reason = self._why_waiting(span, free_from, ready)
                yield self._gap(rank, free_from, span.start, reason)
            free_from = span.end
        if self.makespan > free_from:
            reason = "because its work is done" if row else "because it has no work"
            yield self._gap(rank, free_from, self.makespan, reason)

    def _gap(self, rank: int, start: Time, end: Time, reason: str) -> Gap:
        interval = f"from {format_time(start, self.unit)} to {format_time(end, self.unit)}"
        return Gap(rank, start, end, f"rank {rank} waits {interval} {reason}")

    def _why_waiting(self, span: Span, free_from: Time, ready: dict[Product, list[tuple[Time, int]]]) -> str:
        """Name the input of ``span`` that arrived last, or what else kept the rank from starting it."""
        # What the rank made itself was there when it became free, so only the others can keep it waiting.
        arrivals = [
            (max(made), product)
            for part in span.action.parts
            for product in part.needs(self.n_stages)
            if (made := [(t, by) for t, by in ready[product] if t <= span.start and by != span.rank])
        ]
        if not arrivals:
            return f"before {span.action}, which needs nothing from another rank"
        (ready_at, made_by), product = max(arrivals)
        if ready_at == span.start:
            return f"for {product}"
        since = f"ready on rank {made_by} at {format_time(ready_at, self.unit)}"
        if ready_at > free_from:
            return f"for {product}, {since}; the rest is transfer or overhead"
        return f"for the transfer of {product} or other overhead, {since}"


def format_time(time: Time, unit: str = "") -> str:
    """Write a time for people: ``5.0`` without a unit; in seconds ``1.25 s``, ``12.5 ms`` or ``3.1 µs``."""
    value = float(time)
    if unit != "s":
        return str(round(value, 4))
    scale, name = (1, "s") if value >= 1 else (1e3, "ms") if value >= 1e-3 or not value else (1e6, "µs")
    return f"{value * scale:.3g} {name}"


def _refuse_impossible(span: Span, n_ranks: int) -> None:
    if not 0 <= span.rank < n_ranks:
        raise ValueError(f"{span.action} is on rank {span.rank}: give a rank from 0 to {n_ranks - 1}")
    # Neither NaN nor infinity equals itself less itself; math.isfinite would round a Fraction.
    if span.start - span.start != 0 or span.end - span.end != 0:
        raise ValueError(f"{span.action} runs from {span.start} to {span.end}: give finite times")
    if span.start < 0:
        raise ValueError(f"{span.action} starts at {span.start}: times count from 0, shift all spans")
    if span.end < span.start:
        raise ValueError(f"{span.action} starts at {span.start} and ends at {span.end}: swap start and end")


def _peak_held(row: Sequence[Span]) -> int:
    # A rank does one thing at a time, so walking its spans in order is walking through time.
    held: set[tuple[int, int]] = set()
    peak = 0
    for span in row:
        held.update((part.stage, part.microbatch) for part in span.action.parts if part.kind == "F")
        peak = max(peak, len(held))
        held.difference_update((part.stage, part.microbatch) for part in span.action.parts if part.kind in "BW")
    return peak


def _when_ready(spans: Sequence[Span]) -> dict[Product, list[tuple[Time, int]]]:
    """For each product, when it was made and by which rank (more than once if steps repeat)."""
    ready: dict[Product, list[tuple[Time, int]]] = defaultdict(list)
    for span in spans:
        for part in span.action.parts:
            for product in part.provides:
                ready[product].append((span.end, span.rank))
    return ready
