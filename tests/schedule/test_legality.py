import random

import pytest

from course_pp.schedule import Action, Overlap, Schedule, check, names, simulate
from tests.schedule.sizes import built


def schedule(*rows: str, placement: tuple[tuple[int, ...], ...] | None = None) -> Schedule:
    """One row a rank, such as ``"0F0 0B0"``; stage r on rank r unless placed."""
    read = [
        [Overlap.parse(a) if a.startswith("(") else Action.parse(a) for a in row.split()]
        for row in rows
    ]
    return Schedule(
        "mine", placement or tuple((rank,) for rank in range(len(rows))), tuple(map(tuple, read))
    )


@pytest.mark.parametrize(
    "rows",
    [
        ("0F0 0F1", "1F0 1F1"),
        ("0F0 0B0",),
        ("0F0 0I0 0W0", "1F0 1B0"),
        ("0F0 0F1 0B1 0B0", "1F0 1F1 1B1 1B0"),
        ("0F0 0F1 (0F2;0B0)OVERLAP_F_B 0B1 0B2",),
        ("0F0 0F1 0B0 0B1 0U1",),
    ],
)
def test_what_can_run_is_accepted(rows: tuple[str, ...]) -> None:
    assert check(schedule(*rows)) == []


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        (("0F0 0F1 0B0",), "0B1 is missing from rank 0"),
        (("0F0 0I0",), "0W0 is missing from rank 0"),
        (("0F0 0W0",), "0I0 is missing from rank 0"),
        (("0F0 0B0", "1F0"), "1B0 is missing from rank 1"),
        (("0F0 0B0", ""), "1F0 is missing from rank 1"),
        (("0F0 0U0",), "0B0 is missing from rank 0"),
        (("0F0 0F0 0B0",), "0F0 appears 2 times"),
        (("0F0 0B0 0I0 0W0",), "0B0 is the whole backward, yet there is 0W0 too"),
        (("0F0 1F0 0B0", "1B0"), "rank 0 has 1F0, which belongs to rank 1 by the placement"),
        (("0F0 0B0 7F0",), "rank 0 has 7F0, but the stages are 0 to 0"),
        (("",), "there are no actions"),
        (("0F1 0B1",), "microbatch 0 does not appear, yet 1 does: number them from 0 without gaps"),
        (
            ("0F0 0B0 0F999999999999",),
            "microbatch 1 does not appear, yet 999999999999 does: number them from 0 without gaps",
        ),
        (("0B0 0F0",), "rank 0 has 0B0 before 0F0, which it needs"),
        (("0F0 0W0 0I0",), "rank 0 has 0W0 before 0I0, which it needs"),
        (("0F0 0U0 0B0",), "rank 0 has 0U0 before 0B0, which it needs"),
        (
            ("(0F0;0B0)OVERLAP_F_B",),
            (
                "rank 0 runs (0F0;0B0)OVERLAP_F_B as one, but its backward needs its forward to be"
                " done"
            ),
        ),
        (
            ("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"),
            (
                "deadlock, ranks 0 → 1 → 0 wait in a circle: rank 0 cannot start 0B0 until rank 1"
                " has done 1B0; rank 1 cannot start 1F1 until rank 0 has done 0F1"
            ),
        ),
    ],
)
def test_what_cannot_run_is_told_with_its_reason(rows: tuple[str, ...], problem: str) -> None:
    illegal = schedule(*rows)
    assert problem in check(illegal)
    with pytest.raises(ValueError, match="cannot run"):
        simulate(illegal)


def test_a_deadlock_names_only_the_ranks_in_the_circle() -> None:
    # Rank 0 waits for the circle of ranks 1 and 2 but is not part of it.
    waits = schedule("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", "2F0 2F1 2B0 2B1")
    (problem,) = check(waits)
    assert problem.startswith("deadlock, ranks 1 → 2 → 1 wait in a circle")


def test_two_circles_are_two_problems() -> None:
    both = schedule("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", "2F0 2B0 2F1 2B1", "3F0 3F1 3B0 3B1")
    circles = [problem.partition(" wait in")[0] for problem in check(both)]
    assert circles == ["deadlock, ranks 0 → 1 → 0", "deadlock, ranks 2 → 3 → 2"]


@pytest.mark.parametrize("name", names())
def test_a_removed_repeated_or_misplaced_action_is_always_found(name: str) -> None:
    legal = built(name, 3, 6)
    rng = random.Random(name)
    for _ in range(20):
        rows = [list(row) for row in legal.actions]
        rank = rng.randrange(legal.n_ranks)
        index = rng.randrange(len(rows[rank]))
        removed = rows[rank].pop(index)
        update_only = all(part.kind == "U" for part in removed.parts)
        assert check(Schedule("less", legal.placement, tuple(map(tuple, rows)))) or update_only
        rows[(rank + 1) % legal.n_ranks].append(removed)
        assert check(Schedule("elsewhere", legal.placement, tuple(map(tuple, rows))))
        assert check(
            Schedule(
                "twice",
                legal.placement,
                (legal.actions[0] + legal.actions[0][:1], *legal.actions[1:]),
            )
        )


@pytest.mark.parametrize("name", names())
def test_a_shuffled_order_runs_exactly_if_check_accepts_it(name: str) -> None:
    legal = built(name, 3, 6)
    rng = random.Random(name)
    verdicts = set()
    for attempt in range(60):
        rows = [list(row) for row in legal.actions]
        # where one swap does no harm, several may
        for _ in range(rng.randrange(1, 3 + attempt // 10)):
            row = rng.choice(rows)
            index = rng.randrange(len(row) - 1)
            row[index], row[index + 1] = row[index + 1], row[index]
        shuffled = Schedule("shuffled", legal.placement, tuple(map(tuple, rows)))
        assert (not check(shuffled)) == runs(shuffled)
        verdicts.add(runs(shuffled))
    assert verdicts == {True, False} or name == "gpipe"


def runs(order: Schedule) -> bool:
    """Return whether the schedule runs, found in the slow and obvious way.

    It is played one action of any rank at a time, with a bag of the products made so far.
    """
    made, rest, moved = set(), [list(row) for row in order.actions], True
    while moved:
        moved = False
        for row in rest:
            needs = (
                [product for part in row[0].parts for product in part.needs(order.n_stages)]
                if row
                else [None]
            )
            if made.issuperset(needs):
                made.update(product for part in row.pop(0).parts for product in part.provides)
                moved = True
    return not any(rest)
