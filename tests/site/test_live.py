"""The board and the explorer on pages that no kernel answers."""

import sys
from random import Random

import pytest

from course_pp.schedule import Costs, build, simulate
from tests.site.conftest import ROOT

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]
CHOOSE = """
(chosen) => {
  const control = (name) => document.querySelector(`.cpp-explorer [name=${name}]`);
  for (const [name, value] of Object.entries(chosen)) control(name).value = value;
  control("schedule").dispatchEvent(new Event("change"));
  const cells = [...document.querySelectorAll(".cpp-explorer td")].map((cell) => cell.textContent);
  return [cells, document.querySelector(".cpp-said").textContent];
}
"""


@pytest.fixture
def live(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import live

    yield live
    sys.modules.pop("live", None)


def test_the_explorer_says_what_python_simulates(page, live, tmp_path):
    page.thrown.clear()
    (tmp_path / "explorer.html").write_text(
        f"<!DOCTYPE html>{live.script()}{live.explorer_html()}", encoding="utf-8"
    )
    page.goto((tmp_path / "explorer.html").as_uri())
    random, offered = Random(7), live.orders()
    quarters = [each / 4 for each in range(1, 17)]
    for name in [*offered] * 3:
        p, m = random.choice(live.RANKS), random.choice(live.MICROBATCHES)
        f, b, w, latency, slower = (random.choice(quarters) for _ in range(5))
        slow, slower = random.choice([-1, 0, p - 1]), max(1.0, slower)
        chosen = {"schedule": name, "ranks": p, "microbatches": m, "slow": slow, "slowdown": slower}
        cells, said = page.evaluate(
            CHOOSE, chosen | {"forward": f, "input": b, "weight": w, "latency": latency}
        )
        if isinstance(offered[name][f"{p} {m}"], str):
            assert said == offered[name][f"{p} {m}"] + "."
            continue
        schedule = build(name, p, m)
        each = [
            [time * (slower if stage == slow else 1) for stage in range(schedule.n_stages)]
            for time in (f, b, w)
        ]
        expected = simulate(schedule, Costs(*map(tuple, each), latency=latency))
        idle = expected.bubble_fraction
        assert float(cells[1]) == pytest.approx(float(expected.makespan), abs=6e-4), chosen
        shares = [
            100 * float(share) for share in (idle, idle / (1 - idle), expected.span_bubble_fraction)
        ]
        assert [float(cell.removesuffix(" %")) for cell in cells[3:9:2]] == pytest.approx(
            shares, rel=5.1e-3
        ), chosen
        assert [int(peak) for peak in cells[-1 : -3 * p : -3]][::-1] == list(
            expected.peak_activations
        )
    assert page.thrown == []


def test_the_explorer_moves_by_keyboard_and_says_why_a_rank_waits(site, page):
    page.goto((site / "generated" / "explorer.html").as_uri())
    page.locator("[name=latency]").focus()
    page.keyboard.press("ArrowRight")
    assert "35.0" not in page.locator(".cpp-title").inner_text()
    assert "waits from" in page.locator(".cpp-cause").inner_text()
    page.locator(".cpp-explorer [name=slow]").select_option("7")
    assert (
        page.locator(".cpp-said").inner_text()
        == "slow stage 7: there are stages 0 to 3; choose one of them, or none."
    )
    assert page.locator(".cpp-explorer svg").count() == 0
    assert page.thrown == []


def test_a_board_is_played_to_par_without_a_kernel_and_outlives_the_page(site, page):
    page.goto((site / "notebooks" / "11_your_own_schedule.html").as_uri())
    assert page.locator(".cpp-board").count() == 3
    page.locator(".cpp-board").first.focus()
    for key in "ff":
        page.keyboard.press(key)
    page.keyboard.press("f")
    said = page.locator(".cpp-board .cpp-now").first
    assert "Not allowed" in said.inner_text()
    page.locator(".cpp-board select[aria-label='who goes on']").first.select_option("1f1b")
    page.locator("button:text-is('fill the rest')").first.click()
    assert (
        "Complete: makespan 12, score 100% (no order beats 12): par. Next: level 4 (key n)."
        in said.inner_text()
    )
    page.locator(".cpp-board").first.focus()
    page.keyboard.press("r")
    assert "need a kernel" in said.inner_text()
    page.reload()
    assert "From last time" in said.inner_text()
    assert page.thrown == []


def test_every_level_of_the_board_is_on_its_page_under_an_address_of_its_own(site, page):
    written = (site / "generated" / "board.html").read_text(encoding="utf-8")
    assert written.count('class="cpp-live"><img src="data:image/png') == 1
    page.goto((site / "generated" / "board.html").as_uri())
    page.evaluate("location.hash = '#level=12&moves=0F0'")
    page.locator(".cpp-board h3:has-text('Level 12 of 12')").wait_for()
    assert "Loaded: 1 move." in page.locator(".cpp-now").inner_text()
    page.locator("button[aria-label^='level 7:']").click()
    assert page.locator("h3:has-text('Level 7 of 12')").count() == 1
    assert page.url.endswith("#level=7&moves=")
    assert page.thrown == []
