"""The statements of PipeDream's paper on work scheduling (section 3.2) and weight stashing (3.3).

Narayanan et al. 2019, "PipeDream: generalized pipeline parallelism for DNN training", SOSP. Its
machines are ranks here, its minibatches are microbatches, and it counts both from 1. tests/runtime
shows that gradients are computed with the versions that are tested here.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import pytest

from course_pp.schedule import (
    Action,
    Costs,
    Ledger,
    Schedule,
    Span,
    Versions,
    build,
    ledger,
    simulate,
    theory,
)

P, M = 4, 24
SHARES = [(1, 1, 1, 1), (2, 1), (3, 1), (2, 1, 1), (1, 2, 1)]


def parts(schedule: Schedule, rank: int) -> list[Action]:
    return [part for action in schedule.actions[rank] for part in action.parts]


def book(versions: Versions, group: int | None = None) -> Ledger:
    return ledger(build("pipedream", P, M, group=group), versions)


def forwards_before_first_backward(row: Sequence[Action]) -> int:
    return next(index for index, part in enumerate(row) if part.kind == "B")


# Section 3.2, work scheduling.


@pytest.mark.parametrize("shares", SHARES)
def test_startup_admits_noam_minibatches_to_each_replica_of_the_input_stage(
    shares: tuple[int, ...],
) -> None:
    schedule = build("pipedream", sum(shares), M, replicas=shares)
    for rank in schedule.placement[0]:
        assert forwards_before_first_backward(parts(schedule, rank)) == theory.noam(shares)


@pytest.mark.parametrize("shares", SHARES)
def test_in_the_steady_state_each_stage_alternates_between_forward_and_backward(
    shares: tuple[int, ...],
) -> None:
    schedule = build("pipedream", sum(shares), M, replicas=shares)
    for rank in range(schedule.n_ranks):
        row = [part for part in parts(schedule, rank) if part.kind in "FB"]
        warm_up = forwards_before_first_backward(row)
        steady = "".join(part.kind for part in row)[warm_up:-warm_up]
        assert steady == ("BF" * len(row))[: len(steady)]


def is_busy(row: Sequence[Span]) -> bool:
    """Whether a rank has no gap between its warm-up and its drain."""
    steady = row[3 * P : -3 * P]
    return steady[-1].end - steady[0].start == sum(span.duration for span in steady)


def test_in_the_steady_state_no_rank_idles_when_stages_are_balanced() -> None:
    assert all(map(is_busy, simulate(build("pipedream", P, M), Costs(1, 1, 1)).by_rank))
    # Two replicas of a stage that takes twice as long keep the other busy.
    assert is_busy(
        simulate(build("pipedream", 3, M, replicas=(2, 1)), Costs((2, 1), (2, 1), (2, 1))).by_rank[
            2
        ]
    )


@pytest.mark.parametrize("shares", SHARES)
def test_the_pipeline_is_not_flushed_until_the_last_minibatch_has_entered(
    shares: tuple[int, ...],
) -> None:
    schedule = build("pipedream", sum(shares), M, replicas=shares)
    for rank in schedule.placement[0]:
        row = [part.kind for part in parts(schedule, rank) if part.kind in "FB"]
        in_flight = list(accumulate(1 if kind == "F" else -1 for kind in row))
        last_entered = len(row) - row[::-1].index("F")
        assert min(in_flight[theory.noam(shares) - 1 : last_entered]) == theory.noam(shares) - 1


def test_updates_are_applied_as_soon_as_gradients_are_there() -> None:
    for rank in range(P):
        row = parts(build("pipedream", P, M), rank)
        for before, update in pairwise(row):
            assert (update.kind == "U") == (before.kind == "B")


# Section 3.3, effective learning. Figure 4: four machines.


def test_naive_pipelining_mixes_versions_everywhere_but_in_the_output_stage() -> None:
    found = book("none")
    # minibatch 5: after 1, and after 4
    assert (found.of(0, 4).forward, found.of(0, 4).backward) == (1, 4)
    assert {
        use.stage for use in found.uses if use.forward == use.backward and use.microbatch >= P
    } == {P - 1}


@pytest.mark.parametrize("versions", ["stash", "vertical", "2bw"])
def test_weight_stashing_forward_and_backward_of_a_minibatch_use_the_same_version(
    versions: Versions,
) -> None:
    assert all(
        use.forward == use.backward for use in book(versions, P if versions == "2bw" else None).uses
    )


def test_weight_stashing_a_forward_uses_the_latest_version_there_is() -> None:
    schedule, found = build("pipedream", P, M), book("stash")
    for rank in range(P):
        updates = 0
        for part in parts(schedule, rank):
            updates += part.kind == "U"
            if part.kind == "F":
                assert found.of(part.stage, part.microbatch).forward == updates


@pytest.mark.parametrize(
    ("versions", "seen"), [("stash", [1, 2, 3, 4]), ("vertical", [1, 1, 1, 1])]
)
def test_minibatch_5_uses_updates_from_1_on_all_machines_or_from_2_on_machine_2_and_so_on(
    versions: Versions, seen: list[int]
) -> None:
    assert [book(versions).of(stage, 4).forward for stage in range(P)] == seen


def test_vertical_sync_every_stage_uses_the_version_seen_by_the_input_stage_and_updates_the_latest() -> (
    None
):
    stashed, synced = book("stash"), book("vertical")
    for use in synced.uses:
        assert use.forward == stashed.of(0, use.microbatch).forward
        assert use.update == use.microbatch


@pytest.mark.parametrize(
    ("versions", "late"), [("stash", [3, 2, 1, 0]), ("vertical", [3] * P), ("2bw", [1] * P)]
)
def test_staleness_in_the_steady_state_of_each_stage(versions: Versions, late: list[int]) -> None:
    found = book(versions, P if versions == "2bw" else None)
    for stage in range(P):
        assert {
            use.staleness for use in found.uses if use.stage == stage and use.microbatch >= P
        } == {late[stage]}


def versions_held(schedule: Schedule, found: Ledger, stage: int) -> int:
    """Return the most versions of a stage's weights that are needed at one moment.

    These are the versions of microbatches in flight, and the newest one.
    """
    row, most, updates = parts(schedule, stage), 0, 0
    in_flight: set[int] = set()
    for part in row:
        if part.kind == "F":
            in_flight.add(part.microbatch)
        elif part.kind == "B":
            in_flight.remove(part.microbatch)
        else:
            updates += 1
        most = max(
            most, len({found.of(stage, microbatch).forward for microbatch in in_flight} | {updates})
        )
    return most


@pytest.mark.parametrize(("versions", "kept"), [("stash", [4, 3, 2, 1]), ("2bw", [2, 2, 2, 2])])
def test_memory_overhead_is_a_version_for_each_active_minibatch(
    versions: Versions, kept: list[int]
) -> None:
    group = P if versions == "2bw" else None
    schedule = build("pipedream", P, M, group=group)
    assert [
        versions_held(schedule, ledger(schedule, versions), stage) for stage in range(P)
    ] == kept
