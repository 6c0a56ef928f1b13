import json
from typing import Any

import pytest

from course_pp.schedule import Costs, Timeline, build, names, simulate
from course_pp.show import to_trace
from tests.schedule.layouts import gpipe, naive


def events(tl: Timeline, *phases: str) -> list[dict[str, Any]]:
    return [event for event in json.loads(to_trace(tl))["traceEvents"] if event["ph"] in phases]


def test_every_rank_is_a_thread_in_order() -> None:
    named = []
    for event in events(gpipe(3, 2), "M"):
        if event["name"] == "thread_name":
            named.append(event["args"]["name"])
    assert named == ["rank 0", "rank 1", "rank 2"]


@pytest.mark.parametrize("name", names())
def test_slices_fill_every_thread_from_the_start_to_the_makespan(name: str) -> None:
    tl = simulate(build(name, 4, 8), Costs(latency=0.25))
    slices = sorted(events(tl, "X"), key=lambda event: (event["tid"], event["ts"]))
    assert sum(event["cat"] != "idle" for event in slices) == len(tl.spans)
    clocks = dict.fromkeys(range(1, 5), 0)
    for event in slices:
        if event["dur"]:
            assert event["ts"] == clocks[event["tid"]]
            clocks[event["tid"]] += event["dur"]
    assert set(clocks.values()) == {1000 * tl.makespan}


def test_a_gap_carries_its_cause() -> None:
    idle = [event for event in events(naive(2), "X") if event["name"] == "idle"]
    causes = [event["args"]["cause"] for event in idle]
    assert any("gradient of microbatch 0 from stage 1" in cause for cause in causes)


def test_there_is_an_arrow_for_each_message_between_ranks() -> None:
    arrows = events(gpipe(4, 8), "s", "f")
    assert len(arrows) == 2 * (2 * 3 * 8)
    for start, end in zip(arrows[::2], arrows[1::2], strict=True):
        assert (start["ph"], end["ph"], end["bp"]) == ("s", "f", "e")
        assert start["id"] == end["id"]
        assert start["ts"] < end["ts"]
        assert abs(start["tid"] - end["tid"]) == 1


def test_the_counter_of_a_rank_reaches_its_peak_and_returns_to_zero() -> None:
    held = [event["args"]["held"] for event in events(gpipe(4, 8), "C") if event["tid"] == 1]
    assert max(held) == 8
    assert held[-1] == 0


def test_a_second_stays_a_second() -> None:
    slices = events(naive(2, 0.25, 0.5, "s"), "X")
    assert max(event["ts"] + event["dur"] for event in slices) == 1_500_000


def test_an_empty_timeline_is_a_trace_of_idle_ranks() -> None:
    assert events(Timeline(2, ()), "X") == []
