import re

import pytest
from matplotlib.patches import FancyArrowPatch

from course_pp import show
from course_pp.schedule import Action, Costs, build, names, simulate
from course_pp.show.chart import ChartFigure
from tests.schedule.layouts import gpipe, naive
from tests.show.reading import labels, title


def arrows(figure: ChartFigure) -> list[bool]:
    """For each arrow whether it is solid."""
    found = [each for each in figure.axes[0].patches if isinstance(each, FancyArrowPatch)]
    return [arrow.get_linestyle() == "-" for arrow in found]


def test_the_chain_leads_back_to_the_first_forward() -> None:
    figure = show.dependencies(naive(3), "0B0")
    for words in ("0B0 starts at 7.0", "5 actions", "gradient of microbatch 0 from stage 1"):
        assert words in title(figure)
    assert "The chain: 0F0 → 1F0 → 2F0 → 2B0 → 1B0 → 0B0." in figure.alt_text
    assert "also needs the activation of microbatch 0 from stage 0" in figure.alt_text
    assert sorted(text for text, *_ in labels(figure)) == ["B0", "B0", "B0", "F0", "F0", "F0"]
    assert sorted(arrows(figure)) == [False, True, True, True, True]


def test_the_input_that_was_ready_before_is_lit_and_labelled() -> None:
    written = [text for text, *_ in labels(show.dependencies(simulate(build("1f1b", 4, 8)), "0B3"))]
    assert written.count("F3") == 4  # on rank 0, where the dashed arrow begins, too


@pytest.mark.parametrize(
    ("n_ranks", "action"), [(1, "0B7"), (2, "0B3"), (2, "1B3"), (8, "0B3"), (8, "3B3")]
)
def test_no_arrow_leaves_the_frame(n_ranks: int, action: str) -> None:
    figure = show.dependencies(simulate(build("gpipe", n_ranks, 8)), action)
    figure.draw_without_rendering()
    frame = figure.axes[0].get_window_extent()
    for arrow in figure.axes[0].patches:
        if type(arrow).__name__ == "FancyArrowPatch":
            arc = arrow.get_path().get_extents(arrow.get_transform())
            assert frame.y0 <= arc.y0
            assert arc.y1 <= frame.y1


@pytest.mark.parametrize(("action", "cause"), [("1F1", "1F0"), ("0B1", "0B0")])
def test_each_message_takes_the_time_of_its_own_boundary(action: str, cause: str) -> None:
    # Over the slow boundary the message would arrive after the rank was free, and be the cause
    # instead.
    costs = Costs(forward=(1, 3, 1), input_grad=(2, 1, 1), latency=(1, 4))
    tl = simulate(build("gpipe", 3, 2), costs)
    assert f" → {cause} → {action}." in show.dependencies(tl, action).alt_text


def test_a_busy_rank_is_a_cause_too() -> None:
    figure = show.dependencies(gpipe(2, 3), Action(0, "F", 2))
    assert "2 actions" in title(figure)
    assert "rank 0, busy with 0F1" in title(figure)


def test_the_first_action_waits_for_nothing() -> None:
    assert title(show.dependencies(gpipe(2, 3), "0F0")) == "0F0 waits for nothing and starts at 0.0"


def test_a_message_on_its_way_keeps_waiting_longer_than_a_rank_that_is_free_sooner() -> None:
    tl = simulate(build("gpipe", 2, 2), Costs(forward=(1, 0.9), latency=0.25))
    assert "The chain: 0F0 → 0F1 → 1F1." in show.dependencies(tl, "1F1").alt_text


def test_of_two_causes_at_one_time_the_one_from_another_rank_is_told() -> None:
    tl = simulate(build("gpipe", 2, 2))
    assert "The chain: 0F0 → 0F1 → 1F1." in show.dependencies(tl, "1F1").alt_text


@pytest.mark.parametrize("name", names())
def test_every_action_of_every_schedule_has_a_chain_without_a_hole(name: str) -> None:
    tl = simulate(build(name, 2, 4), Costs(latency=0.5))
    for rank, row in enumerate(tl.by_rank):
        figure = show.dependencies(tl, row[-1].action)
        assert re.search("The chain: 0F[01] → ", figure.alt_text)
        assert rank == row[-1].rank


def test_one_action_of_an_overlapped_pair_stands_for_the_pair() -> None:
    tl = simulate(build("dualpipe_v", 2, 4))
    pair = next(span.action for span in tl.spans if len(span.action.parts) == 2)
    by_part = show.dependencies(tl, pair.parts[0])
    by_text = show.dependencies(tl, str(pair))
    assert by_part.alt_text == by_text.alt_text
