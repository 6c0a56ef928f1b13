"""A planned run in a picture says what the numbers say."""

import pytest

from course_pp import show
from course_pp.plan import Layout, cluster_of, model_named, predict


def planned(pp):
    return predict(model_named("gpt-145b"), Layout(pp, 8), cluster_of(f"{pp}x8xA100"), 64, 2048)


def test_the_largest_part_and_the_fullest_rank_are_named():
    found = planned(4)
    figure = show.plan(found)
    times, memory = figure.axes
    assert found.bound_by in times.get_title(loc="left")
    assert "the fullest rank, 0, does not fit" in figure.alt_text
    right_ends = [max(p.get_x() + p.get_width() for p in axes.patches) for axes in (times, memory)]
    assert right_ends[0] == pytest.approx(found.step_s)
    assert right_ends[1] == pytest.approx(max(found.total_memory) / 1e9)


def test_more_ranks_than_can_be_read_are_refused():
    found = predict(model_named("gpt-1t"), Layout(128, 8), cluster_of("128x8xA100"), 1, 64)
    with pytest.raises(ValueError, match="at most 64"):
        show.plan(found)
