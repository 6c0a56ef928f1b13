"""A class with too few cores: five notebooks stay open, and 16 cores hold four of their jobs."""

import getpass
import os
import re
import subprocess
import time
from datetime import datetime
from pathlib import Path

import pytest
from jupyter_client.manager import start_new_kernel

from course_pp.launch import on_ranks
from tests.launch.test_many_kernels import printed
from tests.slurm.cluster import Cluster
from tests.slurm.running import ROOT, wait_until

PEOPLE, CORES = 5, 4
LIMIT_S = 240
CELL = f"""
import os
from course_pp.launch import on_ranks

print("ran in", on_ranks({CORES}, lambda rank: os.environ["SLURM_JOB_ID"], timeout_s={LIMIT_S})[0])
"""


@pytest.fixture(autouse=True)
def site(on_the_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An open notebook would hold its job for longer than the test may take."""
    monkeypatch.setenv("COURSE_PP_SITE", str(tmp_path / "site.toml"))
    (tmp_path / "site.toml").write_text(f'folder = "{tmp_path / "shared"}"\nkeep_s = 3600\n')


@pytest.mark.full
def test_idle_notebooks_give_their_cores_to_those_that_wait_and_lose_nothing(
    cluster: Cluster, tmp_path: Path
) -> None:
    started = []
    try:
        for person in range(PEOPLE):
            env = {**os.environ, "COURSE_PP_PROGRESS": str(tmp_path / f"{person}.json")}
            started.append(start_new_kernel(startup_timeout=LIMIT_S, env=env))
        for _ in range(2):
            limit = time.monotonic() + LIMIT_S
            asked = [client.execute(CELL) for _, client in started]
            said = [
                printed(client, cell, limit)
                for (_, client), cell in zip(started, asked, strict=True)
            ]
            print("\n".join(said))
            ran_in = [re.search(r"ran in (\d+)", text) for text in said]
            jobs = [match[1] for match in ran_in if match]
            print("seconds waited:", [seconds_waited(job) for job in jobs])
            assert len(set(jobs)) == PEOPLE, said
        [kept, *_] = {job.id for job in cluster.jobs() if job.state == "RUNNING"} & set(jobs)
        started[jobs.index(kept)][0].restart_kernel()
        wait_until(
            lambda: kept not in {job.id for job in cluster.jobs()},
            "the job has gone with its kernel",
            30,
        )
    finally:
        for manager, client in started:
            client.stop_channels()
            manager.shutdown_kernel(now=False)


def seconds_waited(job: str) -> float:
    shown = subprocess.run(
        ["scontrol", "show", "job", job], check=True, capture_output=True, text=True
    ).stdout
    sent, began = (
        datetime.fromisoformat(re.findall(rf"{what}Time=(\S+)", shown)[0])
        for what in ("Submit", "\\bStart")
    )
    return (began - sent).total_seconds()


def test_the_guides_command_ends_the_jobs_of_the_course_and_no_others(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    [command] = set(re.findall(r"`(scancel [^`]+)`", (ROOT / "INSTRUCTOR.md").read_text()))
    [kept] = on_ranks(1, lambda rank: os.environ["SLURM_JOB_ID"])
    subprocess.run(["salloc", "--quiet", "--no-shell", "-N", "1"], check=True, timeout=60)
    jobs = {job.id for job in cluster.jobs()}
    monkeypatch.setenv("USER", getpass.getuser())
    subprocess.run(["bash", "-c", command], check=True, timeout=60)
    try:
        wait_until(
            lambda: {job.id for job in cluster.jobs()} == jobs - {kept},
            "only salloc's job is left",
            60,
        )
    finally:
        cluster.cancel_all()
