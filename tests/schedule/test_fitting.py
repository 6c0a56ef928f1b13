import dataclasses
import random
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from course_pp.schedule import (
    Action,
    Costs,
    Edge,
    Fit,
    Product,
    Receive,
    Schedule,
    Span,
    Timeline,
    build,
    fit,
    names,
    simulate,
)
from course_pp.schedule.fitting import Lengths, LossPlace, attribute, schedule_of
from course_pp.schedule.precedence import Precedence
from tests.grids import examples
from tests.schedule.planted import CAUSES, Planted
from tests.schedule.test_properties import costs_for, schedules

SIZES = [
    ("gpipe", 4, 8),
    ("gpipe", 8, 16),
    ("1f1b", 2, 6),
    ("1f1b", 4, 8),
    ("1f1b", 8, 16),
    ("interleaved_1f1b", 4, 8),
    ("zb_h1", 4, 8),
    ("zb_h1", 8, 16),
    ("zb_v", 4, 8),
    ("dualpipe_v", 4, 10),
]
# The places of the straggler and of the slow link: side by side, far apart, and at the ends.
PLANTS: list[Callable[[int], tuple[int, int]]] = [
    lambda p: (p - 1, 0),
    lambda p: (p // 2, p // 2 - 1),
    lambda p: (0, p - 2),
]


def rightly_attributed(found: Fit, truth: dict[str, float]) -> float:
    """Return the share of the lost time that was charged to its true cause."""
    misplaced = sum(abs(found.lost_to(cause).time - time) for cause, time in truth.items()) / 2
    return 1 - misplaced / sum(truth.values())


@pytest.mark.sample(4)
@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize(("name", "p", "m"), SIZES)
def test_a_straggler_and_a_slow_link_are_named_and_charged_with_what_they_cost(
    name: str, p: int, m: int, plant: Callable[[int], tuple[int, int]]
) -> None:
    rank, first = plant(p)
    link = (first, first + 1)
    planted = Planted(
        build(name, p, m), slowdown={rank: 1.5}, links={link: 0.03}, jitter=0.03, seed=m + first
    )
    found = fit(planted.measured())

    assert rightly_attributed(found, planted.truth()) >= 0.9
    straggler, transfer = found.lost_to("straggler"), found.lost_to("transfer")
    assert (straggler.where, transfer.where) == (rank, link)
    assert straggler.per_rank[rank] >= 0.9 * straggler.time
    assert transfer.per_link[link] >= 0.8 * transfer.time
    first_two = " ".join(found.findings[:2])
    assert f"Rank {rank} is a straggler" in first_two
    assert f"link {link[0]}–{link[1]}" in first_two


@pytest.mark.parametrize(("name", "p", "m"), SIZES)
def test_what_was_planted_is_estimated(name: str, p: int, m: int) -> None:
    planted = Planted(
        build(name, p, m),
        slowdown={1: 1.3},
        links={(0, 1): 0.02},
        launch=0.001,
        jitter=0.02,
        seed=p,
    )
    found = fit(planted.measured())
    assert found.slowdown == pytest.approx(
        [1.3 if rank == 1 else 1.0 for rank in range(p)], rel=0.05
    )
    assert found.links[0, 1] == pytest.approx(0.02, rel=0.05)
    assert all(
        time == pytest.approx(0.0005, abs=0.0006)
        for link, time in found.links.items()
        if link != (0, 1)
    )
    assert found.launch == pytest.approx([0.001] * p, rel=0.4)
    assert found.costs.forward == pytest.approx([0.02] * found.measured.n_stages, rel=0.08)
    assert found.predicted.makespan == pytest.approx(found.measured.makespan, rel=0.04)
    assert found.predicted.busy == pytest.approx(found.measured.busy, rel=0.03)
    for time, (one, other) in zip(
        found.costs.latency, pairwise(planted.schedule.placement), strict=True
    ):
        assert time == pytest.approx(found.links.get((min(one + other), max(one + other)), 0))


@pytest.mark.parametrize("name", names())
def test_without_jitter_the_prediction_is_the_measurement_and_the_fit_is_exact(name: str) -> None:
    schedule = build(name, 4, 8)
    costs = Costs(forward=2.0, input_grad=1.5, weight_grad=1.0, latency=0.25, update=0.5)
    measured = simulate(schedule, costs)
    found = fit(measured, costs)
    assert found.predicted.makespan == pytest.approx(measured.makespan)
    assert found.ideal.makespan == pytest.approx(
        simulate(schedule, dataclasses.replace(costs, latency=0)).makespan
    )
    assert found.slowdown == pytest.approx([1.0] * 4)
    assert found.costs.forward == pytest.approx([2.0] * schedule.n_stages)
    halves = zip(
        found.costs.each("input_grad", schedule.n_stages), found.costs.weight_grad, strict=True
    )
    assert [sum(each) for each in halves] == pytest.approx([2.5] * schedule.n_stages)
    assert found.lost_to("transfer").time == pytest.approx(found.total_lost)
    assert all(
        found.lost_to(cause).time == pytest.approx(0)
        for cause in ("imbalance", "launch", "straggler", "rest")
    )


@pytest.mark.parametrize(("name", "p", "m"), SIZES)
def test_without_jitter_every_action_is_predicted_when_it_was(name: str, p: int, m: int) -> None:
    planted = Planted(
        build(name, p, m),
        slowdown={0: 1.5},
        links={(0, 1): 0.01},
        launch=0.001,
        launch_spread=0.0,
        jitter=0.0,
    )
    found = fit(planted.measured())
    for span, other in zip(found.predicted.spans, found.measured.spans, strict=True):
        assert (span.start, span.end) == pytest.approx((other.start, other.end))
    assert found.lost_to("rest").time == pytest.approx(0)


def test_a_run_with_values_beyond_neighbours_is_predicted_with_them() -> None:
    measured = simulate(build("1f1b", 4, 8).with_edges(Edge("x", 0, (3,))), Costs(edge_latency=9.0))
    predicted = fit(measured).predicted
    assert schedule_of(predicted).edges == measured.edges
    assert any("for the value 'x' of microbatch" in gap.cause for gap in predicted.idle_gaps)


def test_fitted_costs_and_slowdowns_predict_another_order() -> None:
    planted = Planted(build("1f1b", 4, 8), slowdown={2: 1.5}, links={(0, 1): 0.01}, jitter=0.01)
    found = fit(planted.measured())
    other = dataclasses.replace(planted, schedule=build("gpipe", 4, 8)).measured()
    spread = {"latency": found.costs.latency} | {
        name: [
            time * slow
            for time, slow in zip(getattr(found.costs, name), found.slowdown, strict=True)
        ]
        for name in ("forward", "input_grad", "weight_grad")
    }
    assert simulate(build("gpipe", 4, 8), Costs(**spread)).makespan == pytest.approx(
        other.makespan, rel=0.02
    )


HEAD = Costs(
    forward=[0.02, 0.02, 0.02, 0.035], input_grad=[0.02, 0.02, 0.02, 0.03], weight_grad=0.02
)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h1"])
def test_a_stage_that_is_expected_to_be_large_is_imbalance_and_no_straggler(name: str) -> None:
    planted = Planted(build(name, 4, 8), costs=HEAD, slowdown={1: 1.4}, jitter=0.02)
    relative = Costs(forward=[4, 4, 4, 7], input_grad=[2, 2, 2, 3])
    found = fit(planted.measured(), expected=relative)
    assert rightly_attributed(found, planted.truth()) >= 0.9
    assert found.lost_to("imbalance").where == 3
    assert found.lost_to("straggler").where == 1
    assert found.slowdown == pytest.approx([1, 1.4, 1, 1], rel=0.05)
    assert found.costs.forward == pytest.approx(HEAD.forward, rel=0.05)


def test_the_same_stage_is_a_straggler_where_all_are_expected_to_be_equal() -> None:
    found = fit(Planted(build("1f1b", 4, 8), costs=HEAD).measured())
    assert found.findings[0].startswith("Rank 3 is a straggler, its work takes 1.4")


def test_stages_of_one_rank_that_differ_are_imbalance_whatever_was_expected() -> None:
    costs = Costs(
        forward=[0.02, 0.02, 0.02, 0.02, 0.01, 0.01, 0.01, 0.01], input_grad=0.02, weight_grad=0.02
    )
    found = fit(Planted(build("interleaved_1f1b", 4, 8), costs=costs, jitter=0.0).measured())
    assert found.slowdown == pytest.approx([1.0] * 4)
    assert found.costs.forward == pytest.approx(costs.forward)
    assert found.lost_to("straggler").time == pytest.approx(0)


def test_the_ideal_run_has_equal_stages_and_as_much_work() -> None:
    found = fit(Planted(build("1f1b", 4, 8), costs=HEAD, jitter=0.0).measured(), expected=HEAD)
    assert found.ideal.busy == pytest.approx([sum(found.measured.busy) / 4] * 4)
    fraction = Fraction(3, 11)  # (p - 1) / (m + p - 1)
    assert found.ideal.bubble_fraction == pytest.approx(float(fraction))


def test_causes_that_follow_one_another_are_charged_what_each_adds() -> None:
    # Rank 0 takes 2 for what should be 1, twice; then a message takes 1.
    spans = [
        Span(0, Action(0, "F", 0), 0, 2),
        Span(0, Action(0, "F", 1), 2, 4),
        Span(1, Action(1, "F", 0), 3, 4),
        Span(1, Action(1, "F", 1), 5, 6),
    ]
    found = fit(Timeline(2, tuple(spans)))
    assert (found.ideal.makespan, found.measured.makespan) == (3, 6)
    assert found.slowdown == pytest.approx([2, 1])
    assert {loss.cause: loss.time for loss in found.lost} == pytest.approx(
        {"straggler": 2, "transfer": 1, "imbalance": 0, "launch": 0, "rest": 0}
    )
    assert found.lost_to("transfer").per_rank == pytest.approx((0, 1))  # the one that receives


def test_a_message_that_lay_waiting_does_not_make_its_link_slow() -> None:
    planted = Planted(build("1f1b", 4, 16), slowdown={3: 2.0}, jitter=0.0, launch=0.0)
    assert fit(planted.measured()).links == pytest.approx(
        {(0, 1): 0.0005, (1, 2): 0.0005, (2, 3): 0.0005}
    )


def test_a_link_that_nobody_waited_for_is_taken_to_be_as_usual() -> None:
    # Breadth first, rank 0 is busy with its first stage when the first message comes round.
    planted = Planted(
        build("looped_bfs", 3, 12),
        links={(0, 2): 0.03},
        usual_transfer=0.01,
        jitter=0.0,
        launch=0.0,
    )
    assert fit(planted.measured()).links == pytest.approx(
        {(0, 1): 0.01, (1, 2): 0.01, (0, 2): 0.01}
    )


def test_a_measured_receive_tells_the_message_from_what_came_after_it() -> None:
    spans = (Span(0, Action(0, "F", 0), 0, 1), Span(1, Action(1, "F", 0), 3, 4))
    without = fit(Timeline(2, spans))
    assert without.links == {(0, 1): 2}
    received = fit(Timeline(2, spans, receives=(Receive(1, Product("activation", 0, 0), 0, 1.5),)))
    assert received.links == {(0, 1): 0.5}
    assert received.lost_to("rest").time == pytest.approx(1.5)


def test_jitter_alone_is_no_straggler() -> None:
    found = fit(
        Planted(build("1f1b", 4, 16), jitter=0.05, launch=0.0, usual_transfer=0.0).measured()
    )
    assert max(found.slowdown) < 1.05
    assert found.lost_to("straggler").time < 0.05 * found.measured.makespan
    assert found.lost_to("transfer").time == 0


def test_a_perfect_run_has_nothing_to_find() -> None:
    found = fit(simulate(build("gpipe", 4, 8)))
    assert found.findings == ("No cause costs a hundredth of the makespan.",)
    assert found.total_lost == 0
    assert {loss.where for loss in found.lost} == {None}


@st.composite
def measured_runs(draw: st.DrawFn) -> tuple[Timeline, Costs]:
    """Return any schedule run with any costs and with random changes of each span's length."""
    schedule = draw(schedules())
    costs = draw(costs_for(schedule))
    luck = random.Random(draw(st.integers(0, 10**6)))
    durations = [
        [luck.choice([0.0, 0.5, 1.0, 1.0, luck.random()]) for _ in row] for row in schedule.actions
    ]
    return simulate(schedule, costs, durations), costs


@given(measured_runs())
@examples(60)
@pytest.mark.slow
def test_the_parts_add_up_to_what_was_lost_by_cause_by_rank_and_by_link(
    case: tuple[Timeline, Costs],
) -> None:
    tl, expected = case
    found = fit(tl, expected)
    assert {loss.cause for loss in found.lost} == {*CAUSES, "rest"}
    close = {"rel": 1e-9, "abs": 1e-9}
    for more, less in pairwise(found.lost):
        assert more.time >= less.time or more.time == pytest.approx(less.time, abs=1e-6)
    assert sum(loss.time for loss in found.lost) == pytest.approx(found.total_lost, **close)
    assert float(tl.makespan) == pytest.approx(
        float(found.ideal.makespan) + found.total_lost, **close
    )
    for loss in found.lost:
        assert sum(loss.per_rank) == pytest.approx(loss.time, **close)
    transfer = found.lost_to("transfer")
    assert sum(transfer.per_link.values()) == pytest.approx(transfer.time, **close)
    assert transfer.time >= -1e-9
    assert found.lost_to("launch").time >= -1e-9
    assert found.lost_to("rest").time == pytest.approx(
        float(tl.makespan - found.predicted.makespan), **close
    )
    assert max(map(len, repr(found).splitlines())) <= 100
    for each in (found.predicted, found.ideal):
        assert schedule_of(each).actions == schedule_of(tl).actions


def test_it_prints_as_a_table_of_causes_and_one_of_ranks() -> None:
    planted = Planted(
        build("1f1b", 4, 8), slowdown={2: 1.5}, links={(0, 1): 0.03}, jitter=0.0, launch=0.0
    )
    lines = repr(fit(planted.measured())).splitlines()
    assert lines[0] == "1f1b on 4 ranks: measured 935 ms, predicted 935 ms, ideal 660 ms"
    assert lines[2].split() == ["straggler", "150", "ms", "16.0%", "rank", "2"]
    assert lines[3].split() == ["transfer", "125", "ms", "13.4%", "link", "0–1"]
    assert (
        " ".join(lines[9].split())
        == "rank slowdown launch straggler transfer imbalance launch rest"
    )
    assert lines[12].split()[:2] == ["2", "1.50"]
    assert "… and 24 more ranks" in repr(fit(simulate(build("gpipe", 40, 2))))


def two_steps(tl: Timeline) -> Timeline:
    again = (
        dataclasses.replace(s, start=s.start + tl.makespan, end=s.end + tl.makespan)
        for s in tl.spans
    )
    return Timeline(tl.n_ranks, (*tl.spans, *again), tl.unit)


ONE = simulate(build("1f1b", 2, 4))


@pytest.mark.parametrize(
    ("tl", "expected", "message"),
    [
        (Timeline(4, ()), None, "has no spans: record a step first"),
        (two_steps(ONE), None, "0F0 was done more than once.*several steps.*clear"),
        (Timeline(2, ONE.spans[:-1]), None, "not one whole step: 1B3 is missing from rank 1"),
        (Timeline(2, ONE.by_rank[1]), None, "no rank has stage 0.*all ranks"),
        (ONE, Costs(forward=[1, 2, 3]), "forward has 3 values for 2 stages"),
    ],
)
def test_what_is_not_one_step_of_these_stages_is_refused(
    tl: Timeline, expected: Costs | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        fit(tl, expected)
    with pytest.raises(ValueError, match="unknown cause 'weather': use one of imbalance"):
        fit(ONE).lost_to("weather")


def test_replicas_keep_the_order_in_which_they_take_microbatches() -> None:
    rows = ("0F1 0B1", "0F0 0B0", "1F0 1B0 1F1 1B1")
    actions = tuple(tuple(map(Action.parse, row.split())) for row in rows)
    schedule = Schedule("replicas", ((1, 0), (2,)), actions)
    assert schedule_of(simulate(schedule)).placement == schedule.placement


# Two replicas of one stage: nothing waits for anything, so the longer action is the makespan.
SIDE_BY_SIDE = Precedence.of(Schedule("", ((0, 1),), ((Action(0, "F", 0),), (Action(0, "F", 1),))))
MUCH, LITTLE = (
    next(i for i, (rank, _) in enumerate(SIDE_BY_SIDE.places) if rank == each) for each in (0, 1)
)


def lengths_with(causes: frozenset[str]) -> Lengths:
    actions = [1.0, 1.0]
    actions[MUCH] = 3.0 if "much" in causes else 1.0
    actions[LITTLE] = 2.0 if "little" in causes else 1.0
    return Lengths(actions, {})


def test_causes_that_hide_one_another_share_what_both_would_cost_where_it_arises() -> None:
    # Alone, much costs 2 and little 1; after the other, 1 and 0.
    lost = attribute(SIDE_BY_SIDE, ["much", "little"], lengths_with)
    assert {cause: sum(shares.values()) for cause, shares in lost.items()} == {
        "much": 1.5,
        "little": 0.5,
    }
    assert lost["much"][LossPlace(0, None)] == pytest.approx(1.5)
    assert lost["little"][LossPlace(1, None)] == pytest.approx(0.5)
    assert sum(attribute(SIDE_BY_SIDE, ["much", "nothing"], lengths_with)["nothing"].values()) == 0
