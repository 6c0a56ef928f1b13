"""The board without a kernel: levels, policies, positions, what is said before a move."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from course_pp import show
from course_pp.show.board_levels import LEVELS

pytestmark = [pytest.mark.timeout(300), pytest.mark.long]
STRANGE = ("tie", "idle", "cap reached", "warm-up is over", "drain begins", "runs to")


@pytest.fixture
def opened(page: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that opens a page of boards, with what an address says after its ``#``."""
    monkeypatch.setenv("COURSE_PP_PROGRESS", str(tmp_path / "progress.json"))
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "docs"))
    import live

    page.thrown.clear()

    def open_page(*boards: show.Board, position: str = "", addressed: bool = False) -> Any:
        html = "".join(live.board_html(board, addressed=addressed) for board in boards)
        path = tmp_path / "boards.html"
        path.write_text(
            f'<!DOCTYPE html><meta charset="utf-8">{live.script()}{html}', encoding="utf-8"
        )
        page.goto("about:blank")
        page.goto(path.as_uri() + position)
        return page

    yield open_page
    page.evaluate("localStorage.clear()")
    sys.modules.pop("live", None)
    assert page.thrown == []


def said(page: Any) -> str:
    return str(page.locator(".cpp-now").first.inner_text())


def press(page: Any, name: str) -> str:
    page.locator(f"button:text-is('{name}')").first.click()
    return said(page)


def follow(page: Any, name: str) -> None:
    page.locator("select[aria-label='who goes on']").first.select_option(name)


def paste(page: Any, text: str) -> str:
    field = page.locator(".cpp-position input").first
    field.fill(text)
    field.press("Enter")
    return said(page)


def position(page: Any) -> str:
    return str(page.locator(".cpp-position input").first.input_value())


def test_every_level_is_played_to_par_and_each_stop_says_what_is_strange(opened: Any) -> None:
    page, kinds = opened(show.board(1), addressed=True), set()
    for level in LEVELS:
        if level.number > 1:
            page.locator(".cpp-board").focus()
            page.keyboard.press("n")
        assert f"Level {level.number} of 12" in page.locator(".cpp-board h3").inner_text()
        assert page.locator("select[aria-label='who goes on']").input_value() in (
            "zero bubble",
            "backward first",
        )
        follow(page, level.teaches or "zero bubble")
        for _ in range(60):
            text = press(page, "until strange")
            kinds |= {kind for kind in STRANGE if kind in text}
            if "Complete" in text:
                break
            assert any(kind in text for kind in STRANGE), text
            if level.number == 12 and "2F1" in text:  # where the policy loses par
                press(page, "↶ undo")
                page.click("button[aria-label^='place 2W0']")
        rest = (
            f"Next: level {level.number + 1} (key n)." if level.number < 12 else "All twelve done."
        )
        assert text.endswith(f": par. {rest}")
        for key in "hst":
            page.keyboard.press(key)
            assert said(page).endswith(f": par. {rest}")
    assert kinds == set(STRANGE)
    assert page.locator("button:has-text('✓')").count() == 12
    assert page.locator("button:text-is('next')").count() == 0


def test_a_level_s_menus_do_not_draw_an_answer_without_a_name(opened: Any) -> None:
    page = opened(show.board(12))
    assert "No name" not in str(page.locator(".cpp-board select").all_inner_texts())
    assert [press(page, "hint") for _ in range(3)][
        -1
    ] == "Hint, from a worked order: 0F0 on rank 0 at 0."


def test_fill_says_why_it_stops_and_skips_nothing(opened: Any) -> None:
    page = opened(show.board(3))
    follow(page, "gpipe")
    why = "with 0F2, rank 0 would hold 3 activations and its cap is 2: place a B first"
    assert (
        press(page, "fill the rest")
        == f"Placed 3, the last is 1F0, by gpipe. Then it stops: {why}."
    )
    assert position(page) == "level=3&moves=0F0.0F1.1F0"
    follow(page, "1f1b_eager")
    paste(page, "level=3&moves=0F1")
    assert press(page, "fill the rest").endswith(
        "No move by 1f1b_eager: rank 0 has 0F1 where 1f1b_eager has 0F0. Undo, or choose another."
    )
    page.locator("select[aria-label='compare with']").select_option("gpipe")
    assert (
        said(page)
        == "Compared: gpipe ends at 12, above the cap: rank 0 holds 3, its cap is 2; rank 1 holds"
        " 3, its cap is 1."
    )
    assert "compared: gpipe 12, above the cap" in page.locator(".cpp-facts").inner_text().replace(
        "\n", " "
    )


