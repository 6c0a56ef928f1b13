"""Why a run is long: what each cause adds to the makespan, and on which rank or link."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from math import comb
from typing import NamedTuple

from course_pp.schedule.precedence import Lengths, Link, Precedence, Times


class Place(NamedTuple):
    """Where time is lost: on a rank; for a message, on the rank that receives it, over ``link``."""

    rank: int
    link: Link | None


Shares = Mapping[Place, float]
"""What is lost at each place; negative where it is gained."""


class Counterfactual(NamedTuple):
    """A counterfactual: assumed lengths, and the times they give."""

    lengths: Lengths
    times: Times


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
    return Counterfactual(lengths, graph.run(lengths))


def step(graph: Precedence, before: Counterfactual, after: Counterfactual) -> Shares:
    """Split the difference between two makespans among the places where the lengths differ.

    Let the lengths change evenly from those before to those after. At each moment the makespan grows by what is added
    along the path that is longest then. It grows ever faster, because it is a maximum of sums of lengths. So the
    longest path before gives too little, and the longest path after too much. The result is the mixture of the two that
    gives just the difference.
    """
    first, last = (_added_along(graph, each.times, before.lengths, after.lengths) for each in (before, after))
    too_little, too_much = sum(first.values()), sum(last.values())
    difference = after.times.makespan - before.times.makespan
    # Equal but for rounding where one path stays the longest.
    part = (difference - too_little) / (too_much - too_little) if too_much > too_little else 1.0
    part = min(max(part, 0.0), 1.0)
    places = first.keys() | last.keys()
    return {place: (1 - part) * first.get(place, 0.0) + part * last.get(place, 0.0) for place in places}


def _added_along(graph: Precedence, times: Times, before: Lengths, after: Lengths) -> Shares:
    added: defaultdict[Place, float] = defaultdict(float)
    for number, link in times.path:
        rank = graph.spans[number].rank
        added[Place(rank, None)] += after.actions[number] - before.actions[number]
        if link is not None:
            added[Place(rank, link)] += after.links[link] - before.links[link]
    return added


def _subsets(things: Sequence[str]) -> Iterator[frozenset[str]]:
    return (frozenset(chosen) for size in range(len(things) + 1) for chosen in combinations(things, size))
