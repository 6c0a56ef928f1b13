import pytest

from course_pp import show
from course_pp.schedule import Timeline, build, simulate
from course_pp.show.memory_curves import held_over_time
from tests.schedule.layouts import gpipe, naive
from tests.show.reading import texts, title


def test_the_curve_rises_with_each_forward_and_falls_with_each_backward() -> None:
    assert held_over_time(gpipe(1, 2).by_rank[0]) == [(0, 1), (1, 2), (4, 1), (6, 0)]


def test_one_released_and_the_next_taken_at_once_is_no_step() -> None:
    last = simulate(build("1f1b", 2, 3)).by_rank[1]
    assert held_over_time(last) == [(0, 0), (1, 1), (10, 0)]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "dualpipe_v"])
def test_the_highest_step_is_the_peak(name: str) -> None:
    tl = simulate(build(name, 4, 8))
    assert tuple(max(count for _, count in held_over_time(row)) for row in tl.by_rank) == tl.peak_activations


def test_the_peaks_are_in_the_title_the_margin_and_the_alt_text() -> None:
    figure = show.memory(simulate(build("1f1b", 4, 8)))
    assert title(figure) == "Peak activations held: 4, 3, 2 and 1 on ranks 0 to 3"
    assert texts(figure)[:4] == ["4", "3", "2", "1"]
    assert figure.alt_text.endswith("Rank 0 reaches 4 at time 3.")
    assert show.memory(naive(2, 0.01, 0.02, "s")).alt_text.endswith("Rank 0 reaches 1 at time 0 ms.")


@pytest.mark.parametrize("n_ranks", [1, 3, 64])
def test_empty_and_tall_timelines_are_drawn(n_ranks: int) -> None:
    assert show.memory(Timeline(n_ranks, ())).png()
    assert show.memory(gpipe(n_ranks, 1)).png()