def test_a_position_opens_from_its_text_or_link_and_others_are_refused_where_they_are_wrong(
    opened: Any,
) -> None:
    page = opened(show.board(3))
    assert (
        paste(page, " https://a.site/board.html#level=03&moves=0F0.1F0.1B0 ") == "Loaded: 3 moves."
    )
    for text, why in {
        "level=4&moves=0F0": "it is of level 4, and this is level 3: choose level 4 first",
        "level=13&moves=0F0": "there is no level 13; levels are 1 to 12",
        "stages=0.1&microbatches=3&moves=0F0": (
            "it is of stages=0.1&microbatches=3, and this board is level 3"
        ),
        "level=3&moves=0F0.0B0": (
            "move 2, 0B0: 0B0 needs the gradient of microbatch 0 from stage 1: place 1B0 first"
        ),
        "level=3&moves=0F0.1F7": (
            "move 2, 1F7: there is no 1F7 here: stages are 0 to 1, microbatches 0 to 2"
        ),
        "level=3&moves=0F0.x": "move 2, x: write stage, kind and microbatch",
        "level=3&moves=0F0 1F0": "move 1, 0F0 1F0: put a dot between moves",
        "level=3&moves=0F0.=1F0": "move 2, =1F0: write stage, kind and microbatch",
        "level=3&moves=0F0&moves=1F0": "moves= is there twice: give it once",
        "level=3moves=0F0": "& is missing before moves; one reads level=3&moves=0F0.1F0",
        "0F0.1F0": "moves alone: put level=3&moves= before them",
        "moves=0F0": "it says no level; one reads level=3&moves=0F0.1F0",
        "hello": "this is no position; one reads level=3&moves=0F0.1F0",
        "": "this is no position",
    }.items():
        assert paste(page, text).removeprefix("✕ ").startswith(f"Not loaded: {why}")
        assert position(page) == "level=3&moves=0F0.1F0.1B0"


@pytest.mark.parametrize(
    ("level", "strayed"),
    {
        3: "0F1",
        5: "0F1",
        6: "0F1.0F0",
        8: "0F1.1F1",
        10: "0F1.0F0",
        12: "0F0.0F1.1F0.1F1.2F0.2F1",
    }.items(),
)
def test_hints_reach_par_from_off_the_worked_order_too(
    opened: Any, level: int, strayed: str
) -> None:
    page = opened(show.board(1), addressed=True, position=f"#level={level}&moves={strayed}")
    for _ in range(40):
        hint = [press(page, "hint") for _ in range(3)][-1]
        if "Complete" in hint:
            break
        page.click(f"button[aria-label^='place {hint.split(': ')[1].split()[0]},']")
    assert ": par. Next" in hint


def test_a_board_that_no_order_can_end_says_so_and_which_move_to_take_back(opened: Any) -> None:
    page = opened(show.board(8))
    assert "Stuck" not in paste(page, "level=8&moves=0F0.0F1.0F2.0F3.1F0.1F1")
    page.locator(".cpp-board").focus()
    page.keyboard.press("ArrowDown")
    page.click("button[aria-label^='place 1F2']")
    stuck = (
        "Stuck: after 1F2 the caps leave no way to the end. Take 1F2 back, by u or by Delete on it."
    )
    assert said(page).endswith(stuck)
    assert press(page, "hint").endswith(stuck)
    assert press(page, "fill the rest").endswith(stuck.replace("u or", "u (2 times) or"))
    paste(page, "level=8&moves=0F0.0F1.0F2")
    assert "Par was lost with 0F2 on rank 0: rank 0 does better to wait for 2F0." in press(
        page, "hint"
    )
    follow(page, "forward first")
    assert press(page, "fill the rest").endswith(
        "Take 1F2 back, by u (2 times) or by Delete on it."
    )
    page = opened(show.board(5))
    paste(page, "level=5&moves=0F0.1F0.1B0")
    assert press(page, "fill the rest").endswith(
        "par is 7. Par was lost with 1B0 on rank 1: 1I0 at 2 keeps it. Take 1B0 back, by Delete"
        " on it."
    )


