"""The planned pipeline is the one that real ranks run on an emulated cluster."""

import random

import pytest

from course_pp.plan import Cluster, Gpu, Layout, ModelConfig, predict
from course_pp.runtime import EmulatedCluster
from course_pp.schedule import Costs, Schedule
from tests.runtime.test_emulation import run

SLOW = Gpu("slow", 2.5e8, 1e9, 4e8, 1e9)
ORDERS = ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "dualpipe_v"]


def random_plan(seed: int):
    """A small run with actions of milliseconds, on nodes of one rank with a slow link."""
    draw = random.Random(seed)
    pp, name = draw.choice([2, 3, 4]), ORDERS[seed % len(ORDERS)]
    model = ModelConfig(32, 4 * pp + draw.randrange(3), 4, 64 * draw.randint(1, 4), max_seq_len=64)
    link = Cluster(
        pp, 1, SLOW, inter_bandwidth=draw.uniform(5e6, 5e7), latency=draw.uniform(0, 2e-3)
    )
    return predict(
        model, Layout(pp, schedule=name, precision="float32"), link, pp * draw.randint(2, 3), 32
    )


# that emulated ranks keep to given costs, tests/runtime/test_emulation.py shows by default
@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_step_of_an_emulated_cluster_is_the_planned_one() -> None:
    for seed in range(40):
        planned = random_plan(seed)
        schedule: Schedule = planned.layout.order(
            planned.layout.n_microbatches(planned.global_batch)
        )
        # The emulated stage is another, tiny module: it is given the times of the planned one.
        costs = planned.costs
        assert isinstance(costs, Costs)
        found = run(schedule, EmulatedCluster(costs), steps=1)
        lost = sum(each.seconds for each in found.overruns)
        assert float(found.makespan) == pytest.approx(
            float(planned.timeline.makespan), rel=0.01, abs=lost
        )
