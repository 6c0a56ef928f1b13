"""A headless Chromium. Without it the tests are skipped with the way to enable them."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.optional import lacking

_CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
)


@pytest.fixture(scope="session")
def page() -> Iterator[Any]:
    """A page of a headless Chromium, with the exceptions of its scripts in ``page.thrown``."""
    if not (executable := next(filter(None, map(shutil.which, _CHROMIUM)), None)):
        lacking(
            "browser",
            "there is no Chromium here: apt-get install chromium enables the browser tests",
        )
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        lacking(
            "browser",
            "there is no playwright here: pip install playwright enables the browser tests",
        )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=list(_FLAGS))
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.thrown = []
        page.on("pageerror", lambda error: page.thrown.append(str(error)))
        yield page
        browser.close()
