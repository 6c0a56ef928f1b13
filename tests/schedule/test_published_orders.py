"""Orders, makespans and peaks equal the authors' published ones, at a few hundred sizes each."""

from collections.abc import Iterator
from itertools import pairwise, product

import pytest

from course_pp.schedule import Action, Costs, Schedule, Timeline, build, check, simulate
from tests.grids import thinned

# Zero Bubble, profiled times of F, I, W and of a message for models of 1.5B, 6.2B, 14.6B and 28.3B,
# in microseconds: the settings of 8 to 32 ranks in the authors' generator (v_schedule.py of their
# space on Hugging Face).
MEASURED = (
    (18522, 18086, 9337, 601),
    (29718, 29444, 19927, 527),
    (11347, 11248, 8132, 377),
    (10419, 10207, 7715, 408),
)

# Of the authors' own generator: activations held; the bubble at f = b = w = 1; and for each of
# MEASURED the bubble at m = 2p, and what the next microbatch and each further two add to it.
THEIRS = {
    ("v_half", 2): (4, 1, (32951, 0, 0), (43999, 0, 0), (17677, 0, 0), (16599, 0, 0)),
    ("v_half", 3): (4, 5, (127707, 0, 0), (184793, 0, 0), (71460, 0, 0), (65495, 0, 0)),
    ("v_half", 4): (6, 5, (151321, 0, 0), (208865, 0, 0), (81005, 0, 0), (74379, 0, 0)),
    ("v_half", 5): (6, 11, (264751, 0, 0), (389513, 0, 0), (151052, 0, 0), (138705, 0, 0)),
    ("v_half", 6): (8, 11, (286291, 0, 0), (411983, 0, 0), (159645, 0, 0), (146349, 0, 0)),
    ("v_half", 7): (8, 17, (401795, 0, 0), (594233, 0, 0), (230644, 0, 0), (211915, 0, 0)),
    ("v_half", 8): (10, 17, (423335, 0, 0), (616703, 0, 0), (239237, 0, 0), (219559, 0, 0)),
    ("v_min", 2): (
        4,
        3,
        (123691, 19136, 38272),
        (161591, 20362, 40724),
        (59821, 7085, 14170),
        (53205, 6012, 12024),
    ),
    ("v_min", 3): (
        4,
        5,
        (209707, 21646, 43292),
        (270267, 22238, 44476),
        (102001, 8136, 16272),
        (92659, 7464, 14928),
    ),
    ("v_min", 4): (
        4,
        11,
        (365121, 21646, 43292),
        (494569, 22238, 44476),
        (188023, 8136, 16272),
        (171277, 7464, 14928),
    ),
    ("v_min", 5): (
        6,
        15,
        (485235, 21646, 43292),
        (660531, 22238, 44476),
        (251747, 8136, 16272),
        (229905, 7464, 14928),
    ),
    ("v_min", 6): (
        6,
        17,
        (569837, 22848, 44494),
        (768617, 23292, 45530),
        (294087, 8890, 17026),
        (268903, 8280, 15744),
    ),
    ("v_min", 7): (
        6,
        23,
        (726453, 21646, 44494),
        (993973, 22470, 45530),
        (380863, 8593, 17026),
        (348337, 7644, 15744),
    ),
    ("v_min", 8): (
        8,
        27,
        (847769, 21646, 44494),
        (1160989, 22238, 45530),
        (445341, 8136, 17026),
        (407781, 7464, 15744),
    ),
}


