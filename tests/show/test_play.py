"""What a timeline that moves is told to show; how it moves is tested in a browser."""

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from course_pp import show
from course_pp.schedule import Costs, build, simulate
from tests.schedule.layouts import naive


def told(player: show.Player) -> dict[str, Any]:
    """What the script of a player is given."""
    match = re.search(r'\("cpp-[0-9a-f]+", (\{.*\})\);</script>$', player.html(), re.DOTALL)
    assert match is not None
    return json.loads(match[1].replace("<\\/", "</"))


@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "zb_v", "dualpipe_v", "pipedream"])
def test_what_a_rank_holds_peaks_where_the_timeline_says(name: str) -> None:
    tl = simulate(build(name, 4, 8), Costs(latency=0.5))
    data = told(show.play(tl))
    for rank, peak in enumerate(tl.peak_activations):
        mine = [each for each in data["held"] if each["rank"] == rank]
        most = 0
        for now in mine:
            most = max(most, sum(a["start"] <= now["start"] < a["end"] for a in mine))
        assert most == peak


@pytest.mark.parametrize("name", ["1f1b", "zb_v"])
def test_every_message_leaves_when_it_is_made_and_is_there_before_it_is_taken(name: str) -> None:
    schedule = build(name, 4, 8)
    data = told(show.play(simulate(schedule, Costs(latency=0.5))))
    ends = {(span["rank"], span["end"]) for span in data["spans"]}
    starts = {(span["rank"], span["start"]) for span in data["spans"]}
    crossings = sum(a != b for a, b in pairwise(schedule.placement))
    assert len(data["messages"]) == 2 * 8 * crossings
    for message in data["messages"]:
        assert (message["from"], message["sent"]) in ends
        assert (message["to"], message["taken"]) in starts
        assert message["sent"] + 0.5 == pytest.approx(message["there"])
        assert message["there"] <= message["taken"]


def test_a_measured_timeline_plays_in_its_own_unit() -> None:
    data = told(show.play(naive(2, 0.02, 0.04, unit="s")))
    assert (data["unit"], data["scale"] * data["end"]) == ("ms", pytest.approx(120))
    assert [message["there"] == message["taken"] for message in data["messages"]] == [True, True]


def test_stages_are_named_where_a_rank_has_several() -> None:
    data = told(show.play(simulate(build("zb_v", 2, 4))))
    assert data["spans"][0]["parts"][0]["name"] == "0F0"
    assert "3·0" in {each["name"] for each in data["held"]}


def test_elsewhere_it_is_a_picture_with_alt_text_and_it_loads_nothing() -> None:
    player = show.play(simulate(build("1f1b", 4, 8)), title="</script><b>")
    data, metadata = player._repr_mimebundle_()
    assert metadata["image/png"]["alt"] == data["text/plain"] == player.figure.alt_text
    assert "4 ranks, 8 microbatches" in player.figure.alt_text
    assert data["text/html"].count("</script>") == 1
    assert not re.search(r'(src|href)="(?!data:)', data["text/html"])
    assert "http" not in data["text/html"].replace("http://www.w3.org/2000/svg", "")


def test_the_same_timeline_makes_the_same_output() -> None:
    tl = simulate(build("1f1b", 2, 4))
    assert show.play(tl).html() == show.play(tl).html()


def test_a_page_of_its_own_is_saved(tmp_path: Path) -> None:
    page = show.play(simulate(build("1f1b", 2, 4))).save(tmp_path / "moves.html")
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
