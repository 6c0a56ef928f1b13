"""The bug clinic of notebook 11, by what learners hand in; and what the notebook runs."""

from typing import Any

import pytest

from course_pp import show
from course_pp.exercises.own_schedule_clinic import hanging, programs_of, untangled
from course_pp.exercises.own_schedule_lab import drawn, run_in_torch, run_unbuffered
from course_pp.schedule import build, names, simulate
from course_pp.show.board_levels import LEVELS
from tests.exercises.grading import accepts, refuses

Programs = list[list[Any]]


def receives_first(programs: Programs) -> Programs:
    return [sorted(program, key=lambda event: event[0] != "recv") for program in programs]


def sends_later(programs: Programs) -> Programs:
    return [sorted(program, key=lambda event: event[0] == "send") for program in programs]


def one_rank_as_it_was(programs: Programs) -> Programs:
    return [*untangled(programs)[:-1], list(programs[-1])]


def late(programs: Programs) -> Programs:
    first = programs[1]
    return [programs[0], [first[1], first[0], *first[2:]], *programs[2:]]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda programs: programs, ["hangs on rank 0, 1", "Two neighbours send to one another"]),
        (receives_first, ["hangs on rank 0, 1", "too many receives are early"]),
        (sends_later, ["changes the order in which rank 0 works and sends"]),
        (one_rank_as_it_was, ["hangs on rank"]),
        (late, ["after ('do', '1F0')", "never later"]),
        (lambda programs: [program[:-1] for program in programs], ["has other events on rank 0"]),
        (lambda programs: programs[:1], ["has 1 entry, not 2"]),
        (lambda programs: None, ["`untangled(… 1f1b, p = 2, m = 3 …)` is None; a list is asked for"]),
    ],
)
def test_a_wrong_order_of_messages_is_told_why(answer: Any, words: list[str]) -> None:
    refuses("untangled", answer, *words)


def test_events_may_come_back_as_lists() -> None:
    accepts("untangled", lambda programs: [[list(event) for event in program] for program in untangled(programs)])


@pytest.mark.parametrize("name", [name for name in names() if name not in ("pipedream", "chimera", "dualpipe")])
def test_every_order_can_be_untangled_and_keeps_its_events(name: str) -> None:
    programs = programs_of(build(name, 2, 4))
    assert hanging(untangled(programs)) == {}
    assert [sorted(map(str, program)) for program in untangled(programs)] == [
        sorted(map(str, program)) for program in programs
    ]


def test_1f1b_hangs_where_nobody_keeps_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    programs = programs_of(build("1f1b", 2, 2))
    assert hanging(programs) == {0: ("send", 1, "0F1"), 1: ("send", 0, "1B0")}
    assert not run_unbuffered(build("1f1b", 2, 2), timeout_s=1.0)
    assert "rank 0: send with rank 1\nrank 1: send with rank 0" in capsys.readouterr().out
    assert run_unbuffered(untangled(programs), timeout_s=30.0)


def test_torch_runs_an_order_without_a_name_with_the_gradients_of_one_process() -> None:
    assert run_in_torch(LEVELS[-1].reference) < 1e-12


def test_a_board_that_is_not_complete_gives_the_worked_order(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COURSE_PP_PROGRESS", str(tmp_path / "progress.json"))
    board = show.board(3)
    assert drawn(board).actions == build("1f1b", 2, 3).actions
    assert capsys.readouterr().out == "Level 3 is not complete: this is its worked order, 1f1b.\n"
    board.fill()
    assert drawn(board).name == "drawn"
    assert simulate(drawn(board)).makespan == 12
    assert capsys.readouterr().out == ""