# Makespans of the authors' generators for unequal times of F, I and W, on 2 to 6 ranks with m = 2p.
UNEQUAL = {
    ("v_half", (2, 3, 1)): (54, 94, 124, 166, 195),
    ("v_half", (1, 3, 1)): (50, 88, 116, 156, 183),
    ("v_half", (1, 1, 2)): (33, 53, 70, 91, 107),
    ("v_half", (3, 2, 1)): (55, 94, 123, 163, 192),
    ("v_half", (10, 12, 7)): (251, 419, 547, 729, 857),
    ("v_min", (2, 3, 1)): (66, 115, 167, 210, 253),
    ("v_min", (1, 3, 1)): (59, 109, 159, 199, 241),
    ("v_min", (1, 1, 2)): (35, 53, 73, 93, 111),
    ("v_min", (3, 2, 1)): (66, 111, 160, 205, 244),
    ("v_min", (10, 12, 7)): (293, 475, 687, 869, 1039),
    ("zb_v", (2, 3, 1)): (51, 79, 107, 135, 163),
    ("zb_v", (1, 3, 1)): (43, 67, 91, 115, 139),
    ("zb_v", (1, 1, 2)): (33, 50, 67, 84, 101),
    ("zb_v", (3, 2, 1)): (51, 79, 107, 135, 163),
    ("zb_v", (10, 12, 7)): (244, 372, 500, 628, 756),
}


def bubble(schedule: Schedule, costs: Costs) -> tuple[Timeline, float]:
    tl = simulate(schedule, costs)
    return tl, tl.makespan - max(tl.busy)


@thinned
@pytest.mark.parametrize("name", ["v_half", "v_min"])
def test_controllable_memory_is_never_longer_nor_higher_than_the_authors_generator(
    name: str, every: int
) -> None:
    for p in range(2, 9):
        most, unit, *measured = THEIRS[name, p]
        for m in range(2 * p, 4 * p + 1, every):
            schedule = build(name, p, m)
            tl, lost = bubble(schedule, Costs(1, 1, 1))
            assert max(tl.peak_activations) <= most
            assert lost <= unit
            for times, (at_2p, one, two) in zip(MEASURED, measured, strict=True):
                tl, lost = bubble(schedule, Costs(*times))
                theirs = at_2p + (m - 2 * p) // 2 * two + m % 2 * one
                assert max(tl.peak_activations) <= most
                assert lost <= theirs, (p, m, times)


@pytest.mark.parametrize(("name", "times"), UNEQUAL)
def test_built_for_unequal_times_a_v_is_never_longer_than_the_authors_nor_higher_than_its_own(
    name: str, times: tuple[int, int, int]
) -> None:
    costs = Costs(*times)
    for p, theirs in enumerate(UNEQUAL[name, times], 2):
        schedule, as_named = (
            build(name, p, 2 * p, costs=costs),
            simulate(build(name, p, 2 * p), costs),
        )
        tl = simulate(schedule, costs)
        assert check(schedule) == []
        assert tl.makespan <= min(theirs, as_named.makespan)
        assert max(tl.peak_activations) <= max(as_named.peak_activations)


def megatron(rank: int, p: int, m: int, v: int, n: int) -> list[str]:
    """Return Megatron-LM's order of ``rank``.

    ``n`` is the microbatch group size per virtual pipeline stage.
    """
    table = [
        (chunk, i)
        for first in range(0, m, n)
        for chunk in range(v)
        for i in range(first, min(first + n, m))
    ]
    forwards = [f"{chunk * p + rank}F{i}" for chunk, i in table]
    backwards = [f"{(v - 1 - chunk) * p + rank}B{i}" for chunk, i in table]
    ahead = min((v - 1) * n + 2 * (p - 1 - rank), m * v)
    pairs = zip(forwards[ahead:], backwards, strict=False)
    return [
        *forwards[:ahead],
        *(action for pair in pairs for action in pair),
        *backwards[m * v - ahead :],
    ]


def rounds_of_megatron() -> Iterator[tuple[int, int, int, int]]:
    for p in range(2, 7):
        for v in (2, 3):
            for m in range(p, 4 * p + 1):
                # Sizes that Megatron accepts: at least p in every round.
                yield from ((p, m, v, n) for n in range(p, m + 1) if not 0 < m % n < p)


@thinned
def test_every_round_size_gives_the_order_of_megatron(every: int) -> None:
    sizes = list(rounds_of_megatron())
    assert len(sizes) > 200
    for p, m, v, n in sizes[::every]:
        ours = [
            list(map(str, row)) for row in build("interleaved_1f1b", p, m, v, round_size=n).actions
        ]
        assert ours == [megatron(rank, p, m, v, n) for rank in range(p)], (p, m, v, n)


