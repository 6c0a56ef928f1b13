"""Break-evens and published runs in pictures say what their numbers say."""

import pytest

from course_pp import show
from course_pp.show.ratios import crossing


def test_a_curve_passes_1_between_its_points_on_logarithmic_axes():
    assert crossing({4: 0.5, 16: 2.0}) == pytest.approx(8)
    assert crossing({4: 0.5, 8: 1.0, 16: 3.0}) == pytest.approx(8)
    assert crossing({4: 1.5, 8: 2.0}) is None
    assert crossing({4: 0.5, 8: 0.7}) is None


def test_the_break_evens_are_the_finding():
    figure = show.break_even({"one": {1: 0.5, 4: 2.0}, "two": {4: 0.5, 16: 2.0}})
    assert "between 2 and 8 tokens" in figure.axes[0].get_title(loc="left")
    assert "one: 0.5 at 1, 2 at 4; passes 1 near 2" in figure.alt_text
    figure = show.break_even({"never": {1: 0.5, 4: 0.6}})
    assert figure.axes[0].get_title(loc="left") == "No curve passes data parallelism here"


@pytest.mark.parametrize("curves", [{}, {"one": {1: 0.5}}, {"one": {0: 0.5, 1: 1.0}}, {"one": {1: 0.0, 2: 1.0}}])
def test_curves_that_cannot_be_drawn_are_refused(curves):
    with pytest.raises(ValueError, match="curves"):
        show.break_even(curves)


def test_the_errors_of_published_runs_are_the_finding():
    figure = show.published({"a": (10.0, 11.0), "b": (20.0, 19.0), "c": (5.0, 5.0)})
    assert figure.axes[0].get_title(loc="left") == "Median error 5.0%, worst 10.0%"
    assert [text.get_text() for text in figure.axes[0].texts] == ["+10.0%", "-5.0%", "+0.0%"]
    assert "b 20 s, predicted 19 s (-5.0%)" in figure.alt_text
    for rows in ({}, {"a": (0.0, 1.0)}):
        with pytest.raises(ValueError, match="rows"):
            show.published(rows)
