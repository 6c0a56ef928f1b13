"""The least makespan of every small pipeline: makes the table that ``course_pp.schedule.optima``
reads.

    python benchmarks/optima.py [seconds a case]

p up to 4 ranks, m up to 8 microbatches, caps from 1 to 2p activations a rank; backwards in halves
and whole; F = I = W, and the times of a layer: a transformer block of width 256, on one thread of a
CPU, measured by ``course_pp.exercises.zero_bubble.time_halves()`` as 10 : 11.8 : 6.6 and rounded.
Takes minutes. A case that was proven is not done again, so an interrupted run goes on where it was,
and a longer limit tries the rest.
"""

import csv
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import course_pp.schedule
from course_pp.schedule import Costs, Time, build, find, optimum, simulate
from course_pp.schedule.optima import NAMED, OptimumRow, read_row

TABLE = Path(course_pp.schedule.__file__).with_name("optima.csv")
TIMES = [(1, 1, 1), (10, 12, 7)]
FIELDS = (
    "F",
    "I",
    "W",
    "backward",
    "p",
    "m",
    "cap",
    "makespan",
    "bound",
    "proven",
    *NAMED,
    "order",
)
Case = tuple[tuple[int, int, int], bool, int, int, int]


def main(seconds: float = 60.0) -> None:
    rows = {case_of(row): row for row in known()}
    for case in cases():
        if case in rows and rows[case].proven:
            continue
        rows[case] = solved(case, seconds, rows)
        row = rows[case]
        print(*case, row.makespan, "proven" if row.proven else f"at least {row.bound}", flush=True)
        save(rows)
    proven = sum(row.proven for row in rows.values())
    print(f"{len(rows)} cases, {proven} proven: {TABLE}")


def cases() -> Iterator[Case]:
    for times in TIMES:
        for split in (True, False):
            for p in range(1, 5):
                for m in range(1, 9):
                    for cap in range(1, 2 * p + 1):
                        yield times, split, p, m, cap


def solved(case: Case, seconds: float, rows: dict[Case, OptimumRow]) -> OptimumRow:
    times, split, p, m, cap = case
    named = named_makespans(p, m, Costs(*times), cap)
    if cap > m:  # no more than m activations are ever held
        least = rows[times, split, p, m, m]
        return OptimumRow(times, split, p, m, cap, least.makespan, least.bound, named, least.words)
    found = optimum(p, m, Costs(*times), cap, seconds=seconds, split=split)
    words = tuple(
        "".join(part.kind for action in row for part in action.parts)
        for row in found.schedule.actions
    )
    bound = -int(-found.bound // 1)  # makespans are whole numbers, as the times are
    return OptimumRow(times, split, p, m, cap, int(found.timeline.makespan), bound, named, words)


def case_of(row: OptimumRow) -> Case:
    return row.times, row.split, row.n_ranks, row.n_microbatches, row.cap


def known() -> list[OptimumRow]:
    if not TABLE.exists():
        return []
    with TABLE.open(encoding="utf-8", newline="") as file:
        return [read_row(cells) for cells in csv.DictReader(file)]


def save(rows: dict[Case, OptimumRow]) -> None:
    scratch = TABLE.with_suffix(".tmp")
    with scratch.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, FIELDS, lineterminator="\n")
        table.writeheader()
        table.writerows(written(rows[case]) for case in cases() if case in rows)
    scratch.replace(TABLE)


def written(row: OptimumRow) -> dict[str, str]:
    """Return the cells of a row."""
    numbers = dict(zip("FIW", row.times, strict=True)) | {
        "p": row.n_ranks,
        "m": row.n_microbatches,
        "cap": row.cap,
        "makespan": row.makespan,
        "bound": row.bound,
    }
    named = {
        name: format(float(row.named[name]), "g") if name in row.named else "" for name in NAMED
    }
    kinds = {
        "backward": "halves" if row.split else "whole",
        "proven": "yes" if row.proven else "no",
    }
    return {
        **{k: str(v) for k, v in numbers.items()},
        **kinds,
        **named,
        "order": "/".join(row.words),
    }


def named_makespans(n_ranks: int, n_microbatches: int, costs: Costs, cap: int) -> dict[str, Time]:
    """Of each schedule of the catalogue that exists in this size and keeps to the cap, the
    makespan.

    Args:
        costs: of a rank's whole work, equal for all; two stages a rank share it.
        cap: in activations of all that a rank holds.
    """
    found: dict[str, Time] = {}
    for name in NAMED:
        try:
            schedule = build(name, n_ranks, n_microbatches)
        except ValueError:  # a size that this one does not allow
            continue
        parts = find(name).n_chunks
        times = [Fraction(time) / parts for times in costs.durations(1).values() for time in times]
        tl = simulate(schedule, Costs(times[0], times[1], times[2]))
        if max(tl.peak_activations) <= cap * parts:
            found[name] = tl.makespan
    return found


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