@pytest.mark.slow
def test_every_round_size_that_is_not_refused_runs_and_the_refusals_name_sizes_that_do() -> None:
    for p, m, v in ((p, m, v) for p in range(1, 6) for m in range(1, 14) for v in (1, 2, 3)):
        for n in range(1, m + 1):
            try:
                schedule = build("interleaved_1f1b", p, m, v, round_size=n)
            except ValueError as error:
                nearest = [int(word) for word in str(error).rpartition("give ")[2].split(" or ")]
                assert n not in nearest
                assert all(build("interleaved_1f1b", p, m, v, round_size=size) for size in nearest)
                continue
            assert check(schedule) == [], (p, m, v, n)


def test_a_round_of_all_microbatches_takes_the_forwards_breadth_first_and_the_backwards_from_the_oldest() -> (
    None
):
    for p, m, v in ((2, 4, 2), (4, 8, 2), (4, 10, 3)):
        ours, breadth_first = (
            build("interleaved_1f1b", p, m, v, round_size=m),
            build("looped_bfs", p, m, v),
        )
        for row, other in zip(ours.actions, breadth_first.actions, strict=True):
            assert [a for a in row if a.kind == "F"] == [a for a in other if a.kind == "F"]
            backwards = [a.microbatch for a in row if a.kind == "B"]
            assert backwards == [*range(m)] * v
            assert [a.microbatch for a in other if a.kind == "B"] == [*reversed(range(m))] * v
        # It begins backwards while forwards of the last chunk are left, and so holds less than m v.
        assert (
            max(simulate(ours).peak_activations)
            <= m * v
            == max(simulate(breadth_first).peak_activations)
        )
        assert simulate(ours).peak_activations[-1] == (v - 1) * m + 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ("interleaved_1f1b", 4, 8, 2, 0),
            "round_size is 0: interleaved_1f1b needs an integer of at least 1",
        ),
        (("interleaved_1f1b", 4, 8, 2, 9), "round_size is 9 of 8 microbatches: .* give 8$"),
        (("interleaved_1f1b", 4, 8, 2, 2), "round_size is 2 of 8 .* need 6, .*: give 4$"),
        (
            ("interleaved_1f1b", 4, 9, 2, 4),
            "round_size is 4 of 9 .* the last included, .*: give 3 or 5$",
        ),
        (("looped_bfs", 4, 8, 2, 4), "round_size 4 given for looped_bfs: only interleaved_1f1b"),
    ],
)
def test_a_round_size_that_cannot_be_is_refused_with_the_nearest_that_can(
    given: tuple, message: str
) -> None:
    name, p, m, v, n = given
    with pytest.raises(ValueError, match=message):
        build(name, p, m, v, round_size=n)


