from fractions import Fraction
from itertools import product
from random import Random

import pytest

from course_pp.schedule import (
    Action,
    Costs,
    Overlap,
    Schedule,
    bound,
    build,
    names,
    search,
    simulate,
)
from tests.schedule.sizes import built

UNIT = Costs(1, 1, 1)


@pytest.mark.parametrize("name", ["zb_h1", "zb_h2", "zb_v"])
@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 5), (4, 8), (5, 12)])
def test_the_zero_bubble_schedules_reach_the_bound_at_equal_thirds(
    name: str, p: int, m: int
) -> None:
    schedule = build(name, p, m)
    assert simulate(schedule, UNIT).makespan == bound(p, m, UNIT, placement=schedule.placement)


def test_the_last_ranks_wait_and_its_work_and_the_way_of_one_microbatch_count() -> None:
    assert bound(4, 8, UNIT) == 3 + 8 * 3
    assert bound(2, 8, UNIT, placement=[0, 1]) == bound(2, 8, UNIT)
    costs = Costs((1, 2, 3), (4, 5, 6), (1, 1, 1), latency=(10, 20))
    assert bound(3, 1, costs) == (1 + 2 + 3) + (6 + 5 + 4) + 1 + 2 * 30


def test_one_rank_needs_its_work_and_no_more() -> None:
    schedule, costs = build("zb_v", 1, 1), Costs(1, 1, (1, 0))
    assert (
        bound(1, 1, costs, placement=schedule.placement) == simulate(schedule, costs).makespan == 5
    )


def test_a_slow_stage_sets_the_pace() -> None:
    costs = Costs((1, 1, 50, 1), 1, 1)
    assert bound(4, 100, costs) == 2 + 100 * 52
    # With little left for weight gradients, the way up through the first two stages counts instead.
    assert bound(4, 100, Costs((1, 1, 50, 1), 1, (1, 1, 0, 1))) == 2 + 100 * 51 + (1 + 1) + 1


def test_memory_for_one_microbatch_lets_one_pass_at_a_time() -> None:
    # From its forward on rank 0 to its weight gradient there: 4 forwards, 4 input gradients, 1
    # weight gradient.
    assert bound(4, 8, UNIT, memory_limit=1) == 8 * 9
    # Memory that the input gradient gives back is free for the next forward.
    assert bound(4, 8, Costs(1, 1, 1, released_by_input_grad=1), memory_limit=1) == 8 * 8 + 1


@pytest.mark.parametrize("limit", range(1, 9))
def test_more_memory_never_raises_the_bound(limit: int) -> None:
    assert bound(4, 16, UNIT, limit) >= bound(4, 16, UNIT, limit + 1) >= bound(4, 16, UNIT)


@pytest.mark.parametrize("name", names())
def test_a_limit_that_a_schedule_meets_in_floats_is_one_that_it_fits(name: str) -> None:
    for p, m, activation, weights in (
        (8, 16, 0.1, 0),
        (1, 2, 0.1, 0.7),
        (1, 2, 0.3, 1e6),
        (1, 2, 1 / 3, 0.1),
    ):
        costs, schedule = Costs(activation=activation, weights=weights), built(name, p, m)
        tl, sizes = simulate(schedule, costs), (schedule.n_ranks, schedule.n_microbatches)
        least = bound(*sizes, costs, tl.peak_memory(costs), placement=schedule.placement)
        assert tl.makespan >= least * (1 - 1e-9)


def test_after_the_last_round_trip_the_rest_of_the_way_up_or_the_weight_gradient_counts_whichever_is_longer() -> (
    None
):
    assert bound(2, 8, UNIT, memory_limit=(None, 1)) == 1 + 7 * 3 + (2 + 2)
    costs = Costs(1, (0, 1, 1), (0, 5, 0))
    assert bound(3, 8, costs, memory_limit=(None, Fraction(3, 2), None)) == 1 + 7 * (4 + 5) + (
        4 + 5
    )


def test_replicas_of_neighbouring_stages_on_one_rank_may_pass_a_message_for_nothing() -> None:
    placement, costs = ((0, 1), (1,)), Costs(1, 1, 1, latency=100)
    assert bound(2, 2, costs, placement=placement) < 100
    assert bound(2, 2, costs, placement=((0,), (1,))) > 200


def test_a_copy_that_sees_no_microbatch_needs_no_memory() -> None:
    schedule, costs = build("chimera", 2, 1), Costs(weights=1)
    assert (
        bound(
            2, 1, costs, simulate(schedule, costs).peak_memory(costs), placement=schedule.placement
        )
        <= 6
    )


@pytest.mark.parametrize(
    ("p", "m", "limit", "least"), [(3, 4, 2, 17), (4, 6, 3, 24), (4, 8, 3, 30)]
)
def test_what_a_rank_must_do_to_make_room_counts_with_the_round_trip(
    p: int, m: int, limit: int, least: int
) -> None:
    """The first two bounds are proven optima. The optimum of the third case is 31.

    The last forward of p = 3 waits for a round trip, for the second input and weight gradient, and
    for the third forward.
    """
    assert bound(p, m, UNIT, limit) == least


