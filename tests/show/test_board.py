"""The widget around the rules: its state, what is kept, and its picture without a browser."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from course_pp import show
from course_pp.base.files import locked
from course_pp.schedule import Timeline, build, check, from_torch_csv, simulate
from course_pp.show.board_widget import keep, kept_in


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COURSE_PP_PROGRESS", str(tmp_path / "kept" / "progress.json"))


def test_what_is_drawn_is_a_schedule_like_any_other() -> None:
    board = show.board(4)
    board.fill("1f1b")
    order = build("1f1b", 3, 4)
    assert (board.schedule.placement, board.schedule.actions) == (order.placement, order.actions)
    assert check(board.schedule) == []
    assert simulate(board.schedule) == board.timeline
    assert from_torch_csv(board.to_csv()).actions == order.actions
    assert (board.is_complete, board.score, board.recognised) == (True, 1.0, ("1f1b",))


def test_placing_undoing_and_redoing_by_methods() -> None:
    board = show.board(n_ranks=2, n_microbatches=2)
    board.place("0F0 1F0 1B0 0B0")
    board.place("0F1", at=2)
    assert board.moves == ["0F0", "1F0", "1B0", "0B0", "0F1@1"]
    board.undo()
    board.undo()
    assert (board.moves[-1], board.undone) == ("1B0", ["0B0", "0F1@1"])
    board.redo()
    board.redo()
    board.redo()
    assert (board.moves[-1], board.undone) == ("0F1@1", [])
    board.remove("1F0")
    assert [len(row) for row in board.schedule.actions] == [2, 0]
    assert board.legal(1) == ("1F0", "1F1")
    board.clear()
    assert (board.hint(), board.legal(1)) == ("0F0", ())
    board.undo()
    assert board.legal(1) == ("1F0", "1F1")


def test_an_illegal_action_is_refused_with_its_reason_and_places_nothing() -> None:
    board = show.board(3)
    with pytest.raises(ValueError, match="place 1B0 first"):
        board.place("0F0 0B0")
    assert board.moves == []
    assert "activation" in board.why_not("1F0")
    assert board.why_not("0F0") == ""
    board.place("0F1")
    with pytest.raises(ValueError, match="0F1 where 1f1b has 0F0"):
        board.fill("1f1b")
    with pytest.raises(ValueError, match="policy 'x'"):
        board.fill("x")
    with pytest.raises(ValueError, match="rank is 2"):
        board.legal(2)
    with pytest.raises(ValueError, match="not complete"):
        board.run()


def test_a_board_comes_back_until_it_is_cleared() -> None:
    show.board(3).place("0F0 1F0")
    again = show.board(3)
    assert again.moves == ["0F0", "1F0"]
    assert again.words["said"] == "2 actions from last time; clear the board to begin anew."
    assert show.board(4).moves == []
    again.clear()
    cleared = show.board(3)
    assert (cleared.schedule.actions, cleared.words["said"]) == (((), ()), "")
    cleared.undo()
    assert cleared.timeline.makespan == 2


def test_another_level_opens_on_the_same_board_where_it_was_left() -> None:
    board = show.board(3)
    board.set_state({"moves": ["0F0", "1F0"], "chosen": 5})
    assert board.level is not None
    assert (board.level.number, board.moves, board.par) == (5, [], 7)
    board.fill()
    board.set_state({"done": [5]})
    board.set_state({"chosen": 3})
    assert (board.moves, board.game["microbatches"]) == (["0F0", "1F0"], 3)
    show.board(1).set_state({"done": [1]})  # it was made before level 5 was done
    assert show.board(2).done == [1, 5]


def test_who_cannot_finish_a_board_says_why_and_places_nothing() -> None:
    board = show.board(3)
    with pytest.raises(ValueError, match=r"with 0F2, .* 3 activations"):
        board.fill("gpipe")
    assert board.moves == []


@pytest.mark.parametrize(
    "content", ["", "[]", "{", '{"NAME": 3}', '{"NAME": ["0B0"]}', '{"NAME": ["x"]}']
)
def test_a_kept_board_that_cannot_be_read_begins_anew(content: str) -> None:
    show.board(3).place("0F0")
    name = next(iter(json.loads(kept_in().read_text())))
    kept_in().write_text(content.replace("NAME", name))
    board = show.board(3)
    assert board.moves == []
    board.place("0F0")
    assert show.board(3).moves == ["0F0"]


def test_where_nothing_can_be_kept_the_board_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("COURSE_PP_PROGRESS", str(tmp_path / "file" / "progress.json"))
    board = show.board(3)
    board.place("0F0")
    assert "will not outlive its kernel" in board.words["said"]


def test_boards_of_several_kernels_are_all_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"board {i}" for i in range(40)]
    # a busy machine may keep the lock's holder waiting
    monkeypatch.setattr("course_pp.base.files._LOCK_LIMIT_S", 60.0)
    with ThreadPoolExecutor(8) as kernels:
        assert set(kernels.map(lambda name: keep(name, ["0F0"]), names)) == {""}
    assert sorted(json.loads(kept_in().read_text())) == sorted(names)

    monkeypatch.setattr("course_pp.base.files._LOCK_LIMIT_S", 0.02)
    with locked(kept_in()):
        assert "another process holds its lock" in keep("another", ["0F0"])
    assert keep("another", ["0F0"]) == ""


def test_moves_from_the_browser_are_checked() -> None:
    board = show.board(3)
    board.set_state({"moves": ["0F0", "0B0"]})
    assert board.moves == []
    assert "Not allowed: move 1, '0B0': 0B0 needs" in board.words["said"]
    board.set_state({"moves": ["0F0", "1F0"]})
    assert board.timeline.makespan == 2


@pytest.mark.parametrize("how", ["measured", "simulated"])
def test_the_button_runs_the_board_and_tells_what_went_wrong(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compared(schedules: Any) -> tuple[float, ...]:
        return (1e-3,)

    def emulated(schedule: Any, costs: Any) -> Timeline:
        return replace(simulate(schedule, costs), measured=how == "measured")

    monkeypatch.setattr("course_pp.notebook.compare_gradients", compared)
    monkeypatch.setattr("course_pp.notebook.emulate", emulated)
    board = show.board(1)
    told: list[str] = []
    board.observe(lambda change: told.append(change["new"].get("said", "")), "ran")
    for _ in range(2):
        board._handle_custom_msg({"do": "run", "moves": ["0F0"]}, [])
    refusal = "It did not run: the board is not complete: 1 action placed, makespan 1."
    assert [words.startswith(refusal) for words in told if words] == [True, True]

    filled = show.board(1)
    filled.fill()
    # the moves themselves come later
    board._handle_custom_msg({"do": "run", "moves": filled.moves}, [])
    assert board.moves == filled.moves
    assert board.ran["verdict"] == "gradients differ by 1e-03"
    assert board.ran["said"].startswith(f"Ran on 2 ranks: {how} 6.00, drawn 6; gradients differ")
    assert board.ran["how"] == how
    assert board.ran["of"] == " ".join(board.moves)


@pytest.mark.long
def test_what_was_drawn_runs_on_real_ranks_with_the_gradients_of_one_process() -> None:
    board = show.board(5)
    board.fill()
    ran = board.run()
    assert board.ran["verdict"] == "gradients equal"
    assert ran.n_ranks == 2


def test_without_a_browser_it_is_a_picture_with_alt_text() -> None:
    board = show.board(2)
    board.place("0F0")
    data, metadata = board._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in data
    assert metadata["image/png"]["alt"] == data["text/plain"]
    assert repr(board) == "Board(Level 2 of 12: Fill the pipeline. 1 action placed, makespan 1.)"
    assert show.board(n_ranks=1, n_microbatches=1).figure.alt_text


def test_the_browser_loads_nothing_from_elsewhere() -> None:
    board = show.board(1)
    for text in (str(board._esm), str(board._css)):
        assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
        assert "import " not in text.replace("important", "")
