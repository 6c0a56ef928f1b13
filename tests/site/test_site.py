"""The site builds without a warning, has no dead link, and needs no colours, sight or network."""

import html
import inspect
import json
import os
import re
from functools import cache
from itertools import product
from urllib.parse import unquote

import pytest

import course_pp.parallel
import course_pp.schedule
from course_pp.exercises.exercise import exercises
from course_pp.exercises.inventory import questions
from tests.site.conftest import ROOT, make_site

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@cache
def text_of(page):
    return page.read_text(encoding="utf-8")


@cache
def anchors_of(page):
    return set(re.findall(r'\bid="([^"]+)"', text_of(page)))


def pages_of(site):
    """All pages; in _static lie templates of the theme."""
    return [path for path in sorted(site.rglob("*.html")) if "_static" not in path.parts]


def attributes(page, *names):
    written = re.sub(r"<(script|style|pre)\b.*?</\1>", "", text_of(page), flags=re.S)
    return [
        html.unescape(value) for value in re.findall(rf'\b(?:{"|".join(names)})="([^"]*)"', written)
    ]


def test_every_internal_link_and_anchor_leads_somewhere(site):
    broken, followed = [], 0
    for path in pages_of(site):
        for link in attributes(path, "href", "src"):
            if re.match(r"https?:|data:|mailto:|javascript:|#$", link) or not link:
                continue
            name, _, anchor = unquote(link).partition("#")
            target = path if not name else (path.parent / name.partition("?")[0]).resolve()
            target = target / "index.html" if target.is_dir() else target
            followed += 1
            # The list of sources that viewcode writes has anchors for lines and names only.
            if not target.is_file() or (
                anchor and target.suffix == ".html" and anchor not in anchors_of(target)
            ):
                broken.append(f"{path.relative_to(site)}: {link}")
    assert not broken, f"{len(broken)} of {followed} links are broken: {broken[:20]}"
    assert followed > 1000


def test_no_page_loads_anything_from_elsewhere(site):
    for path in pages_of(site):
        loaded = re.findall(
            r'<(?:script|img|iframe|source)\b[^>]*?\ssrc="(https?:[^"]+)"', text_of(path)
        )
        loaded += re.findall(r'<link\b[^>]*\bhref="(https?:[^"]+)"', text_of(path))
        assert not loaded, path


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_chapter_has_all_its_figures_with_their_alt_text_and_its_hints(site, path):
    page = site / "notebooks" / f"{path.stem}.html"
    shown = [
        html.unescape(alt) for alt in re.findall(r'<img\b[^>]*?\balt="([^"]*)"', text_of(page))
    ]
    notebook = json.loads(path.read_text(encoding="utf-8"))
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", ())]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    for number, picture in enumerate(pictures, start=1):
        assert picture["metadata"]["image/png"]["alt"] in shown
        assert f"figure-{path.stem[:2]}-{number}" in anchors_of(page)
    for exercise in (each for each in exercises() if each.notebook == path.stem[:2]):
        count = text_of(page).count(f"of {len(exercise.hints)} for {exercise.name}</summary>")
        assert count == len(exercise.hints), exercise.name
    prose = "".join(
        "".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown"
    )
    assert ("<math" in text_of(page)) == bool(re.search(r"\$[^$`]+\$", prose))


def test_every_picture_of_the_site_is_described(site):
    for path in pages_of(site):
        for picture in re.findall(
            r"<img\b[^>]*>", re.sub(r"<script\b.*?</script>", "", text_of(path), flags=re.S)
        ):
            assert re.search(r'\balt="[^"]+"', picture) or "avatar" in picture, (
                path,
                picture[:200],
            )


