import itertools
import re
import sys
from dataclasses import replace
from typing import Any

import pytest

from course_pp import show
from course_pp.base.imports import MissingExtra
from course_pp.schedule import names, theory
from course_pp.show.explorer import (
    Settings,
    figure_of,
    formula_html,
    numbers_html,
    ranks_html,
    report_of,
)
from tests.grids import thinned


def words(html: str) -> str:
    return " ".join(re.sub(r"<[^>]*>", " ", html).split())


def test_the_numbers_stand_beside_the_closed_form() -> None:
    report = report_of(Settings("1f1b", 4, 8))
    assert (
        words(numbers_html(report))
        == "simulated closed form makespan 33.0 33.0 bubble b, of all rank time 27.3 % 27.3 % "
        "b / (1 − b), of the work 37.5 % 37.5 % bubble, of the longest span 27.3 % 27.3 %"
    )
    assert words(ranks_html(report)).startswith(
        "rank busy peak held closed form 0 72.7 % 4 4 1 72.7 % 3 3 "
    )
    assert "makespan = (m + p - 1)(f + B)" in formula_html(report)
    assert "the closed form gives the same makespan, bubbles and peaks" in formula_html(report)


def test_outside_of_its_conditions_the_closed_form_is_a_dash_and_the_condition_is_named() -> None:
    report = report_of(Settings("zb_v", 4, 8, latency=1.0))
    assert words(numbers_html(report)).startswith("simulated closed form makespan 65.0 – ")
    assert "it holds only if" in formula_html(report)


def test_a_slow_stage_takes_longer_in_every_action() -> None:
    report = report_of(Settings("gpipe", 2, 1, slow_stage=1, slowdown=3.0))
    assert [float(span.duration) for span in report.timeline.spans] == [1, 2, 3, 6]


def test_all_costs_come_from_the_settings() -> None:
    report = report_of(
        Settings("zb_h1", 2, 1, forward=0.5, input_grad=1.5, weight_grad=0.25, latency=2.0)
    )
    assert report.timeline.makespan == 0.5 + 2 + 0.5 + 1.5 + 2 + 1.5 + 0.25


def test_the_chosen_gap_is_framed_and_told() -> None:
    report = report_of(Settings())
    gap = report.timeline.idle_gaps[0]
    figure = figure_of(report, gap)
    frame = next(patch for patch in figure.axes[0].patches if type(patch).__name__ == "Rectangle")
    assert (frame.get_x(), frame.get_width()) == (4, 6)
    assert figure.alt_text.endswith(f"Framed: {gap.cause}.")
    assert show.explore().gap.options[0] == ("rank 0, 4.0 to 10.0", 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Settings("1f1b", n_chunks=2), "1f1b has 1 a rank"),
        (Settings("gpipe", slow_stage=4), "stages 0 to 3"),
        (Settings("dualpipe_v", 8, 1), "dualpipe_v"),
    ],
)
def test_an_impossible_combination_is_a_value_error_and_shown_in_place(
    settings: Settings, message: str
) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        report_of(settings)
    panel = show.explore(**vars(settings))
    assert words(panel.picture.value).replace("&#x27;", "'") == str(refused.value)
    assert (
        panel.numbers.value == panel.ranks.value == panel.formula.value == panel.cause.value == ""
    )
    assert panel.gap.disabled


def test_stages_are_not_counted_from_the_end() -> None:
    with pytest.raises(ValueError, match="stages 0 to 3"):
        report_of(Settings("gpipe", slow_stage=-1))


