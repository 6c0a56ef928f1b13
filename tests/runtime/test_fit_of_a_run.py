"""What was planted in a cluster is found again in what its ranks measured."""

import pytest

from course_pp.runtime import EmulatedCluster, EmulatedLink
from course_pp.schedule import Costs, build, fit
from tests.runtime.test_emulation import M, run

pytestmark = pytest.mark.timeout(120)


def cluster(unit: float, straggler: bool = True, slow_link: bool = True) -> EmulatedCluster:
    """Four ranks whose actions take ``unit`` seconds, the third half as long again, behind a first link of a unit."""
    usual = EmulatedLink(latency=unit / 40)
    return EmulatedCluster(
        Costs(forward=unit, input_grad=unit, weight_grad=unit),
        links=(EmulatedLink(latency=unit) if slow_link else usual, usual, usual),
        stragglers={2: 1.5} if straggler else {},
        jitter=0.02,
    )


@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
def test_a_straggler_and_a_slow_link_are_found_in_a_run_of_real_ranks(name: str) -> None:
    schedule = build(name, 4, M)
    for unit in (0.02, 0.06, 0.18):  # longer where the machine is too busy to keep the shorter
        timeline = run(schedule, cluster(unit))
        if not timeline.trouble:
            break
    assert not timeline.trouble
    found = fit(timeline)

    def makespan(straggler: bool, slow_link: bool) -> float:
        return float(cluster(unit, straggler, slow_link).predict(schedule).makespan)

    neither, straggler, link, both = (makespan(*each) for each in ((0, 0), (1, 0), (0, 1), (1, 1)))
    due_to_straggler = (straggler - neither + both - link) / 2
    due_to_link = (link - neither + both - straggler) / 2
    misplaced = abs(found.lost_to("straggler").time - due_to_straggler)
    misplaced += abs(found.lost_to("transfer").per_link[0, 1] - due_to_link)
    assert misplaced <= 0.1 * (both - neither)
    assert "Rank 2 is a straggler" in " ".join(found.findings[:2])
    assert "link 0–1" in " ".join(found.findings[:2])
    expected = {(0, 1): unit, (1, 2): unit / 40, (2, 3): unit / 40}
    assert found.links == pytest.approx(expected, abs=unit / 200)
    assert found.slowdown == pytest.approx([1, 1, 1.5, 1], rel=0.05)
