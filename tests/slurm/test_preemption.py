"""A run that Slurm interrupts goes on as if nothing had been."""

import json
import os
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from tests.slurm.running import TINY, Batch, clone_into, run, run_by_hand, submit, wait_until

STEPS = 100
ARGUMENTS = TINY.replace("--steps=4", f"--steps={STEPS}")
ONE_RANK_A_NODE = "--ntasks-per-node=1"


def records(folder: Path) -> list[dict[str, float]]:
    """Every step that the run in ``folder`` has done, without what a clock says about it."""
    path = folder / "logs" / "metrics.jsonl"
    if not path.exists():
        return []
    found = []
    for line in path.read_text().splitlines():
        record = json.loads(line)
        if record["event"] == "train":
            found.append({key: record[key] for key in ("step", "loss", "grad_norm", "lr")})
    return found


def start(folder: Path, arguments: str = ARGUMENTS) -> Batch:
    kept = "--checkpoint-dir checkpoints --save-every 10 --keep-last 2 --log-folder logs"
    return submit("preempted.sbatch", clone_into(folder), f"{kept} {arguments}", ONE_RANK_A_NODE)


@pytest.mark.timeout(600)  # it waits for Slurm to start a job three times
def test_a_preempted_run_saves_is_requeued_and_ends_bit_identical_to_an_uninterrupted_one(
    tmp_path: Path,
):
    undisturbed = start(tmp_path / "undisturbed")
    job = start(tmp_path / "interrupted")
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
    diff = run(
        f"python -m course_pp checkpoint diff undisturbed/{last} interrupted/{last}", tmp_path
    )
    assert diff.stdout == "no difference\n", diff.stdout + diff.stderr


@pytest.mark.parametrize(
    ("code", "again"), [(75, True), (138, True), (143, True), (0, False), (1, False), (137, False)]
)
def test_only_a_run_that_was_asked_to_end_is_requeued(tmp_path: Path, code: int, again: bool):
    programs = {"srun": f"exit {code}", "scontrol": 'echo "$*"'}
    variables = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "preempted", "SLURM_JOB_NUM_NODES": "2"}
    done = run_by_hand("preempted.sbatch", clone_into(tmp_path), programs, variables)
    assert (done.returncode, done.stdout) == (code, "requeue 7\n" if again else ""), done.stderr


def test_a_run_preempted_before_it_listens_is_requeued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The stand-in dies of the signal at the job's first start, as Python does while it imports."""
    stand_in = tmp_path / "python"
    stand_in.write_text(
        "#!/bin/sh\nif mkdir started-$SLURM_PROCID 2> /dev/null; then kill -s $SIGNAL $$; fi\n"
    )
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    jobs = []
    for name in ("USR1", "TERM"):
        monkeypatch.setenv("SIGNAL", name)
        jobs.append(submit("preempted.sbatch", clone_into(tmp_path / name), "", ONE_RANK_A_NODE))
    assert [(job.wait(), job.restarts) for job in jobs] == [("COMPLETED", 1)] * 2, [
        job.output for job in jobs
    ]


@pytest.mark.full  # Slurm looks at time limits twice a minute
@pytest.mark.timeout(600)
def test_slurm_itself_signals_the_ranks_before_the_time_limit(tmp_path: Path):
    job = start(tmp_path, ARGUMENTS.replace(f"--steps={STEPS}", "--steps=1000000"))
    wait_until(lambda: len(records(job.folder)) >= 1, "the run is under way")
    end = datetime.now() + timedelta(seconds=115)
    run(f"scontrol update JobId={job.id} EndTime={end:%Y-%m-%dT%H:%M:%S}")
    wait_until(lambda: job.restarts == 1 and "resumed" in job.output, "the run is resumed")
    run(f"scancel {job.id}")
    assert job.output.count("SIGUSR1: saved in checkpoints after step") == 1
