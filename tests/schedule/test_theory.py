import random
from fractions import Fraction
from itertools import product

import pytest

from course_pp.schedule import Costs, Timeline, build, names, simulate, theory
from tests.grids import thinned
from tests.schedule.sizes import TWO_COPIES

# Values of f, b, w around and on every condition of a form. They are integers, so that thousands of
# points are quick. The simulator only adds and compares, so a form that holds for integers holds
# for their fractions as well, as a test below shows.
RATIOS = [
    (2, 2, 2),
    (4, 4, 2),
    (6, 6, 4),
    (8, 8, 5),
    (9, 9, 7),
    (2, 4, 2),
    (1, 2, 3),
    (4, 2, 2),
    (4, 2, 4),
    (2, 5, 2),
    (5, 7, 11),
    (6, 6, 2),
]
LATENCIES = (0, 1, 30)
CHUNKED = ("interleaved_1f1b", "looped_bfs", "zb_h1")
FORMED = [name for name in names() if name in theory._FORMS]
ENOUGH = dict.fromkeys(FORMED, 500) | {"v_half": 80, "v_min": 80, "chimera": 200, "dualpipe": 150}


def grid(name: str) -> list[tuple[int, int, int | None, tuple[int, int, int], int]]:
    """Return (ranks, microbatches, chunks, ratio, latency) in an order that mixes sizes.

    Every point at which a form may change is among them.
    """
    chunks = (1, 2, 3) if name in CHUNKED else (2, 4) if name == "hanayo" else (None,)
    ratios, latencies = (RATIOS[:1], (0,)) if name in ("v_half", "v_min") else (RATIOS, LATENCIES)
    points = list(product((*range(1, 8), 10), (*range(1, 20), 24, 30), chunks, ratios, latencies))
    random.Random(name).shuffle(points)
    return points


@thinned
@pytest.mark.parametrize("name", FORMED)
@pytest.mark.slow
def test_the_closed_form_equals_the_simulation_exactly_wherever_it_holds(
    name: str, every: int
) -> None:
    points, enough = 0, ENOUGH[name] // every
    for p, m, v, ratio, latency in grid(name):
        costs = Costs(*ratio, latency)
        try:
            form = theory.predict(name, p, m, costs, v)
        except ValueError:
            continue
        assert_equal(form, simulate(build(name, p, m, v), costs), (p, m, v, ratio, latency))
        points += 1
        if points == enough:
            return
    pytest.fail(f"the conditions of {name} leave only {points} of {enough} points")


