"""The quiz in a real JupyterLab, by keyboard alone."""

from typing import Any

import pytest

from tests.browser.conftest import Lab
from tests.browser.notebook import SOON, errors, open_and_run

pytestmark = [pytest.mark.timeout(480), pytest.mark.long]


def test_a_question_is_answered_and_left_by_keyboard_alone(page: Any, lab: Lab) -> None:
    kept = f"import os; os.environ['COURSE_PP_PROGRESS'] = {str(lab.folder / 'progress.json')!r}"
    cell = "from course_pp.exercises import quiz\nquiz('after', about='03')"
    open_and_run(page, lab, kept, cell, until="button:text-is('I do not know')")
    page.locator("button:text-is('a')").focus()
    page.keyboard.press("Tab")
    page.keyboard.press("Space")
    page.wait_for_selector("[role=status]:has-text('Notebook 03, section')", timeout=SOON)
    assert page.locator("button:text-is('✓ b')").is_disabled()
    page.wait_for_function("document.activeElement.textContent == 'Next'", timeout=SOON)
    page.keyboard.press("Space")
    page.wait_for_selector("text=Question 2 of 3", timeout=SOON)
    assert errors(page) == []
