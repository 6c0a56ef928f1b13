"""Tasks of a bare srun divide the cores of their node, and take the GPUs that Slurm shows them."""

import os
import subprocess
import sys

import pytest

# The cluster's GPUs are only names: a task sees as many as Slurm shows it.
PRINTS = """
import os
from unittest import mock
from course_pp.parallel import get_device
from course_pp.parallel.cores import share_cores
shown = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
with mock.patch("torch.cuda.device_count", return_value=len(shown)):
    gpu = shown[get_device("nccl").index]
share = share_cores()
print(gpu, share.pinned, share.threads, share.cores, sep="|")
"""


@pytest.mark.parametrize(
    "options",
    [
        "--gres=gpu:2",
        "--gpus-per-task=1 --cpu-bind=cores",  # a binding that no plugin of the cluster carries out
        pytest.param("--gpus=2 --ntasks-per-gpu=1", marks=pytest.mark.full),
        pytest.param("--gres=gpu:2 --gpu-bind=single:1", marks=pytest.mark.full),
    ],
)
def test_two_tasks_of_one_node_run_on_different_cores_and_gpus(
    options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    usable = len(os.sched_getaffinity(0))
    if usable < 2:
        pytest.skip("needs two cores")
    srun = ["srun", "-N", "1", "-n", "2", *options.split(), sys.executable, "-c", PRINTS]
    done = subprocess.run(srun, capture_output=True, text=True, check=True)
    gpus, pinned, threads, cores = zip(
        *(line.split("|") for line in done.stdout.splitlines()), strict=True
    )
    assert sorted(gpus) == ["0", "1"]
    assert pinned == ("True", "True")
    assert threads == (str(usable // 2),) * 2
    assert len(set(cores)) == 2
