import re
from typing import Any

import pytest

from tests.browser.conftest import Lab
from tests.browser.notebook import SOON, errors, open_and_run

pytestmark = [pytest.mark.timeout(480), pytest.mark.long]
FIGURE = ".jp-OutputArea-output img[alt*='microbatches']"


def slider(page: Any, name: str) -> Any:
    return page.locator(f".widget-slider:has(label:text-is('{name}')) .noUi-handle")


def choose(page: Any, name: str, option: str) -> None:
    page.locator(f".widget-dropdown:has(label:text-is('{name}')) select").select_option(
        label=option
    )


def test_moving_a_slider_changes_the_figure_and_the_numbers(page: Any, lab: Lab) -> None:
    open_and_run(page, lab, "from course_pp import show\nshow.explore()", until=FIGURE)
    figure, outputs = page.locator(FIGURE), page.locator(".jp-OutputArea-output").first
    before = figure.get_attribute("src")
    assert "4 ranks, 8 microbatches" in figure.get_attribute("alt")
    assert re.search(r"makespan\s+33.0\s+33.0", outputs.inner_text())

    slider(page, "microbatches m").press("ArrowRight")
    page.wait_for_selector("img[alt*='4 ranks, 9 microbatches']", timeout=SOON)
    assert figure.get_attribute("src") != before
    assert re.search(r"makespan\s+36.0\s+36.0", outputs.inner_text())
    assert errors(page) == []

    choose(page, "chunks a rank", "3")
    page.wait_for_selector("[role=alert]:has-text('1f1b has 1 a rank')", timeout=SOON)
    assert figure.count() == 0
    choose(page, "schedule", "zb_v")
    page.wait_for_selector("[role=alert]:has-text('zb_v has 2 a rank')", timeout=SOON)
    choose(page, "chunks a rank", "the schedule's own")
    page.wait_for_selector("img[alt*='9 microbatches: busy']", timeout=SOON)

    choose(page, "why idle:", "rank 3, 0.0 to 3.0")
    page.wait_for_selector(
        "div:has-text('rank 3 waits from 0.0 to 3.0 for the activation')", timeout=SOON
    )
    assert errors(page) == []


@pytest.mark.parametrize("schedule", ["zb_v", "1f1b"])
def test_at_eight_ranks_everything_fits_and_every_slider_can_be_hit(
    page: Any, lab: Lab, schedule: str
) -> None:
    cell = (
        f"from course_pp import show\nshow.explore(schedule={schedule!r}, n_ranks=8,"
        " n_microbatches=32)"
    )
    open_and_run(page, lab, cell, until=FIGURE)
    page.wait_for_selector("div:has-text('The bubble b is')", timeout=SOON)
    assert page.locator(".jp-OutputArea-output").first.bounding_box()["height"] <= 900
    tracks = page.locator(".widget-slider .noUi-target").all()
    assert len(tracks) == 8
    assert min(track.bounding_box()["width"] for track in tracks) >= 200
    names = page.locator(".widget-slider label, .widget-dropdown label").all()
    assert [
        name.inner_text()
        for name in names
        if name.evaluate("each => each.scrollWidth > each.clientWidth")
    ] == []
