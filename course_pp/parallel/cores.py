"""The cores and threads of each rank, so that the ranks of a node do not fight over them."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch

from course_pp.parallel.world import get_world_info, is_task_of_srun

_TOPOLOGY = Path("/sys/devices/system/cpu")
# Which process has been bound to its cores: a second call finds only its part, and must not divide
# it again.
_DONE = "COURSE_PP_PINNED_PID"


@dataclass(frozen=True)
class CoreShare:
    """The cores and threads of a rank, and whether `share_cores` bound the rank to its cores."""

    cores: tuple[int, ...]
    pinned: bool
    threads: int


def share_cores() -> CoreShare:
    """Bind this rank to its part of the node's usable cores, and give it a thread for each.

    Call it before any work.

    Nothing is bound where a node has fewer cores than ranks, where Slurm has bound each task to
    cores of its own (its task/affinity plugin does), and on systems other than Linux. A rank alone
    on its node keeps the threads it has. OMP_NUM_THREADS wins where it is set; torchrun sets it to
    1 for more than one rank. Safe to call repeatedly.
    """
    _, local_rank, world_size = get_world_info()
    n_local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    usable, done = _usable_cores(), os.environ.get(_DONE) == str(os.getpid())
    bound = _bound_by_slurm(os.environ, len(usable), n_local)
    cores = (
        usable if done or bound else cores_of(usable, local_rank, n_local, _places_of_cores(usable))
    )
    if len(cores) < len(usable) and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
        os.environ[_DONE], done = str(os.getpid()), True
    if n_local > 1 and "OMP_NUM_THREADS" not in os.environ:
        threads = len(cores) if done or bound else max(1, len(cores) // n_local)
        os.environ["OMP_NUM_THREADS"] = str(threads)
        torch.set_num_threads(threads)
    return CoreShare(tuple(cores), done, torch.get_num_threads())


def cores_of(
    usable: Sequence[int], local_rank: int, n_local: int, places: Mapping[int, tuple[int, int]]
) -> tuple[int, ...]:
    """Return a local rank's part of the usable cores.

    Its cores are adjacent, and every rank gets the same number. If there are fewer cores than
    ranks, each rank gets all of them.

    Args:
        places: (package, core) of a core by its number, where it is known. Numbers with the same
            place are hardware threads of one core (often i and i + N/2), which stay together unless
            there are more ranks than cores.
    """

    def place(core: int) -> tuple[int, int]:
        return places.get(core, (0, core))

    ordered = sorted(usable, key=lambda core: (place(core), core))
    whole = [tuple(threads) for _, threads in groupby(ordered, key=place)]
    units = whole if len(whole) >= n_local else [(core,) for core in ordered]
    each = len(units) // n_local
    mine = units[local_rank * each : (local_rank + 1) * each] if each else units
    return tuple(sorted(core for unit in mine for core in unit))


def _usable_cores() -> tuple[int, ...]:
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def _places_of_cores(usable: Sequence[int], folder: Path = _TOPOLOGY) -> dict[int, tuple[int, int]]:
    """(package, core) of each usable core; empty where the system does not say it of all."""
    try:
        return {
            core: (
                int((folder / f"cpu{core}/topology/physical_package_id").read_text()),
                int((folder / f"cpu{core}/topology/core_id").read_text()),
            )
            for core in usable
        }
    except (OSError, ValueError):
        return {}


def _bound_by_slurm(environ: Mapping[str, str], n_usable: int, n_local: int) -> bool:
    """Return whether srun has bound this rank to no more cores than its part of the node's.

    SLURM_CPU_BIND_TYPE alone does not tell: it repeats the request, even if no plugin has carried
    it out.
    """
    kind = environ.get("SLURM_CPU_BIND_TYPE", "none").rstrip(":")
    on_node = int(environ.get("SLURM_CPUS_ON_NODE", os.cpu_count() or 1))
    return (
        is_task_of_srun(environ)
        and kind not in ("", "none")
        and n_usable <= max(1, on_node // n_local)
    )
