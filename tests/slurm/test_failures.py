"""What goes wrong on a cluster ends in one clear message, with nothing left running or queued."""

import os
import re
import signal
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.running import ENDLESS, process_of_rank, run, sleeping, submit, training, wait_until

TRAIN = "python source_code/train.py"


def test_a_rank_that_dies_ends_srun_which_names_it(cluster: Cluster):
    with training(f"srun -n 2 --kill-on-bad-exit=1 {TRAIN} --pp 2") as srun:
        os.kill(process_of_rank(0, cluster.step_processes()), signal.SIGKILL)
        said = srun.communicate(timeout=60)[1]
        assert srun.returncode != 0
    assert said.count("n1: task 0: Killed") == said.count("Killed") == 1


def test_a_rank_that_dies_under_torchrun_fails_the_batch_job_which_names_it(cluster: Cluster, clone: Path):
    job = submit("one_node.sbatch", clone, ENDLESS)
    wait_until(lambda: "step 1/" in job.output, "the job has trained a step")
    os.kill(process_of_rank(0, cluster.step_processes()), signal.SIGKILL)
    assert job.wait() == "FAILED"
    assert re.search(r"exitcode\s*: -9", job.output)


def test_a_job_cancelled_from_outside_ends_srun_which_says_so(cluster: Cluster):
    with sleeping("srun -n 2") as srun:
        [job] = cluster.jobs()
        run(f"scancel {job.id}")
        said = srun.communicate(timeout=60)[1]
        assert srun.returncode != 0
    assert re.search(rf"STEP {job.id}.0 ON n1 CANCELLED", said)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ("srun -N 1 --gres=gpu:5 true", "Requested node configuration is not available"),
        ("srun -N 3 true", "Node count specification invalid|More .*nodes|not available"),
        ("srun -p cpu true", "invalid partition specified: cpu"),
        ("sbatch --gres=gpu:5 source_code/slurm/one_node.sbatch", "Requested node configuration is not available"),
    ],
    ids=["gpus", "nodes", "partition", "batch"],
)
def test_an_impossible_request_is_refused_at_once(cluster: Cluster, asked: str, reason: str):
    done = run(asked)  # what was queued would run into the limit
    assert done.returncode != 0
    assert re.search(reason, done.stderr), done.stderr
    assert cluster.jobs() == []