@pytest.mark.parametrize(
    ("level", "policy", "waited", "undo", "instead"),
    [
        (10, "backward first", "from 2 to 6", ("0B0", 11), "0F2 at 2"),
        (4, "naive", "from 1 to 7", ("0B0", 19), "0F1 at 1"),
        (2, "naive", "from 1 to 4", ("0B0", 9), "0F1 at 1"),
    ],
)
def test_a_wait_that_cost_par_is_blamed_and_not_what_came_after_it(
    opened: Any, level: int, policy: str, waited: str, undo: tuple[str, int], instead: str
) -> None:
    page = opened(show.board(1), addressed=True, position=f"#level={level}")
    follow(page, policy)
    told, (action, better) = press(page, "fill the rest"), (undo[0], instead.split()[0])
    assert told.endswith(
        f"Rank 0 waited {waited} though {better} could start: that cost par. "
        f"Take {action} back, by u ({undo[1]} times) or by Delete on it, and place {instead}."
    )
    page.locator(".cpp-board").focus()
    for _ in range(undo[1]):
        page.keyboard.press("u")
    page.click(f"button[aria-label^='place {better},']")
    for _ in range(40):
        if "Complete" in (hint := [press(page, "hint") for _ in range(3)][-1]):
            break
        page.click(f"button[aria-label^='place {hint.split(': ')[1].split()[0]},']")
    assert ": par. Next" in hint


def test_an_action_that_lasts_beyond_the_start_of_another_is_strange(opened: Any) -> None:
    page, told = opened(show.board(8)), ""
    while "Complete" not in told and "2F2 could start at 14, while 0B1 runs to 15" not in told:
        told = press(page, "until strange")
    assert "Complete" not in told


def test_reasons_name_the_microbatch_and_what_stands_in_the_way(opened: Any) -> None:
    page = opened(show.board(6))
    page.locator(".cpp-board").focus()
    page.keyboard.press("ArrowDown")
    why = "nothing: 1F0 needs the activation of microbatch 0 from stage 0: place 0F0 first"
    assert page.locator("[aria-label='what can be placed']").inner_text().endswith(why)
    paste(page, "level=6&moves=0F0.1F0.0F1.2F0.1F1.0F2.2I0.1F2.1I0.2F1.0I0.2I1.1W0.1I1.2F2.0W0")
    page.keyboard.press("ArrowUp")
    press(page, "hint")
    assert "Stage 1 waits for 0F3; for 0I1 nobody waits, stage 0 is the first." in press(
        page, "hint"
    )


def test_digits_choose_a_policy_hands_the_keys_back_and_clear_can_be_undone(opened: Any) -> None:
    page = opened(show.board(3))
    page.locator(".cpp-board").focus()
    page.keyboard.press("1")
    assert position(page) == "level=3&moves=0F0"
    page.locator("select[aria-label='who goes on']").select_option("1f1b")
    page.keyboard.press("n")
    assert position(page) != "level=3&moves=0F0"
    before = position(page)
    press(page, "clear")
    assert position(page) == "level=3&moves="
    page.keyboard.press("u")
    assert position(page) == before
    paste(page, "level=3&moves=0F1.0F2")
    page.keyboard.press("Escape")
    page.keyboard.press("f")  # Not allowed: the cap
    page.keyboard.press(" ")
    assert said(page) == "Playing; p stops."
    for key, moves in (("u", before), ("y", "level=3&moves=0F1.0F2")):
        page.keyboard.press(key)
        assert position(page) == moves


