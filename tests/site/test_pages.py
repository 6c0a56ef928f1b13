"""Pages and pictures that the package makes are those that are committed."""

import re
import sys
from pathlib import Path

import pytest

from course_pp.schedule import names, theory

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def docs(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    yield
    for name in ("comparison", "cheat_sheet"):
        sys.modules.pop(name, None)


def test_the_comparison_of_schedules_is_what_simulation_says():
    import comparison

    assert comparison.PAGE.read_text(encoding="utf-8") == comparison.page(), "make images"
    assert set(comparison.REMARKS) == set(names())


def test_its_steps_are_those_of_the_closed_forms():
    import comparison

    for name in ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v"):
        schedule = comparison.build(name, comparison.RANKS, comparison.MICROBATCHES)
        share = comparison.Fraction(comparison.RANKS, schedule.n_stages)
        costs = comparison.Costs(forward=share, input_grad=share, weight_grad=share)
        predicted = theory.predict(name, comparison.RANKS, comparison.MICROBATCHES, costs)
        assert comparison.row(name).step == predicted.makespan


def test_the_cheat_sheet_says_what_is_drawn():
    import cheat_sheet

    drawn = (ROOT / "images" / "cheat_sheet.svg").read_text(encoding="utf-8")
    assert re.search(r"<desc>(.*?)</desc>", drawn)[1] == cheat_sheet.draw().alt_text, "make images"
    assert (ROOT / "images" / "cheat_sheet.pdf").read_bytes().startswith(b"%PDF")


def test_the_picture_of_the_readme_moves_thrice_at_most_and_rests_for_who_asks():
    picture = (ROOT / "images" / "1f1b_on_two_ranks.svg").read_text(encoding="utf-8")
    assert re.findall(r"animation: \w+ 8s linear (\w+)", picture) == ["3", "3"]
    assert "prefers-reduced-motion: reduce" in picture
