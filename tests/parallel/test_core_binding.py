"""The ranks of one node divide its cores, and keep a division that was made before."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from course_pp.launch import on_ranks
from course_pp.parallel import cores as cores_module
from course_pp.parallel.cores import CoreShare, cores_of, share_cores

linux = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="only Linux binds processes to cores"
)


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
    assert [cores_of(usable, rank, n_local, {}) for rank in range(n_local)] == parts


@pytest.fixture
def two_packages_of_two_cores(tmp_path: Path) -> Path:
    """Write Linux's description of eight hardware threads.

    It numbers the second threads of all cores after the first ones.
    """
    for number in range(8):
        topology = tmp_path / f"cpu{number}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{number % 4 // 2}\n")
        (topology / "core_id").write_text(f"{number % 2}\n")
    return tmp_path


@pytest.mark.parametrize(
    ("usable", "parts"),
    [
        (range(8), [(0, 1, 4, 5), (2, 3, 6, 7)]),
        (range(8), [(0, 4), (1, 5), (2, 6), (3, 7)]),
        (range(8), [(0,), (4,), (1,), (5,), (2,), (6,), (3,), (7,)]),
        (range(8), [(0, 4), (1, 5), (2, 6)]),
        ((1, 3, 5, 6), [(1, 5), (6,), (3,)]),
    ],
    ids=[
        "a package each",
        "a core each",
        "a thread each",
        "a core left over",
        "part of the machine",
    ],
)
def test_hardware_threads_of_a_core_stay_together(
    two_packages_of_two_cores: Path, usable: Sequence[int], parts: list[tuple[int, ...]]
) -> None:
    places = cores_module._places_of_cores(usable, two_packages_of_two_cores)
    assert [cores_of(usable, rank, len(parts), places) for rank in range(len(parts))] == parts


def test_a_system_that_does_not_tell_its_cores_apart_is_divided_by_their_numbers(
    tmp_path: Path,
) -> None:
    assert cores_module._places_of_cores(range(4), tmp_path) == {}


def bound_twice(
    rank: int, environ: dict[str, str], usable: set[int]
) -> tuple[CoreShare, CoreShare, set[int]]:
    del os.environ["OMP_NUM_THREADS"]
    os.environ.update(environ)
    os.sched_setaffinity(0, usable)
    return share_cores(), share_cores(), os.sched_getaffinity(0)


@linux
@pytest.mark.timeout(60)
def test_two_real_ranks_run_on_cores_of_their_own_and_a_second_call_changes_nothing() -> None:
    usable = os.sched_getaffinity(0)
    if len(usable) < 2:
        pytest.skip("needs two cores")
    (first, again, now), (other, _, _) = on_ranks(2, bound_twice, {}, usable, where="local")
    assert first == again
    assert set(first.cores) == now < usable
    assert first.pinned
    assert not now & set(other.cores)
    assert first.threads == other.threads == len(usable) // 2


@linux
@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("n_cores", "environ", "threads"),
    [
        (1, {}, 1),
        (None, {"OMP_NUM_THREADS": "3"}, 3),
    ],
    ids=["more ranks than cores", "the user has chosen"],
)
def test_threads_are_at_least_one_and_a_choice_wins(
    n_cores: int | None, environ: dict[str, str], threads: int
) -> None:
    usable = set(sorted(os.sched_getaffinity(0))[:n_cores])
    shares = [
        share
        for share, _, _ in on_ranks(2, bound_twice, environ, usable, threads=threads, where="local")
    ]
    assert {share.threads for share in shares} == {threads}


@linux
@pytest.mark.parametrize(
    ("n_cores", "bound"),
    [(4, True), (8, False)],
    ids=["a core of its own", "asked for, and not done"],
)
def test_a_task_keeps_the_cores_that_slurm_has_really_bound_it_to(
    n_cores: int, bound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("TORCHELASTIC_")]:
        monkeypatch.delenv(name)
    variables = {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
    }
    slurm = {"SLURM_PROCID": "1", "SLURM_CPU_BIND_TYPE": "mask_cpu:", "SLURM_CPUS_ON_NODE": "8"}
    for name, value in (variables | slurm).items():
        monkeypatch.setenv(name, value)
    asked: list[tuple[int, ...]] = []
    monkeypatch.setattr(cores_module, "_usable_cores", lambda: tuple(range(n_cores)))
    monkeypatch.setattr(
        cores_module, "_places_of_cores", lambda usable: {core: (0, core % 4) for core in usable}
    )
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: asked.append(cores))
    monkeypatch.delenv(cores_module._DONE, raising=False)
    share = share_cores()
    os.environ.pop(cores_module._DONE, None)
    assert (share.cores, share.pinned, asked) == (
        ((0, 1, 2, 3), False, []) if bound else ((2, 3, 6, 7), True, [(2, 3, 6, 7)])
    )


def test_a_rank_alone_on_its_node_keeps_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "OMP_NUM_THREADS",
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "SLURM_PROCID",
    ):
        monkeypatch.delenv(name, raising=False)
    before = torch.get_num_threads()
    try:
        for chosen in (1, 2):
            torch.set_num_threads(chosen)
            assert share_cores().threads == torch.get_num_threads() == chosen
    finally:
        torch.set_num_threads(before)
