"""PipeDream's planner finds the plan that an exhaustive search finds."""

import random
from collections.abc import Iterator
from itertools import accumulate, combinations
from math import prod

import pytest

from course_pp.schedule import ClusterLevel, LayerCost, Partition, PlannedStage, partition, theory


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Return every way to write ``total`` as a sum of so many positive numbers, in order."""
    for cuts in combinations(range(1, total), parts - 1):
        yield tuple(b - a for a, b in zip((0, *cuts), (*cuts, total), strict=True))


def exhaustive(layers: list[LayerCost], levels: list[ClusterLevel]) -> float:
    """Return the time of the slowest part in the best of all plans.

    The layers that a stage on several nodes gets are planned once more for the ranks of one node.
    """
    *inner, outer = levels

    def one_stage(stage: list[LayerCost], m: int) -> float:
        work = exhaustive(stage, inner) if inner else sum(layer.time for layer in stage)
        return (
            max(work, 2 * (m - 1) * sum(layer.weight_bytes for layer in stage) / outer.bandwidth)
            / m
        )

    def slowest(sizes: tuple[int, ...], shares: tuple[int, ...]) -> float:
        ends = list(accumulate(sizes))
        times = [
            one_stage(layers[end - size : end], m)
            for end, size, m in zip(ends, sizes, shares, strict=True)
        ]
        return max(
            *times, *(2 * layers[end - 1].output_bytes / outer.bandwidth for end in ends[:-1]), 0
        )

    return min(
        slowest(sizes, shares)
        for n_stages in range(1, min(len(layers), outer.size) + 1)
        for sizes in compositions(len(layers), n_stages)
        for shares in compositions(outer.size, n_stages)
    )


def random_layers(rng: random.Random, n: int) -> list[LayerCost]:
    return [
        LayerCost(rng.choice([0.5, 1, 1, 2, 5]), rng.choice([0, 1, 3]), rng.choice([0, 1, 8]))
        for _ in range(n)
    ]


@pytest.mark.parametrize("n_levels", [1, 2])
def test_the_plan_is_the_best_of_all_on_100_random_models(n_levels: int) -> None:
    rng = random.Random(n_levels)
    for _ in range(100):
        layers = random_layers(rng, rng.randint(1, 6 // n_levels))
        levels = [
            ClusterLevel(rng.randint(1, 5 - n_levels), rng.choice([0.5, 2.0, 10.0]))
            for _ in range(n_levels)
        ]
        found = partition(layers, levels)
        ends = [stage.end for stage in found.stages]
        assert found.slowest == pytest.approx(exhaustive(layers, levels))
        assert [stage.start for stage in found.stages] == [0, *ends[:-1]]
        assert ends[-1] == len(layers)
        assert sum(found.replicas) == prod(level.size for level in levels)


def test_nodes_with_slow_links_between_them_hold_whole_stages() -> None:
    layers = [LayerCost(1, output_bytes=1, weight_bytes=100)] * 4
    found = partition(layers, [ClusterLevel(2, 1e9), ClusterLevel(2, 1.0)])
    assert found.replicas == (2, 2)
    # the one boundary between nodes; to exchange weights over it would take 200
    assert found.slowest == 2


def test_unequal_layers_are_planned_better_than_evenly() -> None:
    layers = [
        LayerCost(time, weight_bytes=weight) for time, weight in ((1, 9), (1, 9), (1, 9), (5, 1))
    ]
    found = partition(layers, [ClusterLevel(3, 1.0)])
    assert found.replicas == (1, 2)
    assert found.slowest == 3


def planned(
    replicas: tuple[int, ...], work: tuple[float, ...], messages: tuple[float, ...] | None = None
) -> Partition:
    stages = tuple(PlannedStage(number, number + 1, ranks) for number, ranks in enumerate(replicas))
    slowest = max(time / ranks for time, ranks in zip(work, replicas, strict=True))
    return Partition(
        stages, slowest, work, (0.0,) * (len(work) - 1) if messages is None else messages
    )


def test_no_plan_is_faster_than_its_slowest_part_and_one_without_replicas_or_messages_is_as_fast() -> (
    None
):
    rng, paces = random.Random(2), []
    for _ in range(50):
        # Half of the layers have too many weights to be worth replicas.
        layers = [LayerCost(rng.randint(1, 6), weight_bytes=rng.choice([0, 1e3])) for _ in range(5)]
        found = partition(layers, [ClusterLevel(rng.randint(2, 4), 1.0)])
        paces.append(found.pace() / found.slowest)
        assert paces[-1] >= 1
        if len(found.stages) == 1 or max(found.replicas) == 1:
            assert paces[-1] == pytest.approx(1)
    assert max(paces) > 1.05


def test_replicas_that_update_together_and_long_messages_want_more_in_flight_than_noam() -> None:
    assert (theory.noam((1, 2)), theory.noam((1, 1))) == (3, 2)
    assert planned((1, 2), (12, 36)).pace() == pytest.approx(21)  # 18 if nobody waited
    # There and back one of two microbatches takes 3 and 3 of work and 2 and 2 on the way.
    assert planned((1, 1), (3, 3), (2,)).pace() == pytest.approx(5)


def test_a_message_takes_the_time_of_the_link_at_its_boundary() -> None:
    layers = [LayerCost(1, output_bytes=6, weight_bytes=1e6)] * 4
    found = partition(layers, [ClusterLevel(2, 12.0), ClusterLevel(2, 6.0)])
    assert found.replicas == (1, 1, 1, 1)
    assert found.messages == (0.5, 1, 0.5)


def test_the_shares_of_work_add_up_to_it() -> None:
    costs = planned((1, 2), (10, 20)).costs(forward=0.2, update=0.2)
    assert costs.forward == costs.update == (2, 4)
    assert costs.input_grad == costs.weight_grad == pytest.approx((3, 6))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: partition([], 2), "layers"),
        (lambda: partition([LayerCost(1)], []), "levels"),
        (lambda: partition([LayerCost(1)], 0), "levels"),
        (lambda: planned((1,), (1,)).pace(forward=-0.1), "forward is -0.1"),
        (lambda: planned((5, 7, 8, 9, 11, 13), (1,) * 6).pace(), "only every 360,360 microbatches"),
        (lambda: partition([LayerCost(1)] * 500, 64), "put layers together"),
    ],
)
def test_what_cannot_be_planned_is_refused(make, words) -> None:
    with pytest.raises(ValueError, match=words):
        make()
