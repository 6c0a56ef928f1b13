"""Tasks of a bare srun divide the cores of their node."""

import os
import subprocess
import sys

import pytest

PRINTS = "from course_pp.parallel.placement import share_cores; s = share_cores(); print(s.pinned, s.threads, s.cores)"


@pytest.mark.timeout(90)
def test_two_tasks_of_one_node_run_on_different_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    usable = len(os.sched_getaffinity(0))
    if usable < 2:
        pytest.skip("needs two cores")
    srun = ["srun", "-N", "1", "-n", "2", sys.executable, "-c", PRINTS]
    done = subprocess.run(srun, capture_output=True, text=True, check=True)
    first, second = sorted(done.stdout.splitlines())
    assert first.startswith(f"True {usable // 2} (")
    assert second.startswith(f"True {usable // 2} (")
    assert first != second
