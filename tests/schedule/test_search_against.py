"""A search is never worse than what has a name, nor than the heuristic of the Zero Bubble authors."""

import random

import pytest

from course_pp.schedule import Costs, Time, check, search, simulate
from course_pp.schedule.searching.heuristics import zero_bubble_heuristic
from course_pp.schedule.searching.search import questions

SECONDS = 5.0


def drawn(seed: int) -> tuple[int, int, Costs, list[int], int]:
    """Sizes, costs with unequal stages and latency, caps from p to 2p ranks' worth, and the stages a rank."""
    rng = random.Random(seed)
    p = rng.randint(2, 8)
    m = rng.randint(p, 2 * p)
    n_chunks = 2 if seed % 5 == 0 else 1
    stages = p * n_chunks
    times = [[rng.uniform(0.5, 2) for _ in range(stages)] for _ in range(3)]
    latency = [rng.choice([0, rng.uniform(0, 1)]) for _ in range(stages - 1)]
    one = rng.randint(p, 2 * p)
    caps = [rng.randint(p, 2 * p) for _ in range(p)] if rng.random() < 0.5 else [one] * p
    return p, m, Costs(*times, latency=latency), [n_chunks * cap for cap in caps], n_chunks


@pytest.mark.parametrize(
    "seed", [seed if seed in (1, 2, 3, 6, 8, 13) else pytest.param(seed, marks=pytest.mark.full) for seed in range(300)]
)
@pytest.mark.slow
def test_it_is_at_least_as_good_as_every_name_that_fits_and_as_the_published_heuristic(seed: int) -> None:
    p, m, costs, caps, n_chunks = drawn(seed)
    found = search(p, m, costs, caps, n_chunks, seconds=SECONDS)
    assert check(found.schedule) == []
    assert simulate(found.schedule, costs) == found.timeline
    assert all(held <= cap for held, cap in zip(found.timeline.peak_activations, caps, strict=True))
    least = least_of_others(p, m, costs, caps, n_chunks)
    assert found.bound * (1 - 1e-9) <= found.timeline.makespan <= least * (1 + 1e-9)


def least_of_others(p: int, m: int, costs: Costs, caps: list[int], n_chunks: int) -> Time:
    """The least makespan of every schedule of the catalogue that fits and of the published heuristic."""
    others = []
    for question in questions(p, m, costs, caps, n_chunks, None, split=True):
        others += [simulate(each, costs).makespan for each in question.named()]
        orders = (question.problem.schedule_of("heuristic", each) for each in zero_bubble_heuristic(question.problem))
        others += [simulate(each, costs).makespan for each in orders]
    return min(others)


def test_the_heuristic_makes_zb_h2_where_all_takes_equally_long() -> None:
    """Figure 3 of the paper: with room for 2p - 1 microbatches, no rank waits between its first and last action."""
    (question,) = questions(4, 8, Costs(), 7, 1, None, split=True)
    orders = [question.problem.schedule_of("heuristic", each) for each in zero_bubble_heuristic(question.problem)]
    assert all(check(order) == [] for order in orders)
    assert min(simulate(order).span_bubble_fraction for order in orders) == 0


def test_the_heuristic_answers_its_open_questions_in_eight_ways() -> None:
    """The same orders as those of the authors' own code, on this case and on 2,612 others, when it was compared."""
    costs = Costs((3, 1, 2, 4, 2), (2, 5, 3, 3, 1), (4, 2, 2, 1, 3), latency=2)
    (question,) = questions(5, 9, costs, 7, 1, None, split=True)
    runs = [question.problem.run(words) for words in zero_bubble_heuristic(question.problem)]
    assert [run.makespan for run in runs if run] == [105, 105, 107, 107, 106, 109, 108, 108]


@pytest.mark.parametrize("seed", [1, 6, 7, 9, 10, 20])
def test_without_time_to_improve_it_is_still_as_good_as_every_name_and_the_heuristic(seed: int) -> None:
    p, m, costs, caps, n_chunks = drawn(seed)
    found = search(p, m, costs, caps, n_chunks, seconds=1e-9)
    assert found.timeline.makespan <= least_of_others(p, m, costs, caps, n_chunks) * (1 + 1e-9)


@pytest.mark.parametrize("n_chunks", [1, 2])
def test_it_ends_when_its_time_is_over(n_chunks: int) -> None:
    found = search(8, 16, Costs((1.0, 2.0) * 4 * n_chunks, latency=0.3), 8 * n_chunks, n_chunks, seconds=0.05)
    assert found.stopped == "time"
    assert check(found.schedule) == []
