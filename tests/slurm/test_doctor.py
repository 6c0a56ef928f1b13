"""The doctor beside a real cluster: right when it answers, one line when its controller is gone."""

from pathlib import Path

import pytest

from course_pp.doctor import running
from tests.slurm.cluster import Cluster


def test_a_cluster_that_runs_two_tasks_is_right(cluster: Cluster) -> None:
    found = running.slurm()
    assert [finding.name for finding in found] == ["site.toml", "partition", "Slurm job"]
    assert all(finding.ok for finding in found), found
    assert found[2].says.startswith("2 tasks ran and saw ")
    assert not list(Path.cwd().glob(".course_pp_doctor_*"))


def test_a_controller_that_is_gone_is_one_line(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same cluster's settings with a port at which nobody listens."""
    lines = Path(cluster.environ["SLURM_CONF"]).read_text().splitlines()
    moved = [line if not line.startswith("SlurmctldPort=") else "SlurmctldPort=9" for line in lines]
    assert moved != lines
    (tmp_path / "slurm.conf").write_text("\n".join(moved) + "\n")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    _, finding = running.slurm()
    assert not finding.ok
    assert "the cluster" in finding.says
    assert "COURSE_PP_WHERE=local" in finding.remedy
