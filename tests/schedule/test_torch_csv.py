import csv
from io import StringIO
from typing import Any

import pytest

from course_pp.schedule import (
    Action,
    Schedule,
    build,
    check,
    from_torch_csv,
    names,
    simulate,
    to_torch_csv,
)
from tests.grids import folded
from tests.schedule.orders import torch_accepts, torch_rows
from tests.schedule.sizes import TWO_COPIES

WRITTEN = [name for name in names() if name not in ("pipedream", *TWO_COPIES)]


@pytest.mark.parametrize("name", WRITTEN)
@folded("p, m", [(1, 2), (3, 6), (4, 8)])
def test_what_is_written_is_read_back(name: str, p: int, m: int) -> None:
    schedule = build(name, p, m)
    read = from_torch_csv(to_torch_csv(schedule), name=name)
    assert read == schedule
    assert check(read) == []


@pytest.mark.parametrize("name", WRITTEN)
def test_torch_reads_what_we_write(name: str) -> None:
    schedule = build(name, 3, 6)
    rows = list(csv.reader(StringIO(to_torch_csv(schedule))))
    assert torch_accepts(rows, schedule.n_stages, 6) == {
        s: ranks[0] for s, ranks in enumerate(schedule.placement)
    }


@pytest.mark.parametrize(
    "name", ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
)
def test_we_read_what_torch_writes_idle_slots_and_rows_of_different_length_included(
    name: str,
) -> None:
    dump = StringIO()
    csv.writer(dump).writerows(torch_rows(name, 4, 8, 2))
    ours = build(name, 4, 8, 2)
    assert from_torch_csv(dump.getvalue(), name=ours.name) == ours


def test_an_order_of_ones_own_can_be_written_by_hand() -> None:
    assert to_torch_csv(build("1f1b", 2, 2)) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    assert check(from_torch_csv("0F0,0F1\n1F0,1F1\n")) == []
    mine = from_torch_csv("0F0, 0F1,, 0B1, 0B0\n1F0, 1F1, 1B1, 1B0\n")
    assert check(mine) == []
    assert (mine.n_ranks, mine.placement, simulate(mine).makespan) == (2, ((0,), (1,)), 9)


@pytest.mark.parametrize("idle", [0, 1, 2])
def test_a_rank_without_actions_is_a_blank_line(idle: int) -> None:
    rows = [("0F0", "0B0"), ("1F0", "1B0")]
    rows.insert(idle, ())
    placement = [(rank,) for rank in range(3) if rank != idle]
    mine = Schedule("csv", placement, [tuple(map(Action.parse, row)) for row in rows])
    assert from_torch_csv(to_torch_csv(mine)) == mine


@pytest.mark.parametrize("separator", [",", ";", "\t", " ; "])
def test_cells_may_be_separated_as_a_spreadsheet_does_where_the_comma_is_for_decimals(
    separator: str,
) -> None:
    text = "\ufeff" + to_torch_csv(build("1f1b", 2, 3)).replace("\n", "\r\n")
    assert from_torch_csv(text.replace(",", separator)).actions == build("1f1b", 2, 3).actions
    pairs = build("dualpipe_v", 1, 2)  # the semicolon of a pair separates no cells
    assert (
        from_torch_csv(
            separator.strip(" ").join(f'"{action}"' for action in pairs.actions[0])
        ).actions
        == pairs.actions
    )
    if ";" not in separator:
        assert from_torch_csv(to_torch_csv(pairs).replace(",", separator)).actions == pairs.actions


def test_replicas_are_read_off_the_rows_in_the_order_in_which_they_take_microbatches() -> None:
    assert from_torch_csv("0F1,0B1\n0F0,0B0\n1F0,1B0,1F1,1B1\n").placement == ((1, 0), (2,))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no actions: give one row a rank"),
        (
            "0F0,0X0\n",
            (
                r"row 1, column 2 of the CSV text: unknown kind of action 'X': use one of F"
                r" \(forward\)"
            ),
        ),
        ('0F0,"0B0\n1F0,1B0\n', r"row 1, column 2 of the CSV text: cannot read '0B01F0,1B0"),
        (
            "0F0,0B0\n1F0,what\n",
            r"row 2, column 2 of the CSV text: cannot read 'what' as an action",
        ),
        ("0F0,0B0\n2F0,2B0\n", "no rank has stage 1, yet there is stage 2"),
        (
            "0F0,0F1,0B0,0B1\n1F0,1B0,1F1\n",
            "1B1 is missing from rank 1; every stage needs one forward and one backward",
        ),
        ("99999999999F0", "no rank has stage 0, yet there is stage 99999999999"),
        ("0F0,0F1,0B0,0B1\n1F0,1B0\n", r"1F1 is missing from rank 1 \(and 1 more\)"),
        ("0F0,0B0,0B0\n", "0B0 appears 2 times"),
    ],
)
def test_a_broken_csv_is_refused_with_the_place_and_the_rule(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_torch_csv(text)


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ([0, 2], "stage 1 is placed on rank 2, which does not exist: give a rank from 0 to 1"),
        ([1, 0], "rank 0 has 0F0, which belongs to rank 1 by the placement"),
        ([0], "rank 1 has 1F0, but the stages are 0 to 0"),
        ([0, 1, 1], "2F0 is missing from rank 1"),
        (
            [0.0, 1],
            (
                r"placement is \[0.0, 1\] \(a list\): pass a sequence of integers or sequences of"
                r" integers"
            ),
        ),
        ([], "0 stages: give at least one of each"),
    ],
)
def test_a_placement_that_does_not_fit_is_refused(placement: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_torch_csv("0F0,0B0\n1F0,1B0\n", placement)
    assert from_torch_csv("0F0,0B0\n1F0,1B0\n", [0, (1,)]).placement == ((0,), (1,))


def test_what_torch_does_not_have_is_not_written() -> None:
    with pytest.raises(ValueError, match=r"optimizer steps \(U\)"):
        to_torch_csv(build("pipedream", 2, 4))
    with pytest.raises(ValueError, match="stage 0 on several ranks"):
        to_torch_csv(from_torch_csv("0F1,0B1\n0F0,0B0\n1F0,1B0,1F1,1B1\n"))
