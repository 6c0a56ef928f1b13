"""The board in JupyterLab, by keyboard alone."""

import json
import urllib.request
from typing import Any

import pytest

from tests.browser.conftest import Lab
from tests.browser.notebook import SOON, errors, open_and_run

pytestmark = [pytest.mark.timeout(480), pytest.mark.long]
CELL = (
    "from course_pp import show\nboard = show.board(n_ranks=2, n_microbatches=2, memory_limit=(2,"
    " 1))\nboard"
)
# A kernel that is slower than fingers: Jupyter then holds changes of state back, and messages
# overtake them.
SLOW = "import time\nboard.observe(lambda change: time.sleep(0.5), 'moves')"
BOARD = ".cpp-board"


def restart_kernels(lab: Lab) -> None:
    with urllib.request.urlopen(f"{lab.url}api/kernels?token={lab.token}", timeout=10) as answer:
        kernels = [each["id"] for each in json.load(answer)]
    for each in kernels:
        address = f"{lab.url}api/kernels/{each}/restart?token={lab.token}"
        urllib.request.urlopen(urllib.request.Request(address, method="POST"), timeout=30).close()


def said(page: Any, text: str) -> None:
    """Wait until the board says ``text``; fail at once if it says that it did not run."""
    shown = "document.querySelector('.cpp-now')?.innerText ?? ''"
    expected = f"({shown}).includes({json.dumps(text)}) || ({shown}).includes('It did not run')"
    try:
        page.wait_for_function(expected, timeout=4 * SOON)
    finally:
        seen = page.evaluate(shown)
        assert text in seen, f"the board says {seen!r}, not {text!r}"


def test_1f1b_is_placed_and_run_by_keyboard_alone_and_comes_back_after_a_restart(
    page: Any, lab: Lab
) -> None:
    open_and_run(page, lab, CELL, SLOW, until=f"{BOARD} svg")
    page.locator(BOARD).focus()
    chosen = (
        "[...document.querySelectorAll('.jp-Cell')].findIndex(each =>"
        " each.classList.contains('jp-mod-active'))"
    )
    before = page.evaluate(chosen)

    page.keyboard.press("b")
    said(page, "Not allowed: 0B0 needs its own forward: place 0F0 first.")
    for key in ("f", "f", "ArrowDown", "f"):
        page.keyboard.press(key)
    said(page, "1F0 on rank 1 from 1 to 2.")
    page.keyboard.press("f")
    said(page, "with 1F1, rank 1 would hold 2 activations and its cap is 1: place a B first.")
    page.keyboard.press("b")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("b")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("b")
    said(page, "rank 0 is busy with 0B0 from 4 to 6: choose a time when it is free.")
    page.keyboard.press("ArrowLeft")
    said(page, "0B0: full backward, rank 0, 4 to 6.")
    page.keyboard.press("ArrowLeft")
    said(page, "Rank 0 waits from 2 to 4 for the gradient of microbatch 0 from stage 1")
    for key in ("ArrowDown", "f", "b", "u", "y", "ArrowUp", "b"):
        page.keyboard.press(key)
    said(page, "Complete: makespan 9, score 100% (no order beats 9)")
    assert "this is 1f1b" in page.locator(".cpp-facts").inner_text()
    assert "rank 1: 1F0 1 to 2, 1B0 2 to 4" in page.locator(f"{BOARD} svg").get_attribute(
        "aria-label"
    )

    field = page.locator(".cpp-position input")
    whole = field.input_value()
    field.fill("stages=0.1&microbatches=2&moves=0F0")
    field.press("Enter")
    said(page, "Loaded: 1 move.")
    page.keyboard.press("r")  # on the board again
    said(page, "Place every action first: a step needs all of them, and 0B0 is still missing.")
    field.fill(whole)
    field.press("Enter")
    said(page, "Complete: makespan 9")

    page.keyboard.press("r")
    said(page, "Ran on 2 ranks")
    said(page, "gradients equal to one process")
    assert "gradients equal" in page.locator(".cpp-facts").inner_text()
    assert page.locator(f"{BOARD} svg text:text-is('measured')").count() == 2
    assert page.evaluate(chosen) == before
    assert page.thrown == []

    page.keyboard.press("c")
    said(page, "Critical path: 0F0")
    page.evaluate("document.activeElement.blur()")
    restart_kernels(lab)
    open_and_run(page, lab, CELL, "print(board)", until="pre:has-text('this is 1f1b')")
    said(page, "from last time; clear the board to begin anew.")
    assert errors(page) == []


def test_by_mouse_and_in_dark(page: Any, lab: Lab) -> None:
    open_and_run(page, lab, "from course_pp import show\nshow.board(5)", until=f"{BOARD} svg")
    page.evaluate("document.body.dataset.jpThemeLight = 'false'")
    paper = f"getComputedStyle(document.querySelector('{BOARD}')).backgroundColor"
    assert page.evaluate(paper) == "rgb(22, 24, 27)"
    page.click("button[aria-label^='place 0F0']")
    said(page, "0F0 on rank 0 from 0 to 1.")
    box = page.locator(f"{BOARD} svg").bounding_box()
    page.mouse.click(box["x"] + 0.9 * box["width"], box["y"] + 0.8 * box["height"])
    said(page, "Rank 1, free from 0. 1F0 can be placed.")
    page.click("button:text-is('hint')")
    said(page, "Look at rank 1: it can act at 1.")
    page.click("button:text-is('hint')")
    said(page, "The way back begins on stage 1")
    page.click("button:text-is('hint')")
    said(page, "Hint, from zb_h1: 1F0 on rank 1 at 1.")
    page.locator("select[aria-label='who goes on']").select_option("zb_h1")
    page.click("button:text-is('fill the rest')")
    said(page, "Complete: makespan 7, score 100% (no order beats 7): par.")
    page.click("button:text-is('▶ play')")
    said(page, "Played: 7.")
    page.click("button:text-is('clear')")
    said(page, "The board is empty; u brings the moves back.")
    page.click("button:text-is('↶ undo')")
    said(page, "Undone: clearing the board. Complete: makespan 7")
    assert errors(page) == []


def test_another_level_opens_on_the_same_board_and_takes_no_moves_of_the_first(
    page: Any, lab: Lab
) -> None:
    open_and_run(
        page,
        lab,
        "from course_pp import show\nboard = show.board(6)\nboard",
        SLOW,
        until=f"{BOARD} svg",
    )
    page.locator(BOARD).focus()
    for _ in range(3):
        page.keyboard.press("f")
    page.click("button[aria-label^='level 7:']")
    page.keyboard.press("f")  # too late for level 6, too early for 7
    page.wait_for_selector(f"{BOARD} h3:has-text('Level 7 of 12')", timeout=SOON)
    said(page, "Choose a rank and place its first action.")
    page.click("button:text-is('one step')")
    said(page, "Placed 0F0, by zero bubble.")
    page.click("button[aria-label^='level 6:']")
    page.wait_for_selector(f"{BOARD} h3:has-text('Level 6 of 12')", timeout=SOON)
    said(page, "3 actions from last time")
    page.locator("select[aria-label='who goes on']").select_option("zb_h1")
    page.click("button:text-is('fill the rest')")
    said(page, "Complete: makespan 14")
    page.wait_for_selector("button:has-text('6 ✓')")
    page.click("button:text-is('next')")
    said(page, "1 action from last time")
    assert errors(page) == []