def test_the_address_is_the_position_and_a_link_loses_nothing_of_one_s_own(opened: Any) -> None:
    page = opened(show.board(1), addressed=True)
    page.locator(".cpp-board").focus()
    page.keyboard.press("f")
    assert page.url.endswith("#level=1&moves=0F0")
    page = opened(show.board(1), addressed=True, position="#level=5&moves=0F0.1F0")
    assert "Level 5" in page.locator("h3").inner_text()
    assert position(page) == "level=5&moves=0F0.1F0"
    page = opened(show.board(1), addressed=True, position="#level=1&moves=0F0.1F0")
    page.locator(".cpp-board").focus()
    for key in ("ArrowDown", "b", "u", "u"):
        page.keyboard.press(key)
    assert position(page) == "level=1&moves=0F0"
    page = opened(show.board(1), addressed=True, position="#level=13")
    assert said(page).endswith(
        "there is no level 13; levels are 1 to 12; your own position is shown."
    )
    assert position(page) == "level=1&moves=0F0"
    page.locator(".cpp-board").focus()
    for key in ("Home", "Delete"):
        page.keyboard.press(key)
    assert page.url.endswith("#level=1&moves=")
    assert "empty" in page.locator(".cpp-facts").inner_text()
    page.reload()
    assert "From last time" not in said(page)


def test_what_each_choice_leads_to_is_shown_if_asked_and_nothing_if_asked(opened: Any) -> None:
    page = opened(show.board(3))
    chosen = page.locator("select[aria-label='shown before a move']")
    chosen.select_option("what each choice leads to")
    first = page.locator("[aria-label='what can be placed'] button").first.inner_text()
    assert first == "1: 0F0, 0 to 1, holds 1; then backward first ends at 12"
    chosen.select_option("nothing")
    assert page.locator("[aria-label='what can be placed'] button").count() == 0


def test_phases_are_marked_and_a_recognised_schedule_leads_to_its_paper(opened: Any) -> None:
    page = opened(show.board(4))
    follow(page, "1f1b")
    press(page, "until strange")
    assert page.locator(".cpp-facts a").count() == 0
    press(page, "fill the rest")
    marked = page.locator(".cpp-board svg text").all_text_contents()
    # The last rank's warm-up is too short for the word, and its letter is a weight gradient's.
    assert [marked.count(name) for name in ("warm-up", "w", "steady", "drain")] == [2, 0, 3, 3]
    assert page.locator(".cpp-facts a").get_attribute("href") == "https://arxiv.org/abs/2006.09503"
    assert "par 18, which no order beats" in page.locator(".cpp-facts").inner_text()


def test_a_cycle_is_stamped_again(opened: Any) -> None:
    page = opened(show.board(n_ranks=2, n_microbatches=5))
    assert "nothing to stamp" in press(page, "stamp")
    paste(page, "stages=0.1&microbatches=5&moves=0F0.0F1.1F0.1B0.0B0.0F2.1F1.1B1.0B1")
    page.locator(".cpp-every").fill("2")
    assert "nothing to stamp: no rank has ended on what it did 2 microbatches earlier." in press(
        page, "stamp"
    )
    for interval in ("0", "1.5"):
        page.locator(".cpp-every").fill(interval)
        assert "Every: give a whole number from 1, or leave it empty." in press(page, "stamp")
    page.locator(".cpp-every").fill("")
    assert press(page, "stamp").startswith("Placed 4, the last is 0B2, by the stamp.")
    press(page, "stamp")
    assert [
        span
        for span in page.locator("svg").get_attribute("aria-label").split(". ")
        if span.startswith("rank 0")
    ] == [
        "rank 0: 0F0 0 to 1, 0F1 1 to 2, 0B0 4 to 6, 0F2 6 to 7, 0B1 7 to 9, 0F3 9 to 10, 0B2 10 to"
        " 12, 0F4 12 to 13, 0B3 13 to 15"
    ]


def test_boards_that_load_their_script_each_have_patterns_of_their_own(page: Any) -> None:
    board = show.board(3)
    state = {
        name: getattr(board, name) for name in ("game", "words", "undone", "ran", "done", "chosen")
    }
    page.goto("about:blank")
    draw = """
    async ([source, state]) => {
      for (let i = 0; i < 4; i += 1) {
        const text = encodeURIComponent(source + "//" + i);
        const board = await import("data:text/javascript;charset=utf-8," + text);
        const nothing = () => {};
        const model = { get: (name) => state[name], set: nothing, save_changes: nothing,
          on: nothing, off: nothing };
        board.default.render({ model, el: document.body });
      }
      return [...document.querySelectorAll("pattern")].map((each) => each.id);
    }
    """
    ids = page.evaluate(draw, [board._esm, json.loads(json.dumps(state)) | {"moves": ["0F0"]}])
    assert len(ids) == len(set(ids)) == 16
