"""The least makespan of every small pipeline: a table that ``benchmarks/optima.py`` makes.

Notebook 11 shows what one can read from it. A row writes the order of each rank as a word, such as
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
    """The optimum of one size, one cap and one set of costs.

    Attributes:
        times: times of ``F``, ``I`` and ``W``, the same in every stage. Messages take no time.
        split: whether the backward was in halves, ``I`` and ``W``, or whole.
        cap: the most activations that each rank may hold.
        makespan: the least makespan that was found.
        bound: the highest time of which it was proven that no order is faster.
        named: {name: makespan} of the catalogue's schedules that exist in this size and fit. With
            two stages a rank, a stage has half the work, and its activation counts half.
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
    """Return the table: p up to 4, m up to 8, caps from 1 to 2p activations.

    The times are either F = I = W, or the times of a decoder layer, 10 : 12 : 7.
    """
    text = files("course_pp.schedule").joinpath("optima.csv").read_text(encoding="utf-8")
    return tuple(map(read_row, csv.DictReader(text.splitlines())))


def read_row(cells: Mapping[str, str]) -> OptimumRow:
    """Return the row of the table that one line of the file holds."""
    named: dict[str, Time] = {}
    for name in NAMED:
        # A schedule newer than the table has no cell.
        if cells.get(name):
            named[name] = Fraction(cells[name])
    return OptimumRow(
        times=(int(cells["F"]), int(cells["I"]), int(cells["W"])),
        split=cells["backward"] == "halves",
        n_ranks=int(cells["p"]),
        n_microbatches=int(cells["m"]),
        cap=int(cells["cap"]),
        makespan=int(cells["makespan"]),
        bound=int(cells["bound"]),
        named=named,
        words=tuple(cells["order"].split("/")),
    )
