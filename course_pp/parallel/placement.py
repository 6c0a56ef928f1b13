"""Which cores and how many threads a rank uses, so that the ranks of one node do not fight over them."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from course_pp.parallel.world import get_world_info

__all__ = ["CoreShare", "cores_of", "share_cores"]

# Which process has been bound: a second call finds only its part, and must not divide it again.
_DONE = "COURSE_PP_PINNED_PID"


@dataclass(frozen=True)
class CoreShare:
    """What `share_cores` found or did.

    Attributes:
        cores: on which this rank may run, in order.
        pinned: whether the rank was bound to them here; otherwise it found itself bound, or shares them.
        threads: intra-operation threads of torch.
    """

    cores: tuple[int, ...]
    pinned: bool
    threads: int


def share_cores() -> CoreShare:
    """Bind this rank to its part of the node's usable cores, and give it a thread for each; call it before any work.

    Threads that exist already stay where they are; later ones inherit the binding. Nothing is bound where a node has
    fewer cores than ranks, where Slurm has bound each task to cores of its own (its task/affinity plugin does), and
    on systems other than Linux. OMP_NUM_THREADS wins where it is set; torchrun sets it to 1 for more than one rank.
    Safe to call repeatedly.
    """
    _, local_rank, world_size = get_world_info()
    n_local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    usable, done = _usable(), os.environ.get(_DONE) == str(os.getpid())
    cores = usable if done or _bound_by_slurm(os.environ) else cores_of(usable, local_rank, n_local)
    if len(cores) < len(usable) and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
        os.environ[_DONE], done = str(os.getpid()), True
    if "OMP_NUM_THREADS" not in os.environ:
        own = done or n_local == 1 or _bound_by_slurm(os.environ)
        threads = len(cores) if own else max(1, len(cores) // n_local)
        os.environ["OMP_NUM_THREADS"] = str(threads)
        torch.set_num_threads(threads)
    return CoreShare(tuple(cores), done, torch.get_num_threads())


def cores_of(usable: Sequence[int], local_rank: int, n_local: int) -> tuple[int, ...]:
    """Local rank's part of the usable cores: neighbours, as many for each; all of them if there are too few.

    Cores that do not divide are left to the system.
    """
    each = len(usable) // n_local
    return tuple(usable[local_rank * each : (local_rank + 1) * each]) if each else tuple(usable)


def _usable() -> tuple[int, ...]:
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def _bound_by_slurm(environ: Mapping[str, str]) -> bool:
    """Whether this rank is a task that srun has bound; under torchrun, the task is all ranks of the node."""
    under_a_launcher = any(name.startswith("TORCHELASTIC_") for name in environ)
    kind = environ.get("SLURM_CPU_BIND_TYPE", "none")
    return "SLURM_PROCID" in environ and not under_a_launcher and kind.rstrip(":") not in ("", "none")
