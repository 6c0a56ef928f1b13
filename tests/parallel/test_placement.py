"""The ranks of one node divide its cores, and leave alone what somebody else has divided."""

import os
import sys

import pytest

from course_pp.launch import on_ranks
from course_pp.parallel.placement import CoreShare, cores_of, share_cores

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux binds processes to cores")


@pytest.mark.parametrize(
    ("usable", "n_local", "parts"),
    [
        ((0, 1, 2, 3), 2, [(0, 1), (2, 3)]),
        ((4, 6, 8), 3, [(4,), (6,), (8,)]),
        ((0, 1, 2, 3, 4), 2, [(0, 1), (2, 3)]),
        ((0, 1), 4, [(0, 1)] * 4),
        ((7,), 1, [(7,)]),
    ],
    ids=["even", "as many as ranks", "one left over", "more ranks than cores", "one of one"],
)
def test_ranks_get_neighbouring_cores_or_share_all(
    usable: tuple[int, ...], n_local: int, parts: list[tuple[int, ...]]
) -> None:
    assert [cores_of(usable, rank, n_local) for rank in range(n_local)] == parts


def bound_twice(rank: int, environ: dict[str, str]) -> tuple[CoreShare, CoreShare, set[int]]:
    del os.environ["OMP_NUM_THREADS"]
    os.environ.update(environ)
    return share_cores(), share_cores(), os.sched_getaffinity(0)


@linux
@pytest.mark.timeout(60)
def test_two_real_ranks_run_on_cores_of_their_own_and_a_second_call_changes_nothing() -> None:
    usable = os.sched_getaffinity(0)
    if len(usable) < 2:
        pytest.skip("needs two cores")
    (first, again, now), (other, _, _) = on_ranks(2, bound_twice, {}, where="local")
    assert first == again
    assert set(first.cores) == now < usable
    assert first.pinned
    assert not now & set(other.cores)
    assert first.threads == other.threads == len(usable) // 2


@linux
@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("n", "environ", "threads"),
    [
        (4 * (os.cpu_count() or 1), {}, 1),
        (2, {"OMP_NUM_THREADS": "3"}, 3),
    ],
    ids=["more ranks than cores", "the user has chosen"],
)
def test_threads_are_at_least_one_and_a_choice_wins(n: int, environ: dict[str, str], threads: int) -> None:
    if n > 16:
        pytest.skip("too many ranks for a test")
    shares = [share for share, _, _ in on_ranks(n, bound_twice, environ, threads=threads, where="local")]
    assert {share.threads for share in shares} == {threads}


@linux
def test_a_task_that_slurm_has_bound_keeps_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("TORCHELASTIC_")]:
        monkeypatch.delenv(name)
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_CPU_BIND_TYPE", "mask_cpu:")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = os.sched_getaffinity(0)
    assert set(share_cores().cores) == before == os.sched_getaffinity(0)
    assert not share_cores().pinned
