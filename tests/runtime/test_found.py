"""What a search found is a schedule like any other: real ranks run it, with the gradients of one process."""

import pytest
from torch import Tensor

from course_pp.launch import on_ranks
from course_pp.schedule import Costs, Schedule, from_torch_csv, optima, search, to_torch_csv
from tests.equality import GRADIENT_TOLERANCE
from tests.runtime.test_random_schedules import STEPS, in_a_pipeline, in_one_process

Results = list[tuple[list[float], dict[str, Tensor]]]


def run_all(rank: int, schedules: list[Schedule]) -> Results:
    return [in_a_pipeline(rank, schedule, None, "gloo") for schedule in schedules]


@pytest.mark.long
def test_found_and_tabled_orders_run_with_the_loss_and_gradients_of_one_process() -> None:
    row = next(r for r in optima() if r.split and (r.n_ranks, r.n_microbatches, r.cap) == (4, 8, 3))
    unequal = Costs((1, 2, 1, 1, 1, 3, 1, 1), 1, (2, 1, 1, 1, 1, 1, 1, 1), latency=0.5)
    found = search(4, 5, unequal, 6, n_chunks=2, placement="v", seconds=1)
    schedules = [row.schedule, found.schedule]
    ranks = on_ranks(4, run_all, schedules, timeout_s=60)
    for i, schedule in enumerate(schedules):
        assert from_torch_csv(to_torch_csv(schedule), name=schedule.name) == schedule
        loss, expected = in_one_process(schedule)
        seen: set[str] = set()
        for results in ranks:
            losses, gradients = results[i]
            assert losses == pytest.approx([loss] * STEPS, rel=GRADIENT_TOLERANCE)
            for name, grad in gradients.items():
                assert (grad - expected[name]).abs().max() <= GRADIENT_TOLERANCE
            seen |= gradients.keys()
        assert seen == expected.keys()
