from dataclasses import replace

import pytest
from matplotlib.colors import to_rgba
from matplotlib.patches import PathPatch

from course_pp import show
from course_pp.schedule import Span, Timeline, build, simulate
from course_pp.show import chart
from course_pp.show.timelines import Labels
from tests.schedule.layouts import gpipe
from tests.show.layout import flaws
from tests.show.reading import texts, title


def measured(tl: Timeline, seconds: float) -> Timeline:
    """The same timeline, as if ranks had run it and a unit of cost had taken so many seconds."""
    spans = tuple(
        Span(s.rank, s.action, float(s.start) * seconds, float(s.end) * seconds) for s in tl.spans
    )
    return Timeline(tl.n_ranks, spans, unit="s", measured=True)


def test_the_title_says_how_much_longer_and_both_bubbles() -> None:
    figure = show.compare(gpipe(4, 8), replace(gpipe(4, 8, latency=1), measured=True))
    assert title(figure).startswith("Measured")
    for words in ("18.2 % longer", "38.5 %", "27.3 %"):
        assert words in title(figure)
    assert {"predicted 33.0", "measured 39.0"} <= set(texts(figure))


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (gpipe(4, 8), simulate(build("1f1b", 4, 8)), "is as long as first: bubble 27.3 % for both"),
        (gpipe(1, 1), gpipe(1, 3), "is 3 times as long as first: bubble 0 % for both"),
        (
            gpipe(4, 8),
            simulate(build("zb_h1", 4, 8)),
            "is 18.2 % shorter than first: bubble 11.1 % instead of 27.3 %",
        ),
    ],
)
def test_the_title_gives_a_bubble_that_both_have_once(
    first: Timeline, second: Timeline, words: str
) -> None:
    assert title(show.compare(first, second, names=("first", "second"))) == f"Second {words}"


def test_each_end_has_its_own_label_on_the_side_away_from_the_other() -> None:
    axes = show.compare(gpipe(4, 8), gpipe(4, 8, latency=1), names=("before", "after")).axes[0]
    ends = {text.get_text(): (text.xy[0], text.get_ha()) for text in axes.texts if text.xy[1] == 1}
    assert ends == {"before 33.0": (33, "right"), "after 39.0": (39, "left"), "": (1, "left")}


@pytest.mark.parametrize(
    "names", [("1f1b", "zb_h1"), ("sums inside", "sums across"), ("1f1b, 4 held", "found, 3 held")]
)
def test_names_stand_beside_their_rank_and_not_over_it(names: tuple[str, str]) -> None:
    figure = show.compare(gpipe(4, 8), simulate(build("zb_h1", 4, 8)), names=names)
    assert flaws(figure) == []
    axes = figure.axes[0]
    ends = []
    for artist in axes.findobj(Labels):
        for text, size, x, y in artist.placed:
            if text.startswith("rank"):
                middle, _ = axes.transData.transform((x, y))
                ends.append(middle + chart.text_width(text, size) * figure.dpi / 144)
    starts = [text.get_window_extent().x0 for text in axes.texts if text.get_text() in names]
    assert len(ends) == 4
    assert max(ends) < min(starts)


def test_no_end_runs_through_a_label() -> None:
    axes = show.compare(simulate(build("1f1b", 4, 8)), simulate(build("zb_h1", 4, 8))).axes[0]
    vermilion = to_rgba(chart.VERMILION)
    boxes = [path for path in axes.findobj(PathPatch) if path.get_facecolor() == vermilion]
    ends = [line for line in axes.get_lines() if len(set(line.get_xdata())) == 1]
    assert len(ends) == 2
    assert max(line.get_zorder() for line in ends) < min(box.get_zorder() for box in boxes)


def test_seconds_are_matched_to_relative_costs_by_the_time_the_ranks_are_busy() -> None:
    figure = show.compare(gpipe(4, 8), measured(gpipe(4, 8, latency=1), 0.01))
    assert figure.axes[0].get_xlabel() == "time (ms; one unit of cost is 10 ms)"
    assert figure.axes[0].get_xlim() == pytest.approx((0, 390))
    assert "predicted 330 ms and measured 390 ms" in figure.alt_text


def test_the_rank_whose_end_differs_most_is_named() -> None:
    slow = gpipe(4, 8, latency=0.5)
    assert {"ends +3", "ends +1.5"} <= set(texts(show.compare(gpipe(4, 8), slow)))
    assert "The end of rank 0 differs most, by +3." in show.compare(gpipe(4, 8), slow).alt_text
    assert "Every rank finishes at the same time in both." in show.compare(slow, slow).alt_text