def deepseek(rank: int, p: int, m: int) -> list[str]:
    """Return DeepSeek's published steps for one rank.

    A step names the phases that go forward and backward. ``Z`` is a backward split in two.
    """
    near = min(rank, p - 1 - rank)
    half, behind = p // 2, p // 2 - near - 1
    main = m // 2 - p + near + 1
    steps = ["F0"] * (2 * behind) + ["F0", "F1"] * (near + 1) + ["Z1", "W", "F1"] * behind
    for i in range(main):
        steps += ["F0", "B1"] if i == 0 and near == half - 1 else ["F0+B1"]
        steps += ["F1+B0"]
    steps += ["B1", "F1+B0"] * behind
    split = False
    for i in range(near + 1):
        split = split or (i == (near + 1) // 2 and near % 2 == 1)
        steps.append("Z1" if split else "B1")
        split = split or (i == (near + 1) // 2 and near % 2 == 0)
        steps.append("Z0" if split else "B0")
    return [*steps, *["W", "Z0"] * behind, *["W"] * (near + 1)]


def spelled(steps: list[str], rank: int, p: int) -> list[str]:
    """Return the steps as actions.

    Phase 0 of a rank in the lower half goes the other way. Each way has every second microbatch.
    """
    count, waiting, row = {}, [], []
    for step in steps:
        parts = []
        for part in step.split("+"):
            if part == "W":
                parts.append(waiting.pop(0))
                continue
            phase = int(part[1])
            way = phase ^ (rank >= p // 2)
            number = count[part[0] == "F", phase] = count.get((part[0] == "F", phase), -1) + 1
            stage, microbatch = (p - 1 - rank if way else rank), 2 * number + way
            parts.append(f"{stage}{part[0].replace('Z', 'I')}{microbatch}")
            if part[0] == "Z":
                waiting.append(f"{stage}W{microbatch}")
        row.append(f"({';'.join(parts)})OVERLAP_F_B" if len(parts) > 1 else parts[0])
    return row


@thinned
def test_dualpipe_has_the_order_of_deepseeks_published_code(every: int) -> None:
    sizes = [(p, m) for p in (2, 4, 6, 8) for m in range(2 * p, 2 * p + 100, 2)]
    assert len(sizes) == 200
    for p, m in sizes[::every]:
        schedule = build("dualpipe", p, m)
        for rank in (0, p // 2 - 1, p // 2, p - 1) if m > 3 * p else range(p):
            assert list(map(str, schedule.actions[rank])) == spelled(
                deepseek(rank, p, m), rank, p
            ), (p, m, rank)


@thinned
@pytest.mark.slow
def test_chimera_and_hanayo_idle_as_long_as_their_authors_say(every: int) -> None:
    """The published idle times are for m = p.

    If forward and backward take equally long, they also hold for any multiple.
    """
    sizes = [(p, units) for p in range(1, 21) for units in range(1, 11)]
    assert len(sizes) == 200
    for p, units in sizes[::every]:
        m = units * p
        if m <= 60:
            assert bubble(build("hanayo", p, m), Costs(1, 1, 0))[1] == 2 * (p - 1)
            assert bubble(build("chimera", 2 * p, 2 * m), Costs(1, 1, 0))[1] == 2 * p - 2
    for p in range(1, 13):
        for waves in (1, 2, 3):
            assert bubble(build("hanayo", p, p, 2 * waves), Costs(1, 1, 1))[1] == 4 * (p - 1)
        lost = bubble(build("chimera", 2 * p, 2 * p), Costs(1, 1, 1))[1]
        # hence (p - 2) / (3m / 2 + p - 2) of the step, for p = m ranks
        assert lost == 2 * (2 * p - 2)


def test_both_copies_of_a_stage_do_the_same_work_in_opposite_directions() -> None:
    for name, p, m in (("chimera", 4, 8), ("dualpipe", 4, 8), ("dualpipe", 6, 14)):
        schedule = build(name, p, m)
        assert schedule.placement == tuple((stage, p - 1 - stage) for stage in range(p))
        for rank, row in enumerate(schedule.actions):
            for part in (part for action in row for part in action.parts):
                assert part.stage == (p - 1 - rank if part.microbatch % 2 else rank)


def test_waves_turn_on_a_rank() -> None:
    placement = [ranks[0] for ranks in build("hanayo", 3, 3, 4).placement]
    assert placement == [0, 1, 2, 2, 1, 0, 0, 1, 2, 2, 1, 0]
    assert sum(a == b for a, b in pairwise(placement)) == 3


@thinned
def test_eager_1f1b_is_as_fast_as_gpipe_where_two_messages_take_no_longer_than_forward_and_backward(
    every: int,
) -> None:
    for p, m, latency in [*product(range(1, 8), range(1, 31), (0, 1, 3))][::every]:
        costs = Costs(2, 2, 2, latency)
        eager, gpipe = (simulate(build(name, p, m), costs) for name in ("1f1b_eager", "gpipe"))
        assert eager.makespan == gpipe.makespan
        assert max(eager.peak_activations) == min(m, 2 * p - 1)
    assert Action.parse("0F6") == build("1f1b_eager", 4, 8).actions[0][6]
