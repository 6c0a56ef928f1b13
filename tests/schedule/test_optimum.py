import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import product

import pytest

from course_pp.schedule import Action, Costs, Schedule, Time, check, optimum, search, simulate
from course_pp.schedule.problem import OrderProblem
from course_pp.schedule.searching.search import questions
from tests.grids import crossed

pytest.importorskip("ortools")


def merged(*chains: Sequence[Action]) -> Iterator[tuple[Action, ...]]:
    """Yield every order of all actions that keeps the order within each chain."""
    if not any(chains):
        yield ()
    for i, chain in enumerate(chains):
        if chain:
            for rest in merged(*chains[:i], chain[1:], *chains[i + 1 :]):
                yield (chain[0], *rest)


def least_of_all_orders(placement: Sequence[Sequence[int]], m: int, costs: Costs, cap: int) -> Time:
    """Return the least makespan of all orders that can run within the cap.

    Microbatches may come in any order.
    """
    rows = []
    for rank in range(1 + max(map(max, placement))):
        here = [stage for stage, ranks in enumerate(placement) if rank in ranks]
        chains = [[Action(stage, kind, i) for kind in "FIW"] for stage in here for i in range(m)]
        rows.append([row for row in merged(*chains) if most_held(row) <= cap])
    schedules = (Schedule("any", tuple(placement), orders) for orders in product(*rows))
    return min(simulate(each, costs).makespan for each in schedules if not check(each))


def most_held(row: Sequence[Action]) -> int:
    held = [0]
    for action in row:
        held.append(held[-1] + (action.kind == "F") - (action.kind == "W"))
    return max(held)


def least_of_all_words(problem: OrderProblem) -> Time:
    """Return the same with the microbatches in order, which is quick enough for more sizes."""

    def words(rank: int) -> Iterator[list[int]]:
        letters = problem.letters_of(rank)
        m = problem.n_microbatches

        def grown(word: list[int], counts: tuple[int, ...]) -> Iterator[list[int]]:
            if len(word) == m * len(letters):
                yield word
            for i, letter in enumerate(letters):
                if counts[i] < (counts[i - 1] if i else m) and problem.row_fits(
                    rank, [*word, letter]
                ):
                    yield from grown(
                        [*word, letter], (*counts[:i], counts[i] + 1, *counts[i + 1 :])
                    )

        return grown([], (0,) * len(letters))

    runs = map(problem.run, product(*map(list, map(words, range(problem.n_ranks)))))
    return min(run.makespan for run in runs if run is not None)


def drawn(seed: int, n_stages: int) -> Costs:
    rng = random.Random(seed)
    times = [[rng.randint(1, 6) for _ in range(n_stages)] for _ in range(3)]
    return Costs(*times, latency=rng.choice([0, 0, 1, 3]))


@pytest.mark.parametrize(
    ("p", "m", "n_chunks", "placement", "cap", "seed"),
    [
        (2, 2, 1, "loop", 1, 0),
        (2, 2, 1, "loop", 2, 1),
        (2, 2, 1, "loop", 2, 2),
        (2, 1, 2, "loop", 2, 3),
        (2, 1, 2, "v", 2, 4),
    ],
)
def test_it_agrees_with_every_order_of_every_microbatch(
    p: int, m: int, n_chunks: int, placement: str, cap: int, seed: int
) -> None:
    costs = drawn(seed, p * n_chunks)
    found = optimum(p, m, costs, cap, n_chunks, placement=placement)
    assert found.proven
    assert found.timeline.makespan == least_of_all_orders(found.schedule.placement, m, costs, cap)


@pytest.mark.parametrize(
    ("p", "m", "cap", "seed"),
    crossed(
        [(2, 3, 1), (2, 3, 2), (2, 3, 3), (3, 2, 1), (3, 2, 2), (4, 2, 1), (4, 2, 2)], range(6)
    ),
)
def test_it_agrees_with_every_order_of_a_small_pipeline(
    p: int, m: int, cap: int, seed: int
) -> None:
    costs = drawn(seed, p)
    found = optimum(p, m, costs, cap, seconds=30)
    (question,) = questions(p, m, costs, cap, 1, "loop", True)
    assert found.proven
    assert found.timeline.makespan == found.bound == least_of_all_words(question.problem)
    assert search(p, m, costs, cap, seconds=1).timeline.makespan >= found.bound


def test_a_cap_that_the_bound_says_too_little_about_takes_the_solver() -> None:
    costs = Costs(7, 12, 10)
    found = optimum(2, 4, costs, 2)
    (question,) = questions(2, 4, costs, 2, 1, None, True)
    assert found.proven
    assert question.bound == 125 < found.bound == 128 == least_of_all_words(question.problem)


def test_the_proof_is_for_the_decimals_that_floats_print_as() -> None:
    costs = Costs(0.1, 0.2, 0.3, latency=0.05)
    found = optimum(2, 3, costs, 2)
    exact = optimum(2, 3, Costs(*(Fraction(n, 20) for n in (2, 4, 6)), latency=Fraction(1, 20)), 2)
    assert found.proven
    assert found.timeline.makespan == pytest.approx(float(exact.timeline.makespan))
    assert found.timeline == simulate(found.schedule, costs)
    assert found.gap == 0


def test_without_time_for_a_proof_the_gap_is_left() -> None:
    costs = drawn(3, 8)
    found = optimum(4, 8, costs, 3, 2, seconds=0.3, placement="v")
    assert not found.proven
    assert found.stopped == "time"
    assert found.bound < found.timeline.makespan
    assert found.gap > 0


_INTERRUPTED_TWICE = """
import os, signal, threading
from ortools.sat.python.cp_model import CpSolver
from course_pp.schedule import Costs, optimum
from course_pp.schedule.searching import exact

def interrupted(solver, model, solve=CpSolver.solve):
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    return solve(solver, model)

answer = exact.answer
exact.answer = lambda question, deadline, seed: answer(question, 0, seed)  # no time for the search before
optimum(2, 4, Costs(7, 12, 10), 2)
CpSolver.solve = interrupted
for _ in range(2):
    try:
        optimum(4, 8, Costs((3, 1, 4, 1, 5, 9, 2, 6), 2, 7), 3, 2, seconds=90, placement="v")
    except KeyboardInterrupt:
        print("interrupted")
"""


@pytest.mark.slow
def test_an_interrupt_ends_it_and_not_the_process() -> None:
    command = [sys.executable, "-c", _INTERRUPTED_TWICE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "interrupted\n" * 2), done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"memory_limit": 0}, "memory_limit is 0 on rank 0.*give at least 1"),
        ({"seconds": 0}, "optimum: seconds is 0: give a time limit above 0"),
        ({"costs": Costs(Fraction(1, 10**9 + 7), Fraction(1, 10**9 + 9))}, "so many digits"),
    ],
)
def test_what_cannot_be_solved_is_refused_by_name(
    arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        optimum(**{"n_ranks": 2, "n_microbatches": 2, **arguments})
