"""The memory that one rank holds over time.

It holds activations from their forward on, values of edges, and versions of weights.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from course_pp.schedule.action import Action, Span, Time
from course_pp.schedule.edges import Edge

Curve = tuple[tuple[Time, Time], ...]
"""(time, amount) at each change, in order; several at one time if memory is freed and taken."""


class Stay(NamedTuple):
    """The time that a value of an edge is on one rank, for one microbatch.

    Attributes:
        reader: the number of its first reader here, among the readers of all edges in order.
        first, last: the numbers of the rank's spans from whose start to whose end it is there.
    """

    reader: int
    first: int
    last: int


def stays_of_rank(row: Sequence[Span], edges: Sequence[Edge]) -> Iterator[Stay]:
    """Yield the stay of each value on a rank: from its first reader's forward to its backward.

    Without a backward, the last reader's forward ends the stay. A value that is made here and read
    elsewhere is sent at once.
    """
    if not edges:
        return
    # Keyed by whether it is a forward, stage and microbatch.
    places: dict[tuple[bool, int, int], int] = {}
    for number, span in enumerate(row):
        for part in span.action.parts:
            if part.kind in "FIB":
                places[part.kind == "F", part.stage, part.microbatch] = number
    microbatches = {microbatch for _, _, microbatch in places}
    readers_before = 0
    for edge in edges:
        for i in microbatches:
            here = [at for at, reader in enumerate(edge.readers) if (True, reader, i) in places]
            if here:
                nearest = edge.readers[here[0]]
                furthest = edge.readers[here[-1]]
                first = places.get((True, edge.writer, i), places[True, nearest, i])
                last = places.get((False, nearest, i), places[True, furthest, i])
                yield Stay(readers_before + here[0], first, last)
        readers_before += len(edge.readers)


def curve_of_rank(
    row: Sequence[Span],
    kept: Sequence[Time],
    early: Sequence[Time],
    weights: Sequence[Time],
    edges: Sequence[Edge] = (),
    values: Sequence[Time] = (),
) -> Curve:
    """Return the memory of one rank, from its spans in order of time.

    Args:
        kept: for each stage, the memory that ``F`` of a microbatch keeps.
        early: the part of it that ``I`` releases. ``W`` releases the rest, ``B`` all.
        weights: for each stage, the memory of one version of its weights.
        values: for each reader of each edge, the memory of its value.
    """
    come = defaultdict[int, Time](int)
    gone = defaultdict[int, Time](int)
    for stay in stays_of_rank(row, edges):
        come[stay.first] += values[stay.reader]
        gone[stay.last] += values[stay.reader]
    stages = {part.stage: _Versions() for span in row for part in span.action.parts}
    amount: Time = sum(weights[stage] for stage in stages)
    curve: list[tuple[Time, Time]] = [(0, amount)]
    # A rank does one thing at a time, so walking its spans in order is walking through time.
    for number, span in enumerate(row):
        if number in come:
            amount += come[number]
            curve.append((span.start, amount))
        # Forwards take memory at the start of a span, backwards free it at the end: the two of an
        # overlapped pair hold both meanwhile.
        for part in span.action.parts:
            if part.kind == "F":
                amount += kept[part.stage]
                curve.append((span.start, amount))
        for part in span.action.parts:
            stage = part.stage
            versions = stages[stage]
            before = versions.held
            versions.see(part)
            releases = {"I": early[stage], "W": kept[stage] - early[stage], "B": kept[stage]}
            new_versions = versions.held - before
            change = new_versions * weights[stage] - releases.get(part.kind, 0)
            if change:
                amount += change
                curve.append((span.end, amount))
        if number in gone:
            amount -= gone[number]
            curve.append((span.end, amount))
    return tuple(curve)


def most_versions(row: Sequence[Span]) -> int:
    """Return the most versions of any stage's weights that a rank with these spans holds."""
    stages: defaultdict[int, _Versions] = defaultdict(_Versions)
    most = 0
    for span in row:
        for part in span.action.parts:
            stages[part.stage].see(part)
            most = max(most, stages[part.stage].held)
    return most


@dataclass
class _Versions:
    """The versions of a stage's weights: the newest, and the older ones that are still needed.

    A microbatch must go backward under the weights of its forward (Narayanan et al. 2019, section
    3.3); the weight gradient itself needs only activations.

    Attributes:
        newest: the number of updates so far.
        of: the version under which each microbatch in flight went forward.
        users: the number of microbatches in flight under each version.
    """

    newest: int = 0
    of: dict[int, int] = field(default_factory=dict)
    users: Counter[int] = field(default_factory=Counter)

    @property
    def held(self) -> int:
        """The number of versions, the newest included."""
        return len(self.users) + (self.newest not in self.users)

    def see(self, part: Action) -> None:
        """Take note of an action of the stage."""
        if part.kind == "F":
            self.of[part.microbatch] = self.newest
            self.users[self.newest] += 1
        elif part.kind in ("B", "I"):
            version = self.of.pop(part.microbatch, None)
            if version is not None:
                self.users[version] -= 1
                if not self.users[version]:
                    del self.users[version]
        elif part.kind == "U":
            self.newest += 1
