import contextlib
import math
from fractions import Fraction

import pytest

from course_pp.schedule import Action, Costs, Overlap, Schedule, build, names, simulate, theory
from tests.grids import folded
from tests.schedule.sizes import built


def test_latency_is_charged_once_a_message_and_occupies_nobody() -> None:
    tl = simulate(build("naive", 3, 1), Costs(1, 1, 1, latency=Fraction(1, 2)))
    assert tl.makespan == 3 * 3 + 4 * Fraction(1, 2)
    assert tl.busy == (3, 3, 3)


def test_two_stages_on_one_rank_send_nothing() -> None:
    slow, fast = (
        simulate(build("zb_v", 1, 3), Costs(1, 1, 1, latency=latency)) for latency in (100, 0)
    )
    assert slow.makespan == fast.makespan == 18


def test_a_message_takes_its_latency_and_its_bytes_over_the_bandwidth() -> None:
    costs = Costs(1, 1, 1, latency=(1, 2), message_bytes=(10, 20), bandwidth=30)
    assert costs.transfers(3) == (1 + Fraction(1, 3), 2 + Fraction(2, 3))
    assert simulate(build("naive", 3, 1), costs).makespan == 9 + 2 * sum(costs.transfers(3))


def test_stages_may_cost_differently() -> None:
    tl = simulate(build("gpipe", 2, 2), Costs((1, 3), (2, 1), (1, 1)))
    assert [(str(s.action), s.start, s.end) for s in tl.spans] == [
        *[("0F0", 0, 1), ("0F1", 1, 2), ("0B0", 9, 12), ("0B1", 12, 15)],
        *[("1F0", 1, 4), ("1F1", 4, 7), ("1B0", 7, 9), ("1B1", 9, 11)],
    ]


def test_recomputation_lengthens_the_half_that_needs_the_activation() -> None:
    times = Costs(1, 2, 3, recompute=1).durations(1)
    assert {kind: time for kind, (time,) in times.items()} == {
        "F": 1,
        "I": 3,
        "W": 3,
        "B": 6,
        "U": 0,
    }
    assert simulate(build("pipedream", 1, 3), Costs(1, 1, 1, update=2)).makespan == 3 * 5


def test_an_overlapped_pair_takes_its_own_time_or_that_of_its_parts() -> None:
    pair = Overlap(Action(0, "F", 1), Action(0, "B", 0))
    schedule = Schedule("pair", ((0,),), ((Action(0, "F", 0), pair, Action(0, "B", 1)),))
    assert simulate(schedule, Costs(1, 2, 3)).makespan == 12
    assert simulate(schedule, Costs(1, 2, 3, overlapped=5)).makespan == 11


@pytest.mark.parametrize("name", names())
def test_fractions_stay_exact(name: str) -> None:
    third = simulate(
        built(name, 3, 6), Costs(Fraction(1, 3), Fraction(1, 3), Fraction(1, 3), Fraction(1, 21))
    )
    whole = simulate(built(name, 3, 6), Costs(7, 7, 7, 1))
    assert third.makespan == Fraction(whole.makespan, 21)
    assert simulate(built(name, 3, 6)) == simulate(built(name, 3, 6), Costs(1, 1, 1))
    assert isinstance(third.bubble_fraction, Fraction)


@pytest.mark.parametrize(
    "name",
    [
        "forward",
        "input_grad",
        "weight_grad",
        "latency",
        "recompute",
        "overlapped",
        "update",
        "activation",
    ],
)
@folded("value", [-1, math.nan, math.inf, "1", True, [1, -1], None])
def test_impossible_costs_are_refused_by_name(name: str, value: object) -> None:
    if value is None and name == "overlapped":
        return
    with pytest.raises(ValueError, match=f"{name} is .*: give a (finite )?number"):
        Costs(**{name: value})


def test_costs_that_contradict_one_another_are_refused() -> None:
    with pytest.raises(ValueError, match="bandwidth is 0: give one number above 0"):
        Costs(bandwidth=0)
    with pytest.raises(ValueError, match=r"released_by_input_grad is 2 but the forward keeps 1\.5"):
        Costs(activation=[3, 1.5], released_by_input_grad=2)


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        (
            Costs(forward=[1, 2, 3]),
            "forward has 3 values for 4 stages: give one number, or one for each",
        ),
        (Costs(latency=[1] * 4), "latency has 4 values for 3 boundaries"),
        (Costs(message_bytes=[1], bandwidth=1), "message_bytes has 1 values for 3 boundaries"),
        (Costs(overlapped=[1]), "overlapped has 1 values for 4 stages"),
    ],
)
def test_costs_must_fit_the_number_of_stages(costs: Costs, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate(build("1f1b", 4, 4), costs)


@pytest.mark.parametrize("name", names())
def test_costs_of_zero_make_a_run_of_no_time_without_a_bubble(name: str) -> None:
    timeline = simulate(build(name, 2, 4), Costs(0, 0, 0))
    assert timeline.makespan == timeline.bubble_fraction == timeline.span_bubble_fraction == 0
    with contextlib.suppress(theory.NoClosedForm):
        form = theory.predict(name, 2, 4, Costs(0, 0, 0))
        assert form.makespan == form.bubble_fraction == form.bubble_overhead == 0