@pytest.mark.parametrize(
    ("changed", "verdict"),
    [
        ({"makespan": 33.001}, "the closed form differs: makespan 33.001 instead of 33.0"),
        (
            {"peak_activations": (4, 3, 2, 2)},
            "the closed form differs: peak of rank 3 2.0 instead of 1.0",
        ),
        ({"makespan": 33 + 1e-12}, "the closed form gives the same makespan, bubbles and peaks"),
    ],
)
def test_a_closed_form_that_is_off_by_more_than_rounding_is_said_to_differ(
    changed: dict[str, Any], verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = theory.predict("1f1b", 4, 8)
    monkeypatch.setattr(theory, "predict", lambda *_, **__: replace(exact, **changed))
    assert report_of(Settings()).verdict.startswith(verdict)


def test_moving_a_slider_changes_figure_and_numbers_and_back_again() -> None:
    panel = show.explore()
    before = panel.picture.value, panel.numbers.value
    panel.controls["n_microbatches"].value = 9
    assert "4 ranks, 9 microbatches" in panel.picture.value
    assert "36.0" in panel.numbers.value
    panel.controls["n_microbatches"].value = 8
    assert (panel.picture.value, panel.numbers.value) == before


def test_a_menu_entry_of_none_is_none() -> None:
    panel = show.explore(n_chunks=2, schedule="looped_bfs", slow_stage=3)
    assert (panel.settings.n_chunks, panel.settings.slow_stage) == (2, 3)
    panel.controls["n_chunks"].index = panel.controls["slow_stage"].index = 0
    assert (panel.settings.n_chunks, panel.settings.slow_stage) == (None, None)


def test_one_slider_goes_from_depth_first_to_breadth_first() -> None:
    panel = show.explore(schedule="interleaved_1f1b", n_microbatches=16, round_size=4)
    for size, held in ((4, 11), (8, 15), (16, 23), (0, 11)):
        panel.controls["round_size"].value = size
        assert panel.settings.round_size == (size or None)
        assert words(panel.ranks.value).split(" % ")[1].split()[:2] == [str(held)] * 2
        assert "gives the same makespan" in panel.formula.value
    panel.controls["schedule"].value = "1f1b"
    panel.controls["round_size"].value = 4
    assert "only interleaved_1f1b takes it" in panel.picture.value


def test_choosing_a_gap_tells_its_cause() -> None:
    panel = show.explore()
    assert "rank 0 waits from 4.0 to 10.0" in panel.cause.value
    panel.gap.index = len(panel.gap.options) - 1
    assert "rank 3 waits from 27.0 to 33.0 because its work is done" in panel.cause.value
    assert "Framed: rank 3 waits from 27.0" in panel.picture.value


def test_one_rank_is_never_idle() -> None:
    panel = show.explore(n_ranks=1)
    assert panel.gap.options == ()
    assert "no rank is ever idle" in panel.cause.value


@thinned
@pytest.mark.parametrize("name", names())
def test_no_position_of_the_sliders_raises(name: str, every: int) -> None:
    panel = show.explore(schedule=name)
    for ranks, microbatches, chunks, cost in [
        *itertools.product((1, 4), (1, 7), (-1, 2), (0.0, 1.5))
    ][::every]:
        moves = {
            "n_ranks": ranks,
            "n_microbatches": microbatches,
            "n_chunks": chunks,
            "forward": cost,
        }
        moves |= {
            "latency": 4 * cost,
            "slow_stage": ranks - 1,
            "input_grad": cost,
            "weight_grad": cost,
        }
        for control, value in moves.items():
            panel.controls[control].unobserve_all()
            panel.controls[control].value = value
        panel.update()
        assert ("<img" in panel.picture.value) != ("role=" in panel.picture.value)


def test_where_widgets_cannot_run_the_output_holds_the_figure() -> None:
    panel = show.explore()
    data, metadata = panel._repr_mimebundle_()
    assert {"application/vnd.jupyter.widget-view+json", "image/png", "text/plain"} <= set(data)
    assert "4 ranks, 8 microbatches" in metadata["image/png"]["alt"]


@pytest.mark.parametrize(
    ("name", "module", "package"),
    [
        ("explore", "course_pp.show.explorer", "ipywidgets"),
        ("board", "course_pp.show.board_widget", "anywidget"),
    ],
)
def test_without_widgets_one_sentence_says_what_to_do(
    name: str, module: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match=package):
        getattr(show, name)
