"""What is predicted of memory, against the allocator of the GPU."""

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from course_pp.runtime import Pipeline, Recorder
from course_pp.schedule import build, simulate

ROWS, WIDTH = 2048, 256


def peak_bytes(n_microbatches: int, schedule: str) -> tuple[int, int]:
    """Return the peaks of a step beyond the bytes before it: the allocator's and the recorder's."""
    torch.manual_seed(0)
    stage = nn.Sequential(
        *(part for _ in range(8) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    ).cuda()
    recorder = Recorder(memory=True)
    pipeline = Pipeline(build(schedule, 1, n_microbatches), stage, mse_loss, recorder=recorder)
    x = torch.randn(n_microbatches * ROWS, WIDTH, device="cuda")
    pipeline.step(x, target=x)  # gradients and workspaces are there now
    torch.cuda.synchronize()
    recorder.clear()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    pipeline.step(x, target=x)
    torch.cuda.synchronize()
    [memory] = recorder.memory()
    return torch.cuda.max_memory_allocated() - before, memory.peaks["activation"]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_each_microbatch_in_flight_costs_what_is_predicted(schedule: str) -> None:
    """Two numbers of microbatches are compared, so that bytes of any schedule cancel out."""
    (few, counted), (many, _) = peak_bytes(4, schedule), peak_bytes(8, schedule)
    in_flight = [simulate(build(schedule, 1, n)).peak_memory()[0] for n in (4, 8)]
    each = counted / in_flight[0]
    assert many - few == pytest.approx(
        (in_flight[1] - in_flight[0]) * each, rel=0.05, abs=0.05 * each
    )
