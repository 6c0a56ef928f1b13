"""The least makespan of every small pipeline: a table that ``benchmarks/optima.py`` makes, and how
to read it.

What it shows, notebook 11 says. A row tells the order of each rank as a word, such as
``FFIFWIWIW``: microbatches are alike, so the k-th letter of a kind is the k-th microbatch (see
:mod:`course_pp.schedule.problem`).
"""

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from importlib.resources import files

from course_pp.schedule.action import Action, Time
from course_pp.schedule.catalogue import find, names
from course_pp.schedule.costs import Costs
from course_pp.schedule.schedule import Schedule, looped

NAMED = tuple(name for name in names() if not find(name).updates)


@dataclass(frozen=True)
class OptimumRow:
    """One size, one cap, one set of costs.

    Attributes:
        times: of ``F``, ``I`` and ``W``, the same in every stage; no latency.
        split: whether the backward was in halves, ``I`` and ``W``, or whole.
        cap: how many activations each rank may hold.
        makespan: the least that was found.
        bound: the most that was proven: no order takes less.
        named: of each schedule of the catalogue that exists in this size and fits, the makespan.
            Those with two stages a rank have stages of half the work, whose activations weigh half.
        words: the order of each rank.
    """

    times: tuple[int, int, int]
    split: bool
    n_ranks: int
    n_microbatches: int
    cap: int
    makespan: int
    bound: int
    named: Mapping[str, Time]
    words: tuple[str, ...]

    @property
    def proven(self) -> bool:
        return self.bound == self.makespan

    @property
    def costs(self) -> Costs:
        return Costs(*self.times)

    @property
    def schedule(self) -> Schedule:
        """The order that takes ``makespan``."""
        rows = []
        for stage, word in enumerate(self.words):
            counts = dict.fromkeys("FBIW", 0)
            row = []
            for kind in word:
                row.append(Action(stage, kind, counts[kind]))
                counts[kind] += 1
            rows.append(tuple(row))
        return Schedule("optimum", looped(self.n_ranks), tuple(rows))


@cache
def optima() -> tuple[OptimumRow, ...]:
    """Return the table: p up to 4, m up to 8, caps from 1 to 2p activations; F = I = W, and a layer's 10 : 12 : 7."""
    text = files("course_pp.schedule").joinpath("optima.csv").read_text(encoding="utf-8")
    return tuple(map(read_row, csv.DictReader(text.splitlines())))


def read_row(cells: Mapping[str, str]) -> OptimumRow:
    numbers = {
        name: int(cells[name]) for name in ("F", "I", "W", "p", "m", "cap", "makespan", "bound")
    }
    return OptimumRow(
        (numbers["F"], numbers["I"], numbers["W"]),
        cells["backward"] == "halves",
        numbers["p"],
        numbers["m"],
        numbers["cap"],
        numbers["makespan"],
        numbers["bound"],
        # a schedule newer than the table: absent
        {name: Fraction(cells[name]) for name in NAMED if cells.get(name)},
        tuple(cells["order"].split("/")),
    )
