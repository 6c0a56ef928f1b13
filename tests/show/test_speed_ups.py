"""The curve of speed-up against ranks: its numbers, its finding, and what it refuses."""

from dataclasses import replace

import pytest

from course_pp import show
from course_pp.schedule import Costs, build, simulate, theory
from course_pp.show.chart import ChartFigure
from tests.show.reading import title

RAN = replace(simulate(build("1f1b", 2, 4)), measured=True)


def lines(figure: ChartFigure) -> list[dict[float, float]]:
    """What is drawn in the axes' own units, the line of linear speed-up first."""
    drawn = [line for line in figure.axes[0].lines if line.get_transform() == figure.axes[0].transData]
    return [dict(zip(line.get_xdata(), line.get_ydata(), strict=True)) for line in drawn]


def test_the_numbers_are_those_of_the_closed_forms() -> None:
    _, naive, _, gpipe, _, one, _, interleaved, _ = lines(show.speed_up(ranks=(1, 4, 8), n_microbatches=8, n_chunks=4))
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
    assert (
        title(figure) == "16 microbatches: near linear up to 16 (interleaved_1f1b), 4 (gpipe and 1f1b), 1 (naive) ranks"
    )
    assert "gpipe 1 on 1, 1.88 on 2, 3.37 on 4" in figure.alt_text
    assert title(show.speed_up("1f1b", title="own")) == "own"


def test_what_was_measured_is_a_filled_point_and_said_in_words() -> None:
    figure = show.speed_up(["naive", "1f1b"], (1, 2), 4, measured=[RAN, simulate(build("1f1b", 1, 4))])
    assert lines(figure)[4] == {2: 1.6}, "and no point for what was simulated"
    assert "1f1b 1 on 1, 1.6 on 2; measured 1.6 on 2." in figure.alt_text


def test_what_a_schedule_does_not_allow_has_no_point() -> None:
    _, points, _ = lines(show.speed_up("dualpipe_v", (2, 64), 16))
    assert set(points) == {2}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"schedules": ()}, "give at least one schedule"),
        ({"ranks": (0, 2)}, "ranks has 0"),
        ({"schedules": "dualpipe_v", "ranks": (64,), "n_microbatches": 16}, "dualpipe_v allows none"),
        ({"costs": Costs(forward=(1, 2))}, "give one number"),
        ({"schedules": "zb_h1", "measured": [RAN]}, "which is not drawn"),
    ],
)
def test_what_cannot_be_drawn_is_refused(arguments: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        show.speed_up(**arguments)
