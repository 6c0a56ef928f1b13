"""What graders say of mutants of the solutions: ``python -m tests.exercises.mutants [NAME ...]``.

Each mutant has to be refused, or be as right as the solution: then it stands in ``mutants.toml``
with the reason.
"""

from __future__ import annotations

import argparse
import linecache
import multiprocessing
import sys
import time
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from course_pp.exercises import Verdict
from course_pp.exercises.checking import judge
from course_pp.exercises.exercise import Exercise, exercises, find
from tests.exercises.mutator import Mutant, mutants

TABLE = Path(__file__).with_name("mutants.toml")
LIMIT_S = 3.0
N_PROCESSES = 2


class Judged(NamedTuple):
    """What was said of one mutant."""

    exercise: str
    change: str
    verdict: Verdict
    seconds: float


def survivors() -> dict[str, dict[str, str]]:
    """Mutants that are as right as the solution, by exercise and change, with the reason."""
    table: dict[str, dict[str, str]] = _table()["survivors"]
    return table


def found() -> dict[str, list[str]]:
    """Mutants that graders accepted until they were tested with them."""
    table: dict[str, list[str]] = _table()["found"]
    return table


def _table() -> dict[str, Any]:
    return tomllib.loads(TABLE.read_text(encoding="utf-8"))


def mutants_of(exercise: Exercise) -> tuple[Mutant, ...]:
    return mutants(exercise.source)


def function_of(exercise: Exercise, source: str) -> Callable[..., Any]:
    """The function that ``source`` defines, as a notebook's cell would define it."""
    file = f"<ipython-input-{abs(hash(source))}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    names = {**vars(sys.modules[exercise.solution.__module__]), "__name__": "a_notebook"}
    exec(compile(source, file, "exec"), names)
    fn: Callable[..., Any] = names[exercise.name]
    return fn


def judged(name: str, mutant: Mutant, limit_s: float) -> Judged:
    """The verdict on one mutant, within ``limit_s`` a call at most."""
    exercise, begun = find(name), time.monotonic()
    verdict = judge(
        replace(exercise, limit_s=min(limit_s, exercise.limit_s)),
        function_of(exercise, mutant.source),
    )
    return Judged(name, mutant.change, verdict, time.monotonic() - begun)


def judged_all(exercises: Iterable[Exercise]) -> Iterator[Judged]:
    """Yield the verdicts on all mutants, judged by a few processes side by side.

    A mutant that hangs ends at the limit.
    """
    known = survivors()
    jobs = [
        (
            exercise.name,
            mutant,
            exercise.limit_s if mutant.change in known.get(exercise.name, ()) else LIMIT_S,
        )
        for exercise in exercises
        for mutant in mutants_of(exercise)
    ]
    # Not forked: each has a server of its own that starts its ranks.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(N_PROCESSES, context) as pool:
        yield from pool.map(judged, *zip(*jobs, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="exercises; all, if none is given")
    parser.add_argument(
        "--told",
        action="store_true",
        help="print what each mutant is told, grouped by what it says",
    )
    args = parser.parse_args()
    chosen = [find(name) for name in args.names] or list(exercises())
    known, alive = survivors(), 0
    told: dict[tuple[str, str], list[Judged]] = defaultdict(list)
    for each in judged_all(chosen):
        told[each.exercise, each.verdict.text].append(each)
        if each.verdict.status == "not yet":
            continue
        why = known.get(each.exercise, {}).get(each.change)
        alive += why is None
        print(
            f"{each.exercise}: {each.change}\n    {each.verdict.status}:"
            f" {why or 'NOT IN THE TABLE'}",
            flush=True,
        )
    if args.told:
        for (_, text), group in told.items():
            print(
                "",
                "=" * 100,
                *(f"{each.change}   [{each.seconds:.1f} s]" for each in group),
                text,
                sep="\n",
            )
    n = sum(map(len, told.values()))
    print(f"{n} mutants, {alive} accepted that are not in {TABLE.name}")
    return min(alive, 1)


if __name__ == "__main__":
    sys.exit(main())
