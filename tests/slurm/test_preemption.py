"""A run that Slurm interrupts goes on as if nothing had been."""

import json
from pathlib import Path

import pytest

from tests.slurm.running import TINY, Batch, clone_into, run, submit, wait_until

STEPS = 100
ARGUMENTS = TINY.replace("--steps=4", f"--steps={STEPS}")
ONE_RANK_A_NODE = "--ntasks-per-node=1"


def records(folder: Path) -> list[dict[str, float]]:
    """Every step that the run in ``folder`` has done, without what a clock says about it."""
    path = folder / "logs" / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [{k: r[k] for k in ("step", "loss", "grad_norm", "lr")} for r in lines if r["event"] == "train"]


def start(folder: Path) -> Batch:
    kept = "--checkpoint-dir checkpoints --save-every 10 --keep-last 2 --log-folder logs"
    return submit("preempted.sbatch", clone_into(folder), f"{kept} {ARGUMENTS}", ONE_RANK_A_NODE)


@pytest.mark.timeout(300)  # it waits for Slurm to start a job three times
def test_a_preempted_run_saves_is_requeued_and_ends_bit_identical_to_an_uninterrupted_one(tmp_path: Path):
    undisturbed, job = start(tmp_path / "undisturbed"), start(tmp_path / "interrupted")
    wait_until(lambda: len(records(job.folder)) >= 20, "the run is under way")
    run(f"scancel --signal=USR1 {job.id}")
    wait_until(lambda: job.restarts == 1 and "resumed" in job.output, "the run is resumed")
    stopped = len(records(job.folder))
    wait_until(lambda: len(records(job.folder)) > stopped, "the resumed run trains")
    run(f"scontrol requeue {job.id}")
    assert job.wait() == "COMPLETED", job.output
    assert undisturbed.wait() == "COMPLETED", undisturbed.output

    assert job.restarts == 2
    assert job.output.count("SIGUSR1: saved in checkpoints after step") == 1
    assert job.output.count("resumed checkpoints/") == 2
    assert len(records(job.folder)) == STEPS
    assert records(job.folder) == records(undisturbed.folder)
    last = f"checkpoints/step_{STEPS:08d}"
    diff = run(f"python -m course_pp checkpoint diff undisturbed/{last} interrupted/{last}", tmp_path)
    assert diff.stdout == "no difference\n", diff.stdout + diff.stderr
