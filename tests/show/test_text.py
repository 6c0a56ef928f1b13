import re

import pytest

from course_pp.schedule import Action, Costs, Span, Timeline, build, names, simulate
from course_pp.show import timeline_text
from tests.grids import folded
from tests.schedule.layouts import gpipe, naive


def rows(chart: str) -> list[str]:
    """The rows of the ranks, without their names, blocks joined."""
    found: dict[str, str] = {}
    for line in chart.splitlines():
        if match := re.match(r"rank +(\d+) +(.*)", line):
            found[match[1]] = found.get(match[1], "") + match[2]
    return list(found.values())


def test_a_small_timeline_reads_like_its_figure() -> None:
    assert timeline_text(naive(2), width=40).splitlines() == [
        "rank 0 F0─·········B0────",
        "rank 1 ···F0─B0────······",
        "       0              5",
    ]


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize(
    ("n_ranks", "n_microbatches"), [(1, 4), (2, 4), (4, 8), (8, 32), (16, 256)]
)
def test_no_line_is_longer_than_the_width(name: str, n_ranks: int, n_microbatches: int) -> None:
    if n_ranks == 1 and name in ("dualpipe_v", "dualpipe", "chimera"):
        n_ranks = 2
    chart = timeline_text(simulate(build(name, n_ranks, n_microbatches)))
    assert max(map(len, chart.splitlines())) <= 100
    assert len(chart.splitlines()) <= 50


@pytest.mark.parametrize("name", names())
@folded("width", [100, 91, 83])
def test_every_action_is_labelled_on_one_line_where_there_is_room(name: str, width: int) -> None:
    tl = simulate(build(name, 4, 8), Costs(update=1))
    lines = timeline_text(tl, width).splitlines()
    for rank, spans in enumerate(tl.by_rank):
        mine = [line for line in lines if line.startswith(f"rank {rank} ")]
        for span in spans:
            label = r"\+?\d?".join(f"{part.kind}{part.microbatch}" for part in span.action.parts)
            assert any(re.search(label, line) for line in mine)


def test_colours_change_no_character_but_the_filling() -> None:
    tl = gpipe(4, 8)
    coloured = timeline_text(tl, colour=True)
    assert "\x1b[" in coloured
    assert "\x1b[" not in timeline_text(tl)
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == timeline_text(tl).replace("─", " ")


def test_what_has_no_room_keeps_its_letter() -> None:
    chart = timeline_text(gpipe(4, 1024))
    *lines, hidden = chart.splitlines()
    assert len(lines) == 5
    assert re.fullmatch(r"\d+ boxes too short to show", hidden)
    assert set("".join(rows(chart))) <= set("FB·─")


def test_a_box_of_less_than_half_a_column_takes_an_idle_cell() -> None:
    spans = (Span(0, Action(0, "F", 0), 50, 50.01), Span(1, Action(1, "F", 0), 51, 100))
    first, second = rows(timeline_text(Timeline(2, spans), 100))
    assert first.count("F") == 1
    assert first.index("F") == second.index("F") - 1
    assert set(first) == {"F", "·"}


def test_boxes_without_an_idle_cell_are_counted() -> None:
    spans = tuple(Span(0, Action(0, "F", i), 50 + 0.01 * i, 50.01 + 0.01 * i) for i in range(3))
    rest = (Span(0, Action(0, "F", 3), 51, 100),)
    assert timeline_text(Timeline(1, spans + rest)).endswith("\n2 boxes too short to show")
    assert timeline_text(Timeline(1, spans[:2] + rest)).endswith("\n1 box too short to show")
    assert "too short" not in timeline_text(Timeline(1, spans[:1] + rest))


def test_a_measured_timeline_has_its_unit_on_the_ruler() -> None:
    assert timeline_text(naive(2, 0.01, 0.02, "s")).endswith(" ms")


def test_an_empty_timeline_is_idle() -> None:
    assert rows(timeline_text(Timeline(2, ()))) == ["·", "·"]
