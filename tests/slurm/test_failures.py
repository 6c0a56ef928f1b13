"""What goes wrong on a cluster ends in one clear message, with nothing left running or queued."""

import os
import re
import signal
from pathlib import Path

from tests.slurm.cluster import Cluster
from tests.slurm.running import ENDLESS, process_of_rank, submit, training, wait_until

TRAIN = "python source_code/train.py"


def test_a_rank_that_dies_ends_srun_which_names_it(cluster: Cluster):
    with training(f"srun -n 2 --kill-on-bad-exit=1 {TRAIN} --pp 2") as srun:
        os.kill(process_of_rank(0, cluster.step_processes()), signal.SIGKILL)
        said = srun.communicate(timeout=60)[1]
        assert srun.returncode != 0
    assert said.count("n1: task 0: Killed") == said.count("Killed") == 1


def test_a_rank_that_dies_under_torchrun_fails_the_batch_job_which_names_it(
    cluster: Cluster, clone: Path
):
    job = submit("one_node.sbatch", clone, ENDLESS)
    wait_until(lambda: "step 1/" in job.output, "the job has trained a step")
    os.kill(process_of_rank(0, cluster.step_processes()), signal.SIGKILL)
    assert job.wait() == "FAILED"
    assert re.search(r"exitcode\s*: -9", job.output)
