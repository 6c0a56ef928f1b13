from collections.abc import Callable
from itertools import pairwise

import pytest

from course_pp import show
from course_pp.schedule import Costs, names, theory
from course_pp.show.chart import ChartFigure
from tests.show.reading import texts, title


def curves(figure: ChartFigure) -> tuple[list[dict[float, float]], list[dict[float, float]]]:
    """The lines and the points, in the order of the schedules."""
    drawn = [line for line in figure.axes[0].lines if line.get_transform() == figure.axes[0].transData]
    values = [
        {m: value for m, value in zip(line.get_xdata(), line.get_ydata(), strict=True) if value == value}
        for line in drawn
    ]
    return values[::2], values[1::2]


def test_the_points_lie_on_the_closed_forms() -> None:
    lines, points = curves(show.bubble_curve(names(), microbatches=(8, 16)))
    assert len(lines) == len(points) == len(names())
    for line, simulated in zip(lines, points, strict=True):
        assert set(simulated) == {8, 16}
        for m in set(line) & set(simulated):
            assert line[m] == pytest.approx(simulated[m], abs=1e-12)
    assert [bool(line) for line in lines] == [name in theory._FORMS for name in names()]


def test_chunks_share_the_costs_of_a_rank_so_that_latency_weighs_more_on_them() -> None:
    _, (points,) = curves(show.bubble_curve(["interleaved_1f1b"], microbatches=(8,), costs=Costs(latency=0.25)))
    halves = Costs(0.5, 0.5, 0.5, latency=0.25)
    assert points[8] == pytest.approx(theory.predict("interleaved_1f1b", 4, 8, halves).bubble_fraction)


def test_the_title_names_the_best_and_the_worst_at_the_largest_number() -> None:
    figure = show.bubble_curve(["gpipe", "zb_h2"], microbatches=(8, 64), within_span=True)
    assert title(figure) == "4 ranks, 64 microbatches: bubble from 0 % (zb_h2) to 4.48 % (gpipe)"
    assert "bubble, of the longest span" in figure.axes[0].get_ylabel()
    assert title(show.bubble_curve(["gpipe"])) == "4 ranks, 64 microbatches: gpipe has a bubble of 4.48 %"


def test_what_a_schedule_does_not_allow_has_no_point() -> None:
    _, (points,) = curves(show.bubble_curve(["dualpipe_v"], n_ranks=4, microbatches=(2, 16)))
    assert set(points) == {16}


def test_a_line_is_interrupted_where_no_closed_form_holds() -> None:
    axes = show.bubble_curve(["zb_h2"], microbatches=(1, 16)).axes[0]
    ys = list(axes.lines[0].get_ydata())
    assert [y == y for y in ys] == [False] * 6 + [True] * 10


def test_one_name_is_one_schedule() -> None:
    one, several = (show.bubble_curve(given, microbatches=(2, 4)) for given in ("1f1b", ["1f1b"]))
    assert one.alt_text == several.alt_text
    assert show.pareto(schedules="1f1b").alt_text == show.pareto(schedules=["1f1b"]).alt_text


def test_names_that_would_touch_are_moved_apart() -> None:
    figure = show.bubble_curve(names(), microbatches=(64,))
    heights = sorted(text.xy[1] for text in figure.axes[0].texts if text.get_text() in names())
    assert len(heights) == len(names())
    line = 9 / 72 * (heights[-1] - heights[0])
    assert min(after - before for before, after in pairwise(heights)) > 0.01 * line


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
    assert title(figure) == "4 ranks, 8 microbatches: zb_v has the least bubble and the least memory"


def test_schedules_that_do_not_allow_the_sizes_are_named() -> None:
    figure = show.pareto(8, 4)
    assert "not possible with these sizes: " in figure.axes[0].get_xlabel()
    assert "dualpipe_v" in figure.axes[0].get_xlabel()
    assert "Not possible with these sizes: " in figure.alt_text


@pytest.mark.parametrize(
    ("draw", "remedy"),
    [
        (lambda: show.bubble_curve([]), "at least one schedule"),
        (lambda: show.bubble_curve(microbatches=[]), "one number of microbatches"),
        (lambda: show.bubble_curve(microbatches=(0, 4)), "at least 1"),
        (lambda: show.bubble_curve("1f2b"), "use one of naive"),
        (lambda: show.bubble_curve(["1f2b"]), "use one of naive"),
        (lambda: show.bubble_curve(["dualpipe_v"], 8, [1]), "dualpipe_v"),
        (lambda: show.bubble_curve(n_ranks=0), "at least 1"),
        (lambda: show.bubble_curve(costs=Costs(forward=(1, 1, 1, 2))), "give one number"),
        (lambda: show.pareto(0, 8), "at least 1"),
        (lambda: show.pareto(schedules=["gpipe", "1f2b"]), "use one of naive"),
        (lambda: show.pareto(costs=Costs(activation=(1, 1, 1, 2))), "give one number"),
    ],
)
def test_what_cannot_be_drawn_is_refused(draw: Callable[[], ChartFigure], remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        draw()
