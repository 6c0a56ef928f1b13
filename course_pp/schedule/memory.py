"""What one rank holds over time: activations from their forward on, and the versions of weights they still need."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from course_pp.schedule.action import Action
from course_pp.schedule.span import Span, Time

Curve = tuple[tuple[Time, Time], ...]
"""(time, amount) at each change, in order; several at one time where one thing is released and another kept."""


def curve_of_rank(row: Sequence[Span], kept: Sequence[Time], early: Sequence[Time], weights: Sequence[Time]) -> Curve:
    """The memory of one rank.

    Args:
        row: its spans in order of time.
        kept: for each stage, what ``F`` of a microbatch keeps.
        early: the part of it that ``I`` releases. ``W`` releases the rest, ``B`` all.
        weights: for each stage, what one version of its weights takes.
    """
    stages = {part.stage: _Versions() for span in row for part in span.action.parts}
    amount: Time = sum(weights[stage] for stage in stages)
    curve: list[tuple[Time, Time]] = [(0, amount)]
    # A rank does one thing at a time, so walking its spans in order is walking through time.
    for span in row:
        for part in span.action.parts:
            if part.kind == "F":
                amount += kept[part.stage]
                curve.append((span.start, amount))
        for part in span.action.parts:
            stage, versions = part.stage, stages[part.stage]
            before = versions.held
            versions.see(part)
            released = {"I": early[stage], "W": kept[stage] - early[stage], "B": kept[stage]}.get(part.kind, 0)
            change = (versions.held - before) * weights[stage] - released
            if change:
                amount += change
                curve.append((span.end, amount))
    return tuple(curve)


def most_versions(row: Sequence[Span]) -> int:
    """The most versions of one stage's weights that the rank with these spans holds at once; 0 if it has no stage."""
    stages: defaultdict[int, _Versions] = defaultdict(_Versions)
    most = 0
    for span in row:
        for part in span.action.parts:
            stages[part.stage].see(part)
            most = max(most, stages[part.stage].held)
    return most


@dataclass
class _Versions:
    """The versions of a stage's weights: the newest, and older ones under which microbatches in flight were forwarded.

    A microbatch must go backward under the weights of its forward (Narayanan et al. 2019, section 3.3); the weight
    gradient itself needs only activations.
    """

    newest: int = 0
    of: dict[int, int] = field(default_factory=dict)
    users: Counter[int] = field(default_factory=Counter)

    @property
    def held(self) -> int:
        return len(self.users) + (self.newest not in self.users)

    def see(self, part: Action) -> None:
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
