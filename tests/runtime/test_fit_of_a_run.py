"""What was planted in a cluster is found again in what its ranks measured."""

from dataclasses import replace

import pytest

from course_pp.runtime import EmulatedCluster, EmulatedLink
from course_pp.schedule import Costs, build, fit
from tests.runtime.test_emulation import M, run

pytestmark = pytest.mark.timeout(60)

USUAL, SLOW = EmulatedLink(latency=0.0005), EmulatedLink(latency=0.02)
CLUSTER = EmulatedCluster(
    Costs(forward=0.02, input_grad=0.02, weight_grad=0.02),
    links=(SLOW, USUAL, USUAL),
    stragglers={2: 1.5},
    jitter=0.02,
)


@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
def test_a_straggler_and_a_slow_link_are_found_in_a_run_of_real_ranks(name: str) -> None:
    schedule = build(name, 4, M)
    found = fit(run(schedule, CLUSTER))

    def makespan(straggler: bool, slow_link: bool) -> float:
        links = (SLOW if slow_link else USUAL, USUAL, USUAL)
        stragglers = CLUSTER.stragglers if straggler else {}
        return float(replace(CLUSTER, links=links, stragglers=stragglers).predict(schedule).makespan)

    neither, straggler, link, both = (makespan(*each) for each in ((0, 0), (1, 0), (0, 1), (1, 1)))
    due_to_straggler = (straggler - neither + both - link) / 2
    due_to_link = (link - neither + both - straggler) / 2
    misplaced = abs(found.lost_to("straggler").time - due_to_straggler)
    misplaced += abs(found.lost_to("transfer").per_link[0, 1] - due_to_link)
    assert misplaced <= 0.1 * (both - neither)
    assert "Rank 2 is a straggler" in " ".join(found.findings[:2])
    assert "link 0–1" in " ".join(found.findings[:2])
    assert found.links == pytest.approx({(0, 1): 0.02, (1, 2): 0.0005, (2, 3): 0.0005}, abs=1e-4)
    assert found.slowdown == pytest.approx([1, 1, 1.5, 1], rel=0.05)
