"""Curves and points: their numbers, their findings, and what they refuse."""

from dataclasses import replace

import pytest

from course_pp import show
from course_pp.schedule import Costs, build, simulate, theory
from course_pp.show.chart import ChartFigure
from course_pp.show.curves import crossing
from tests.show.reading import texts, title


def test_one_name_is_one_schedule() -> None:
    assert show.pareto(schedules="1f1b").alt_text == show.pareto(schedules=["1f1b"]).alt_text


def test_the_line_joins_the_schedules_that_no_other_beats() -> None:
    figure = show.pareto(4, 8)
    frontier = figure.axes[0].lines[0]
    assert list(frontier.get_xdata()) == [1, 2, 3, 4]
    assert list(frontier.get_ydata()) == pytest.approx([0.75, 11 / 59, 5 / 53, 1 / 17])
    assert title(figure) == "4 ranks, 8 microbatches: from naive to zb_v, less bubble costs memory"
    assert {"zb_v", "gpipe", "1f1b, hanayo and pipedream (asynchronous)"} <= set(texts(figure))


def test_memory_is_that_of_all_layers_of_a_rank() -> None:
    described = show.pareto(4, 8).alt_text
    assert "zb_v 5.88 % at 4;" in described
    assert "interleaved_1f1b 15.8 % at 5.5;" in described


def test_stashed_weights_make_pipedream_larger() -> None:
    described = show.pareto(4, 8, Costs(weights=1)).alt_text
    assert "1f1b and hanayo 27.3 % at 5;" in described
    assert "pipedream (asynchronous) 27.3 % at 8" in described


def test_one_schedule_may_beat_all_others() -> None:
    figure = show.pareto(4, 8, schedules=["gpipe", "zb_v"])
    assert "zb_v has the least bubble and the least memory" in title(figure)


def test_schedules_that_do_not_allow_the_sizes_are_named() -> None:
    figure = show.pareto(8, 4)
    assert "not possible with these sizes: " in figure.axes[0].get_xlabel()
    assert "dualpipe_v" in figure.axes[0].get_xlabel()
    assert "Not possible with these sizes: " in figure.alt_text


RAN = replace(simulate(build("1f1b", 2, 4)), measured=True)


def lines(figure: ChartFigure) -> list[dict[float, float]]:
    """The curves in the axes' own units, the line of linear speed-up first."""
    axes = figure.axes[0]
    drawn = [line for line in axes.lines if line.get_transform() == axes.transData]
    return [dict(zip(line.get_xdata(), line.get_ydata(), strict=True)) for line in drawn]


def test_the_numbers_are_those_of_the_closed_forms() -> None:
    _, naive, _, gpipe, _, one, _, interleaved, _ = lines(
        show.speed_up(ranks=(1, 4, 8), n_microbatches=8, n_chunks=4)
    )
    assert naive == {1: 1, 4: 1, 8: 1}
    assert gpipe == one == pytest.approx({p: 8 * p / (8 + p - 1) for p in (1, 4, 8)})
    assert interleaved == pytest.approx({p: 32 * p / (32 + p - 1) for p in (1, 4, 8)})


def test_messages_cost_the_same_however_finely_the_model_is_cut() -> None:
    costs = Costs(8, 8, 8, latency=1)
    _, points, _ = lines(show.speed_up("interleaved_1f1b", (4,), 8, costs=costs))
    late = theory.predict("interleaved_1f1b", 4, 8, Costs(1, 1, 1, latency=1), 2)
    assert points[4] == pytest.approx(8 * 24 / late.makespan)


@pytest.mark.slow
def test_the_title_says_where_near_linear_ends() -> None:
    figure = show.speed_up(n_microbatches=16, n_chunks=4)
    for ranks in ("16 (interleaved_1f1b)", "4 (gpipe and 1f1b)", "1 (naive)"):
        assert ranks in title(figure)
    assert "gpipe 1 on 1, 1.88 on 2, 3.37 on 4" in figure.alt_text
    assert title(show.speed_up("1f1b", title="own")) == "own"


def test_what_was_measured_is_a_filled_point_and_said_in_words() -> None:
    figure = show.speed_up(
        ["naive", "1f1b"], (1, 2), 4, measured=[RAN, simulate(build("1f1b", 1, 4))]
    )
    assert lines(figure)[4] == {2: 1.6}, "and no point for what was simulated"
    assert "1f1b 1 on 1, 1.6 on 2; measured 1.6 on 2." in figure.alt_text


def test_what_a_schedule_does_not_allow_has_no_point() -> None:
    _, points, _ = lines(show.speed_up("dualpipe_v", (2, 64), 16))
    assert set(points) == {2}


def test_a_curve_passes_1_between_its_points_on_logarithmic_axes() -> None:
    assert crossing({4: 0.5, 16: 2.0}) == pytest.approx(8)
    assert crossing({4: 0.5, 8: 1.0, 16: 3.0}) == pytest.approx(8)
    assert crossing({4: 1.5, 8: 2.0}) is None
    assert crossing({4: 0.5, 8: 0.7}) is None


def test_the_break_evens_are_the_finding() -> None:
    figure = show.break_even({"one": {1: 0.5, 4: 2.0}, "two": {4: 0.5, 16: 2.0}})
    assert "between 2 and 8 tokens" in figure.axes[0].get_title(loc="left")
    assert "one: 0.5 at 1, 2 at 4; passes 1 near 2" in figure.alt_text
    figure = show.break_even({"never": {1: 0.5, 4: 0.6}})
    assert figure.axes[0].get_title(loc="left") == "No curve passes data parallelism here"