def test_of_two_stages_a_rank_all_but_what_still_fits_must_be_given_back_before_the_next_turn() -> (
    None
):
    """With room for one microbatch, the last rank's period is 12.

    It has 6 of work, and waits 6 for a microbatch to go down from its lower stage and come back.
    """
    placement = build("zb_v", 4, 4).placement
    assert bound(4, 4, UNIT, 2, placement=placement) == 4 + 3 * (6 + 6) + 13


@pytest.mark.parametrize("name", [each for each in names() if each != "pipedream"])
def test_no_schedule_beats_the_bound_for_its_memory_under_costs_at_random(name: str) -> None:
    rng = Random(name)

    def some(n: int, least: Fraction = Fraction(0)) -> list[Fraction]:
        return [
            least + Fraction(rng.choice([0, 1, 1, 2, 3, 8]), rng.choice([1, 2, 3]))
            for _ in range(n)
        ]

    for p, m in ((1, 4), (2, 4), (3, 6), (4, 8)):
        schedule = built(name, p, m)
        n, m = schedule.n_stages, schedule.n_microbatches
        pairs = any(isinstance(action, Overlap) for row in schedule.actions for action in row)
        for kept, early in product(([1] * n, some(n, Fraction(1, 2))), (0, Fraction(1, 3))):
            costs = Costs(
                *(some(n, Fraction(1, 2)), some(n), some(n)),
                latency=some(n - 1),
                activation=kept,
                released_by_input_grad=[early * each for each in kept],
                overlapped=some(n) if pairs else None,
            )
            tl = simulate(schedule, costs)
            least = bound(
                schedule.n_ranks, m, costs, tl.peak_memory(costs), placement=schedule.placement
            )
            assert least <= tl.makespan, (p, costs)


def test_what_makes_room_may_run_with_a_forward_as_a_pair() -> None:
    schedule, costs = build("dualpipe_v", 2, 4), Costs(2, 2, 0, overlapped=2)
    tl = simulate(schedule, costs)
    assert (
        bound(2, 4, costs, tl.peak_memory(costs), placement=schedule.placement) <= tl.makespan == 30
    )


def test_stages_of_which_a_rank_has_a_copy_each_share_no_microbatch() -> None:
    placement = ((0, 1), (1, 0))
    rows = [
        [Action(s, kind, i) for i in range(4) for s in (0, 1) for kind in "FB"] for _ in range(2)
    ]
    here = [
        [action for action in row if placement[action.stage][action.microbatch % 2] == rank]
        for rank, row in enumerate(rows)
    ]
    tl = simulate(Schedule("one by one", placement, tuple(map(tuple, here))), UNIT)
    assert max(tl.peak_activations) == 1
    assert bound(2, 4, UNIT, 1, placement=placement) <= tl.makespan


@pytest.mark.parametrize("seed", range(16))
def test_no_search_in_little_memory_beats_the_bound(seed: int) -> None:
    rng = Random(seed)
    n_chunks, p, m = 1 + seed % 2, rng.randint(2, 4), rng.randint(2, 6)
    times = [[rng.randint(1, 5) for _ in range(p * n_chunks)] for _ in range(3)]
    caps = [rng.randint(n_chunks, n_chunks * p) for _ in range(p)]
    found = search(
        p, m, Costs(*times, latency=seed % 3), caps, n_chunks, seconds=0.2, split=seed % 4 < 3
    )
    assert found.bound <= found.timeline.makespan


def test_a_bound_of_many_ranks_is_soon_there() -> None:
    """A bound for one rank must not go through all other ranks."""
    assert bound(10_000, 4, UNIT, 4) == 2 * 10_000 + 1 + 3 * 2


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((0, 8), {}, "n_ranks is 0: give an integer of at least 1"),
        ((4, 0), {}, "n_microbatches is 0"),
        ((2, 8), {"placement": ((0,), (2,))}, "stage 1 is placed on rank 2, which does not exist"),
        ((4, 8), {"costs": Costs(forward=[1, 2])}, "forward has 2 values for 4 stages"),
        ((4, 8), {"memory_limit": -1}, "memory_limit is -1: give a finite number of at least 0"),
        ((4, 8), {"memory_limit": float("nan")}, "memory_limit is nan"),
        (
            (4, 8),
            {"memory_limit": float("inf")},
            "memory_limit is inf: give a finite number .* or None for no limit",
        ),
        ((4, 8), {"memory_limit": "8888"}, r"memory_limit is '8888' \(a str\): pass a number"),
        ((4, 8), {"placement": []}, "give the rank of at least one stage"),
        ((4, 8), {"memory_limit": (1, 1)}, "memory_limit has 2 values for 4 ranks"),
        (
            (4, 8),
            {"memory_limit": 5, "costs": Costs(activation=2, weights=4)},
            "need 6; give at least that",
        ),
        (
            (2, 8),
            {"memory_limit": 1, "placement": ((0,), (1,), (1,), (0,))},
            "need 2; give at least that",
        ),
    ],
)
def test_impossible_questions_are_refused(arguments: tuple, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bound(*arguments, **options)
