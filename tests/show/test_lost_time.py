import dataclasses
from functools import cache

import pytest
from matplotlib.colors import to_hex

from course_pp import show
from course_pp.schedule import Costs, Fit, build, fit, simulate
from course_pp.show.chart import ChartFigure
from tests.schedule.planted import Planted
from tests.show.reading import notes, texts, title

PLANTED = Planted(
    build("1f1b", 4, 8),
    slowdown={2: 1.5},
    links={(0, 1): 0.03},
    jitter=0.0,
    launch=0.0,
    usual_transfer=0.0,
)


@cache
def found() -> Fit:
    return fit(PLANTED.measured())


def bars(figure: ChartFigure) -> dict[tuple[int, str, str], float]:
    """Length of each bar by rank, colour and hatch, without those of no length."""
    lengths = {}
    for bar in figure.axes[0].patches:
        rank = round(bar.get_y() + bar.get_height() / 2)
        if abs(bar.get_width()) > 1e-6:
            lengths[rank, to_hex(bar.get_facecolor()), bar.get_hatch()] = bar.get_width()
    return lengths


def test_the_title_blames_the_straggler_and_the_slow_link() -> None:
    heading = title(show.lost_time(found()))
    assert "16.1 % of the makespan to straggling rank 2" in heading
    assert "12.9 % to link 0–1" in heading


def test_each_rank_has_a_bar_as_long_as_what_is_lost_on_it() -> None:
    figure = show.lost_time(found())
    drawn = [0.0] * 4
    for (rank, *_), width in bars(figure).items():
        drawn[rank] += width
    lost = [sum(times) for times in zip(*(loss.per_rank for loss in found().lost), strict=True)]
    assert drawn == pytest.approx([1000 * time for time in lost])
    assert figure.axes[0].get_xlabel() == "makespan lost on the rank (ms)"
    assert notes(figure) == ["60 ms", "60 ms", "150 ms", "0 ms"]


def test_causes_differ_in_hatch_too_and_are_named_where_there_is_room() -> None:
    figure = show.lost_time(found())
    hatches = {patch.get_hatch() or "" for patch in figure.axes[0].get_legend().get_patches()}
    assert len(hatches) == 5
    assert texts(figure).count("transfer") == 2
    assert texts(figure).count("straggler") == 1


def test_what_shortens_the_run_goes_to_the_left() -> None:
    costs = Costs(forward=[0.02, 0.01, 0.02, 0.04])
    ran = dataclasses.replace(PLANTED, costs=costs, slowdown={}).measured()
    figure = show.lost_time(fit(ran, costs))
    assert min(bars(figure).values()) < 0 < max(bars(figure).values())
    assert figure.axes[0].get_xlim()[0] < 0


def test_the_alt_text_has_every_cause_and_the_worst_rank() -> None:
    figure = show.lost_time(found())
    told = ("270 ms of 930 ms", "straggler 150 ms", "transfer 120 ms", "imbalance 0 ms")
    for words in (*told, "launch 0 ms", "rest 0 ms", "rank 2, 150 ms", title(figure)):
        assert words in figure.alt_text
    assert figure.alt_text.startswith("1f1b: ")


def test_equal_links_are_not_blamed_one_by_one() -> None:
    figure = show.lost_time(fit(simulate(build("gpipe", 8, 8), Costs(latency=0.5))))
    assert title(figure).endswith("to transfers")
    assert figure.axes[0].get_xlabel().endswith("(relative cost)")


def test_a_link_with_most_of_the_time_does_not_get_all_of_it() -> None:
    costs = Costs(latency=[float(rank in (2, 5)) for rank in range(7)])
    figure = show.lost_time(fit(simulate(build("zb_h1", 8, 8), costs)))
    assert "transfers (most on link 5–6)" in title(figure)
