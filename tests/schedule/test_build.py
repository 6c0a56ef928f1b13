import re
from itertools import product

import pytest

from course_pp.schedule import Action, Costs, Schedule, build, check, find, names, simulate
from tests.grids import folded
from tests.schedule.orders import torch_rows
from tests.schedule.sizes import TWO_COPIES

UNIT = Costs(1, 1, 1)

# p = 4, m = 8, f = b = w = 1: makespan, longest span of a rank, activations held by each rank.
EXPECTED = {
    "naive": (96, 96, (1, 1, 1, 1)),
    "gpipe": (33, 33, (8, 8, 8, 8)),
    "1f1b": (33, 33, (4, 3, 2, 1)),
    "1f1b_eager": (33, 33, (7, 5, 3, 1)),
    "interleaved_1f1b": (57, 57, (11, 9, 7, 5)),
    "looped_bfs": (57, 57, (16, 16, 16, 16)),
    "hanayo": (66, 66, (5, 6, 7, 8)),
    "zb_h1": (27, 27, (4, 4, 4, 4)),
    "zb_h2": (27, 24, (7, 7, 7, 7)),
    "zb_v": (51, 48, (8, 8, 8, 8)),
    "v_half": (53, 53, (6, 6, 6, 6)),
    "v_min": (59, 59, (4, 4, 4, 4)),
    "chimera": (30, 30, (3, 4, 4, 3)),
    "dualpipe": (26, 26, (5, 5, 5, 5)),
    "dualpipe_v": (54, 54, (9, 9, 9, 9)),
    "pipedream": (33, 33, (4, 3, 2, 1)),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_four_ranks_and_eight_microbatches_take_what_the_papers_say(name: str) -> None:
    tl = simulate(build(name, 4, 8), UNIT)
    longest = max(row[-1].end - row[0].start for row in tl.by_rank)
    assert (tl.makespan, longest, tl.peak_activations) == EXPECTED[name]


def test_every_name_is_tested() -> None:
    assert set(names()) == set(EXPECTED)


def sizes(name: str) -> list[tuple[int, int, int | None]]:
    """Ranks, microbatches, chunks: all small ones."""
    chunked = {
        "interleaved_1f1b": (1, 2, 3),
        "looped_bfs": (1, 2, 3),
        "hanayo": (2, 3, 4),
        "zb_h1": (1, 2, 3),
    }
    chunks = chunked.get(name, (None,))
    return [(p, m, v) for p in range(1, 6) for m in range(1, 14) for v in chunks]


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", EXPECTED)
def test_every_size_a_schedule_allows_can_run_and_every_other_is_refused_with_one_that_works(
    name: str,
) -> None:
    built, refusals = 0, []
    for size in sizes(name):
        try:
            schedule = build(name, *size)
        except ValueError as error:
            refusals.append(str(error))
            continue
        built += 1
        assert check(schedule) == []
        assert (schedule.n_ranks, schedule.n_microbatches) == size[:2]
    assert built > (6 if name in TWO_COPIES else 30)
    assert all("give" in refusal for refusal in refusals)


@folded(
    "replicas, n_microbatches",
    product([(1,), (2, 1), (1, 3), (2, 3, 1), (3, 3, 2), (1, 2, 4)], [1, 2, 7, 12]),
)
def test_pipedream_runs_with_replicated_stages(
    replicas: tuple[int, ...], n_microbatches: int
) -> None:
    schedule = build("pipedream", sum(replicas), n_microbatches, replicas=replicas)
    assert check(schedule) == []
    assert [len(ranks) for ranks in schedule.placement] == list(replicas)
    for part in schedule.parts:
        assert (
            part
            in schedule.actions[
                schedule.placement[part.stage][part.microbatch % replicas[part.stage]]
            ]
        )


def torch_order(name: str, p: int, m: int, v: int) -> list[list[str]]:
    return [[cell for cell in row if cell] for row in torch_rows(name, p, m, v)]


def our_order(schedule: Schedule) -> list[list[str]]:
    return [[str(action) for action in row] for row in schedule.actions]


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
@folded("p, m", [(1, 1), (1, 4), (2, 2), (2, 5), (3, 4), (4, 4), (4, 8), (4, 13), (8, 32)])
def test_one_stage_a_rank_is_ordered_as_in_torch(name: str, p: int, m: int) -> None:
    ours, theirs = our_order(build(name, p, m)), torch_order(name, p, m, 1)
    if name == "1F1B":
        # The exception: torch 2.11 to 2.13 list the last rank's forwards of 1F1B from microbatch 1
        # on (the run itself is right), so that microbatch 0 is missing and microbatch m does not
        # exist.
        assert theirs[-1][::2] == [f"{p - 1}F{i + 1}" for i in range(m)]
        ours, theirs = ours[:-1], theirs[:-1]
    assert ours == theirs


@pytest.mark.parametrize("v", [1, 2, 3])
@pytest.mark.parametrize("name", ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble"])
@folded("p, m", [(1, 4), (2, 2), (2, 6), (3, 2), (4, 8), (4, 10), (4, 3), (5, 15)])
def test_several_stages_a_rank_are_ordered_as_in_torch(name: str, p: int, m: int, v: int) -> None:
    assert our_order(build(name, p, m, v)) == torch_order(name, p, m, v)


@pytest.mark.parametrize("name", ["ZBVZeroBubble", "DualPipeV"])
@folded("p, m", [(1, 2), (2, 4), (3, 6), (4, 8), (4, 13), (7, 14), (3, 1), (4, 3), (4, 6)])
def test_v_shaped_schedules_are_ordered_as_in_torch(name: str, p: int, m: int) -> None:
    if name == "DualPipeV" and m < 2 * p:
        return  # zb_v leaves out microbatches that do not exist
    assert our_order(build(name, p, m)) == torch_order(name, p, m, 2)


@pytest.mark.parametrize("name", [*names(), "interleaved_zb"])
@folded("p", [1, 2, 5])
def test_a_placement_is_known_before_there_are_microbatches(name: str, p: int) -> None:
    p += p % 2 if name in TWO_COPIES else 0
    others = () if not find(name).any_chunks else (2, 4) if name == "hanayo" else (1, 3)
    for chunks in (None, *others):
        assert find(name).placement(p, chunks) == build(name, p, 2 * p, chunks).placement


@pytest.mark.parametrize(
    "name", ["interleaved_zb", "InterleavedZeroBubble", "ScheduleInterleavedZeroBubble"]
)
@folded("p, m", [(1, 4), (3, 6), (4, 10)])
def test_interleaved_zero_bubble_is_zb_h1_with_two_stages_a_rank(name: str, p: int, m: int) -> None:
    assert build(name, p, m) == build("zb_h1", p, m, 2)
    assert build(name, p, m, 3) == build("zb_h1", p, m, 3)
    assert name not in names()


def test_every_schedule_class_of_torch_has_an_alias() -> None:
    from torch.distributed import pipelining

    assert (
        build("interleaved1f1b", 2, 4)
        == build("INTERLEAVED_1F1B", 2, 4)
        == build("Interleaved1F1B", 2, 4)
    )
    for name in dir(pipelining):
        if name.startswith("Schedule"):
            assert build(name, 2, 4).name in names()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("1f2b", 4, 8),
            r"unknown schedule '1f2b': use one of naive, gpipe, .*1f1b, .* or torch's",
        ),
        (("1f1b", 0, 8), r"n_ranks is 0: 1f1b needs an integer of at least 1"),
        (("1f1b", 4, -1), r"n_microbatches is -1"),
        (("1f1b", 4.0, 8), r"n_ranks is 4\.0"),
        (("1f1b", True, 8), r"n_ranks is True"),
        (
            ("1f1b", 4, 8, 2),
            r"n_chunks is 2: 1f1b has 1 a rank; .* take one of interleaved_1f1b, .*, hanayo, zb_h1",
        ),
        (
            ("hanayo", 4, 8, 3),
            r"n_chunks is 3: hanayo goes down the ranks and up again, .* give 2 or 4",
        ),
        (("hanayo", 4, 8, 1), r"give 2$"),
        (
            ("chimera", 3, 6),
            r"chimera holds every stage on two ranks, .* so 3 ranks leave one alone: .* 2 or 4",
        ),
        (("dualpipe", 1, 6), r"1 ranks leave one alone: give an even number, such as 2$"),
        (
            ("dualpipe", 4, 6),
            r"but there are 6: give an even number of at least 8, such as 8 or 10",
        ),
        (("dualpipe", 4, 11), r"such as 10 or 12"),
        (("zb_v", 4, 8, 3), r"n_chunks is 3: zb_v has 2 a rank"),
        (("interleaved_1f1b", 4, 9), r"9 microbatches on 4 ranks make 2 rounds .* such as 8 or 10"),
        (("interleaved_1f1b", 4, 13), r"such as 12 or 15"),
        (("dualpipe_v", 4, 7), r"give at least 8 microbatches, or at most 3 ranks"),
        (("dualpipe_v", 4, 2), r"or at most 1 rank$"),
        (("dualpipe_v", 4, 1), r"give at least 8 microbatches$"),
    ],
)
def test_what_a_schedule_does_not_allow_is_refused_with_the_nearest_that_works(
    arguments: tuple, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build(*arguments)


@pytest.mark.parametrize(
    ("name", "option", "message"),
    [
        (
            "1f1b",
            {"costs": Costs(2, 3, 1)},
            "costs given for 1f1b: only .* such as zb_h1 or zb_v, .*leave costs out",
        ),
        ("dualpipe_v", {"costs": Costs(2, 3, 1)}, "costs given for dualpipe_v: only"),
        ("1f1b", {"replicas": (2, 1)}, "only pipedream"),
        *(
            ("pipedream", {"replicas": shares}, "2 in all")
            for shares in ((), (3,), (1, 2), (0, 2), (3, -1))
        ),
    ],
)
def test_an_option_that_the_schedule_cannot_take_is_refused(
    name: str, option: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build(name, 2, 4, **option)


@folded("m", range(1, 30))
def test_the_sizes_named_in_a_refusal_work(m: int) -> None:
    try:
        build("interleaved_1f1b", 4, m)
    except ValueError as error:
        below, above = map(
            int, re.findall(r"such as (\d+) or (\d+), or choose round_size", str(error))[0]
        )
        chosen = eval(str(error).rpartition("round_size: ")[2])
        assert below < m < above
        assert all(
            check(each) == []
            for each in (chosen, *(build("interleaved_1f1b", 4, m) for m in (below, above)))
        )


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (
            ((0,), (2,)),
            r"stage 1 is placed on rank 2, which does not exist: give a rank from 0 to 1",
        ),
        (((0,), (-1,)), r"rank -1, which does not exist"),
        (((0,), ()), r"stage 1 is placed on \(\): give it one rank"),
        (((0, 0), (1,)), r"several different ones"),
        ((), r"0 stages: give at least one of each"),
    ],
)
def test_an_impossible_placement_is_refused(placement: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Schedule("mine", placement, ((Action(0, "F", 0),), ()))
    with pytest.raises(ValueError, match="rank 0 has '0F0' among its actions"):
        Schedule("mine", ((0,),), (("0F0",),))  # type: ignore[arg-type]


def test_a_schedule_is_a_value_and_prints_its_sizes() -> None:
    assert build("1f1b", 2, 4) == build("Schedule1F1B", 2, 4)
    assert len({build("1f1b", 2, 4), build("1f1b", 2, 4)}) == 1
    assert repr(build("zb_v", 2, 4)) == "Schedule('zb_v', 2 ranks, 4 stages, 4 microbatches)"