def test_every_public_name_has_types_and_a_link_to_its_source(site):
    for package in (course_pp.schedule, course_pp.parallel):
        page = site / "generated" / "api" / f"{package.__name__}.html"
        for name in package.__all__:
            described = f'id="{package.__name__}.{name}"' in text_of(page)
            passed_on = re.search(
                rf'Passed on from <a [^>]*#course_pp\.\w+\.{name}"', text_of(page)
            )
            assert described or passed_on or inspect.ismodule(getattr(package, name)), name
    build = re.search(
        r'id="course_pp\.schedule\.build".*?</dt>',
        text_of(page.with_name("course_pp.schedule.html")),
        re.S,
    )
    assert build is not None
    assert "n_ranks" in build[0]
    assert "Schedule" in build[0]
    assert "_modules/course_pp/schedule/catalogue.html#build" in build[0]


def test_terms_are_linked_at_their_first_use_only(site):
    page = text_of(site / "notebooks" / "02_gpipe.html")
    linked = re.findall(r'<a class="term[^>]*#(term-[\w-]+)"', page)
    assert {"term-rank", "term-microbatch", "term-bubble"} <= set(linked)
    assert len(linked) == len(set(linked))


def test_a_missing_package_is_said_in_one_line(tmp_path):
    hidden = tmp_path / "sitecustomize.py"
    hidden.write_text("import sys\nsys.modules['myst_nb'] = None\n")
    done = make_site(tmp_path, PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]))
    assert done.returncode == 1
    assert len(done.stdout.splitlines()) == 1
    assert "myst-nb" in done.stdout
    assert done.stderr == ""


KINDS_OF_PAGE = (
    "index.html",
    "notebooks/01_naive_split.html",
    "generated/api/course_pp.launch.html",
    "generated/exercises.html",
    "docs/glossary.html",
)
LIVE_PAGES = ("generated/explorer.html", "notebooks/11_your_own_schedule.html")


@pytest.mark.parametrize(
    ("name", "mode"),
    [*product(KINDS_OF_PAGE, ("light", "dark")), *((name, "dark") for name in LIVE_PAGES)],
)
def test_axe_finds_nothing_serious(site, page, name, mode):
    from axe_playwright_python.sync_playwright import Axe

    page.set_viewport_size({"width": 1400, "height": 900})
    page.add_init_script(
        f"localStorage.setItem('mode', '{mode}'); localStorage.setItem('theme', '{mode}')"
    )
    page.goto((site / name).as_uri())
    assert page.evaluate("document.documentElement.dataset.theme") == mode
    found = [
        each
        for each in Axe().run(page).response["violations"]
        if each["impact"] in ("serious", "critical")
    ]
    told = [
        f"{each['id']}: {each['help']}: {[node['html'][:150] for node in each['nodes'][:3]]}"
        for each in found
    ]
    assert not told, "\n".join(told)


@pytest.mark.parametrize("name", [*KINDS_OF_PAGE, *LIVE_PAGES])
def test_a_phone_does_not_scroll_sideways(site, page, name):
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto((site / name).as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.thrown == []


def test_a_timeline_of_a_chapter_moves_without_a_kernel(site, page):
    page.goto((site / "notebooks" / "03_1f1b.html").as_uri())
    player = page.locator(".cpp-player").first
    player.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert not player.locator(".cpp-now").inner_text().startswith("0.0:")


def test_the_search_page_finds_a_word(site, page):
    page.goto((site / "search.html").as_uri() + "?q=reshard")
    page.wait_for_selector("#search-results li a", timeout=20_000)


def test_the_pages_alone_answer_every_question_of_the_quiz(site):
    for question in questions():
        [page] = (site / "notebooks").glob(f"{question.notebook}_*.html")
        shown = words_of(re.sub(r"<[^>]+>", "", text_of(page)))
        for quote in (
            question.section,
            question.output,
            *(wrong.quote for wrong in question.wrong),
        ):
            if not {"$", "["} & set(quote):  # formulas and references look otherwise there
                assert words_of(quote) in shown, (question.name, quote)


def words_of(text):
    return " ".join(re.findall(r"\w+", html.unescape(text)))
