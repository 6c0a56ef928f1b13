"""What the browser decides about a board is what Python decides."""

import json
from importlib.resources import files
from typing import Any

import pytest

from course_pp import show
from course_pp.schedule import Costs
from tests.browser.boards import SCRIPT, for_browser, random_board, told

pytestmark = [pytest.mark.timeout(300), pytest.mark.long]
# Draws a board without a kernel, and counts what was drawn.
DRAW = """
async ([source, state]) => {
  const board = await import("data:text/javascript;charset=utf-8," + encodeURIComponent(source));
  const model = { get: (name) => state[name], set: (name, value) => { state[name] = value; },
    save_changes: () => {}, send: () => {}, on: () => {}, off: () => {} };
  board.default.render({ model, el: document.body });
  return document.querySelectorAll("svg > *").length;
}
"""


@pytest.mark.parametrize("short", [1e-3, 1e-9, 5e-324])
def test_an_action_much_shorter_than_the_others_does_not_freeze_the_page(
    page: Any, short: float
) -> None:
    board = show.board(n_ranks=2, n_microbatches=2, costs=Costs((short, 1)))
    page.goto("about:blank")
    state = {name: getattr(board, name) for name in ("game", "words", "undone", "ran")} | {
        "moves": ["0F0", "1F0"]
    }
    assert page.evaluate(DRAW, [board._esm, state]) < 300


@pytest.mark.parametrize(
    "seeds",
    [range(200), pytest.param(range(200, 1000), marks=pytest.mark.full)],
    ids=["200 boards", "800 more"],
)
def test_on_random_boards_the_browser_decides_as_python_does(page: Any, seeds: range) -> None:
    source = files("course_pp.show").joinpath("board_rules.js").read_text(encoding="utf-8")
    boards = [random_board(seed) for seed in seeds]
    expected = [json.loads(json.dumps(told(board))) for board in boards]
    refusals = " ".join(
        answer[0] for answers, *_ in expected for answer in answers if answer != "done"
    )
    rules = (
        "write stage",
        "there is no",
        "is placed already",
        " first",
        "choose a longer gap",
        "its cap is",
        "is not on",
    )
    assert all(rule in refusals for rule in rules)
    assert any("is busy with" in why for each in expected for why in each[4])
    page.goto("about:blank")
    for first in range(0, len(boards), 100):
        found = page.evaluate(
            SCRIPT, [source, [for_browser(board) for board in boards[first : first + 100]]]
        )
        for seed, answer, correct in zip(seeds[first:], found, expected[first:], strict=False):
            assert answer == correct, f"board {seed}"
