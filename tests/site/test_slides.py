"""Slides in a browser: nothing is cut, and code can be read from the last row."""

import sys

import pytest

from tests.site.conftest import ROOT

pytestmark = pytest.mark.long
# Slides that are higher than the screen or wider, and code that is too small.
CUT = """
() => [...document.querySelectorAll("section")].flatMap((slide, i) => {
  const inside = [...slide.querySelectorAll("header, footer, .body, .body :not(math *, math)")];
  const told = (what) => `slide ${i + 1}, ${slide.querySelector("h1, h2").textContent}: ${what}`;
  return [
    slide.getBoundingClientRect().height > innerHeight + 0.5 && told("too high"),
    inside.some((each) => each.getBoundingClientRect().right > innerWidth) && told("too wide"),
    inside.some((each) => each.matches("pre, table") && each.scrollWidth > each.clientWidth + 1)
      && told("scrolls"),
    inside.some((each) => each.matches("pre, code")
      && parseFloat(getComputedStyle(each).fontSize) < 16) && told("small code"),
  ].filter(Boolean);
})
"""


@pytest.fixture
def decks(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import routes
    import slides

    for route in routes.ROUTES:
        path = tmp_path / f"{route.name}.html"
        path.write_text(slides.deck(route), encoding="utf-8")
    yield sorted(tmp_path.glob("*.html"))
    for name in ("routes", "slides", "as_html", "out"):
        sys.modules.pop(name, None)


def test_no_slide_is_cut_no_code_is_small_and_a_key_shows_the_notes(decks, page):
    page.goto("about:blank")
    page.thrown.clear()  # what the pages of earlier tests were still fetching
    for path in decks:
        for width, height in ((1024, 768), (1280, 720)):
            page.set_viewport_size({"width": width, "height": height})
            page.goto(path.as_uri())
            assert page.evaluate(CUT) == [], (path.stem, width)
        folded = page.locator("details.notes").count()
        assert page.locator("details.notes[open]").count() == 0
        page.keyboard.press("n")
        assert page.locator("details.notes[open]").count() == folded > 5
    page.locator("summary").first.click()
    for key, number in (
        ("End", page.locator("section").count()),
        ("Home", 1),
        ("PageDown", 2),
        ("Shift+Space", 1),
    ):
        page.keyboard.press(key)
        assert page.evaluate("now() + 1") == number, key
    assert page.thrown == []