@thinned
@pytest.mark.slow
def test_the_form_of_interleaved_1f1b_holds_for_every_round_size_of_at_least_p(every: int) -> None:
    sizes = product(range(1, 7), range(1, 19), (1, 2, 3, 4), range(1, 19), RATIOS, LATENCIES)
    cases = [(p, m, v, n, ratio, latency) for p, m, v, n, ratio, latency in sizes if p <= n <= m]
    random.Random(0).shuffle(cases)
    held = 0
    for p, m, v, n, ratio, latency in cases[: 4000 // every]:
        costs, where = Costs(*ratio, latency), (p, m, v, n, ratio, latency)
        try:
            schedule = build("interleaved_1f1b", p, m, v, round_size=n)
        except ValueError:  # the last round is too short for the ranks not to wait in a circle
            continue
        try:
            form = theory.predict("interleaved_1f1b", p, m, costs, v, round_size=n)
        except theory.NoClosedForm:
            assert (v > 1 and 0 < m % n < p) or latency > min(ratio[0], ratio[1] + ratio[2]), where
            continue
        assert_equal(form, simulate(schedule, costs), where)
        held += 1
    assert held > 1000 // every


@pytest.mark.parametrize("name", FORMED)
def test_fractions_are_predicted_exactly_too(name: str) -> None:
    for p, m in (
        ((2, 4), (2, 6), (4, 12)) if name in TWO_COPIES else ((1, 3), (2, 6), (3, 6), (4, 12))
    ):
        costs = Costs(
            Fraction(1, 3),
            Fraction(1, 3),
            Fraction(1, 3) if name in ("v_half", "v_min") else Fraction(2, 7),
        )
        form, tl = theory.predict(name, p, m, costs), simulate(build(name, p, m), costs)
        assert_equal(form, tl, (p, m))
        assert tl.bubble_fraction == form.bubble_fraction
        assert tl.span_bubble_fraction == form.span_bubble_fraction
        assert isinstance(form.bubble_fraction, Fraction)


def assert_equal(form: theory.ClosedForm, tl: Timeline, where: object) -> None:
    assert tl.makespan == form.makespan, where
    assert tl.busy == form.work, where
    assert tl.peak_activations == form.peak_activations, where
    assert max(row[-1].end - row[0].start for row in tl.by_rank) == form.longest_span, where


THIRDS = Costs(
    *([Fraction(t, 3) for t in row] for row in ([1, 4, 2], [2, 1, 7], [1, 1, 1], [5, 1]))
)


@pytest.mark.parametrize(
    ("name", "p", "m", "costs"),
    [
        *((name, 3, m, THIRDS) for name in ("naive", "gpipe") for m in (1, 2, 5, 9)),
        *(
            ("dualpipe_v", p, m, Costs(12, 12, 10, overlapped=pair))
            for p, m in ((1, 2), (2, 4), (3, 8), (4, 8), (5, 20))
            for pair in (34, 30, 22, 40)
        ),
        *(
            ("pipedream", p, m, Costs(1, 1, 1, update=Fraction(1, 5)))
            for p, m in ((1, 1), (2, 5), (4, 3), (4, 12))
        ),
        ("1f1b", 4, 8, Costs(1, 1, 1, recompute=1)),
    ],
)
def test_a_form_holds_for_stages_pairs_and_updates_of_their_own_times(
    name: str, p: int, m: int, costs: Costs
) -> None:
    assert_equal(theory.predict(name, p, m, costs), simulate(build(name, p, m), costs), (p, m))


def test_published_numbers_for_four_ranks_and_eight_microbatches() -> None:
    unit = Costs(1, 1, 1)
    # GPipe: (p-1) / (m+p-1)
    assert theory.predict("gpipe", 4, 8, unit).bubble_fraction == Fraction(3, 11)
    # Megatron: (p-1) / m
    assert theory.predict("1f1b", 4, 8, unit).bubble_overhead == Fraction(3, 8)
    # (p-1) / (v m)
    assert theory.predict("interleaved_1f1b", 4, 8, unit).bubble_overhead == Fraction(3, 16)
    assert theory.predict("zb_h1", 4, 8, unit).longest_span == 24 + 3  # a third of 1F1B's 9
    assert theory.predict("zb_h2", 4, 8, unit).span_bubble_fraction == 0
    assert theory.predict("zb_v", 4, 8, unit).span_bubble_fraction == 0


@pytest.mark.parametrize(
    ("name", "p", "m", "v", "costs", "condition"),
    [
        ("1f1b", 2, 4, None, Costs(forward=[1, 2]), "all stages, and all messages, cost the same"),
        ("interleaved_1f1b", 4, 3, 2, Costs(), "rounds have at least p microbatches"),
        ("interleaved_1f1b", 4, 8, 2, Costs(latency=2), "the latency is at most f and at most B"),
        ("zb_h1", 4, 3, None, Costs(), "m is at least p"),
        ("zb_h1", 4, 8, 2, Costs(), "one chunk"),
        ("zb_h1", 4, 8, None, Costs(latency=1), "2 L <= w"),
        ("zb_h2", 4, 6, None, Costs(), "m is at least 2p - 1"),
        ("zb_v", 4, 8, None, Costs(1, 2, 1), "f = b"),
        ("dualpipe_v", 4, 8, None, Costs(overlapped=1.5), "at least as long as either part"),
        (
            "dualpipe_v",
            2,
            8,
            None,
            Costs(overlapped=[3, 3, 3, 4]),
            "all overlapped pairs cost the same",
        ),
        ("v_half", 4, 8, None, Costs(1, 2, 1), "f = b = w and there is no latency"),
        ("v_min", 4, 7, None, Costs(), "m is at least 2p"),
        ("hanayo", 4, 9, None, Costs(), "m is a multiple of p"),
        ("chimera", 4, 8, None, Costs(latency=1), "there is no latency"),
        ("dualpipe", 2, 8, None, Costs(latency=1), "there is no latency"),
        (
            "pipedream",
            4,
            8,
            None,
            Costs(latency=1, update=1),
            "no latency, or updates take no time",
        ),
        ("zb_v", 4, 0, None, Costs(), "at least 1"),
    ],
)
def test_where_no_form_holds_the_condition_is_named(name, p, m, v, costs, condition) -> None:
    with pytest.raises(ValueError, match=condition):
        theory.predict(name, p, m, costs, v)


def test_a_schedule_without_a_form_is_refused_with_those_that_have_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert len(FORMED) >= 16
    monkeypatch.delitem(theory._FORMS, "gpipe")
    with pytest.raises(theory.NoClosedForm, match=r"gpipe.*naive, 1f1b"):
        theory.predict("gpipe", 4, 8)
