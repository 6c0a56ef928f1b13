"""A timeline that moves, in JupyterLab and on a page of its own."""

from base64 import b64encode
from pathlib import Path
from typing import Any

import nbformat
import pytest

from course_pp import show
from course_pp.schedule import Costs, build, simulate
from tests.browser.conftest import Lab
from tests.browser.notebook import SOON, errors, open_and_run

pytestmark = [pytest.mark.timeout(480), pytest.mark.long]
CELL = """
from course_pp import show
from course_pp.schedule import Costs, build, simulate
show.play(simulate(build("zb_v", 4, 8), Costs(latency=0.5)))
"""


def test_in_jupyterlab_keys_step_and_play_and_do_not_reach_the_notebook(
    page: Any, lab: Lab
) -> None:
    open_and_run(page, lab, CELL, "1", until=".cpp-player svg")
    now, player = page.locator(".cpp-now"), page.locator(".cpp-player")
    assert now.inner_text().startswith("0.0: rank 0 0F0.")
    player.focus()
    chosen = (
        "[...document.querySelectorAll('.jp-Cell')].findIndex(each =>"
        " each.classList.contains('jp-mod-active'))"
    )
    before = page.evaluate(chosen)
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert now.inner_text().startswith("1.5: rank 0 0F1, rank 1 1F0.")
    page.keyboard.press("ArrowLeft")
    assert now.inner_text() == "1.0: rank 0 0F1. Sent, not yet taken: activation of 0 to rank 1."
    page.keyboard.press(" ")
    page.wait_for_selector(".cpp-player button:text-is('❚❚ pause')", timeout=SOON)
    page.wait_for_function(
        "parseFloat(document.querySelector('.cpp-player input').value) > 30", timeout=SOON
    )
    page.keyboard.press(" ")
    page.wait_for_selector(".cpp-player button:text-is('▶ play')", timeout=SOON)
    page.keyboard.press("End")
    assert now.inner_text() == "57.5: nobody works. Sent, not yet taken: nothing."
    assert page.evaluate(chosen) == before
    assert errors(page) == []


def test_a_page_of_its_own_needs_nothing_else(page: Any, tmp_path: Path) -> None:
    path = show.play(simulate(build("dualpipe_v", 4, 8), Costs(latency=0.5))).save(
        tmp_path / "moves.html"
    )
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(path.as_uri())
    page.wait_for_selector(".cpp-player svg", timeout=SOON)
    over = (
        "(rect, text) => Boolean(rect.compareDocumentPosition(text) &"
        " Node.DOCUMENT_POSITION_FOLLOWING)"
    )
    # a box's, not yet begun
    veil, label = "rect[fill-opacity='0.62']", ".cpp-player svg text[text-anchor='middle']"
    assert page.evaluate(
        f'({over})(document.querySelector("{veil}"), document.querySelector("{label}"))'
    )
    page.click("button[aria-label='one step on']")
    assert page.locator(".cpp-now").inner_text().startswith("1.0: rank 0 0F1.")
    assert page.locator(".cpp-player svg").get_attribute("aria-label").startswith("dualpipe_v: ")
    page.locator(".cpp-player input").fill("1000")
    assert "nobody works" in page.locator(".cpp-now").inner_text()
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    assert page.thrown == []


def test_a_notebook_that_is_not_trusted_shows_the_still_picture(page: Any, lab: Lab) -> None:
    data, metadata = show.play(simulate(build("1f1b", 4, 8)))._repr_mimebundle_()
    data["image/png"] = b64encode(data["image/png"]).decode("ascii")
    output = nbformat.v4.new_output("execute_result", data, metadata=metadata, execution_count=1)
    cell = nbformat.v4.new_code_cell("show.play(timeline)", outputs=[output], execution_count=1)
    notebook = nbformat.v4.new_notebook(cells=[cell])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3"}
    nbformat.write(notebook, lab.folder / "received.ipynb")
    page.goto(lab.address("doc/tree/received.ipynb"))
    page.wait_for_selector(".cpp-player img[alt*='4 ranks, 8 microbatches']", timeout=2 * SOON)
    assert page.locator(".cpp-player img").bounding_box()["width"] > 600
    assert page.locator(".cpp-player svg").count() == 0
