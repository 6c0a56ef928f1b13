"""A real Slurm for every test in this folder, and the question after each: is anything left?"""

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from course_pp.launch.on_slurm import TASKS
from tests.optional import lacking
from tests.slurm.cluster import INSTALL, Cluster, missing_programs, temporary_cluster
from tests.slurm.running import clone_into

_LEFT_LIMIT_S = 20
# For a slow machine that runs other tests beside them.
_TEST_LIMIT_S = 300


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give a test of this folder that says nothing else more time than tests have elsewhere."""
    for item in items:
        if (
            Path(__file__).parent in item.path.parents
            and item.get_closest_marker("timeout") is None
        ):
            item.add_marker(pytest.mark.timeout(_TEST_LIMIT_S))


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Two nodes with four GPUs each; skips, and says what would enable it, where Slurm is not
    installed.

    Every worker of pytest-xdist has its own: most of the tests' time is waiting for Slurm.
    """
    if missing := missing_programs():
        lacking(
            "slurm", f"there is no {', '.join(missing)} here: {INSTALL} enables the Slurm tests"
        )
    # Ports are made of job ids: clusters side by side start at other hundreds.
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    hundreds = 10 * random.SystemRandom().randrange(1, 1000) + worker % 10
    with temporary_cluster(nodes=2, gpus=4, first_job_id=100 * hundreds) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def on_the_cluster(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Point the test at the cluster, from outside any job; fail it if a job or process is left."""
    for name in list(os.environ):
        if name.startswith("SLURM_"):
            monkeypatch.delenv(name)
    for name, value in cluster.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("COURSE_PP_WHERE")
    yield
    TASKS.stop()
    if left := cluster.wait_until_empty(_LEFT_LIMIT_S):
        cluster.cancel_all()
        pytest.fail(f"left behind: {left}", pytrace=False)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder that looks like a clone of the repository."""
    return clone_into(tmp_path)
